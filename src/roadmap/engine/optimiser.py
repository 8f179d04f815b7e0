"""Which parameters move how fast, and how that changes during a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from roadmap.config.settings import OptimSettings
from roadmap.models import Retriever

Schedule = Callable[[int], float]
LOSS_RATE = 100.0  # proxies start at random, the backbone does not


def parameter_groups(model: Retriever, settings: OptimSettings) -> list[dict[str, Any]]:
    """Groups of parameters with the same rate and decay; `base_lr` is what the schedule multiplies.

    The rate of a layer is lr * layer_decay^(layers above it); the head has its own rate. Where the head goes first,
    what waits for it is marked: `rests`.
    """
    heads = {id(p) for p in model.head_parameters()}
    depths, last = model.layer_depths(), model.layers - 1
    spared = model.undecayed() if settings.decay_matrices_only else set()
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in heads:
            rate = settings.lr if settings.head_lr is None else settings.head_lr
        else:
            rate = settings.lr * settings.layer_decay ** (last - depths[name])
        rests = settings.head_first > 0 and id(parameter) not in heads
        groups.setdefault((rate, 0.0 if name in spared else settings.weight_decay, rests), []).append(parameter)
    return [
        {"params": parameters, "lr": rate, "base_lr": rate, "weight_decay": decay} | ({"rests": True} if rests else {})
        for (rate, decay, rests), parameters in groups.items()
    ]


def other_groups(loss: nn.Module, auxiliary: nn.Module | None, settings: OptimSettings) -> list[dict[str, Any]]:
    """Groups of the weights that are not deployed: those of the loss, and those of an auxiliary module.

    What a module calls its `loss_parameters` (proxies, boundaries) moves as the weights of the loss do.
    """
    own, beside = list(loss.parameters()), [] if auxiliary is None else list(auxiliary.parameters())
    alike: list[nn.Parameter] = getattr(auxiliary, "loss_parameters", list)()
    head = settings.lr if settings.head_lr is None else settings.head_lr
    rates = {
        "loss": LOSS_RATE * settings.lr if settings.loss_lr is None else settings.loss_lr,
        "auxiliary": head if settings.auxiliary_lr is None else settings.auxiliary_lr,
    }
    decays = {"loss": settings.loss_weight_decay, "auxiliary": settings.weight_decay}
    members = {"loss": own + alike, "auxiliary": [p for p in beside if all(p is not other for other in alike)]}
    return [
        {"params": parameters, "lr": rates[name], "base_lr": rates[name], "weight_decay": decays[name]}
        for name, parameters in members.items()
        if parameters
    ]


def optimiser(
    model: Retriever, loss: nn.Module, settings: OptimSettings, fused: bool, auxiliary: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Adam, AdamW or SGD over all weights that move; `fused`: one kernel for all, on a GPU."""
    groups = parameter_groups(model, settings) + other_groups(loss, auxiliary, settings)
    if settings.name == "sgd":
        return torch.optim.SGD(groups, momentum=settings.momentum, fused=fused)
    if settings.name == "adam":
        return torch.optim.Adam(groups, eps=settings.eps, fused=fused)
    return torch.optim.AdamW(groups, eps=settings.eps, fused=fused)


def schedule(settings: OptimSettings, epochs: int, batches: int) -> Schedule:
    """step -> factor on every rate: a pure function, so that there is no state to save.

    Args:
        settings: warm-up in epochs (linear, from 1 / (its steps + 1)), then constant, multistep or cosine.
        epochs: of the whole run.
        batches: in an epoch.
    """
    warm, total = round(settings.warmup * batches), epochs * batches
    milestones = sorted(milestone * batches for milestone in settings.milestones)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / (warm + 1)
        if settings.schedule == "multistep":
            return settings.gamma ** sum(step >= milestone for milestone in milestones)
        if settings.schedule == "cosine":
            share = min(1.0, (step - warm) / max(1, total - warm))
            return settings.final + (1 - settings.final) * 0.5 * (1 + math.cos(math.pi * share))
        return 1.0

    return factor


def set_rates(optimizer: torch.optim.Optimizer, factor: float, head_first: bool = False) -> None:
    """Every group's rate is its base times the schedule's factor; 0 for one that waits for the head."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if head_first and group.get("rests") else group["base_lr"] * factor
