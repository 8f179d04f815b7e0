"""The decomposability gap of a model: batches that are a partition, the mean over queries, bounds, the decrease."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from roadmap.cli.app import app
from roadmap.config.settings import SettingError
from roadmap.embeddings import Embeddings
from roadmap.experiments import BatchChoice, gap_of
from roadmap.experiments.gap import decrease
from roadmap.metrics import DecomposabilityGap

from .worlds import CLASSES, vectors


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=60),
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from(["m_per_class", "random"]),
)
def test_batches_are_a_partition(labels: list[int], size: int, per_class: int, sampler: str) -> None:
    choice = BatchChoice(size, sampler, per_class)
    batches = choice.partition(np.asarray(labels), 0)
    sizes = np.bincount(batches)
    assert list(sizes[:-1]) == [size] * (len(sizes) - 1)
    assert 1 <= sizes[-1] <= size
    assert (choice.partition(np.asarray(labels), 0) == batches).all()


def test_batches_hold_some_items_of_many_classes() -> None:
    """As in training: 4 of each of 4 classes, as long as all classes have enough."""
    labels = np.repeat(np.arange(8), 12)
    batches = BatchChoice(16, "m_per_class", 4).partition(labels, 3)
    for batch in range(6):
        assert Counter(Counter(labels[batches == batch]).values()) == {4: 4}
    others = [BatchChoice(16, "m_per_class", 4, seed=seed).partition(labels, draw) for seed, draw in ((0, 4), (1, 3))]
    assert all((batches != other).any() for other in others)


@pytest.mark.parametrize("sampler", ["m_per_class", "random"])
def test_the_gap_is_eq_6_averaged_over_queries_and_draws(sampler: str) -> None:
    embeddings, choice = vectors(1.0, 0), BatchChoice(10, sampler, 2, draws=2, seed=4)
    found = gap_of(embeddings, choice)
    v, labels = torch.nn.functional.normalize(embeddings.vectors, dim=1), embeddings.labels
    for draw in range(2):
        batches = torch.from_numpy(choice.partition(labels.numpy(), draw))
        gaps = []
        for query in range(len(v)):
            others = torch.arange(len(v)) != query
            relevant = labels[others] == labels[query]
            gaps.append(DecomposabilityGap(v[others] @ v[query], relevant, batches[others]).gap)
        assert found.values[draw] == pytest.approx(np.mean(gaps), abs=1e-6)
    assert found.queries == len(v)
    assert found.batch_ap[0] - found.mean_ap == pytest.approx(found.values[0])


def test_bounds_hold() -> None:
    found = gap_of(vectors(1.0, 0), BatchChoice(10, per_class=2, draws=1), sampled=7, alpha=0.8, beta=0.3).bounds
    gap, low, high, worst, calibrated, perfect = found.values()
    assert "DG_AP of 7 queries" in found
    assert low <= gap <= high
    assert calibrated <= worst
    assert 0 <= perfect <= 1


def test_items_without_a_label_are_of_no_class() -> None:
    labelled = vectors(1.0, 0)
    labels = labelled.labels.clone()
    labels[:3] = -1
    named = Embeddings(labelled.vectors, labels, labelled.ids, tuple(f"c{i}" for i in range(CLASSES)))
    assert gap_of(named, BatchChoice(10, draws=1)).queries == len(labels) - 3


def test_the_decrease_by_hand() -> None:
    choice = BatchChoice(10, per_class=2, draws=3)
    first, second = gap_of(vectors(1.2, 0), choice, "one"), gap_of(vectors(0.8, 0), choice, "other")
    found = decrease(first, second)
    a, b = np.mean(first.values), np.mean(second.values)
    assert found.relative == pytest.approx(100 * (a - b) / a)
    assert found.test is not None
    assert found.test.difference == pytest.approx(b - a)
    assert f"from one to other: {found.relative:.1f} %" in found.words
    with pytest.raises(ValueError, match="the same batches of the same pictures: one has batches of 10, 2 of a class"):
        decrease(first, gap_of(vectors(0.8, 0), BatchChoice(12, per_class=2, draws=3), "other"))


def test_gaps_of_other_pictures_are_not_compared() -> None:
    """As many queries in the same batches, and yet of something else."""
    choice, first = BatchChoice(10, per_class=2, draws=2), vectors(1.0, 0)
    other = Embeddings(first.vectors, first.labels.flip(0), first.ids)
    with pytest.raises(ValueError, match=r"and 120, of other pictures or classes$"):
        decrease(gap_of(first, choice), gap_of(other, choice))


def test_a_gap_that_is_not_positive_has_no_percentage() -> None:
    gap = gap_of(vectors(1.2, 0), BatchChoice(10, per_class=2, draws=3))
    found = decrease(dataclasses.replace(gap, values=(-0.01, -0.02, -0.01)), gap)
    assert math.isnan(found.relative)
    assert "no percentage, the first is not positive" in found.words
    alike = decrease(gap, dataclasses.replace(gap, values=tuple(value - 0.01 for value in gap.values)))
    assert "points over the draws" not in alike.words  # without spread


def test_items_that_are_alone_have_no_gap() -> None:
    lonely = Embeddings(torch.randn(6, 4), torch.arange(6), tuple("abcdef"))
    with pytest.raises(ValueError, match="model: none of 6 items has another of its class, so that there is no gap"):
        gap_of(lonely, BatchChoice(3, draws=1), sampled=3)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"sampler": "any"}, "sampler=any must be one of m_per_class, random"), ({"size": 0}, "size=0 must be")],
)
def test_choices_that_cannot_be(given: dict[str, object], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        BatchChoice(**given)  # type: ignore[arg-type]


def test_the_command_on_saved_vectors(tmp_path: Path) -> None:
    for name, noise in (("supap", 1.2), ("roadmap", 0.8)):
        vectors(noise, 0).save(tmp_path / f"{name}.npz")
    files = [str(tmp_path / f"{name}.npz") for name in ("supap", "roadmap")]
    options = ["--size", "10", "--per-class", "2", "--queries", "5", "--json", str(tmp_path / "new" / "gap.json")]
    result = CliRunner().invoke(app, ["gap", *files, *options])
    assert result.exit_code == 0, result.output
    assert "supap: batches of 10, 2 of a class, 5 draws from seed 0" in result.output
    written = json.loads((tmp_path / "new" / "gap.json").read_text())
    expected = decrease(*(gap_of(vectors(noise, 0), BatchChoice(10, per_class=2)) for noise in (1.2, 0.8)))
    assert written["decrease in %"] == pytest.approx(expected.relative)
    assert written["roadmap"]["values"] == pytest.approx(expected.second.values)
    assert f"decrease of DG_AP from supap to roadmap: {expected.relative:.1f} %" in result.output
    wrong = CliRunner().invoke(app, ["gap", *files, files[0]])
    assert (wrong.exit_code, "give one model or two to compare, got 3" in wrong.output) == (1, True)
    wrong = CliRunner().invoke(app, ["gap", files[0], files[0]])
    assert f"error: {files[0]} is named twice; name it once" in wrong.output.replace("\n", "")
    assert BatchChoice(draws=1).words == "batches of 128, 4 of a class, 1 draw from seed 0"
    wrong = CliRunner().invoke(app, ["gap", files[0], "--sampler", "any"])
    assert "error: --sampler any must be one of m_per_class, random" in wrong.output


def test_two_models_of_one_name_are_told_apart_and_json_holds_no_nan(tmp_path: Path) -> None:
    labels = torch.arange(6).repeat_interleave(4)
    ids = tuple(f"{i}.png" for i in range(24))
    scattered = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    given = [tmp_path / name / "v.npz" for name in ("a", "b")]
    for path, points in zip(given, (torch.eye(6)[labels], scattered), strict=True):
        path.parent.mkdir()
        Embeddings(points, labels, ids).save(path)
    options = ["--size", "8", "--queries", "0", "--json", str(tmp_path / "gap.json")]
    result = CliRunner().invoke(app, ["gap", *map(str, given), *options])
    assert result.exit_code == 0, result.output
    assert f"decrease of DG_AP from {given[0]} to {given[1]}: no percentage" in result.output
    text = (tmp_path / "gap.json").read_text()
    assert "NaN" not in text
    written = json.loads(text)
    assert list(written) == [*map(str, given), "decrease in %"]
    assert written["decrease in %"] is None
