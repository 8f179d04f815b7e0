"""The watch that stops a run whose numbers are no longer numbers."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

from roadmap.data import Records
from roadmap.engine.step import Outcome
from roadmap.kernels.directions import has_direction
from roadmap.ranks import ALONE, Ranks

OVERFLOWS = 30  # in a row, after which fp16's scaler will not recover


class Reading(NamedTuple):
    """The numbers of a step, looked at, and when it was done."""

    step: int
    loss: float
    norm: float
    pictures: int
    time: float


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
        ranks: the processes that share a batch; its numbers are the same on all.
        batch: pictures of a batch over all processes.
    """

    def __init__(self, records: Records, scaled: bool, ranks: Ranks = ALONE, batch: int = 0) -> None:
        self.records, self.scaled, self.ranks, self.batch = records, scaled, ranks, batch
        self._waiting: tuple[Outcome, Tensor, torch.cuda.Event | float] | None = None
        self._overflows = 0

    def push(self, outcome: Outcome) -> Reading | None:
        """Takes a step's outcome; gives the numbers of the one before, checked."""
        before = self.pop()
        if outcome.numbers.is_cuda:
            numbers = torch.empty(2, dtype=torch.float32, pin_memory=True)
            numbers.copy_(outcome.numbers, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
            self._waiting = outcome, numbers, ready
        else:
            self._waiting = outcome, outcome.numbers, time.monotonic()
        return before

    def pop(self) -> Reading | None:
        """The numbers of the last step, checked; None if they were read already."""
        if self._waiting is None:
            return None
        outcome, numbers, done = self._waiting
        self._waiting = None
        if not isinstance(done, float):
            done.synchronize()
            done = time.monotonic()
        loss, norm = numbers.tolist()
        self._overflows = 0 if math.isfinite(norm) else self._overflows + 1
        tolerated = self.scaled and self._overflows < OVERFLOWS
        if not math.isfinite(loss) or (self._overflows and not tolerated):
            raise self._failure(outcome, loss, norm)
        pictures = len(outcome.indices) if self.ranks.world == 1 else self.batch
        return Reading(outcome.step, loss, norm, pictures, done)

    def _failure(self, outcome: Outcome, loss: float, norm: float) -> NonFiniteError:
        mine = zip(outcome.indices.tolist(), has_direction(outcome.lengths).tolist(), strict=True)
        rows = [row for part in self.ranks.from_all(list(mine)) for row in part]
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
