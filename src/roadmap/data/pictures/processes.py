"""Processes that decode: light ones, which import what the work needs and nothing of the program that asks.

`multiprocessing` starts a process safely (spawn) by importing the main program again in each one. That program has
usually imported torch: seconds of start-up in every process, more than it takes to decode a small dataset. These are
fresh interpreters that import the function's own module and take pickled tasks through a pipe. Programs that
call them need no `if __name__ == "__main__"`, and nothing is forked from a process with threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import IO, Any, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")
_Process = subprocess.Popen[bytes]
GRACE = 10  # seconds
AHEAD = 2  # tasks that wait for each process; the rest are not yet asked for

_TRIM, _MAP = -1, -3  # parameters of mallopt
_KEPT, _MAPPED = 128 << 20, 32 << 20  # bytes; the larger pictures are given back at once

_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from roadmap.data.pictures.processes import serve; serve()"


def answers(
    function: Callable[[Task], Result], tasks: Iterable[Task], workers: int | None
) -> Generator[tuple[Task, Result], None, None]:
    """Each task and what the function made of it, in the order in which they are finished.

    Args:
        function: of a module, with one argument; it and its tasks, results and errors are pickled.
        tasks: enough of them that the processes finish at about the same time. They are made while others are worked
            on.
        workers: processes; None for one per core, 0 or 1 for none but this one.

    Raises:
        What the function raises; RuntimeError when a process dies. Work that was begun is finished first.
    """
    asked = iter(tasks)
    first = list(itertools.islice(asked, max(1, (os.cpu_count() or 1) if workers is None else workers)))
    count = len(first)
    if count <= 1:
        yield from ((task, function(task)) for task in itertools.chain(first, asked))
        return
    asked = itertools.chain(first, asked)
    processes: list[_Process] = []
    idle: SimpleQueue[_Process] = SimpleQueue()
    pool = ThreadPoolExecutor(count)  # a thread waits for each process
    try:
        for _ in range(count):
            processes.append(_start())
            idle.put(processes[-1])
        waiting: dict[Future[Result], Task] = {}
        while True:
            for task in itertools.islice(asked, (1 + AHEAD) * count - len(waiting)):
                waiting[pool.submit(_answer, idle, function, task)] = task
            if not waiting:
                return
            ready: set[Future[Result]] = wait(waiting, return_when=FIRST_COMPLETED).done
            yield from ((waiting.pop(future), future.result()) for future in ready)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for process in processes:
            _stop(process)


def _start() -> _Process:
    # one thread each: there are as many processes as cores already
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _PROGRAM, *sys.path]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _answer(idle: SimpleQueue[_Process], function: Callable[[Task], Result], task: Task) -> Result:
    process = idle.get()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pickle.dump((function, task), process.stdin, pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
        value, error = pickle.load(process.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as cause:
        process.kill()  # where it is not dead but talks nonsense; the exit code of a dead one stays
        raise RuntimeError(f"a worker process died with exit code {process.wait()}; is there enough memory?") from cause
    finally:
        idle.put(process)
    if error is not None:
        raise error
    result: Result = value
    return result


def _stop(process: _Process) -> None:
    """The end of its input ends the process."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has died, and what it was told last is still in the buffer
        process.stdin.close()
    process.stdout.close()
    process.wait()


def leave_signals_to_parent(*_: Any) -> None:
    """What tells a program to end goes to all of its processes, from a terminal and from Slurm alike: the one that
    trains decides, and needs its helpers while it saves. A helper that is told to end does so ten seconds later.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE))


def keep_memory() -> None:
    """The memory of one picture is used for the next, instead of being asked of the system and given back each time:
    that takes about as long as decoding. Where the C library cannot be told (it is not glibc), nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MAP, _MAPPED)
        library.mallopt(_TRIM, _KEPT)


def serve() -> None:
    """The life of a worker process: tasks from standard input, (result, error) to standard output, until the end."""
    leave_signals_to_parent()
    keep_memory()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints, prints to standard error
    while (asked := _next(sys.stdin.buffer)) is not None:
        function, task = asked
        try:
            answer: tuple[Any, Exception | None] = function(task), None
        except Exception as error:
            answer = None, _portable(error)
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


def _next(tasks: IO[bytes]) -> tuple[Callable[[Any], Any], Any] | None:
    try:
        asked: tuple[Callable[[Any], Any], Any] = pickle.load(tasks)
    except EOFError:
        return None
    return asked


def _portable(error: Exception) -> Exception:
    """The error itself where it survives pickling, else its words."""
    try:
        return error if isinstance(pickle.loads(pickle.dumps(error)), type(error)) else RuntimeError(repr(error))
    except Exception:
        return RuntimeError(repr(error))
