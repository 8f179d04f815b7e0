"""Launching Triton kernels at little more than the price of the launches.

A loss over a small batch keeps the GPU busy for 30 microseconds. Triton works out at every call how the arguments
specialise the kernel, and torch allocates every tensor: together 30 times that. So the launches of one call are
recorded once, as compiled kernels over three kinds of arguments: tensors the caller brings, places in one workspace,
and constants. From then on a call of the same shape allocates the workspace and plays the record.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

# The compiled kernel's own calling convention is not a public interface: it is used where it was tested, and every
# other version of Triton (and its interpreter) takes the ordinary way.
_DIRECT = triton.__version__.startswith("3.6.") and os.environ.get("TRITON_INTERPRET") != "1"
_ALIGNMENT = 256
MOST_PROGRAMS = 64  # records kept; a loop has one or two, a sweep over shapes must not gather them for ever
_local = threading.local()


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
) -> None:
    """`kernel[grid](*args, **constants)`: all `args` first, then the tl.constexpr parameters by name.

    Where a GPU has less shared memory for a block than so many stages take (99 KiB on an RTX 4090, 227 on an H200), it
    gets the kernel with fewer.
    """
    while True:
        try:
            compiled = kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
            break
        except OutOfResources:
            if num_stages == 1:
                raise
            num_stages -= 1
    record = getattr(_local, "record", None)
    if record is not None:
        record.append((compiled, (*grid, 1, 1)[:3], (*args, *[constants[n] for n in kernel.arg_names[len(args) :]])))


class Arena:
    """Where the tensors of one call come from: one buffer, where it is known how much it takes."""

    def __init__(self, device: torch.device, buffer: Tensor | None = None) -> None:
        self.device = device
        self.buffer = buffer
        self.used = 0

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        count = math.prod(shape) * dtype.itemsize
        start = self.used
        self.used += -(-count // _ALIGNMENT) * _ALIGNMENT
        if self.buffer is None:
            return torch.empty(shape, device=self.device, dtype=dtype)
        return self.buffer[start : start + count].view(dtype).view(shape)


@lru_cache(maxsize=4 * MOST_PROGRAMS)
def room_of(layout: Callable[..., Any], *shape: int) -> int:
    """How many bytes the tensors take that `layout` makes in an arena. Asking anew would cost a call more than a launch
    does."""
    arena = Arena(torch.device("meta"))
    layout(arena, *shape)
    return arena.used


def new_buffer(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, device=device, dtype=torch.uint8)


@dataclass(frozen=True)
class Tape:
    """Recorded launches. A template names, for each argument, a place: (which tensor, offset), or (-1, constant)."""

    steps: list[tuple[Any, tuple[int, int, int], list[tuple[int, Any]]]]
    workspace: int

    def play(self, addresses: Sequence[int], device: int) -> None:
        stream = torch._C._cuda_getCurrentRawStream(device)
        for compiled, (x, y, z), template in self.steps:
            args = [value if which < 0 else addresses[which] + value for which, value in template]
            compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def _tape(record: list[Any], tensors: Sequence[Tensor | None], workspace: int) -> Tape | None:
    """The record with every tensor named by where it lies in `tensors`; None if one lies elsewhere."""
    spans = [(0, 0) if t is None else _span(t) for t in tensors]

    def place(argument: Any) -> tuple[int, Any] | None:
        if not isinstance(argument, Tensor):
            return -1, argument
        if argument.numel() == 0:  # no kernel reads it: any address will do
            return 0, 0
        address = argument.data_ptr()
        return next(((n, address - first) for n, (first, end) in enumerate(spans) if first <= address < end), None)

    steps = []
    for compiled, grid, args in record:
        template = [place(a) for a in args]
        if None in template:
            return None
        steps.append((compiled, grid, template))
    return Tape(steps, workspace)  # type: ignore[arg-type]


@contextmanager
def _recording() -> Iterator[list[Any]]:
    record: list[Any] = []
    before = getattr(_local, "record", None)
    _local.record = record
    try:
        yield record
    finally:
        _local.record = before


class Program:
    """One half (forward or backward) of a call of one shape. Once it is known how large a buffer its tensors take, its
    launches are recorded."""

    def __init__(self) -> None:
        self.size: int | None = None
        self.tape: Tape | None = None

    @contextmanager
    def run(self, device: torch.device, tensors: Sequence[Tensor | None], buffer: Tensor | None) -> Iterator[Arena]:
        """The arena to allocate from while launching over `tensors`; what is launched within may be recorded.

        Without a `buffer`, the first run measures how large it must be, and the next makes one.
        """
        if buffer is None and _DIRECT and self.size is not None:
            buffer = new_buffer(self.size, device)
        arena = Arena(device, buffer)
        with _recording() as record:
            yield arena
        if _DIRECT and arena.buffer is not None:
            self.tape = _tape(record, [*tensors, arena.buffer], arena.used)
        self.size = arena.used


def signature_of(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """What recorded launches take for granted about the tensors of a call.

    That is also which of them lie in one another: a record names each by where it lies, and where queries and gallery
    are one tensor it cannot say which of the two a kernel was given.
    """
    alone = (None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() & 15 == 0) for t in tensors)
    return (*alone, shared_memory(tensors))


def shared_memory(tensors: Sequence[Tensor | None]) -> tuple[tuple[int, int, int], ...]:
    """Each tensor that begins within another: which it is, which the other, and how many bytes further on. In the order
    of the tensors: which of two pairs lies lower in memory is another matter at every call."""
    spans = sorted([(*_span(t), n) for n, t in enumerate(tensors) if t is not None])
    found, begins, furthest, owner = [], 0, 0, -1
    for first, end, n in spans:
        if first < furthest and end > first:
            found.append((n, owner, first - begins))
        if end > furthest:
            begins, furthest, owner = first, end, n
    return tuple(sorted(found))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where its memory begins and ends. One vector that is repeated has that of the one: what lies behind is not its
    own, though a record would take it for a part of it."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    last = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize


def program_of(
    programs: dict[Any, Any], key: tuple[Any, ...], tensors: Sequence[Tensor | None], new: Callable[[], Any] = Program
) -> Any:
    """The record of calls like this one, or what `new` makes; a call is told apart by what its launches take for
    granted."""
    whole = (*key, signature_of(tensors))
    program = programs.pop(whole, None) or new()
    programs[whole] = program  # the last used stands last
    if len(programs) > MOST_PROGRAMS:
        programs.pop(next(iter(programs)), None)
    return program


def play_or_record(
    programs: dict[Any, Program], device: torch.device, given: Sequence[Tensor | None], buffer: Tensor,
    launch_all: Callable[[Arena], None], key: tuple[Any, ...] = (),
) -> None:  # fmt: skip
    """Launches over `given` and `buffer`, from a record where there is one of calls like this."""
    program = program_of(programs, (device, *key), given)
    if program.tape is not None:
        program.tape.play([0 if t is None else t.data_ptr() for t in (*given, buffer)], device.index or 0)
        return
    with program.run(device, given, buffer) as arena:
        launch_all(arena)
