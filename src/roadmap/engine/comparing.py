"""Who is compared with whom in a step, and what that costs."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn


class Compare(Protocol):
    """Embeddings (B, D) and labels (B,) of a batch -> the loss, a scalar.

    What else the batch is compared with (the rest of a larger one, a memory of earlier ones) is the object's own; if
    it changes during training, the object says so by `state_dict`, and the run's state holds it.
    """

    def __call__(self, embeddings: Tensor, labels: Tensor) -> Tensor: ...


class BatchAlone:
    """Every item of the batch searches the batch, and nothing else."""

    def __init__(self, loss: nn.Module) -> None:
        self.loss = loss

    def __call__(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = self.loss(embeddings, labels)
        return value
