"""Ctrl-C, SIGTERM and kill -9, for real: the run leaves within seconds, and goes on as if it had never stopped."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from roadmap.config.settings import Settings
from roadmap.engine import Stopped, TrainState, fit, job, loop, resume, training
from roadmap.engine.stopping import Signals
from roadmap.runs import Run

from ..waiting import PATIENCE
from .worlds import Killed, assert_same_run, kill_at, last, lines, tiny

SEED = random.SystemRandom().randrange(10**6)  # other moments every time; a failure shows it


def tell(number: int) -> None:
    os.kill(os.getpid(), number)


@contextmanager
def calling(owner: Any, name: str, at: int, action: Callable[[], None], after: bool = False) -> Iterator[None]:
    """At call number `at` of a function, the action happens first, or last."""
    real, calls = getattr(owner, name), [0]

    def called(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == at and not after:
            action()
        found = real(*arguments, **named)
        if calls[0] == at and after:
            action()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, called)
        yield


@pytest.fixture(scope="module")
def whole(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that was never stopped: 3 epochs of 3 batches."""
    return fit(settings(pictures, tmp_path_factory.mktemp("stopping") / "whole"), quiet=True)


def settings(pictures: Path, run: Path) -> Settings:
    return tiny(pictures, run, data__batches=3, epochs=3, optim__ema=0.9, checkpoint_minutes=60.0)


# place: how the function that is under way is found, at which of its calls, and what is saved
PLACES: dict[str, tuple[Any, str, int, str | None]] = {
    "reading the pictures": (training, "records_of", 1, None),
    "making the folder": (Run, "save_division", 1, None),
    "packing": (job.Pictures, "open_pack", 1, None),
    "before training": (job.Job, "evaluation", 1, "after step 0, in epoch 1 of 3"),
    "the first step": (loop, "step", 1, "after step 1, in epoch 1 of 3"),
    "the middle of an epoch": (loop, "step", 5, "after step 5, in epoch 2 of 3"),
    "the last step of an epoch": (loop, "step", 6, "after step 6, in epoch 3 of 3"),
    "judging": (job.Job, "evaluation", 3, "after step 6, in epoch 3 of 3"),
    "keeping the best": (job.Retriever, "load_state_dict", 1, "after step 3, in epoch 2 of 3"),
    "the last step": (loop, "step", 9, "after step 9, in epoch 3 of 3"),
    "saving": (TrainState, "save", 1, "after step 9, in epoch 3 of 3"),
    "testing": (job.Job, "evaluation", 5, "after step 9, in epoch 3 of 3"),
}


@pytest.mark.parametrize(
    ("place", "number"),
    [*((place, signal.SIGTERM) for place in PLACES), ("judging", signal.SIGINT), ("packing", signal.SIGUSR1)],
)
def test_a_signal_anywhere_loses_nothing(
    place: str, number: signal.Signals, whole: Path, pictures: Path, tmp_path: Path
) -> None:
    owner, name, at, saved = PLACES[place]
    folder = tmp_path / "run"
    with calling(owner, name, at, lambda: tell(number)), pytest.raises(Stopped) as caught:
        fit(settings(pictures, folder), quiet=True)
    stopped = caught.value
    assert stopped.exit_code == 128 + number
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # as before
    if place == "reading the pictures":
        assert (stopped.folder, str(stopped)) == (None, "stopped before a run folder was made")
        assert not folder.exists()
        return
    assert stopped.folder == folder
    done = "stopped, nothing new was saved" if saved is None else f"stopped and saved {saved}"
    assert str(stopped) == f"{done}. Go on:  roadmap train resume={folder}"
    assert Run(folder).last.exists() == (saved is not None)
    assert not (folder / "summary.json").exists()
    resume(folder, quiet=True)
    assert_same_run(whole, folder)


def test_stopped_again_and_again(whole: Path, pictures: Path, tmp_path: Path) -> None:
    """A step at a time."""
    folder = tmp_path / "run"
    with calling(loop, "step", 1, lambda: tell(signal.SIGINT)), pytest.raises(Stopped):
        fit(settings(pictures, folder), quiet=True)
    for _ in range(8):
        with calling(loop, "step", 1, lambda: tell(signal.SIGTERM)), pytest.raises(Stopped):
            resume(folder, quiet=True)
    assert last(folder)["step"] == 9
    resume(folder, quiet=True)
    assert_same_run(whole, folder)


