"""One process writes a run's folder; others are told which."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roadmap.config.settings import Settings
from roadmap.runs import Run, lock

HOLDING = """
import sys, time
from pathlib import Path
from roadmap.runs.lock import hold
file = hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    run = Run.create(Settings(run=str(tmp_path / "run")))
    run.close()
    with subprocess.Popen([sys.executable, "-c", HOLDING, run.folder], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            who = f"process {process.pid} on {socket.gethostname()}"
            words = rf"run is being written by {who}; wait until it has finished, or stop it first"
            with pytest.raises(RuntimeError, match=words):
                run.lock()
            with pytest.raises(RuntimeError, match=words):
                Run.create(Settings(run=str(run.folder)))
            assert Run.open(run.folder).settings() is not None  # reading is free
        finally:
            process.send_signal(signal.SIGKILL)
    run.lock()  # the system freed it
    assert (run.folder / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    run.lock()  # whoever has it may ask again
    with pytest.raises(RuntimeError, match=f"process {os.getpid()} on"):
        Run.open(run.folder).lock()
    run.close()
    Run.open(run.folder).lock()


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuses)
    lock.hold(tmp_path).close()
    assert "cannot be locked ([Errno 37] No locks available): see that no other process writes it" in caplog.text


def test_a_folder_that_holds_a_run_stays_free(tmp_path: Path) -> None:
    """A refusal leaves no lock behind."""
    run = Run.create(Settings(run=str(tmp_path)))
    run.write_json("summary.json", {})
    run.close()
    with pytest.raises(FileExistsError, match="already holds a run") as kept:  # which keeps the refused one alive
        Run.create(Settings(run=str(tmp_path)))
    Run.open(tmp_path).lock()
    assert kept.value is not None
