"""Losses by name."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys

import pytest
import torch

import roadmap.losses
from roadmap.losses import pml
from roadmap.losses.named import BORROWED, FILLED_IN, NAMES, OWN, named_loss, required_options

FILLED = {"num_classes": 4, "embedding_size": 8}


def test_every_loss_of_the_package_has_a_name() -> None:
    classes = {
        value
        for name in roadmap.losses.__all__
        if inspect.isclass(value := getattr(roadmap.losses, name))  # the others are functions of scores and masks
    }
    around_a_loss = {roadmap.losses.Distributed, roadmap.losses.Memory, roadmap.losses.TwoPass}
    around_a_loss |= {roadmap.losses.Matryoshka}  # the setting `dims`
    # these have names of their own, with the loss as an option
    around_a_loss |= {roadmap.losses.SphericalConstraint, roadmap.losses.ClusteredLoss}
    around_a_loss |= {roadmap.losses.HORDE}  # of features, not of embeddings
    assert set(OWN.values()) == classes - around_a_loss
    assert tuple(pml.RECIPES) == BORROWED
    assert len(set(NAMES)) == len(NAMES)


def test_no_function_of_the_package_hides_a_module_of_its_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(roadmap.losses.__path__)}
    assert not modules & set(roadmap.losses.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_loss_backpropagates(name: str) -> None:
    loss = named_loss(name, **{option: FILLED[option] for option in required_options(name)})
    embeddings = torch.randn(8, 8, requires_grad=True)
    loss(embeddings, torch.arange(8) // 2).backward()
    assert embeddings.grad is not None
    assert embeddings.grad.isfinite().all()


def test_options_reach_the_constructor() -> None:
    loss = named_loss("roadmap", lam=0.25, rho=7.0, beta=0.1)
    assert (loss.lam, loss.supap.rho, loss.calibration.beta) == (0.25, 7.0, 0.1)
    assert named_loss("margin_distance_weighted", num_classes=None).num_classes is None


def test_only_what_the_run_alone_knows_has_no_default() -> None:
    needing = {name: required_options(name) for name in NAMES if required_options(name)}
    weighted = {"cross_entropy", "happier", "normalised_softmax", "proxy_gml", "proxy_nca", "proxy_nca_pp", "sec"}
    assert set(needing) == weighted | {"clustered", "suprank"}
    assert set(needing.values()) == {tuple(FILLED_IN)}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("supapp", {}, r"unknown loss 'supapp', did you mean 'supap'\? Known: roadmap, supap, smoothap, "),
        ("proxynca", {}, r"did you mean 'proxy_nca'\?"),
        ("zzz", {}, r"unknown loss 'zzz'. Known: roadmap"),
        ("supap", {"taau": 1}, r"the loss supap has no option 'taau', did you mean 'tau'\? It takes: tau, rho, delta"),
        ("calibration", {"tau": 1}, r"no option 'tau'. It takes: alpha, beta, average"),
        (
            "proxy_nca",
            {"num_classes": None},
            r"the loss proxy_nca needs num_classes \(the number of training classes\) and embedding_size \(the dim",
        ),
        ("cross_entropy", {"num_classes": 3}, r"cross_entropy needs embedding_size \(the dimensions"),
        ("roadmap", {"lam": 2.0}, "lam must be <= 1"),
    ],
)
def test_refusals_offer_the_nearest_name(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named_loss(name, **options)


def test_pytorch_metric_learning_is_imported_only_when_asked_for() -> None:
    code = (
        "import sys; from roadmap.losses.named import NAMES, named_loss; named_loss('roadmap');"
        "print('pytorch_metric_learning' in sys.modules); named_loss('triplet_semihard');"
        "print('pytorch_metric_learning' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]
