"""What a person reads: everything that was decided, one line per epoch where nobody watches, and a table."""

from __future__ import annotations

import dataclasses
import io
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from roadmap.data import Records
from roadmap.engine import fit, loop, resume
from roadmap.engine.display import Display
from roadmap.engine.results import Results, choice_words, duration, remarks
from roadmap.engine.splits import Splits
from roadmap.engine.state import Best
from roadmap.engine.step import Outcome
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
        "device     cpu, precision 32",
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
    def nothing(state, batch, parts) -> Outcome:  # type: ignore[no-untyped-def]
        state.step += 1
        return Outcome(state.step, torch.tensor([float(state.step), 1.0]), torch.ones(8), batch.indices)

    monkeypatch.setattr(loop, "step", nothing)
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


# ---------------------------------------------------------------- words


def test_one_epoch_is_one_epoch(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tiny(pictures, tmp_path / "run", epochs=1))
    assert "training   1 epoch, batches of 8" in capsys.readouterr().out


def test_own_validation_pictures_are_called_so(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(shutil.copytree(pictures, tmp_path / "mine"))
    write_classes(root / "val", range(20, 23))
    fit(tiny(root, tmp_path / "run", epochs=1))
    said = capsys.readouterr().out
    assert said.count("chosen on your val/ pictures") == 2
    assert "held-out training classes" not in said


def test_a_resumed_run_still_says_that_classes_are_held_out(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though its stored division has validation pictures."""
    resume(fit(tiny(pictures, tmp_path / "run", epochs=1), quiet=True))
    assert capsys.readouterr().out.count("chosen on held-out training classes") == 2


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("table", True, "chosen on your validation pictures"),
        ("cub", True, "chosen on the validation pictures of cub"),
        ("cub", False, "chosen on held-out training classes"),
    ],
)
def test_how_the_epoch_is_chosen(name: str, given: bool, words: str) -> None:
    settings = tiny(Path("x"), Path("y"), data__name=name)
    assert choice_words(settings, dataclasses.replace(SPLITS, val_given=given)) == words


def test_a_pretrained_network_is_not_called_untrained(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = fit(tiny(pictures, tmp_path / "first", epochs=1), quiet=True)
    weights = str(first / "checkpoints" / "best.safetensors")
    fit(tiny(pictures, tmp_path / "run", epochs=1, model__weights=weights))
    said = capsys.readouterr().out
    assert "before training pictures: R@1 " in said
    assert "┃ before training ┃" in said
    assert "untrained" not in said


def results(before: float, after: float, queries: int) -> Results:
    return Results({"x": {"mAP@R": before}}, {"x": {"mAP@R": after, "queries": queries}}, None, 0)


def test_what_is_remarkable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tiny(tmp_path, tmp_path)
    assert list(remarks(settings, results(0.5, 0.5, 50))) == []
    assert list(remarks(settings, results(0.5, 0.6, 2))) == [
        "x has only 2 test pictures that search: one answer more or less moves R@1 by 50 points; test on more before "
        "you rely on it"
    ]
    (worse,) = remarks(settings, results(0.5, 0.4, 100))
    assert worse.startswith("training made x worse: mAP@R 50.00 before, 40.00 after. Try a lower optim.lr")
    Display().finish(Run(tmp_path), settings, SPLITS, results(0.5, 0.4, 2))
    assert capsys.readouterr().out.count("\nremark     ") == 2


def test_what_comes_next_names_the_pictures_that_were_tested_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny(tmp_path, tmp_path, data__test_sets={"roxford5k": "/data/a b"})
    Display().finish(Run(tmp_path / "run"), settings, SPLITS, results(0.1, 0.2, 90))
    page = "--page retrievals.html"
    assert f"roadmap evaluate {tmp_path / 'run'} --data roxford5k --root '/data/a b' {page}" in capsys.readouterr().out
    Display().finish(Run(tmp_path / "run"), settings, SPLITS, Results({}, {}, None, 1))
    said = capsys.readouterr().out
    assert f"next       roadmap embed {tmp_path / 'run'} --out vectors.npz" in said
    assert "1 picture could not be decoded and was left out" in said


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_the_epoch_and_the_time_left_and_every_epoch_leaves_a_line(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    fit(tiny(pictures, tmp_path / "run", data__batches=30, epochs=3))
    drawn = terminal.getvalue()
    assert "epoch 1/3: " in drawn
    assert "epoch 3/3: 100%" in drawn
    assert re.search(r"\[00:0\d<00:0\d, .*loss \d\.\d{3}", drawn)  # passed and left
    said = capsys.readouterr().out
    assert len(re.findall(r"^epoch \d of 3  loss", said, re.MULTILINE)) == 3
    assert " s left" not in said  # the bar says it


def test_where_nobody_watches_there_is_no_bar(
    pictures: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    fit(tiny(pictures, tmp_path / "run", epochs=3))
    said, drawn = capfd.readouterr()
    assert drawn == ""
    assert "\r" not in said
    assert len(re.findall(r"^epoch \d of 3  loss", said, re.MULTILINE)) == 3


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (9000, "2.5 h")]
)
def test_how_long_is_said(seconds: float, words: str) -> None:
    assert duration(seconds) == words
