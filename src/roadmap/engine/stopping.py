"""Ctrl-C and the system's request to end: a run leaves within seconds, whole, and says how to go on with it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from types import FrameType, TracebackType
from typing import Any


class Stopped(KeyboardInterrupt):
    """A run was told to stop, and did. The message says what was saved and how to go on.

    Attributes:
        folder: of the run; None when it had not come to have one.
        exit_code: with which a program says that this signal ended it: 130 for Ctrl-C, 143 for SIGTERM.
    """

    def __init__(self, folder: Path | None, number: int, saved: str | None) -> None:
        if folder is None:
            said = "stopped before a run folder was made"
        else:
            done = "stopped, nothing new was saved" if saved is None else f"stopped and saved {saved}"
            said = f"{done}. Go on:  roadmap train resume={quote(str(folder))}"
        super().__init__(said)
        self.folder, self.exit_code = folder, 128 + number


class Signals:
    """Turns SIGINT and SIGTERM into `Stopped`, while it is entered.

    A signal is obeyed at once, except inside `later`, where something is being changed that must not be left half
    done: there it is obeyed at the end. A second signal does not wait.

    Attributes:
        folder: of the run, once there is one.
        saved: what was saved after a signal came, in words.
        number: of the signal that came; None: none.
        torn: a second signal left something half done; what is in memory is not to be saved.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.saved: str | None = None
        self.number: int | None = None
        self.torn = False
        self._waiting = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # no other thread may, nor is told of signals
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.getsignal(number)
                if before not in (None, signal.SIG_IGN):  # ignored on purpose, as by nohup, or not Python's
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self.number is not None and isinstance(error, KeyboardInterrupt):
            raise Stopped(self.folder, self.number, self.saved) from None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again, self.number = self.number is not None, self.number or number
        if again or not self._waiting:
            self.torn = self.torn or self._waiting > 0
            raise KeyboardInterrupt

    @contextmanager
    def later(self) -> Iterator[None]:
        """What is inside is finished before a signal is obeyed; long work looks at `number` and breaks off."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
        if self.number is not None and not self._waiting:
            raise KeyboardInterrupt
