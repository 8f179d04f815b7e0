"""Values computed outside this project, by the released implementations and by other loops (reference_values.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roadmap.losses import (
    ROADMAP,
    BlackBoxAP,
    Calibration,
    FastAP,
    SmoothAP,
    SoftBinAP,
    SupAP,
    average_precision,
    calibration,
    smoothap,
    supap,
)
from roadmap.losses.comparison import Comparison

REFERENCE: dict[str, Any] = json.loads((Path(__file__).parent / "reference_values.json").read_text())
BATCH = REFERENCE["batch"]
TOYS = [pytest.param(toy, id=toy["name"]) for toy in REFERENCE["toys"]]


def batch() -> tuple[Tensor, Tensor]:
    return torch.tensor(BATCH["embeddings"], dtype=torch.float64, requires_grad=True), torch.tensor(BATCH["labels"])


@pytest.mark.parametrize(
    ("name", "loss"),
    [("SmoothAP_tau0.01", SmoothAP()), ("SupAP_default", SupAP(delta=0.05)), ("Calibration_0.9_0.6", Calibration())],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_released_values_and_gradients(name: str, loss: nn.Module) -> None:
    embeddings, labels = batch()
    value = loss(embeddings, labels)
    value.backward()
    assert value.item() == pytest.approx(BATCH["released"][name], abs=1e-10)
    # The released losses take unit vectors as they are, ours normalise: the same gradient without its radial part.
    x = embeddings.detach()
    released = torch.tensor(BATCH["released_gradients"][name], dtype=torch.float64)
    tangential = released - (released * x).sum(1, keepdim=True) * x
    torch.testing.assert_close(embeddings.grad, tangential, rtol=0, atol=2e-9)


@pytest.mark.parametrize("include_self", [True, False])
def test_values_of_the_equations(include_self: bool) -> None:
    embeddings, labels = batch()
    expected = BATCH["equations"]["with_self" if include_self else "without_self"]
    c = Comparison.of(embeddings, labels)
    exact = 1 - average_precision(c.scores, c.positives(include_self=include_self), c.negatives)
    assert exact.item() == pytest.approx(expected["L_AP_eq1"], abs=1e-12)
    smooth = SmoothAP(include_self=include_self)(embeddings, labels)
    assert smooth.item() == pytest.approx(expected["SmoothAP"], abs=1e-12)
    sup = SupAP(delta=0.05, include_self=include_self)(embeddings, labels)
    assert sup.item() == pytest.approx(expected["SupAP_eq5_tie_second"], abs=1e-12)
    # Their Eq. (7) with self pairs an item with itself, which ours never does: reached through the function.
    calibrated = calibration(c.scores, c.positives(include_self=include_self), c.negatives, average="all")
    assert calibrated.item() == pytest.approx(expected["calibration_eq7"], abs=1e-12)


def test_roadmap_of_the_equations() -> None:
    embeddings, labels = batch()
    loss = ROADMAP(average="all", delta=0.05, include_self=False)
    expected = BATCH["equations"]["without_self"]["ROADMAP_eq2_lambda0.5"]
    assert loss(embeddings, labels).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "loss", "tolerance"),
    [
        ("FastAP_10bins", FastAP(include_self=False), 1e-6),
        ("SoftBinAP_20", SoftBinAP(), 1e-6),
        # The released value is 1.5e-6 away from the exact AP, which it should be without a margin, and ours is.
        ("BlackBoxAP_lambda4_margin0", BlackBoxAP(margin=0.0), 2e-6),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_released_baselines(name: str, loss: nn.Module, tolerance: float) -> None:
    embeddings, labels = batch()
    assert loss(embeddings, labels).item() == pytest.approx(BATCH["released_float32"][name], abs=tolerance)


def test_released_exact_ap() -> None:
    embeddings, labels = batch()
    value = BlackBoxAP(margin=0.0)(embeddings, labels)
    assert value.item() == pytest.approx(BATCH["released"]["AP_heaviside"], abs=1e-12)


def test_released_pair_loss() -> None:
    """The released one sums s over the negatives above 0.5; XBM's equation, and ours, s - 0.5: the same gradient."""
    pml = pytest.importorskip("roadmap.losses.pml", reason="needs pytorch-metric-learning")
    embeddings, labels = batch()
    c = Comparison.of(embeddings, labels)
    above = int(((c.scores > 0.5) & c.negatives).sum())
    value = pml.contrastive_xbm(0.5)(embeddings, labels).item() + 0.5 * above / len(labels)
    assert value == pytest.approx(BATCH["released_float32"]["PairLoss_0.5"], abs=1e-6)


@pytest.mark.parametrize("toy", TOYS)
def test_toy_scores(toy: dict[str, Any]) -> None:
    scores = torch.tensor([toy["scores"]], dtype=torch.float64, requires_grad=True)
    positives = torch.tensor([toy["relevant"]]) == 1
    expected = toy["equations"]
    exact = 1 - average_precision(scores, positives, ~positives)
    smooth = smoothap(scores, positives, ~positives)
    sup = supap(scores, positives, ~positives, delta=0.05)
    if not expected:  # no positive: nothing counts
        assert exact.isnan()
        assert (smooth.item(), sup.item()) == (0, 0)
        return
    assert exact.item() == pytest.approx(expected["L_AP_eq1"], abs=1e-12)
    assert smooth.item() == pytest.approx(expected["SmoothAP"], abs=1e-12)
    assert sup.item() == pytest.approx(expected["SupAP_eq5_tie_second"], abs=1e-12)
    if "calibration_eq7" in expected:
        calibrated = calibration(scores, positives, ~positives, average="all")
        assert calibrated.item() == pytest.approx(expected["calibration_eq7"], abs=1e-12)
    for name, loss in (("grad_SmoothAP", smooth), ("grad_SupAP", sup)):
        if name in expected:
            gradient = torch.autograd.grad(loss, scores)[0]
            torch.testing.assert_close(
                gradient[0], torch.tensor(expected[name], dtype=torch.float64), rtol=1e-7, atol=1e-9
            )
