"""The constants of the released SupAP: chosen by name of their numbers, and what they do to the bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from roadmap.losses import ROADMAP, SupAP, average_precision, saturation_point, supap
from roadmap.losses.named import named_loss
from roadmap.losses.rank_ap import h_minus

from . import literal
from .cases import CASES, Case, check_agrees, check_agrees_on_scores, score_table
from .test_oracle import batch

RELEASED: dict[str, Any] = json.loads((Path(__file__).parent / "released_constants.json").read_text())
CONSTANTS: dict[str, dict[str, float]] = {
    "offset 1.44": {"delta": 0.05, "start": 0.5, "offset": 1.44},
    "iNaturalist": {"delta": 0.05, "start": 0.0, "offset": 1.0},
}
BOTH = pytest.mark.parametrize("name", CONSTANTS)


@BOTH
def test_values_are_the_released_ones(name: str) -> None:
    embeddings, labels = batch()
    assert SupAP(**CONSTANTS[name])(embeddings, labels).item() == pytest.approx(RELEASED[name], abs=1e-10)
    # the released code adds its two parts 1 + 1
    whole = 2 * ROADMAP(lam=0.5, **CONSTANTS[name])(embeddings, labels)
    assert whole.item() == pytest.approx(RELEASED[f"ROADMAP, {name}"], abs=1e-10)


def test_gradients_are_the_released_ones() -> None:
    embeddings, labels = batch()
    SupAP(**CONSTANTS["offset 1.44"])(embeddings, labels).backward()
    x, released = embeddings.detach(), torch.tensor(RELEASED["gradient, offset 1.44"], dtype=torch.float64)
    # unit vectors that are not normalised again: the same gradient without its radial part
    tangential = released - (released * x).sum(1, keepdim=True) * x
    torch.testing.assert_close(embeddings.grad, tangential, rtol=0, atol=2e-9)


@BOTH
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_supap_with_these_constants_is_its_transcription(case: Case, name: str) -> None:
    constants = CONSTANTS[name]
    check_agrees(SupAP(**constants), lambda s, P, N: literal.supap(s, P, N, **constants), case, include_self=True)


@pytest.mark.parametrize("seed", range(3))
@BOTH
def test_the_function_takes_them_too(name: str, seed: int) -> None:
    constants = CONSTANTS[name]
    check_agrees_on_scores(
        lambda s, P, N: supap(s, P, N, **constants),
        lambda s, P, N: literal.supap(s, P, N, **constants),
        score_table(seed, ties=seed == 2),
    )


def test_the_defaults_are_eq_4() -> None:
    """1/2 from t = 0 on, and no jump where the linear part begins."""
    delta = saturation_point(0.01)
    t = torch.tensor([-1e-9, 0.0, delta, delta + 1e-9], dtype=torch.float64)
    below, tie, end, linear = h_minus(t, 0.01, 100.0, delta).tolist()
    assert tie - below == pytest.approx(0.5, abs=1e-6)
    assert linear == pytest.approx(end, abs=1e-6)
    assert end == pytest.approx(0.99 + 0.5)
    table = score_table(1)
    assert supap(*table).item() == supap(*table, start=0.5, offset=0.99 + 0.5).item()


def test_without_the_half_it_is_no_upper_bound() -> None:
    """A positive and a negative with equal scores: 1 - AP is 1/2."""
    scores, positives = torch.tensor([[0.3, 0.3]], dtype=torch.float64), torch.tensor([[True, False]])
    exact = 1 - average_precision(scores, positives).item()
    assert supap(scores, positives, ~positives, **CONSTANTS["offset 1.44"]).item() == pytest.approx(exact)
    assert supap(scores, positives, ~positives, **CONSTANTS["iNaturalist"]).item() == pytest.approx(1 / 3)
    assert exact > 1 / 3


def test_they_are_options_of_the_named_losses() -> None:
    for name in ("supap", "roadmap"):
        loss = named_loss(name, **CONSTANTS["iNaturalist"])
        part = loss.supap if name == "roadmap" else loss
        assert (part.delta, part.start, part.offset) == (0.05, 0.0, 1.0)
        assert "start=0.0, offset=1.0" in repr(loss)


@pytest.mark.parametrize("loss", [SupAP, ROADMAP])
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"start": -0.5}, ValueError, "start must be >= 0, got -0.5"),
        ({"start": None}, TypeError, "start must be a number, got NoneType None"),
        ({"offset": -1}, ValueError, "offset must be >= 0, got -1"),
        ({"offset": "1.44"}, TypeError, "offset must be a number, got str '1.44'"),
    ],
)
def test_other_things_are_refused(loss: Any, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        loss(**settings)
