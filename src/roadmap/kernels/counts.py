"""How many gallery items score at least as high as each threshold: the count behind every ranking metric.

Plain PyTorch for the two functions below, for unit vectors q (n, D) and g (N, D):

    pair_scores(q, g, columns)         = (q @ g.T).gather(1, columns)                       (n, P)
    counts_at_least(q, g, thresholds)  = ((q @ g.T)[:, None, :] >= thresholds[:, :, None]).sum(-1)   (n, P)

without the (n, N) matrix, and with one promise that `q @ g.T` does not make: the score of two vectors depends on
their bits alone, never on where they stand. BLAS rounds the last rows and columns of a matrix differently from the
others, so that two copies of one picture get unequal scores and a ranking depends on the order of its input. Here
every product has the same shape (zero rows fill it up), whose sides are multiples of every register block in use,
and each machine is asked once whether that suffices (`position_free`); where it does not, a slower product with a
fixed order of sums is used. On a GPU the Triton kernel has the property by construction.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

Implementation = Literal["triton", "blocked"]
Product = Callable[[Tensor, Tensor, Tensor], object]  # of (height, D) and (width, D), into (height, width)

# Rows and columns of one product: multiples of 192 = 2^6 * 3, and so of the register blocks (6, 8, 12, 16, 24, 48, ...)
# of the BLAS kernels met.
CPU_TILE = (384, 1536)
GPU_TILE = (1536, 1536)
# From this many thresholds a row on, placing each score among the sorted thresholds beats comparing it with all.
SORTED_FROM = 48
# The Triton kernel compares with every threshold, whose cost grows with their number.
TRITON_THRESHOLDS = 1024
# Bytes of comparisons held at once: they should stay in the cache.
HITS_BYTES = 12 << 20


def implementation(vectors: Tensor, thresholds: int) -> Implementation:
    """What counts `thresholds` a query on the device and type of `vectors`; scores of one never meet the other's."""
    fused = vectors.is_cuda and vectors.dtype == torch.float32 and thresholds <= TRITON_THRESHOLDS
    return "triton" if fused and find_spec("triton") is not None else "blocked"


def working_bytes(vectors: Tensor) -> int:
    """What counting takes beside its arguments and results: a few tiles and the vectors that make them."""
    height, width = _tile(vectors)
    tiles = 4 * height * width + 3 * (height + width) * vectors.shape[1]
    return tiles * vectors.element_size() + 2 * HITS_BYTES


def pair_scores(queries: Tensor, gallery: Tensor, columns: Tensor, impl: Implementation = "blocked") -> Tensor:
    """Scores of each query with the gallery items it names.

    Args:
        queries: (n, D) unit vectors, float32 or float64.
        gallery: (N, D) unit vectors of the same type.
        columns: (n, P) int64 gallery indices; an index below zero asks for nothing and gets -inf.
        impl: who multiplies; compare scores only within one implementation.
    """
    if impl == "triton":
        from roadmap.kernels.triton_counts import pair_scores as triton_pair_scores

        return triton_pair_scores(queries, gallery, columns)
    out = torch.full(columns.shape, -torch.inf, dtype=queries.dtype, device=queries.device)
    product = _product(queries)
    height, width = _tile(queries)
    with _full_precision():
        for top in range(0, len(queries), height):
            block, wanted = _filled(queries[top : top + height], height), columns[top : top + height]
            asked = wanted >= 0
            items, place = torch.unique(wanted[asked], return_inverse=True)
            rows = asked.nonzero()[:, 0]
            found = queries.new_empty(len(rows))
            tile = queries.new_empty(height, width)
            for left in range(0, len(items), width):
                product(block, _filled(gallery[items[left : left + width]], width), tile)
                here = (place >= left) & (place < left + width)
                found[here] = tile[rows[here], place[here] - left]
            out[top : top + height][asked] = found
    return out


def counts_at_least(
    queries: Tensor,
    gallery: Tensor,
    thresholds: Tensor,
    impl: Implementation = "blocked",
    advance: Callable[[int], object] = lambda queries_done: None,
) -> Tensor:
    """How many items of the whole gallery score >= each threshold, (n, P) int32.

    Args:
        queries: (n, D) unit vectors, float32 or float64.
        gallery: (N, D) unit vectors of the same type.
        thresholds: (n, P) scores, from `pair_scores` with the same `impl`; +inf counts nothing and pads short rows.
        impl: who multiplies and counts.
        advance: told the number of queries finished since it was last told.
    """
    if impl == "triton":
        from roadmap.kernels.triton_counts import counts_at_least as triton_counts_at_least

        counts = triton_counts_at_least(queries, gallery, thresholds)
        advance(len(queries))
        return counts
    out = torch.zeros(thresholds.shape, dtype=torch.int32, device=queries.device)
    height, width = _tile(queries)
    count = _counted_by_sorting if thresholds.shape[1] >= SORTED_FROM else _counted_by_comparing
    product = _product(queries)
    with _full_precision():
        for top in range(0, len(queries), height):
            rows = min(height, len(queries) - top)
            block = _filled(queries[top : top + height], height)
            tiles = (tile[:rows] for tile in _tiles(block, gallery, width, product))
            out[top : top + rows] = count(tiles, thresholds[top : top + rows])
            advance(rows)
    return out


