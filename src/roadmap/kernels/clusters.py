"""The cluster term of a loss (losses/clusters.py) in kernels of its own, where `both_run_on_triton`: its operator.

    roadmap::cluster_terms     sum of -log softmax(cosine / temperature) over the queries whose class is known, their
                               number; or the one over the other; the derivatives

As with label trees the derivative is counted with the sum or the mean, and the backward is `roadmap::tree_gradient`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roadmap.kernels.devices import on_device_of
from roadmap.kernels.paths import is_plain_call
from roadmap.kernels.rules import TERMS
from roadmap.kernels.trees import _derivative, _derivative_by, _Gradient, _keep


def cluster_terms(queries: Tensor, proxies: Tensor, classes: Tensor, temperature: float) -> Tensor:
    """(TERMS,): the sum and the count stand where those of AP do; the sum has a gradient.

    Args:
        queries, proxies: (M, D) and (C, D), of any length and float dtype but float64; a vector without direction makes
            the sum NaN.
        classes: (M,) integers in [0, C), or -1: not known, the query does not count. Others make the sum NaN.
    """
    return _terms_or_loss(queries, proxies, classes, temperature, True)


def cluster_loss(queries: Tensor, proxies: Tensor, classes: Tensor, temperature: float) -> Tensor:
    """The mean over the queries whose class is known, a scalar, 0 where none is; arguments as in `cluster_terms`."""
    return _terms_or_loss(queries, proxies, classes, temperature, False)


def _terms_or_loss(queries: Tensor, proxies: Tensor, classes: Tensor, temperature: float, as_terms: bool) -> Tensor:
    hidden = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    needs = (torch.is_grad_enabled() and (x.requires_grad or hidden) for x in (queries, proxies))
    inputs = (queries, proxies, classes, float(temperature), as_terms, *needs)
    out: Tensor
    if torch.compiler.is_compiling():
        out, _, _ = torch.ops.roadmap.cluster_terms(*inputs)
    else:
        out, _, _ = _ClusterTerms.apply(*inputs)  # type: ignore[no-untyped-call]
    return out


class _ClusterTerms(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        function = _operator if is_plain_call(inputs[0]) else torch.ops.roadmap.cluster_terms
        found: tuple[Tensor, Tensor, Tensor] = function(*inputs)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        return _derivative_by(_Gradient.apply, ctx, grad)


def _operator(
    queries: Tensor,
    proxies: Tensor,
    classes: Tensor,
    temperature: float,
    as_terms: bool,
    for_queries: bool,
    for_proxies: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from roadmap.kernels.triton import clusters

    with on_device_of(queries):
        needs = for_queries, for_proxies
        return clusters.terms_and_gradients(queries, proxies, classes, temperature, as_terms, needs)


def _fake(
    queries: Tensor,
    proxies: Tensor,
    classes: Tensor,
    temperature: float,
    as_terms: bool,
    for_queries: bool,
    for_proxies: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    by_queries, by_proxies = (
        x.new_empty(tuple(x.shape) if wanted else (0,), dtype=torch.float32)
        for x, wanted in ((queries, for_queries), (proxies, for_proxies))
    )
    return queries.new_empty((TERMS,) if as_terms else (), dtype=torch.float32), by_queries, by_proxies


def _library_of_operators() -> Any:
    library: Any = torch.library.Library("roadmap", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(
        "cluster_terms(Tensor queries, Tensor proxies, Tensor classes, float temperature, bool as_terms, "
        "bool for_queries, bool for_proxies) -> (Tensor, Tensor, Tensor)"
    )
    library.impl("cluster_terms", _operator, "CompositeExplicitAutograd")
    torch.library.register_fake("roadmap::cluster_terms", _fake, lib=library)
    torch.library.register_autograd("roadmap::cluster_terms", _derivative, setup_context=_keep, lib=library)
    return library


_library = _library_of_operators()  # the operators live as long as it does
