"""Real processes that train together, forked from the tests: what is patched here is patched there."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from roadmap.engine import joining
from roadmap.engine.launching import _description, _error
from roadmap.ranks import Ranks

from ..waiting import PATIENCE

HARDWARE = joining.HardwareSettings(device="cpu")


@dataclass
class _Failure:
    told: dict[str, Any]


def together(world: int, work: Callable[[], Any], local: int | None = None) -> list[Any]:
    """What `work` gives in each of so many processes, which stand as torchrun would have started them; or its error.

    Args:
        world: how many.
        work: called in each.
        local: how many stand on one machine, as far as they know; None for all.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(world)]
    processes = []
    for rank, (_, says) in enumerate(pipes):
        processes.append(fork.Process(target=_life, args=(rank, world, local or world, store.port, work, says)))
        processes[-1].start()
        says.close()
    found: list[Any] = []
    try:
        for hears, _ in pipes:
            assert hears.poll(PATIENCE), "a process does not answer"
            try:
                answer = pickle.loads(hears.recv_bytes())
                found.append(_error(answer.told) if isinstance(answer, _Failure) else answer)
            except EOFError:
                found.append(EOFError("it ended without a word"))
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def ranks_here() -> Ranks:
    """Of a process in `together`."""
    with joining.ranks_at(HARDWARE, joining.place_here()) as ranks:
        return ranks


def _life(rank: int, world: int, local: int, port: int, work: Callable[[], Any], says: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    gc.freeze()  # what the tests held, such as a store with a thread, is not this process's to let go
    signal.alarm(round(PATIENCE) + 20)  # whatever becomes of the tests
    places = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in (places | meeting).items()})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        says.send_bytes(pickle.dumps(work()))
        if world > 1:
            ranks_here().from_all(0)  # nobody leaves while another still needs it
    except BaseException as error:
        says.send_bytes(pickle.dumps(_Failure(_description(error))))
    os._exit(0)
