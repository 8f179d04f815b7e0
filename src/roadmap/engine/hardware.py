"""Lightning Fabric on the chosen device, and whether the model is compiled."""

from __future__ import annotations

import logging
import os

import torch
from lightning_fabric import Fabric
from torch import nn

from roadmap.config.settings import HardwareSettings
from roadmap.hardware import device_of, precision_of

COMPILING_PAYS = 4000  # steps: compiling takes about a minute, and saves some hundredths of a second per step
_FABRIC = {"32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


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


def runnable_model(model: nn.Module, settings: HardwareSettings, device: torch.device, steps: int) -> nn.Module:
    """The model as it is, or compiled: it shares its parameters with the one that came."""
    mode = settings.compile
    if mode == "auto":
        mode = "default" if device.type == "cuda" and steps >= COMPILING_PAYS else "no"
    if mode == "no":
        return model
    return torch.compile(model, mode=None if mode == "default" else mode)  # type: ignore[return-value]
