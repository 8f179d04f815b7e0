"""The cluster term of a loss: the kernels against the literal loops, and against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from roadmap.kernels import paths as ways
from roadmap.kernels.clusters import cluster_loss, cluster_terms
from roadmap.losses import HAPPIER, ClusteredLoss, SupAP, SupRank
from roadmap.losses.clusters import Clusters
from roadmap.losses.clusters import cluster_terms as plain_terms
from roadmap.losses.comparison import Comparison

from ..losses import graded_literal as loops
from ..losses import literal
from .compiling import compiled_not_launched
from .interpreting import CUDA, DEVICE, check_under_the_interpreter, on_triton, starts_the_interpreter

Batch = tuple[Tensor, Tensor, Tensor]


def drawn(queries: int, classes: int, dims: int, *, near: float = 1.0) -> Batch:
    """Queries around the vectors of their classes, of very different lengths; `near`: how far from them."""
    g = torch.Generator().manual_seed(queries * 31 + dims)
    proxies = torch.randn(classes, dims, generator=g)
    labels = torch.randint(0, classes, (queries,), generator=g)
    x = proxies[labels] + near * torch.randn(queries, dims, generator=g)
    return (x * 10 ** (4 * torch.rand(queries, 1, generator=g) - 2)).to(DEVICE), proxies.to(DEVICE), labels.to(DEVICE)


CASES = {
    "one query, one class": lambda: drawn(1, 1, 3),
    "one class": lambda: drawn(5, 1, 8),
    "fewer classes than queries": lambda: drawn(19, 5, 19),
    "classes of several blocks": lambda: drawn(3, 300, 7),
    "several tiles": lambda: drawn(37, 40, 33),
    "all but learned": lambda: drawn(19, 40, 24, near=0.02),
    "some not known": lambda: (lambda b: (b[0], b[1], b[2] - 1))(drawn(21, 4, 17)),
    "none known": lambda: (lambda b: (b[0], b[1], b[2] * 0 - 1))(drawn(4, 4, 17)),
}


def value_and_gradients(batch: Batch, temperature: float, dtype: torch.dtype) -> list[Tensor]:
    """Sum, count and gradients at both sides; float32 by the kernels, float64 by plain torch."""
    x, weight, labels = batch
    clusters = Clusters(*weight.shape, temperature).to(DEVICE, dtype)
    leaf = x.to(dtype, copy=True).requires_grad_()
    with torch.no_grad():
        clusters.proxies.copy_(weight)
    # a path of one level: -1 there is a class that is not known, and as a plain label refused
    terms = clusters.terms(Comparison.of_grades(leaf, labels[:, None]))
    (3 * terms.sums.sum()).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert clusters.proxies.grad is not None
    found = terms.sums.detach(), terms.counts, leaf.grad, clusters.proxies.grad
    return [some.double() for some in found]


def check_near(found: list[Tensor], truth: list[Tensor], case: Batch) -> None:
    assert torch.equal(found[1], truth[1])
    error = (found[0] - truth[0]).abs().max()
    assert error <= 2e-6 * truth[0].abs().max() + 3e-7 * len(case[0])
    lengths = case[0].norm(dim=1, keepdim=True), case[1].norm(dim=1, keepdim=True)
    for mine, expected, length in zip(found[2:], truth[2:], lengths, strict=True):
        # by the unit vectors: the rows of short ones would hide those of long ones
        error, largest = (((some * length).abs()).max() for some in (mine - expected, expected))
        assert error <= 1e-5 * largest + 1e-7


@pytest.fixture(params=["one block", "blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All queries at once, or one row of tiles at a time."""
    if request.param == "blocks":
        pytest.importorskip("triton")
        from roadmap.kernels.triton import trees

        monkeypatch.setattr(trees, "SMALLEST_BLOCK", 1)
        monkeypatch.setattr(trees, "LARGEST_BLOCK", 1)


@on_triton
@pytest.mark.parametrize("temperature", [0.05, 0.004, 2.0])
@pytest.mark.parametrize("case", CASES)
def test_triton_clusters_are_those_of_float64(case: str, temperature: float, blocks: None) -> None:
    """A temperature of 0.004 takes e^500 apart: what is so far off counts for nothing, and the loss for 500."""
    batch = CASES[case]()
    found, truth = (value_and_gradients(batch, temperature, dtype) for dtype in (torch.float32, torch.float64))
    check_near(found, truth, batch)


@on_triton
def test_triton_clusters_are_the_literal_loops() -> None:
    x, proxies, labels = drawn(9, 6, 5)
    labels[2] = -1
    rows, columns = x.tolist(), proxies.tolist()
    mean, dc = loops.cluster_loss(literal.cosines(rows, columns), labels.tolist(), 0.2)
    leaf, weight = x.clone().requires_grad_(), proxies.clone().requires_grad_()
    found = cluster_terms(leaf, weight, labels, 0.2)
    value = found[0] / found[1]
    value.backward()  # type: ignore[no-untyped-call]
    assert value.item() == pytest.approx(mean, rel=1e-6)
    for grad, expected in zip((leaf.grad, weight.grad), literal.gradient_of_cosines(dc, rows, columns), strict=True):
        truth = torch.tensor(expected, dtype=torch.float64)
        assert grad is not None
        assert (grad.cpu().double() - truth).abs().max() <= 1e-5 * truth.abs().max()


