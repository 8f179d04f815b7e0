"""One contract for every loss, ours and those of pytorch-metric-learning: what a training loop may rely on.

The table says in words where a loss is excused from a clause, and the excuse itself is tested.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from roadmap.losses import (
    HAPPIER,
    ROADMAP,
    BlackBoxAP,
    Calibration,
    ClusteredLoss,
    FastAP,
    GradedNDCG,
    HierarchicalAP,
    HordeContrastive,
    Matryoshka,
    RecallAtK,
    SmoothAP,
    SoftBinAP,
    SphericalConstraint,
    SupAP,
    SupNDCG,
    SupRank,
    TripletSCT,
)

try:
    from roadmap.losses.pml import RECIPES
except ImportError:  # the extra is not installed: our own losses still have their contract
    RECIPES = {}

DIMENSIONS, CLASSES = 6, 5
LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3, 2, 0])  # uneven, and 3 is alone
GALLERY_LABELS = torch.tensor([2, 0, 4, 1, 1, 0, 0])


@dataclass(frozen=True)
class Contract:
    """How to make a loss, and from which clauses it is excused, with the reason."""

    make: Callable[[], nn.Module]
    no_gallery: str = ""
    not_zero_without_positives: str = ""
    no_gradient_at_first: str = ""
    drawn_at_random: bool = False
    not_zero_alone: str = ""


class InATree(nn.Module):
    """A loss whose labels are paths: two classes lie under one."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(
        self, x: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
    ) -> Tensor:
        paths = None if ref_labels is None else self.paths(ref_labels)
        value: Tensor = self.loss(x, self.paths(labels), None, ref_emb, paths)
        return value

    @staticmethod
    def paths(labels: Tensor) -> Tensor:
        wide = labels.long()  # not every type can be divided
        return torch.stack([wide // 2, wide], 1).to(labels)


NEGATIVES_COUNT = "its second term pushes negatives, whether or not there are positives"
LENGTHS_COUNT = "it holds the lengths of the embeddings, whether or not there are positives"
PROXIES_COUNT = "its second term compares every item with class weights, whether or not there are positives"
OWN_WEIGHTS = "it compares embeddings with its own class weights, not with other embeddings"

CONTRACTS: dict[str, Contract] = {
    "ROADMAP": Contract(ROADMAP, not_zero_without_positives=NEGATIVES_COUNT),
    "ROADMAP, Eq. 7 as printed": Contract(
        lambda: ROADMAP(average="all", include_self=False), not_zero_without_positives=NEGATIVES_COUNT
    ),
    "SupAP": Contract(SupAP),
    "SupAP without self": Contract(lambda: SupAP(include_self=False)),
    "SmoothAP": Contract(SmoothAP),
    "Calibration": Contract(Calibration, not_zero_without_positives=NEGATIVES_COUNT),
    "Calibration, Eq. 7 as printed": Contract(
        lambda: Calibration(average="all"), not_zero_without_positives=NEGATIVES_COUNT
    ),
    "FastAP": Contract(lambda: FastAP(bins=7)),
    "SoftBinAP": Contract(lambda: SoftBinAP(bins=8)),
    "FastAP with self": Contract(lambda: FastAP(bins=7, include_self=True)),
    "BlackBoxAP": Contract(BlackBoxAP),
    "HierarchicalAP": Contract(HierarchicalAP),
    "HierarchicalAP, paths": Contract(lambda: InATree(HierarchicalAP(pull=True))),
    "HAPPIER, paths": Contract(
        lambda: InATree(HAPPIER(CLASSES, DIMENSIONS)),
        not_zero_alone=PROXIES_COUNT,
        not_zero_without_positives=PROXIES_COUNT,
    ),
    "GradedNDCG": Contract(GradedNDCG),
    "GradedNDCG, paths": Contract(lambda: InATree(GradedNDCG(include_self=False))),
    "BlackBoxAP, perturbed at random": Contract(lambda: BlackBoxAP(perturbation="random"), drawn_at_random=True),
    "TripletSCT": Contract(TripletSCT),
    "TripletSCT, as printed": Contract(lambda: TripletSCT(ceiling=None, copies=None)),
    "TripletSCT, semi-hard negatives": Contract(lambda: TripletSCT("shn")),
    "HordeContrastive": Contract(HordeContrastive, not_zero_without_positives=NEGATIVES_COUNT),
    "SphericalConstraint": Contract(lambda: SphericalConstraint(SupAP()), not_zero_without_positives=LENGTHS_COUNT),
    "Matryoshka": Contract(lambda: Matryoshka(ROADMAP(), [2, 6], [0.5, 1]), not_zero_without_positives=NEGATIVES_COUNT),
    "SupNDCG": Contract(SupNDCG),
    "RecallAtK": Contract(RecallAtK),
    "RecallAtK, mixed": Contract(lambda: RecallAtK(tau_k=(1.0, 2.0, 4.0, 8.0, 16.0), mix=True), drawn_at_random=True),
    "SupRank": Contract(
        lambda: SupRank(CLASSES, DIMENSIONS), not_zero_without_positives=PROXIES_COUNT, not_zero_alone=PROXIES_COUNT
    ),
    "ClusteredLoss": Contract(
        lambda: ClusteredLoss(ROADMAP(), CLASSES, DIMENSIONS),
        not_zero_without_positives=PROXIES_COUNT,
        not_zero_alone=PROXIES_COUNT,
    ),
    "SupRank of recall": Contract(
        lambda: SupRank(CLASSES, DIMENSIONS, measure="recall", include_self=False),
        not_zero_without_positives=PROXIES_COUNT,
        not_zero_alone=PROXIES_COUNT,
    ),
}
EXCUSES: dict[str, Contract] = {
    name: Contract(lambda name=name: RECIPES[name](CLASSES, DIMENSIONS), no_gallery=OWN_WEIGHTS)  # type: ignore[misc]
    for name in ("proxy_gml", "proxy_nca", "proxy_nca_pp", "normalised_softmax")
}
EXCUSES["cross_entropy"] = Contract(
    lambda: RECIPES["cross_entropy"](CLASSES, DIMENSIONS),
    no_gallery=OWN_WEIGHTS,
    no_gradient_at_first="its classifier starts at zero",
)
for _name in ("contrastive_xbm", "contrastive_irt"):
    EXCUSES[_name] = Contract(RECIPES.get(_name, nn.Identity), not_zero_without_positives=NEGATIVES_COUNT)
for _name in ("triplet_distance_weighted", "margin_distance_weighted"):
    EXCUSES[_name] = Contract(RECIPES.get(_name, nn.Identity), drawn_at_random=True)
if RECIPES:
    CONTRACTS["Matryoshka of proxies"] = Contract(
        lambda: Matryoshka(lambda d: RECIPES["proxy_nca"](CLASSES, d), [2, 6]), no_gallery=OWN_WEIGHTS
    )
CONTRACTS |= {name: EXCUSES.get(name, Contract(make)) for name, make in RECIPES.items()}

EVERY_LOSS = pytest.mark.parametrize("name", CONTRACTS)


def made(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return CONTRACTS[name].make()


def vectors(items: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Embeddings that violate everything: positives below 0.9, negatives above 0.6, ranks wrong."""
    x = torch.randn(items, DIMENSIONS, generator=torch.Generator().manual_seed(seed)) + 0.8
    return x.to(dtype).requires_grad_()


def called(loss: nn.Module, *args: Tensor, **gallery: Tensor) -> Tensor:
    torch.manual_seed(1)  # for the miners that draw
    value: Tensor = loss(*args, **gallery)
    return value


def test_the_table_excuses_only_losses_that_exist() -> None:
    assert not RECIPES or set(EXCUSES) <= set(RECIPES)


@EVERY_LOSS
def test_finite_scalar_and_backward(name: str) -> None:
    loss, x = made(name), vectors(9, 0)
    value = called(loss, x, LABELS)
    value.backward()
    assert value.shape == ()
    assert value.dtype == torch.float32
    assert value.isfinite()
    assert value > 0
    for leaf in (x, *loss.parameters()):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
    assert x.grad is not None
    assert bool(x.grad.any()) is not bool(CONTRACTS[name].no_gradient_at_first)


@EVERY_LOSS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(name: str, dtype: torch.dtype) -> None:
    loss, model = made(name), nn.Linear(4, DIMENSIONS)
    pictures = torch.randn(9, 4)
    with torch.autocast("cpu", dtype=dtype):
        embeddings = model(pictures)
        value = called(loss, embeddings, LABELS)
    value.backward()
    assert embeddings.dtype == dtype
    assert value.dtype == torch.float32
    assert model.weight.grad is not None
    assert model.weight.grad.isfinite().all()
    # As if autocast were not there: from the embeddings on, nothing is computed in half precision.
    assert value.item() == called(loss, embeddings.detach().float(), LABELS).item()


@EVERY_LOSS
def test_float64(name: str) -> None:
    x = vectors(9, 0)
    single = called(made(name), x, LABELS)
    double = called(made(name), x.double(), LABELS)
    assert double.dtype == torch.float64
    # A miner that draws does not draw the same in both precisions.
    near = 0.5 if CONTRACTS[name].drawn_at_random else 1e-4
    assert double.item() == pytest.approx(single.item(), rel=near)


@EVERY_LOSS
def test_gallery(name: str) -> None:
    loss, x, gallery = made(name), vectors(9, 0), vectors(7, 1)
    if CONTRACTS[name].no_gallery:
        with pytest.raises(ValueError, match="takes no gallery; leave out ref_emb and ref_labels"):
            called(loss, x, LABELS, ref_emb=gallery, ref_labels=GALLERY_LABELS)
        return
    value = called(loss, x, LABELS, ref_emb=gallery, ref_labels=GALLERY_LABELS)
    value.backward()
    assert value.isfinite()
    for leaf in (x, gallery):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
        assert leaf.grad.any()
    assert value.item() != called(loss, x, LABELS).item()


@EVERY_LOSS
def test_no_positive(name: str) -> None:
    """No query has a positive: 0 with zero gradients, or what the excuse says; never NaN, never without gradients."""
    loss, contract, x, gallery = made(name), CONTRACTS[name], vectors(3, 0), vectors(7, 1)
    labels = torch.tensor([0, 1, 2])
    if contract.no_gallery:
        value = called(loss, x, labels)
    else:
        value = called(loss, x, labels, ref_emb=gallery, ref_labels=torch.arange(10, 17))
    value.backward()
    assert value.isfinite()
    for leaf in (x, *loss.parameters()):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
    assert (value.item() != 0) is bool(contract.no_gallery or contract.not_zero_without_positives)


@EVERY_LOSS
@pytest.mark.parametrize("items", [0, 1])
def test_nothing_to_compare(name: str, items: int) -> None:
    loss, x = made(name), vectors(items, 0)
    value = called(loss, x, torch.zeros(items, dtype=torch.int64))
    value.backward()
    # 1e-5: a float32 cosine with oneself is 1 to a rounding, which a histogram bin of width 0.1 makes ten times larger.
    excused = CONTRACTS[name].no_gallery or CONTRACTS[name].not_zero_alone
    assert value.item() == pytest.approx(0, abs=1e-5) or (items == 1 and excused)
    for leaf in (x, *loss.parameters()):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


@EVERY_LOSS
def test_state_dict_round_trip(name: str) -> None:
    loss, other = made(name), made(name, seed=7)
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(0.1)
    assert set(loss.state_dict()) == {key for key, _ in loss.named_parameters()}
    other.load_state_dict(loss.state_dict(), strict=True)
    assert called(other, vectors(9, 0), LABELS).item() == called(loss, vectors(9, 0), LABELS).item()


@EVERY_LOSS
def test_pickle_and_copy(name: str) -> None:
    loss = made(name)
    expected = called(loss, vectors(9, 0), LABELS).item()
    for again in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        assert called(again, vectors(9, 0), LABELS).item() == expected
        assert repr(again) == repr(loss)


@EVERY_LOSS
def test_weights_move_with_the_module(name: str) -> None:
    loss = made(name).to(torch.float64)
    assert all(p.dtype == torch.float64 for p in loss.parameters())
    assert called(loss, vectors(9, 0, torch.float64), LABELS).dtype == torch.float64


def check_compiled_agrees(name: str, backend: str) -> None:
    torch.compiler.reset()
    gallery = {} if CONTRACTS[name].no_gallery else {"ref_emb": vectors(7, 1), "ref_labels": GALLERY_LABELS}
    results = []
    for compiled in (False, True):
        loss, x = made(name), vectors(9, 0)
        value = called(torch.compile(loss, backend=backend) if compiled else loss, x, LABELS, **gallery)
        value.backward()
        results.append((value.detach(), x.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@EVERY_LOSS
def test_compiled(name: str) -> None:
    check_compiled_agrees(name, "aot_eager")


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    check_compiled_agrees("ROADMAP", "inductor")


@pytest.mark.gpu
@EVERY_LOSS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    x = vectors(9, 0).detach().to(dtype)
    expected = called(made(name), x, LABELS).item()
    on_gpu = x.cuda().requires_grad_()
    with torch.autocast("cuda", dtype=torch.float16):
        value = called(made(name).cuda(), on_gpu, LABELS.cuda())
    value.backward()
    assert on_gpu.grad is not None
    assert on_gpu.grad.isfinite().all()
    if not CONTRACTS[name].drawn_at_random:
        assert value.item() == pytest.approx(expected, rel=1e-4)
