"""The device that a kernel is launched on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Launches go to the current device; this makes it the tensor's, where it is another."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
