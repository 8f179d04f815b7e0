"""What processes tell each other, between real ones."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from roadmap import ranks as module
from roadmap.models import batch_norm
from roadmap.ranks import ALONE, Ranks

from .engine.together import ranks_here, together


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_all_in_order_and_even(count: int, world: int) -> None:
    shares = [Ranks(rank, world).share(count) for rank in range(world)]
    assert [place for share in shares for place in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_alone_nothing_is_exchanged() -> None:
    rows = torch.ones(2, 3)
    assert ALONE.from_first(lambda: 5) == 5
    assert ALONE.from_all("x") == ["x"]
    assert ALONE.rows_of_all(rows) is rows
    assert ALONE.largest(3)() == 3
    ALONE.average_gradients([rows])
    with ALONE.turns():
        pass
    assert (ALONE.first, ALONE.machine) == (True, 0)


def everything() -> dict[str, Any]:
    """Every exchange once; each process brings another number of things."""
    ranks = ranks_here()
    rank = ranks.rank
    done: list[int] = []
    found: dict[str, Any] = {
        "first": ranks.from_first(lambda: done.append(rank) or {"who": rank}),
        "done": done,
        "all": ranks.from_all("x" * rank),
        "rows": ranks.rows_of_all(torch.full((rank, 2), float(rank))),
        "places": ranks.rows_of_all(torch.arange(2 - rank)),
        "largest": ranks.largest(7 if rank == 1 else 0)(),
        "machine": ranks.machine,
    }
    module.BUCKET = 64  # bytes: several of them
    weights = [nn.Parameter(torch.zeros(shape, dtype=d)) for shape, d in SHAPES]
    for number, weight in enumerate(weights[:-1]):  # the last has none
        weight.grad = torch.full_like(weight, float(number + 10 * rank))
    ranks.average_gradients(weights)
    found["gradients"] = [weight.grad for weight in weights]
    inside = {}
    for _ in range(2):
        with ranks.turns():
            inside[len(inside)] = time.monotonic()
            time.sleep(0.05 if ranks.local_rank == 0 else 0)
    return found | {"inside": inside}


SHAPES = [((3, 2), torch.float32), ((30,), torch.float32), ((2,), torch.float64), ((1,), torch.float32)]


def test_three_processes_exchange() -> None:
    found = together(3, everything, local=2)
    for rank, one in enumerate(found):
        assert isinstance(one, dict), one
        assert one["first"] == {"who": 0}
        assert one["done"] == ([0] if rank == 0 else [])
        assert one["all"] == ["", "x", "xx"]
        assert one["rows"].tolist() == [[1, 1], [2, 2], [2, 2]]
        assert one["places"].tolist() == [0, 1, 0]
        assert one["largest"] == 7
        assert one["machine"] == rank // 2
        assert [None if g is None else set(g.flatten().tolist()) for g in one["gradients"]] == [{10}, {11}, {12}, None]
    for turn in (0, 1):  # the first, then the first of the other machine, then the rest
        first, neighbour, other = (one["inside"][turn] for one in found)
        assert first + 0.05 <= min(neighbour, other)


# ------------------------------------------------------------------ BatchNorm


def norms() -> list[nn.Module]:
    torch.manual_seed(1)
    from timm.layers import BatchNormAct2d

    made: list[nn.Module] = [
        nn.BatchNorm2d(3, momentum=0.3),
        nn.BatchNorm2d(3, affine=False, momentum=None),
        nn.BatchNorm2d(3, track_running_stats=False),
        BatchNormAct2d(3),
    ]
    for norm in made:
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
    return [nn.Sequential(norm).double() for norm in made]


def pictures() -> Tensor:
    return torch.randn(6, 3, 4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2 + 3


def normalised(models: list[nn.Module], part: slice) -> list[dict[str, Any]]:
    """Two forwards, and the gradient of a sum of all outputs of all processes."""
    found = []
    for model in models:
        x = pictures()[part].requires_grad_()
        weights = torch.arange(pictures().numel(), dtype=torch.float64).view(pictures().shape)[part]
        model(x + 1)
        out = model(x)
        (out * weights).sum().backward()
        found.append(
            {
                "out": out.detach(),
                "x": x.grad,
                "state": {name: value.clone() for name, value in model.state_dict().items()},
                "weights": [parameter.grad for parameter in model.parameters()],
                "evaluated": model.eval()(x).detach(),
            }
        )
    return found


def shared_norms() -> list[dict[str, Any]]:
    ranks = ranks_here()
    return normalised(
        [batch_norm.share_statistics(model) for model in norms()], slice(0, 2) if ranks.first else slice(2, 6)
    )


def compiled_norms() -> list[dict[str, Any]]:
    models = [batch_norm.share_statistics(model) for model in norms()]
    for model in models:
        model.compile(backend="eager")
    return normalised(models, slice(0, 2) if ranks_here().first else slice(2, 6))


@pytest.mark.parametrize("work", [shared_norms, compiled_norms])
def test_batch_norm_is_of_the_whole_batch(work: Any) -> None:
    one, two = together(2, work)
    for whole, first, second in zip(normalised(norms(), slice(0, 6)), one, two, strict=True):
        for name in ("out", "x"):
            torch.testing.assert_close(torch.cat([first[name], second[name]]), whole[name], rtol=1e-10, atol=1e-10)
        for part in (first, second):
            torch.testing.assert_close(part["state"], whole["state"], rtol=1e-10, atol=1e-10)
        sums = [a + b for a, b in zip(first["weights"], second["weights"], strict=True)]
        torch.testing.assert_close(sums, whole["weights"], rtol=1e-10, atol=1e-10)
        if "0.running_mean" in whole["state"]:
            evaluated = torch.cat([first["evaluated"], second["evaluated"]])
            torch.testing.assert_close(evaluated, whole["evaluated"], rtol=1e-10, atol=1e-10)


def test_shared_statistics_alone_are_the_ordinary_ones() -> None:
    shared = [batch_norm.share_statistics(model) for model in norms()]
    assert all(isinstance(model[0], nn.SyncBatchNorm) for model in shared)  # type: ignore[index]
    for ours, theirs in zip(normalised(shared, slice(0, 6)), normalised(norms(), slice(0, 6)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert batch_norm.share_statistics(shared[0])[0] is shared[0][0]  # type: ignore[index]
    with pytest.raises(ValueError, match="expected at least 2D"):
        shared[0](torch.zeros(3))
