"""Which device and precision a model runs in: the one place that decides what "auto" means."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from roadmap.config.settings import DEVICES, HardwareSettings

Model = TypeVar("Model", bound=nn.Module)
_DTYPES = {"32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


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
