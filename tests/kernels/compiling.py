"""Compile, for a GPU that need not be there, every Triton kernel that a piece of code launches.

The interpreter accepts programs that Triton's compiler refuses; this catches them on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from roadmap.kernels import triton_launch

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


@contextmanager
def compiled_not_launched(monkeypatch: pytest.MonkeyPatch, capability: int = 90) -> Iterator[list[str]]:
    """Within, a launch compiles its kernel for a GPU of this compute capability and does nothing else."""
    names: list[str] = []

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {k: named.pop(k) for k in ("num_warps", "num_stages") if k in named}
        bound = dict(zip(self.arg_names, args, strict=False)) | named
        constants = {p.name for p in self.params if p.is_constexpr} | {k for k, v in bound.items() if v is None}
        signature = {name: "constexpr" if name in constants else _type_of(bound[name]) for name in self.arg_names}
        values = {(self.arg_names.index(name),): bound[name] for name in constants}
        source = ASTSource(self, signature, values)
        triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        names.append(self.__name__)

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(triton_launch, "_DIRECT", False)
        yield names
