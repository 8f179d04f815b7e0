"""Sums and means whose derivative is counted with them, as autograd, `torch.compile` and `torch.func` follow them.

Their operators (trees.py, clusters.py) take two sides first and return the terms or the mean, and the derivatives of
the sum or the mean by both sides, empty where nobody asks. The backward is then a multiplication:

    roadmap::tree_gradient     the gradient at one side, from the one at the terms or at the mean
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roadmap.kernels.operators import FirstDerivative, define
from roadmap.kernels.paths import is_plain_call
from roadmap.kernels.rules import AP_SUM

Counted = tuple[Tensor, Tensor, Tensor]


def terms_or_loss(operator: Any, function: Callable[..., Counted], inputs: tuple[Any, ...]) -> Tensor:
    """What `operator` counts of `inputs` and of who needs its derivative; an ordinary call goes to the `function`."""
    hidden = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    needs = (x is not None and torch.is_grad_enabled() and (x.requires_grad or hidden) for x in inputs[:2])
    out: Tensor
    if torch.compiler.is_compiling():
        out, _, _ = operator(*inputs, *needs)
    else:
        out, _, _ = _Counted.apply(operator, function, *inputs, *needs)  # type: ignore[no-untyped-call]
    return out


class _Counted(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(operator: Any, function: Callable[..., Counted], *inputs: Any) -> Counted:
        found: Counted = (function if is_plain_call(inputs[0]) else operator)(*inputs)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Counted) -> None:
        ctx.mark_non_differentiable(*output[1:])
        _keep(ctx, inputs[2:], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        return None, None, *_derivative_by(_first_derivative, ctx, grad)


# --- the operator of their backward, and their derivative


def define_counted(library: Any, name: str, schema: str, function: Any, fake: Any) -> None:
    """Registers `roadmap::name` with the derivative that it returns."""
    define(library, name, schema, function, fake, _derivative, _keep)


def _gradient(grad: Tensor, found: Tensor, x: Tensor) -> Tensor:
    """The gradient at `x` from that at the terms, or at the mean; `found` is the derivative of the sum, or of the mean,
    by the front of `x`."""
    product = grad.reshape(-1)[AP_SUM] * found
    if len(found) == len(x):
        return product.to(x.dtype)
    whole = torch.zeros_like(x, memory_format=torch.contiguous_format)
    whole[: len(found)] = product
    return whole


def _fake_gradient(grad: Tensor, found: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _first_derivative(*inputs: Tensor) -> Tensor:
    found: Tensor = FirstDerivative.apply(_gradient_of_any_call, *inputs)  # type: ignore[no-untyped-call]
    return found


def _gradient_of_any_call(*inputs: Tensor) -> Tensor:
    found: Tensor = (_gradient if is_plain_call(inputs[0]) else torch.ops.roadmap.tree_gradient)(*inputs)
    return found


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Counted) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:], *inputs[:2])
    ctx.others = len(inputs) - 2


def _derivative_by(gradient: Any, ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    by_queries, by_gallery, queries, gallery = ctx.saved_tensors
    sides = (by_queries, queries), (by_gallery, gallery)
    both = (None if grad is None or x is None or not found.numel() else gradient(grad, found, x) for found, x in sides)
    return *both, *(None,) * ctx.others


def _derivative(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    return _derivative_by(torch.ops.roadmap.tree_gradient, ctx, grad)


def _library_of_operators() -> Any:
    library: Any = torch.library.Library("roadmap", "FRAGMENT")  # type: ignore[no-untyped-call]
    define(library, "tree_gradient", "(Tensor grad, Tensor found, Tensor x) -> Tensor", _gradient, _fake_gradient)
    return library


_library = _library_of_operators()  # the operators live as long as it does
