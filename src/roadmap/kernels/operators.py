"""The kernels as registered operators: `torch.compile(fullgraph=True)`, `torch.export` and `torch.func` pass through.

    roadmap::rank_loss               a loss, or its terms, from embeddings; and what its backward reads
    roadmap::rank_loss_backward
    roadmap::ap_from_scores          AP of a score matrix, and its derivative
    roadmap::ap_from_scores_backward
    roadmap::cosine_scores           scores at float32 accuracy
    roadmap::cosine_scores_backward

An ordinary call does not pass here (`paths.is_plain_call`): the way through a registered operator costs more than the
kernels of a small batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from roadmap.kernels import chunks
from roadmap.kernels.calls import LossCall
from roadmap.kernels.implementations import (
    ap_and_slope,
    cosine_gradients,
    cosine_matrix,
    loss_and_state,
    loss_gradients,
)
from roadmap.kernels.paths import both_run_on_triton, is_small
from roadmap.kernels.rules import FLAT_SCHEMA, MEASURE_SCHEMA, RANKS_SCHEMA, TERMS, FlatRule, ranks_of, rule_of

SECOND_DERIVATIVE = (
    "roadmap's fused losses have no second derivative: the ranks are counted by kernels with a hand-written "
    "backward. Call backward() without create_graph=True, or build a double-differentiable loss from "
    "roadmap.losses.rank_ap.plain_average_precision."
)

_COMPARED = "Tensor queries, Tensor? gallery, Tensor query_labels, Tensor gallery_labels, Tensor? own"
_SCORED = "Tensor scores, Tensor positives, Tensor negatives"
_SCHEMAS = {
    "rank_loss": f"({_COMPARED}, {FLAT_SCHEMA}, bool as_terms, bool keep) -> (Tensor, Tensor)",
    "rank_loss_backward": (
        f"(Tensor grad, Tensor state, {_COMPARED}, {FLAT_SCHEMA}, bool as_terms, bool for_queries, bool for_gallery)"
        " -> (Tensor, Tensor)"
    ),
    "ap_from_scores": f"({_SCORED}, {RANKS_SCHEMA}, {MEASURE_SCHEMA}, bool with_slope) -> (Tensor, Tensor)",
    "ap_from_scores_backward": "(Tensor grad, Tensor slope, Tensor scores) -> Tensor",
    "cosine_scores": "(Tensor queries, Tensor? gallery) -> Tensor",
    "cosine_scores_backward": (
        "(Tensor grad, Tensor queries, Tensor? gallery, bool for_queries, bool for_gallery) -> (Tensor, Tensor)"
    ),
}


def _call_of(compared: Any, flat: Any, as_terms: bool) -> LossCall:
    queries, gallery, query_labels, gallery_labels, own = compared
    rule = rule_of(cast(FlatRule, tuple(flat)))
    return LossCall(queries, gallery, query_labels, gallery_labels, own, rule, as_terms)


def _pair(like: Tensor, gradients: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor, Tensor]:
    """An operator returns tensors: an empty one stands for none."""
    first, second = (like.new_empty(0) if g is None else g for g in gradients)
    return first, second


# --- what they do


def _rank_loss(*args: Any) -> tuple[Tensor, Tensor]:
    compared, flat, (as_terms, keep) = args[:5], args[5:-2], args[-2:]
    return loss_and_state(_call_of(compared, flat, as_terms), keep)


def _rank_loss_backward(grad: Tensor, state: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    compared, flat, (as_terms, *needs) = args[:5], args[5:-3], args[-3:]
    call = _call_of(compared, flat, as_terms)
    return _pair(grad, loss_gradients(call, state, grad, (needs[0], needs[1])))


def _ap_from_scores(scores: Tensor, positives: Tensor, negatives: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    ap, found = ap_and_slope(scores, positives, negatives, ranks_of(*args[:-1]), args[-1])
    return ap, scores.new_empty(0) if found is None else found


def _ap_from_scores_backward(grad: Tensor, slope: Tensor, scores: Tensor) -> Tensor:
    return grad[:, None] * slope


def _cosine_scores(queries: Tensor, gallery: Tensor | None) -> Tensor:
    return cosine_matrix(queries, gallery)[0]


def _cosine_scores_backward(
    grad: Tensor, queries: Tensor, gallery: Tensor | None, for_queries: bool, for_gallery: bool
) -> tuple[Tensor, Tensor]:
    return _pair(grad, cosine_gradients(grad, queries, gallery, (for_queries, for_gallery)))


# --- what comes out, for those who only trace


def _fake_rank_loss(*args: Any) -> tuple[Tensor, Tensor]:
    compared, flat, (as_terms, keep) = args[:5], args[5:-2], args[-2:]
    call = _call_of(compared, flat, as_terms)
    queries, (M, N) = call.queries, call.shape
    if both_run_on_triton(queries, call.gallery):
        from roadmap.kernels.triton.fused import buffer_size

        size = buffer_size(call, None, True) if keep and is_small(M, N) else 0
        out = queries.new_empty((TERMS,) if as_terms else (), dtype=torch.float32)
    else:
        dtype = _score_dtype(queries, call.gallery)
        size = chunks.state_numbers(M, N) * dtype.itemsize if keep else 0
        out = queries.new_empty((TERMS,), dtype=dtype)
    return out, queries.new_empty(size, dtype=torch.uint8)


def _fake_rank_loss_backward(grad: Tensor, state: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return _fake_gradients(grad, args[0], args[1], *args[-2:])


def _fake_gradients(
    grad: Tensor, queries: Tensor, gallery: Tensor | None, for_queries: bool, for_gallery: bool
) -> tuple[Tensor, Tensor]:
    wanted = (queries if for_queries else None), (gallery if for_gallery else None)
    first, second = (None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in wanted)
    return _pair(grad, (first, second))


def _fake_ap_from_scores(scores: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    shape = tuple(scores.shape) if args[-1] else (0,)
    return scores.new_empty(len(scores)), scores.new_empty(shape)


def _fake_cosine_scores(queries: Tensor, gallery: Tensor | None) -> Tensor:
    dtype = torch.float32 if both_run_on_triton(queries, gallery) else _score_dtype(queries, gallery)
    return queries.new_empty(len(queries), len(queries if gallery is None else gallery), dtype=dtype)


def _score_dtype(queries: Tensor, gallery: Tensor | None) -> torch.dtype:
    wide = torch.promote_types(queries.dtype, torch.float32)
    return wide if gallery is None else torch.promote_types(wide, gallery.dtype)


# --- their derivatives, for `torch.compile`


def keep_rank_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], *inputs[:5])
    ctx.plain = inputs[5:-1]


def _rank_loss_derivative(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    nothing = (None,) * (3 + len(ctx.plain) + 1)
    if grad is None:
        return None, None, *nothing
    state, *compared = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    dq, dg = torch.ops.roadmap.rank_loss_backward(grad, state, *compared, *ctx.plain, *needs)
    return dq if needs[0] else None, dg if needs[1] else None, *nothing


def keep_ap(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], inputs[0])
    ctx.others = len(inputs) - 1


def _ap_derivative(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    kept = ctx.saved_tensors
    return None if grad is None else torch.ops.roadmap.ap_from_scores_backward(grad, *kept), *(None,) * ctx.others


def keep_cosines(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _cosine_derivative(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    queries, gallery = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    dq, dg = torch.ops.roadmap.cosine_scores_backward(grad, queries, gallery, *needs)
    return dq if needs[0] else None, dg if needs[1] else None


def refuse_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(SECOND_DERIVATIVE)


class FirstDerivative(torch.autograd.Function):
    """The backward of an operator for the transforms of `torch.func`: a function and its arguments, and no more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Callable[..., Any], *inputs: Any) -> Any:
        return function(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    backward = staticmethod(refuse_second_derivative)


def define(
    library: Any, name: str, schema: str, function: Any, fake: Any, derivative: Any = refuse_second_derivative,
    keep: Any = None,
) -> None:  # fmt: skip
    """Registers `roadmap::name`: what it does, its shapes, and its derivative from what `keep` left."""
    library.define(name + schema)
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"roadmap::{name}", fake, lib=library)
    torch.library.register_autograd(f"roadmap::{name}", derivative, setup_context=keep, lib=library)


def _library_of_operators() -> Any:
    library: Any = torch.library.Library("roadmap", "DEF")  # type: ignore[no-untyped-call]
    for name, *functions in (
        ("rank_loss", _rank_loss, _fake_rank_loss, _rank_loss_derivative, keep_rank_loss),
        ("rank_loss_backward", _rank_loss_backward, _fake_rank_loss_backward),
        ("ap_from_scores", _ap_from_scores, _fake_ap_from_scores, _ap_derivative, keep_ap),
        ("ap_from_scores_backward", _ap_from_scores_backward, _ap_from_scores_backward),
        ("cosine_scores", _cosine_scores, _fake_cosine_scores, _cosine_derivative, keep_cosines),
        ("cosine_scores_backward", _cosine_scores_backward, _fake_gradients),
    ):
        define(library, name, _SCHEMAS[name], *functions)
    return library


_library = _library_of_operators()  # the operators live as long as it does
