"""Is this dataset what it should be? Counts, classes, missing and unreadable files, leaks from train to test."""

from __future__ import annotations

import contextlib
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roadmap.data.datasets.sources import SOURCES
from roadmap.data.pictures.images import Box, PictureError, upright
from roadmap.data.pictures.packs import Pack, source_stamp
from roadmap.data.pictures.policy import drawn_pack
from roadmap.data.pictures.processes import answers
from roadmap.data.records import UNLABELLED, Records
from roadmap.progress import bar

_CHUNK = 64
_SHOWN = 10
Counts = dict[str, tuple[int, int]]
_Chunk = tuple[tuple[str, Box | None], ...]


@dataclass(frozen=True)
class Report:
    """What `dataset_report` found.

    Unusable: counts unlike the published ones, files missing or unreadable, too few classes to compare.

    Attributes:
        name: of the dataset.
        counts: split -> (pictures, classes).
        published: the same by the dataset's authors; empty for your own pictures.
        missing: paths without a file.
        unreadable: path -> why it cannot be decoded.
        too_few: why there are too few classes to train with, or to search where none are for training; or empty.
        singletons: split -> names of classes with a single picture in the whole dataset.
        leaks: (training path, evaluation path) with the same content.
        notes: what the reader had to decide.
        decoded: whether every file was decoded.
    """

    name: str
    counts: Counts
    published: Counts
    missing: tuple[str, ...]
    unreadable: dict[str, str]
    too_few: str
    singletons: dict[str, tuple[str, ...]]
    leaks: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    decoded: bool

    @property
    def wrong_counts(self) -> tuple[str, ...]:
        return tuple(
            f"{split}: {_words(self.counts.get(split, (0, 0)))}, published {_words(expected)}"
            for split, expected in self.published.items()
            if self.counts.get(split, (0, 0)) != expected
        )

    @property
    def usable(self) -> bool:
        return not (self.wrong_counts or self.missing or self.unreadable or self.too_few)

    def lines(self) -> list[str]:
        """The report in words, the verdict last."""
        said = [f"{self.name}: {split}: {_words(count)}" for split, count in self.counts.items()]
        said += [f"note: {note}" for note in self.notes]
        said += [f"WRONG COUNT {wrong}" for wrong in self.wrong_counts]
        said += [f"TOO FEW CLASSES: {self.too_few}"] if self.too_few else []
        said += _bullets("MISSING", list(self.missing))
        said += _bullets("UNREADABLE", [f"{path}: {reason}" for path, reason in self.unreadable.items()])
        for split, names in self.singletons.items():
            said += _bullets(f"single picture in {split}:", list(names))
        said += _bullets("same picture in train and test:", [f"{a} = {b}" for a, b in self.leaks])
        how = "every file decoded" if self.decoded else "files not decoded"
        return [*said, f"{self.name} is {'usable' if self.usable else 'NOT USABLE'} ({how})"]


def _words(count: tuple[int, int]) -> str:
    pictures, classes = count
    said = "1 picture" if pictures == 1 else f"{pictures:,} pictures"
    return said + ("" if not classes else ", 1 class" if classes == 1 else f", {classes:,} classes")


def _bullets(title: str, items: list[str]) -> list[str]:
    rest = [f"{title} ... and {len(items) - _SHOWN:,} more"] if len(items) > _SHOWN else []
    return [f"{title} {item}" for item in items[:_SHOWN]] + rest


def dataset_report(
    records: Records,
    decode: bool = True,
    workers: int | None = None,
    progress: bool | None = False,
    published: Counts | None = None,
) -> Report:
    """Checks a dataset against what is published about it and against its own files.

    Args:
        records: the whole dataset.
        decode: decode every picture (minutes for large sets); without, files are only looked for.
        workers: processes; None for one per core, 0 for none but this one.
        progress: show a bar; None: where a person watches.
        published: what its authors counted; None: what is known of the dataset's name. Your own folder may have the
            name of a published dataset.
    """
    drawn = drawn_pack(records)
    stamps = [(1, 0)] * len(records) if drawn else [source_stamp(records.path(i)) for i in range(len(records))]
    missing = tuple(path for path, stamp in zip(records.paths, stamps, strict=True) if stamp == (-1, -1))
    unreadable: dict[str, str] = {}
    if decode and not drawn:
        present = [i for i, stamp in enumerate(stamps) if stamp != (-1, -1)]
        unreadable = _unreadable(records, present, workers, progress)
    if published is None:
        published = SOURCES[records.name].published if records.name in SOURCES else {}
    counts = _counts(records)
    if records.notes and published:  # the reader's own split: only the sums can be compared
        published = {"all": (sum(p for p, _ in published.values()), sum(c for _, c in published.values()))}
        counts["all"] = len(records), len(np.unique(records.labels))
    return Report(
        records.name,
        counts,
        published,
        missing,
        unreadable,
        "" if published or records.ground_truth else _too_few(records),
        _singletons(records),
        _leaks(records, [size for size, _ in stamps], drawn),
        records.notes,
        decode,
    )


