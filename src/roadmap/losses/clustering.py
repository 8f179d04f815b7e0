"""Groups that nobody labelled: features without what their class explains, and k-means on them."""

from __future__ import annotations

import torch
from torch import Tensor

from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_count, check_embeddings, check_labels


def class_standardised(x: Tensor, labels: Tensor) -> Tensor:
    """z_i = (x_i - mean of its class) / standard deviation of its class, dimension by dimension.

    What is left is what varies within classes, in units in which all classes vary alike (Roth et al., ICCV 2019,
    section 3.2). A dimension that does not vary in a class, as in a class of one picture, is 0.

    Args:
        x: (N, D).
        labels: (N,) integers.
    """
    check_embeddings("x", x)
    check_labels("labels", labels, "x", x)
    x = at_least_float32(x)
    classes, group = torch.unique(labels, return_inverse=True)
    centred = x - group_means(x, group, len(classes))[group]
    deviation = group_means(centred.square(), group, len(classes)).sqrt()
    varies = deviation > 1e-6 * x.abs().amax().clamp(min=torch.finfo(x.dtype).tiny)  # else it is rounding
    scale = torch.where(varies, deviation, torch.inf)
    return centred / scale[group]


def group_means(x: Tensor, group: Tensor, count: int) -> Tensor:
    """(count, D): the mean of the rows of each group, 0 for an empty one; the same bits each time, on a GPU too."""
    sizes = torch.bincount(group, minlength=count)
    order = group.argsort(stable=True)
    sums = torch.segment_reduce(x[order], "sum", lengths=sizes, initial=0, unsafe=True)
    return sums / sizes.clamp(min=1)[:, None]


def kmeans(x: Tensor, clusters: int, generator: torch.Generator, iterations: int = 20) -> Tensor:
    """(N,): the cluster of each row, from 0, by Lloyd's algorithm from a k-means++ start.

    A cluster that loses all its rows starts again at the row that is furthest from its centre. The draws of `generator`
    decide everything.

    Args:
        x: (N, D).
        clusters: no more than there are rows.
        generator: of the CPU, wherever `x` is.
        iterations: at most.
    """
    check_embeddings("x", x)
    check_count("clusters", clusters, at_least=1)
    check_count("iterations", iterations, at_least=1)
    if clusters > len(x):
        raise ValueError(f"{len(x)} pictures cannot be put into {clusters} clusters; ask for fewer")
    x = at_least_float32(x)
    centres = x[_spread_rows(x, clusters, generator)]
    nearest = _distances(x, centres).argmin(1)
    for _ in range(iterations):
        centres = group_means(x, nearest, clusters)
        distances = _distances(x, centres)
        empty = (torch.bincount(nearest, minlength=clusters) == 0).nonzero().flatten()
        distances[:, empty] = torch.inf
        found = distances.argmin(1)
        if len(empty):
            furthest = distances.gather(1, found[:, None]).flatten().argsort(descending=True, stable=True)
            found[furthest[: len(empty)]] = empty
        if torch.equal(found, nearest):
            break
        nearest = found
    return nearest


def _spread_rows(x: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Rows to start from (k-means++): each is drawn by its squared distance to the nearest one drawn before it."""
    draws = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    rows = [min(int(draws[0] * len(x)), len(x) - 1)]
    distances = _distances(x, x[rows]).flatten()
    for draw in draws[1:]:
        distances[rows] = 0
        sums = distances.double().cpu().cumsum(0)
        # where all rows that are left equal one that was drawn, any will do
        place = int(torch.searchsorted(sums, draw * sums[-1], right=True)) if sums[-1] > 0 else len(x)
        rows.append(place if place < len(x) else next(i for i in range(len(x)) if i not in rows))
        distances = torch.minimum(distances, _distances(x, x[rows[-1:]]).flatten())
    return rows


def _distances(x: Tensor, centres: Tensor) -> Tensor:
    """(N, K) squared distances."""
    squares = x.square().sum(1, keepdim=True) + centres.square().sum(1) - 2 * x @ centres.T
    return squares.clamp(min=0)
