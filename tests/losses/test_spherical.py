"""SEC against loops, its average over calls, and that nothing else moves the lengths."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck

from roadmap.losses import (
    HAPPIER,
    ROADMAP,
    ClusteredLoss,
    Distributed,
    FastAP,
    HordeContrastive,
    Memory,
    SphericalConstraint,
    SupRank,
    TripletSCT,
)
from roadmap.losses.named import OWN, named_loss, required_options

from .cases import CASES, Case, drawn

LABELS = torch.tensor([0, 0, 1, 1, 1, 2])
FILLED = {"num_classes": 9, "embedding_size": 3}


class Nothing(nn.Module):
    """A loss of 0: what is left is the constraint."""

    def forward(self, embeddings: Tensor, *others: Any, **more: Any) -> Tensor:
        return (embeddings * 0).sum()


def by_loops(vectors: list[list[float]], mu: float | None = None) -> tuple[float, list[list[float]]]:
    """mean (|x_i| - mu)^2 and its gradient 2/B (|x_i| - mu) x_i / |x_i|; mu, the mean length unless said, is held."""
    lengths = [math.sqrt(sum(a * a for a in x)) for x in vectors]
    centre = sum(lengths) / len(lengths) if mu is None else mu
    value = sum((length - centre) ** 2 for length in lengths) / len(lengths)
    gradient = [
        [2 / len(vectors) * (length - centre) * a / length for a in x]
        for x, length in zip(vectors, lengths, strict=True)
    ]
    return value, gradient


def value_and_gradient(loss: nn.Module, x: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    value = loss(leaf, *others, **more)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_spherical_constraint_is_its_transcription(case: Case) -> None:
    gallery: dict[str, Tensor] = {}
    if case.gallery is not None:
        gallery = {"ref_emb": case.gallery, "ref_labels": torch.tensor(case.gallery_labels)}
    arguments = case.vectors, torch.tensor(case.labels)
    plain, pull = value_and_gradient(ROADMAP(), *arguments, **gallery)
    value, gradient = value_and_gradient(SphericalConstraint(ROADMAP(), weight=0.7), *arguments, **gallery)
    expected, radial = by_loops(case.vectors.tolist())
    assert value.item() == pytest.approx(plain.item() + 0.7 * expected, abs=1e-12)
    torch.testing.assert_close(gradient, pull + 0.7 * torch.tensor(radial, dtype=torch.float64), rtol=1e-9, atol=1e-11)


def test_its_gradient_is_that_of_the_variance_of_the_lengths() -> None:
    """mu is held, and held or not its derivative is zero: the deviations from a mean add up to nothing."""
    x = drawn(6, 3, 0).requires_grad_()
    assert gradcheck(lambda x: SphericalConstraint(ROADMAP())(x, LABELS), x)
    loose = torch.linalg.vector_norm(x, dim=1).var(correction=0)
    (expected,) = torch.autograd.grad(loose, x)
    _, gradient = value_and_gradient(SphericalConstraint(Nothing()), x.detach(), LABELS)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("name", [*OWN, "multi_similarity", "contrastive_xbm"])
def test_the_constraint_alone_moves_the_lengths(name: str) -> None:
    """The gradient of a loss is orthogonal to every vector; with the constraint its radial part is the constraint's."""
    torch.manual_seed(0)
    told = {"num_classes": int(LABELS.max()) + 1, "embedding_size": 3}
    plain = named_loss(name, **{option: told[option] for option in required_options(name)}).double()
    x = drawn(6, 3, 7)
    unit = nn.functional.normalize(x, dim=1)
    _, pull = value_and_gradient(plain, x, LABELS)
    assert pull.abs().sum() > 1e-3
    torch.testing.assert_close((pull * unit).sum(1), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-9)
    _, gradient = value_and_gradient(SphericalConstraint(plain), x, LABELS)
    radial = (torch.tensor(by_loops(x.tolist())[1], dtype=torch.float64) * unit).sum(1)
    torch.testing.assert_close((gradient * unit).sum(1), radial, rtol=1e-9, atol=1e-9)


def test_lengths_come_together_and_only_then() -> None:
    spreads = {}
    for name, loss in (("plain", ROADMAP()), ("held", SphericalConstraint(ROADMAP()))):
        x = drawn(6, 3, 1).requires_grad_()
        for _ in range(60):
            (gradient,) = torch.autograd.grad(loss(x, LABELS), x)
            x = (x - 0.05 * gradient).detach().requires_grad_()
        spreads[name] = torch.linalg.vector_norm(x, dim=1).std().item()
    assert spreads["held"] < 0.4 * spreads["plain"]


