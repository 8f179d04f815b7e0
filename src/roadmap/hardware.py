"""Which device, precision and memory layout a model runs in: the one place that decides what "auto" means."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from roadmap.config.settings import DataSettings, HardwareSettings, SettingError
from roadmap.ranks import Ranks

Model = TypeVar("Model", bound=nn.Module)
DTYPES = {"32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = ("cpu", "cuda", "mps")


def device_of(name: str) -> torch.device:
    """The device of a name: "cpu", "cuda", "cuda:1", "mps"; "auto" is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in KINDS or (device.index is not None and device.type != "cuda"):
        raise SettingError("hardware.device", f"hardware.device must be auto, cpu, cuda, cuda:N or mps, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError(
            "hardware.device", f"hardware.device={name}: no CUDA device is visible here; use hardware.device=cpu"
        )
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        there = ", ".join(f"cuda:{i}" for i in range(torch.cuda.device_count()))
        raise SettingError("hardware.device", f"hardware.device={name} is not there; there is {there}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise SettingError("hardware.device", f"hardware.device={name}: there is none here; use hardware.device=cpu")
    return device


def precision_of(settings: HardwareSettings, device: torch.device) -> str:
    """ "32", "bf16" or "fp16": what "auto" means on a device."""
    if settings.precision != "auto":
        return settings.precision
    if device.type != "cuda":
        return "32"
    # GPUs from before Ampere compute bf16 too, by way of float32 and slower than that
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def autocast_of(settings: HardwareSettings, device: torch.device) -> torch.dtype | None:
    """The type that the model computes in where it is not float32."""
    return DTYPES[precision_of(settings, device)]


def in_layout(model: Model, settings: HardwareSettings) -> Model:
    """The model with its weights in the memory layout that is asked for."""
    return model.to(memory_format=torch.channels_last) if settings.channels_last else model  # type: ignore[call-overload]


def workers_of(data: DataSettings, ranks: Ranks) -> int | None:
    """Threads or processes that prepare pictures for one process: those on a machine share its cores."""
    if data.workers is not None or ranks.local_world == 1:
        return data.workers
    return max(1, (os.cpu_count() or 1) // ranks.local_world)


@contextmanager
def repeatable(settings: HardwareSettings) -> Iterator[None]:
    """Within, a model gives the same pictures the same bits again: in training, and in any later process.

    What would choose among algorithms by trying them out is off, and the CPU uses as many threads as the run.
    """
    cudnn, threads = torch.backends.cudnn, torch.get_num_threads()
    kept = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    if settings.threads is not None and settings.threads != threads:
        torch.set_num_threads(settings.threads)
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = kept
        torch.set_num_threads(threads)
