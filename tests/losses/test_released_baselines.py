"""Values and gradients that the authors' released code gave on one batch: ours are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roadmap.losses import TripletSCT

RELEASED: dict[str, Any] = json.loads((Path(__file__).parent / "released_baselines.json").read_text(encoding="utf-8"))
EMBEDDINGS = torch.tensor(RELEASED["embeddings"], dtype=torch.float64)
LABELS = torch.tensor(RELEASED["labels"])
WEIGHTS = torch.tensor(RELEASED["weights"], dtype=torch.float64)


def check_released(name: str, loss: nn.Module, atol: float, weights: Tensor | None = None) -> None:
    """`atol`: what the guards in the released logarithms and roots come to."""
    x = EMBEDDINGS.clone().requires_grad_()
    value = loss(x, LABELS)
    leaves = [x] if weights is None else [x, weights]
    gradients = torch.autograd.grad(value, leaves)
    assert value.item() == pytest.approx(RELEASED[name]["value"], abs=atol)
    for found, released in zip(gradients, RELEASED[name]["gradients"], strict=True):
        expected = torch.tensor(released, dtype=torch.float64)
        torch.testing.assert_close(found if found.shape == expected.shape else found.T, expected, rtol=0, atol=atol)


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
