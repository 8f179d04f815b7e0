"""Which pictures of a dataset train, choose the epoch and test, and which of them meet in a batch."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roadmap.config.settings import DataSettings, SelectSettings, SettingError
from roadmap.data import UNLABELLED, CategoryPairs, MPerClass, Records, dataset
from roadmap.evaluation import merits
from roadmap.names import did_you_mean
from roadmap.ranks import ALONE, Ranks

OWN = ("folder", "table")  # datasets of one's own, which may come without splits
MANY_CLASSES = 20  # from which whole classes can be spared for the test
TEST_SHARE = 0.2
FEWEST_TO_SHARE = 4  # pictures of a class of which some are tested on and some trained
FEWEST_HELD = 2  # classes: with one, every neighbour is right


@dataclass(frozen=True, eq=False)
class Splits:
    """Of a dataset. `val` and `tests` are ready for an evaluation; `notes` say what was decided.

    `everything` has all pictures with their splits, "val" among them where classes are held out; `val_given` says
    whether the validation pictures came with the dataset.
    """

    everything: Records
    train: Records
    val: Records | None
    tests: tuple[Records, ...]
    notes: tuple[str, ...] = ()
    val_given: bool = False


def records_of(data: DataSettings) -> Records:
    """The dataset, read from where it lies; its validation pictures train too where that is asked for."""
    records = dataset(data.name, data.root)
    if data.train_on_val and records.splits is not None:
        records = dataclasses.replace(records, splits=np.where(records.splits == "val", "train", records.splits))
    return records


def division_of(records: Records) -> tuple[Records, list[str]]:
    """Pictures of one's own with a test set, drawn where they came without splits; and the reason, a sentence.

    Drawn by names: a class or picture that is added moves no other, or next to none.
    """
    if records.splits is not None:
        return records, []
    labels, sizes = np.unique(records.labels, return_counts=True)
    if len(labels) < 2:
        raise ValueError(
            f"{records.root} holds {len(labels)} class; retrieval needs at least 2, "
            "each in a folder (or label) of its own"
        )
    if (classes := int((sizes > 1).sum())) >= MANY_CLASSES:
        return _test_classes(records, classes)
    drawn = records.split_within_classes(TEST_SHARE, FEWEST_TO_SHARE)
    if "test" not in drawn.split_names():
        raise ValueError(
            f"{records.root}: every one of its {len(labels)} classes has fewer than {FEWEST_TO_SHARE} pictures, "
            "too few to test on; add pictures, or lay them out below train/ and test/"
        )
    reason = (
        f"test set: a fifth of the pictures of each of the {classes} classes, at least 2 (with {MANY_CLASSES} classes "
        "or more, whole classes would be held out)"
    )
    return drawn, [reason]


def _test_classes(records: Records, classes: int) -> tuple[Records, list[str]]:
    splits = np.full(len(records), "train", dtype="<U5")
    among = ~np.isin(records.labels, records.singletons())  # one picture alone neither trains nor tests
    drawn = records.select(among).split_by_class(TEST_SHARE)
    splits[among] = drawn.splits
    held = len(np.unique(drawn.split("test").labels))
    reason = f"test set: {held} of {classes} classes, held out whole, so that it shows how new classes fare"
    return dataclasses.replace(records, splits=splits), [reason]


def splits_of(records: Records, data: DataSettings, select: SelectSettings) -> Splits:
    """Training, validation and test pictures. Classes with a single picture teach nothing and are left out."""
    if "train" not in records.split_names():
        raise ValueError(
            f"{records.name} has no training pictures: its splits are {list(records.split_names()) or 'not given'}"
        )
    val_given = "val" in records.split_names()
    useful, alone = _useful(records)
    left = "training class with a single picture is" if alone == 1 else "training classes with a single picture are"
    notes = [f"{alone} {left} left out"] if alone else []
    _check_classes(records.select(useful))
    if select.by == "held_out" and not val_given:
        records = _with_validation(records, useful, select)
    teaching = records.select(useful)
    train = teaching.split("train")
    # numbered without gaps, for losses that have weights per class
    names, labels = np.unique(train.labels, return_inverse=True)
    named = tuple(train.class_names[i] for i in names) if train.class_names else ()
    tree = None if train.tree is None else train.tree.with_labels(labels, named)
    train = dataclasses.replace(train, labels=labels, class_names=named, tree=tree)
    val = _as_test(teaching.split("val")) if select.by == "held_out" else None
    tests = tuple(_test_records(dataset(name, root)) for name, root in data.test_sets.items())
    if not tests and {"test", "query"} & set(records.split_names()):
        tests = (records,)
    if not tests and select.by == "test":
        raise ValueError(
            f"select.by=test: {records.name} has no test pictures; give data.test_sets, "
            "or use select.by=held_out or select.by=last"
        )
    return Splits(records, train, val, tests, (*records.notes, *notes), val_given)


def searched_pictures(records: Records) -> Records:
    """The pictures of a test set that are searched: the gallery, or the test pictures where they search one another."""
    queries, gallery = records.evaluation()
    return queries if gallery is None else gallery


def size_words(records: Records) -> str:
    """How many pictures, of how many classes."""
    return f"{len(records):,} of {len(np.unique(records.labels)):,} classes"


def _useful(records: Records) -> tuple[NDArray[np.bool_], int]:
    """(N,) which pictures are not lost on training, being unlabelled or alone in their class; how many are alone."""
    alone = records.split("train").singletons()
    useless = (records.labels == UNLABELLED) | np.isin(records.labels, alone)
    return ~useless | (records.splits != "train"), len(alone)


def _classes(records: Records) -> int:
    return len(np.unique(records.labels[records.splits == "train"]))


def _check_classes(records: Records) -> None:
    if (classes := _classes(records)) < 2:
        raise ValueError(
            f"{records.name} has {classes} training {'class' if classes == 1 else 'classes'} with two or more "
            "pictures; learning to compare needs at least 2"
        )


def held_out_classes(records: Records, fraction: float) -> int:
    """How many of the training classes would be held out for choosing the epoch; 0 where they are too few for that."""
    teaching = records.select(_useful(records)[0])
    if _classes(teaching) < 2 * FEWEST_HELD:
        return 0
    return len(np.unique(teaching.hold_out_classes(fraction).split("val").labels))


def _with_validation(records: Records, useful: NDArray[np.bool_], select: SelectSettings) -> Records:
    """The draw does not depend on the run's seed: runs of different seeds are chosen on the same classes."""
    teaching = records.select(useful)
    if (count := _classes(teaching)) < 2 * FEWEST_HELD:
        raise ValueError(
            f"{records.name} has {count} training classes, too few to hold some out for choosing the epoch; "
            "use select.by=last"
        )
    assert records.splits is not None
    splits = records.splits.copy()
    splits[useful] = teaching.hold_out_classes(select.fraction).splits
    return dataclasses.replace(records, splits=splits)


