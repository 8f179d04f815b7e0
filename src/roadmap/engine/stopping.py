"""Ctrl-C, a scheduler, a time limit: a run that is told to end leaves within seconds, whole, and says how to go on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from types import FrameType, TracebackType
from typing import Any

from roadmap.ranks import ALONE, Ranks

LIMIT = signal.SIGALRM
# What a person, a system and a scheduler say when a program is to end; Slurm's --signal says USR1, submitit USR2.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Stopped(KeyboardInterrupt):
    """A run was told to stop, and did. The message says what was saved and how to go on.

    Attributes:
        folder: of the run; None when it had not come to have one.
        saved: what was saved, in words, if anything.
        exit_code: with which a program says that this signal ended it: 130 for Ctrl-C, 143 for SIGTERM, 138 and 140
            for SIGUSR1 and SIGUSR2, 142 for its own time limit.
    """

    def __init__(self, folder: Path | None, number: int, saved: str | None, limit: float | None = None) -> None:
        if folder is None:
            said = "stopped before a run folder was made"
        else:
            done = "stopped, nothing new was saved" if saved is None else f"stopped and saved {saved}"
            said = f"{done}. Go on:  roadmap train resume={quote(str(folder))}"
        over = f"hardware.time_limit={limit:g} minutes are over: " if number == LIMIT else ""
        super().__init__(over + said)
        self.folder, self.saved, self.exit_code = folder, saved, 128 + number

    def __reduce__(self) -> tuple[Any, ...]:
        return _stopped, (self.folder, self.exit_code, str(self))  # launchers carry it from process to process


def _stopped(folder: Path | None, exit_code: int, said: str) -> Stopped:
    stopped = Stopped(folder, exit_code - 128, None)
    stopped.args = (said,)
    return stopped


class Signals:
    """Turns the signals that end a program into `Stopped`, while it is entered.

    A signal is obeyed at once, except inside `later`, where something is being changed that must not be left half
    done: there it is obeyed at the end. A second signal does not wait. When everything is saved, whoever handled the
    signal before is told of it: a scheduler's handler that puts the job back into its queue.

    Attributes:
        folder: of the run, once there is one.
        saved: what was saved after a signal came, in words.
        number: of the signal that came; None: none.
        torn: a second signal left something half done; what is in memory is not to be saved.

    Args:
        ranks: the processes that train together. Who told them may have told each, and again, so more signals are
            nothing new. The first obeys at once, as a single one does; the others go on until all agree to stop
            (`obey`), since the first may be waiting for them.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._patient, self._passive = ranks.world > 1, not ranks.first
        self.folder: Path | None = None
        self.saved: str | None = None
        self.number: int | None = None
        self.torn = False
        self._waiting = 0
        self._before: dict[int, Any] = {}
        self._limit: float | None = None
        self._entered = time.monotonic()

    def __enter__(self) -> Signals:
        self._entered = time.monotonic()
        if threading.current_thread() is threading.main_thread():  # no other thread may, nor is told of signals
            for number in STOPPING:
                before = signal.getsignal(number)
                if before not in (None, signal.SIG_IGN):  # ignored on purpose, as by nohup, or not Python's
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if LIMIT in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, before in self._before.items():
            signal.signal(number, before)
        if self.number is not None and isinstance(error, KeyboardInterrupt):
            before = self._before.get(self.number)
            if callable(before) and before is not signal.default_int_handler:
                before(self.number, None)
            raise Stopped(self.folder, self.number, self.saved, self._limit) from None

    def limit(self, minutes: float | None) -> None:
        """Stops the run so many minutes after it was entered, as a signal would; None for no limit."""
        if minutes is None or not self._before:
            return
        self._limit = minutes
        self._before[LIMIT] = signal.signal(LIMIT, self._receive)
        left = 60 * minutes - (time.monotonic() - self._entered)
        signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again, self.number = self.number is not None, self.number or number
        if self._passive or (again and self._patient):
            return
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
        if self.number is not None and not self._waiting and not self._passive:
            raise KeyboardInterrupt

    def obey(self, number: int) -> None:
        """All processes agreed to stop, because of a signal that one of them got."""
        self.number, self._passive = self.number or number, False
