"""Who is compared with whom, and in which precision."""

from __future__ import annotations

import pytest
import torch

from roadmap.losses import SupAP
from roadmap.losses.comparison import Comparison

from . import literal
from .cases import CASES, Case


@pytest.mark.parametrize("include_self", [True, False], ids=["with self", "without self"])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_scores_and_masks_are_the_literal_ones(case: Case, include_self: bool) -> None:
    gallery_labels = None if case.gallery_labels is None else torch.tensor(case.gallery_labels)
    c = Comparison.of(case.vectors, torch.tensor(case.labels), None, case.gallery, gallery_labels)
    queries = case.vectors.tolist()
    expected = literal.cosines(queries, queries if case.gallery is None else case.gallery.tolist())
    torch.testing.assert_close(c.scores, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)
    P, N = literal.masks(case.labels, case.gallery_labels, include_self)
    assert c.positives(include_self=include_self).tolist() == P
    assert c.negatives.tolist() == N


def test_a_square_gallery_is_not_the_batch() -> None:
    """The query is no item of another set, even one of the same size and labels: there is no self to leave out."""
    labels = torch.tensor([0, 0, 1])
    c = Comparison.of(torch.randn(3, 4), labels, ref_emb=torch.randn(3, 4), ref_labels=labels)
    assert c.positives(include_self=False).tolist() == [[True, True, False], [True, True, False], [False, False, True]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_are_float32(dtype: torch.dtype) -> None:
    x = torch.randn(40, 64).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = Comparison.of(x, torch.arange(40)).scores
    unit = torch.nn.functional.normalize(x.double(), dim=1)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), unit @ unit.T, rtol=0, atol=1e-6)


def test_scores_of_mixed_precisions_take_the_wider() -> None:
    half, double = torch.randn(3, 4).half(), torch.randn(5, 4, dtype=torch.float64)
    c = Comparison.of(half, torch.arange(3), ref_emb=double, ref_labels=torch.arange(5))
    assert c.scores.dtype == torch.float64


@pytest.fixture
def _precision_restored() -> object:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_precision_restored")
@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_the_users_matmul_setting_is_left_as_it_was(setting: str) -> None:
    torch.set_float32_matmul_precision(setting)
    SupAP()(torch.randn(4, 3), torch.tensor([0, 0, 1, 1]))
    assert torch.get_float32_matmul_precision() == setting


@pytest.mark.gpu
@pytest.mark.usefixtures("_precision_restored")
def test_scores_are_not_tf32() -> None:
    torch.set_float32_matmul_precision("high")
    x = torch.randn(256, 512, device="cuda")
    scores = Comparison.of(x, torch.arange(256, device="cuda")).scores
    unit = torch.nn.functional.normalize(x.double(), dim=1)
    torch.testing.assert_close(scores.double(), unit @ unit.T, rtol=0, atol=1e-6)


@pytest.mark.gpu
def test_a_zero_vector_on_a_gpu_makes_the_loss_nan() -> None:
    x = torch.randn(4, 3, device="cuda")
    x[1] = 0
    assert SupAP()(x, torch.tensor([0, 0, 1, 1], device="cuda")).isnan()


def test_a_zero_vector_makes_a_compiled_loss_nan() -> None:
    """Where nobody can look at values, a vector without direction must not pass unnoticed."""
    x = torch.randn(4, 3)
    x[3] = 0
    loss = torch.compile(SupAP(include_self=False), backend="eager")
    assert loss(x, torch.tensor([0, 0, 1, 2])).isnan()


def test_triplets_and_pairs_of_a_miner_choose_the_pairs() -> None:
    x, labels = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
    triplets = torch.tensor([0, 2]), torch.tensor([1, 3]), torch.tensor([2, 0])
    c = Comparison.of(x, labels, triplets)
    assert c.positives(include_self=False).nonzero().tolist() == [[0, 1], [2, 3]]
    assert c.negatives.nonzero().tolist() == [[0, 2], [2, 0]]
    # A mined "positive" of another class is none; the query stays one of its own positives.
    pairs = torch.tensor([1, 1]), torch.tensor([0, 2]), torch.tensor([3]), torch.tensor([0])
    c = Comparison.of(x, labels, pairs)
    assert c.positives(include_self=False).nonzero().tolist() == [[1, 0]]
    assert c.positives(include_self=True).nonzero().tolist() == [[0, 0], [1, 0], [1, 1], [2, 2], [3, 3]]
    assert c.negatives.nonzero().tolist() == [[3, 0]]


def test_integer_labels_of_any_type_compare() -> None:
    c = Comparison.of(
        torch.randn(2, 3),
        torch.tensor([1, 200], dtype=torch.uint8),
        ref_emb=torch.randn(2, 3),
        ref_labels=torch.tensor([200, 456]),
    )
    assert c.relevant.tolist() == [[False, False], [True, False]]
