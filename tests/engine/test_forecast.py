"""A dry run: what would be chosen, how long it would take and how much it would write, without doing it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from roadmap.cli.app import app
from roadmap.config.settings import Settings
from roadmap.engine import fit, plan
from roadmap.engine.auto import unresolved
from roadmap.models import WeightsError
from roadmap.runs import Run

from .worlds import SIDE, summary, tiny, write_classes


@pytest.fixture(autouse=True)
def _nobody_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise WeightsError(f"{name}: nobody answers")

    def download(name: str) -> None:
        raise AssertionError(f"{name} would be downloaded")

    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("roadmap.engine.auto.check_hub", refuse)
    monkeypatch.setattr("roadmap.engine.auto.hub_file", download)


def everything_in(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_it_tells_what_the_run_then_does(tmp_path: Path) -> None:
    settings = tiny(write_classes(tmp_path / "own", range(24)), tmp_path / "run", epochs=2, data__side="auto")
    before = everything_in(tmp_path)
    found = plan(settings)
    assert everything_in(tmp_path) == before  # nothing was written
    assert unresolved(found.settings) == []
    folder = fit(settings, quiet=True)
    assert summary(folder)["steps"] == found.steps == 4
    assert Run.open(folder).settings().data.side == found.settings.data.side
    assert found.settings.data == Run.open(folder).settings().data
    assert found.rate > 0
    assert found.seconds == pytest.approx(found.steps * settings.data.batch_size / found.rate)


def test_the_disk_is_reckoned(tmp_path: Path) -> None:
    settings = tiny(write_classes(tmp_path / "own", range(8)), tmp_path / "run", data__side=64)
    packed, unpacked = plan(settings).disk, plan(tiny(tmp_path / "own", tmp_path / "run", data__pack="no")).disk
    assert packed - unpacked == 4 * 48 * SIDE**2  # smaller pictures are kept as they are
    small = plan(tiny(tmp_path / "own", tmp_path / "run", data__side=8)).disk
    assert small - unpacked == 4 * 48 * 8**2
    folder = fit(settings, quiet=True)
    written = sum(path.stat().st_size for path in (folder / "checkpoints").iterdir())
    assert unpacked == pytest.approx(written, rel=0.25)
    assert plan(settings).disk == unpacked  # the pack is there now


def test_pictures_that_choose_the_epoch_are_not_counted_among_those_of_the_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny(write_classes(tmp_path / "own", range(24)), tmp_path / "run", epochs=1)
    line = next(line for line in plan(settings).lines() if line.startswith("pictures"))
    assert line.endswith("train 108 of 18 classes, validation 18 of 3 classes, test 18 of 3 classes")
    fit(settings)
    assert line in capsys.readouterr().out.splitlines()  # as the run says it


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__root": "nowhere"}, "nowhere"),
        ({"select__metric": "mAP@Q"}, "mAP@Q"),
        ({"dims": [8, 999]}, "dims=999: the model has"),
        ({"loss": {"name": "hierarchical_ap"}}, "compares by a tree of labels"),
        ({"model__weights": "nowhere.pth"}, "nowhere.pth; there is no such file"),
    ],
)
def test_what_cannot_run_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    settings = tiny(write_classes(tmp_path / "own", range(8)), tmp_path / "run", **changes)
    for begin in (plan, fit):
        with pytest.raises((ValueError, OSError), match=words):
            begin(settings)


@pytest.mark.parametrize(
    "changes",
    [
        {"dims": [8], "select__metric": "8-d mAP@R"},
        {"loss": {"name": "hierarchical_ap"}, "select__metric": "H-AP"},
    ],
)
def test_an_epoch_may_be_chosen_by_all_that_the_run_measures(changes: dict[str, Any], tmp_path: Path) -> None:
    write_classes(tmp_path / "own" / "few", range(8))
    write_classes(tmp_path / "own" / "more", range(8, 16))
    assert plan(tiny(tmp_path / "own", tmp_path / "run", **changes)).steps == 8


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_classes(tmp_path / "own", range(6), side=130)
    before = everything_in(tmp_path)
    done = CliRunner().invoke(app, ["train", "data=folder", "data.root=own", "hardware.device=cpu", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert everything_in(tmp_path) == before
    assert done.output.startswith(
        "starting   roadmap on folder, seed 0\nWARNING: no pretrained network can be had here"
    )
    assert done.output.count("WARNING") == 1
    assert re.search(r"^pictures   folder: train 24 of 6 classes, test 12 of 6 classes$", done.output, re.MULTILINE)
    assert "\ntraining   60 epochs, 600 steps, batches of 24, 4 of a class, adamw at 0.01\n" in done.output
    assert re.search(r"^time       about \d+ \w+ \(an estimate: [\d,]+ pictures a second, tried", done.output, re.M)
    assert re.search(r"^disk       about \d+ MB \(an estimate\)$", done.output, re.MULTILINE)
    assert done.output.endswith("Nothing was written. Leave out --dry-run to start.\n")


def test_from_python_as_from_the_command_line(tmp_path: Path) -> None:
    write_classes(tmp_path / "own", range(6))
    asked = Settings.from_dict({"data": {"name": "folder", "root": str(tmp_path / "own")}})
    assert plan(asked).settings.epochs == 60
    assert asked.epochs == "auto"  # type: ignore[comparison-overlap]
