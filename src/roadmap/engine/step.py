"""One training step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from roadmap.data import Batch
from roadmap.engine.optimiser import Schedule, set_rates
from roadmap.engine.state import TrainState


@dataclass(frozen=True, eq=False)
class Parts:
    """What a step works with and does not change: the engine, the wrapped model and optimiser, loss and schedule."""

    fabric: Fabric
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]
    schedule: Schedule
    clip: float | None
    layout: torch.memory_format = torch.preserve_format  # of the pictures, to match the weights


@dataclass(frozen=True, eq=False)
class Outcome:
    """Of one step, still on the device: what to log and what to look at if something went wrong."""

    step: int
    numbers: Tensor  # loss, gradient norm
    lengths: Tensor  # (B,) of the embeddings; zero, infinite or NaN where a picture has none that can be compared
    indices: Tensor


def step(state: TrainState, batch: Batch, parts: Parts) -> Outcome:
    """Embed, compare, move the weights. Losses compute scores in float32 whatever the model's precision is."""
    set_rates(parts.optimizer, parts.schedule(state.step))
    embeddings = parts.model(batch.images.to(memory_format=parts.layout))
    lengths = torch.linalg.vector_norm(embeddings.detach(), dim=1)
    if lengths.device.type == "cpu" and not usable(lengths).all():  # where looking is free, losses would refuse them
        return Outcome(state.step + 1, torch.full((2,), math.nan), lengths, batch.indices)
    loss = parts.loss(embeddings, batch.labels)
    parts.fabric.backward(loss)
    norm = _gradient_norm(state, parts)
    parts.optimizer.step()
    parts.optimizer.zero_grad(set_to_none=True)
    if state.average is not None:
        state.average.update(state.model, state.step)
    state.step += 1
    numbers = torch.stack([loss.detach().float(), norm.detach().float()])
    return Outcome(state.step, numbers, lengths, batch.indices)


def _gradient_norm(state: TrainState, parts: Parts) -> Tensor:
    """Of all gradients, the loss's own weights among them, before they are clipped, if they are."""
    if parts.clip is None and state.scaler is None:  # nothing to change: one pass over the gradients less
        moving = [parameter for group in parts.optimizer.param_groups for parameter in group["params"]]
        return torch.nn.utils.get_total_norm([p.grad for p in moving if p.grad is not None])
    limit = math.inf if parts.clip is None else parts.clip
    norm = parts.fabric.clip_gradients(parts.model, parts.optimizer, max_norm=limit, error_if_nonfinite=False)
    assert norm is not None
    return norm


def usable(lengths: Tensor) -> Tensor:
    """(B,) whether vectors of these lengths have a direction."""
    return torch.isfinite(lengths) & (lengths > 0)
