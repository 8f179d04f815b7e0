"""A run that was stopped and resumed is the run that was not: weights, log and summary, to the last bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from roadmap.config.settings import ModelSettings, Settings
from roadmap.engine import TrainState, fit, job, resume
from roadmap.models import retriever, save_checkpoint
from roadmap.runs import Run

from .worlds import (
    IMAGE,
    Killed,
    assert_equal,
    assert_same_run,
    best_weights,
    kill_at,
    last,
    lines,
    measured,
    summary,
    tiny,
)

VIT = {"model__name": "test_vit.r160_in1k", "model__pooling": "auto", "model__drop_path": 0.5}
# Two batches an epoch, four epochs.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "average": {"optim__ema": 0.9, "optim__schedule": "cosine", "optim__warmup": 1.0},
    "stochastic depth": VIT,
    "biases": {**VIT, "model__learns": "biases", "optim__ema": 0.9, "optim__layer_decay": 0.8},
    "upper layers": {"model__freeze_layers": 2, "optim__name": "sgd", "model__dim": 4},
    "loss with weights": {"loss": {"name": "proxy_nca_pp"}, "optim__name": "sgd"},
    "two passes": {"data__chunk": 3, "memory__size": 11, "optim__ema": 0.9, **VIT},
    "random miner": {"loss": {"name": "triplet_distance_weighted"}},
    "decoded every time": {"data__pack": "no", "data__workers": 0, "select__by": "last", **VIT},
    "compressed pack": {"data__pack": "compressed", "data__side": 16, "select__by": "last", **VIT},
    "memory": {"memory__size": 11, "memory__warmup": 0.5},
    "memory with repeats": {"memory__size": 13, "memory__repeats": True, "loss": {"name": "contrastive_xbm"}},
    "bfloat16": {"hardware__precision": "bf16", "select__every": 3},
}


def stopped(settings: Settings, step: int) -> Path:
    """The folder of a run that was killed at the beginning of a step."""
    killed(step, lambda: fit(settings, quiet=True))
    return Path(settings.run or "")


def killed(step: int, call: Callable[[], Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, step)
        with pytest.raises(Killed):
            call()


@pytest.mark.parametrize("kind", list(KINDS))
def test_stopped_in_the_middle_of_an_epoch(kind: str, pictures: Path, tmp_path: Path) -> None:
    whole = fit(tiny(pictures, tmp_path / "whole", **KINDS[kind]), quiet=True)
    folder = stopped(tiny(pictures, tmp_path / "twice", **KINDS[kind]), step=6)
    assert last(folder)["step"] == 4  # the second of four epochs was saved, the third was under way
    torch.manual_seed(1234)  # another process would stand elsewhere
    assert resume(folder, quiet=True) == folder
    assert_same_run(whole, folder)


def test_stopped_again_and_again(pictures: Path, tmp_path: Path) -> None:
    whole = fit(tiny(pictures, tmp_path / "whole"), quiet=True)
    folder = stopped(tiny(pictures, tmp_path / "often"), step=4)
    for step in (5, 8):
        killed(step, lambda: resume(folder, quiet=True))
    resume(folder, quiet=True)
    assert_same_run(whole, folder)


def test_stopped_between_a_judgement_and_its_saving(pictures: Path, tmp_path: Path) -> None:
    """The epoch is in the log and perhaps among the weights, but not in the state: it is done again."""
    whole = fit(tiny(pictures, tmp_path / "whole"), quiet=True)
    folder = tmp_path / "twice"
    second_call_kills(job, "save_checkpoint", lambda: fit(tiny(pictures, folder), quiet=True))
    second_call_kills(TrainState, "save", lambda: resume(folder, quiet=True))
    resume(folder, quiet=True)
    assert_same_run(whole, folder)


def second_call_kills(owner: Any, name: str, call: Callable[[], Any]) -> None:
    calls, real = [0], getattr(owner, name)

    def once(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise Killed
        real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, once)
        with pytest.raises(Killed):
            call()


def test_the_kept_weights_are_those_of_the_state_not_of_a_file(pictures: Path, tmp_path: Path) -> None:
    """A best file that is gone, or was written just before a kill, must not become the result under a wrong name."""
    settings = tiny(pictures, tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "roadmap.engine.job.Job.evaluation", lambda job, *_: measured({"mAP@R": 1.0 / (1 + job.state.step)})
        )
        folder = stopped(settings, step=6)
        assert last(folder)["best"]["epoch"] == 1
        (folder / "checkpoints" / "best.safetensors").unlink()
        wanted = last(folder)["stateful"]["kept"]
        resume(folder, quiet=True)
    assert last(folder)["best"]["epoch"] == 1
    assert_equal(best_weights(folder), dict(wanted))


def test_a_finished_run_stays_as_it_is(pictures: Path, tmp_path: Path) -> None:
    folder = fit(tiny(pictures, tmp_path / "run"), quiet=True)
    before = {name: (folder / name).read_text() for name in ("metrics.jsonl", "summary.json", "config.yaml")}
    weights = best_weights(folder)
    resume(folder, quiet=True)
    assert {name: (folder / name).read_text() for name in before} == before
    assert_equal(best_weights(folder), weights)


def test_seconds_add_up(pictures: Path, tmp_path: Path) -> None:
    folder = stopped(tiny(pictures, tmp_path / "run"), step=6)
    first = last(folder)["seconds"]
    resume(folder, quiet=True)
    assert json.loads((folder / "summary.json").read_text())["training seconds"] > first > 0


def test_skipped_pictures_are_remembered(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    root = Path(shutil.copytree(pictures, tmp_path / "pictures"))
    (root / "test" / "c09" / "0.png").write_bytes(b"")  # met before the first epoch only, and at the end
    (root / "train" / "c00" / "0.png").write_bytes(b"")
    folder = stopped(tiny(root, tmp_path / "run", data__on_error="skip", data__batches=8, select__by="last"), step=12)
    assert len(last(folder)["stateful"]["pictures"]["skipped"]) == 2
    resume(folder, quiet=True)
    assert summary(folder)["skipped pictures"] == 2


def test_the_log_forgets_what_is_done_again(pictures: Path, tmp_path: Path) -> None:
    settings = tiny(pictures, tmp_path / "run", checkpoint_minutes=0.0)
    folder = stopped(settings, step=6)
    assert max(line["step"] for line in lines(folder)) == 4  # step 5 was seen one step late, so not yet
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 5, "loss": 0.1}\n{"kind": "ste')  # what a kill may leave
    resume(folder, quiet=True)
    found = [line["step"] for line in lines(folder) if line["kind"] == "step"]
    assert found == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_saved_state_is_not_written_more_often_than_asked(pictures: Path, tmp_path: Path) -> None:
    folder = stopped(tiny(pictures, tmp_path / "run", checkpoint_minutes=60.0), step=8)
    assert not Run(folder).last.exists()
    finished = fit(tiny(pictures, tmp_path / "other", checkpoint_minutes=60.0), quiet=True)
    assert last(finished)["step"] == 8  # the end is always saved


@pytest.mark.parametrize("kind", ["plain", "average", "stochastic depth", "loss with weights"])
def test_a_run_that_ended_before_anything_was_saved_begins_again(kind: str, pictures: Path, tmp_path: Path) -> None:
    whole = fit(tiny(pictures, tmp_path / "whole", **KINDS[kind]), quiet=True)
    folder = stopped(tiny(pictures, tmp_path / "twice", **KINDS[kind], checkpoint_minutes=60.0), step=6)
    assert not Run(folder).last.exists()
    torch.manual_seed(1234)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("checkpoint_minutes: 60.0", "checkpoint_minutes: 0.0"))
    resume(folder, quiet=True)
    assert_same_run(whole, folder)


def test_a_run_that_begins_again_begins_with_its_weights(pictures: Path, tmp_path: Path) -> None:
    """Nothing was saved that would bring them."""
    torch.manual_seed(99)
    save_checkpoint(tmp_path / "start.safetensors", retriever(ModelSettings(pooling="max"), IMAGE), {})
    given = {"model__weights": str(tmp_path / "start.safetensors"), "checkpoint_minutes": 60.0}
    whole = fit(tiny(pictures, tmp_path / "whole", **given), quiet=True)
    folder = stopped(tiny(pictures, tmp_path / "twice", **given), step=6)
    resume(folder, quiet=True)
    assert_same_run(whole, folder)


def test_a_run_that_failed_while_pictures_were_packed_begins_again(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit(tiny(pictures, tmp_path / "whole"), quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(job.Pictures, "open_pack", lambda *_: (_ for _ in ()).throw(OSError("no space left on device")))
        with pytest.raises(OSError, match="no space left"):
            fit(tiny(pictures, tmp_path / "twice"), quiet=True)
    assert_same_run(whole, resume(tmp_path / "twice", quiet=True))


@pytest.mark.parametrize("change", ["gone", "renamed", "moved to another class"])
def test_other_pictures_than_the_run_began_with_are_refused(change: str, pictures: Path, tmp_path: Path) -> None:
    """Batches are drawn by the order of the pictures: one less, and every batch would be another."""
    root = Path(shutil.copytree(pictures, tmp_path / "pictures"))
    folder = stopped(tiny(root, tmp_path / "run", data__pack="no", data__workers=0), step=6)
    first = root / "train" / "c00" / "0.png"
    if change == "gone":
        first.unlink()
    elif change == "renamed":
        first.rename(first.with_name("other.png"))
    else:
        first.rename(root / "train" / "c01" / "new.png")
    with pytest.raises(
        ValueError, match=r"the training pictures changed since the run began \(\d+ of \d classes then, "
    ):
        resume(folder, quiet=True)


def test_pictures_that_were_added_since_are_left_out(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on with those it began with, to the bit: also where a new class would change the draw."""
    root = Path(shutil.copytree(pictures, tmp_path / "pictures"))
    whole = fit(tiny(root, tmp_path / "whole"), quiet=True)
    folder = stopped(tiny(root, tmp_path / "run"), step=6)
    shutil.copy(root / "train" / "c00" / "0.png", root / "train" / "c00" / "00.png")
    shutil.copytree(root / "train" / "c00", root / "train" / "a new class, before all others")
    resume(folder)
    assert "8 pictures are new since the run began and left out (train/a new class" in capsys.readouterr().out
    assert_same_run(whole, folder)


