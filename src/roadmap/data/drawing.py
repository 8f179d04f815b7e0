"""Which classes, or pictures, fall to a split: drawn by their names, so that adding one moves no other.

A name is hashed to a number in [0, 1), the same on every machine. Those below the fraction are drawn. How many they are
varies as with any throw of dice, about sqrt(n f (1 - f)) either way; what does not vary is the lot of a name, whatever
stands beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FEWEST = 2  # classes on either side, where there are four: with one, every neighbour is right


def lot(name: str, purpose: str, seed: int = 0) -> float:
    """A number in [0, 1) for a name. Another purpose or another seed is another draw."""
    digest = hashlib.sha256(f"{purpose}\n{seed}\n{name}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def drawn_classes(names: Sequence[str], fraction: float, purpose: str, seed: int = 0) -> NDArray[np.bool_]:
    """Which of the distinct names are drawn: those whose lot is below the fraction.

    At least FEWEST are drawn and as many are not (one and one of two or three names). Where the lots give fewer, the
    names with the nearest lots make up for it: only then can a name that is added move another.
    """
    lots = [lot(name, purpose, seed) for name in names]
    order = sorted(range(len(names)), key=lambda i: (lots[i], names[i]))
    fewest = min(FEWEST, len(names) // 2)
    count = min(max(sum(number < fraction for number in lots), fewest), len(names) - fewest)
    drawn = np.zeros(len(names), dtype=np.bool_)
    drawn[order[:count]] = True
    return drawn


def drawn_pictures(paths: Sequence[str], fraction: float, purpose: str, seed: int = 0) -> NDArray[np.bool_]:
    """Which pictures of one class are drawn: the fraction of them with the lowest lots, at least FEWEST.

    Boxes of one picture go together. None are drawn where fewer than FEWEST would be left. A picture that is added
    moves at most one other.
    """
    lots = np.asarray([lot(path, purpose, seed) for path in paths])
    count = max(FEWEST, round(fraction * len(paths)))
    if count >= len(paths):
        return np.zeros(len(paths), dtype=np.bool_)
    drawn: NDArray[np.bool_] = lots <= np.sort(lots)[count - 1]
    return drawn if (~drawn).sum() >= FEWEST else np.zeros(len(paths), dtype=np.bool_)
