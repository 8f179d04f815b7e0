"""A few kills of a real run, by the script that does hundreds: python tests/chaos.py --kills 100."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from . import chaos
from .chaos import Chaos
from .engine.worlds import last


@pytest.mark.slow
def test_a_killed_run_is_the_run_that_was_not_killed(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)  # other moments every time; a failure shows it
    tried = Chaos(tmp_path, random.Random(seed))
    tried.prepare()
    tried.torment(2)
    assert tried.runs == 1, f"seed {seed}"
    assert tried.kills <= 2, f"seed {seed}"
    assert last(tmp_path / "whole")["step"] == chaos.EPOCHS * chaos.BATCHES


def test_where_a_kill_fell_is_told_by_what_is_there(tmp_path: Path) -> None:
    def place(*logged: str, seen: int = 0) -> str:
        (tmp_path / "metrics.jsonl").write_text("\n".join(logged))
        return chaos._place(tmp_path, seen)

    def line(kind: str, step: int) -> str:
        return f'{{"kind": "{kind}", "step": {step}}}'

    end = chaos.EPOCHS * chaos.BATCHES
    assert chaos._place(tmp_path, 0) == chaos.START
    assert place(line("step", 1), seen=1) == chaos.START
    assert place(line("step", 1)) == chaos.STEP
    assert place(line("step", 1), '{"kind": "st') == chaos.STEP
    assert place(line("step", chaos.BATCHES)) == chaos.EVALUATION
    assert place(line("evaluation", chaos.BATCHES)) == chaos.STEP
    assert place(line("evaluation", end)) == chaos.TESTING
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".last.0123456789ab.partial.pt").touch()
    assert place(line("step", 1)) == chaos.SAVING


def test_a_process_is_stopped_with_all_that_it_started() -> None:
    command = ["sh", "-c", "sh -c 'sleep 600 & echo $$ $!; wait' & wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = {process.pid, *map(int, process.stdout.readline().split())}
        tree = list(chaos._tree(process.pid))
        for pid in {*tree, *found}:
            os.kill(pid, signal.SIGKILL)
    assert set(tree) == found
