"""The two functions of `roadmap.kernels.counts` in tiles of plain PyTorch, on any device.

Every product has the same shape (zero rows fill it up), whose sides are multiples of every register block in use, and
each machine is asked once whether a score is then free of its place (`position_free`); where it is not, a slower
product with a fixed order of sums is used. Where the queries are gallery items, and the product of two blocks is the
other way round the same to the bit (`symmetric`), a tile serves both: nearly half of the products are spared.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from roadmap.kernels.precision import full_float32

Product = Callable[[Tensor, Tensor, Tensor], object]  # of (height, D) and (width, D), into (height, width)
Advance = Callable[[int], object]

# Rows and columns of one product: multiples of 192 = 2^6 * 3, and so of the register blocks (6, 8, 12, 16, 24, 48, ...)
# of the BLAS kernels met. The width is a multiple of the height.
CPU_TILE = (384, 1536)
GPU_TILE = (1536, 1536)
# From this many thresholds a row on, placing each score among the sorted thresholds beats comparing it with all.
SORTED_FROM = 48
# Bytes of comparisons held at once: they should stay in the cache.
HITS_BYTES = 12 << 20


def working_bytes(vectors: Tensor) -> int:
    """What counting takes beside its arguments and results: a few tiles and the vectors that make them."""
    height, width = _tile(vectors.device)
    tiles = 4 * height * width + 3 * (height + width) * vectors.shape[1]
    return tiles * vectors.element_size() + 2 * HITS_BYTES


def pair_scores(queries: Tensor, gallery: Tensor, columns: Tensor) -> Tensor:
    """See `roadmap.kernels.counts.pair_scores`."""
    out = torch.full(columns.shape, -torch.inf, dtype=queries.dtype, device=queries.device)
    product = _product(queries)
    height, width = _tile(queries.device)
    tile = queries.new_empty(height, width)
    with full_float32():
        for top in range(0, len(queries), height):
            block, wanted = _full_tile(queries[top : top + height], height), columns[top : top + height]
            asked = wanted >= 0
            items, place = torch.unique(wanted[asked], return_inverse=True)
            rows = asked.nonzero()[:, 0]
            found = queries.new_empty(len(rows))
            for left in range(0, len(items), width):
                product(block, _full_tile(gallery[items[left : left + width]], width), tile)
                here = (place >= left) & (place < left + width)
                found[here] = tile[rows[here], place[here] - left]
            out[top : top + height][asked] = found
    return out


def counts_at_least(
    queries: Tensor, gallery: Tensor, thresholds: Tensor, own: Tensor | None, advance: Advance
) -> Tensor:
    """See `roadmap.kernels.counts.counts_at_least`."""
    place = (queries.device, queries.dtype, queries.shape[1], torch.get_num_threads())
    few = thresholds.shape[1] < SORTED_FROM
    with full_float32():
        if own is None or not few or not (position_free(*place) and symmetric(*place)):
            items = torch.arange(len(gallery), device=gallery.device)
            return _counts_among(queries, gallery, items, thresholds, advance)
        others = torch.ones(len(gallery), dtype=torch.bool, device=gallery.device)
        others[own] = False
        counts = _counts_among(queries, gallery, others.nonzero()[:, 0], thresholds, lambda done: None)
        return counts + _counts_among_themselves(queries, thresholds, advance)


def _counts_among(queries: Tensor, gallery: Tensor, items: Tensor, thresholds: Tensor, advance: Advance) -> Tensor:
    """Counts over the given gallery items."""
    out = torch.zeros(thresholds.shape, dtype=torch.int32, device=queries.device)
    height, width = _tile(queries.device)
    count = _counts_by_sorting if thresholds.shape[1] >= SORTED_FROM else _counts_by_comparing
    product = _product(queries)
    whole = len(items) == len(gallery)  # then tiles are slices, and nothing is gathered
    tile = queries.new_empty(height, width)

    def tiles(block: Tensor) -> Iterator[Tensor]:
        for left in range(0, len(items), width):
            here = slice(left, left + width)
            product(block, _full_tile(gallery[here] if whole else gallery[items[here]], width), tile)
            tile[:, len(items) - left :] = -torch.inf  # what fills the last tile outscores nothing
            yield tile

    for top in range(0, len(queries), height):
        rows = min(height, len(queries) - top)
        some = (tile[:rows] for tile in tiles(_full_tile(queries[top : top + height], height)))
        out[top : top + rows] = count(some, thresholds[top : top + rows])
        advance(rows)
    return out


def _counts_among_themselves(queries: Tensor, thresholds: Tensor, advance: Advance) -> Tensor:
    """Counts over the queries themselves: a tile right of the diagonal counts for its rows and for its columns."""
    height, width = _tile(queries.device)
    product, tile, room = _product(queries), queries.new_empty(height, width), _room(queries)
    number, limit = thresholds.shape
    # filled up to whole tiles with thresholds that nothing reaches
    bars = thresholds.new_full((-(-number // width) * width, limit), torch.inf)
    bars[:number] = thresholds
    total = torch.zeros(bars.shape, dtype=torch.int32, device=bars.device)
    for top in range(0, number, height):
        block = _full_tile(queries[top : top + height], height)
        for left in range(top // width * width, number, width):
            product(block, _full_tile(queries[left : left + width], width), tile)
            tile[:, number - left :] = -torch.inf
            total[top : top + height] += _hits(tile, bars[top : top + height], room)
            # Not in the diagonal block of `width`, whose rows meet all its columns themselves. Rows here are full: what
            # fills the last block of rows has no tile further right.
            if left > top:
                total[left : left + width] += _hits_of_columns(tile, bars[left : left + width], room)
        advance(min(height, number - top))
    return total[:number]


def _counts_by_comparing(tiles: Iterator[Tensor], thresholds: Tensor) -> Tensor:
    """Counts for few thresholds: compare with each."""
    total = torch.zeros(thresholds.shape, dtype=torch.int32, device=thresholds.device)
    room = _room(thresholds)
    for tile in tiles:
        total += _hits(tile, thresholds, room)
    return total


def _hits(tile: Tensor, thresholds: Tensor, room: Tensor) -> Tensor:
    """How many scores of each row (h, w) reach its thresholds (h, P).

    Comparisons are written as 0.0 and 1.0 and added by a product with ones: several times faster in PyTorch than
    writing and adding booleans, and exact, since a tile has far fewer than 2^24 columns.
    """
    ones = tile.new_ones(tile.shape[1])
    parts = []
    for p in range(0, thresholds.shape[1], step := len(room) // tile.numel()):
        few = thresholds[:, p : p + step]
        hits = room[: few.shape[1] * tile.numel()].view(*few.shape, tile.shape[1])
        torch.ge(tile[:, None, :], few[:, :, None], out=hits)
        parts.append(torch.mv(hits.view(-1, tile.shape[1]), ones).view(few.shape))
    return torch.cat(parts, dim=1).to(torch.int32)


def _hits_of_columns(tile: Tensor, thresholds: Tensor, room: Tensor) -> Tensor:
    """How many scores of each column (h, w) reach its thresholds (w, P)."""
    ones = tile.new_ones(1, tile.shape[0])
    parts = []
    for p in range(0, thresholds.shape[1], step := len(room) // tile.numel()):
        few = thresholds[:, p : p + step].T.contiguous()
        hits = room[: len(few) * tile.numel()].view(len(few), *tile.shape)
        torch.ge(tile[None], few[:, None, :], out=hits)
        parts.append(torch.matmul(ones, hits)[:, 0])
    return torch.cat(parts).T.to(torch.int32)


def _room(vectors: Tensor) -> Tensor:
    """Room for comparisons, of one tile at least; made once, because touching new memory costs more than using it."""
    height, width = _tile(vectors.device)
    return vectors.new_empty(max(height * width, HITS_BYTES // vectors.element_size()))


def _counts_by_sorting(tiles: Iterator[Tensor], thresholds: Tensor) -> Tensor:
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


def _tile(device: torch.device) -> tuple[int, int]:
    return CPU_TILE if device.type == "cpu" else GPU_TILE


def _full_tile(rows: Tensor, height: int) -> Tensor:
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
    height, width = _tile(device)
    generator = torch.Generator().manual_seed(dim)
    queries, gallery = (torch.randn(rows, dim, generator=generator, dtype=dtype).to(device) for rows in (height, width))
    rows, columns = (torch.randperm(size, generator=generator).to(device) for size in (height, width))
    straight, shuffled = queries.new_empty(2, height, width)
    with full_float32():
        _blas(queries, gallery, straight)
        _blas(queries[rows], gallery[columns], shuffled)
    return torch.equal(straight[rows][:, columns], shuffled)


@functools.lru_cache(maxsize=64)
def symmetric(device: torch.device, dtype: torch.dtype, dim: int, threads: int) -> bool:
    """Whether the product of full tiles gives a pair of vectors the same bits when they change sides."""
    height, width = _tile(device)
    generator = torch.Generator().manual_seed(dim)
    queries, gallery = (torch.randn(rows, dim, generator=generator, dtype=dtype).to(device) for rows in (height, width))
    straight, turned = queries.new_empty(2, height, width)
    with full_float32():
        _blas(queries, gallery, straight)
        _blas(gallery[:height].contiguous(), _full_tile(queries, width), turned)
    return torch.equal(straight[:, :height], turned[:, :height].T)
