"""HAPPIER: hierarchical AP and clusters, against the loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import gradcheck

from roadmap.losses import HAPPIER, HierarchicalAP

from . import graded_literal as loops
from . import literal
from .cases import drawn
from .graded_cases import TREES, UNKNOWN, GradedCase, paths, sets


@pytest.mark.parametrize("case", [TREES[0], TREES[5], TREES[6], TREES[9], TREES[12]], ids=repr)
@pytest.mark.parametrize("lam", [0.1, 1.0])
def test_happier_is_its_transcription(case: GradedCase, lam: float) -> None:
    torch.manual_seed(0)
    loss = HAPPIER(7, 3, lam=lam, temperature=0.2, include_self=False).double()
    x = case.vectors.clone().requires_grad_()
    value = loss(x, case.labels, ref_emb=case.gallery, ref_labels=case.gallery_labels)
    value.backward()

    queries, proxies = case.vectors.tolist(), loss.clusters.proxies.tolist()
    items = queries if case.gallery is None else case.gallery.tolist()
    rows, columns = (labels.tolist() for labels in case.both)
    grades = loops.tree_grades(rows, columns, case.own, False, "shared")
    ranked, ds = loops.h_ap_loss(case.scores, grades)
    drawn_together, dc = loops.cluster_loss(literal.cosines(queries, proxies), [row[-1] for row in rows], 0.2)
    dq, dg = (torch.tensor(d, dtype=torch.float64) for d in literal.gradient_of_cosines(ds, queries, items))
    cq, cp = (torch.tensor(d, dtype=torch.float64) for d in literal.gradient_of_cosines(dc, queries, proxies))
    assert value.item() == pytest.approx((1 - lam) * ranked + lam * drawn_together, abs=1e-11)
    at_queries = dq + dg if case.gallery is None else dq
    torch.testing.assert_close(x.grad, (1 - lam) * at_queries + lam * cq, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(loss.clusters.proxies.grad, lam * cp, rtol=1e-9, atol=1e-10)


def test_its_options_are_those_of_hierarchical_ap() -> None:
    options: dict[str, Any] = {
        "relevance": "nested", "alpha": 0.5, "tau": 0.02, "rho": 7.0, "delta": 0.3, "include_self": False,
        "start": 0.25, "offset": 1.3, "pull": True, "beta": 3.0, "gamma": 0.2, "leak": 0.7,
    }  # fmt: skip
    h_ap, alone = HAPPIER(7, 3, **options).h_ap, HierarchicalAP(**options)
    assert h_ap.graded_rule == alone.graded_rule
    assert h_ap.relevance == alone.relevance
    assert h_ap.binary.include_self is alone.binary.include_self is False
    assert h_ap.graded_rule != HierarchicalAP().graded_rule
    x, labels = drawn(9, 3, 1), UNKNOWN
    assert HAPPIER(7, 3, lam=0.0, **options)(x, labels).item() == alone(x, labels).item()


def test_lam_of_zero_is_hierarchical_ap() -> None:
    x, labels = drawn(9, 3, 1), UNKNOWN
    assert HAPPIER(7, 3, lam=0.0)(x, labels).item() == HierarchicalAP()(x, labels).item()


def test_plain_labels_are_classes() -> None:
    torch.manual_seed(0)
    loss, x, labels = HAPPIER(3, 3).double(), drawn(6, 3, 2), torch.tensor([0, 1, 2, 0, 1, 0])
    assert loss(x, labels).item() == pytest.approx(loss(x, labels[:, None]).item(), abs=1e-12)


def test_gradcheck_of_the_clusters() -> None:
    torch.manual_seed(0)
    loss, labels = HAPPIER(7, 3, temperature=0.5, tau=0.1, rho=10.0).double(), paths(0, 0, 1, 2, 4)
    assert gradcheck(lambda x: loss(x, labels), drawn(5, 3, 3).requires_grad_())


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "lam": ({"lam": 1.5}, ValueError, r"lam must be <= 1: the loss is \(1 - lam\) H-AP \+ lam clusters, got 1.5"),
    "temperature": ({"temperature": 0}, ValueError, "temperature must be > 0, got 0"),
    "classes": ({"num_classes": 0}, ValueError, "num_classes must be >= 1, got 0"),
    "relevance": ({"relevance": "x"}, ValueError, "relevance must be 'shared'"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_cannot_be(name: str) -> None:
    options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        HAPPIER(**{"num_classes": 4, "embedding_size": 3} | options)


def test_calls_that_cannot_be() -> None:
    loss, x = HAPPIER(4, 3), drawn(3, 3, 0)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 4\), .* got 4; number the training"):
        loss(x, paths(0, 1, 4))
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 4\), .* got -1; number the training"):
        loss(x, torch.tensor([0, 1, -1]))
    with pytest.raises(ValueError, match="sets of labels have none; use HierarchicalAP for them"):
        loss(x, sets("0", "1", "2"))
    with pytest.raises(ValueError, match="embeddings have 5 dimensions but the loss was made with embedding_size=3"):
        loss(drawn(3, 5, 0), paths(0, 1, 2))
