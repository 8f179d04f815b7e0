"""The device that a run computes on and the precision of its steps: what casts a model's work, and scales gradients."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from roadmap.config.settings import HardwareSettings
from roadmap.hardware import DTYPES, device_of, precision_of
from roadmap.ranks import ALONE, Ranks


class Arithmetic:
    """How a step is computed. Losses and scores are float32 whatever it says.

    Args:
        device: of the model and the pictures.
        precision: "32", "bf16", or "fp16", whose gradients are scaled so that small ones are not lost.

    Attributes:
        scaler: of fp16's gradients; None for the other precisions.
    """

    def __init__(self, device: torch.device, precision: str = "32") -> None:
        self.device, self.precision = device, precision
        self.scaler = GradScaler(device.type) if precision == "fp16" else None

    def autocast(self) -> AbstractContextManager[object]:
        """Within, a model computes in this precision. Casts of weights are made anew each time: one that is kept from
        a pass without a graph would cut the graph of the next."""
        dtype = DTYPES[self.precision]
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype, cache_enabled=False)

    def pull_back(self, loss: Tensor) -> None:
        """Adds the gradient of the loss to that of every weight, scaled where there is a scaler."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def norm(self, optimizer: torch.optim.Optimizer, limit: float | None) -> Tensor:
        """The norm of all gradients, unscaled, before they are clipped to a limit, if there is one."""
        moving = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in moving if parameter.grad is not None]
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        found = torch.nn.utils.get_total_norm(gradients)
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(moving, limit, found)
        return found

    def move(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of the optimiser, left out where fp16 overflowed."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()


def arithmetic_of(settings: HardwareSettings, ranks: Ranks = ALONE, vectors: bool = False) -> Arithmetic:
    """That of the settings, for one of the processes; torch's global switches are set to match.

    `vectors`: steps are given what a frozen backbone made of pictures in that precision, and are float32 themselves.
    """
    device = device_of(settings.device)
    precision = precision_of(settings, device)
    if precision == "fp16" and device.type == "cpu":
        raise ValueError("hardware.precision=fp16 is for GPUs; on the CPU use 32 or bf16")
    if device.type == "cuda":
        which = ranks.local_rank % torch.cuda.device_count() if device.index is None else device.index
        device = torch.device("cuda", which)
        torch.cuda.set_device(device)
    _set_threads(settings, ranks)
    if settings.deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS is deterministic only with a fixed workspace
    if settings.deterministic != torch.are_deterministic_algorithms_enabled():  # the call itself loads the compiler
        torch.use_deterministic_algorithms(settings.deterministic)
    torch.backends.cudnn.benchmark = not settings.deterministic
    return Arithmetic(device, "32" if vectors else precision)


def _set_threads(settings: HardwareSettings, ranks: Ranks) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    elif ranks.local_world > 1:  # they would stand in each other's way
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks.local_world))
