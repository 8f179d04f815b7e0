"""One training step: embed, compare, pull back. Watching, logging and saving are others' work."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roadmap.data import Batch, ChunkedBatch
from roadmap.data.randomness import raw_bits
from roadmap.engine.arithmetic import Arithmetic
from roadmap.engine.auxiliary import Auxiliary
from roadmap.engine.comparing import Compare
from roadmap.engine.optimiser import Schedule, set_rates
from roadmap.engine.passes import Passes
from roadmap.engine.state import TrainState
from roadmap.kernels.directions import directions, has_direction
from roadmap.ranks import ALONE, Ranks

DRAWS = 5  # names the stream of random numbers, apart from those of samplers and crops


@dataclass(frozen=True, eq=False)
class Parts:
    """What a step works with and does not change.

    Attributes:
        arithmetic: the device and the precision.
        model: to train, which may be compiled.
        optimizer: of the model, and of the weights of the loss and of the auxiliary module.
        passes: how a batch goes through the model, and how the gradient comes back.
        compare: who is compared with whom, and what that costs.
        schedule: step -> factor on every rate.
        clip: largest norm of the gradient; None for no limit.
        ranks: the processes that share the batch.
        seed: of what the model draws at random, where there are several processes.
        auxiliary: what else is minimised, of the features before they are pooled; None for nothing.
        head_first: steps in which the backbone rests.
    """

    arithmetic: Arithmetic
    model: nn.Module
    optimizer: torch.optim.Optimizer
    passes: Passes
    compare: Compare
    schedule: Schedule
    clip: float | None = None
    ranks: Ranks = ALONE
    seed: int = 0
    auxiliary: Auxiliary | None = None
    head_first: int = 0


@dataclass(frozen=True, eq=False)
class Outcome:
    """Of one step, still on the device: what to log and what to look at if something went wrong."""

    step: int
    numbers: Tensor  # loss, gradient norm
    lengths: Tensor  # (B,) of the embeddings; zero, infinite or NaN where a picture has none that can be compared
    indices: Tensor


def step(state: TrainState, batch: Batch | ChunkedBatch, parts: Parts) -> Outcome:
    """Embed, compare, pull back, move. Losses compute scores in float32 whatever the model's precision is."""
    set_rates(parts.optimizer, parts.schedule(state.step), state.step < parts.head_first)
    _draw_apart(state.step, parts)
    embeddings = parts.passes.embed(batch.images)
    lengths = directions(embeddings)[1]
    # where looking is free, losses would refuse them
    if lengths.device.type == "cpu" and parts.ranks.largest(int(not has_direction(lengths).all()))():
        return Outcome(state.step + 1, torch.full((2,), math.nan), lengths, batch.indices)
    loss = parts.compare(embeddings, batch.labels, batch.indices)
    if parts.auxiliary is not None and parts.passes.features is not None:
        loss = loss + parts.auxiliary(parts.passes.features, batch.labels, batch.indices)
    parts.passes.pull_back(loss)
    parts.ranks.average_gradients(p for group in parts.optimizer.param_groups for p in group["params"])
    norm = parts.arithmetic.norm(parts.optimizer, parts.clip)
    parts.arithmetic.move(parts.optimizer)
    parts.optimizer.zero_grad(set_to_none=True)
    if state.average is not None:
        state.average.update(state.model, state.step)
    state.step += 1
    numbers = torch.stack([loss.detach().float(), norm.detach().float()])
    return Outcome(state.step, numbers, lengths, batch.indices)


def _draw_apart(step: int, parts: Parts) -> None:
    """Dropout differs between processes, and follows from the step: there is no random state of each to be saved."""
    if parts.ranks.world > 1:
        torch.manual_seed(int(raw_bits(1, parts.seed, DRAWS, step, parts.ranks.rank)[0]) >> 1)