def _tiles(block: Tensor, gallery: Tensor, width: int, product: Product) -> Iterator[Tensor]:
    """Scores of a block of queries with the gallery, `width` columns at a time, in one buffer that is used again."""
    tile = block.new_empty(len(block), width)
    for left in range(0, len(gallery), width):
        product(block, _filled(gallery[left : left + width], width), tile)
        tile[:, len(gallery) - left :] = -torch.inf  # what fills the last tile outscores nothing
        yield tile


def _counted_by_comparing(tiles: Iterator[Tensor], thresholds: Tensor) -> Tensor:
    """Counts for few thresholds: compare with each, and add up.

    Comparisons are written as 0.0 and 1.0 and added by a matrix-vector product: several times faster in PyTorch than
    writing and adding booleans, and exact, since a tile has far fewer than 2^24 columns.
    """
    rows, limit = thresholds.shape
    total = torch.zeros(rows, limit, dtype=torch.int32, device=thresholds.device)
    hits = thresholds.new_empty(0)
    for tile in tiles:
        width = tile.shape[1]
        ones = tile.new_ones(width)
        step = max(1, HITS_BYTES // (tile.numel() * tile.element_size()))
        for p in range(0, limit, step):
            few = thresholds[:, p : p + step]
            hits.resize_(rows, few.shape[1], width)
            torch.ge(tile[:, None, :], few[:, :, None], out=hits)
            total[:, p : p + step] += torch.mv(hits.view(-1, width), ones).view(few.shape).to(torch.int32)
    return total


def _counted_by_sorting(tiles: Iterator[Tensor], thresholds: Tensor) -> Tensor:
    """Counts for many thresholds: a histogram over the gaps between them, then its sums from above."""
    rows, limit = thresholds.shape
    ascending, order = thresholds.sort(dim=1)
    row_start = torch.arange(rows, device=thresholds.device)[:, None] * (limit + 1)
    gaps = torch.zeros(rows * (limit + 1), dtype=torch.int64, device=thresholds.device)
    for tile in tiles:
        # the number of thresholds <= score: the item counts for all of them
        gap = torch.searchsorted(ascending, tile.contiguous(), right=True).add_(row_start)
        gaps += torch.bincount(gap.flatten(), minlength=len(gaps))
    above = gaps.view(rows, limit + 1).flip(1).cumsum(1).flip(1)[:, 1:]
    return torch.empty_like(above).scatter_(1, order, above).to(torch.int32)


def _tile(vectors: Tensor) -> tuple[int, int]:
    return CPU_TILE if vectors.device.type == "cpu" else GPU_TILE


def _filled(rows: Tensor, height: int) -> Tensor:
    """`rows` with zero rows below, up to `height`."""
    if len(rows) == height:
        return rows.contiguous()
    full = rows.new_zeros(height, rows.shape[1])
    full[: len(rows)] = rows
    return full


def _product(vectors: Tensor) -> Product:
    """The tile product for vectors like these: BLAS where it is position-free, else sums in a fixed order."""
    if position_free(vectors.device, vectors.dtype, vectors.shape[1], torch.get_num_threads()):
        return _blas
    warnings.warn(
        f"matrix products of {vectors.dtype} on {vectors.device} round a score by its place in the matrix; "
        "counting with a slower product, so that equal vectors keep equal scores",
        stacklevel=3,
    )
    return _fixed_order


def _blas(queries: Tensor, gallery: Tensor, out: Tensor) -> None:
    torch.mm(queries, gallery.T, out=out)


def _fixed_order(queries: Tensor, gallery: Tensor, out: Tensor) -> None:
    """queries @ gallery.T, one component after the other; multiplied and added apart, so that no element is fused."""
    out.zero_()
    for d in range(queries.shape[1]):
        out += queries[:, d, None] * gallery[None, :, d]


@functools.lru_cache(maxsize=64)
def position_free(device: torch.device, dtype: torch.dtype, dim: int, threads: int) -> bool:
    """Whether the product of full tiles gives a pair of vectors the same bits wherever they stand.

    Tried on one tile, forwards and shuffled. `threads` is part of the question because BLAS splits by it.
    """
    height, width = _tile(torch.empty(0, device=device))
    generator = torch.Generator().manual_seed(dim)
    queries, gallery = (torch.randn(rows, dim, generator=generator, dtype=dtype).to(device) for rows in (height, width))
    rows, columns = (torch.randperm(size, generator=generator).to(device) for size in (height, width))
    straight, shuffled = queries.new_empty(2, height, width)
    with _full_precision():
        _blas(queries, gallery, straight)
        _blas(queries[rows], gallery[columns], shuffled)
    return torch.equal(straight[rows][:, columns], shuffled)


@contextmanager
def _full_precision() -> Iterator[None]:
    """float32 products in float32: a user's TF32 or bfloat16 setting is for training, not for ranks."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