def test_the_same_pictures_elsewhere_are_the_same(pictures: Path, tmp_path: Path) -> None:
    """A run may be moved to another machine with its data."""
    whole = fit(tiny(pictures, tmp_path / "whole"), quiet=True)
    folder = stopped(tiny(pictures, tmp_path / "moved"), step=6)
    elsewhere = shutil.copytree(pictures, tmp_path / "elsewhere" / "pictures")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace(str(pictures), str(elsewhere)))
    resume(folder, quiet=True)
    assert_equal(lines(folder), lines(whole))
    assert_equal(best_weights(folder), best_weights(whole))


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a run: it has no config.yaml"):
        resume(tmp_path)


def test_a_process_that_was_killed(pictures: Path, tmp_path: Path) -> None:
    """kill -9 at any moment of the fourth epoch: no handler runs, no file is closed."""
    settings = tiny(pictures, tmp_path / "killed", optim__ema=0.9)
    whole = fit(tiny(pictures, tmp_path / "whole", optim__ema=0.9), quiet=True)
    program = """
import json, sys, time
from roadmap.config.settings import ModelSettings, Settings
from roadmap.engine import fit, loop
real = loop.step
def step(state, batch, parts):
    if state.step == 7:
        print("ready", flush=True)
        time.sleep(600)
    return real(state, batch, parts)
loop.step = step
fit(Settings.from_dict(json.loads(sys.argv[1])), quiet=True)
"""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, json.dumps(settings.as_dict())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    folder = resume(tmp_path / "killed", quiet=True)
    assert_same_run(whole, folder)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing"])
def test_a_damaged_state_is_told_and_the_one_before_used(
    damage: str, pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = fit(tiny(pictures, tmp_path / "whole"), quiet=True)
    folder = stopped(tiny(pictures, tmp_path / "run"), step=8)
    state = Run(folder).last
    content = state.read_bytes()
    middle = len(content) // 2
    state.unlink()  # previous.pt may be another name of the same file
    if damage == "truncated":
        state.write_bytes(content[:middle])
    elif damage == "flipped":
        state.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "empty":
        state.touch()
    resume(folder, quiet=True)
    assert str(state) in caplog.text
    assert "the run goes on from the state before it, that of step 4" in caplog.text
    assert_same_run(whole, folder)
