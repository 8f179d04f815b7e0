"""Matryoshka against the literal sum over prefixes: values and gradients, galleries, memory, two passes, and refusals.

Several processes: tests/losses/test_distributed.py; what every loss must do: tests/test_contract.py.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from roadmap.losses import (
    HAPPIER,
    ROADMAP,
    Calibration,
    ClusteredLoss,
    Distributed,
    FastAP,
    Matryoshka,
    Memory,
    RecallAtK,
    SmoothAP,
    SphericalConstraint,
    SupAP,
    SupRank,
    TwoPass,
    average_precision,
)
from roadmap.losses.comparison import Comparison

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3, 2, 0])  # uneven, and 3 is alone
GALLERY_LABELS = torch.tensor([2, 0, 4, 1, 1, 0, 0])
DIMS, WEIGHTS = [2, 7, 4], [0.5, 1.0, 2.0]


def vectors(items: int, seed: int, dim: int = 7) -> Tensor:
    drawn = torch.randn(items, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn + 0.5).requires_grad_()


def literal(loss: nn.Module, x: Tensor, labels: Tensor, gallery: Tensor | None = None, items=None, **more) -> Tensor:
    """sum_d w_d loss(x[:, :d] / |x[:, :d]|), one after the other."""
    total = x.new_zeros(())
    for d, weight in zip(DIMS, WEIGHTS, strict=True):
        unit = x[:, :d] / x[:, :d].norm(dim=1, keepdim=True)
        held = None if gallery is None else gallery[:, :d] / gallery[:, :d].norm(dim=1, keepdim=True)
        total = total + weight * loss(unit, labels, None, held, items, **more)
    return total


def check(found: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    ours = torch.autograd.grad(found, inputs)
    theirs = torch.autograd.grad(expected, inputs)
    for mine, other in zip(ours, theirs, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "loss", [ROADMAP(), SupAP(include_self=False), SmoothAP(), Calibration(), FastAP(bins=7)], ids=repr
)
def test_it_is_the_literal_sum_over_prefixes_each_of_length_one(loss):
    x, gallery = vectors(9, 0), vectors(7, 1)
    nested = Matryoshka(loss, DIMS, WEIGHTS)
    check(nested(x, LABELS), literal(loss, x, LABELS), x)
    against = nested(x, LABELS, ref_emb=gallery, ref_labels=GALLERY_LABELS)
    check(against, literal(loss, x, LABELS, gallery, GALLERY_LABELS), x, gallery)


@pytest.mark.parametrize("loss", [ROADMAP(), SupAP(include_self=False)], ids=repr)
def test_places_and_mined_pairs_reach_every_prefix(loss):
    x = vectors(9, 0)
    nested = Matryoshka(loss, DIMS, WEIGHTS)
    own = torch.arange(9)
    check(nested(x, LABELS, ref_emb=x, ref_labels=LABELS, own=own), literal(loss, x, LABELS, x, LABELS, own=own), x)
    pairs = (torch.tensor([0, 4]), torch.tensor([2, 1]), torch.tensor([3, 7]))
    total = sum(w * loss(x[:, :d], LABELS, pairs) for d, w in zip(DIMS, WEIGHTS, strict=True))
    check(nested(x, LABELS, pairs), total, x)


def test_its_terms_come_to_its_value_and_add_up_over_rows():
    x = vectors(9, 0)
    nested = Matryoshka(ROADMAP(), DIMS, WEIGHTS)
    whole = nested.terms(Comparison.of(x, LABELS))
    assert len(whole.counts) == 3 * 3
    check(nested.value(whole), nested(x, LABELS), x)
    rows = [
        nested.terms(Comparison.of(x[some], LABELS[some], None, x, LABELS, torch.arange(9)[some]))
        for some in (slice(0, 4), slice(4, 9))
    ]
    check(nested.value(rows[0] + rows[1]), nested(x, LABELS), x)


def test_each_dimension_has_weights_of_its_own():
    made = []

    class Proxies(nn.Module):
        def __init__(self, d: int) -> None:
            super().__init__()
            self.embedding_size = d
            self.weight = nn.Parameter(torch.randn(5, d, dtype=torch.float64))
            made.append(d)

        def forward(self, x, labels, indices_tuple=None, ref_emb=None, ref_labels=None):
            unit = nn.functional.normalize(x, dim=1) @ nn.functional.normalize(self.weight, dim=1).T
            return nn.functional.cross_entropy(unit, labels)

    nested, x = Matryoshka(lambda d: Proxies(d), DIMS, WEIGHTS), vectors(9, 0)
    assert made == DIMS
    assert [tuple(p.shape) for p in nested.parameters()] == [(5, 2), (5, 7), (5, 4)]
    expected = sum(w * one(x[:, :d], LABELS) for d, w, one in zip(DIMS, WEIGHTS, nested.losses, strict=True))
    check(nested(x, LABELS), expected, x, *nested.parameters())
    assert not hasattr(nested, "terms")
    with pytest.raises(ValueError, match="a memory is no use to it"):
        Memory(nested, 5)
    with pytest.raises(ValueError, match=r"Proxies has weights for embeddings of 7 dimensions.*lambda d"):
        Matryoshka(Proxies(7), DIMS)
    with pytest.raises(ValueError, match=r"made for embeddings of \[2, 2, 2\] dimensions, but dims are \(2, 7, 4\)"):
        Matryoshka(lambda d: Proxies(2), DIMS)


@pytest.mark.parametrize("loss", [SupAP(include_self=False), FastAP(bins=7)], ids=repr)
def test_a_memory_holds_the_whole_vectors_once(loss):
    memory = Memory(Matryoshka(loss, DIMS, WEIGHTS), 20)
    first, second = vectors(9, 0), vectors(9, 1)
    memory(first, LABELS)
    found = memory(second, LABELS)
    assert memory.form == "joined"
    assert len(memory) == 18
    assert {tuple(buffer.shape)[1:] for name, buffer in memory.ring.state_dict().items() if buffer.ndim == 2} == {(7,)}
    gallery = torch.cat([second, first.detach()])
    held = torch.cat([LABELS, LABELS])
    check(found, literal(loss, second, LABELS, gallery, held, own=torch.arange(9)), second)


def test_a_loss_that_knows_no_places_is_added_to_its_memory():
    class Pairs(nn.Module):
        def forward(self, x, labels, indices_tuple=None, ref_emb=None, ref_labels=None):
            held, theirs = (x, labels) if ref_emb is None else (ref_emb, ref_labels)
            unit, others = nn.functional.normalize(x, dim=1), nn.functional.normalize(held, dim=1)
            return ((unit @ others.T) * (labels[:, None] != theirs)).relu().sum()

    memory = Memory(Matryoshka(Pairs(), [2, 7]), 20)
    assert memory.form == "added"
    x = vectors(9, 0)
    memory(x, LABELS)
    assert memory(x, LABELS).item() == pytest.approx(2 * memory.inner(x, LABELS).item())


def test_what_a_loss_adds_for_the_batch_alone_counts_once_beside_a_memory():
    class Pairs(nn.Module):
        def forward(self, x, labels, indices_tuple=None, ref_emb=None, ref_labels=None):
            held, theirs = (x, labels) if ref_emb is None else (ref_emb, ref_labels)
            unit, others = nn.functional.normalize(x, dim=1), nn.functional.normalize(held, dim=1)
            return ((unit @ others.T) * (labels[:, None] != theirs)).relu().sum()

    earlier, x = vectors(9, 0), vectors(9, 1)
    for nested in (
        Matryoshka(SphericalConstraint(Pairs(), weight=3.0), DIMS, WEIGHTS),
        Matryoshka(lambda d: SphericalConstraint(Pairs(), weight=3.0), DIMS, WEIGHTS),
    ):
        memory = Memory(nested, 20, form="added")
        memory(earlier, LABELS)
        beside = Matryoshka(Pairs(), DIMS, WEIGHTS)(x, LABELS, None, earlier.detach(), LABELS)
        check(memory(x, LABELS), nested(x, LABELS) + beside, x)
    plain = Matryoshka(Pairs(), DIMS)
    assert plain.against_memory is plain


@pytest.mark.parametrize("make", [SupRank, HAPPIER, lambda *shape: ClusteredLoss(SupAP(), *shape)])
def test_losses_beside_which_classes_have_vectors_say_their_size(make):
    with pytest.raises(ValueError, match="has weights for embeddings of 7 dimensions, and each of .* needs its own"):
        Matryoshka(make(4, 7), [2, 7])
    with pytest.raises(ValueError, match=r"made for embeddings of \[7, 7\] dimensions, but dims are \(2, 7\)"):
        Matryoshka(lambda d: make(4, 7), [2, 7])
    assert Matryoshka(lambda d: make(4, d), [7, 2]).embedding_size == 7


def test_a_loss_that_needs_the_whole_batch_is_not_shared_out_by_rows():
    assert not Distributed(Matryoshka(RecallAtK(mix=True), [2, 7])).by_rows
    assert Distributed(Matryoshka(RecallAtK(), [2, 7])).by_rows


def test_two_passes_give_the_gradient_of_one():
    torch.manual_seed(0)
    model, pictures = nn.Linear(5, 7).double(), torch.randn(9, 5, dtype=torch.float64)
    nested = Matryoshka(ROADMAP(), DIMS, WEIGHTS)
    check(TwoPass(nested, model, 4)(pictures, LABELS), nested(model(pictures), LABELS), *model.parameters())


def test_gradcheck_of_a_smooth_loss():
    x = vectors(5, 3)
    nested = Matryoshka(SmoothAP(tau=0.5), [3, 7], [1.0, 0.5])
    assert torch.autograd.gradcheck(lambda y: nested(y, LABELS[:5]), (x,))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(1, 7), min_size=1, max_size=4, unique=True))
def test_unit_weights_are_the_default_and_the_order_of_dims_does_not_matter(seed, dims):
    x = vectors(9, seed)
    found = Matryoshka(SupAP(), dims)(x, LABELS)
    torch.testing.assert_close(found, sum(SupAP()(x[:, :d], LABELS) for d in dims))
    torch.testing.assert_close(found, Matryoshka(SupAP(), dims[::-1], [1.0] * len(dims))(x, LABELS))


def test_one_whole_dimension_is_the_loss_itself():
    x = vectors(9, 0)
    assert torch.equal(Matryoshka(ROADMAP(), [7])(x, LABELS), ROADMAP()(x, LABELS))


def test_training_makes_short_prefixes_good():
    """What it is for: the first two of eight dimensions rank better than after training all eight alone."""

    def ap(loss: nn.Module, seed: int) -> float:
        torch.manual_seed(seed)
        x = torch.randn(24, 8).requires_grad_()
        labels, optimizer = torch.arange(24) % 4, torch.optim.Adam([x], lr=0.05)
        for _ in range(40):
            optimizer.zero_grad()
            loss(x, labels).backward()
            optimizer.step()
        unit = nn.functional.normalize(x.detach()[:, :2], dim=1)
        same = labels[:, None] == labels
        return float(average_precision(unit @ unit.T, same & ~torch.eye(24, dtype=torch.bool), ~same))

    gains = [ap(Matryoshka(Calibration(), [2, 8]), seed) - ap(Calibration(), seed) for seed in range(3)]
    assert min(gains) > 0
    assert sum(gains) / 3 > 0.15


def test_it_says_what_it_takes():
    class ByPaths(SupAP):
        takes_paths = True

    assert Matryoshka(ByPaths(), [2]).takes_paths
    assert not Matryoshka(SupAP(), [2]).takes_paths
    assert repr(Matryoshka(SupAP(), [2, 4])).startswith("Matryoshka(\n  dims=(2, 4), weights=(1.0, 1.0)")


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Matryoshka(SupAP, [2]), TypeError, r"loss must be an instance, got the class SupAP; use SupAP\(...\)"),
        (lambda: Matryoshka(SupAP(), []), ValueError, r"dims must be one or more different numbers, got \[\]"),
        (lambda: Matryoshka(SupAP(), [2, 2]), ValueError, "dims must be one or more different numbers"),
        (lambda: Matryoshka(SupAP(), [0]), ValueError, "dims must be >= 1, got 0"),
        (lambda: Matryoshka(SupAP(), [2.0]), TypeError, "dims must be an int"),
        (lambda: Matryoshka(SupAP(), [2, 4], [1]), ValueError, "there are 2 dims but 1 weights"),
        (lambda: Matryoshka(SupAP(), [2], [-1]), ValueError, "weights must be >= 0"),
        (lambda: Matryoshka(lambda d: d, [2]), TypeError, "loss must be an nn.Module, got int"),
        (lambda: Matryoshka(Matryoshka(SupAP(), [2]), [2]), ValueError, "already; give all dims to one"),
        (lambda: Matryoshka(Distributed(SupAP()), [2]), ValueError, r"write Distributed\(Matryoshka\(...\), ...\)"),
        (lambda: Matryoshka(Memory(SupAP(), 5), [2]), ValueError, r"write Memory\(Matryoshka\(...\), ...\)"),
        (
            lambda: Matryoshka(SupAP(), [2, 9])(vectors(9, 0), LABELS),
            ValueError,
            r"embeddings have 7 dimensions, fewer than the 9 of dims=\(2, 9\)",
        ),
        (lambda: Matryoshka(SupAP(), [2, 8])(vectors(9, 0), LABELS), ValueError, "fewer than the 8 of dims"),
        (lambda: Matryoshka(SupAP(), [2])(torch.randn(9), LABELS), ValueError, r"shape \(items, dimensions\)"),
    ],
)
def test_what_cannot_be_is_refused_in_words(build, error, message):
    with pytest.raises(error, match=message):
        build()