def _counts(records: Records) -> Counts:
    parts = {split: records.split(split) for split in records.split_names()} or {"all": records}
    return {
        split: (len(part), len(np.unique(part.labels[part.labels != UNLABELLED])))
        if split not in ("query", "gallery") or not records.ground_truth
        else (len(part), 0)
        for split, part in parts.items()
    }


def _too_few(records: Records) -> str:
    """Why there are too few classes: two are to be told apart, and in training each has two pictures that belong
    together."""
    trains = records.splits is None or "train" in records.split_names()
    part = records.split("train") if trains and records.splits is not None else records
    _, sizes = np.unique(part.labels[part.labels != UNLABELLED], return_counts=True)
    if trains and (count := int((sizes > 1).sum())) < 2:
        return (
            f"{'1 class has' if count else 'no class has'} two or more pictures to train with; training compares at "
            "least two such classes, each in a folder (or with a label) of its own"
        )
    return "" if len(sizes) > 1 else "of one class, every answer to a search is right"


def _singletons(records: Records) -> dict[str, tuple[str, ...]]:
    if records.ground_truth:
        return {}  # relevance is listed, labels do not say it
    alone = set(records.singletons().tolist())
    found: dict[str, list[str]] = defaultdict(list)
    splits = ["all"] * len(records) if records.splits is None else records.splits.tolist()
    for label, split in zip(records.labels.tolist(), splits, strict=True):
        if label in alone:
            found[split].append(records.class_names[label] if records.class_names else str(label))
    return {split: tuple(names) for split, names in found.items()}


def _leaks(records: Records, sizes: Sequence[int], drawn: Pack | None) -> tuple[tuple[str, str], ...]:
    """Pairs with the same bytes, one in training and one in evaluation. Only files of equal size are read."""
    if records.splits is None or "train" not in records.split_names():
        return ()
    training = records.splits == "train"
    by_size: dict[int, list[int]] = defaultdict(list)
    for i, size in enumerate(sizes):
        if size > 0:
            by_size[size].append(i)
    pairs = []
    for rows in by_size.values():
        if not training[rows].any() or training[rows].all():
            continue
        by_content: dict[bytes, list[int]] = defaultdict(list)
        for i in rows:
            with contextlib.suppress(OSError):  # what cannot be read is the same as nothing
                raw = drawn.bytes_of(i).tobytes() if drawn else records.path(i).read_bytes()
                by_content[hashlib.sha256(raw).digest()].append(i)
        for same in by_content.values():
            pairs += [(i, j) for i in same for j in same if training[i] and not training[j]]
    return tuple((records.paths[i], records.paths[j]) for i, j in sorted(pairs))


def _unreadable(records: Records, present: Sequence[int], workers: int | None, progress: bool | None) -> dict[str, str]:
    chunks: list[_Chunk] = [
        tuple((str(records.path(i)), records.box(i)) for i in present[first : first + _CHUNK])
        for first in range(0, len(present), _CHUNK)
    ]
    found: dict[str, str] = {}
    place = {str(records.path(i)): records.paths[i] for i in present}
    with bar(len(present), "decoding", show=progress) as shown:
        for chunk, failures in answers(decoding_failures, chunks, workers):
            found |= {place[path]: reason for path, reason in failures}
            shown.update(len(chunk))
    return {path: found[path] for path in place.values() if path in found}  # in the order of the records


def decoding_failures(chunk: _Chunk) -> list[tuple[str, str]]:
    """(path, reason) of the pictures of a chunk that cannot be decoded."""
    failures = []
    for path, box in chunk:
        try:
            upright(path, box)
        except PictureError as error:
            failures.append((path, error.reason))
    return failures
