"""The numbers of steps and epochs: pictures a second by the clock, and the mean loss of an epoch."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from roadmap.engine import Stopped, fit, loop, resume
from roadmap.engine.step import Outcome
from roadmap.engine.watch import Reading

from .worlds import Killed, kill_at, lines, tiny


def rates(folder: Path) -> list[float]:
    text = (folder / "metrics.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    return [line["pictures per second"] for line in found if line["kind"] == "step"]


@pytest.mark.parametrize("batches", [3, 45])
def test_pictures_per_second_are_those_of_the_clock(
    batches: int, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are read one step late, those of an epoch's last step at once: no step is taken to last no time."""
    real, least = loop.step, 0.02

    def slow(*arguments: Any) -> Any:
        time.sleep(least)
        return real(*arguments)

    monkeypatch.setattr(loop, "step", slow)
    folder = fit(tiny(pictures, tmp_path / "run", data__batches=batches, epochs=2, select__by="last"), quiet=True)
    found = rates(folder)
    assert len(found) == 2 * (3 if batches == 3 else 15)
    assert max(found) <= 8 / least  # pictures in a batch, seconds that a step takes at the least
    assert min(found) > 0


def test_a_rate_counts_every_picture_once() -> None:
    pace = loop.Pace(10.0)
    readings = [Reading(1, 0.0, 0.0, 8, 11.0), Reading(2, 0.0, 0.0, 6, 12.0), Reading(3, 0.0, 0.0, 8, 16.0)]
    for reading in readings[:2]:
        pace.add(reading)
    assert pace.rate(readings[1]) == 14 / 2
    pace.add(readings[2])
    assert pace.rate(readings[2]) == 8 / 4


def test_a_logged_step_has_its_epoch_and_the_rate_that_it_took(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[float] = []
    real = loop.step

    def watched(state: Any, batch: Any, parts: Any) -> Any:
        found = real(state, batch, parts)
        taken.append(parts.optimizer.param_groups[0]["lr"])
        return found

    monkeypatch.setattr(loop, "step", watched)
    changes = {"warmup": 1.0, "schedule": "multistep", "milestones": [2], "gamma": 0.25, "lr": 0.125}
    asked = {f"optim__{name}": value for name, value in changes.items()}
    folder = fit(tiny(pictures, tmp_path / "run", data__batches=3, epochs=3, select__by="last", **asked), quiet=True)
    steps = [line for line in lines(folder) if line["kind"] == "step"]
    assert [line["epoch"] for line in steps] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [line["lr"] for line in steps] == taken
    assert [rate / 0.125 for rate in taken] == [0.25, 0.5, 0.75, 1, 1, 1, 0.25, 0.25, 0.25]


def epoch_losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^epoch \d of \d  loss ([\d.]+)", said, re.MULTILINE)]


def test_the_loss_of_an_epoch_is_the_mean_over_it(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(state: Any, batch: Any, parts: Any) -> Outcome:
        state.step += 1
        return Outcome(state.step, torch.tensor([float(state.step), 1.0]), torch.ones(8), batch.indices)

    monkeypatch.setattr(loop, "step", told)
    settings = tiny(pictures, tmp_path / "run", data__batches=3, epochs=3)
    with monkeypatch.context() as patch:
        kill_at(patch, 6)
        with pytest.raises(Killed):
            fit(settings)
    resume(tmp_path / "run")
    assert epoch_losses(capsys.readouterr().out) == [2.0, 5.0, 8.0]  # steps 1 to 3, 4 to 6, 7 to 9


def test_the_loss_of_an_epoch_survives_a_stop_in_its_middle(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(state: Any, batch: Any, parts: Any) -> Outcome:
        state.step += 1
        if state.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return Outcome(state.step, torch.tensor([float(state.step), 1.0]), torch.ones(8), batch.indices)

    monkeypatch.setattr(loop, "step", told)
    with pytest.raises(Stopped):
        fit(tiny(pictures, tmp_path / "run", data__batches=3, epochs=3))
    resume(tmp_path / "run")
    assert epoch_losses(capsys.readouterr().out) == [2.0, 5.0, 8.0]
