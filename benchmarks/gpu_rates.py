"""The ceilings of the GPU at hand: matrix products of float32 accuracy, and sigmoids, per second."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.testing import do_bench

from roadmap.kernels.triton.launch import Arena
from roadmap.kernels.triton.math import sigmoid
from roadmap.kernels.triton.small import fill_scores
from roadmap.kernels.triton.units import fill_units, room_for_units


@triton.jit
def _sigmoids(X, Out, rounds, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at)
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in range(rounds):
        total += sigmoid(x - 0.001 * turn, 100.0)
    tl.store(Out + at, total)


def _ms(work: object) -> float:
    return float(do_bench(work, warmup=20, rep=100, return_mode="median"))


def measured_rates(size: int = 8192, dimensions: int = 512) -> dict[str, float]:
    """Operations per second, by name."""
    x = torch.randn(size, dimensions, device="cuda")
    half = x.half()
    units = room_for_units(Arena(x.device), *x.shape)
    fill_units(units, x)
    scores = torch.empty(size, size, device="cuda")
    flops = 2 * size * size * dimensions
    seconds = 1e-3
    found = {
        "float32 matmul (cuBLAS)": flops / (_ms(lambda: x @ x.T) * seconds),
        "split float16 matmul": flops / (_ms(lambda: fill_scores(scores, units, units)) * seconds),
        "float16 matmul (cuBLAS)": flops / (_ms(lambda: half @ half.T) * seconds),
    }
    programs, block, rounds = 132 * 16, 1024, 256
    source = torch.randn(programs * block, device="cuda")
    out = torch.empty_like(source)
    ms = _ms(lambda: _sigmoids[(programs,)](source, out, rounds, BLOCK=block, num_warps=4))
    found["sigmoids"] = programs * block * rounds / (ms * seconds)
    return found
