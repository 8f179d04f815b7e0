"""Where it is computed: device, precision, compilation. The one place that decides what "auto" means."""

from __future__ import annotations

import logging
import os
from typing import TypeVar

import torch
from lightning_fabric import Fabric
from torch import nn

from roadmap.settings import DEVICES, HardwareSettings

Model = TypeVar("Model", bound=nn.Module)
COMPILING_PAYS = 4000  # steps: compiling takes about a minute, and saves some hundredths of a second per step
_FABRIC = {"32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_DTYPES = {"32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def engine_of(settings: HardwareSettings) -> Fabric:
    """Lightning Fabric on the chosen device, with the chosen precision; torch's global switches set to match."""
    device = device_of(settings.device)
    precision = precision_of(settings, device)
    if precision == "fp16" and device.type == "cpu":  # Fabric would take bfloat16 instead
        raise ValueError("hardware.precision=fp16 is for GPUs; on the CPU use 32 or bf16")
    if settings.devices != 1:
        raise ValueError(f"hardware.devices={settings.devices}: training on several devices is not there yet; use 1")
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS is deterministic only with a fixed workspace
    torch.use_deterministic_algorithms(settings.deterministic)
    torch.backends.cudnn.benchmark = not settings.deterministic
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it would say again what the run says of itself
    fabric = Fabric(accelerator=device.type, devices=1, precision=_FABRIC[precision])  # type: ignore[arg-type]
    fabric.launch()
    return fabric


def device_of(name: str) -> torch.device:
    """The device of a name; "auto" is the GPU where there is one."""
    if name not in DEVICES:
        raise ValueError(f"hardware.device must be one of {', '.join(DEVICES)}, got {name!r}")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("hardware.device=cuda: no CUDA device is visible here; use hardware.device=cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ValueError("hardware.device=mps: there is none here; use hardware.device=cpu")
    return torch.device(name)


def precision_of(settings: HardwareSettings, device: torch.device) -> str:
    """ "32", "bf16" or "fp16": what "auto" means on a device."""
    if settings.precision != "auto":
        return settings.precision
    if device.type != "cuda":
        return "32"
    return "bf16" if torch.cuda.is_bf16_supported() else "fp16"


def autocast_of(settings: HardwareSettings, device: torch.device) -> torch.dtype | None:
    """The type that the model computes in where it is not float32."""
    return _DTYPES[precision_of(settings, device)]


def laid_out(model: Model, settings: HardwareSettings) -> Model:
    """The model with its weights in the memory layout that is asked for."""
    return model.to(memory_format=torch.channels_last) if settings.channels_last else model  # type: ignore[call-overload]


def compiled(model: nn.Module, settings: HardwareSettings, device: torch.device, steps: int) -> nn.Module:
    """The model as it is, or compiled: it shares its parameters with the one that came."""
    mode = settings.compile
    if mode == "auto":
        mode = "default" if device.type == "cuda" and steps >= COMPILING_PAYS else "no"
    if mode == "no":
        return model
    return torch.compile(model, mode=None if mode == "default" else mode)  # type: ignore[return-value]
