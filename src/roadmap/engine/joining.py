"""Which processes train together: those that this program starts, or that torchrun or Slurm started."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from roadmap.config.settings import HardwareSettings, SettingError
from roadmap.config.settings_checks import AUTO
from roadmap.hardware import device_of
from roadmap.ranks import ALONE, Ranks, wait_for

SHARED_GPU = "ROADMAP_SHARED_GPU"  # set: processes may share a GPU, to try things out; they talk through the host
PATIENCE = timedelta(minutes=30)  # for a process that neither answers nor ends
# What a process says that has lost another: the other knows why.
CONSEQUENCES = ("could not exchange their parts", "could not bring its part", "closed by peer", "gloo", "NCCL")
LEFT, LEAVING = "the first has left", 60.0  # seconds that the others give it to save


@dataclass(frozen=True)
class Place:
    """Where this process stands among those that were started together."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    by: str


def place_here(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Where torchrun, Slurm's srun or this program put this process; None where nobody did."""
    if {"RANK", "WORLD_SIZE"} <= set(environment):
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_WORLD_SIZE", world))
        return Place(rank, world, int(environment.get("LOCAL_RANK", rank % local)), local, "torchrun")
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    in_step = "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment
    if not in_step or int(tasks) == 1:
        return None  # a batch script, or one task that has its machine to itself
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", tasks))
    local = int(re.split(r"[(,]", per_node)[0])  # "8(x4)"
    return Place(int(environment["SLURM_PROCID"]), int(tasks), int(environment["SLURM_LOCALID"]), local, "srun")


def hardware_at(hardware: HardwareSettings, place: Place | None) -> HardwareSettings:
    """The settings with the number of devices and machines that there are; refuses what does not fit together."""
    if place is not None:
        devices, nodes = place.local_world, -(-place.world // place.local_world)
        wrong = hardware.devices not in (1, AUTO, devices)
        if wrong or hardware.nodes not in (1, nodes):
            raise SettingError(
                "hardware.devices" if wrong else "hardware.nodes",
                f"hardware.devices={hardware.devices} hardware.nodes={hardware.nodes}: but {place.by} started "
                f"{place.world} processes, {devices} on a machine; leave these settings out, or start so many",
            )
        return dataclasses.replace(hardware, devices=devices, nodes=nodes)
    hardware, there = hardware_here(hardware), _devices_here(hardware)
    if hardware.nodes > 1:
        raise SettingError("hardware.nodes", _how_to_start(hardware.devices, hardware.nodes))
    if device_of(hardware.device).type != "cpu" and hardware.devices > there and SHARED_GPU not in os.environ:
        said = f"hardware.devices={hardware.devices}: there are {there} here; give {there} or auto"
        raise SettingError("hardware.devices", said)
    return hardware


def hardware_here(hardware: HardwareSettings) -> HardwareSettings:
    """The settings with "auto" devices counted on this machine."""
    if str(hardware.devices) != AUTO:
        return hardware
    return dataclasses.replace(hardware, devices=_devices_here(hardware))


def _devices_here(hardware: HardwareSettings) -> int:
    """A CPU counts as one, whatever its cores."""
    return torch.cuda.device_count() if device_of(hardware.device).type == "cuda" else 1


def _how_to_start(devices: int, nodes: int) -> str:
    typed = Path(sys.argv[0]).name in ("roadmap", "__main__.py")
    what = shlex.join(sys.argv[1:]) if typed else f"train hardware.devices={devices} hardware.nodes={nodes} ..."
    return (
        f"hardware.nodes={nodes}: a program cannot start itself on other machines. Run this on each of the {nodes}, "
        f"where FIRST is the name of one of them:\n    torchrun --nnodes={nodes} --nproc-per-node={devices} "
        f"--rdzv-backend=c10d --rdzv-endpoint=FIRST:29500 -m roadmap {what}\n"
        f"or in a Slurm job:\n    srun --nodes={nodes} --ntasks-per-node={devices} roadmap {what}"
    )


@contextmanager
def ranks_at(hardware: HardwareSettings, place: Place | None) -> Iterator[Ranks]:
    """The processes that train together, from where each can speak to the others; within, a failure of one ends it.

    The connection stays when it is left: the next run of a sweep finds it.
    """
    if place is None or place.world == 1:
        yield ALONE
        return
    if not _connected:
        _connected.append(_connection(hardware, place))
    ranks = _connected[0]
    assert ranks.store is not None
    try:
        yield ranks
    except KeyboardInterrupt:
        if ranks.first:
            ranks.store.set(LEFT, "")
        else:  # who ends earlier would break off what the first is doing
            wait_for(ranks.store, LEFT, LEAVING)
        raise


_connected: list[Ranks] = []  # this process among the others, once it has met them


def _connection(hardware: HardwareSettings, place: Place) -> Ranks:
    if place.by == "srun":
        _set_meeting_point()
    device = device_of(hardware.device)
    if device.type == "cuda":
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    backend = "gloo" if device.type != "cuda" or SHARED_GPU in os.environ else "cpu:gloo,cuda:nccl"
    store, _, _ = next(iter(rendezvous("env://", place.rank, place.world, timeout=PATIENCE)))
    if not dist.is_initialized():
        inner = PrefixStore("processes", store)
        dist.init_process_group(backend, store=inner, rank=place.rank, world_size=place.world, timeout=PATIENCE)
    notes = PrefixStore("notes", store)
    return Ranks(place.rank, place.world, place.local_rank, place.local_world, notes, on_host=backend == "gloo")


def is_consequence(error: BaseException) -> bool:
    """Whether an error only says that another process is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in CONSEQUENCES)


def is_first() -> bool:
    """Whether this process speaks for those that torchrun or Slurm started with it, if any."""
    place = place_here()
    return place is None or place.rank == 0


def is_to_tell(error: BaseException) -> bool:
    """Whether this process says what went wrong, of all that were started with it: the first that knows does."""
    if not _connected or _connected[0].store is None:
        return is_first()  # they all read the same settings
    if is_consequence(error):
        return False
    try:
        return int(_connected[0].store.add("told", 1)) == 1
    except RuntimeError:  # whoever kept the notes has ended
        return is_first()


def _set_meeting_point() -> None:
    """The first machine of a Slurm step, and a port that follows from its numbers."""
    nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_JOB_NODELIST", "localhost"))
    job, step = int(os.environ.get("SLURM_JOB_ID", "0")), int(os.environ.get("SLURM_STEP_ID", "0"))
    os.environ.setdefault("MASTER_ADDR", first_node(nodes))
    os.environ.setdefault("MASTER_PORT", str(20000 + (job * 31 + step) % 20000))


def first_node(nodes: str) -> str:
    """Of a list as Slurm writes it: "gpu[07-09,12],cpu1" begins with gpu07."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+))?([^,\[\]]*)", nodes)
    return nodes if found is None else f"{found[1]}{found[2] or ''}"
