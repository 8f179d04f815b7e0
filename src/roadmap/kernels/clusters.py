"""The cluster term of a loss (losses/clusters.py) in kernels of its own, where `both_run_on_triton`: its operator.

roadmap::cluster_terms     sum of -log softmax(cosine / temperature) over the queries whose class is known, their
                           number; or the one over the other; the derivatives (counted.py)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roadmap.kernels.counted import Counted, define_counted, terms_or_loss
from roadmap.kernels.devices import on_device_of
from roadmap.kernels.rules import TERMS


def cluster_terms(queries: Tensor, proxies: Tensor, classes: Tensor, temperature: float) -> Tensor:
    """(TERMS,): the sum and the count stand where those of AP do; the sum has a gradient.

    Args:
        queries, proxies: (M, D) and (C, D), of any length and float dtype but float64; a vector without direction makes
            the sum NaN.
        classes: (M,) integers in [0, C), or -1: not known, the query does not count. Others make the sum NaN.
    """
    return _terms_or_loss(queries, proxies, classes, float(temperature), True)


def cluster_loss(queries: Tensor, proxies: Tensor, classes: Tensor, temperature: float) -> Tensor:
    """The mean over the queries whose class is known, a scalar, 0 where none is; arguments as in `cluster_terms`."""
    return _terms_or_loss(queries, proxies, classes, float(temperature), False)


def _terms_or_loss(*inputs: Any) -> Tensor:
    return terms_or_loss(torch.ops.roadmap.cluster_terms, _operator, inputs)


def _operator(
    queries: Tensor, proxies: Tensor, classes: Tensor, temperature: float, as_terms: bool, *needs: bool
) -> Counted:
    from roadmap.kernels.triton import clusters

    for_queries, for_proxies = needs
    with on_device_of(queries):
        return clusters.terms_and_gradients(
            queries, proxies, classes, temperature, as_terms, (for_queries, for_proxies)
        )


def _fake(
    queries: Tensor, proxies: Tensor, classes: Tensor, temperature: float, as_terms: bool, *needs: bool
) -> Counted:
    by_queries, by_proxies = (
        x.new_empty(tuple(x.shape) if wanted else (0,), dtype=torch.float32)
        for x, wanted in zip((queries, proxies), needs, strict=True)
    )
    return queries.new_empty((TERMS,) if as_terms else (), dtype=torch.float32), by_queries, by_proxies


def _library_of_operators() -> Any:
    library: Any = torch.library.Library("roadmap", "FRAGMENT")  # type: ignore[no-untyped-call]
    schema = (
        "(Tensor queries, Tensor proxies, Tensor classes, float temperature, bool as_terms, bool for_queries, "
        "bool for_proxies) -> (Tensor, Tensor, Tensor)"
    )
    define_counted(library, "cluster_terms", schema, _operator, _fake)
    return library


_library = _library_of_operators()  # the operators live as long as it does
