"""TensorBoard shows every curve once, none that never moves, and pictures."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from roadmap.runs.board import Board

pytest.importorskip("tensorboard")


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_curves(tmp_path: Path) -> None:
    board = Board(tmp_path)
    metrics = {"R@1": 0.5, "P@1": 0.5, "mAP": 0.25, "AP loss": 0.75, "queries": 9, "queries_without_positives": 0}
    board.add("evaluation validation", 4, {"epoch": 1, "split": "validation", **metrics})
    board.add("evaluation test", 4, {"medium mP@1": 0.5, "medium queries": 70})
    for step in (1, 2, 3):
        board.add("step", step, {"epoch": 1, "loss": 0.5, "lr": 0.25 if step < 3 else 0.125, "fine": True})
    board.close()
    assert shown(tmp_path) == {
        "evaluation validation/R@1": [(4, 0.5)],
        "evaluation validation/mAP": [(4, 0.25)],
        "evaluation test/medium mP@1": [(4, 0.5)],
        "step/loss": [(1, 0.5), (2, 0.5), (3, 0.5)],
        "step/lr": [(1, 0.25), (3, 0.125)],
    }


def test_pictures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = Board(tmp_path)
    assert board.is_there()
    board.add_picture("retrievals/x", 7, np.full((4, 6, 3), 200, dtype=np.uint8))
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (image,) = events.Images("retrievals/x")
    assert (image.step, image.width, image.height) == (7, 6, 4)


def test_nothing_is_written_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    board = Board(tmp_path / "none")
    board.add("step", 1, {"loss": 0.5})
    board.add_picture("x", 1, np.zeros((1, 1, 3), dtype=np.uint8))
    assert not board.is_there()
    board.close()
    assert not (tmp_path / "none").exists()


def test_a_board_that_nobody_writes_to_leaves_nothing(tmp_path: Path) -> None:
    Board(tmp_path / "none").close()
    assert not (tmp_path / "none").exists()
