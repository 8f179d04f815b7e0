"""Which pictures meet in a batch: m per class, and SOP's pairs of categories.

Both orders are pure functions of (seed, epoch): every rank, on every machine, computes the same global batches and
takes its slice. The state is one number, `position`, the count of global batches handed out since the start;
`seek` moves it: the run resumes exactly, at any world size that divides the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from roadmap.data.randomness import permutation
from roadmap.data.records import Ints

T = TypeVar("T", bound=np.generic)

# Streams of randomness that must not meet, all below one seed.
_ROUNDS, _EXTRAS, _PICTURES, _PAIRS = range(4)


class _Shared(Sampler[list[int]]):
    """How global batches are divided among ranks, and where the run stands."""

    def __init__(self, batch_size: int, batches: int, world_size: int, rank: int) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in 0..world_size-1, got rank {rank} of {world_size}")
        if batch_size % world_size:
            raise ValueError(
                f"the global batch of {batch_size} cannot be shared equally by {world_size} ranks; "
                "choose a batch size that is a multiple of the world size"
            )
        self.batch_size, self.batches = batch_size, batches
        self._world_size, self._rank, self._position = world_size, rank, 0
        self._epoch: tuple[int, Ints] | None = None

    def epoch_batches(self, epoch: int) -> Ints:
        """(batches, batch_size) picture indices of a whole epoch, for all ranks together."""
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._order(epoch)
        return self._epoch[1]

    def _order(self, epoch: int) -> Ints:
        raise NotImplementedError

    @property
    def position(self) -> int:
        return self._position

    def share(self, batch: NDArray[T]) -> NDArray[T]:
        """This rank's part of a global batch, or of anything that has one entry per picture of it."""
        share = self.batch_size // self._world_size
        return batch[self._rank * share : (self._rank + 1) * share]

    def seek(self, position: int) -> None:
        """The batch after the first `position` is the next."""
        if position < 0:
            raise ValueError(f"a position is a number of batches handed out, got {position}")
        self._position = position

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches from `position` to the end of its epoch; `position` counts those handed out."""
        epoch, first = divmod(self.position, self.batches)
        for batch in self.epoch_batches(epoch)[first:]:
            self.seek(self.position + 1)
            yield [int(i) for i in self.share(batch)]


class MPerClass(_Shared):
    """Batches of batch_size / per_class distinct classes with per_class pictures each, class after class.

    In an epoch, and over epochs, no class is visited twice more than another. A class shows all its pictures before
    it repeats one; a batch holds a picture twice only where its class has fewer than per_class. Ranks take
    consecutive slices, so a class stays on one rank where per_class divides the slice.

    Args:
        labels: (N,) class of each picture; any integers.
        batch_size: pictures in the global batch, over all ranks.
        per_class: m, pictures of each class.
        batches: batches per epoch; None for N // batch_size.
        seed: with the epoch, all that the order depends on.
        world_size: ranks that share a batch.
        rank: which slice this one takes.
    """

    def __init__(
        self,
        labels: ArrayLike,
        batch_size: int,
        per_class: int = 4,
        batches: int | None = None,
        seed: int = 0,
        world_size: int = 1,
        rank: int = 0,
    ) -> None:
        self._classes = _ClassPictures(labels)
        if per_class < 1 or batch_size < 1 or batch_size % per_class:
            raise ValueError(f"batch_size must be a multiple of per_class, got {batch_size} and {per_class}")
        self.per_class, self.seed = per_class, seed
        self._visits = batch_size // per_class
        if self._visits > len(self._classes.labels):
            raise ValueError(
                f"a batch of {batch_size} with {per_class} per class needs {self._visits} classes, there are "
                f"{len(self._classes.labels)}; use a smaller batch or more pictures per class"
            )
        if batches is not None and batches < 1:
            raise ValueError(f"batches must be at least 1, got {batches}")
        super().__init__(batch_size, batches or max(1, self._classes.count // batch_size), world_size, rank)

    def _order(self, epoch: int) -> Ints:
        visits = _balanced_visits(len(self._classes.labels), self._visits, self.batches, epoch, (self.seed, 0))
        pictures = self._classes.pictures_for(visits, self.per_class, epoch, (self.seed, 0))
        return pictures.reshape(self.batches, self.batch_size)


class CategoryPairs(_Shared):
    """FastAP's hard batches, which the paper uses on SOP: two categories meet, half the batch from each.

    An epoch visits every pair of categories `batches_per_pair` times, in random order (SOP: 66 pairs x 10 batches
    of 2 x 16 classes x 4). Within a category, classes and pictures take turns as in `MPerClass`.

    Args:
        labels: (N,) class of each picture.
        categories: (N,) category of each picture; a class lies in one category.
        classes_per_category: classes from each side of the pair.
        per_class: pictures of each class.
        batches_per_pair: batches of each pair in an epoch.
        seed: with the epoch, all that the order depends on.
        world_size: ranks that share a batch.
        rank: which slice this one takes.
    """

    def __init__(
        self,
        labels: ArrayLike,
        categories: ArrayLike,
        classes_per_category: int = 16,
        per_class: int = 4,
        batches_per_pair: int = 10,
        seed: int = 0,
        world_size: int = 1,
        rank: int = 0,
    ) -> None:
        if min(classes_per_category, per_class, batches_per_pair) < 1:
            raise ValueError("classes_per_category, per_class and batches_per_pair must be at least 1")
        self._classes = _ClassPictures(labels)
        self._members = _category_members(self._classes, categories, classes_per_category)
        self.pairs = tuple(combinations(sorted(self._members), 2))
        self.classes_per_category, self.per_class, self.seed = classes_per_category, per_class, seed
        batch_size = 2 * classes_per_category * per_class
        super().__init__(batch_size, len(self.pairs) * batches_per_pair, world_size, rank)

    def epoch_pairs(self, epoch: int) -> list[tuple[int, int]]:
        """The pair of categories of every batch of an epoch, in order."""
        order = permutation(self.batches, self.seed, _PAIRS, epoch)
        return [self.pairs[i % len(self.pairs)] for i in order.tolist()]

    def _order(self, epoch: int) -> Ints:
        """The first half of a batch is of the pair's first category."""
        pairs = np.asarray(self.epoch_pairs(epoch))
        half = self.classes_per_category * self.per_class
        batches = np.empty((self.batches, 2, half), dtype=np.int64)
        for category, members in self._members.items():
            where = np.argwhere(pairs == category)  # (turns, 2): batch and side, in order
            key = (self.seed, 1 + category)
            visits = _balanced_visits(len(members), self.classes_per_category, len(where), epoch, key)
            pictures = self._classes.pictures_for(members[visits], self.per_class, epoch, key)
            batches[where[:, 0], where[:, 1]] = pictures.reshape(len(where), half)
        return batches.reshape(self.batches, self.batch_size)


