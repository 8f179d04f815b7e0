"""Scores by plain torch: copies tie, lengths do not matter, and nothing hangs on the default type."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from roadmap.kernels import chunks, cosine_scores
from roadmap.kernels import scores as scores_module
from roadmap.kernels.directions import directions, has_direction
from roadmap.kernels.scores import units_of
from roadmap.losses import ROADMAP, SmoothAP, SupAP, average_precision
from roadmap.losses.comparison import Comparison

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def copies(items: int, dims: int, dtype: torch.dtype) -> Tensor:
    """Vectors with a copy of each, in no order, and a third of the first."""
    generator = torch.Generator().manual_seed(items * dims)
    x = torch.randn(items, dims, generator=generator, dtype=dtype)
    return torch.cat([x, x, x[:1]])[torch.randperm(2 * items + 1, generator=generator)]


@DTYPES
@pytest.mark.parametrize(("items", "dims"), [(5, 3), (37, 130), (100, 512), (301, 65)])
def test_copies_of_a_vector_get_equal_scores(items: int, dims: int, dtype: torch.dtype) -> None:
    x = copies(items, dims, dtype)
    scores = cosine_scores(x, None)
    same = (x[:, None] == x[None]).all(2)
    first = same.int().argmax(1)  # of each vector, where it first stands
    assert int((first != torch.arange(len(x))).sum()) == items + 1
    assert torch.equal(scores, scores[:, first])
    unit = torch.nn.functional.normalize(x.double(), dim=1)
    torch.testing.assert_close(scores.double(), unit @ unit.T, rtol=0, atol=1e-6)


@DTYPES
def test_vectors_may_lie_in_memory_in_any_order(dtype: torch.dtype) -> None:
    """Transposed, as a part of wider rows, or one vector seen several times."""
    x, labels = copies(9, 5, dtype), torch.arange(19) % 4
    expected = [gradient_of(x, labels), cosine_scores(x, x)]
    wide = torch.zeros(len(x), 11, dtype=dtype)
    wide[:, 2:7] = x
    for other in (x.T.contiguous().T, wide[:, 2:7]):
        assert not other.is_contiguous()
        torch.testing.assert_close([gradient_of(other, labels), cosine_scores(other, other)], expected)
    assert torch.equal(cosine_scores(x[:1].expand(3, -1), None), cosine_scores(x[:1].repeat(3, 1), None))


def gradient_of(x: Tensor, labels: Tensor) -> Tensor:
    """The gradient of a loss that looks for copies."""
    leaf = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(SupAP()(leaf, labels), leaf)
    return found


def test_zeros_of_both_signs_are_equal() -> None:
    q, g = units_of(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 3.0], [1.0, 1.0], [-0.0, 3.0]]))
    assert g.copies.tolist() == [2]
    assert g.originals.tolist() == [0]
    assert not len(q.copies)


def test_vectors_that_share_a_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores_module, "_hashes", lambda vectors: torch.zeros(len(vectors), dtype=torch.int32))
    found = units_of(torch.ones(1, 2), torch.tensor([[1.0, 0], [0, 1], [3, 0], [1, 1], [0, 2]]))[1]
    assert dict(zip(found.copies.tolist(), found.originals.tolist(), strict=True)) == {2: 0, 4: 1}


@pytest.mark.parametrize("seed", range(8))
def test_supap_bounds_the_ap_loss_among_copies(seed: int) -> None:
    """Pictures that occur twice under different labels tie; a bound that rounds them apart would be none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(50, 96, generator=generator)
    x, labels = torch.cat([x, x, x]), torch.randint(0, 4, (150,), generator=generator)
    c = Comparison.of(x, labels)
    for include_self in (True, False):
        exact = 1 - average_precision(c.scores, c.positives(include_self=include_self), c.negatives)
        assert SupAP(include_self=include_self)(x, labels) >= exact - 1e-6


