"""The gradient of a batch that does not fit into memory: two passes through the model, in chunks that do.

The first pass embeds chunk by chunk and keeps no graph. The loss then sees the embeddings of the whole batch and gives
the gradient at each of them. The second pass embeds every chunk again, this time with a graph, and pulls that gradient
back into the weights. Memory is that of one chunk; the price is one more pass forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_count, values_are_free_to_read
from roadmap.losses.surroundings import Surroundings

Pictures = Tensor | Iterable[Tensor] | Callable[[], Iterable[Tensor]]
Quiet = Callable[[], AbstractContextManager[Any]]
APART = 0.1  # of their length, by which a chunk's embeddings may differ between the passes; bfloat16 gives hundredths


class TwoPass(nn.Module):
    """A loss of pictures instead of embeddings, in the memory of one chunk and equal to one pass over the batch.

    >>> import torch
    >>> from roadmap.losses import ROADMAP
    >>> model, pictures, labels = torch.nn.Linear(12, 4), torch.randn(8, 12), torch.arange(8) // 2
    >>> TwoPass(ROADMAP(), model, chunk=3)(pictures, labels).backward()

    What comes back is an ordinary scalar: scale it, add other losses to it, accumulate over several, give it to a
    GradScaler. Weights of the loss (proxies) get their gradient too, and `loss` may be `Memory` or `Distributed`.

    Batch normalisation in training mode takes the mean and variance of what passes through together, which is a chunk:
    the gradient is that of one pass *in chunks*, and running statistics move once for every chunk, in the first pass
    alone. For models without batch statistics (LayerNorm, GroupNorm, batch normalisation in evaluation mode) it is the
    gradient of the batch as a whole. Dropout and stochastic depth draw the same numbers in both passes.

    Args:
        loss: called as `loss(embeddings, labels, ...)`.
        model: pictures (C, ...) -> embeddings (C, D). In `DistributedDataParallel` gradients are reduced once.
        chunk: pictures that go through the model together, at most.
    """

    def __init__(self, loss: Callable[..., Tensor], model: nn.Module, chunk: int) -> None:
        super().__init__()
        if not callable(loss):
            raise TypeError(f"loss must be called as loss(embeddings, labels), got {type(loss).__name__}")
        self.loss, self.model, self.chunk = loss, model, chunk
        _check(model, chunk)

    def extra_repr(self) -> str:
        return f"chunk={self.chunk}"

    def forward(self, pictures: Pictures, labels: Tensor, *more: Any, **named: Any) -> Tensor:
        """The loss of the batch.

        Args:
            pictures: (B, ...) in one tensor; or something that gives the batch in parts and can be read twice: a list,
                a DataLoader, a function that returns a new iterator. Parts larger than `chunk` are cut, smaller ones
                stay as they are. Each is moved to the model's device when its turn comes.
            labels: (B,) integers, where the embeddings are.
            more, named: what else the loss takes: `ref_emb`, `ids`.
        """
        return self.loss(chunked_embeddings(self.model, pictures, self.chunk), labels, *more, **named)


def chunked_embeddings(model: nn.Module, pictures: Pictures, chunk: int) -> Tensor:
    """The embeddings (B, D) of a batch, differentiable by the weights of the model at the memory of one chunk.

    `backward` (and `torch.autograd.grad` by the weights) runs the second pass. A second derivative, or one by the
    pictures, there is none. Hooks on weights see the gradient of the batch, once; hooks on modules see both passes.

    Args:
        model, pictures, chunk: as for `TwoPass`.
    """
    _check(model, chunk)
    if isinstance(pictures, Iterator):
        raise TypeError(
            f"pictures came as {type(pictures).__name__}, which can be read once, and two passes read twice; give a "
            "tensor, a list of chunks, a DataLoader, or a function that returns a new iterator"
        )
    passes = _Passes(model, pictures, chunk)
    if not torch.is_grad_enabled():
        return passes.first(remember=False)
    found: Tensor = _Embeddings.apply(passes, *passes.weights)  # type: ignore[no-untyped-call]
    return found


class _Embeddings(torch.autograd.Function):
    """Forward is the first pass; backward, which runs when the loss's gradient is there, is the second."""

    @staticmethod
    def forward(ctx: Any, passes: _Passes, *weights: Tensor) -> Tensor:
        ctx.passes = passes
        return passes.first(remember=len(weights) > 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.passes.second(gradient)


class _Passes:
    """The two passes of one batch, and what the second must know of the first."""

    def __init__(self, model: nn.Module, pictures: Pictures, chunk: int) -> None:
        self.model, self.pictures, self.chunk = model, pictures, chunk
        # of DistributedDataParallel: passes within expect no exchange of gradients; the last one does, for them all
        self.quiet: Quiet = getattr(model, "no_sync", nullcontext)
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.versions = [weight._version for weight in self.weights]
        self.surroundings = Surroundings(model)
        self.device = next((t.device for t in (*model.parameters(), *model.buffers())), None)
        self.random: list[list[Tensor]] = []  # before a chunk is read
        self.statistics: list[list[Tensor]] = []  # before a chunk runs
        self.embeddings: list[Tensor] = []

    def first(self, remember: bool) -> Tensor:
        """All embeddings, without a graph. What the second pass needs is kept only where there will be one."""
        chunks, found = self._chunks(), list[Tensor]()
        with self.surroundings.autocast():
            while True:
                before = self.surroundings.random()
                pictures = next(chunks, None)
                if pictures is None:
                    break
                if remember:
                    self.random.append(before)
                    self.statistics.append(self.surroundings.statistics())
                # copied: a model that torch records as CUDA graphs gives every chunk in the same memory
                found.append(_checked_embeddings(self.model(pictures), pictures).clone())
                del pictures  # before the next is read
        if not found:
            raise ValueError(
                "pictures holds no chunk at all; an empty batch is a tensor with no rows, such as (0, 3, S, S)"
            )
        whole = torch.cat(found)
        if remember:  # apart from the tensor that is returned, which leads here by its graph
            self.embeddings = list(torch.split(whole.detach(), [len(part) for part in found]))
        return whole

    def second(self, gradient: Tensor) -> list[Tensor | None]:
        """The gradients of the weights, None for one that the model did not use."""
        if any(w._version != version for w, version in zip(self.weights, self.versions, strict=True)):
            raise RuntimeError(
                "weights of the model were changed between the two passes; call backward() before optimizer.step()"
            )
        totals: list[Tensor | None] = [None] * len(self.weights)
        chunks = self._chunks()
        pulls = torch.split(gradient, [len(part) for part in self.embeddings])
        with torch.enable_grad(), self.surroundings.again(), _without_hooks(self.weights):
            for number, (before, pull) in enumerate(zip(self.embeddings, pulls, strict=True)):
                self.surroundings.set_random(self.random[number])
                with self.surroundings.autocast():
                    pictures = self._again(chunks, number)
                    self.surroundings.set_statistics(self.statistics[number])
                    with nullcontext() if number == len(pulls) - 1 else self.quiet():
                        found = self.model(pictures)
                pull = _where_alike(pull.to(found.dtype), found.detach(), before)
                _add(totals, torch.autograd.grad(found, self.weights, pull, allow_unused=True))
                del found, pictures
        return [None if t is None else t.to(w.dtype) for t, w in zip(totals, self.weights, strict=True)]

    def _chunks(self) -> Iterator[Tensor]:
        for pictures in pieces(self.pictures, self.chunk):
            yield pictures if self.device is None else pictures.to(self.device, non_blocking=True)

    def _again(self, chunks: Iterator[Tensor], number: int) -> Tensor:
        """The same chunk as the first time, as far as can be seen."""
        pictures, expected = next(chunks, None), len(self.embeddings[number])
        if pictures is None or len(pictures) != expected:
            came = "nothing" if pictures is None else f"{len(pictures)} pictures"
            raise RuntimeError(
                f"chunk {number} held {expected} pictures in the first pass, and {came} in the second; what gives the "
                "pictures must give the same ones in the same order each time it is read"
            )
        return pictures


def pieces(pictures: Pictures, chunk: int) -> Iterator[Tensor]:
    """The batch in chunks. Of empty ones only the first comes, and only if nothing else does."""
    parts = pictures() if not isinstance(pictures, Tensor) and callable(pictures) else pictures
    empty, any_came = None, False
    for part in [parts] if isinstance(parts, Tensor) else parts:
        if not isinstance(part, Tensor) or part.ndim == 0:
            what = f"a {type(part).__name__}" if not isinstance(part, Tensor) else "a tensor without rows"
            raise TypeError(
                f"pictures must be a tensor (B, ...) or give tensors, chunk by chunk, got {what}; of a loader that "
                "gives pairs take the pictures: lambda: (images for images, _ in loader)"
            )
        if part.requires_grad:
            raise ValueError("pictures require a gradient, and two passes give one to weights alone; detach() them")
        if len(part):
            any_came = True
            yield from torch.split(part, chunk)
        elif empty is None:
            empty = part
    if empty is not None and not any_came:
        yield empty


def _check(model: nn.Module, chunk: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_count("chunk", chunk, at_least=1)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        for option in ("find_unused_parameters", "static_graph"):
            if getattr(model, option):
                raise ValueError(
                    f"DistributedDataParallel's {option}=True does not go with two passes; leave it out: weights that "
                    "are not used need no mention here"
                )


def _checked_embeddings(found: Any, pictures: Tensor) -> Tensor:
    if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(pictures):
        what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"the model must give one vector per picture, ({len(pictures)}, D), got {what}")
    return found


def _where_alike(pull: Tensor, found: Tensor, before: Tensor) -> Tensor:
    """The gradient at a chunk, if its embeddings are those of the first pass; else an error, or NaN on a GPU."""
    apart, length = torch.linalg.vector_norm((found - before).double()), torch.linalg.vector_norm(before.double())
    differs = apart > APART * length
    if not values_are_free_to_read(found):
        return torch.where(differs, torch.nan, pull)
    if differs:
        raise RuntimeError(
            f"a chunk has other embeddings in the second pass than in the first: they differ by {apart / length:.0%} "
            "of their length; the same pictures must come each time, and all random numbers must be torch's"
        )
    return pull


@contextmanager
def _without_hooks(weights: Sequence[Tensor]) -> Iterator[None]:
    """Within, hooks on the weights rest: they are for the gradient of the batch, which autograd hands them after."""
    hooks = [(weight, weight._backward_hooks) for weight in weights if weight._backward_hooks]
    try:
        for weight, _ in hooks:
            weight._backward_hooks = None
        yield
    finally:
        for weight, found in hooks:
            weight._backward_hooks = found


def _add(totals: list[Tensor | None], gradients: tuple[Tensor | None, ...]) -> None:
    """Adds gradients to totals, in float32 or better."""
    sums, new = list[Tensor](), list[Tensor]()
    for place, (total, gradient) in enumerate(zip(totals, gradients, strict=True)):
        if gradient is None:
            continue
        if total is None:
            totals[place] = at_least_float32(gradient).clone()
        else:
            sums.append(total)
            new.append(gradient)
    if sums:
        torch._foreach_add_(sums, new)
