"""Values and gradients that the authors' released code gave on one batch: ours are the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from roadmap.losses import HORDE, HordeContrastive, SphericalConstraint, TripletSCT
from roadmap.losses.mic import correlation

RELEASED: dict[str, Any] = json.loads((Path(__file__).parent / "released_baselines.json").read_text(encoding="utf-8"))
EMBEDDINGS = torch.tensor(RELEASED["embeddings"], dtype=torch.float64)
LABELS = torch.tensor(RELEASED["labels"])
WEIGHTS = torch.tensor(RELEASED["weights"], dtype=torch.float64)


def check_value(released: dict[str, Any], value: Tensor, leaves: Sequence[Tensor], atol: float) -> None:
    """`atol`: what the guards in the released logarithms and roots come to."""
    assert value.item() == pytest.approx(released["value"], abs=atol)
    for found, told in zip(torch.autograd.grad(value, leaves), released["gradients"], strict=True):
        expected = torch.tensor(told, dtype=torch.float64)
        torch.testing.assert_close(found if found.shape == expected.shape else found.T, expected, rtol=0, atol=atol)


def check_released(name: str, loss: nn.Module, atol: float, weights: Tensor | None = None) -> None:
    x = EMBEDDINGS.clone().requires_grad_()
    check_value(RELEASED[name], loss(x, LABELS), [x] if weights is None else [x, weights], atol)


def leaf(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("method", ["sct", "hn", "shn"])
def test_triplet_sct_is_the_released_one(method: str) -> None:
    check_released(f"triplet_sct, {method}", TripletSCT(method), 1e-13)  # type: ignore[arg-type]


def test_losses_with_weights_are_the_released_ones() -> None:
    pml = pytest.importorskip("roadmap.losses.pml")
    graph = pml.proxy_gml(4, 3, proxies=2, ratio=0.6, proxy_weight=0.3).double()
    graph.loss.proxies.data = WEIGHTS.clone()
    check_released("proxy_gml", graph, 1e-7, graph.loss.proxies)
    softmax = pml.normalised_softmax(4, 3).double()
    softmax.loss.W.data = WEIGHTS[:4].T.clone()
    check_released("normalised_softmax", softmax, 1e-12, softmax.loss.W)
    proxies = pml.proxy_nca_pp(4, 3).double()
    proxies.loss.proxies.data = WEIGHTS[:4].clone()
    check_released("proxy_nca_pp", proxies, 1e-7, proxies.loss.proxies)


@pytest.mark.parametrize("momentum", [1.0, 0.3])
def test_the_spherical_constraint_is_the_released_one(momentum: float) -> None:
    """Around multi-similarity; the second of two calls, whose length is an average where momentum < 1."""
    pml = pytest.importorskip("roadmap.losses.pml")
    loss = SphericalConstraint(pml.multi_similarity(), weight=0.5, momentum=momentum).double()
    loss(EMBEDDINGS, LABELS)
    x = (1.5 * EMBEDDINGS.flip(0)).requires_grad_()
    check_value(RELEASED[f"sec, momentum {momentum}"], loss(x, LABELS.flip(0)), [x], 1e-13)


def test_the_adversary_of_mic_is_the_released_one() -> None:
    released = RELEASED["mic, adversarial"]
    network, auxiliary = [leaf(part) for part in released["network"]], leaf(released["auxiliary"])
    x, (first, shift, second, shift_again) = leaf(RELEASED["embeddings"]), network

    def projection(z: Tensor) -> Tensor:
        return torch.relu(z @ first.T + shift) @ second.T + shift_again

    value = correlation(normalize(x, dim=1), normalize(auxiliary, dim=1), projection)  # type: ignore[arg-type]
    check_value(released, value, [x, auxiliary, *network], 1e-13)


def test_the_margin_loss_of_mic_is_the_released_one() -> None:
    """Of given triplets: whom it draws is said in docs/maths.md."""
    pml = pytest.importorskip("roadmap.losses.pml")
    released = RELEASED["mic, margin"]
    loss, x = pml.margin_distance_weighted(num_classes=4).double(), leaf(RELEASED["embeddings"])
    loss.loss.beta.data = torch.tensor(released["beta"], dtype=torch.float64)
    triplets = tuple(torch.tensor(released["triplets"]).T)
    check_value(released, loss.loss(x, LABELS, triplets), [x, loss.loss.beta], 1e-7)


def test_horde_is_the_released_one() -> None:
    """Its cascade to order 3 with its contrastive loss, in float32."""
    released = RELEASED["horde"]
    horde = HORDE(3, HordeContrastive(0.5), orders=3, dim=5, embedding_size=4).double()
    weights = [*horde.moments.projections, *horde.moments.heads]
    for weight, told in zip(weights, [*released["projections"], *released["heads"]], strict=True):
        weight.data = torch.tensor(told, dtype=torch.float64)
    cells = leaf(released["features"])
    value = horde(SimpleNamespace(cells=cells), torch.tensor([0, 0, 1, 1]))  # type: ignore[arg-type]
    check_value(released, value, [cells, *weights], 1e-6)
