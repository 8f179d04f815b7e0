"""Launching a Triton kernel at little more than the price of the launch.

Triton works out at every call how its arguments specialise the kernel, 20 to 100 microseconds for kernels with as many
arguments as ours; a loss over a small batch is nothing but such calls. Here a launch that looks like an earlier one
(the same kernel, integers, dtypes and alignments) goes straight to the compiled kernel.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
from torch import Tensor

# The compiled kernel's own calling convention is not a public interface: it is used where it was tested, and every
# other version of Triton (and its interpreter) takes the ordinary way.
_DIRECT = triton.__version__.startswith("3.6.") and os.environ.get("TRITON_INTERPRET") != "1"
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
) -> None:
    """`kernel[grid](*args, **constants)`: all `args` first, then the tl.constexpr parameters by name."""
    if not _DIRECT:
        kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
        return
    device = torch.cuda.current_device()
    key = (kernel, device, num_warps, num_stages, *constants.values(), *[_specialised(a) for a in args])
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
        return
    wide = (*grid, 1, 1)
    compiled.run(
        wide[0], wide[1], wide[2], torch._C._cuda_getCurrentRawStream(device),
        compiled.function, compiled.packed_metadata, None, None, None,
        *args, *[constants[name] for name in kernel.arg_names[len(args) :]],
    )  # fmt: skip


def _specialised(argument: Any) -> Any:
    """What Triton compiles into the kernel about an argument; an integer stands for itself, which says more."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15 == 0
    return argument if isinstance(argument, int) else None
