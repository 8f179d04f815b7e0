"""benchmarks/on_a_gpu.sh asks for scripts, options and parts that there are, and keeps to its time."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from .waiting import PATIENCE

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "on_a_gpu.sh"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """With `echo` for Python, so that it says what it would run; from elsewhere, with a relative path."""
    command = ["bash", str(SCRIPT), ".", str(folder), *words]
    environment = {**os.environ, "PYTHON": "echo"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=PATIENCE, cwd=folder
    )


def test_every_script_and_option_that_it_asks_for_exists(tmp_path: Path) -> None:
    asked = run(tmp_path, "5")
    assert (asked.returncode, asked.stderr) == (0, "")
    lines = [line.split() for line in asked.stdout.splitlines() if not line.startswith("==")]
    assert ["-m", "pytest", "-q", "-m", "gpu"] in lines
    scripts = [line for line in lines if line[0].startswith("benchmarks/")]
    assert len(scripts) == 9
    for script, *words in scripts:
        text = (ROOT / script).read_text(encoding="utf-8")
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in text, f"{script} knows no {option}"
    family = next(line for line in lines if line[0].endswith("bench_family.py"))
    assert f"data.root={tmp_path}" in family
    assert sum(line[:3] == ["-m", "roadmap", "reproduce"] for line in lines) == 5


def test_what_there_is_no_time_for_and_what_fails_is_told(tmp_path: Path) -> None:
    late = run(tmp_path, "0", "tests", "command")
    assert late.returncode == 1
    assert re.findall("^failed, or out of time: echo (\\S+ ?\\S*)", late.stderr, re.MULTILINE) == [
        "-m pytest",
        "benchmarks/bench_command.py --root",
    ]
    wrong = run(tmp_path, "1", "test")
    assert wrong.returncode == 2
    assert (
        "there is no part test; there are tests, losses, command, family, step, stream, tries and paper" in wrong.stderr
    )
