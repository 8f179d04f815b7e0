"""The parts of the baselines that are ours, against loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from roadmap.losses.baseline_parts import LinearClassifier, koleo, pairs_of_complete_queries

from .cases import drawn


def koleo_by_loops(vectors: list[list[float]]) -> float:
    unit = [[a / math.sqrt(sum(b * b for b in x)) for a in x] for x in vectors]
    total = 0.0
    for i, x in enumerate(unit):
        nearest = math.inf
        for j, y in enumerate(unit):
            if j != i:
                nearest = min(nearest, math.sqrt(sum((a - b) ** 2 for a, b in zip(x, y, strict=True))))
        total -= math.log(nearest + 1e-8)
    return total / len(unit)


@pytest.mark.parametrize("items", [2, 3, 9])
def test_koleo_is_its_transcription(items: int) -> None:
    x = drawn(items, 4, items)
    assert koleo(x).item() == pytest.approx(koleo_by_loops(x.tolist()), abs=1e-12)
    assert gradcheck(koleo, x.requires_grad_())


def test_koleo_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 5.0], [-2.0, 0.0]])  # on the unit circle, neighbours at sqrt 2
    assert koleo(x).item() == pytest.approx(-math.log(math.sqrt(2)), abs=1e-6)


@pytest.mark.parametrize("x", [torch.ones(3, 2), torch.ones(1, 2), torch.zeros(0, 2)], ids=["equal", "one", "none"])
def test_koleo_of_equal_or_single_vectors_is_finite_with_zero_gradients(x: torch.Tensor) -> None:
    leaf = x.clone().requires_grad_()
    value = koleo(leaf)
    value.backward()
    assert value.isfinite()
    assert leaf.grad is not None
    assert bool((leaf.grad == 0).all())


def test_pairs_of_complete_queries() -> None:
    x = torch.zeros(4, 2)
    pairs = [index.tolist() for index in pairs_of_complete_queries(x, torch.tensor([0, 1, 0, 2]))]
    assert pairs == [[0, 2], [2, 0], [0, 0, 2, 2], [1, 3, 1, 3]]
    against = pairs_of_complete_queries(x[:2], torch.tensor([0, 1]), x, torch.tensor([0, 0, 2, 2]))
    assert [index.tolist() for index in against] == [[0, 0], [0, 1], [0, 0], [2, 3]]
    assert [len(index) for index in pairs_of_complete_queries(x, torch.zeros(4))] == [0, 0, 0, 0]


def test_linear_classifier_is_smoothed_cross_entropy() -> None:
    x, labels = drawn(5, 3, 0), torch.tensor([0, 3, 1, 1, 2])
    classifier = LinearClassifier(4, 3, label_smoothing=0.1)
    assert classifier(x, labels).item() == pytest.approx(math.log(4))  # weights start at zero
    torch.nn.init.normal_(classifier.weight)
    torch.nn.init.normal_(classifier.bias)
    total = 0.0
    for row, label in zip(x.tolist(), labels.tolist(), strict=True):
        logits = [
            sum(a * b for a, b in zip(row, w, strict=True)) + bias
            for w, bias in zip(classifier.weight.tolist(), classifier.bias.tolist(), strict=True)
        ]
        log_sum = math.log(sum(math.exp(v) for v in logits))
        for c, logit in enumerate(logits):
            total -= (0.1 / 4 + (0.9 if c == label else 0)) * (logit - log_sum)
    assert classifier(x, labels).item() == pytest.approx(total / 5)
