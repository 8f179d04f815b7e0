"""experiments/cub.sh asks for what there is, and keeps to its time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from roadmap.experiments.definitions import experiment

from ..waiting import PATIENCE

SCRIPT = Path(__file__).parents[2] / "experiments" / "cub.sh"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", str(SCRIPT), *words], capture_output=True, text=True, check=False, env=environment, timeout=PATIENCE
    )


def test_no_time_runs_nothing_and_a_part_that_is_not_there_is_told(tmp_path: Path) -> None:
    over = run(str(tmp_path), str(tmp_path), "0")
    assert (over.returncode, over.stdout) == (0, "0 minutes are over; the same command goes on\n")
    wrong = run(str(tmp_path), str(tmp_path), "1", "vit")
    assert wrong.returncode == 2
    assert "there is no part vit; there are vits, resnet50, tables, head and vits_84" in wrong.stderr


def test_every_table_and_row_that_it_asks_for_exists() -> None:
    call_of = re.compile(r"^ +(?:vits\w*\) |SEEDS=\S+ )?reproduce \d ((?:[^\\\n]|\\\n)+)", re.MULTILINE)
    calls = call_of.findall(SCRIPT.read_text())
    assert len(calls) == 7
    for call in calls:
        words = call.replace("\\\n", " ").split()
        only = [words[place + 1] for place, word in enumerate(words) if word == "--only"]
        place = ("cub", words[words.index("--backbone") + 1]) if "--backbone" in words else (None, None)
        for name in words[: next(i for i, word in enumerate(words) if word.startswith("--"))]:
            assert experiment(name, *place, only).rows
