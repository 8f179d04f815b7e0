"""What runs: Triton kernels where they take the tensors, plain torch elsewhere. Tensors in and out, no autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roadmap.kernels import blocked, chunks
from roadmap.kernels.calls import LossCall
from roadmap.kernels.devices import on_device_of
from roadmap.kernels.paths import both_run_on_triton, is_small, runs_on_triton
from roadmap.kernels.precision import full_float32
from roadmap.kernels.rules import RankRule
from roadmap.kernels.scores import embedding_gradient, score_rows, units_of

Gradients = tuple[Tensor | None, Tensor | None]


def loss_and_state(call: LossCall, keep: bool) -> tuple[Tensor, Tensor]:
    """The loss or its terms (plain torch: always the terms), and the bytes that `loss_gradients` reads.

    None where their number hangs on the labels: whoever traces the call must know it beforehand.
    """
    if not both_run_on_triton(call.queries, call.gallery):
        return chunks.terms(call, keep)
    from roadmap.kernels.triton import fused

    with on_device_of(call.queries):
        out, _, kept = fused.forward(call, (keep, keep and call.gallery is not None))
    buffer = kept[-1]
    assert buffer is not None
    return out, buffer if keep and is_small(*call.shape) else buffer.new_empty(0)


def loss_gradients(call: LossCall, state: Tensor, upstream: Tensor, needs: tuple[bool, bool]) -> Gradients:
    """Gradients at queries and gallery, from the one at what `loss_and_state` returned."""
    if not both_run_on_triton(call.queries, call.gallery):
        return chunks.gradients(call, state, upstream, needs)
    from roadmap.kernels.triton import fused

    with on_device_of(call.queries):
        return fused.backward_of_buffer(call, state, upstream, needs)


def ap_and_slope(
    scores: Tensor, positives: Tensor, negatives: Tensor, rule: RankRule, with_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """AP_i, (M,), 0 where P_i is empty; and ∂AP_i/∂s_ij, (M, N), when asked for."""
    if not runs_on_triton(scores):
        return blocked.ap_and_slope(scores, positives, negatives, rule, with_slope)
    from roadmap.kernels.triton import rows

    with on_device_of(scores):
        return rows.ap_and_slope(scores, positives, negatives, rule, with_slope)


def cosine_matrix(queries: Tensor, gallery: Tensor | None) -> tuple[Tensor, Any]:
    """(M, N) scores, and the unit vectors of both sides, as `cosine_gradients` takes them."""
    if both_run_on_triton(queries, gallery):
        from roadmap.kernels.triton import small

        with on_device_of(queries):
            scores, *units = small.cosine_scores(queries, gallery)
        return scores, units
    with torch.autocast(queries.device.type, enabled=False), full_float32():
        q, g = units_of(queries, gallery)
        return score_rows(q.vectors, g), (q, g)


def cosine_gradients(
    grad: Tensor, queries: Tensor, gallery: Tensor | None, needs: tuple[bool, bool], units: Any = None
) -> Gradients:
    """Gradients at queries and gallery, from the one at their scores."""
    if both_run_on_triton(queries, gallery):
        return _triton_cosine_gradients(grad, queries, gallery, needs, units)
    with torch.autocast(queries.device.type, enabled=False), full_float32():
        q, g = units_of(queries, gallery, find_copies=False) if units is None else units
        if gallery is None:
            return embedding_gradient(grad @ g.vectors + grad.T @ q.vectors, q, queries), None
        return (
            embedding_gradient(grad @ g.vectors, q, queries) if needs[0] else None,
            embedding_gradient(grad.T @ q.vectors, g, gallery) if needs[1] else None,
        )


def _triton_cosine_gradients(
    grad: Tensor, queries: Tensor, gallery: Tensor | None, needs: tuple[bool, bool], units: Any
) -> Gradients:
    from roadmap.kernels.triton import small, split_gradients
    from roadmap.kernels.triton.launch import Arena

    with on_device_of(queries):
        q, g = small.cosine_units(queries, gallery) if units is None else units
        dq, dg = (
            torch.empty_like(x, memory_format=torch.contiguous_format) if x is not None and need else None
            for x, need in zip((queries, gallery), needs, strict=True)
        )
        if is_small(*grad.shape):
            small.add_score_gradients(Arena(grad.device), grad.contiguous(), q, g, dq, dg)
        else:
            split_gradients.add_split_gradients(grad.contiguous(), q, g, dq, dg)
    return dq, dg
