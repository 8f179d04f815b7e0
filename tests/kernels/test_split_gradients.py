"""Gradients at the vectors from those at many of their cosines: split products against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from roadmap.kernels import cosine_scores, paths

from .compiling import compiled_not_launched
from .interpreting import CUDA, DEVICE, check_under_the_interpreter, on_triton, starts_the_interpreter


def drawn(rows: int, dims: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, dims, generator=generator) + 0.3).to(DEVICE)


def gradients(x: Tensor, g: Tensor | None, weights: Tensor) -> tuple[Tensor, ...]:
    sides = [side.detach().requires_grad_() for side in (x, g) if side is not None]
    scores = cosine_scores(sides[0], None if g is None else sides[1])
    return torch.autograd.grad(scores, sides, weights.to(scores.dtype))


@on_triton
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("shape", [(21, None, 19), (5, 40, 33), (40, 5, 8)], ids=str)
def test_triton_split_gradients_are_those_of_float64(
    shape: tuple[int, int | None, int], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roadmap.kernels.triton import split_gradients

    monkeypatch.setattr(paths, "SMALL", 0)
    monkeypatch.setattr(split_gradients, "BLOCK_SCORES", 1)  # one row of tiles at a time
    M, N, dims = shape
    x, g = drawn(M, dims, 0), None if N is None else drawn(N, dims, 1)
    weights = drawn(M, M if N is None else N, 2).double() ** 5 * scale
    found = gradients(x, g, weights)
    expected = gradients(x.double(), None if g is None else g.double(), weights)
    for mine, truth in zip(found, expected, strict=True):
        assert (mine.double() - truth).abs().max() <= 3e-6 * truth.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("scores", [1 << 24, 1 << 21], ids=["one block", "blocks"])
def test_gpu_split_gradients_are_as_good_as_float32(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from roadmap.kernels.triton import split_gradients

    monkeypatch.setattr(split_gradients, "BLOCK_SCORES", scores)
    x, g = drawn(3000, 512, 3), drawn(2100, 512, 4)
    weights = torch.softmax(20 * drawn(3000, 2100, 5), 1).double()
    truth = gradients(x.double(), g.double(), weights)
    unit = [side / side.norm(dim=1, keepdim=True) for side in (x, g)]
    for n, (mine, expected) in enumerate(zip(gradients(x, g, weights), truth, strict=True)):
        plain = (weights.float() @ unit[1]) if n == 0 else weights.float().T @ unit[0]
        plain = plain - (plain * unit[n]).sum(1, keepdim=True) * unit[n]
        plain = plain / (x, g)[n].norm(dim=1, keepdim=True)
        allowed = 2 * (plain.double() - expected).abs().max() + 3e-7 * expected.abs().max()
        assert (mine.double() - expected).abs().max() <= allowed


@pytest.mark.skipif(CUDA, reason="compiled there by the test above")
def test_split_gradients_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_INTERPRETING", True)
    monkeypatch.setattr(paths, "SMALL", 0)
    x, g = drawn(300, 512, 0).requires_grad_(), drawn(200, 512, 1).requires_grad_()
    with compiled_not_launched(monkeypatch) as compiled:
        cosine_scores(x, g).sum().backward()
    assert {"_factors_of_largest", "_split_rows", "_product"} <= {kernel.name for kernel in compiled}


@starts_the_interpreter
def test_split_gradients_under_the_interpreter() -> None:
    check_under_the_interpreter(__file__, "triton")
