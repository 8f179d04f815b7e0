"""Where torchrun and Slurm put a process, and what does not fit with it."""

from __future__ import annotations

import os

import pytest
import torch

from roadmap.config.settings import HardwareSettings, SettingError
from roadmap.engine.joining import Place, first_node, hardware_at, hardware_here, is_consequence, place_here
from roadmap.ranks import Ranks

from .together import ranks_here, together

TORCHRUN = {"RANK": "9", "WORLD_SIZE": "32", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
SLURM = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "32",
    "SLURM_STEP_NUM_TASKS": "32",
    "SLURM_STEP_TASKS_PER_NODE": "8(x4)",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (TORCHRUN, Place(9, 32, 1, 8, "torchrun")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Place(0, 1, 0, 1, "torchrun")),
        (SLURM, Place(9, 32, 1, 8, "srun")),
        ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}, None),  # the batch script
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # one task that starts its own
        (SLURM | TORCHRUN | {"RANK": "3"}, Place(3, 32, 1, 8, "torchrun")),  # torchrun in a task
    ],
)
def test_where_a_process_stands(environment: dict[str, str], place: Place | None) -> None:
    assert place_here(environment) == place


def cpu(devices: int | str = 1, nodes: int = 1) -> HardwareSettings:
    return HardwareSettings(device="cpu", devices=devices, nodes=nodes)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [cpu(), cpu(8), cpu("auto"), cpu(8, 4), cpu(1, 4)])
def test_who_started_them_says_how_many(asked: HardwareSettings) -> None:
    found = hardware_at(asked, place_here(TORCHRUN))
    assert (found.devices, found.nodes) == (8, 4)
    uneven = hardware_at(cpu(), place_here(TORCHRUN | {"WORLD_SIZE": "26"}))
    assert (uneven.devices, uneven.nodes) == (8, 4)  # two on the last


@pytest.mark.parametrize(("asked", "field"), [(cpu(4), "devices"), (cpu(8, 2), "nodes")])
def test_settings_that_contradict_torchrun(asked: HardwareSettings, field: str) -> None:
    with pytest.raises(SettingError, match="but torchrun started 32 processes, 8 on a machine; leave these") as error:
        hardware_at(asked, place_here(TORCHRUN))
    assert error.value.field == f"hardware.{field}"


def test_a_program_does_not_start_itself_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/roadmap", "train", "data.root=my pictures", "hardware.nodes=4"])
    with pytest.raises(SettingError) as error:
        hardware_at(cpu(8, 4), None)
    assert "hardware.nodes=4: a program cannot start itself on other machines. Run this on each of the 4" in str(
        error.value
    )
    command = "torchrun --nnodes=4 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=FIRST:29500 -m roadmap train "
    assert f"{command}'data.root=my pictures' hardware.nodes=4\n" in str(error.value)
    assert "srun --nodes=4 --ntasks-per-node=8 roadmap train 'data.root=my pictures'" in str(error.value)


def test_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware_here(cpu("auto")).devices == 1
    assert hardware_at(cpu(3), None).devices == 3  # a CPU has as many as are asked for
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert hardware_at(HardwareSettings(devices="auto"), None).devices == 4  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="hardware.devices=8: there are 4 here; give 4 or auto"):
        hardware_at(HardwareSettings(devices=8), None)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("gpu7", "gpu7"),
        ("a1,b2", "a1"),
        ("r2-n[3,5]", "r2-n3"),
        ("localhost", "localhost"),
    ],
)
def test_the_first_of_a_list_of_nodes(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_what_follows_from_the_end_of_another_is_told_from_what_does_not() -> None:
    def lost() -> bool:
        ranks: Ranks = ranks_here()
        if not ranks.first:
            os._exit(1)
        try:
            ranks.from_all(1)
        except Exception as error:
            return is_consequence(error)
        return False

    assert together(2, lost)[0] is True
    assert not is_consequence(ValueError("a picture could not be read"))
    assert not is_consequence(RuntimeError("out of memory"))
