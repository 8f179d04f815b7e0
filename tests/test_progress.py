"""Bars are drawn for those who watch: on a terminal, or when asked for; never into a pipe, and never without tqdm."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from roadmap.progress import bar

SOURCE = Path(__file__).parents[1] / "src"
PROGRAM = """
from roadmap.progress import bar
with bar(3, "packing") as shown:
    for _ in range(3):
        shown.update()
        shown.note("loss 0.5")
print("drawn" if shown.drawn else "silent")
"""


def test_a_bar_that_is_asked_for_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    with bar(14, "packing", show=True, done=4) as shown:
        shown.note("loss 0.5")
        shown.update(10)
    assert shown.drawn
    said = capsys.readouterr()
    assert "packing" in said.err
    assert "14/14" in said.err
    assert "pictures/s" in said.err
    assert "loss 0.5" in said.err
    assert said.out == ""


@pytest.mark.parametrize("show", [None, False])
def test_nothing_is_drawn_where_nobody_watches(show: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    with bar(3, "packing", show=show) as shown:
        shown.update(3)
        shown.note("words")
        shown.name("embedding")
    assert not shown.drawn
    assert capsys.readouterr().err == ""


def test_short_work_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    with bar(3, "packing", show=True, delay=60, leave=False) as shown:
        shown.update(3)
    assert "packing" not in capsys.readouterr().err


def test_without_tqdm_there_is_no_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with bar(3, "packing", show=True) as shown:
        shown.update(3)
    assert not shown.drawn
    assert capsys.readouterr().err == ""


def test_a_pipe_gets_no_bar_and_a_terminal_does() -> None:
    pty = pytest.importorskip("pty")
    pytest.importorskip("tqdm")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", PROGRAM]
    piped = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert piped.stdout == "silent\n"
    assert piped.stderr == ""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    watched = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=theirs, text=True, check=True)
    os.close(theirs)
    assert watched.stdout == "drawn\n"
    assert "3/3" in os.read(ours, 100_000).decode()
    os.close(ours)


def test_nothing_heavy_is_imported_before_a_bar_is_drawn() -> None:
    asked = "import sys, roadmap.progress; print(sorted({'tqdm', 'torch', 'numpy'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
