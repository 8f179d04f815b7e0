"""The kernels in an ordinary call, by autograd; nothing between the caller and the launches that need not be there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roadmap.kernels.calls import LossCall
from roadmap.kernels.devices import on_device_of
from roadmap.kernels.implementations import (
    ap_and_slope,
    cosine_gradients,
    cosine_matrix,
    loss_and_state,
    loss_gradients,
)
from roadmap.kernels.operators import refuse_second_derivative
from roadmap.kernels.paths import both_run_on_triton
from roadmap.kernels.precision import at_least_float32
from roadmap.kernels.rules import LossRule, RankRule


class FirstOrderOnly(torch.autograd.Function):
    """Hands a finished gradient on; refuses to be differentiated, in words a user can act on."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_second_derivative(ctx)


def _first_order(grad: Tensor | None, *sources: Tensor | None) -> Tensor | None:
    if grad is None or not torch.is_grad_enabled():
        return grad
    given = [s for s in sources if s is not None]
    checked: Tensor = FirstOrderOnly.apply(grad, *given)  # type: ignore[no-untyped-call]
    return checked


class RankLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        gallery: Tensor | None,
        query_labels: Tensor,
        gallery_labels: Tensor,
        own: Tensor | None,
        rule: LossRule,
        as_terms: bool,
    ) -> Tensor:
        # The function that made the gallery may say how many of its rows it hands a gradient on to.
        moving = None if gallery is None else getattr(gallery.grad_fn, "moving_rows", None)
        call = LossCall(queries, gallery, query_labels, gallery_labels, own, rule, as_terms, moving)
        needs = ctx.needs_input_grad[:2]
        ctx.rule = rule
        if both_run_on_triton(queries, gallery):
            from roadmap.kernels.triton import fused

            with on_device_of(queries):
                out, ctx.note, kept = fused.forward(call, needs)
            ctx.save_for_backward(*kept)
            return out
        ctx.note = None
        out, state = loss_and_state(call, any(needs))
        ctx.save_for_backward(queries, gallery, query_labels, gallery_labels, own, state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, needs = ctx.saved_tensors, ctx.needs_input_grad[:2]
        queries, gallery = kept[:2]
        with torch.no_grad():
            if ctx.note is None:
                query_labels, gallery_labels, own = kept[2:5]
                call = LossCall(queries, gallery, query_labels, gallery_labels, own, ctx.rule, True)
                dq, dg = loss_gradients(call, kept[5], grad, needs)
            else:
                from roadmap.kernels.triton import fused

                with on_device_of(queries):
                    dq, dg = fused.backward(ctx.note, kept, grad, needs)
        once = _first_order(dq, grad, queries, gallery), _first_order(dg, grad, queries, gallery)
        return *once, None, None, None, None, None


class ApFromScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, positives: Tensor, negatives: Tensor, rule: RankRule) -> Tensor:
        ap, slope = ap_and_slope(scores, positives, negatives, rule, ctx.needs_input_grad[0])
        ctx.save_for_backward(scores, slope)
        return ap

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        scores, slope = ctx.saved_tensors
        with torch.no_grad():
            out = grad[:, None] * slope
        return _first_order(out, grad, scores), None, None, None


class CosineScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, gallery: Tensor | None) -> Tensor:
        scores, ctx.units = cosine_matrix(queries, gallery)
        ctx.save_for_backward(queries, gallery)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        queries, gallery = ctx.saved_tensors
        if torch.is_grad_enabled() and not both_run_on_triton(queries, gallery):
            return _differentiable_gradients(grad, queries, gallery, ctx.needs_input_grad)
        with torch.no_grad():
            dq, dg = cosine_gradients(grad, queries, gallery, ctx.needs_input_grad, ctx.units)
        return _first_order(dq, grad, queries, gallery), _first_order(dg, grad, queries, gallery)


def _differentiable_gradients(
    grad: Tensor, queries: Tensor, gallery: Tensor | None, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients at both sides, by autograd, for a second derivative."""
    both = (queries,) if gallery is None else (queries, gallery)
    units = [x / torch.linalg.vector_norm(x, dim=1, keepdim=True) for x in (at_least_float32(x) for x in both)]
    wider = torch.promote_types(units[0].dtype, units[-1].dtype)
    scores = units[0].to(wider) @ units[-1].to(wider).T
    wanted = [x for x, need in zip(both, needs, strict=False) if need]
    found = iter(torch.autograd.grad(scores, wanted, grad, create_graph=True))
    return next(found) if needs[0] else None, next(found) if needs[1] else None
