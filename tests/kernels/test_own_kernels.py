"""Places of the queries, and terms before the scalar, in the Triton kernels; the truth is plain torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roadmap.kernels import both_run_on_triton
from roadmap.losses import ROADMAP, Calibration, HierarchicalAP, RecallAtK, SmoothAP, SupAP, SupNDCG, SupRank
from roadmap.losses.comparison import Comparison

from .interpreting import CUDA, DEVICE, check_under_the_interpreter, on_triton, starts_the_interpreter, take_path

LOSSES: dict[str, nn.Module] = {
    "SupAP without self": SupAP(tau=0.05, rho=3.0, delta=0.1, include_self=False),
    "SmoothAP without self": SmoothAP(tau=0.1, include_self=False),
    "Calibration all": Calibration(alpha=0.8, beta=0.1, average="all"),
    "ROADMAP": ROADMAP(),
    "SupNDCG without self": SupNDCG(tau=0.05, rho=3.0, delta=0.1, include_self=False),
    "RecallAtK": RecallAtK((1, 2, 5), tau=0.1, share="reachable"),
    "SupRank of recall": SupRank(40 if CUDA else 4, 64 if CUDA else 19, measure="recall").to(DEVICE),
}
Result = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(params=["small", "tiles", "stored"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    take_path(monkeypatch, request.param)
    return str(request.param)


def placed(
    seed: int, queries: int, items: int, classes: int, dims: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries of which some are gallery items and some are not; labels in no order."""
    g = torch.Generator().manual_seed(seed)
    gallery, item_labels = torch.randn(items, dims, generator=g) + 0.5, torch.randint(0, classes, (items,), generator=g)
    own = torch.randint(0, items, (queries,), generator=g)
    x, labels = gallery[own], item_labels[own]
    elsewhere = torch.rand(queries, generator=g) < 0.4
    x = torch.where(elsewhere[:, None], torch.randn(queries, dims, generator=g) + 0.5, x)
    own = torch.where(elsewhere, -1, own)
    assert 0 < int(elsewhere.sum()) < queries
    return tuple(t.to(DEVICE) for t in (x, labels, gallery, item_labels, own))  # type: ignore[return-value]


def result(loss: nn.Module, batch: tuple[Tensor, ...], dtype: torch.dtype, *, by_terms: bool = False) -> Result:
    x, labels, gallery, item_labels, own = batch
    x, gallery = (v.to(dtype, copy=True).requires_grad_() for v in (x, gallery))
    assert both_run_on_triton(x, gallery) is (dtype != torch.float64)
    if by_terms:
        terms = loss.terms(Comparison.of(x, labels, ref_emb=gallery, ref_labels=item_labels, own=own))
        value: Tensor = loss.value(terms)
    else:
        value = loss(x, labels, ref_emb=gallery, ref_labels=item_labels, own=own)
    (3 * value).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert gallery.grad is not None
    return value.detach().double(), x.grad.double(), gallery.grad.double()


def check_near(found: Result, truth: Result) -> None:
    for f, t in zip(found, truth, strict=True):
        torch.testing.assert_close(f, t, rtol=1e-5, atol=2e-6 + 1e-5 * float(t.abs().max()))


@on_triton
@pytest.mark.parametrize("name", LOSSES)
def test_triton_places_and_terms(name: str, path: str) -> None:
    batch = placed(3, *((200, 700, 40, 64) if CUDA else (9, 21, 4, 19)))
    truth = result(LOSSES[name], batch, torch.float64)
    check_near(result(LOSSES[name], batch, torch.float32), truth)
    check_near(result(LOSSES[name], batch, torch.float32, by_terms=True), truth)


@on_triton
def test_triton_batch_is_the_gallery_at_its_places(path: str) -> None:
    loss = ROADMAP(average="all", include_self=False)
    x, labels, *_ = placed(5, *((300, 301, 40, 64) if CUDA else (11, 12, 3, 19)))
    both = x.clone().requires_grad_()
    inside = loss(both, labels)
    inside.backward()
    q, g = x.clone().requires_grad_(), x.clone().requires_grad_()
    outside = loss(q, labels, ref_emb=g, ref_labels=labels, own=torch.arange(len(x), device=DEVICE))
    outside.backward()
    torch.testing.assert_close(outside, inside, rtol=1e-6, atol=1e-6)
    assert both.grad is not None
    assert q.grad is not None
    torch.testing.assert_close(q.grad + g.grad, both.grad, rtol=1e-4, atol=1e-5 * float(both.grad.abs().max()))


