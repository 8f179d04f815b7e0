"""Lightning Fabric on the chosen device, and whether the model is compiled."""

from __future__ import annotations

import logging
import os

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from torch import nn

from roadmap.config.settings import HardwareSettings
from roadmap.hardware import device_of, precision_of
from roadmap.ranks import ALONE, Ranks

COMPILING_PAYS = 4000  # steps: compiling takes about a minute, and saves some hundredths of a second per step
_FABRIC = {"32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def engine_of(settings: HardwareSettings, ranks: Ranks = ALONE) -> Fabric:
    """Lightning Fabric on the chosen device, with the chosen precision; torch's global switches set to match."""
    device = device_of(settings.device)
    precision = precision_of(settings, device)
    if precision == "fp16" and device.type == "cpu":  # Fabric would take bfloat16 instead
        raise ValueError("hardware.precision=fp16 is for GPUs; on the CPU use 32 or bf16")
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    elif ranks.local_world > 1:  # they would stand in each other's way
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks.local_world))
    if settings.deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS is deterministic only with a fixed workspace
    torch.use_deterministic_algorithms(settings.deterministic)
    torch.backends.cudnn.benchmark = not settings.deterministic
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it would say again what the run says of itself
    # one device a process; who the processes are is ours to know, so it looks for no torchrun or Slurm of its own
    which = [ranks.local_rank % torch.cuda.device_count()] if device.type == "cuda" else 1
    apart = LightningEnvironment()
    fabric = Fabric(accelerator=device.type, devices=which, precision=_FABRIC[precision], plugins=apart)  # type: ignore[arg-type]
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
