"""Random numbers that are a pure function of integers, the same on every machine and numpy version.

numpy promises that the raw bits of its bit generators never change, and promises nothing of the kind for what
`Generator` makes of them (NEP 19). Orders and crops are therefore built here from raw bits alone, so that a run
resumed elsewhere, years later, sees the same batches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def raw_bits(count: int, *key: int) -> NDArray[np.uint64]:
    """`count` 64-bit numbers, a pure function of the non-negative integers `key`."""
    if any(part < 0 for part in key):
        raise ValueError(f"seeds, epochs and steps must be >= 0, got {key}")
    bits: NDArray[np.uint64] = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return bits


def permutation(count: int, *key: int) -> NDArray[np.int64]:
    """A permutation of 0..count-1: the order of `count` random 64-bit keys."""
    return np.argsort(raw_bits(count, *key), kind="stable").astype(np.int64)


def uniforms(count: int, *key: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) with 53 random bits each."""
    numbers: NDArray[np.float64] = (raw_bits(count, *key) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers
