"""The decomposability gap of a model (Eq. 6) for a stated choice of batches, what bounds it, and its decrease.

Every item of a test set searches the whole, and each batch, without itself. The batches are a partition, as in Eq. 6:
every item is in exactly one. (Those of training are not: there an item may come twice, or not at all.)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from roadmap.config.settings import SettingError
from roadmap.data import Pack, pack_for
from roadmap.data.pictures.shards import OnError
from roadmap.embeddings import Embeddings
from roadmap.encoder import Encoder
from roadmap.engine.state import last_weights
from roadmap.evaluation import records_to_search
from roadmap.evaluation.alignment import classes_apart
from roadmap.experiments.results import LAST_GAP
from roadmap.experiments.sheet import Sheet, row
from roadmap.experiments.statistics import Difference, Estimate, estimate, paired_t
from roadmap.metrics.decomposability import DecomposabilityGap, mean_decomposability_gap
from roadmap.metrics.vectors import unit_vectors
from roadmap.runs import Run

GAP_FILE = "gap.json"  # in a run folder
SAMPLERS = ("m_per_class", "random")


@dataclass(frozen=True)
class BatchChoice:
    """Which items meet in a batch.

    Attributes:
        size: items of a batch; the last one may have fewer.
        sampler: "m_per_class": as many items of each class as `per_class`, as in training; "random": any.
        per_class: of m_per_class.
        draws: partitions that the gap is the mean over.
        seed: of the draws.
    """

    size: int = 128
    sampler: str = "m_per_class"
    per_class: int = 4
    draws: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise SettingError("sampler", f"sampler={self.sampler} must be one of {', '.join(SAMPLERS)}")
        for name in ("size", "per_class", "draws"):
            if getattr(self, name) < 1:
                raise SettingError(name, f"{name}={getattr(self, name)} must be at least 1")

    @property
    def words(self) -> str:
        """In a sentence."""
        how = f"{self.per_class} of a class" if self.sampler == "m_per_class" else "at random"
        return f"batches of {self.size}, {how}, {self.draws} draw{'s' * (self.draws > 1)} from seed {self.seed}"

    def partition(self, labels: NDArray[np.int64], draw: int) -> NDArray[np.int64]:
        """(N,) the batch of each item, from 0."""
        random = np.random.default_rng((self.seed, draw))
        order = random.permutation(len(labels))
        if self.sampler == "m_per_class":
            order = order[_in_rounds(labels[order], self.per_class, random)]
        batches = np.empty(len(labels), np.int64)
        batches[order] = np.arange(len(labels)) // self.size
        return batches


def _in_rounds(labels: NDArray[np.int64], each: int, random: np.random.Generator) -> NDArray[np.intp]:
    """An order of the items in which every class shows `each` of its items, then every class the next ones: so many
    neighbours are of one class, and those after them of others."""
    seen: dict[int, int] = {}
    place = np.empty(len(labels), np.int64)
    for i, label in enumerate(labels.tolist()):
        place[i] = seen.get(label, 0)
        seen[label] = place[i] + 1
    rounds = place // each
    classes, members = np.unique(labels, return_inverse=True)
    turns = np.stack([random.permutation(len(classes)) for _ in range(int(rounds.max(initial=0)) + 1)])
    order: NDArray[np.intp] = np.lexsort((turns[rounds, members], rounds))
    return order


@dataclass(frozen=True)
class Gap:
    """Of a model.

    Attributes:
        name: of the model.
        batches: the choice of them.
        values: (draws) DG_AP of each partition, the mean over the queries.
        mean_ap: of the whole set.
        batch_ap: (draws) the mean AP in the batches.
        queries: that count: those with a positive in some batch.
        bounds: what the gap cannot exceed, means over some queries of the first draw; {} where none were asked for.
        pictures: what tells this set from others: a digest of its ids and classes; empty where that was not kept.
    """

    name: str
    batches: BatchChoice
    values: tuple[float, ...]
    mean_ap: float
    batch_ap: tuple[float, ...]
    queries: int
    bounds: dict[str, float] = field(default_factory=dict)
    pictures: str = ""

    @property
    def estimate(self) -> Estimate:
        """DG_AP over the draws."""
        return estimate(self.values)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "DG_AP": float(np.mean(self.values))}

    @property
    def sheet(self) -> Sheet:
        """For a person: in percent."""
        told = self.estimate
        rows = [("DG_AP", _percent(told)), ("mAP in the batches", _percent(estimate(self.batch_ap)))]
        rows += [("mAP of the whole", f"{100 * self.mean_ap:.2f}")]
        rows += [(name, f"{100 * value:.2f}") for name, value in self.bounds.items()]
        return Sheet(f"{self.name}: {self.batches.words}", ("", "%"), tuple(map(row, rows)))


def gap_of(
    embeddings: Embeddings, batches: BatchChoice, name: str = "model", sampled: int = 0, alpha: float = 0.9,
    beta: float = 0.6, memory: int = 512 << 20,
) -> Gap:  # fmt: skip
    """DG_AP of vectors among themselves.

    Args:
        embeddings: of a test set.
        batches: who meets in one.
        name: for titles.
        sampled: queries of which the bounds are computed; 0 for none.
        alpha, beta: the thresholds of Eq. (7), for the bound with calibration.
        memory: bytes to work in.

    Raises:
        ValueError: no item has another of its class, so that there is no gap.
    """
    labels = classes_apart(embeddings).cpu()
    found = []
    for draw in range(batches.draws):
        parts = torch.from_numpy(batches.partition(labels.numpy(), draw))
        found.append(mean_decomposability_gap(embeddings.vectors, labels, parts, memory))
    counted = int(found[0]["queries"] - found[0]["queries_without_positives"])
    if not counted or not all(math.isfinite(one["DG_AP"]) for one in found):
        raise ValueError(f"{name}: none of {len(labels)} items has another of its class, so that there is no gap")
    bounds = _bounds(embeddings.vectors, labels, batches, sampled, alpha, beta) if sampled else {}
    values, ap = tuple(one["DG_AP"] for one in found), tuple(one["batch mAP"] for one in found)
    return Gap(name, batches, values, found[0]["mAP"], ap, counted, bounds, _pictures(embeddings, labels))


def _pictures(embeddings: Embeddings, labels: Tensor) -> str:
    told = hashlib.sha256(json.dumps(embeddings.ids).encode())
    told.update(labels.numpy().tobytes())
    return told.hexdigest()[:16]


def _bounds(
    vectors: Tensor, labels: Tensor, batches: BatchChoice, sampled: int, alpha: float, beta: float
) -> dict[str, float]:
    """Means over queries drawn from the first partition. docs/decomposability.md has what each assumes."""
    v = unit_vectors(vectors, "vectors").cpu().float()
    parts = torch.from_numpy(batches.partition(labels.numpy(), 0))
    sizes = torch.bincount(torch.unique(labels, return_inverse=True)[1])
    several = (sizes[torch.unique(labels, return_inverse=True)[1]] > 1).nonzero()[:, 0].numpy()
    random = np.random.default_rng((batches.seed, batches.draws))
    chosen = random.permutation(several)[:sampled]
    rows: list[list[float]] = []
    for query in np.sort(chosen).tolist():
        others = torch.arange(len(v)) != query
        one = DecomposabilityGap(v[others] @ v[query], labels[others] == labels[query], parts[others], alpha, beta)
        perfect = all(math.isclose(ap, 1.0) for ap in one.batch_average_precisions)
        rows.append([one.gap, *one.range, one.worst, one.calibrated_worst, float(perfect)])
    gap, low, high, worst, calibrated, perfect = np.mean(rows, axis=0).tolist()
    return {
        f"DG_AP of {len(rows)} queries": gap,
        "  at least, by the order in each batch": low,
        "  at most, by the order in each batch": high,
        "  at most, were every batch perfect (Eq. 8, worst order)": worst,
        f"  at most, were every batch perfect, with alpha {alpha:g} and beta {beta:g} (Eq. 9's counts)": calibrated,
        "  queries for which every batch is perfect": perfect,
    }


@dataclass(frozen=True)
class Decrease:
    """Of the gap, from one model to another, over the same partitions of the same pictures.

    Attributes:
        first, second: of the models.
        relative: in percent of the first gap: Table 10; NaN where that is not positive.
        test: paired over the draws; None for a single one.
    """

    first: Gap
    second: Gap
    relative: float
    test: Difference | None

    @property
    def words(self) -> str:
        """In a line."""
        a, b = self.first.estimate.mean, self.second.estimate.mean
        percent = (
            "no percentage, the first is not positive " if math.isnan(self.relative) else f"{self.relative:.1f} % "
        )
        said = f"decrease of DG_AP from {self.first.name} to {self.second.name}: {percent}"
        said += f"({100 * a:.2f} -> {100 * b:.2f})"
        if self.test is None or math.isnan(self.test.low):
            return said
        return f"{said}, {100 * self.test.low:+.3f} to {100 * self.test.high:+.3f} points over the draws"


def decrease(first: Gap, second: Gap) -> Decrease:
    """How much smaller the gap of the second model is."""
    other = first.pictures and second.pictures and first.pictures != second.pictures
    if other or first.batches != second.batches or first.queries != second.queries:
        raise ValueError(
            f"gaps can be compared for the same batches of the same pictures: {first.name} has {first.batches.words} "
            f"and {first.queries} queries, {second.name} {second.batches.words} and {second.queries}"
            f"{', of other pictures or classes' if other else ''}"
        )
    a, b = first.estimate.mean, second.estimate.mean
    test = paired_t(first.values, second.values) if len(first.values) > 1 else None
    return Decrease(first, second, 100 * (a - b) / a if a > 0 else math.nan, test)


def embeddings_of_test(
    encoder: Encoder, pack: Pack | None = None, on_error: OnError = "raise", **where: Any
) -> Embeddings:
    """The vectors of a model's test pictures, which search one another.

    Raises:
        ValueError: the test has queries and a gallery, for which Eq. 6 has no batches.
    """
    queries, gallery = records_to_search(encoder.records(**where)).evaluation()
    if gallery is not None:
        raise ValueError(f"{queries.name} searches queries in a gallery; the gap is of a set that searches itself")
    return encoder.embed(queries, pack=pack, on_error=on_error)


def save_gap(folder: Path) -> None:
    """Measures the gap of a run on its test pictures, in batches like those it was trained with, and keeps it in its
    folder, beside the summary: of the epoch that it chose, and of the last."""
    encoder, run = Encoder.open(folder), Run.open(folder)
    data = run.settings().data
    pack, _ = pack_for(encoder.records(), encoder.side, "auto", make=False)
    batches = BatchChoice(data.batch_size, per_class=data.per_class)

    def measured() -> dict[str, Any]:
        return gap_of(embeddings_of_test(encoder, pack), batches, encoder.name).as_dict()

    chosen = measured()
    assert isinstance(encoder.model, nn.Module)
    encoder.model.load_state_dict(last_weights(run.last))
    run.write_json(GAP_FILE, chosen | {LAST_GAP: measured()})


def _percent(told: Estimate) -> str:
    spread = f" ± {100 * told.sd:.2f} over {told.n} draws" if told.n > 1 else ""
    return f"{100 * told.mean:.2f}{spread}"


def sheets(gaps: Sequence[Gap]) -> str:
    """Several, and from the first to each other the decrease, in words."""
    lines = [gap.sheet.text() for gap in gaps]
    return "\n\n".join([*lines, *(decrease(gaps[0], other).words for other in gaps[1:])])
