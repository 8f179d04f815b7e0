"""One training step, and the watch that stops a run whose numbers are no longer numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from roadmap.data import Batch, Records
from roadmap.engine.optimiser import Schedule, set_rates
from roadmap.engine.state import TrainState

OVERFLOWS = 30  # in a row, after which fp16's scaler will not recover


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


class NonFiniteError(FloatingPointError):
    """A loss or gradient that is not a number, the step it came from and the pictures that were in it.

    Attributes:
        step: counted from 1.
        pictures: paths, first those whose embeddings are not finite.
    """

    def __init__(self, message: str, step: int, pictures: list[str]) -> None:
        super().__init__(message)
        self.step, self.pictures = step, pictures


class Watch:
    """Reads the numbers of a step while the next one runs, so that the host never waits for the GPU.

    Args:
        records: to name the pictures of a step that failed.
        scaled: whether a gradient scaler skips overflowing steps, which is then not a failure.
    """

    def __init__(self, records: Records, scaled: bool) -> None:
        self.records, self.scaled = records, scaled
        self._waiting: tuple[Outcome, Tensor, torch.cuda.Event | None] | None = None
        self._overflows = 0

    def push(self, outcome: Outcome) -> tuple[int, float, float] | None:
        """Takes a step's outcome; gives (step, loss, gradient norm) of the one before, checked."""
        before = self.pop()
        if outcome.numbers.is_cuda:
            numbers = torch.empty(2, dtype=torch.float32, pin_memory=True)
            numbers.copy_(outcome.numbers, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
            self._waiting = outcome, numbers, ready
        else:
            self._waiting = outcome, outcome.numbers, None
        return before

    def pop(self) -> tuple[int, float, float] | None:
        """The numbers of the last step, checked; None if they were read already."""
        if self._waiting is None:
            return None
        outcome, numbers, ready = self._waiting
        self._waiting = None
        if ready is not None:
            ready.synchronize()
        loss, norm = numbers.tolist()
        self._overflows = 0 if math.isfinite(norm) else self._overflows + 1
        tolerated = self.scaled and self._overflows < OVERFLOWS
        if not math.isfinite(loss) or (self._overflows and not tolerated):
            raise self._failure(outcome, loss, norm)
        return outcome.step, loss, norm

    def _failure(self, outcome: Outcome, loss: float, norm: float) -> NonFiniteError:
        rows = zip(outcome.indices.tolist(), usable(outcome.lengths).tolist(), strict=True)
        named = [(self.records.paths[index], good) for index, good in rows]
        suspects, others = ([name for name, good in named if good is wanted] for wanted in (False, True))
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        bad = "zero or not finite"
        if suspects and others:
            who = f"{len(suspects)} of {len(named)} pictures have an embedding that is {bad}: {_few(suspects)}"
        else:
            which = f"Every embedding of it is {bad}" if suspects else "All of its embeddings are finite"
            who = f"{which}; its {len(named)} pictures: {_few(suspects or others)}"
        return NonFiniteError(
            f"step {outcome.step}: {what}; the run stops. {who}. "
            "Try a lower optim.lr, optim.clip=1, optim.warmup=1, or hardware.precision=32",
            outcome.step,
            suspects + others,
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