def test_a_copy_keeps_its_own_gradient() -> None:
    """The score is taken from the first of them; what it asks of each vector is not."""
    x = copies(6, 5, torch.float64)
    weights = torch.randn(13, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    (cosine_scores(found, None) * weights).sum().backward()
    unit = torch.nn.functional.normalize(plain, dim=1)
    ((unit @ unit.T) * weights).sum().backward()
    torch.testing.assert_close(found.grad, plain.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-19, 1e19, 1e30, 1e35])
@pytest.mark.parametrize("loss", [ROADMAP(), SmoothAP()], ids=["ROADMAP", "SmoothAP"])
def test_short_and_long_vectors_have_the_same_loss(loss: torch.nn.Module, scale: float) -> None:
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(0)) + 0.5
    labels = torch.arange(12) // 3
    factor = 2.0 ** round(torch.tensor(scale).log2().item())  # a power of two: not a bit may change
    moved = (x * factor).requires_grad_()
    value = loss(moved, labels)
    value.backward()
    near = x.clone().requires_grad_()
    expected = loss(near, labels)
    expected.backward()
    assert value.item() == expected.item()
    assert moved.grad is not None
    assert near.grad is not None
    torch.testing.assert_close(moved.grad.double() * factor, near.grad.double(), rtol=1e-5, atol=1e-9)


def test_which_vectors_have_a_direction() -> None:
    x = torch.tensor([[3.0, 4.0], [0, 0], [float("nan"), 1], [float("inf"), 1], [1e-22, 0], [1e-41, 0], [3e38, 3e38]])
    units, lengths = directions(x)
    assert has_direction(lengths).tolist() == [True, False, False, False, True, False, False]
    assert lengths[[0, 4]].tolist() == pytest.approx([5.0, 1e-22])
    torch.testing.assert_close(units[[0, 4]], torch.tensor([[0.6, 0.8], [1.0, 0.0]]))


@DTYPES
def test_another_default_type_changes_nothing(dtype: torch.dtype) -> None:
    x, labels = torch.randn(9, 5, generator=torch.Generator().manual_seed(3)).to(dtype), torch.arange(9) // 3
    for loss in (SupAP(), SmoothAP(), ROADMAP(), ROADMAP(average="all")):
        results = []
        for default in (torch.float32, torch.float64, torch.float16):
            torch.set_default_dtype(default)
            try:
                leaf = x.clone().requires_grad_()
                value = loss(leaf, labels)
                value.backward()
            finally:
                torch.set_default_dtype(torch.float32)
            assert value.dtype == dtype
            results.append((value.item(), leaf.grad))
        assert results[0][0] == results[1][0] == results[2][0]
        assert torch.equal(results[0][1], results[1][1])
        assert torch.equal(results[0][1], results[2][1])


@DTYPES
@pytest.mark.parametrize("with_gallery", [False, True], ids=["batch", "gallery"])
def test_queries_in_chunks_give_what_all_at_once_give(
    with_gallery: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(4)
    x, g = (torch.randn(n, 6, generator=generator, dtype=dtype) + 0.4 for n in (23, 31))
    labels, item_labels = (torch.randint(0, 5, (n,), generator=generator) for n in (23, 31))
    results = []
    for most, rows in ((1 << 21, 16), (40, 1), (5 * 31, 4)):
        monkeypatch.setattr(chunks, "CHUNK_SCORES", most)
        monkeypatch.setattr(chunks, "FEWEST_ROWS", rows)
        q, other = x.clone().requires_grad_(), g.clone().requires_grad_()
        others = {"ref_emb": other, "ref_labels": item_labels} if with_gallery else {}
        value = ROADMAP(include_self=False)(q, labels, **others)
        value.backward()
        results.append((value.detach(), q.grad, other.grad))
    near = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], **near)


MEASURED = """
import resource, torch
from roadmap.losses import ROADMAP
x, labels = torch.randn(4096, 32, requires_grad=True), torch.arange(4096) // 4
ROADMAP()(x[:64], labels[:64]).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ROADMAP()(x, labels).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is counted in other units")
def test_the_scores_of_a_large_batch_are_never_held_at_once() -> None:
    """One (4096, 4096) float32 matrix alone is 64 MiB; all of them at once took 560 MiB."""
    run = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True, env=os.environ)
    assert int(run.stdout) < 200
