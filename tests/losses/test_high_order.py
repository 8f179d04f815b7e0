"""HORDE against loops over pictures, positions, orders and sketches; what its sketches stand for."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from roadmap.losses import HORDE, Distributed, HordeContrastive, Memory, SupAP
from roadmap.losses.high_order import HighOrderMoments
from roadmap.losses.named import named_loss

from . import literal
from .cases import differences
from .test_horde_contrastive import by_loops as contrastive_by_loops

LABELS = torch.tensor([0, 1, 0, 1])


def features(map: Tensor) -> SimpleNamespace:
    """What a model shows: the cells of its map, or tokens."""
    return SimpleNamespace(cells=map.flatten(2).transpose(1, 2) if isinstance(map, Tensor) and map.ndim == 4 else map)


def drawn_map(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.3


def sketches_by_loops(local: literal.Matrix, projections: list[literal.Matrix]) -> literal.Matrix:
    """Of one picture, for each order from 2 on: the mean over positions of the product of the first k projections."""
    found = []
    for order in range(2, len(projections) + 1):
        sketch = [0.0] * len(projections[0][0])
        for x in local:
            for d in range(len(sketch)):
                product = 1.0
                for W in projections[:order]:
                    product *= sum(x[c] * W[c][d] for c in range(len(x)))
                sketch[d] += product / len(local)
        found.append(sketch)
    return found


def horde_by_loops(
    maps: list[literal.Matrix], labels: list[int], projections: list[literal.Matrix], heads: list[literal.Matrix]
) -> float:
    """The sum over the orders of the contrastive loss of each order's embeddings, with weight 1."""
    P, N = literal.masks(labels, None, include_self=False)
    total = 0.0
    sketches = [sketches_by_loops(local, projections) for local in maps]
    for number, head in enumerate(heads):
        vectors = [
            [sum(s * row[e] for s, row in zip(found[number], head, strict=True)) for e in range(len(head[0]))]
            for found in sketches
        ]
        total += contrastive_by_loops(literal.cosines(vectors, vectors), P, N, 0.1)[0]
    return total


def small(**options: Any) -> HORDE:
    torch.manual_seed(0)
    settings = {"channels": 3, "orders": 4, "dim": 5, "embedding_size": 4, "loss": HordeContrastive(0.1)} | options
    return HORDE(**settings).double()


def test_horde_is_its_transcription() -> None:
    horde, local = small(weight=0.5), drawn_map(4, 2, 3)  # tokens
    leaf = local.clone().requires_grad_()
    value = horde(features(leaf), LABELS)
    value.backward()
    projections = [W.tolist() for W in horde.moments.projections]
    heads = [W.tolist() for W in horde.moments.heads]
    labels = LABELS.tolist()
    assert value.item() == pytest.approx(0.5 * horde_by_loops(local.tolist(), labels, projections, heads), abs=1e-12)

    maps = local.tolist()
    gradient = [differences(lambda _: horde_by_loops(maps, labels, projections, heads), picture) for picture in maps]
    torch.testing.assert_close(leaf.grad, 0.5 * torch.tensor(gradient, dtype=torch.float64), rtol=1e-6, atol=1e-7)
    weights = [*zip(horde.moments.projections, projections, strict=True), *zip(horde.moments.heads, heads, strict=True)]
    for weight, rows in weights:
        found = differences(lambda _: horde_by_loops(maps, labels, projections, heads), rows)
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, 0.5 * torch.tensor(found, dtype=torch.float64), rtol=1e-6, atol=1e-7)


def test_a_map_is_its_cells() -> None:
    moments, map = small().moments, drawn_map(4, 3, 2, 3)
    cells = torch.stack([map[:, :, i, j] for i in range(2) for j in range(3)], dim=1)
    torch.testing.assert_close(moments(map), moments(cells), rtol=0, atol=1e-14)


def test_sketches_of_random_signs_stand_for_the_moments() -> None:
    """<sketch, sketch'> / dim is on average <moment, moment'> = mean over both pictures' positions of <x, y>^k."""
    torch.manual_seed(0)
    moments = HighOrderMoments(channels=3, orders=3, dim=200_000, trained=False).double()
    local = drawn_map(2, 4, 3, seed=3) / 2
    for order, vectors in enumerate(moments(local), start=2):
        inner = [[(a @ b.T).pow(order).mean().item() for b in local] for a in local]
        expected = inner[0][1] / math.sqrt(inner[0][0] * inner[1][1])
        assert (vectors[0] @ vectors[1]).item() == pytest.approx(expected, abs=0.02)