def test_stopped_before_an_epoch_is_judged_and_killed_after_it(whole: Path, pictures: Path, tmp_path: Path) -> None:
    """The judgement that was not saved is made again, and is in the log once."""
    folder = tmp_path / "run"
    with (
        calling(loop, "step", 3, lambda: tell(signal.SIGTERM)),
        pytest.raises(Stopped, match="after step 3, in epoch 2"),
    ):
        fit(settings(pictures, folder), quiet=True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):  # noqa: PT012
        kill_at(patch, 5)
        resume(folder, quiet=True)
    assert lines(folder)[-1]["kind"] == "evaluation"
    resume(folder, quiet=True)
    assert_same_run(whole, folder)


def test_a_second_signal_does_not_wait(whole: Path, pictures: Path, tmp_path: Path) -> None:
    """Twice in the middle of a step: what is in memory may be half done and is not saved."""

    def impatient() -> None:
        tell(signal.SIGINT)
        tell(signal.SIGINT)
        pytest.fail("the step went on")

    with calling(loop, "step", 5, impatient), pytest.raises(Stopped) as caught:
        fit(settings(pictures, tmp_path / "run"), quiet=True)
    assert "stopped, nothing new was saved. Go on:" in str(caught.value)
    assert not Run(tmp_path / "run").last.exists()
    resume(tmp_path / "run", quiet=True)
    assert_same_run(whole, tmp_path / "run")


def test_a_second_signal_while_saving(whole: Path, pictures: Path, tmp_path: Path) -> None:
    with (
        calling(loop, "step", 5, lambda: tell(signal.SIGINT)),
        calling(TrainState, "save", 1, lambda: tell(signal.SIGINT)),
        pytest.raises(Stopped, match="nothing new was saved"),
    ):
        fit(settings(pictures, tmp_path / "run"), quiet=True)
    resume(tmp_path / "run", quiet=True)
    assert_same_run(whole, tmp_path / "run")


def test_ignored_signals_stay_ignored() -> None:
    """As under nohup."""
    kept = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals() as signals:
            tell(signal.SIGINT)
        assert signals.number is None
    finally:
        signal.signal(signal.SIGINT, kept)


def test_a_schedulers_own_handler_is_told_when_all_is_saved(whole: Path, pictures: Path, tmp_path: Path) -> None:
    """As submitit's, which puts the job back into the queue and ends it."""
    found: list[tuple[int, int]] = []

    def requeue(number: int, frame: Any) -> None:
        found.append((number, last(tmp_path / "run")["step"]))
        Run.open(tmp_path / "run").lock()  # is free again
        sys.exit(-1)

    kept = signal.signal(signal.SIGUSR2, requeue)
    try:
        with calling(loop, "step", 5, lambda: tell(signal.SIGUSR2)), pytest.raises(SystemExit):
            fit(settings(pictures, tmp_path / "run"), quiet=True)
        assert signal.getsignal(signal.SIGUSR2) is requeue
    finally:
        signal.signal(signal.SIGUSR2, kept)
    assert found == [(signal.SIGUSR2, 5)]
    resume(tmp_path / "run", quiet=True)
    assert_same_run(whole, tmp_path / "run")


def test_a_time_limit_of_its_own(pictures: Path, whole: Path, tmp_path: Path) -> None:
    limited = settings(pictures, tmp_path / "run")
    limited.hardware.time_limit = 60.0

    def long_step() -> None:
        assert 3000 < signal.getitimer(signal.ITIMER_REAL)[0] <= 3600
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # an hour later
        while signal.getitimer(signal.ITIMER_REAL)[0] > 0:
            time.sleep(0.01)

    with calling(loop, "step", 4, long_step), pytest.raises(Stopped) as caught:
        fit(limited, quiet=True)
    assert caught.value.exit_code == 142
    saved = "hardware.time_limit=60 minutes are over: stopped and saved after step 4, in epoch 2 of 3. Go on: "
    assert str(caught.value).startswith(saved)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    Run(tmp_path / "run").save_settings(settings(pictures, tmp_path / "run"))
    resume(tmp_path / "run", quiet=True)
    assert_same_run(whole, tmp_path / "run")


