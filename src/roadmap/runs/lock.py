"""A run's folder is written by one process at a time; the system frees it when that process ends, however it does."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
log = logging.getLogger("roadmap.runs")


def hold(folder: Path) -> IO[str]:
    """Takes a folder for this process until the file that it gives is closed. The file says who has it."""
    file = (folder / NAME).open("a+", encoding="utf-8")
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise RuntimeError(
            f"{folder} is being written by {holder}; wait until it has finished, or stop it first"
        ) from None
    except OSError as error:  # some network file systems have no locks
        log.warning("%s cannot be locked (%s): see that no other process writes it", folder, error)
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
