"""ViTs that the benchmark of steps writes otherwise are the same functions of the same weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from roadmap.config.settings import ModelSettings
from roadmap.models import Retriever, retriever

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from vit_rewrites import Masters, PatchProduct, rewrite


def small_vit() -> Retriever:
    torch.manual_seed(0)
    model = retriever(ModelSettings("vit_small_patch14_dinov2", "random"), 28)
    for block in model.backbone.blocks:  # as after training: each channel has a scale of its own
        nn.init.uniform_(block.ls1.gamma, 0.1, 1.0)
        nn.init.uniform_(block.ls2.gamma, 0.1, 1.0)
    return model


def values(model: Retriever, like: dict[str, nn.Parameter], halves: bool) -> tuple[Tensor, list[Tensor]]:
    """Vectors, and the gradients of the parameters of the plain model, in its order."""
    generator = torch.Generator().manual_seed(1)
    images, pull = torch.randn(3, 3, 28, 28, generator=generator), torch.randn(3, 384, generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=halves):
        vectors = model(images)
    (vectors * pull).sum().backward()
    gradients = [parameter.grad for parameter in like.values()]
    assert all(gradient is not None for gradient in gradients)
    found = [gradient.clone() for gradient in gradients if gradient is not None]
    for parameter in like.values():
        parameter.grad = None
    return vectors.detach(), found


@pytest.mark.parametrize(
    ("names", "tolerance"),
    [(("patches",), 1e-4), (("scales",), 1e-4), (("stream",), 0.1)],
)
def test_a_rewritten_network_is_the_same_function(names: tuple[str, ...], tolerance: float) -> None:
    model = small_vit()
    plain = dict(model.named_parameters())
    halves = "stream" in names
    vectors, gradients = values(model, plain, halves)
    rewrite(model, names)
    assert {id(p) for p in model.parameters()} == {id(p) for p in plain.values()}
    others, changed = values(model, plain, halves)
    torch.testing.assert_close(others, vectors, rtol=0, atol=tolerance * float(vectors.abs().max()))
    for name, one, other in zip(plain, gradients, changed, strict=True):
        assert (one - other).norm() <= tolerance * one.norm() + 1e-7, name


def test_attention_in_tiles_gives_the_same_vectors() -> None:
    model, images = small_vit(), torch.randn(3, 3, 28, 28)
    with torch.no_grad():
        vectors = model(images)
        rewrite(model, ["flex", "scales"])
        torch.testing.assert_close(model(images), vectors, rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_attention_in_tiles_gives_the_same_gradients() -> None:
    model = small_vit().cuda()
    plain = dict(model.named_parameters())
    images, pull, found = torch.randn(3, 3, 28, 28, device="cuda"), torch.randn(3, 384, device="cuda"), []
    for names in ([], ["flex"]):
        rewrite(model, names)
        network = torch.compile(model) if names else model
        found.append(torch.autograd.grad((network(images) * pull).sum(), list(plain.values())))
    for name, one, other in zip(plain, *found, strict=True):
        assert (one - other).norm() <= 1e-2 * one.norm() + 1e-6, name


def test_master_weights_move_as_plain_ones() -> None:
    plain, halved = small_vit(), small_vit()
    masters = Masters(halved)
    assert {weight.dtype for weight in masters.halves} == {torch.bfloat16}
    images, pull = torch.randn(3, 3, 28, 28), torch.randn(3, 384)
    for model, moving in ((plain, list(plain.parameters())), (halved, masters.weights)):
        optimizer = torch.optim.SGD(moving, lr=1e-2)
        with torch.autocast("cpu", torch.bfloat16):
            vectors = model(images)
        (vectors * pull).sum().backward()
        if model is halved:
            masters.take_gradients()
        optimizer.step()
    masters.give_weights()
    assert all(half.grad is None for half in masters.halves)
    matrices = [weight for weight in plain.parameters() if weight.ndim > 1]
    for whole, half, expected, start in zip(
        masters.floats, masters.halves, matrices, [w for w in small_vit().parameters() if w.ndim > 1], strict=True
    ):
        moved = (expected - start).norm()
        assert (whole - expected).norm() <= 0.1 * moved + 1e-7
        assert torch.equal(half, whole.to(torch.bfloat16))


def test_a_convolution_that_is_no_product_is_refused() -> None:
    with pytest.raises(ValueError, match="patches overlap"):
        PatchProduct(nn.Conv2d(3, 8, 4, 2))