def test_unit_vectors_leave_nothing_to_constrain() -> None:
    x = nn.functional.normalize(drawn(6, 3, 2), dim=1)
    value, gradient = value_and_gradient(SphericalConstraint(Nothing()), x, LABELS)
    assert value.item() == pytest.approx(0, abs=1e-30)
    assert gradient.abs().max().item() < 1e-15
    assert SphericalConstraint(ROADMAP()).uses_lengths


def test_the_average_over_calls_is_its_transcription() -> None:
    loss = SphericalConstraint(Nothing(), momentum=0.25).double()
    mu = None
    for seed in range(4):
        x = drawn(5, 3, seed)
        mean = sum(math.sqrt(sum(a * a for a in row)) for row in x.tolist()) / 5
        mu = mean if mu is None else 0.75 * mu + 0.25 * mean
        value, gradient = value_and_gradient(loss, x, torch.arange(5))
        expected, radial = by_loops(x.tolist(), mu)
        assert value.item() == pytest.approx(expected, abs=1e-13)
        torch.testing.assert_close(gradient, torch.tensor(radial, dtype=torch.float64))
        assert loss.mu.item() == pytest.approx(mu)


def test_evaluation_leaves_the_average_as_it_is() -> None:
    loss = SphericalConstraint(Nothing(), momentum=0.5).double()
    x, y, labels = drawn(5, 3, 0), drawn(5, 3, 1), torch.arange(5)
    loss.eval()
    assert loss(x, labels).item() == pytest.approx(by_loops(x.tolist())[0])  # no call yet: its own mean
    assert loss.mu.isnan()
    loss.train()
    loss(x, labels)
    mu = loss.mu.item()
    loss.eval()
    assert loss(y, labels).item() == pytest.approx(by_loops(y.tolist(), mu)[0])
    assert loss.mu.item() == mu


def test_the_average_is_saved_and_an_empty_batch_does_not_move_it() -> None:
    loss = SphericalConstraint(ROADMAP(), momentum=0.5)
    assert set(loss.state_dict()) == {"mu"}
    x = drawn(6, 3, 0).float()
    loss(x, LABELS)
    again = SphericalConstraint(ROADMAP(), momentum=0.5)
    again.load_state_dict(copy.deepcopy(loss.state_dict()))
    empty = torch.zeros(0, 3, requires_grad=True)
    loss(empty, LABELS[:0]).backward()
    assert empty.grad is not None
    assert loss(2 * x, LABELS).item() == again(2 * x, LABELS).item()
    assert not SphericalConstraint(ROADMAP()).state_dict()


def test_half_precision_has_lengths_in_float32() -> None:
    x = (1000 * drawn(6, 3, 4)).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = SphericalConstraint(Nothing())(x, LABELS)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(by_loops(x.tolist())[0], rel=1e-5)


@given(st.integers(0, 2**31), st.floats(0.1, 10))
def test_properties(seed: int, scale: float) -> None:
    """Never negative; of the second degree in the lengths; blind to directions."""
    x, labels, loss = drawn(7, 3, seed % 10_000), torch.arange(7), SphericalConstraint(Nothing())
    value = loss(x, labels).item()
    assert value >= 0
    assert loss(scale * x, labels).item() == pytest.approx(scale**2 * value, rel=1e-9)
    assert loss(x.flip(1), labels).item() == pytest.approx(value, rel=1e-9)


# --- with a memory


@pytest.mark.parametrize("inner", [ROADMAP, TripletSCT, HordeContrastive])
def test_a_memory_joins_what_can_be_joined_and_lengths_count_once(inner: type[nn.Module]) -> None:
    held, plain = Memory(SphericalConstraint(inner()), size=12), Memory(inner(), size=12)
    assert held.form == plain.form == "joined"
    for seed in range(3):
        x = drawn(6, 3, seed)
        expected = plain(x, LABELS).item() + by_loops(x.tolist())[0]
        assert held(x, LABELS).item() == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("inner", [FastAP, lambda: named_loss("contrastive_xbm"), lambda: named_loss("sec", **FILLED)])
def test_in_the_added_form_lengths_count_once(inner: Any) -> None:
    loss = inner()
    if not isinstance(loss, SphericalConstraint):
        loss = SphericalConstraint(loss)
    form = "added"
    held, plain = Memory(loss, size=12, form=form), Memory(loss.against_memory, size=12, form=form)
    for seed in range(3):
        x = drawn(6, 3, seed)
        expected = plain(x, LABELS).item() + by_loops(x.tolist())[0]
        assert held(x, LABELS).item() == pytest.approx(expected, abs=1e-11)
    assert Memory(SphericalConstraint(named_loss("contrastive_xbm")), size=4).form == "added"