@on_triton
def test_triton_terms_of_shared_rows_add_up(path: str) -> None:
    loss = ROADMAP()
    x, labels, *_ = placed(6, *((300, 301, 40, 64) if CUDA else (11, 12, 3, 19)))
    x = x.requires_grad_()
    whole = loss(x, labels)
    (expected,) = torch.autograd.grad(whole, x)
    parts = []
    for first, end in ((0, len(x) // 3), (len(x) // 3, len(x))):
        own = torch.arange(first, end, device=DEVICE)
        parts.append(loss.terms(Comparison.of(x[first:end], labels[first:end], ref_emb=x, ref_labels=labels, own=own)))
    value = loss.value(parts[0] + parts[1])
    (gradient,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(value, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@on_triton
@pytest.mark.parametrize("front", [1, 7, 16])
def test_triton_gradient_of_the_front_alone(front: int, path: str) -> None:
    x, labels, gallery, item_labels, own = placed(4, 9, 21, 4, 19)
    truth = result(ROADMAP(), (x, labels, gallery, item_labels, own), torch.float32)
    q, moving = x.clone().requires_grad_(), gallery[:front].clone().requires_grad_()
    spared = []

    class Front(torch.autograd.Function):
        """A gallery of which only the first rows hand a gradient on."""

        @staticmethod
        def forward(ctx: Any, first: Tensor) -> Tensor:
            ctx.moving_rows = len(first)
            return gallery.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            spared.append(not grad[front:].any())
            return grad[:front]

    value = ROADMAP()(q, labels, ref_emb=Front.apply(moving), ref_labels=item_labels, own=own)  # type: ignore[no-untyped-call]
    (3 * value).backward()
    assert q.grad is not None
    assert moving.grad is not None
    check_near((value.detach().double(), q.grad.double(), moving.grad.double()), (*truth[:2], truth[2][:front]))
    assert spared == [path == "stored"]  # the others are not computed where they are what takes time


@on_triton
@pytest.mark.parametrize(("way", "loss"), [("tiles", SupAP), ("stored", SupAP), ("small", HierarchicalAP)])
def test_triton_one_positive_among_many_that_are_as_near(
    way: str, loss: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entry of ∂L/∂s is minus the sum of theirs, and must have room in the range of float16 too."""
    take_path(monkeypatch, way)
    generator = torch.Generator().manual_seed(9)
    gallery = torch.randn(1, 9, generator=generator) + 0.01 * torch.randn(100, 9, generator=generator)
    labels, item_labels = torch.tensor([0, 1]), (torch.arange(100) > 0).long() * 2
    item_labels[1] = 1
    if loss is HierarchicalAP:
        labels, item_labels = (torch.stack([some, some], 1) for some in (labels, item_labels))
    x = gallery[:2] + 0.5 * torch.randn(2, 9, generator=generator)
    batch = tuple(t.to(DEVICE) for t in (x, labels, gallery, item_labels, torch.tensor([-1, -1])))
    made = loss(tau=0.1, rho=1.0)
    check_near(result(made, batch, torch.float32), result(made, batch, torch.float64))


@on_triton
@pytest.mark.parametrize("scale", [1e-22, 1e-36, 1e22, 1e36])
def test_triton_takes_vectors_of_any_length(scale: float) -> None:
    x, labels, *_ = placed(7, 9, 10, 3, 19)
    expected = ROADMAP()(x, labels)
    short = (x * scale).requires_grad_()
    value = ROADMAP()(short, labels)
    value.backward()
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    assert short.grad is not None
    assert short.grad.isfinite().all()


@on_triton
def test_triton_vectors_may_lie_in_memory_in_any_order() -> None:
    """Transposed, so that the numbers of one are far apart."""
    x, labels, *_ = placed(7, 9, 10, 3, 19)
    found = []
    for y in (x, x.T.contiguous().T):
        leaf = y.detach().requires_grad_()
        value = ROADMAP()(leaf, labels)
        found.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
    assert not leaf.is_contiguous()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@on_triton
def test_triton_under_another_default_type() -> None:
    x, labels, *_ = placed(8, 9, 10, 3, 19)
    expected = ROADMAP()(x, labels)
    torch.set_default_dtype(torch.float64)
    try:
        value = ROADMAP()(x, labels)
    finally:
        torch.set_default_dtype(torch.float32)
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)


@starts_the_interpreter
def test_places_under_the_interpreter() -> None:
    check_under_the_interpreter(__file__, "triton")
