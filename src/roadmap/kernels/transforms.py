"""The operators for those who compile, trace or transform a call: `torch.compile`, `torch.func.grad`, `torch.vmap`.

`torch.compile` follows the operators by their registered derivatives. The transforms of `torch.func` want functions of
another kind, with everything that a backward reads among their outputs; these are here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roadmap.kernels import operators
from roadmap.kernels.rules import LossRule, RankRule

Compared = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]


def rank_loss(compared: Compared, rule: LossRule, as_terms: bool) -> Tensor:
    out: Tensor
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        out, _ = torch.ops.roadmap.rank_loss(*compared, *rule.flat, as_terms, True)
    else:
        out, _ = _RankLoss.apply(*compared, *rule.flat, as_terms, True)  # type: ignore[no-untyped-call]
    return out


def ap_from_scores(scores: Tensor, positives: Tensor, negatives: Tensor, rule: RankRule) -> Tensor:
    ap: Tensor
    plain = (*rule.flat, *rule.measure_or_ap.flat, True)
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        ap, _ = torch.ops.roadmap.ap_from_scores(scores, positives, negatives, *plain)
    else:
        ap, _ = _ApFromScores.apply(scores, positives, negatives, *plain)  # type: ignore[no-untyped-call]
    return ap


def cosine_scores(queries: Tensor, gallery: Tensor | None) -> Tensor:
    scores: Tensor
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        scores = torch.ops.roadmap.cosine_scores(queries, gallery)
    else:
        scores = _CosineScores.apply(queries, gallery)  # type: ignore[no-untyped-call]
    return scores


class _RankLoss(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = torch.ops.roadmap.rank_loss(*inputs)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        operators.keep_rank_loss(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        state, *compared = ctx.saved_tensors
        needs = (True, compared[1] is not None)
        inputs = grad, state, *compared, *ctx.plain, *needs
        dq, dg = operators.FirstDerivative.apply(torch.ops.roadmap.rank_loss_backward, *inputs)  # type: ignore[no-untyped-call]
        return dq, dg if needs[1] else None, *(None,) * (4 + len(ctx.plain))


class _ApFromScores(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = torch.ops.roadmap.ap_from_scores(*inputs)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        operators.keep_ap(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        backward = torch.ops.roadmap.ap_from_scores_backward
        return operators.FirstDerivative.apply(backward, grad, *ctx.saved_tensors), *(None,) * ctx.others  # type: ignore[no-untyped-call]


class _CosineScores(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(queries: Tensor, gallery: Tensor | None) -> Tensor:
        scores: Tensor = torch.ops.roadmap.cosine_scores(queries, gallery)
        return scores

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        operators.keep_cosines(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        queries, gallery = ctx.saved_tensors
        needs = (True, gallery is not None)
        backward = torch.ops.roadmap.cosine_scores_backward
        dq, dg = operators.FirstDerivative.apply(backward, grad, queries, gallery, *needs)  # type: ignore[no-untyped-call]
        return dq, dg if needs[1] else None