def test_the_mean_alone_cannot_tell_what_moments_can() -> None:
    """Two pictures with the same average feature, one spread out: order 2 sees it."""
    torch.manual_seed(0)
    moments = HighOrderMoments(channels=2, orders=2, dim=64, trained=False).double()
    calm = torch.tensor([[[1.0, 1.0], [1.0, 1.0]]], dtype=torch.float64)
    wild = torch.tensor([[[3.0, 0.0], [-1.0, 2.0]]], dtype=torch.float64)
    assert torch.equal(calm.mean(1), wild.mean(1))
    (vectors,) = moments(torch.cat([calm, wild]))
    assert (vectors[0] @ vectors[1]).item() < 0.9


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_size_does_not_matter(scale: float) -> None:
    """Neither for the vectors nor, but for its own factor, for the gradient; the fifth power of 1e12 is no float32."""
    torch.manual_seed(0)
    moments = HighOrderMoments(channels=3, orders=5, dim=8, embedding_size=4)
    map = drawn_map(2, 3, 2, 2).float()
    plain, scaled = map.clone().requires_grad_(), (scale * map).requires_grad_()
    for leaf in (plain, scaled):
        sum((x * torch.arange(4)).sum() for x in moments(leaf)).backward()  # type: ignore[union-attr]
    for x, y in zip(moments(plain), moments(scaled), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scale * scaled.grad, plain.grad, rtol=1e-3, atol=1e-4)  # type: ignore[operator]


