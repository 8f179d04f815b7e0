"""How a batch goes through the model and how the loss comes back to its weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from roadmap.engine.arithmetic import Arithmetic
from roadmap.features import Features
from roadmap.losses.two_pass import chunked_embeddings

Images = Tensor | Iterable[Tensor]  # a batch, or its chunks, which can be read more than once


class Passes(Protocol):
    """Embeds a batch, and pulls the gradient of what was made of the embeddings back into the weights.

    `pull_back` belongs to the last `embed`: what it needs of it, it keeps.

    Attributes:
        features: of the last batch, from `embed` to `pull_back`, where an auxiliary module asks for them; else None.
    """

    features: Features | None

    def embed(self, images: Images) -> Tensor:
        """(B, D), that a loss can be differentiated by."""
        ...

    def pull_back(self, loss: Tensor) -> None:
        """Adds the gradient of the loss to that of every weight."""
        ...


class OnePass:
    """The whole batch at once, with its graph in memory from `embed` to `pull_back`.

    Args:
        arithmetic: brings the precision, and scales the gradients of float16.
        model: to train.
        layout: of the pictures in memory, to match the weights.
        whole: keep the features that the vectors were pooled from.
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        model: nn.Module,
        layout: torch.memory_format = torch.preserve_format,
        whole: bool = False,
    ) -> None:
        self.arithmetic, self.model, self.layout, self.whole = arithmetic, model, layout, whole
        self.features: Features | None = None

    def embed(self, images: Images) -> Tensor:
        if not isinstance(images, Tensor):
            raise TypeError("one pass needs the whole batch in one tensor; for chunks take TwoPasses")
        images = images.to(memory_format=self.layout)
        with self.arithmetic.autocast():
            if not self.whole:
                embeddings: Tensor = self.model(images)
                return embeddings
            found: Features = self.model(images, whole=True)
        self.features = found
        return found.embedding

    def pull_back(self, loss: Tensor) -> None:
        self.features = None
        self.arithmetic.pull_back(loss)


class TwoPasses:
    """The batch in chunks: embedded without a graph, and again, with one, when the loss's gradient is there.

    Args:
        arithmetic, model, layout: as for `OnePass`.
        chunk: pictures that go through the model together, at most.
    """

    features: Features | None = None  # of a chunk at a time, which no auxiliary module can compare

    def __init__(
        self, arithmetic: Arithmetic, model: nn.Module, chunk: int, layout: torch.memory_format = torch.preserve_format
    ) -> None:
        self.arithmetic, self.model, self.chunk, self.layout = arithmetic, model, chunk, layout

    def embed(self, images: Images) -> Tensor:
        def chunks() -> Iterable[Tensor]:
            parts = [images] if isinstance(images, Tensor) else images
            return (part.to(memory_format=self.layout) for part in parts)

        with self.arithmetic.autocast():
            return chunked_embeddings(self.model, chunks, self.chunk)

    def pull_back(self, loss: Tensor) -> None:
        self.arithmetic.pull_back(loss)


def passes_of(
    arithmetic: Arithmetic, model: nn.Module, channels_last: bool, chunk: int | None, whole: bool = False
) -> Passes:
    """One pass, or two where the batch comes in chunks; `whole`: with features, which two passes do not have."""
    layout = torch.channels_last if channels_last else torch.preserve_format
    if chunk is None:
        return OnePass(arithmetic, model, layout, whole)
    return TwoPasses(arithmetic, model, chunk, layout)


def chunk_note(model: nn.Module, chunk: int, frozen: bool) -> str:
    """What a run in chunks says of itself. Batch statistics, unless they are frozen, are then those of a chunk."""
    said = f"each batch goes through the model twice, {chunk} pictures at a time"
    normalised = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if not normalised or frozen:
        return said
    return f"{said}; batch normalisation sees a chunk and not the batch (model.freeze_batch_norm=true stops that)"