class _ClassPictures:
    """The pictures of every class."""

    def __init__(self, labels: ArrayLike) -> None:
        values = np.asarray(labels)
        if values.ndim != 1 or len(values) == 0 or values.dtype.kind not in "iu":
            raise ValueError(f"labels must be N > 0 integers, got shape {values.shape} of {values.dtype}")
        self.count = len(values)
        self.labels, self.of_picture, sizes = np.unique(values, return_inverse=True, return_counts=True)
        self.pictures = np.split(np.argsort(self.of_picture, kind="stable"), np.cumsum(sizes)[:-1])

    def pictures_for(self, visits: Ints, per_class: int, epoch: int, key: tuple[int, int]) -> Ints:
        """(batches, classes, per_class) pictures for (batches, classes) visits of an epoch."""
        drawn = np.empty((visits.size, per_class), dtype=np.int64)
        visited, first = np.unique(np.sort(visits, axis=None), return_index=True)
        by_class = np.split(np.argsort(visits, axis=None, kind="stable"), first[1:])
        for index, turns in zip(visited, by_class, strict=True):
            chosen = _turns(len(self.pictures[index]), per_class, len(turns), (*key, _PICTURES, epoch, int(index)))
            drawn[turns] = self.pictures[index][chosen]
        return drawn.reshape(*visits.shape, per_class)


