"""A run's folder: what lies where, what comes back as it was, and what a kill may leave."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roadmap.config.settings import DataSettings, HardwareSettings, ModelSettings, OptimSettings, Settings
from roadmap.runs import Run, machine
from roadmap.runs import folder as folders
from roadmap.runs.machine import environment

from ..waiting import PATIENCE

NOON = time.strptime("2021-12-06 12:00:00", "%Y-%m-%d %H:%M:%S")


def settings(folder: Path, **more: Any) -> Settings:
    return Settings(**({"out": str(folder), "model": ModelSettings()} | more))


def test_what_a_new_run_holds(tmp_path: Path) -> None:
    run = Run.create(settings(tmp_path), NOON)
    assert run.folder == tmp_path / "2021-12-06_12-00-00_glyphs_small_cnn_roadmap_seed0"
    assert sorted(path.name for path in run.folder.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.yaml",
        "environment.json",
        "evaluations",
    ]
    assert run.last == run.folder / "checkpoints" / "last.pt"
    assert run.best == run.folder / "checkpoints" / "best.safetensors"
    assert run.summary() == {}
    assert list(run.history()) == []


def test_the_name_of_a_folder(tmp_path: Path) -> None:
    named = settings(tmp_path, recipe="cub/vits: new", seed=7, loss={"name": "supap"})
    assert Run.create(named, NOON).folder.name == "2021-12-06_12-00-00_cub_vits__new_supap_seed7"
    odd = settings(tmp_path, model=ModelSettings(name="test_vit.r160_in1k"))
    assert Run.create(odd, NOON).folder.name == "2021-12-06_12-00-00_glyphs_test_vit.r160_in1k_roadmap_seed0"


def test_runs_of_the_same_second_do_not_meet(tmp_path: Path) -> None:
    names = [Run.create(settings(tmp_path), NOON).folder.name for _ in range(3)]
    first = "2021-12-06_12-00-00_glyphs_small_cnn_roadmap_seed0"
    assert names == [first, f"{first}_2", f"{first}_3"]


def create(folder: Path, barrier: Any, names: Any) -> None:
    barrier.wait()
    names.put(Run.create(settings(folder), NOON).folder.name)


def test_processes_of_a_sweep_that_start_together_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one has looked and found the name free before any of them takes it."""
    monkeypatch.setattr(folders, "environment", dict)
    context = multiprocessing.get_context("fork")
    count = 8
    barrier, names = context.Barrier(count), context.Queue()
    processes = [context.Process(target=create, args=(tmp_path, barrier, names)) for _ in range(count)]
    for process in processes:
        process.start()
    found = [names.get(timeout=PATIENCE) for _ in processes]
    for process in processes:
        process.join()
    assert len(set(found)) == count
    assert len(list(tmp_path.iterdir())) == count


