"""Which implementation takes a call: the Triton kernels or plain torch, with scores that are kept or not."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

# Up to here the (M, N) scores are kept (8 MiB) and the fewest launches win; beyond, tiles and linear memory do.
SMALL = 1 << 21

# Beyond, the scores are kept where they take at most this many times the room of the vectors: a batch against a memory.
STORED = 1

_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def runs_on_triton(x: Tensor) -> bool:
    """Whether the Triton kernels take `x`: on a GPU, not float64 (whose users want more than float32), not empty."""
    on_device = x.is_cuda or (x.device.type == "cpu" and _INTERPRETING)
    return on_device and x.dtype != torch.float64 and x.numel() > 0 and _TRITON_INSTALLED


def both_run_on_triton(queries: Tensor, gallery: Tensor | None) -> bool:
    """Of two on different GPUs neither does: a kernel would read what its device cannot, and plain torch says so."""
    if gallery is None:
        return runs_on_triton(queries)
    return runs_on_triton(queries) and runs_on_triton(gallery) and queries.device == gallery.device


def is_small(M: int, N: int) -> bool:
    return M * N <= SMALL


def keeps_scores(M: int, N: int, dimensions: int) -> bool:
    """Whether the tiled kernels store the (M, N) scores: few queries against a gallery that outweighs them."""
    return not is_small(M, N) and STORED * (M + N) * dimensions >= M * N


def is_plain_call(x: Tensor) -> bool:
    """Whether `x` is an ordinary tensor in an ordinary call: nobody compiles, traces, transforms or fakes it.

    Then the kernels are called directly, without the price of a registered operator.
    """
    return (
        not torch.compiler.is_compiling()
        and type(x) in _ORDINARY
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


_ORDINARY = (torch.Tensor, torch.nn.Parameter)