def _category_members(classes: _ClassPictures, categories: ArrayLike, needed: int) -> dict[int, Ints]:
    """Category -> places of its classes; refuses what cannot give a batch."""
    values = np.asarray(categories)
    if values.shape != (classes.count,) or values.dtype.kind not in "iu":
        raise ValueError(f"categories must be one integer per picture ({classes.count}), got shape {values.shape}")
    if values.min() < 0:
        raise ValueError(f"categories must be >= 0, got {values.min()}")
    of_class = np.asarray([values[pictures[0]] for pictures in classes.pictures])
    straddling = np.flatnonzero(of_class[classes.of_picture] != values)
    if len(straddling):
        label = classes.labels[classes.of_picture[straddling[0]]]
        raise ValueError(f"class {label} lies in more than one category")
    members = {int(c): np.flatnonzero(of_class == c) for c in np.unique(of_class)}
    if len(members) < 2:
        raise ValueError(f"pairs need at least 2 categories, there is {len(members)}; use MPerClass")
    small = {c: len(m) for c, m in members.items() if len(m) < needed}
    if small:
        raise ValueError(
            f"{needed} classes are drawn from each category, but category -> classes is {small}; "
            "lower classes_per_category or merge small categories"
        )
    return members


def _balanced_visits(classes: int, per_batch: int, batches: int, epoch: int, key: tuple[int, int]) -> Ints:
    """(batches, per_batch) places of distinct classes, every class as often as the others (+-1 over all epochs).

    Rounds: each is a permutation of all classes; a batch that begins with the rest of a round takes from the next
    one the first classes it does not hold yet. An epoch that is no whole number of rounds starts with a short round
    of extra classes, dealt from one fixed circle so that over the epochs everyone gets the same.
    """
    extras = batches * per_batch % classes
    circle = permutation(classes, *key, _EXTRAS)
    dealt = circle[(epoch * extras + np.arange(extras)) % classes]
    waiting = dealt[permutation(extras, *key, _EXTRAS, epoch)] if extras else dealt
    return _rounds(classes, per_batch, batches, waiting, (*key, _ROUNDS, epoch))


def _turns(pictures: int, per_visit: int, visits: int, key: tuple[int, ...]) -> Ints:
    """(visits, per_visit) places in a class: all pictures before any repeats, none twice in a visit if possible."""
    if pictures >= per_visit:
        return _rounds(pictures, per_visit, visits, np.empty(0, dtype=np.int64), key)
    # too small: every visit shows all of them, as evenly as it goes
    return np.stack([np.resize(permutation(pictures, *key, visit), per_visit) for visit in range(visits)])


def _rounds(items: int, per_row: int, rows: int, waiting: Ints, key: tuple[int, ...]) -> Ints:
    """(rows, per_row), distinct within a row: first those `waiting`, then permutation after permutation of all items.

    A row that begins with the rest of a permutation takes from the next the first items that it does not hold yet;
    those passed over stay at the front. Always possible where per_row <= items.
    """
    chosen = np.empty((rows, per_row), dtype=np.int64)
    for number, row in enumerate(chosen):
        head, waiting = waiting[:per_row], waiting[per_row:]
        row[: len(head)] = head
        if len(head) < per_row:
            fresh = permutation(items, *key, number)
            taken = np.flatnonzero(~np.isin(fresh, head))[: per_row - len(head)]
            row[len(head) :] = fresh[taken]
            waiting = np.delete(fresh, taken)
    return chosen