def test_the_time_limit_counts_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the lists of pictures takes time, too; what is over already ends at once."""
    clock = [1000.0]
    monkeypatch.setattr("roadmap.engine.stopping.time.monotonic", lambda: clock[0])
    with Signals() as signals:
        clock[0] += 20 * 60
        signals.limit(60.0)
        assert 2390 < signal.getitimer(signal.ITIMER_REAL)[0] <= 2400
    with pytest.raises(Stopped, match="hardware.time_limit=60 minutes are over"), Signals() as signals:  # noqa: PT012
        clock[0] += 61 * 60
        signals.limit(60.0)
        time.sleep(PATIENCE)


def test_what_is_raised_can_be_sent_to_another_process(tmp_path: Path) -> None:
    stopped = Stopped(tmp_path, signal.SIGTERM, "after step 3")
    copied = pickle.loads(pickle.dumps(stopped))
    assert (str(copied), copied.folder, copied.exit_code) == (str(stopped), tmp_path, 143)


def test_a_thread_trains_without_signals(pictures: Path, tmp_path: Path) -> None:
    """Only the main thread may say what a signal does."""
    folders: list[Path] = []
    thread = threading.Thread(target=lambda: folders.append(fit(settings(pictures, tmp_path / "run"), quiet=True)))
    thread.start()
    thread.join()
    assert (folders[0] / "summary.json").exists()


# ---------------------------------------------------------------- other processes

# A run that says its steps, and after one of them stands still until a line is written to it.
PROGRAM = """
import json, sys, time
from roadmap.config.settings import Settings
from roadmap.engine import Stopped, fit, loop
real = loop.step
def step(*arguments):
    time.sleep(0.05)
    outcome = real(*arguments)
    print("step", outcome.step, flush=True)
    if outcome.step == int(sys.argv[2]):
        sys.stdin.readline()
    return outcome
loop.step = step
try:
    fit(Settings.from_dict(json.loads(sys.argv[1])), quiet=True)
except Stopped as stopped:
    print(stopped, flush=True)
    sys.exit(stopped.exit_code)
"""


@contextmanager
def training_process(settings: Settings, until: int) -> Iterator[subprocess.Popen[str]]:
    """It stands after that step, and has said so."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(settings.as_dict()), str(until)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None
            while (said := process.stdout.readline()) != f"step {until}\n":
                assert said.startswith("step ")
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_process_that_is_told_to_stop(
    number: signal.Signals, code: int, whole: Path, pictures: Path, tmp_path: Path
) -> None:
    with training_process(settings(pictures, tmp_path / "run"), until=4) as process:
        process.send_signal(number)
        rest, _ = process.communicate("go on\n")
        assert process.returncode == code
    said = f"stopped and saved after step 4, in epoch 2 of 3. Go on:  roadmap train resume={tmp_path / 'run'}\n"
    assert rest == said
    assert last(tmp_path / "run")["step"] == 4
    resume(tmp_path / "run", quiet=True)
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.parametrize("minutes", [0.0, 60.0])
def test_a_process_that_is_killed_at_any_moment(minutes: float, whole: Path, pictures: Path, tmp_path: Path) -> None:
    """kill -9 a random while after a random step: before or after something was saved."""
    draw = random.Random(SEED + int(minutes))
    killed_at, wait = draw.randrange(1, 9), draw.random() * 0.1
    changed = settings(pictures, tmp_path / "run")
    changed.checkpoint_minutes = minutes
    with training_process(changed, killed_at) as process:
        assert process.stdin is not None
        process.stdin.write("go on\n")
        process.stdin.flush()
        time.sleep(wait)
        process.kill()
    resume(tmp_path / "run", quiet=True)
    where = f"seed {SEED}: step {killed_at}, {wait:.3f} s"
    assert lines(tmp_path / "run") == lines(whole), where
    changed.checkpoint_minutes = 60.0
    Run(tmp_path / "run").save_settings(changed)
    assert_same_run(whole, tmp_path / "run")


def test_a_run_is_not_resumed_while_it_trains(pictures: Path, tmp_path: Path) -> None:
    with (
        training_process(settings(pictures, tmp_path / "run"), until=1) as process,
        pytest.raises(RuntimeError, match=f"is being written by process {process.pid} on .*; wait until"),
    ):
        resume(tmp_path / "run", quiet=True)