def _as_test(records: Records) -> Records:
    return dataclasses.replace(records, splits=np.full(len(records), "test"))


def _test_records(records: Records) -> Records:
    """A dataset to test on: where it has no splits, all of it."""
    return _as_test(records) if records.splits is None else records


def judged_pictures(select: SelectSettings, splits: Splits) -> tuple[Records, str]:
    """The pictures that an epoch is judged by, and what they are called; where epochs are judged at all."""
    if select.by == "test":
        return splits.tests[0], "test"
    assert splits.val is not None
    return splits.val, "validation"


def check_metric(select: SelectSettings, splits: Splits, **measured: Any) -> None:
    """Said before an epoch is trained, not after; `measured` is what else an evaluation is told to measure."""
    if select.by == "last" or select.metric in (known := merits(judged_pictures(select, splits)[0], **measured)):
        return
    raise ValueError(
        f"select.metric={select.metric!r} is not measured here{did_you_mean(select.metric, known)} "
        f"There are {', '.join(known)}"
    )


def sampler_of(train: Records, data: DataSettings, seed: int, ranks: Ranks = ALONE) -> MPerClass | CategoryPairs:
    """Which pictures meet in a batch, and which of them are for this process."""
    if data.batch_size % ranks.world:
        raise SettingError(
            "data.batch_size",
            f"data.batch_size={data.batch_size}: cannot be shared equally by {ranks.world} processes; give a "
            f"multiple of {ranks.world}, or another hardware.devices",
        )
    apart = {"world_size": ranks.world, "rank": ranks.rank}
    if data.sampler == "category_pairs":
        if train.categories is None:
            raise ValueError(f"{train.name} has no categories; use data.sampler=m_per_class")
        each, rest = divmod(data.batch_size, 2 * data.per_class)
        if rest:
            raise SettingError(
                "data.batch_size",
                f"data.batch_size={data.batch_size} must be a multiple of 2 x data.per_class ({2 * data.per_class}): "
                "half a batch comes from each of two categories",
            )
        return CategoryPairs(train.labels, train.categories, each, data.per_class, data.batches_per_pair, seed, **apart)
    if data.batch_size % data.per_class:
        raise SettingError(
            "data.batch_size",
            f"data.batch_size={data.batch_size} must be a multiple of data.per_class ({data.per_class})",
        )
    return MPerClass(train.labels, data.batch_size, data.per_class, data.batches, seed, **apart)


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
