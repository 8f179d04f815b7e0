"""The worst order of batches that are each ranked perfectly and put one after the other: what bounds the gap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
# Sets of batches that the exact worst order may look at.
STATES = 200_000


def run_of_precisions(p_before: int, n_before: int, positives: int) -> float:
    """Sum of precisions of a run of positives after p_before positives and n_before negatives."""
    rank_positive = p_before + np.arange(1, positives + 1)
    return float((rank_positive / (rank_positive + n_before)).sum())


def least_sum(positives: Iterable[int], negatives: Iterable[int], p_first: int, n_first: int) -> float:
    """The least sum of precisions over all orders of juxtaposed batches, after p_first positives, n_first negatives.

    Where that takes too long, `relaxed_sum`, which may lie below; `least_sum_is_exact` says which.
    """
    kinds = _kinds(positives, negatives)
    sizes, counts = list(kinds), list(kinds.values())
    if not _few(kinds):
        return relaxed_sum(list(kinds.elements()), p_first, n_first)
    run = lru_cache(maxsize=None)(run_of_precisions)
    # reached[taken]: the least sum after so many batches of each kind; batches of a kind need no order
    reached = {(0,) * len(sizes): 0.0}
    for _ in range(sum(counts)):
        onward: dict[tuple[int, ...], float] = {}
        for taken, total in reached.items():
            p = p_first + sum(t * size[0] for t, size in zip(taken, sizes, strict=True))
            n = n_first + sum(t * size[1] for t, size in zip(taken, sizes, strict=True))
            for kind, size in enumerate(sizes):
                if taken[kind] < counts[kind]:
                    after = (*taken[:kind], taken[kind] + 1, *taken[kind + 1 :])
                    onward[after] = min(onward.get(after, np.inf), total + run(p, n, size[0]))
        reached = onward
    return min(reached.values())


def least_sum_is_exact(positives: Iterable[int], negatives: Iterable[int]) -> bool:
    """Whether `least_sum` looks at every order, so that a ranking with that sum exists."""
    return _few(_kinds(positives, negatives))


def _kinds(positives: Iterable[int], negatives: Iterable[int]) -> Counter[tuple[int, int]]:
    """How many batches there are of each pair of sizes."""
    return Counter((int(p), int(n)) for p, n in zip(positives, negatives, strict=True))


def _few(kinds: Counter[tuple[int, int]]) -> bool:
    return bool(np.prod([count + 1.0 for count in kinds.values()]) <= STATES)


def relaxed_sum(batches: Sequence[tuple[int, int]], p_first: int, n_first: int) -> float:
    """Below `least_sum`: each positive gets the most negatives that any set of batches through by then releases."""
    most = np.zeros(1)
    for p, n in batches:
        most = best_split(most, np.append(np.zeros(p), float(n)), np.maximum, -np.inf)
    j = np.arange(1, len(most))
    return float(((p_first + j) / (p_first + j + n_first + most[:-1])).sum())


def best_split(left: Numbers, right: Numbers, choose: np.ufunc, nothing: float) -> Numbers:
    """out[k] = the chosen one of left[i] + right[k - i] over i: splits k positives among batches."""
    out = np.full(len(left) + len(right) - 1, nothing)
    for i, value in enumerate(right):
        choose(out[i : i + len(left)], left + value, out=out[i : i + len(left)])
    return out
