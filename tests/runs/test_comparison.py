"""Runs side by side: one row each, with what differs and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roadmap.config.settings import OptimSettings, Settings
from roadmap.runs import Run, table


def finished(folder: Path, after: dict[str, Any] | None, **settings: Any) -> Path:
    run = Run.create(Settings(**({"run": str(folder), "optim": OptimSettings()} | settings)))
    if after is not None:
        run.write_json("summary.json", {"after": after, "best epoch": 3, "training seconds": 1.5})
    run.close()
    return folder


def test_what_differs_and_what_came_of_it(tmp_path: Path) -> None:
    one = finished(tmp_path / "a", {"cub": {"R@1": 0.5, "mAP@R": 0.25, "queries": 3}}, loss={"name": "supap"})
    other = finished(
        tmp_path / "b",
        {"cub": {"R@1": 0.75, "mAP@R": 0.5, "queries": 3}},
        loss={"name": "roadmap", "lam": 0.5},
        optim=OptimSettings(lr=0.5),
        seed=2,
    )
    assert table([one, other]) == [
        {
            "run": "a",
            "loss": "supap",
            "optim.lr": 0.001,
            "seed": 0,
            "loss.lam": None,
            "R@1": 0.5,
            "mAP@R": 0.25,
            "best epoch": 3,
            "training seconds": 1.5,
        },
        {
            "run": "b",
            "loss": "roadmap",
            "optim.lr": 0.5,
            "seed": 2,
            "loss.lam": 0.5,
            "R@1": 0.75,
            "mAP@R": 0.5,
            "best epoch": 3,
            "training seconds": 1.5,
        },
    ]
    assert list(table([other, one])[0]) == list(table([other, one])[1])  # the same columns in the same order


def test_a_run_that_is_not_finished_has_no_numbers(tmp_path: Path) -> None:
    rows = table([finished(tmp_path / "a", None), finished(tmp_path / "b", {"x": {"R@1": 0.5}}, seed=1)])
    assert rows == [
        {"run": "a", "seed": 0, "R@1": None, "best epoch": None, "training seconds": None},
        {"run": "b", "seed": 1, "R@1": 0.5, "best epoch": 3, "training seconds": 1.5},
    ]


def test_several_test_sets_are_named(tmp_path: Path) -> None:
    metrics = {"easy mAP": 0.9, "medium mAP": 0.5, "hard mAP": 0.2}
    (row,) = table([finished(tmp_path / "a", {"roxford5k": metrics, "mine": {"mAP@R": 0.5}})])
    assert row == {
        "run": "a",
        "roxford5k easy mAP": 0.9,
        "roxford5k medium mAP": 0.5,
        "mine mAP@R": 0.5,
        "best epoch": 3,
        "training seconds": 1.5,
    }


def test_no_runs_are_no_rows(tmp_path: Path) -> None:
    assert table([]) == []
    with pytest.raises(FileNotFoundError, match="is not a run: it has no config.yaml"):
        table([tmp_path])