@on_triton
@pytest.mark.parametrize("case", ["several tiles", "some not known", "none known"])
def test_triton_mean_is_that_of_the_terms(case: str) -> None:
    x, proxies, labels = CASES[case]()
    found = []
    for by_terms in (True, False):
        sides = [side.clone().requires_grad_() for side in (x, proxies)]
        if by_terms:
            terms = cluster_terms(*sides, labels, 0.05)
            value = terms[0] / terms[1].detach().clamp(min=1)
        else:
            value = cluster_loss(*sides, labels, 0.05)
        assert value.shape == ()
        found.append([value.detach(), *torch.autograd.grad(3 * value, sides)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-9)


@on_triton
def test_triton_clusters_show_what_cannot_be() -> None:
    """A class that has no vector, a vector without direction: NaN where looking would stall."""
    x, proxies, labels = drawn(9, 6, 5)
    assert cluster_terms(x, proxies, labels, 0.05).isfinite().all()
    for wrong in (6, -2, 2**40):
        assert cluster_terms(x, proxies, labels.index_fill(0, labels.new_tensor([4]), wrong), 0.05)[0].isnan()
    for fault in (0.0, float("nan"), float("inf")):
        assert cluster_terms(x.index_fill(0, labels.new_tensor([4]), fault), proxies, labels, 0.05)[0].isnan()
        assert cluster_terms(x, proxies.index_fill(0, labels.new_tensor([5]), fault), labels, 0.05)[0].isnan()


@on_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_triton_clusters_take_half_precision(dtype: torch.dtype) -> None:
    x, proxies, labels = drawn(9, 6, 5)
    half, full = x.to(dtype).requires_grad_(), x.to(dtype).float().requires_grad_()
    for leaf in (half, full):
        cluster_terms(leaf, proxies, labels.int(), 0.05)[0].backward()  # type: ignore[no-untyped-call]
    assert half.grad is not None
    assert full.grad is not None
    assert half.grad.dtype == dtype
    assert torch.equal(half.grad, full.grad.to(dtype))


@on_triton
def test_triton_clusters_have_a_gradient_where_it_is_asked_for() -> None:
    x, proxies, labels = drawn(9, 6, 5)
    both = [side.clone().requires_grad_() for side in (x, proxies)]
    expected = torch.autograd.grad(cluster_terms(*both, labels, 0.05)[0], both)
    for n, side in enumerate(both):
        sides = [x, proxies]
        sides[n] = side
        (found,) = torch.autograd.grad(cluster_terms(*sides, labels, 0.05)[0], side)
        assert torch.equal(found, expected[n])
    with torch.no_grad():
        assert not cluster_terms(*both, labels, 0.05).requires_grad
    strided = torch.cat([x, x], 1)[:, : x.shape[1]].requires_grad_()
    (found,) = torch.autograd.grad(cluster_terms(strided, proxies, labels, 0.05)[0], strided)
    assert torch.equal(found, expected[0])


@on_triton
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_triton_clusters_are_compiled_and_transformed() -> None:
    x, proxies, labels = drawn(5, 6, 5)
    leaf = x.clone().requires_grad_()

    def loss(some: Tensor) -> Tensor:
        return cluster_terms(some, proxies, labels, 0.05)[0]

    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.compiler.reset()
    called = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(called(leaf), leaf)[0], expected)
    found = torch.vmap(torch.func.grad(loss))(torch.stack([x, x + 1]))
    torch.testing.assert_close(found[0], expected)
    (grad,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
    torch.library.opcheck(
        torch.ops.roadmap.cluster_terms.default,
        (leaf, proxies, labels, 0.05, False, True, False),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@on_triton
def test_triton_losses_take_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """HAPPIER, SupRank and a loss with proxies beside it do not pass through the scores in torch."""
    x, _, labels = drawn(9, 6, 5)
    monkeypatch.setattr("roadmap.losses.clusters.cosine_scores", lambda *_: pytest.fail("not by the kernels"))
    for loss in (HAPPIER(6, 5), SupRank(6, 5), ClusteredLoss(SupAP(), 6, 5)):
        assert loss.to(DEVICE)(x, labels).isfinite()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 1025, 512), (3000, 5000, 384)], ids=str)
def test_gpu_clusters_are_as_accurate_as_plain_float32(shape: tuple[int, int, int], blocks: None) -> None:
    x, proxies, labels = drawn(*shape)
    truth = value_and_gradients((x, proxies, labels), 0.05, torch.float64)
    sides = [side.clone().requires_grad_() for side in (x, proxies)]
    unit = [side / side.norm(dim=1, keepdim=True) for side in sides]
    plain = plain_terms(unit[0] @ unit[1].T, labels, 0.05)
    gradients = torch.autograd.grad(3 * plain.sums.sum(), sides)
    simple = [plain.sums.detach().double(), plain.counts.double(), *(g.double() for g in gradients)]
    for _ in range(3):  # measured, recorded, played
        found = value_and_gradients((x, proxies, labels), 0.05, torch.float32)
        for mine, theirs, expected in zip(found, simple, truth, strict=True):
            allowed = 2 * (theirs - expected).abs().max() + 3e-7 * expected.abs().max()
            assert (mine - expected).abs().max() <= allowed


@pytest.mark.skipif(CUDA, reason="compiled there by the test above")
def test_clusters_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "_INTERPRETING", True)
    x, proxies, labels = drawn(300, 200, 512)
    with compiled_not_launched(monkeypatch) as compiled:
        cluster_terms(x.requires_grad_(), proxies.requires_grad_(), labels, 0.05)[0].backward()  # type: ignore[no-untyped-call]
    assert {"_cluster_rows", "_cluster_gradients", "_product", "_embedding_rows"} <= {k.name for k in compiled}


@starts_the_interpreter
def test_clusters_under_the_interpreter() -> None:
    check_under_the_interpreter(__file__, "triton")
