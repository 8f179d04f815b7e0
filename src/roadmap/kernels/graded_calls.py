"""Graded measures with their derivative, as an operator that autograd, `torch.compile` and `torch.func` follow."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from roadmap.kernels.graded import GradedRule, Measure, PullRule, values_and_slope
from roadmap.kernels.operators import FirstDerivative, define
from roadmap.kernels.rules import RANKS_SCHEMA, RankRule


def graded_from_scores(scores: Tensor, grades: Tensor, rule: GradedRule) -> Tensor:
    """The measure of every query, (M,), with its derivative by the scores; 0 where no item has a grade above 0.

    Args:
        scores: (M, N), float32 or float64, higher is nearer.
        grades: (M, N), of the same type: above 0 for positives, 0 for negatives, `LEFT_OUT` for others.
    """
    values: Tensor
    if torch.compiler.is_compiling():
        values, _ = torch.ops.roadmap.graded_from_scores(scores, grades, *_flat(rule), True)
        return values
    wanted = scores.requires_grad or torch._C._are_functorch_transforms_active()
    plain = *_flat(rule), wanted and torch.is_grad_enabled()
    values, _ = _GradedFromScores.apply(scores, grades, *plain)  # type: ignore[no-untyped-call]
    return values


class _GradedFromScores(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = torch.ops.roadmap.graded_from_scores(*inputs)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
        backward = torch.ops.roadmap.graded_from_scores_backward
        found = None if grad is None else FirstDerivative.apply(backward, grad, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return found, *(None,) * ctx.others


# --- the operator


def _flat(rule: GradedRule) -> tuple[Any, ...]:
    """The rule as the plain arguments that an operator takes."""
    ranks = ("", 1.0, 0.0, 0.0, 0.0, 0.0) if rule.ranks is None else rule.ranks.flat
    pull = [] if rule.pull is None else [rule.pull.beta, rule.pull.gamma, rule.pull.leak]
    return rule.measure, rule.exponential, *ranks, pull


def _rule_of(measure: str, exponential: bool, *rest: Any) -> GradedRule:
    *ranks, pull = rest
    counted = RankRule(*ranks) if ranks[0] else None
    return GradedRule(cast(Measure, measure), counted, PullRule(*pull) if pull else None, exponential)


def _operator(scores: Tensor, grades: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    values, slope = values_and_slope(scores, grades, _rule_of(*rest[:-1]), rest[-1])
    return values, scores.new_empty(0) if slope is None else slope


def _fake(scores: Tensor, grades: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return scores.new_empty(len(scores)), scores.new_empty(tuple(scores.shape) if rest[-1] else (0,))


def _gradient(grad: Tensor, slope: Tensor, scores: Tensor) -> Tensor:
    return grad[:, None] * slope


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], inputs[0])
    ctx.others = len(inputs) - 1


def _derivative(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    found = None if grad is None else torch.ops.roadmap.graded_from_scores_backward(grad, *ctx.saved_tensors)
    return found, *(None,) * ctx.others


def _library_of_operators() -> Any:
    library: Any = torch.library.Library("roadmap", "FRAGMENT")  # type: ignore[no-untyped-call]
    called = (
        f"(Tensor scores, Tensor grades, str measure, bool exponential, {RANKS_SCHEMA}, float[] pull, bool with_slope)"
    )
    define(library, "graded_from_scores", f"{called} -> (Tensor, Tensor)", _operator, _fake, _derivative, _keep)
    backward = "(Tensor grad, Tensor slope, Tensor scores) -> Tensor"
    define(library, "graded_from_scores_backward", backward, _gradient, _gradient)
    return library


_library = _library_of_operators()  # the operators live as long as it does
