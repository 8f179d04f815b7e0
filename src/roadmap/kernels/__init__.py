"""How ranks are counted fast. Chosen by device and size; the losses above see three functions.

    loss_from_embeddings   GPU: SupAP or SmoothAP and calibration in one pass, in linear memory
    ap_from_scores         any device: AP of a score matrix, a block or a row at a time
    cosine_scores          GPU: scores at float32 accuracy, whatever TF32 setting the process runs under

`import roadmap.kernels` needs torch alone; Triton is imported when a GPU tensor first arrives. With TRITON_INTERPRET=1
the Triton kernels also take CPU tensors, which is how they are tested without a GPU.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from roadmap.kernels import blocked
from roadmap.kernels.rules import CalibrationRule, LossRule, RankRule

__all__ = [
    "CalibrationRule",
    "LossRule",
    "RankRule",
    "ap_from_scores",
    "cosine_scores",
    "loss_from_embeddings",
    "runs_on_triton",
]

# Up to here the (M, N) scores are kept (8 MiB) and the fewest launches win; beyond, tiles and linear memory do.
SMALL = 1 << 21


_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def runs_on_triton(x: Tensor) -> bool:
    """Whether the Triton kernels take `x`: on a GPU, not float64 (whose users want more than float32), not empty."""
    on_device = x.is_cuda or (x.device.type == "cpu" and _INTERPRETING)
    return on_device and x.dtype != torch.float64 and x.numel() > 0 and _TRITON_INSTALLED


# The kernels are opaque to the compiler: it ends its graph before them and resumes after.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def loss_from_embeddings(
    queries: Tensor, query_labels: Tensor, gallery: Tensor | None, gallery_labels: Tensor, rule: LossRule
) -> Tensor:
    """The loss that `rule` describes over (M, D) queries and an (N, D) gallery (None: the batch itself).

    Vectors of any length and float dtype come in; a zero or non-finite one makes the loss NaN.
    """
    loss: Tensor = _LossFromEmbeddings.apply(queries, gallery, query_labels, gallery_labels, rule)  # type: ignore[no-untyped-call]
    return loss


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ap_from_scores(scores: Tensor, positives: Tensor, negatives: Tensor, rule: RankRule) -> Tensor:
    """AP_i under the rule's H⁺ and H⁻, (M,), with its derivative; 0 where P_i is empty. Float32 or float64 scores."""
    ap: Tensor = _ApFromScores.apply(scores, positives, negatives, rule)  # type: ignore[no-untyped-call]
    return ap


@torch.compiler.disable  # type: ignore[untyped-decorator]
def cosine_scores(queries: Tensor, gallery: Tensor | None) -> Tensor:
    """cos(q_i, g_j), (M, N) float32; `gallery` None compares the batch with itself. GPU only (`runs_on_triton`)."""
    scores: Tensor = _CosineScores.apply(queries, gallery)  # type: ignore[no-untyped-call]
    return scores


class _FirstOrderOnly(torch.autograd.Function):
    """Hands a finished gradient on; refuses to be differentiated, in words a user can act on."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "roadmap's fused losses have no second derivative: the ranks are counted by kernels with a hand-written "
            "backward. Call backward() without create_graph=True, or build a double-differentiable loss from "
            "roadmap.losses.rank_ap.plain_average_precision."
        )


def _first_order(grad: Tensor | None, *sources: Tensor | None) -> Tensor | None:
    if grad is None or not torch.is_grad_enabled():
        return grad
    given = [s for s in sources if s is not None]
    checked: Tensor = _FirstOrderOnly.apply(grad, *given)  # type: ignore[no-untyped-call]
    return checked


class _ApFromScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, positives: Tensor, negatives: Tensor, rule: RankRule) -> Tensor:
        if runs_on_triton(scores):
            from roadmap.kernels.triton.rows import ap_and_slope
        else:
            ap_and_slope = blocked.ap_and_slope
        ap, slope = ap_and_slope(scores, positives, negatives, rule, ctx.needs_input_grad[0])
        ctx.save_for_backward(scores, slope)
        return ap

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        scores, slope = ctx.saved_tensors
        with torch.no_grad():
            out = grad[:, None] * slope
        return _first_order(out, grad, scores), None, None, None


class _LossFromEmbeddings(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, gallery: Tensor | None, query_labels: Tensor, gallery_labels: Tensor, rule: LossRule
    ) -> Tensor:
        from roadmap.kernels.triton import fused

        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        small = len(query_labels) * len(gallery_labels) <= SMALL
        with _on_device_of(queries):
            loss, ctx.state, kept = fused.forward(queries, query_labels, gallery, gallery_labels, rule, needs, small)
        ctx.save_for_backward(*kept)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        from roadmap.kernels.triton import fused

        kept = ctx.saved_tensors
        queries, gallery = kept[:2]
        with torch.no_grad():
            dq, dg = fused.backward(ctx.state, kept, grad, (ctx.needs_input_grad[0], ctx.needs_input_grad[1]))
        return _first_order(dq, grad, queries, gallery), _first_order(dg, grad, queries, gallery), None, None, None


class _CosineScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, gallery: Tensor | None) -> Tensor:
        from roadmap.kernels.triton import small

        with _on_device_of(queries):
            scores, ctx.q, ctx.g = small.cosine_scores(queries, gallery)
        ctx.save_for_backward(queries, gallery)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        from roadmap.kernels.triton import small
        from roadmap.kernels.triton.launch import Arena

        queries, gallery = ctx.saved_tensors
        for_queries, for_gallery = ctx.needs_input_grad
        with torch.no_grad():
            dq = torch.empty_like(queries, memory_format=torch.contiguous_format) if for_queries else None
            dg = torch.empty_like(gallery, memory_format=torch.contiguous_format) if for_gallery else None
            small.add_score_gradients(Arena(grad.device), grad.contiguous(), ctx.q, ctx.g, dq, dg)
        return _first_order(dq, grad, queries, gallery), _first_order(dg, grad, queries, gallery)


def _on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Launches go to the current device; this makes it the tensor's, where it is another."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
