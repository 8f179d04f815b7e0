"""Products that are taken in parts: the parts of every block, the last one too, fit into the room for them; and how
exact scores are whose parts are added as a tensor core adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roadmap.kernels.graded import GradedRule
from roadmap.kernels.rules import RankRule
from roadmap.kernels.trees import TreeCall, TreeRule

pytest.importorskip("triton")
from roadmap.kernels.triton import tiles_backward, trees
from roadmap.kernels.triton.launch import Arena
from roadmap.kernels.triton.math import TILE
from roadmap.kernels.triton.tiles_backward import add_product, product_splits
from roadmap.kernels.triton.tree_lists import Relevant
from roadmap.kernels.triton.units import room_for_units

NOWHERE = torch.device("meta")  # tensors that have a shape and no memory


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts each product has; it is checked that they fit and are all of it, and nothing is launched."""
    found: list[int] = []

    def checked(kernel: Any, grid: tuple[int, ...], *args: Any, **_: Any) -> None:
        if kernel is tiles_backward._product:
            partial, inner, each, size = args[5:9]
            if grid[2] > 1:
                assert grid[2] * size <= partial.numel(), f"{grid[2]} parts of {size} numbers in {partial.numel()}"
            assert grid[2] * each >= inner > (grid[2] - 1) * each
            found.append(grid[2])

    monkeypatch.setattr(tiles_backward, "launch", checked)
    monkeypatch.setattr(trees, "launch", checked)
    return found


@pytest.mark.parametrize("dims", [64, 128, 384, 512])
@pytest.mark.parametrize("whole", [8, 13, 20, 45])
def test_smaller_blocks_fit_where_whole_ones_do(whole: int, dims: int, parts: list[int]) -> None:
    """Of fewer rows, and of fewer columns where the block is turned over."""
    arena, width = Arena(NOWHERE), 128 * TILE
    units, factors = room_for_units(arena, width, dims), arena.empty(8)
    halves = (arena.empty(whole * TILE, width, dtype=torch.float16),) * 2
    for turned, sides in ((False, (whole * TILE, width)), (True, (width, whole * TILE))):
        wanted = product_splits(*sides, units.dimensions)[0]
        room, out = (arena.empty(count, units.dimensions) for count in (wanted * sides[0], width))
        for tiles in range(whole, 0, -1):
            rows, inner = (width, tiles * TILE) if turned else (tiles * TILE, width)
            add_product(halves, turned, rows, inner, units, 0, out, 0, factors, room)
        assert parts[0] == wanted  # whole blocks are not held back
        parts.clear()


@pytest.mark.parametrize("rows", [16384, 16384 + 3 * 128, 16384 + 5 * 128 - 7, 20000])
def test_blocks_of_a_graded_loss_fit(rows: int, parts: list[int]) -> None:
    """Its room is counted by the products in parts alone; three rows of tiles left over once took one tile too many."""
    vectors, labels = torch.empty(rows, 512, device=NOWHERE), torch.empty(rows, 2, dtype=torch.int64, device=NOWHERE)
    rule = TreeRule(GradedRule("h_ap", RankRule("supap", 0.01, 100.0, 0.05)), "shared", (1.0, 2.0), True)
    call = TreeCall(vectors, None, labels, labels, None, rule, rows)
    arena, lists = Arena(NOWHERE), (torch.empty(rows, dtype=torch.int32, device=NOWHERE),) * 3
    relevant = Relevant(*lists, 4096, 16)
    state = trees._state(arena, call, relevant)
    products = trees._products(arena, call, state, True, False)
    height = len(state.scores)
    for first in range(0, rows, height):
        trees._add_block(call, relevant, state, state.scores[: min(height, rows - first)], first, products)
    assert len(parts) == 2 * -(-rows // height)
    assert max(parts) > 1


def test_short_accumulators_are_more_exact_where_dimensions_are_few() -> None:
    """A tensor core cuts off what does not fit into the accumulator, always to the same side. Of 64 dimensions that is
    an error of 9e-8 where scores are near 1, of 16 at a time half of it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 64, generator=generator) + 0.3 * torch.randn(200, 64, generator=generator)
    unit = (x / x.norm(dim=1, keepdim=True)).double()
    hi = (4096 * unit).half()
    halves = hi.double(), (4096 * unit - hi).half().double()
    truth = unit @ unit.T
    found = {}
    for depth in (64, 16):
        scores = torch.zeros(200, 200)
        for first in range(0, 64, depth):
            part = torch.zeros(200, 200, dtype=torch.float64)
            for mine, theirs in ((0, 1), (1, 0), (0, 0)):
                for at in range(first, first + depth, 16):
                    part = cut(part + halves[mine][:, at : at + 16] @ halves[theirs][:, at : at + 16].T)
            scores += part.float()
        found[depth] = float((scores.double() / 2**24 - truth).square().mean().sqrt())
    assert found == pytest.approx({64: 9e-8, 16: 4.5e-8}, rel=0.2)


def cut(x: torch.Tensor) -> torch.Tensor:
    """What of positive and negative numbers float32 holds, without rounding."""
    near = x.float()
    beyond = near.double().abs() > x.abs()
    return torch.where(beyond, near.nextafter(torch.zeros_like(near)), near).double()