def test_shapes_and_starts() -> None:
    moments = HighOrderMoments(channels=6, orders=4, dim=50, embedding_size=7)
    assert [tuple(W.shape) for W in moments.projections] == [(6, 50)] * 4
    assert [tuple(W.shape) for W in moments.heads] == [(50, 7)] * 3
    edge = math.sqrt(6 / 56)  # Glorot's
    assert all(0.9 * edge < W.abs().max().item() <= edge for W in moments.projections)
    assert [tuple(x.shape) for x in moments(torch.randn(5, 6, 3, 3))] == [(5, 7)] * 3
    fixed = HighOrderMoments(channels=6, orders=4, dim=50, trained=False)
    assert not list(fixed.parameters())
    assert set(fixed.state_dict()["signs"].flatten().tolist()) == {-1.0, 1.0}
    assert [tuple(x.shape) for x in fixed(torch.randn(5, 9, 6))] == [(5, 50)] * 3
    lengths = [torch.linalg.vector_norm(x, dim=1) for x in fixed(torch.randn(5, 9, 6))]
    torch.testing.assert_close(torch.stack(lengths), torch.ones(3, 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    horde = HORDE(channels=3, orders=3, dim=16, embedding_size=8)
    map = drawn_map(4, 3, 2, 2).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        value = horde(features(map), LABELS)
    value.backward()
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(horde(features(map.float()), LABELS).item(), rel=0.05)
    assert map.grad is not None
    assert map.grad.isfinite().all()
    assert all(W.grad is not None and W.grad.dtype == torch.float32 for W in horde.parameters())


@pytest.mark.parametrize("items", [0, 1, 3])
def test_nothing_to_compare_is_zero_with_zero_gradients(items: int) -> None:
    horde = HORDE(channels=3, loss=SupAP(include_self=False), orders=3, dim=4, embedding_size=4)
    map = drawn_map(items, 3, 2, 2).float().requires_grad_()
    value = horde(features(map), torch.arange(items))
    value.backward()
    assert value.item() == 0
    for leaf in (map, *horde.parameters()):
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_each_order_has_its_own_loss_where_that_remembers_something() -> None:
    shared = HORDE(3, orders=4, dim=4, embedding_size=4)
    assert len({id(loss) for loss in shared.losses}) == 1
    pytest.importorskip("pytorch_metric_learning", reason="the extra `pml` is not installed")
    proxies = HORDE(3, named_loss("proxy_nca", num_classes=2, embedding_size=4), orders=4, dim=4, embedding_size=4)
    assert len({id(p) for loss in proxies.losses for p in loss.parameters()}) == 3
    assert [p.shape for p in proxies.loss_parameters()] == [(2, 4)] * 3
    by_name = HORDE(3, "proxy_nca", {"num_classes": 2}, orders=4, dim=4, embedding_size=4)
    assert [p.shape for p in by_name.loss_parameters()] == [(2, 4)] * 3
    memories = HORDE(3, Memory(SupAP(), 8), orders=3, dim=4, embedding_size=4)
    for _ in range(2):
        memories(features(torch.randn(4, 3, 2, 2)), LABELS)
    assert [len(loss) for loss in memories.losses] == [8, 8]  # type: ignore[arg-type]
    assert HORDE(3, Distributed(SupAP()), orders=3, dim=4)(features(torch.randn(4, 3, 2, 2)), LABELS) >= 0


def test_state_pickles_and_copies() -> None:
    map = drawn_map(4, 3, 2, 2).float()
    for trained in (True, False):
        torch.manual_seed(1)
        horde = HORDE(3, orders=3, dim=8, embedding_size=4, trained=trained)
        expected = horde(features(map), LABELS).item()
        torch.manual_seed(2)
        other = HORDE(3, orders=3, dim=8, embedding_size=4, trained=trained)
        assert other(features(map), LABELS).item() != expected
        other.load_state_dict(horde.state_dict())
        for again in (other, pickle.loads(pickle.dumps(horde)), copy.deepcopy(horde)):
            assert again(features(map), LABELS).item() == expected


def test_it_learns_to_bring_the_moments_of_a_class_together() -> None:
    torch.manual_seed(0)
    map = drawn_map(4, 3, 2, 2).requires_grad_()
    horde = HORDE(3, orders=3, dim=16, embedding_size=8).double()
    leaves, values = [map, *horde.parameters()], []
    for _ in range(60):
        value = horde(features(map), LABELS)
        values.append(value.item())
        for leaf, gradient in zip(leaves, torch.autograd.grad(value, leaves), strict=True):
            leaf.data -= 0.1 * gradient
    assert values[-1] < 0.3 * values[0]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: HORDE(0), ValueError, "channels must be >= 1, got 0"),
        (lambda: HORDE(3, orders=1), ValueError, "orders must be >= 2, got 1"),
        (lambda: HORDE(3, dim=0), ValueError, "dim must be >= 1, got 0"),
        (lambda: HORDE(3, weight=-1.0), ValueError, "weight must be >= 0"),
        (lambda: HORDE(3, SupAP), TypeError, "loss must be an instance, got the class SupAP"),  # type: ignore[arg-type]
        (lambda: HORDE(3, trained="no"), TypeError, "trained must be True or False"),  # type: ignore[arg-type]
        (lambda: HORDE(3, "contrastive_hord"), ValueError, "unknown loss 'contrastive_hord', did you mean 'contra"),
        (lambda: HORDE(3, options={"marginn": 1}), ValueError, "no option 'marginn', did you mean 'margin'"),
        (lambda: HORDE(3, SupAP(), {"tau": 1}), ValueError, "options are for a loss that is given by its name"),
        (lambda: HORDE(3, "proxy_nca"), ValueError, "the loss proxy_nca needs num_classes"),
        (
            lambda: HORDE(3, named_loss("proxy_nca", num_classes=2, embedding_size=9), dim=4, embedding_size=4),
            ValueError,
            "the loss was made with embedding_size=9, but each order gives 4 dimensions",
        ),
    ],
)
def test_what_it_refuses(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("map", "message"),
    [
        (torch.zeros(4, 5, 2, 2), r"features of shape \(4, 5, 2, 2\) have 5 channels, not 3"),
        (torch.zeros(4, 3), r"features must be a float tensor \(B, C, H, W\) or tokens \(B, T, C\), got torch"),
        (torch.zeros(4, 3, 2, 2, dtype=torch.int64), "got torch.int64"),
        (torch.zeros(4, 0, 3), r"have no positions; they must come before pooling"),
        ("map", "got str"),
    ],
)
def test_features_it_refuses(map: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HighOrderMoments(3, orders=2, dim=4, embedding_size=4)(map)


def test_a_picture_without_features_is_named() -> None:
    cells = torch.ones(4, 2, 3) * torch.tensor([1.0, 1.0, 0.0, 1.0])[:, None, None]
    horde = HORDE(3, orders=2, dim=4, embedding_size=4)
    with pytest.raises(ValueError, match=r"embeddings\[2\] is a zero vector, which has no direction"):
        horde(features(cells), LABELS)


def test_its_file_is_its_constructor() -> None:
    """All options with their defaults, in their order; what only a run knows is null."""
    conf = pytest.importorskip("omegaconf", reason="the extra `train` is not installed").OmegaConf
    values = dict(conf.load(Path(str(files("roadmap.config.groups"))) / "auxiliary" / "horde.yaml"))
    parameters = inspect.signature(HORDE).parameters
    assert values.pop("name") == "horde"
    assert list(values) == list(parameters)
    assert values == {name: None if name == "channels" else p.default for name, p in parameters.items()}


def test_its_words() -> None:
    said = repr(HORDE(3, orders=2, dim=4, embedding_size=4, weight=0.5))
    assert said.startswith(
        "HORDE(\n  weight=0.5\n  (moments): HighOrderMoments(\n    channels=3, orders=2, trained=True"
    )
