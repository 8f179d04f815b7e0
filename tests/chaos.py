"""Kills a run again and again, resumes it, and compares every bit of what is left with a run that was never stopped.

    python tests/chaos.py --kills 100
    python tests/chaos.py --kills 30 --devices 2 --memory --two-pass

A tiny run is started by its command and killed with all of its processes (SIGKILL: no handler runs, no file is
closed), at random moments: while it starts, in a step, in an evaluation, and, in every third attempt on purpose, while
a checkpoint is written. After each kill it is resumed. When it has ended, its weights, state, log, results and files
are compared; then the next run begins, until there were enough kills. The weights are averaged in all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
from tests.engine.worlds import IMAGE, SIDE, assert_same_evaluations, assert_same_run, write_classes  # noqa: E402

EPOCHS, BATCHES = 8, 3
PATIENCE = 300.0  # seconds after which a run that neither ends nor can be killed where it should be is a failure
START, STEP, EVALUATION, SAVING, TESTING = "start-up", "step", "evaluation", "saving", "testing"


def command(pictures: Path, run: Path, devices: int = 1, memory: bool = False, two_pass: bool = False) -> list[str]:
    """A run of a few seconds, most of which are spent on starting it."""
    settings: dict[str, Any] = {
        "data": "folder",
        "data.root": pictures,
        "data.image": IMAGE,
        "data.resize": IMAGE,
        "data.side": SIDE,
        "data.scale": "[0.5,1.0]",
        "data.batch_size": 8,
        "data.per_class": 2,
        "data.batches": BATCHES,
        "data.workers": 1,
        "model": "small_cnn",
        "optim.lr": 0.01,
        "optim.ema": 0.9,
        "select": "held_out",
        "select.fraction": 0.25,
        "hardware": "cpu",
        "hardware.threads": 1,
        "epochs": EPOCHS,
        "checkpoint_minutes": 0,
        "run": run,
    }
    if devices > 1:
        settings["hardware.devices"] = devices
    if memory:
        settings |= {"memory": "xbm", "memory.size": 20}
    if two_pass:
        settings["data.chunk"] = 2
    return ["train", *(f"{name}={value}" for name, value in settings.items())]


@dataclass
class Chaos:
    """Runs in a folder, and how often they were killed where.

    Args:
        folder: where pictures and runs are written.
        draw: of the moments.
        options: of `command`.
    """

    folder: Path
    draw: random.Random
    options: dict[str, Any] = field(default_factory=dict)
    places: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    startup: float = 3.0  # seconds until a run has logged something; measured

    @property
    def kills(self) -> int:
        return self.places.total()

    def prepare(self) -> None:
        """Pictures, the run that is never stopped, and how long a start takes."""
        write_classes(self.folder / "pictures" / "train", range(8))
        write_classes(self.folder / "pictures" / "test", range(8, 12))
        began = time.monotonic()
        with self._process(self._command("whole")) as process:
            while not _lines(self.folder / "whole") and process.poll() is None:
                time.sleep(0.01)
            self.startup = time.monotonic() - began
            self._check_end(process)

    def torment(self, most: int) -> None:
        """One run, killed at most so many times, resumed each time, and compared when it has ended."""
        name = f"run{self.runs}"
        words = self._command(name)
        while not self._ended(name, words, most):
            most -= 1
            if (self.folder / name / "config.yaml").is_file():
                words = ["train", f"resume={self.folder / name}"]
            else:  # nothing of it is there yet, or a folder that holds no run
                words = self._command(name)
        self.runs += 1
        assert_same_run(self.folder / "whole", self.folder / name)
        assert_same_evaluations(self.folder / "whole", self.folder / name)
        shutil.rmtree(self.folder / name)

    def _ended(self, name: str, words: list[str], most: int) -> bool:
        """Whether it came to its end; else it was killed."""
        run = self.folder / name
        with self._process(words) as process:
            if most > 0 and self._wait(process, run, aimed=self.draw.random() < 1 / 3):
                tree = list(_tree(process.pid))  # stands still from here on
                place = _place(run, self._seen)
                for pid in tree:
                    os.kill(pid, signal.SIGKILL)
                if process.wait() == -signal.SIGKILL:  # else it had ended a moment before
                    self.places[place] += 1
                    return False
            self._check_end(process)
        return True

    def _wait(self, process: subprocess.Popen[bytes], run: Path, aimed: bool) -> bool:
        """Until a moment to kill, drawn at random; False where the process ended before it."""
        self._seen = len(_lines(run))
        logged = self.draw.randrange(2 * BATCHES)  # little, so that a run lives long enough for many kills
        wait = self.draw.random() * (0.02 if aimed else 0.05)
        if not aimed and self.draw.random() < 0.3:
            logged, wait = -1, self.draw.random() * self.startup
        patience = time.monotonic() + PATIENCE
        while process.poll() is None:
            if time.monotonic() > patience:
                raise AssertionError(f"{run}: the process goes neither on nor to its end")
            if len(_lines(run)) - self._seen > logged:
                break
            time.sleep(0.001)
        while aimed and process.poll() is None and not _unfinished(run):
            pass  # without sleep: a file is written within milliseconds
        time.sleep(wait)
        return process.poll() is None

    def _command(self, name: str) -> list[str]:
        return command(self.folder / "pictures", self.folder / name, **self.options)

    def _process(self, words: list[str]) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "ROADMAP_CACHE": str(self.folder / "cache"),
        }
        self._said = (self.folder / "said.txt").open("wb")
        return subprocess.Popen(
            [sys.executable, "-m", "roadmap", *words], stdout=self._said, stderr=subprocess.STDOUT, env=environment
        )

    def _check_end(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait(PATIENCE)
        if code:
            said = (self.folder / "said.txt").read_text(errors="replace")
            raise AssertionError(f"{shlex.join(map(str, process.args))} ended with {code}:\n{said}")  # type: ignore[arg-type]


def _lines(run: Path) -> list[str]:
    """What was logged."""
    try:
        return (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []


def _unfinished(run: Path) -> list[str]:
    """Files that are being written."""
    try:
        return [name for name in os.listdir(run / "checkpoints") if ".partial" in name]
    except OSError:
        return []


def _place(run: Path, seen: int) -> str:
    """What a process that stands still was doing, told by what it has written."""
    if _unfinished(run):
        return SAVING
    logged = _lines(run)
    if len(logged) <= seen:  # nothing yet, or what is logged after the last save was forgotten
        return START
    try:
        line = json.loads(logged[-1])
    except json.JSONDecodeError:  # half a line
        return STEP
    if line["step"] == EPOCHS * BATCHES and line["kind"] == "evaluation":
        return TESTING
    return EVALUATION if line["kind"] == "step" and line["step"] % BATCHES == 0 else STEP


def _tree(pid: int) -> Iterator[int]:
    """A process and all that it started, each stopped before its children are looked for, so that none escapes."""
    try:
        os.kill(pid, signal.SIGSTOP)
        children = [
            int(word)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for word in (task / "children").read_text().split()
        ]
    except (ProcessLookupError, FileNotFoundError):
        return
    yield pid
    for child in children:
        yield from _tree(child)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--per-run", type=int, default=12, help="kills of one run, at most")
    parser.add_argument("--devices", type=int, default=1, help="processes that train together")
    parser.add_argument("--memory", action="store_true", help="with a memory of past embeddings")
    parser.add_argument("--two-pass", action="store_true", help="in chunks, with two passes")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the moments")
    asked = parser.parse_args()
    options = {"devices": asked.devices, "memory": asked.memory, "two_pass": asked.two_pass}
    print(f"seed {asked.seed}, {options}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        chaos = Chaos(Path(folder), random.Random(asked.seed), options)
        chaos.prepare()
        while chaos.kills < asked.kills:
            chaos.torment(min(asked.per_run, asked.kills - chaos.kills))
            where = ", ".join(f"{place} {count}" for place, count in chaos.places.most_common())
            print(f"{chaos.kills} kills ({where}), {chaos.runs} runs: the same bits", flush=True)


if __name__ == "__main__":
    main()
