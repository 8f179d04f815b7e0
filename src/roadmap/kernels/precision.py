"""Float32 in full, whatever the process was told about TF32 or bfloat16: one home for losses and metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32 or better: half-precision scores tie where they should not."""
    return x if x.dtype == torch.float64 else x.float()


@contextmanager
def full_float32() -> Iterator[None]:
    """Within, float32 products are neither TF32 nor bfloat16, whatever `torch.set_float32_matmul_precision` says.

    The setting belongs to the process, not to a thread. The first thread in raises it and the last one out puts the
    user's choice back, so that no thread inside computes with less, whoever leaves before it.
    """
    _setting.enter()
    try:
        yield
    finally:
        _setting.leave()


class _Setting:
    """Torch's precision of float32 products: how many want it whole, and what it was before the first of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.before: str | None = None
        self.fine: list[tuple[Any, str]] = []

    def enter(self) -> None:
        with self.lock:
            if self.inside == 0:
                self._raise()
            self.inside += 1

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self._restore()

    def _raise(self) -> None:
        # Torch has an older setting and, since 2.9, one for each backend, which the older one overwrites.
        matmuls: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
        self.fine = [(matmul, matmul.fp32_precision) for matmul in matmuls if hasattr(matmul, "fp32_precision")]
        try:
            self.before = torch.get_float32_matmul_precision()
        except RuntimeError:  # torch refuses to say where the two contradict each other
            self.before = None
        if self.before is not None and self.before != "highest":
            torch.set_float32_matmul_precision("highest")
        for matmul, precision in self.fine:
            if precision not in ("ieee", "none") and matmul.fp32_precision != "ieee":
                matmul.fp32_precision = "ieee"

    def _restore(self) -> None:
        if self.before is not None and self.before != "highest":
            torch.set_float32_matmul_precision(self.before)
        for matmul, precision in self.fine:
            if matmul.fp32_precision != precision:
                matmul.fp32_precision = precision


_setting = _Setting()