def test_a_name_that_is_taken_between_looking_and_making(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same race, without luck: another process takes the name just before this one does."""
    taken = tmp_path / "2021-12-06_12-00-00_glyphs_small_cnn_roadmap_seed0"
    real = Path.mkdir

    def mkdir(self: Path, *more: Any, **named: Any) -> None:
        if taken in (self, *self.parents) and not taken.exists():
            real(taken, parents=True)
        real(self, *more, **named)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert Run.create(settings(tmp_path), NOON).folder == tmp_path / f"{taken.name}_2"


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    wanted = tmp_path / "deep" / "mine"
    run = Run.create(settings(tmp_path, run=str(wanted)))
    assert run.folder == wanted
    run.write_json("summary.json", {})
    run.close()
    with pytest.raises(FileExistsError, match=r"mine already holds a run; give another run=FOLDER, or go on with it: roadmap train resume=.*mine"):  # fmt: skip  # noqa: E501
        Run.create(settings(tmp_path, run=str(wanted)))
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("kept")
    Run.create(settings(tmp_path, run=str(other)))
    assert (other / "notes.txt").read_text() == "kept"


@pytest.mark.parametrize(
    "came",
    [
        lambda run: run.last.write_bytes(b""),
        lambda run: run.best.write_bytes(b""),
        lambda run: run.evaluation_file("mine").write_bytes(b""),
        lambda run: run.log("train", 1, {"loss": 0.5}),
        lambda run: run.write_json("stopped.json", {}),
        lambda run: (run.folder / "environment.json").unlink(),  # somebody else's config.yaml
    ],
)
def test_a_run_of_which_something_came_keeps_its_folder(came: Callable[[Run], None], tmp_path: Path) -> None:
    mine = settings(tmp_path, run=str(tmp_path / "mine"))
    run = Run.create(mine)
    came(run)
    run.close()
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(FileExistsError, match="already holds a run"):
        Run.create(mine)
    assert before.items() <= {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}.items()


def test_a_run_of_which_nothing_came_gives_its_folder_up(tmp_path: Path) -> None:
    mine = settings(tmp_path, run=str(tmp_path / "mine"))
    failed = Run.create(dataclasses.replace(mine, epochs=3))
    failed.log("before", 0, {"metrics": {}})
    (failed.folder / "pictures.csv").write_text("of other pictures")
    (failed.folder / "notes.txt").write_text("kept")
    with pytest.raises(RuntimeError, match="is being written by"):
        Run.create(mine)
    failed.close()
    run = Run.create(mine)
    assert run.settings().epochs == mine.epochs
    assert list(run.history()) == []
    files = {".lock", "config.yaml", "environment.json", "notes.txt"}
    assert {path.name for path in run.folder.iterdir()} == {*files, *folders.PARTS}


def test_settings_come_back_equal(tmp_path: Path) -> None:
    odd = settings(
        tmp_path,
        data=DataSettings(
            name="folder", root="/data/Vögel – 鳥/no", test_sets={"roxford5k": "a: b"}, scale=[0.08, 1.0]
        ),
        model=ModelSettings(name="resnet50", dim=512, layer_norm=True),
        optim=OptimSettings(lr=1e-6, milestones=[30, 70], clip=1.0, ema=0.9999, head_lr=2e-5),
        hardware=HardwareSettings(precision="32", compile="no"),
        loss={"name": "roadmap", "tau": 0.01, "rho": 1e3, "delta": None, "include_self": True, "average": "all"},
        recipe="yes",
    )
    assert Run.create(odd, NOON).settings() == odd
    assert Run.open(Run.create(odd, NOON).folder).settings() == odd


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a run: it has no config.yaml"):
        Run.open(tmp_path)
    (tmp_path / "config.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match="config.yaml is not YAML"):
        Run.open(tmp_path).settings()
    (tmp_path / "config.yaml").write_text("- 1")
    with pytest.raises(ValueError, match="config.yaml must hold the settings of a run, got list"):
        Run.open(tmp_path).settings()
    (tmp_path / "config.yaml").write_text("optim: {lr: 1, momentun: 2}")
    with pytest.raises(ValueError, match="unknown setting optim.momentun"):
        Run.open(tmp_path).settings()
    (tmp_path / "config.yaml").write_text("optim: 3")
    with pytest.raises(ValueError, match="optim must hold settings by name, got int"):
        Run.open(tmp_path).settings()
    (tmp_path / "config.yaml").write_text("!!python/object/apply:os.system ['touch exploded']")
    with pytest.raises(ValueError, match="config.yaml is not YAML"):
        Run.open(tmp_path).settings()


def test_a_run_of_the_module_was_started_by_the_command_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/roadmap/__main__.py", "train"])
    found = json.loads((Run.create(settings(tmp_path), NOON).folder / "environment.json").read_text())
    assert found["command"] == ["roadmap", "train"]


def test_the_environment_tells_what_matters_and_nothing_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-hunter2")
    monkeypatch.setattr(sys, "argv", ["/home/someone/bin/roadmap", "train", "data.root=/given/by/the/user"])
    run = Run.create(settings(tmp_path), NOON)
    text = (run.folder / "environment.json").read_text()
    found = json.loads(text)
    assert found["command"] == ["roadmap", "train", "data.root=/given/by/the/user"]
    assert set(found) == {"started", "command", "python", "system", "packages", "gpus", "cuda", "cpu_threads", "commit"}
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"roadmap-retrieval", "torch", "timm", "numpy"} <= set(found["packages"])
    assert "hunter2" not in text
    here = [str(Path.home()), str(Path.cwd()), sys.prefix, str(tmp_path), "/home/"]
    assert not [path for path in here if path != "/" and path in text]


def git(*arguments: str, cwd: Path) -> None:
    options = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *options, *arguments], cwd=cwd, check=True, capture_output=True)


def test_the_commit_is_of_this_source_and_of_no_other_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment inside another project's checkout belongs to nobody's commit."""
    installed = tmp_path / "project" / ".venv" / "roadmap"
    installed.mkdir(parents=True)
    (installed / "runs.py").write_text("")
    monkeypatch.setattr(machine, "__file__", str(installed / "runs.py"))
    assert environment()["commit"] is None  # no repository at all
    git("init", "-q", cwd=tmp_path / "project")
    (tmp_path / "project" / ".gitignore").write_text(".venv\n")
    git("add", ".gitignore", cwd=tmp_path / "project")
    git("commit", "-q", "-m", "x", cwd=tmp_path / "project")
    assert environment()["commit"] is None
    git("add", "-f", ".venv", cwd=tmp_path / "project")
    git("commit", "-q", "-m", "y", cwd=tmp_path / "project")
    clean = environment()["commit"]
    assert clean is not None
    assert not clean.endswith("+")
    (installed / "runs.py").write_text("changed")
    assert environment()["commit"] == f"{clean}+"


def test_every_line_of_the_log_is_json(tmp_path: Path) -> None:
    run = Run.create(settings(tmp_path), NOON)
    run.log("before", 0, {"metrics": {"x": {"mAP": math.nan, "queries": 3}}})
    run.log("step", 1, {"epoch": 1, "loss": 0.1 + 0.2, "lr": 1e-300})
    run.log("evaluation", 1, {"epoch": 1, "split": "validation", "R@1": math.inf, "note": "Ü\u2028\n"})
    run.close()
    text = (run.folder / "metrics.jsonl").read_text()
    assert [json.loads(line, parse_constant=lambda _: pytest.fail("not JSON")) for line in text.split("\n")[:-1]] == [
        {"kind": "before", "step": 0, "metrics": {"x": {"mAP": None, "queries": 3}}},
        {"kind": "step", "step": 1, "epoch": 1, "loss": 0.30000000000000004, "lr": 1e-300},
        {"kind": "evaluation", "step": 1, "epoch": 1, "split": "validation", "R@1": None, "note": "Ü\u2028\n"},
    ]
    assert list(Run.open(run.folder).history()) == [json.loads(line) for line in text.split("\n")[:-1]]


def test_a_line_is_on_disk_when_it_is_logged(tmp_path: Path) -> None:
    run = Run.create(settings(tmp_path), NOON)
    run.log("step", 1, {"loss": 1.0})
    assert (run.folder / "metrics.jsonl").read_text() == '{"kind": "step", "step": 1, "loss": 1.0}\n'
    run.close()


@pytest.mark.parametrize("cut", [1, 10, 25])
def test_half_a_line_is_no_line(tmp_path: Path, cut: int) -> None:
    run = Run.create(settings(tmp_path), NOON)
    whole = '{"kind": "step", "step": 1}\n{"kind": "step", "step": 2}\n'
    (run.folder / "metrics.jsonl").write_text(whole + '{"kind": "step", "step": 3}'[:cut])
    assert [line["step"] for line in run.history()] == [1, 2]
    run.forget_after(9)
    run.log("step", 3, {})
    run.close()
    assert [line["step"] for line in run.history()] == [1, 2, 3]
    assert (run.folder / "metrics.jsonl").read_text().count("\n") == 3


def test_what_is_done_again_is_forgotten(tmp_path: Path) -> None:
    run = Run.create(settings(tmp_path), NOON)
    for step in (0, 1, 2, 3, 4):
        run.log("step", step, {"loss": step / 7})
    run.log("evaluation", 2, {"split": "validation"})
    run.close()
    run.forget_after(2)
    assert [(line["kind"], line["step"]) for line in run.history()] == [
        ("step", 0),
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
    ]
    assert [line["loss"] for line in run.history() if "loss" in line] == [0.0, 1 / 7, 2 / 7]
    run.forget_after(2, judged=1)
    assert [(line["kind"], line["step"]) for line in run.history()] == [("step", 0), ("step", 1), ("step", 2)]


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Run.create(settings(tmp_path), NOON)
    run.log("step", 3, {"epoch": 1, "loss": 0.5, "word": "x"})
    run.log("evaluation", 4, {"epoch": 1, "split": "validation", "mAP@R": 0.25})
    run.close()
    board = EventAccumulator(str(run.folder / "tensorboard"))
    board.Reload()
    assert sorted(board.Tags()["scalars"]) == ["evaluation validation/mAP@R", "step/loss"]
    (event,) = board.Scalars("evaluation validation/mAP@R")
    assert (event.step, event.value) == (4, 0.25)


def test_tensorboard_forgets_too(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Run.create(settings(tmp_path), NOON)
    for step in (1, 2, 3, 4):
        run.log("step", step, {"loss": 0.5})
    run.close()
    again = Run.open(run.folder)
    again.forget_after(2)
    for step in (3, 4):
        again.log("step", step, {"loss": 0.25})
    again.close()
    board = EventAccumulator(str(run.folder / "tensorboard"))
    board.Reload()
    shown = [(event.step, event.value) for event in board.Scalars("step/loss")]
    assert shown == [(1, 0.5), (2, 0.5), (3, 0.25), (4, 0.25)]


def test_tensorboard_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run = Run.create(settings(tmp_path), NOON)
    run.log("step", 1, {"loss": 0.5})
    run.close()
    assert len(list(run.history())) == 1
    assert not (run.folder / "tensorboard").exists()


def test_json_files_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(settings(tmp_path), NOON)
    run.write_json("summary.json", {"after": {"mAP": math.nan, "list": (1, math.inf)}, "steps": 3})
    assert run.summary() == {"after": {"mAP": None, "list": [1, None]}, "steps": 3}

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run.write_json("summary.json", {})
    monkeypatch.undo()
    assert run.summary()["steps"] == 3
    run.remove("summary.json")
    run.remove("summary.json")  # and it stays gone
    assert run.summary() == {}


def test_a_checkpoint_that_a_kill_left_half_written_is_no_state(tmp_path: Path) -> None:
    """The first one, in particular: there is nothing to go on from, and the run begins again."""
    run = Run.create(settings(tmp_path, run=str(tmp_path / "run")))
    run.close()
    left = [
        tmp_path / "run" / ".summary.0123456789ab.partial.json",
        tmp_path / "run" / "checkpoints" / ".last.0123456789ab.partial.pt",
        tmp_path / "run" / "checkpoints" / ".tmpdCIhY6",  # of safetensors
        tmp_path / "run" / "evaluations" / ".test.0123456789ab.partial.npz",
    ]
    for path in left:
        path.write_bytes(b"half")
    run = Run.open(tmp_path / "run")
    assert not run.has_state()
    assert all(path.exists() for path in left)  # whoever only reads removes nothing: another may be writing
    run.lock()
    assert not any(path.exists() for path in left)
    (tmp_path / "run" / "checkpoints" / "previous.pt").touch()
    assert run.has_state()
