"""ProxyGML against loops over Python floats, values and differences; which proxies a picture meets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

pytest.importorskip("pytorch_metric_learning", reason="the extra `pml` is not installed")

from roadmap.losses.pml import proxy_gml

from . import literal
from .cases import differences, drawn

CLASSES, DIMENSIONS = 4, 3
LABELS = [0, 3, 1, 1, 0, 2, 0]
SETTINGS: list[dict[str, Any]] = [
    {"proxies": 3, "ratio": 0.4, "proxy_weight": 0.3},
    {"proxies": 1, "ratio": 0.5, "proxy_weight": 0.0},  # as released for SOP
    {"proxies": 3, "ratio": 0.1, "proxy_weight": 0.3},  # fewer than a class has: those, and one more
    {"proxies": 2, "ratio": 1.0, "proxy_weight": 1.0},  # all
]


def by_loops(
    vectors: literal.Matrix, labels: list[int], weights: literal.Matrix, proxies: int, ratio: float, proxy_weight: float
) -> float:
    """L^s + lambda L^p: the k nearest proxies, those of the sample's own class first; sums by class; softmaxes."""
    owners = [j // proxies for j in range(len(weights))]
    classes = len(weights) // proxies
    keep = max(math.ceil(round(ratio * len(weights), 9)), proxies + 1)
    total = 0.0
    for x, label in zip(vectors, labels, strict=True):
        (s,) = literal.cosines([x], weights)
        ranked = sorted(range(len(weights)), key=lambda j: (owners[j] != label, -s[j]))[:keep]
        Z = {c: sum(s[j] for j in ranked if owners[j] == c) for c in {owners[j] for j in ranked}}
        total -= math.log(math.exp(Z[label]) / sum(math.exp(z) for z in Z.values())) / len(vectors)
    for row, owner in zip(literal.cosines(weights, weights), owners, strict=True):
        Z = {c: sum(row[j] for j in range(len(weights)) if owners[j] == c) for c in range(classes)}
        total -= proxy_weight * math.log(math.exp(Z[owner]) / sum(math.exp(z) for z in Z.values())) / len(weights)
    return total


def made(seed: int = 0, **settings: Any) -> tuple[Any, Tensor]:
    """The loss and its proxies, of different lengths, in float64."""
    torch.manual_seed(seed)
    loss = proxy_gml(CLASSES, DIMENSIONS, **settings).double()
    with torch.no_grad():
        loss.loss.proxies.copy_(drawn(len(loss.loss.proxies), DIMENSIONS, seed + 50) - 1.5)
    return loss, loss.loss.proxies


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_proxy_gml_is_its_transcription(settings: dict[str, Any]) -> None:
    loss, proxies = made(**settings)
    x = drawn(7, DIMENSIONS, 1).sub(1.5).requires_grad_()
    value = loss(x, torch.tensor(LABELS))
    value.backward()
    vectors, weights = x.tolist(), proxies.tolist()
    assert value.item() == pytest.approx(by_loops(vectors, LABELS, weights, **settings), abs=1e-12)
    at_vectors = differences(lambda v: by_loops(v, LABELS, weights, **settings), vectors)
    at_weights = differences(lambda w: by_loops(vectors, LABELS, w, **settings), weights)
    assert x.grad is not None
    assert proxies.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor(at_vectors, dtype=torch.float64), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(proxies.grad, torch.tensor(at_weights, dtype=torch.float64), rtol=1e-6, atol=1e-8)


def test_gradients_are_those_of_the_value() -> None:
    loss, proxies = made(**SETTINGS[0])
    x = drawn(5, DIMENSIONS, 2).sub(1.5).requires_grad_()
    assert gradcheck(lambda x, _: loss(x, torch.tensor(LABELS[:5])), (x, proxies))


def test_worked_by_hand() -> None:
    """Two classes of two proxies, three kept: both of the class, and the nearer one of the other."""
    loss = proxy_gml(2, 2, proxies=2, ratio=0.75, proxy_weight=0.0).double()
    with torch.no_grad():
        loss.loss.proxies.copy_(torch.tensor([[2.0, 0.0], [0.6, 0.8], [0.0, 5.0], [-1.0, 0.0]]))
    value = loss(torch.tensor([[3.0, 0.0]], dtype=torch.float64), torch.tensor([0]))
    mine, other = 1 + 0.6, 0.0  # the cosine with the third proxy; the fourth, at -1, is left out
    assert value.item() == pytest.approx(math.log(1 + math.exp(other - mine)))


def test_a_class_of_which_no_proxy_was_kept_has_no_share() -> None:
    """The mask of the softmax: a sum of nothing is not a score of 0."""
    loss = proxy_gml(3, 2, proxies=1, ratio=0.6, proxy_weight=0.0).double()
    with torch.no_grad():
        loss.loss.proxies.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    value = loss(x, torch.tensor([0]))
    value.backward()
    # the second class is kept with a cosine of exactly 0 and counts; released, it would not
    assert value.item() == pytest.approx(math.log(1 + math.exp(0 - 1)))
    assert loss.loss.proxies.grad is not None
    assert not loss.loss.proxies.grad[2].any()


@pytest.mark.parametrize(
    ("classes", "proxies", "ratio", "kept"),
    [(100, 12, 0.05, 60), (100, 1, 0.07, 7), (3, 2, 0.05, 3), (3, 2, 1.0, 6), (1, 2, 0.5, 2)],
)
def test_how_many_are_kept(classes: int, proxies: int, ratio: float, kept: int) -> None:
    """Of few classes a small share would be a sample's own proxies alone, and the loss without a gradient."""
    assert proxy_gml(classes, 2, proxies, ratio).loss.kept == kept


def test_proxies_start_as_released() -> None:
    weights = proxy_gml(100, 8).loss.proxies
    assert weights.shape == (1200, 8)
    edge = 1200**-0.5  # torch's kaiming_uniform_ with a = sqrt 5 over (dimensions, proxies)
    assert 0.99 * edge < weights.abs().max().item() <= edge
    assert abs(weights.mean().item()) < 0.05 * edge


@given(st.integers(0, 2**31))
def test_samples_may_come_in_any_order_and_of_any_length(seed: int) -> None:
    loss, _ = made(**SETTINGS[0])
    generator = torch.Generator().manual_seed(seed)
    x, labels = drawn(7, DIMENSIONS, seed % 1000) - 1.5, torch.tensor(LABELS)
    order, lengths = torch.randperm(7, generator=generator), torch.rand(7, 1, generator=generator) + 0.5
    again = loss((lengths * x)[order], labels[order]).item()
    assert again == pytest.approx(loss(x, labels).item(), abs=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"proxies": 0}, ValueError, "proxies must be >= 1, got 0"),
        ({"ratio": 0.0}, ValueError, "ratio must be > 0, got 0"),
        ({"ratio": 1.5}, ValueError, "ratio must be <= 1, the share of all proxies, got 1.5"),
        ({"proxy_weight": -0.1}, ValueError, "proxy_weight must be >= 0"),
        ({"proxies": 2.0}, TypeError, "proxies must be an int"),
    ],
)
def test_what_it_refuses(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        proxy_gml(4, 3, **options)


def test_calls_it_refuses() -> None:
    loss, x = proxy_gml(4, 3), drawn(2, 3, 0).float()
    pairs = tuple(torch.tensor([0]) for _ in range(3))
    with pytest.raises(ValueError, match="ProxyGML takes every item of the batch; leave out indices_tuple"):
        loss(x, torch.tensor([0, 1]), pairs)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 4\), the classes this loss has weights for, got 7"):
        loss(x, torch.tensor([0, 7]))


def test_its_words() -> None:
    assert "num_classes=4, proxies=12, ratio=0.05, proxy_weight=0.3" in repr(proxy_gml(4, 3))
