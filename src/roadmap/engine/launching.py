"""Starts the processes of a run on this machine, watches them, and speaks for them: one result, or one message.

The processes are programs of their own, not forks or copies of the caller's, so that they can be started from a
command, a sweep, a notebook or a thread alike. This one only watches. Where one of them fails, the others are ended;
where this one ends, however it does, they end too, since the pipe that they listen to breaks.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any, NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from roadmap.engine.joining import is_consequence
from roadmap.engine.stopping import Signals, Stopped

GRACE = 3.0  # seconds in which those who are still there may say that they failed too, and why
# The first lines of a process: until it is ready to save something, a signal ends it without words.
PROGRAM = """
import signal
for number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
from roadmap.engine.launching import work
work()
"""


class ProcessError(RuntimeError):
    """A process of the run ended without a word."""


@dataclass(eq=False)
class _Process:
    """One of the processes, as the one that watches sees it."""

    rank: int
    program: subprocess.Popen[bytes]
    said: Connection
    printed: IO[bytes] | None
    result: Any = None
    error: BaseException | None = None
    consequence: bool = False
    silent: bool = field(default=False, init=False)

    @property
    def over(self) -> bool:
        return self.result is not None or self.error is not None or self.silent

    def listen(self) -> None:
        """What it has to say, if anything; or that it will say nothing more."""
        try:
            while self.said.poll():
                kind, value = pickle.loads(self.said.recv_bytes())
                if kind == "done":
                    self.result = value
                else:
                    self.error, self.consequence = _error(value), value["consequence"]
        except (EOFError, OSError):
            self.silent = not self.over
            self.said.close()

    def death(self, world: int) -> ProcessError:
        """How it ended, in words."""
        self.program.wait()
        code, words = self.program.returncode, ""
        if self.printed is not None:
            self.printed.seek(0)
            words = self.printed.read().decode(errors="replace").strip()[-2000:]
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by signal {-code} ({signal.Signals(-code).name})"
            how += ", perhaps by the system for want of memory" if code == -signal.SIGKILL else ""
        return ProcessError(
            f"process {self.rank} of {world} {how}; the run stops, and what was saved stays"
            + (f". It said:\n{words}" if words else "")
        )


def launch(devices: int, call: str, arguments: dict[str, Any]) -> Path:
    """Runs `roadmap.engine.training.CALL(**arguments)` in so many processes; gives what it gives, or raises what it
    raises."""
    found: Path | BaseException | None = None
    with Signals() as signals, tempfile.TemporaryFile() as printed:
        signals.folder = arguments.get("folder")
        processes: list[_Process] = []
        store: TCPStore | None = None
        with suppress(KeyboardInterrupt):
            try:
                with signals.later():  # a first signal is passed on, a second does not wait
                    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                    for rank in range(devices):
                        processes.append(_start(rank, devices, store.port, printed if rank else None))
                        _tell(processes[-1], call, arguments)
                    found = _outcome(processes, signals)
            finally:
                _end(processes)
                store = None  # an error remembers what is here: its thread would stay as long as that
        if found is None:
            raise KeyboardInterrupt
        if isinstance(found, Stopped):  # said again by `signals`, which tells whoever else waits for this signal
            signals.folder, signals.saved = found.folder, found.saved
        if isinstance(found, BaseException):
            raise found
        return found


def _start(rank: int, world: int, port: int, printed: IO[bytes] | None) -> _Process:
    """The first prints where this program prints; what others print is shown if one ends without a word."""
    said, says = Pipe(duplex=False)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    environment = os.environ | {name: str(value) for name, value in (places | meeting).items()}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment["ROADMAP_SAYS"] = str(says.fileno())
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=printed,
        stderr=printed,
        env=environment,
        pass_fds=[says.fileno()],
    )
    says.close()
    return _Process(rank, program, said, printed)


def _tell(process: _Process, call: str, arguments: dict[str, Any]) -> None:
    """The pipe stays open: when it breaks, this process has ended."""
    assert process.program.stdin is not None
    with suppress(BrokenPipeError):  # it ended already; that is found out where its words are waited for
        pickle.dump((call, arguments, sys.argv), process.program.stdin)
        process.program.stdin.flush()


def _outcome(processes: Sequence[_Process], signals: Signals) -> Path | BaseException:
    """Waits for the first to be done, or for one to fail, which is given time to be explained by another."""
    passed_on, failed = False, None
    while True:
        if signals.number is not None and not passed_on:
            passed_on = True
            for process in processes:
                with suppress(ProcessLookupError):
                    process.program.send_signal(signals.number)
        open_ones = [process for process in processes if not process.said.closed]
        wait([process.said for process in open_ones], timeout=0.05)
        for process in open_ones:
            process.listen()
        first = processes[0]
        if first.result is not None or isinstance(first.error, Stopped):
            return first.error or Path(first.result)
        bad = [process for process in processes if process.over and not _well(process)]
        if bad:
            failed = failed or time.monotonic()
            certain = any(process.error is not None and not process.consequence for process in bad)
            if certain or time.monotonic() - failed > GRACE or all(process.over for process in processes):
                return _cause(bad, len(processes), signals)


def _well(process: _Process) -> bool:
    return process.result is not None or isinstance(process.error, Stopped)


def _cause(bad: Sequence[_Process], world: int, signals: Signals) -> BaseException:
    """Of all that went wrong the one thing that the rest follows from: the error of a process; else a death."""
    errors = [process.error for process in bad if process.error is not None and not process.consequence]
    if errors:
        return errors[0]
    deaths = [process for process in bad if process.silent]
    if signals.number is not None and all(-d.program.wait() in (signal.SIGINT, signal.SIGTERM) for d in deaths):
        return Stopped(None, signals.number, None)  # it was too early for them to know what a signal means
    # another one's death may have been the end of the first
    return deaths[0].death(world) if deaths else next(p.error for p in bad if p.error is not None)


def _end(processes: Sequence[_Process]) -> None:
    """Only the first writes, and it writes files whole or not at all: nothing is lost by ending them at once."""
    for process in processes:
        if process.result is None and process.error is None:
            process.program.kill()
    for process in processes:
        if process.program.stdin is not None:
            with suppress(BrokenPipeError):
                process.program.stdin.close()  # who still runs hears it, and ends
        process.program.wait()
        process.said.close()


# ------------------------------------------------------------------ in the processes


def work() -> NoReturn:
    """The whole life of a process: what it is told to do, and what it says about it."""
    call, arguments, sys.argv = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_the_other, daemon=True).start()
    said: tuple[str, Any]
    says = Connection(int(os.environ.pop("ROADMAP_SAYS")), readable=False)
    try:
        from roadmap.engine import training

        said = "done", str(getattr(training, call)(**arguments))
    except BaseException as error:
        said = "failed", _description(error)
    with suppress(OSError):
        says.send_bytes(pickle.dumps(said))
    sys.stdout.flush()
    sys.stderr.flush()
    # not the usual way out, which waits for connections to processes that may be gone
    os._exit(0 if said[0] == "done" else 1)


def _end_with_the_other() -> None:
    while os.read(0, 1):  # not through sys.stdin: whoever is forked meanwhile closes that, and would wait for its lock
        pass
    os._exit(1)


def _description(error: BaseException) -> dict[str, Any]:
    """What can be told of an error to another process."""
    kept = {}
    for name, value in vars(error).items():
        with suppress(Exception):
            pickle.dumps(value)
            kept[name] = value
    return {
        "kind": type(error),
        "words": str(error),
        "kept": kept,
        "trace": "".join(traceback.format_exception(error)),
        "consequence": is_consequence(error),
    }


def _error(told: dict[str, Any]) -> BaseException:
    """The error that a process had, as far as it can be made again; its traceback is the cause."""
    kind: type[BaseException] = told["kind"]
    try:
        error = kind.__new__(kind, told["words"])
        error.args = (told["words"],)
        error.__dict__.update(told["kept"])
    except Exception:
        error = RuntimeError(f"{kind.__name__}: {told['words']}")
    error.__cause__ = ProcessError(f"\n{told['trace']}")
    return error