def test_what_the_loss_inside_adds_for_the_batch_alone_counts_once_too() -> None:
    inner = named_loss("contrastive_irt")
    held, plain = Memory(SphericalConstraint(inner), size=12), Memory(inner, size=12)
    for seed in range(3):
        x = drawn(6, 3, seed)
        expected = plain(x, LABELS).item() + by_loops(x.tolist())[0]
        assert held(x, LABELS).item() == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("inner", [SupRank, HAPPIER, lambda *shape: ClusteredLoss(ROADMAP(), *shape)])
def test_a_memory_takes_ranks_with_class_vectors_within(inner: Any) -> None:
    torch.manual_seed(0)
    loss = inner(3, 3).double()
    held, plain = Memory(SphericalConstraint(loss), size=12), Memory(loss, size=12)
    assert held.form == plain.form == "joined"
    for seed in range(3):
        x = drawn(6, 3, seed)
        expected = plain(x, LABELS).item() + by_loops(x.tolist())[0]
        assert held(x, LABELS).item() == pytest.approx(expected, abs=1e-11)


def test_a_memory_refuses_class_weights_within() -> None:
    loss = named_loss("sec", **FILLED, of="proxy_nca")
    assert loss.embedding_size == 3
    with pytest.raises(ValueError, match="a memory is no use to it"):
        Memory(loss, size=4)


# --- by name


def test_by_name_any_loss_takes_its_place() -> None:
    loss = named_loss("sec", **FILLED, of="roadmap", weight=0.5, options={"lam": 0.2})
    assert isinstance(loss, SphericalConstraint)
    assert (loss.weight, loss.momentum) == (0.5, 1.0)
    assert isinstance(loss.loss, ROADMAP)
    assert loss.loss.lam == 0.2
    proxies = named_loss("sec", **FILLED, of="normalised_softmax")
    assert [tuple(p.shape) for p in proxies.parameters()] == [(3, 9)]


def test_on_the_command_line() -> None:
    composition = pytest.importorskip("roadmap.config.composition", reason="the extra `train` is not installed")
    words = ["loss=sec", "loss.of=roadmap", "loss.options={lam: 0.3}", "loss.weight=0.5", "memory=xbm"]
    settings = composition.settings_from(words)
    composition.check_loss(settings)
    loss = named_loss(**(settings.loss | FILLED))
    assert (loss.loss.lam, loss.weight) == (0.3, 0.5)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="loss.of=roadmp: unknown loss 'roadmp', did you mean 'roadmap'"):
        composition.check_loss(composition.settings_from(["loss=sec", "loss.of=roadmp"]))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SphericalConstraint(ROADMAP), TypeError, r"loss must be an instance, got the class ROADMAP"),
        (lambda: SphericalConstraint(ROADMAP(), weight=-1.0), ValueError, "weight must be >= 0, got -1"),
        (lambda: SphericalConstraint(ROADMAP(), momentum=0.0), ValueError, "momentum must be > 0, got 0"),
        (lambda: SphericalConstraint(ROADMAP(), momentum=1.5), ValueError, "momentum must be <= 1, got 1.5"),
        (
            lambda: SphericalConstraint(Distributed(ROADMAP())),
            ValueError,
            r"a Distributed goes around the constraint: write Distributed\(SphericalConstraint\(loss\), ...\)",
        ),
        (lambda: SphericalConstraint(Memory(ROADMAP(), 4)), ValueError, "a Memory goes around the constraint"),
        (
            lambda: SphericalConstraint(SphericalConstraint(ROADMAP())),
            ValueError,
            "the loss has the constraint already; pass the loss inside it",
        ),
        (
            lambda: named_loss("sec", **FILLED, of="sec"),
            ValueError,
            "of=sec wraps a loss itself; name the loss that it wraps",
        ),
        (lambda: named_loss("sec", **FILLED, of="roadmp"), ValueError, "did you mean 'roadmap'"),
        (
            lambda: named_loss("sec", **FILLED, of="supap", options={"taau": 1}),
            ValueError,
            "of=supap: the loss supap has no option 'taau', did you mean 'tau'",
        ),
    ],
)
def test_what_it_refuses(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_its_words() -> None:
    assert repr(SphericalConstraint(Nothing(), 0.5)).startswith("SphericalConstraint(\n  weight=0.5, momentum=1.0\n")
