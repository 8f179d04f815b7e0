"""Compile, for a GPU that need not be there, every Triton kernel that a piece of code launches.

The interpreter accepts programs that Triton's compiler refuses; this catches them on a machine without a GPU. Told what
a launch tells it (which numbers are 1, which numbers and addresses are multiples of 16), the compiler makes the kernel
that would run: without that it loads one number at a time, and prefetches nothing into shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}

MOST_SHARED = 227 * 1024  # bytes that a block may have on a Hopper GPU; beyond, a launch fails


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


def _is_multiple_of_16(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return type(value) is int and value % 16 == 0


class Kernel(NamedTuple):
    """A compiled kernel: its name, what it was compiled with, and its code."""

    name: str
    constants: dict[str, Any]
    ptx: str


@contextmanager
def compiled_not_launched(
    monkeypatch: pytest.MonkeyPatch, capability: int = 90, shared: int | None = None
) -> Iterator[list[Kernel]]:
    """Within, a launch compiles its kernel for a GPU of this compute capability and does nothing else.

    With `shared`, one that takes more bytes of shared memory is refused as Triton refuses it; without, it is an error.

    Skips the test where Triton is missing, or is there only as its interpreter, which compiles nothing.
    """
    triton = pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter compiles nothing")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

    from roadmap.kernels.triton import launch

    kernels: list[Kernel] = []

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {k: named.pop(k) for k in ("num_warps", "num_stages") if k in named}
        bound = dict(zip(self.arg_names, args, strict=False)) | named
        constants = {p.name for p in self.params if p.is_constexpr} | {k for k, v in bound.items() if v is None}
        specialised = {p.name for p in self.params if not p.do_not_specialize}
        constants |= {k for k in specialised if type(bound[k]) is int and bound[k] == 1}  # no number there any more
        signature = {name: "constexpr" if name in constants else _type_of(bound[name]) for name in self.arg_names}
        values = {(self.arg_names.index(name),): bound[name] for name in constants}
        aligned = {name for name in specialised - constants if _is_multiple_of_16(bound[name])}
        known = {(self.arg_names.index(name),): [["tt.divisibility", 16]] for name in sorted(aligned)}
        source = ASTSource(self, signature, values, known)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        if shared is not None and compiled.metadata.shared > shared:
            raise OutOfResources(compiled.metadata.shared, shared, "shared memory")
        assert compiled.metadata.shared <= MOST_SHARED, f"{self.__name__} takes {compiled.metadata.shared} bytes"
        kernels.append(Kernel(self.__name__, {name: bound[name] for name in constants}, compiled.asm["ptx"]))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(launch, "_DIRECT", False)
        yield kernels
