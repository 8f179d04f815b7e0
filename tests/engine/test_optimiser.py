"""Parameter groups by literal lists, schedules beside torch's own, and losses that bring weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roadmap.config.settings import ModelSettings, OptimSettings
from roadmap.engine.arithmetic import Arithmetic
from roadmap.engine.job import _state
from roadmap.engine.loop import train_epoch
from roadmap.engine.optimiser import optimiser, parameter_groups, schedule, set_rates
from roadmap.engine.splits import sampler_of
from roadmap.engine.step import step
from roadmap.engine.watch import Watch
from roadmap.losses.named import named_loss
from roadmap.models import Retriever, retriever

from .worlds import job, tiny

VIT = "test_vit.r160_in1k"


def small(**options: Any) -> Retriever:
    return retriever(ModelSettings(pooling="max", **options), 16)


def rates(model: Retriever, settings: OptimSettings) -> dict[str, tuple[float, float]]:
    """Parameter name -> (rate, decay), and every parameter in exactly one group."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, tuple[float, float]] = {}
    for group in parameter_groups(model, settings):
        assert group["lr"] == group["base_lr"]
        for parameter in group["params"]:
            name = names[id(parameter)]
            assert name not in found
            found[name] = (group["lr"], group["weight_decay"])
    assert set(found) == {name for name, p in model.named_parameters() if p.requires_grad}
    return found


def test_one_group_when_nothing_differs() -> None:
    groups = parameter_groups(small(dim=8), OptimSettings(lr=0.5, weight_decay=0.25))
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.5, 0.25)]


def test_the_head_has_its_own_rate() -> None:
    found = rates(small(dim=8), OptimSettings(lr=0.5, head_lr=2.0))
    assert {name for name, (rate, _) in found.items() if rate == 2.0} == {"projection.weight", "projection.bias"}
    assert {rate for name, (rate, _) in found.items() if name.startswith("backbone.")} == {0.5}


@pytest.mark.parametrize("dim", [None, 8])
def test_every_layer_further_down_moves_slower(dim: int | None) -> None:
    """lr * decay^(layers above): without a projection the last block is the top layer, with one it is below it."""
    found = rates(small(dim=dim), OptimSettings(lr=1.0, layer_decay=0.5))
    above = 0 if dim is None else 1
    for block in range(4):
        wanted = 0.5 ** (3 - block + above)
        assert {r for name, (r, _) in found.items() if name.startswith(f"backbone.blocks.{block}.")} == {wanted}
    if dim is not None:
        assert found["projection.weight"][0] == 1.0


def test_layer_decay_of_a_transformer_counts_its_blocks() -> None:
    """Stem 0, blocks 1 to 6, the last norm with the last of them: timm's own order."""
    found = rates(retriever(ModelSettings(VIT, pooling="token"), 16), OptimSettings(lr=1.0, layer_decay=0.5))
    assert found["backbone.norm.weight"][0] == 1.0
    for block in range(6):
        assert found[f"backbone.blocks.{block}.mlp.fc1.weight"][0] == 0.5 ** (5 - block)
    assert found["backbone.patch_embed.proj.weight"][0] == found["backbone.pos_embed"][0] == 0.5**6


def test_only_matrices_decay_if_asked() -> None:
    model = retriever(ModelSettings(VIT, pooling="gem", dim=4), 16)
    every = rates(model, OptimSettings(weight_decay=0.25))
    assert {decay for _, decay in every.values()} == {0.25}
    found = rates(model, OptimSettings(weight_decay=0.25, decay_matrices_only=True))
    spared = {name for name, (_, decay) in found.items() if decay == 0}
    assert {"backbone.pos_embed", "backbone.cls_token", "projection.bias", "backbone.norm.weight"} <= spared
    assert "projection.weight" not in spared
    for name, parameter in model.named_parameters():
        if name not in ("backbone.pos_embed", "backbone.cls_token", "backbone.reg_token"):
            assert (name in spared) == (parameter.ndim < 2), name


def test_frozen_parameters_are_in_no_group() -> None:
    model = small(dim=8)
    model.backbone.requires_grad_(False)
    assert set(rates(model, OptimSettings())) == {"projection.weight", "projection.bias"}


