"""What the processes of a group tell each other: rows gathered in order, sums, and who brings what.

Every call is made by all processes of the group, or all of them wait: so each first says what it brings, and whether
something is wrong with it (`Processes.agreed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roadmap.kernels.precision import at_least_float32


class Processes:
    """The processes of `group`, None for all.

    Attributes:
        rank: of this one.
        count: how many they are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group that the loss was given; call it only where it is")
        # gloo sums and gathers in the memory of the host
        self.on_host = dist.get_backend(group) == "gloo"

    def stacked(self, x: Tensor) -> Tensor:
        """(processes, *shape) of tensors of one shape, whatever they hold."""
        mine = (x.cpu() if self.on_host else x).contiguous()
        out = mine.new_empty(self.count, *mine.shape)
        if mine.numel():
            with _plain_words():
                # as bytes: not every backend knows every type
                dist.all_gather_into_tensor(_bytes(out), _bytes(mine), group=self.group)
        return out.to(x.device)

    def rows(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """The rows of all, (sum(sizes), ...), those of the first process first; this one brings sizes[rank]."""
        longest = max(sizes)
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: len(x)] = x
        everyone = self.stacked(padded)
        if min(sizes) == longest:
            return everyone.flatten(0, 1)
        return torch.cat([rows[:size] for rows, size in zip(everyone, sizes, strict=True)])

    def total(self, x: Tensor) -> Tensor:
        """The sum over all, on each the same."""
        mine = x.detach().cpu() if self.on_host else x.detach()
        summed = mine.clone(memory_format=torch.contiguous_format)
        if summed.numel():
            with _plain_words():
                dist.all_reduce(summed, group=self.group)
        return summed.to(x.device)

    def agreed(self, said: Sequence[int], device: torch.device) -> list[list[int]]:
        """What each said, a few integers, by process."""
        found: list[list[int]] = self.stacked(torch.tensor(said, dtype=torch.int64, device=device)).tolist()
        return found

    @contextmanager
    def same_draws(self, device: torch.device) -> Iterator[None]:
        """Within, what is drawn from torch's generators is what the first process draws; the others' own draws go on
        afterwards where they were."""
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else [], enabled=self.rank > 0):
            state = self._first(torch.get_rng_state(), device)
            if self.rank > 0:
                torch.set_rng_state(state)
            if device.type == "cuda":
                state = self._first(torch.cuda.get_rng_state(device), device)
                if self.rank > 0:
                    torch.cuda.set_rng_state(state, device)
            yield

    def _first(self, state: Tensor, device: torch.device) -> Tensor:
        """The bytes of the first process."""
        told = (state if self.on_host else state.to(device)).clone()
        with _plain_words():
            dist.broadcast(told, group=self.group, group_src=0)
        return told.cpu()


def processes_of(group: dist.ProcessGroup | None) -> Processes | None:
    """Those that share a batch; None where there is but this one."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    if dist.get_world_size(group) == 1:
        return None
    return Processes(group)


class Gather(torch.autograd.Function):
    """(M, D) of each process -> this one's rows and all rows, (N, D), in float32 or better.

    The gradient at all rows goes back to those who brought them: with `add` each process has the share that its own
    queries give, and the shares are summed; without, each has the whole already. `factor` is put on it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, processes: Processes, sizes: Sequence[int], add: bool, factor: float
    ) -> tuple[Tensor, Tensor]:
        ctx.processes, ctx.add, ctx.factor, ctx.dtype = processes, add, factor, x.dtype
        first = sum(sizes[: processes.rank])
        ctx.mine = slice(first, first + len(x))
        everyone = at_least_float32(processes.rows(x.detach(), sizes))
        return everyone[ctx.mine].clone(), everyone

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, own: Tensor, everyone: Tensor) -> tuple[Tensor | None, ...]:
        summed = ctx.processes.total(everyone) if ctx.add else everyone
        return ((summed[ctx.mine] + own) * ctx.factor).to(ctx.dtype), None, None, None, None


class Total(torch.autograd.Function):
    """(T,) sums and counts of each process -> those of all. The gradient at a sum is that at the total, times
    `factor`."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, counts: Tensor, processes: Processes, factor: float) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        summed, counted = processes.total(torch.stack([sums.double(), counts.double()]))
        counted = counted.to(counts.dtype)
        ctx.mark_non_differentiable(counted)
        return summed.to(sums.dtype), counted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return upstream * ctx.factor, None, None, None


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


@contextmanager
def _plain_words() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "the processes could not exchange their parts of the batch: another one has ended, or does not answer; "
            f"look at the first error that any of them printed. Here: {error}"
        ) from error
