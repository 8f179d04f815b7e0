"""How a batch goes through the model and how the loss comes back to its weights."""

from __future__ import annotations

from typing import Protocol

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn


class Passes(Protocol):
    """Embeds a batch, and pulls the gradient of what was made of the embeddings back into the weights.

    `pull_back` belongs to the last `embed`: what it needs of it, it keeps.
    """

    def embed(self, images: Tensor) -> Tensor:
        """(B, D), that a loss can be differentiated by."""
        ...

    def pull_back(self, loss: Tensor) -> None:
        """Adds the gradient of the loss to that of every weight."""
        ...


class OnePass:
    """The whole batch at once, with its graph in memory from `embed` to `pull_back`.

    Args:
        fabric: brings the precision, and scales the gradients of float16.
        model: as `fabric.setup` gave it.
        layout: of the pictures in memory, to match the weights.
    """

    def __init__(self, fabric: Fabric, model: nn.Module, layout: torch.memory_format = torch.preserve_format) -> None:
        self.fabric, self.model, self.layout = fabric, model, layout

    def embed(self, images: Tensor) -> Tensor:
        embeddings: Tensor = self.model(images.to(memory_format=self.layout))
        return embeddings

    def pull_back(self, loss: Tensor) -> None:
        self.fabric.backward(loss)
