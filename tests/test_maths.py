"""docs/maths.md names functions and tests that exist, and the errata it lists are errors indeed."""

from __future__ import annotations

import importlib
import itertools
import math
import random
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from roadmap.losses import ROADMAP, SupAP, average_precision, calibration, saturation_point, smoothap, supap
from roadmap.losses.rank_ap import h_minus
from roadmap.metrics import DecomposabilityGap

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "maths.md").read_text(encoding="utf-8")


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def mask(*values: bool) -> Tensor:
    return torch.tensor([values])


# --- the page


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", PAGE))))
def test_every_test_it_names_exists(name: str) -> None:
    path, _, test = name.partition("::")
    assert (ROOT / path).is_file(), f"docs/maths.md names {path}, which is not there"
    assert f"\ndef {test}(" in (ROOT / path).read_text(encoding="utf-8") if test else True, f"no {test} in {path}"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(roadmap(?:\.\w+)+)`", PAGE))))
def test_every_function_it_names_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        assert hasattr(importlib.import_module(module), attribute), f"docs/maths.md names {name}, which is not there"


# --- the errata


def test_h_minus_of_half_at_zero_is_no_upper_bound() -> None:
    """Eq. (4) at t = 0: one positive and one negative with equal scores, AP = 1/2."""
    exact = 1 - average_precision(row(0.3, 0.3), mask(True, False), mask(False, True)).item()
    first_branch = 1 - 1 / (1 + 0.5)
    assert exact == pytest.approx(1 / 2)
    assert first_branch == pytest.approx(1 / 3)
    assert first_branch < exact
    assert h_minus(row(0.0), 0.01, 100.0, 0.05).item() == 1
    assert supap(row(0.3, 0.3), mask(True, False), mask(False, True)).item() == pytest.approx(exact)


def test_cosine_with_squared_norms_is_no_cosine() -> None:
    v = torch.tensor([2.0, 0.0])
    assert (v @ v / (v.norm() ** 2 * v.norm() ** 2)).item() == 0.25  # as printed, of a vector with itself
    assert torch.nn.functional.cosine_similarity(v, v, dim=0).item() == 1


def test_the_sigmoid_has_one_over_tau_in_its_derivative() -> None:
    tau, s_1, s_2 = 0.01, row(0.50).requires_grad_(), row(0.51)
    rank = 1 + torch.sigmoid((s_2 - s_1) / tau)
    (slope,) = torch.autograd.grad(rank.sum(), s_1)
    sigma = torch.sigmoid((s_2 - s_1.detach()) / tau)
    assert slope.item() == pytest.approx((-sigma * (1 - sigma) / tau).item())
    assert slope.item() / (-tau * sigma * (1 - sigma)).item() == pytest.approx(1 / tau**2)  # as printed: 10^4 less


@pytest.mark.parametrize(("tau", "epsilon"), [(0.01, 1e-2), (0.1, 1e-3)])
def test_delta_is_where_the_sigmoid_is_one_minus_epsilon(tau: float, epsilon: float) -> None:
    """Not where its slope in the scores is epsilon: that is epsilon (1 - epsilon) / tau."""
    t = row(saturation_point(tau, epsilon)).requires_grad_()
    value = torch.sigmoid(t / tau)
    (slope,) = torch.autograd.grad(value.sum(), t)
    assert value.item() == pytest.approx(1 - epsilon)
    assert slope.item() * tau == pytest.approx(epsilon * (1 - epsilon))
    assert slope.item() == pytest.approx(epsilon * (1 - epsilon) / tau)
    assert slope.item() > epsilon


def test_opposite_gradients_are_opposite_up_to_the_gradient_of_the_negative() -> None:
    scores = row(0.50, 0.51, 0.64).requires_grad_()
    (gradient,) = torch.autograd.grad(smoothap(scores, mask(True, True, False), mask(False, False, True)), scores)
    first, second, negative = gradient[0].tolist()
    assert first + second + negative == pytest.approx(0, abs=1e-12)
    assert first == pytest.approx(-second, rel=1e-4)
    assert first != pytest.approx(-second, rel=1e-6)


def test_underestimating_the_negatives_underestimates_the_loss() -> None:
    """Supplementary A.1, iii says "(resp. overestimated)" for both."""

    def loss(rank_pos: float, rank_neg: float) -> float:
        return 1 - rank_pos / (rank_pos + rank_neg)

    assert loss(2, 0.9) < loss(2, 1) < loss(2, 1.1)


def gap(*batches: tuple[list[float], list[float]]) -> float:
    """Eq. (6) for batches of (scores of positives, scores of negatives)."""

    def ap(scores: list[float], relevant: list[bool]) -> float:
        return average_precision(row(*scores), mask(*relevant), ~mask(*relevant)).item()

    labelled = [(p + n, [True] * len(p) + [False] * len(n)) for p, n in batches]
    whole = ap([s for scores, _ in labelled for s in scores], [r for _, relevant in labelled for r in relevant])
    return sum(ap(*batch) for batch in labelled) / len(batches) - whole


def eq_8(P: list[int], N: list[int], ends: list[int]) -> float:
    """Eq. (8); `ends` are where the inner sums end: B as printed, |P^b| as meant."""
    ranks = [(j + sum(P[:b]), sum(N[:b])) for b in range(len(P)) for j in range(1, ends[b] + 1)]
    return 1 - sum(plus / (plus + minus) for plus, minus in ranks) / sum(P)


def eq_9(*batches: tuple[list[float], list[float]], alpha: float = 0.9, beta: float = 0.6) -> float:
    P, N = [len(p) for p, _ in batches], [len(n) for _, n in batches]
    G = [sum(s >= alpha for s in p) for p, _ in batches]  # [alpha - s]+ is 0 at alpha: it is respected there
    E = [sum(s > beta for s in n) for _, n in batches]
    total = 0.0
    for b in range(len(batches)):
        good = [(j + sum(G[:b]), sum(E[:b])) for j in range(1, G[b] + 1)]
        bad = [(j + G[b] + sum(P[:b]), sum(N[:b])) for j in range(1, P[b] - G[b] + 1)]
        total += sum(plus / (plus + minus) for plus, minus in good + bad)
    return 1 - total / sum(P)


def test_eq_8_as_printed_is_negative() -> None:
    assert eq_8([2], [3], ends=[5]) == -1.5  # one batch of B = 5
    assert eq_8([2], [3], ends=[2]) == 0
    assert eq_8([2, 2, 2], [2, 2, 2], ends=[2, 2, 2]) == pytest.approx(0.262963, abs=1e-6)


def test_eq_8_depends_on_the_order_of_unlike_batches() -> None:
    only_positives, mixed = ([0.2, 0.1], []), ([0.9], [0.8, 0.7, 0.6])
    assert gap(only_positives, mixed) == pytest.approx(1 - (1 + 2 / 5 + 3 / 6) / 3)
    assert eq_8([2, 1], [0, 3], ends=[2, 1]) == 0  # no bound in this order
    assert eq_8([1, 2], [3, 0], ends=[1, 2]) == pytest.approx(gap(only_positives, mixed))


def test_eq_9_depends_on_the_order_of_the_batches() -> None:
    low, high = ([0.37], [0.10]), ([0.93], [0.56])
    assert gap(low, high) == pytest.approx(1 / 6)
    assert eq_9(low, high) == 0  # no bound in this order
    assert eq_9(high, low) == pytest.approx(1 / 6)


def test_eq_9_is_the_modules_on_both_thresholds_too() -> None:
    """Scores of exactly alpha and beta respect their thresholds, here and there."""
    batches = ([0.9, 0.6], [0.6, 0.3]), ([0.95, 0.9], [0.7]), ([0.9], [0.6])
    scores = torch.tensor([s for p, n in batches for s in (*p, *n)], dtype=torch.float64)
    relevant = torch.tensor([hit for p, n in batches for hit in [True] * len(p) + [False] * len(n)])
    numbers = torch.tensor([b for b, (p, n) in enumerate(batches) for _ in (*p, *n)])
    found = DecomposabilityGap(scores, relevant, numbers, alpha=0.9, beta=0.6)
    assert found.threshold_counts.good_positives == (1, 2, 1)
    assert found.threshold_counts.bad_negatives == (0, 1, 0)
    assert eq_9(*batches) == pytest.approx(found.eq9, abs=1e-12)


def test_eq_9_can_be_looser_than_eq_8() -> None:
    batches = ([0.88], [0.67]), ([0.95, 0.93], [0.72])
    assert eq_9(*batches) == pytest.approx(5 / 18)
    assert eq_8([1, 2], [1, 1], ends=[1, 2]) == pytest.approx(7 / 36)


def test_eq_9_in_its_worst_order_was_never_violated() -> None:
    draw = random.Random(0)
    violated = 0
    for _ in range(300):
        batches = []
        for _ in range(draw.randint(2, 3)):
            positives, negatives = draw.randint(1, 3), draw.randint(1, 3)
            scores = sorted((draw.random() for _ in range(positives + negatives)), reverse=True)
            batches.append((scores[:positives], scores[positives:]))
        violated += gap(*batches) > eq_9(*batches) + 1e-12
        assert gap(*batches) <= max(eq_9(*order) for order in itertools.permutations(batches)) + 1e-12
    assert violated > 10  # in the order they came


def test_the_gap_can_be_negative() -> None:
    assert gap(([0.4], [0.5]), ([0.9, 0.8, 0.7], [0.1])) == pytest.approx(-0.2)


def test_calibrated_batches_have_an_ap_of_one_not_null() -> None:
    batches = ([0.95, 0.92], [0.5, 0.1]), ([0.91], [0.59, 0.3])
    for p, n in batches:
        relevant = mask(*[True] * len(p), *[False] * len(n))
        assert calibration(row(*p, *n), relevant, ~relevant).item() == 0
        assert average_precision(row(*p, *n), relevant, ~relevant).item() == 1
    assert gap(*batches) == 0


# --- what the page says about the settings


def test_push_of_supap_on_a_lone_positive() -> None:
    """ρ / (1 + H⁻(t))², which falls as 1 / (ρ t²) and does not vanish."""
    for t in (0.06, 0.13, 0.5, 1.5):
        scores = row(0.0, t).requires_grad_()
        (gradient,) = torch.autograd.grad(supap(scores, mask(True, False), mask(False, True)), scores)
        h = 100 * (t - saturation_point(0.01)) + 0.99 + 0.5
        assert -gradient[0, 0].item() == pytest.approx(100 / (1 + h) ** 2)
    assert -gradient[0, 0].item() == pytest.approx(1 / (100 * t**2), rel=0.1)


def test_satisfied_negatives_dilute_the_printed_calibration() -> None:
    """One negative of 124 above beta by 0.1."""
    scores = torch.full((1, 125), 0.2, dtype=torch.float64)
    scores[0, :2] = torch.tensor([0.95, 0.7])
    positives = torch.zeros(1, 125, dtype=torch.bool)
    positives[0, 0] = True
    assert calibration(scores, positives, ~positives).item() == pytest.approx(0.1)
    assert calibration(scores, positives, ~positives, average="all").item() == pytest.approx(0.1 / 124)


@pytest.mark.parametrize("optimiser", [torch.optim.Adam, torch.optim.AdamW])
def test_half_the_loss_doubles_the_share_of_adams_weight_decay(optimiser: type[torch.optim.Optimizer]) -> None:
    """Weights 0.5 + 0.5 against the released 1 + 1: half the decay gives the released steps; AdamW gives them as is."""
    labels = torch.tensor([0, 0, 1, 1, 2, 2])

    def weights_after(factor: float, decay: float) -> Tensor:
        layer = torch.nn.Linear(4, 3, bias=False, dtype=torch.float64)
        pictures = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-0.2, 0.25, 12, dtype=torch.float64).reshape(3, 4))
        # eps = 0: its 1e-8 beside the gradient is the one other thing that sees the size of the loss
        steps = optimiser(layer.parameters(), lr=1e-2, weight_decay=decay, eps=0.0)  # type: ignore[call-arg]
        for _ in range(5):
            steps.zero_grad()
            (factor * ROADMAP(lam=0.5)(layer(pictures), labels)).backward()
            steps.step()
        return layer.weight.detach()

    released, ours = weights_after(2.0, 0.4), weights_after(1.0, 0.4)
    if optimiser is torch.optim.Adam:
        torch.testing.assert_close(weights_after(1.0, 0.2), released, rtol=0, atol=1e-12)
        assert (ours - released).abs().max() > 1e-4
    else:
        torch.testing.assert_close(ours, released, rtol=0, atol=1e-12)


def test_the_query_among_its_positives_counts_as_a_perfect_one() -> None:
    """A class with one item in the batch: with itself a loss near 0 that counts, without it no query at all."""
    embeddings, labels = torch.eye(3), torch.tensor([0, 1, 1])
    with_self, without = (SupAP(include_self=flag)(embeddings, labels).item() for flag in (True, False))
    assert 0 < with_self < without
    assert math.isclose(without, 1 - 1 / (1 + 1.0), abs_tol=1e-6)  # items 1, 2: one positive tied with one negative
