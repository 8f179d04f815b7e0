"""Which pictures of a dataset train, choose the epoch and test, and which of them meet in a batch."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from roadmap.config.settings import DataSettings, SelectSettings
from roadmap.data import UNLABELLED, CategoryPairs, MPerClass, Records, dataset
from roadmap.evaluation import merits

FEWEST_HELD = 2  # classes: with one, every neighbour is right


@dataclass(frozen=True, eq=False)
class Splits:
    """Of a dataset. `val` and `tests` are ready for `dataset_evaluation`; `notes` say what was decided."""

    everything: Records
    train: Records
    val: Records | None
    tests: tuple[Records, ...]
    notes: tuple[str, ...] = ()


def records_of(data: DataSettings) -> Records:
    """The dataset, read from where it lies."""
    return dataset(data.name, data.root)


def splits_of(records: Records, data: DataSettings, select: SelectSettings) -> Splits:
    """Training, validation and test pictures. Classes with a single picture teach nothing and are left out."""
    if "train" not in records.split_names():
        raise ValueError(
            f"{records.name} has no training pictures: its splits are {list(records.split_names()) or 'not given'}"
        )
    divided, alone = _teaching(records)
    notes = [f"{alone} training classes with a single picture are left out"] if alone else []
    _check_classes(divided)
    if select.by == "held_out" and "val" not in records.split_names():
        divided = _held_out(divided, select)
        _check_classes(divided)
    train = divided.split("train")
    # numbered without gaps, for losses that have weights per class
    names, labels = np.unique(train.labels, return_inverse=True)
    named = tuple(train.class_names[i] for i in names) if train.class_names else ()
    train = dataclasses.replace(train, labels=labels, class_names=named)
    val = _as_test(divided.split("val")) if select.by == "held_out" else None
    tests = tuple(_tested(dataset(name, root)) for name, root in data.test_sets.items())
    if not tests and {"test", "query"} & set(records.split_names()):
        tests = (records,)
    if not tests and select.by == "test":
        raise ValueError(
            f"select.by=test: {records.name} has no test pictures; give data.test_sets, "
            "or use select.by=held_out or select.by=last"
        )
    return Splits(records, train, val, tests, (*records.notes, *notes))


def _teaching(records: Records) -> tuple[Records, int]:
    """Without training pictures that teach nothing, unlabelled or alone in their class; and how many are alone."""
    alone = records.split("train").singletons()
    useless = (records.labels == UNLABELLED) | np.isin(records.labels, alone)
    return records.select(~useless | (records.splits != "train")), len(alone)


def _classes(records: Records) -> int:
    return len(np.unique(records.labels[records.splits == "train"]))


def _check_classes(records: Records) -> None:
    if (classes := _classes(records)) < 2:
        raise ValueError(
            f"{records.name} has {classes} training {'class' if classes == 1 else 'classes'} with two or more "
            "pictures; learning to compare needs at least 2"
        )


def held_out_classes(classes: int, fraction: float) -> int:
    """How many of the training classes are held out for choosing the epoch."""
    return max(FEWEST_HELD, math.floor(classes * fraction + 1e-9))


def _held_out(records: Records, select: SelectSettings) -> Records:
    """The draw does not depend on the run's seed: runs of different seeds are chosen on the same classes."""
    if (count := _classes(records)) < 2 * FEWEST_HELD:
        raise ValueError(
            f"{records.name} has {count} training classes, too few to hold some out for choosing the epoch; "
            "use select.by=last"
        )
    return records.hold_out_classes(held_out_classes(count, select.fraction) / count)


def _as_test(records: Records) -> Records:
    return dataclasses.replace(records, splits=np.full(len(records), "test"))


def _tested(records: Records) -> Records:
    """A dataset to test on: where it has no splits, all of it."""
    return _as_test(records) if records.splits is None else records


def judging(select: SelectSettings, splits: Splits) -> tuple[Records, str]:
    """The pictures that an epoch is judged by, and what they are called; where epochs are judged at all."""
    if select.by == "test":
        return splits.tests[0], "test"
    assert splits.val is not None
    return splits.val, "validation"


def check_metric(select: SelectSettings, splits: Splits) -> None:
    """Said before an epoch is trained, not after."""
    if select.by == "last" or select.metric in (known := merits(judging(select, splits)[0])):
        return
    near = difflib.get_close_matches(select.metric, known, 1)
    raise ValueError(
        f"select.metric={select.metric!r} is not measured here{f', did you mean {near[0]!r}?' if near else '.'} "
        f"There are {', '.join(known)}"
    )


def sampler_of(train: Records, data: DataSettings, seed: int) -> MPerClass | CategoryPairs:
    """Which pictures meet in a batch."""
    if data.sampler == "category_pairs":
        if train.categories is None:
            raise ValueError(f"{train.name} has no categories; use data.sampler=m_per_class")
        each, rest = divmod(data.batch_size, 2 * data.per_class)
        if rest:
            raise ValueError(
                f"data.batch_size={data.batch_size} must be a multiple of 2 x data.per_class ({2 * data.per_class}): "
                "half a batch comes from each of two categories"
            )
        return CategoryPairs(train.labels, train.categories, each, data.per_class, data.batches_per_pair, seed)
    return MPerClass(train.labels, data.batch_size, data.per_class, data.batches, seed)


class Roster:
    """The training pictures that a run began with: batches are drawn by their order, so it goes on with no others."""

    def __init__(self, train: Records) -> None:
        digest = hashlib.sha256("\n".join(train.paths).encode("utf-8", "surrogateescape"))
        digest.update(train.labels.tobytes())
        self.digest, self.size = digest.hexdigest(), f"{len(train)} of {len(np.unique(train.labels))} classes"

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self.digest, "size": self.size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["digest"] != self.digest:
            then, now = state_dict["size"], self.size
            raise ValueError(f"the training pictures changed since the run began ({then} then, {now} now)")