@pytest.mark.parametrize(
    ("name", "kind", "defaults"),
    [
        ("adam", torch.optim.Adam, {"betas": (0.9, 0.999), "eps": 1e-8}),
        ("adamw", torch.optim.AdamW, {"betas": (0.9, 0.999), "eps": 1e-8}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": False}),
    ],
)
def test_the_optimiser_that_was_asked_for(name: str, kind: type, defaults: dict[str, Any]) -> None:
    made = optimiser(small(), nn.Identity(), OptimSettings(name=name, lr=0.5, weight_decay=0.25), fused=False)
    assert type(made) is kind
    (group,) = made.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    assert {key: group[key] for key in defaults} == defaults


def test_momentum_and_epsilon_are_settings() -> None:
    (group,) = optimiser(small(), nn.Identity(), OptimSettings(name="sgd", momentum=0.0), fused=False).param_groups
    assert group["momentum"] == 0.0
    for name in ("adam", "adamw"):
        (group,) = optimiser(small(), nn.Identity(), OptimSettings(name=name, eps=1.0), fused=False).param_groups
        assert group["eps"] == 1.0


@pytest.mark.parametrize(
    ("device", "precision", "fused"), [("cpu", "32", False), ("cuda", "bf16", True), ("cuda", "fp16", False)]
)
@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
def test_one_kernel_moves_all_weights_on_a_gpu_without_a_scaler(
    device: str, precision: str, fused: bool, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def watched(model: Retriever, loss: nn.Module, settings: OptimSettings, fused: bool, *more: Any) -> Any:
        asked.append(fused)
        return optimiser(model, loss, settings, False, *more)

    monkeypatch.setattr("roadmap.engine.job.optimiser", watched)
    arithmetic = Arithmetic(torch.device(device), precision)
    _state(tiny(pictures, tmp_path / "run"), arithmetic, small(), nn.Identity(), None, {})
    assert asked == [fused]


def test_the_backbone_rests_while_the_head_goes_first(pictures: Path, tmp_path: Path) -> None:
    """Half an epoch of two batches: one step."""
    made = job(tiny(pictures, tmp_path / "run", optim__head_first=0.5, optim__head_lr=0.01, model__dim=4))
    before = {name: p.detach().clone() for name, p in made.state.model.named_parameters()}
    batches = iter(made.pictures.training(made.splits.train, made.sampler))
    moved = []
    for _ in range(2):
        step(made.state, next(batches), made.parts)
        moved.append({name for name, p in made.state.model.named_parameters() if not torch.equal(p, before[name])})
    made.run.close()
    assert moved[0] == {"projection.weight", "projection.bias"}
    assert moved[1] == set(before)
    assert made.parts.head_first == 1
    longer = job(tiny(pictures, tmp_path / "longer", optim__head_first=0.75))
    longer.run.close()
    assert longer.parts.head_first == 2  # a step and a half


def test_the_weights_of_a_loss_have_a_group_without_decay() -> None:
    loss = named_loss("proxy_nca", num_classes=3, embedding_size=256)
    (proxies,) = loss.parameters()
    for given, wanted in ((None, 100 * 0.5), (3.0, 3.0)):
        made = optimiser(small(), loss, OptimSettings(lr=0.5, loss_lr=given, weight_decay=0.25), fused=False)
        *_, group = made.param_groups
        assert group["params"][0] is proxies
        assert (group["lr"], group["base_lr"], group["weight_decay"]) == (wanted, wanted, 0.0)


@pytest.mark.parametrize("name", ["cross_entropy", "proxy_nca_pp", "normalised_softmax", "margin_distance_weighted"])
def test_the_weights_of_a_loss_are_trained(name: str, pictures: Path, tmp_path: Path) -> None:
    made = job(tiny(pictures, tmp_path / "run", loss={"name": name}))
    weights = [p.detach().clone() for p in made.state.parts["loss"].parameters()]  # type: ignore[attr-defined]
    sampler = sampler_of(made.splits.train, made.settings.data, 0)
    train_epoch(made, made.pictures.training(made.splits.train, sampler), Watch(made.splits.train, scaled=False))
    made.run.close()
    after = list(made.state.parts["loss"].parameters())  # type: ignore[attr-defined]
    assert weights
    assert all(not torch.equal(a, b) for a, b in zip(weights, after, strict=True))


def stepped(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    """The rates that torch's scheduler gives at each step."""
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def one(lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def test_multistep_is_torchs() -> None:
    ours = schedule(OptimSettings(schedule="multistep", milestones=[4, 2], gamma=0.3), epochs=6, batches=3)
    theirs = torch.optim.lr_scheduler.MultiStepLR(one(), [2 * 3, 4 * 3], gamma=0.3)
    assert [ours(step) for step in range(18)] == pytest.approx(stepped(theirs, 18), rel=1e-12)


@pytest.mark.parametrize("final", [0.0, 0.1])
def test_cosine_is_torchs(final: float) -> None:
    ours = schedule(OptimSettings(schedule="cosine", final=final), epochs=5, batches=4)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(one(), T_max=20, eta_min=final)
    assert [ours(step) for step in range(20)] == pytest.approx(stepped(theirs, 20), rel=1e-9)
    assert ours(20) == pytest.approx(final)  # where a run would go on, the rate stays
    assert ours(25) == pytest.approx(final)


def test_warm_up_rises_in_equal_steps_and_the_rest_follows() -> None:
    constant = schedule(OptimSettings(warmup=1.5), epochs=4, batches=2)
    assert [constant(step) for step in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    steps = schedule(OptimSettings(warmup=1, schedule="multistep", milestones=[2], gamma=0.5), epochs=3, batches=2)
    assert [steps(step) for step in range(6)] == pytest.approx([1 / 3, 2 / 3, 1, 1, 0.5, 0.5])
    cosine = schedule(OptimSettings(warmup=1, schedule="cosine"), epochs=4, batches=2)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(one(), T_max=6)
    assert [cosine(step) for step in range(8)] == pytest.approx([1 / 3, 2 / 3, *stepped(theirs, 6)], rel=1e-9)


def test_the_factor_multiplies_every_groups_own_rate() -> None:
    model = small(dim=8)
    made = optimiser(model, nn.Identity(), OptimSettings(lr=1.0, head_lr=10.0, layer_decay=0.5), fused=False)
    base = [group["lr"] for group in made.param_groups]
    for factor in (0.5, 0.1):
        set_rates(made, factor)
        assert [group["lr"] for group in made.param_groups] == [rate * factor for rate in base]
