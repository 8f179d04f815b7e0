"""What a person reads: everything that was decided, one line per epoch where nobody watches, and a table."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from roadmap.data import Records
from roadmap.engine import fit
from roadmap.engine.display import Display
from roadmap.engine.results import Results
from roadmap.engine.splits import Splits
from roadmap.engine.state import Best
from roadmap.runs import Run

from .worlds import lines, tiny, write_classes

NONE = Records("none", Path("/none"), (), np.zeros(0))
SPLITS = Splits(NONE, NONE, None, ())


def test_a_run_says_what_it_does(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tiny(pictures, tmp_path / "run", loss={"name": "roadmap", "tau": 0.05}, epochs=2)
    fit(settings)
    said = capsys.readouterr().out
    for words in (
        f"run        {tmp_path / 'run'}",
        "pictures   folder: train 36 of 6 classes, validation 12 of 2 classes, test 24 of 4 classes",
        "model      small_cnn, 256 dimensions, 0.4 M parameters, weights random",
        "loss       roadmap (tau 0.05)",
        "training   2 epochs, batches of 8, 2 of a class, adamw at 0.01, seed 0",
        "device     cpu, precision 32-true",
        "best epoch chosen on held-out training classes",
        "untrained  pictures: R@1 ",
        "pictures, test: chosen on held-out training classes",
        f"the model  {tmp_path / 'run' / 'checkpoints' / 'best.safetensors'}",
        f"next       roadmap evaluate {tmp_path / 'run'} --page retrievals.html",
    ):
        assert words in said
    assert re.search(
        r"^epoch 1 of 2  loss \d\.\d{4}, validation R@1 [\d.]+, mAP@R [\d.]+ \(best\), \d+ s left$", said, re.MULTILINE
    )
    assert re.search(r"^epoch 2 of 2  loss [^\n]*mAP@R [\d.]+( \(best\))?$", said, re.MULTILINE)
    untrained, trained, change = map(float, re.search(r"mAP@R +│ +([\d.]+) │ +([\d.]+) │ +([+-][\d.]+)", said).groups())  # type: ignore[union-attr]
    assert change == pytest.approx(trained - untrained, abs=0.011)
    assert f"untrained  pictures: R@1 {re.search(r'R@1 +│ +([0-9.]+)', said)[1]}" in said  # type: ignore[index]


def test_an_epoch_that_was_not_judged_shows_no_metrics(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tiny(pictures, tmp_path / "run", select__every=2))
    epochs = re.findall(r"^epoch (\d) of 4  loss [\d.]+(.*?)(?:, \d+ s left)?$", capsys.readouterr().out, re.MULTILINE)
    assert [number for number, _ in epochs] == ["1", "2", "3", "4"]
    assert [bool(metrics) for _, metrics in epochs] == [False, True, False, True]


def test_quiet_prints_nothing_at_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even while pictures are packed."""
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    write_classes(tmp_path / "own" / "train", range(8))
    fit(tiny(tmp_path / "own", tmp_path / "run", epochs=1), quiet=True)
    assert capfd.readouterr() == ("", "")


def test_names_with_brackets_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "my [old] pictures"
    write_classes(root / "train", range(8))
    write_classes(root / "test", range(8, 10))
    fit(tiny(root, tmp_path / "run [red]", epochs=1))
    said = capsys.readouterr().out
    assert f"run        {tmp_path / 'run [red]'}\n" in said
    assert "my [old] pictures, test: chosen" in said
    assert f"roadmap evaluate '{tmp_path / 'run [red]'}' --page" in said  # ready to be pasted into a shell


def test_the_table_has_a_dash_where_there_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    before = {"x": {"mAP": math.nan, "R@1": 0.5, "queries": 7}}
    after = {"x": {"mAP": 0.25, "R@1": math.nan, "queries": 7}, "y": {"R@1": 1.0}}
    display.finish(Run(tmp_path), tiny(tmp_path, tmp_path), SPLITS, Results(before, after, Best(3, 0.5, {}), 2))
    said = capsys.readouterr().out
    assert re.search(r"mAP +│ +- │ +25\.00 │ +│", said)
    assert re.search(r"R@1 +│ +50\.00 │ +- │ +│", said)
    assert re.search(r"queries +│ +7 │ +7 │ +│", said)
    assert re.search(r"R@1 +│ +- │ +100\.00 │ +│", said)
    assert "trained (epoch 3)" in said
    assert "2 pictures could not be decoded and were left out" in said


@pytest.mark.parametrize(("batches", "most"), [(2, 2), (39, 20), (120, 20)])
def test_an_epoch_is_logged_in_so_many_lines_and_its_last_step_is_among_them(
    batches: int, most: int, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    import torch

    from roadmap.engine.step import Outcome

    def nothing(state, batch, parts) -> Outcome:  # type: ignore[no-untyped-def]
        state.step += 1
        return Outcome(state.step, torch.tensor([float(state.step), 1.0]), torch.ones(8), batch.indices)

    monkeypatch.setattr(importlib.import_module("roadmap.engine.loop"), "step", nothing)
    folder = fit(
        tiny(pictures, tmp_path / "run", data__batches=batches, epochs=2, optim__schedule="cosine"), quiet=True
    )
    steps = [line for line in lines(folder) if line["kind"] == "step"]
    for epoch in (1, 2):
        mine = [line["step"] for line in steps if line["epoch"] == epoch]
        assert 0 < len(mine) <= most
        assert len(mine) > most // 2 - 1
        assert mine[-1] == epoch * batches
        assert (epoch - 1) * batches < mine[0]
    assert all(line["loss"] == line["step"] for line in steps)  # each line has its own step's numbers
    last_rate = 0.01 * 0.5 * (1 + math.cos(math.pi * (2 * batches - 1) / (2 * batches)))
    assert steps[-1]["lr"] == pytest.approx(last_rate)
