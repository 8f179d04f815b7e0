"""ROADMAP, Eq. (2), against the loops of its two parts."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from roadmap.losses import ROADMAP, Calibration, SupAP

from . import literal
from .cases import CASES, Case


def value_and_gradient(loss: torch.nn.Module, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    x = case.vectors.clone().requires_grad_()
    gallery_labels = None if case.gallery_labels is None else torch.tensor(case.gallery_labels)
    value = loss(x, torch.tensor(case.labels), ref_emb=case.gallery, ref_labels=gallery_labels)
    return value.detach(), torch.autograd.grad(value, x)[0]


@pytest.mark.parametrize("include_self", [True, False], ids=["with self", "without self"])
@pytest.mark.parametrize("average", ["violating", "all"])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_roadmap_is_its_transcription(case: Case, average: str, include_self: bool) -> None:
    loss = ROADMAP(lam=0.3, alpha=0.8, beta=0.5, average=average, include_self=include_self)  # type: ignore[arg-type]
    value, gradient = value_and_gradient(loss, case)

    queries = case.vectors.tolist()
    items = queries if case.gallery is None else case.gallery.tolist()
    s = literal.cosines(queries, items)
    P, N = literal.masks(case.labels, case.gallery_labels, include_self)
    pairs, _ = literal.masks(case.labels, case.gallery_labels, include_self=False)
    calibration = literal.calibration_printed if average == "all" else literal.calibration_violating
    expected, ds = literal.weighted_sum(0.7, literal.supap(s, P, N), 0.3, calibration(s, pairs, N, 0.8, 0.5))
    dq, dg = (torch.tensor(d, dtype=torch.float64) for d in literal.gradient_of_cosines(ds, queries, items))
    assert value.item() == pytest.approx(expected, abs=1e-11)
    torch.testing.assert_close(gradient, dq + dg if case.gallery is None else dq, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("case", [CASES[1], CASES[8]], ids=repr)
def test_ends_of_lam_are_the_two_losses(case: Case) -> None:
    for lam, part in ((0, SupAP()), (1, Calibration())):
        for ours, theirs in zip(
            value_and_gradient(ROADMAP(lam=lam), case), value_and_gradient(part, case), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_defaults_are_the_papers() -> None:
    loss = ROADMAP()
    assert (loss.lam, loss.supap.tau, loss.supap.rho, loss.supap.include_self) == (0.5, 0.01, 100.0, True)
    assert (loss.calibration.alpha, loss.calibration.beta, loss.calibration.average) == (0.9, 0.6, "violating")
    assert loss.supap.delta == pytest.approx(0.0459512)


def test_gradcheck_through_the_embeddings() -> None:
    case = CASES[1]
    labels = torch.tensor(case.labels)
    loss = ROADMAP(tau=0.1, rho=10.0)
    assert gradcheck(lambda x: loss(x, labels), case.vectors.clone().requires_grad_())
