"""Counting kernels against the one line of PyTorch that defines them, and their promise about copies."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import roadmap.kernels.counts as counts
import roadmap.kernels.tiled_counts as tiled_counts
from roadmap.kernels.counts import counts_at_least, pair_scores
from roadmap.kernels.tiled_counts import position_free, symmetric

CPU = torch.device("cpu")


def problem(
    queries: int, items: int, dim: int, limit: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Unit vectors with copies among them, and columns with empty places among them."""
    generator = torch.Generator().manual_seed(queries * 1000 + items)
    gallery = torch.randn(items, dim, generator=generator, dtype=dtype)
    gallery[items // 2 :] = gallery[: items - items // 2].clone()  # every vector twice
    q = torch.randn(queries, dim, generator=generator, dtype=dtype)
    columns = torch.randint(-1, items, (queries, limit), generator=generator)
    return *(torch.nn.functional.normalize(v, dim=1).to(device) for v in (q, gallery)), columns.to(device)


def check_against_definition(q: Tensor, gallery: Tensor, columns: Tensor, impl: counts.Implementation) -> None:
    scores = pair_scores(q, gallery, columns, impl)
    truth = (q.double() @ gallery.double().T).gather(1, columns.clamp(min=0))
    torch.testing.assert_close(scores.double(), torch.where(columns < 0, -torch.inf, truth), atol=5e-7, rtol=0)
    everything = torch.arange(len(gallery), device=q.device).expand(len(q), -1)
    full = pair_scores(q, gallery, everything, impl)  # (n, N), with the bits that are compared
    thresholds = torch.where(columns < 0, torch.inf, scores)
    found = counts_at_least(q, gallery, thresholds, impl)
    assert found.dtype == torch.int32
    assert torch.equal(found.long(), (full[:, None, :] >= thresholds[:, :, None]).sum(-1))
    assert (counts_at_least(q, gallery, torch.full_like(thresholds, -2.0), impl) == len(gallery)).all()
    half = len(gallery) // 2
    assert torch.equal(full[:, half : 2 * half], full[:, :half]), "copies of a vector must tie exactly"
    higher = counts_at_least(q, gallery, torch.nextafter(thresholds, thresholds.new_tensor(torch.inf)), impl)
    assert torch.equal(higher.long(), (full[:, None, :] > thresholds[:, :, None]).sum(-1))


SHAPES = [(1, 2, 3, 1), (5, 7, 8, 2), (385, 1537, 13, 3), (200, 3100, 33, 60)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiled_counts_equal_their_definition(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_against_definition(*problem(*shape, dtype=dtype), impl="tiled")


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["tiled", "triton"])
@pytest.mark.parametrize("shape", [*SHAPES, (300, 5000, 512, 57), (129, 129, 100, 5)])
def test_gpu_counts_equal_their_definition(shape: tuple[int, int, int, int], impl: counts.Implementation) -> None:
    check_against_definition(*problem(*shape, device=torch.device("cuda")), impl=impl)


@pytest.mark.gpu
def test_gpu_counts_are_the_same_on_every_run() -> None:
    q, gallery, columns = problem(300, 5000, 512, 57, device=torch.device("cuda"))
    runs = [counts_at_least(q, gallery, pair_scores(q, gallery, columns.abs(), "triton"), "triton") for _ in range(3)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_the_slow_product_counts_the_same_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    q, gallery, columns = problem(5, 40, 9, 4)
    monkeypatch.setattr(tiled_counts, "position_free", lambda *place: False)
    with pytest.warns(UserWarning, match="round a score by its place"):
        scores = pair_scores(q, gallery, columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_against_definition(q, gallery, columns, "tiled")
    torch.testing.assert_close(scores[columns >= 0], (q @ gallery.T).gather(1, columns.clamp(min=0))[columns >= 0])


def test_products_of_odd_shape_are_not_position_free_here_or_anywhere_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    # the question must be able to get the answer no: a product that looks at the place of its rows
    def biased(queries: Tensor, gallery: Tensor, out: Tensor) -> None:
        torch.mm(queries, gallery.T, out=out)
        out[-1] *= 1 + 2e-7

    monkeypatch.setattr(tiled_counts, "_blas", biased)
    position_free.cache_clear()
    try:
        assert not position_free(CPU, torch.float32, 24, torch.get_num_threads())
    finally:
        position_free.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("items", "queries"), [(700, 700), (2000, 1990), (3500, 1), (1700, 900)])
def test_queries_among_the_gallery_count_the_same_with_half_the_products(
    items: int, queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, gallery, _ = problem(1, items, 12, 1, dtype=dtype)
    own = torch.randperm(items)[:queries]
    columns = torch.randint(-1, items, (queries, 3))
    scores = pair_scores(gallery[own], gallery, columns)
    thresholds = torch.where(columns < 0, torch.inf, scores)
    plain = counts_at_least(gallery[own], gallery, thresholds)
    products: list[int] = []
    original = tiled_counts._blas
    assert symmetric(CPU, dtype, 12, torch.get_num_threads())
    monkeypatch.setattr(tiled_counts, "_blas", lambda q, g, out: (products.append(1), original(q, g, out)))
    assert torch.equal(counts_at_least(gallery[own], gallery, thresholds, own=own), plain)
    assert products  # the product that was watched is the one used
    if (items, queries) == (2000, 1990):
        assert len(products) == 4 * 2 + 2 + 6  # 6 blocks of rows: 4 meet 2 tiles, 2 meet 1; and the 10 others once each


def test_a_product_that_is_not_symmetric_serves_one_way_only(monkeypatch: pytest.MonkeyPatch) -> None:
    _, gallery, _ = problem(1, 2000, 12, 1)
    own = torch.arange(2000)
    thresholds = pair_scores(gallery, gallery, own[:, None].roll(1, 0))
    plain = counts_at_least(gallery, gallery, thresholds)
    monkeypatch.setattr(tiled_counts, "symmetric", lambda *place: False)
    monkeypatch.setattr(tiled_counts, "_counts_among_themselves", lambda *parts: pytest.fail("used all the same"))
    assert torch.equal(counts_at_least(gallery, gallery, thresholds, own=own), plain)


def test_no_threshold_has_no_count() -> None:
    q, gallery, _ = problem(3, 5, 4, 1)
    assert counts_at_least(q, gallery, torch.empty(3, 0)).shape == (3, 0)


def test_advance_is_told_of_every_query() -> None:
    q, gallery, columns = problem(800, 50, 4, 2)
    told: list[int] = []
    counts_at_least(q, gallery, pair_scores(q, gallery, columns.abs()), advance=told.append)
    assert sum(told) == 800
    assert len(told) > 1


def test_triton_counts_under_the_interpreter() -> None:
    """The Triton kernels, emulated on this machine in a process of their own (the choice is made at import)."""
    pytest.importorskip("triton")
    from .interpreting import INTERPRETING  # not above: this file is also run as a program

    environment = os.environ | INTERPRETING
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "interpreted 4 problems" in done.stdout


def _interpreted() -> None:
    from roadmap.kernels.triton import counts as triton_counts
    from roadmap.metrics.ranking import positive_counts_of

    shapes = [(1, 2, 3, 1), (5, 33, 17, 6), (19, 50, 16, 3), (40, 21, 40, 9)]
    for programs in (triton_counts.PROGRAMS, 1):  # the gallery shared among programs, and not
        triton_counts.PROGRAMS = programs
        for shape in shapes:
            check_against_definition(*problem(*shape), "triton")
    # the whole path of a metric, with excluded items, gives the counts of the tiled path
    q, gallery, columns = problem(18, 40, 8, 5)
    columns = torch.stack([torch.randperm(40)[:7] for _ in range(18)])
    results = []
    for impl in ("triton", "tiled"):
        original, chosen = counts.implementation, impl
        import roadmap.metrics.ranking as ranking

        ranking.implementation = lambda vectors, thresholds, chosen=chosen: chosen  # type: ignore[assignment, misc]
        results.append(positive_counts_of(q, gallery, columns[:, :5], columns[:, 5:], "mean"))
        ranking.implementation = original
    for triton_count, tiled_count in zip(*results, strict=True):
        assert torch.equal(triton_count, tiled_count)
    print(f"interpreted {len(shapes)} problems")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
    _interpreted()
