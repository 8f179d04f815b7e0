"""Who is compared with whom in a step, and what that costs."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from roadmap.config.settings import MemorySettings, SettingError
from roadmap.data import Records
from roadmap.data.trees import WHO_HAS_ONE
from roadmap.losses import Distributed, Memory
from roadmap.losses.named import required_options


class Compare(Protocol):
    """Embeddings (B, D), labels (B,) and pictures (B,) of a batch -> the loss, a scalar. A loss that `takes_paths` has
    the (B, L) way of each picture through a tree of labels, or its (B, C) tags, in the place of labels.

    What else the batch is compared with (the rest of a larger one, a memory of earlier ones) is the object's own; if
    it changes during training, the object says so by `state_dict`, and the run's state holds it.
    """

    def __call__(self, embeddings: Tensor, labels: Tensor, pictures: Tensor) -> Tensor: ...


class BatchAlone:
    """Every item of the batch searches the batch, and nothing else."""

    def __init__(self, loss: nn.Module) -> None:
        self.loss = loss

    def __call__(self, embeddings: Tensor, labels: Tensor, pictures: Tensor) -> Tensor:
        value: Tensor = self.loss(embeddings, labels)
        return value


class BatchAndMemory:
    """Every item of the batch searches the batch and those before it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __call__(self, embeddings: Tensor, labels: Tensor, pictures: Tensor) -> Tensor:
        # reading their numbers back makes the host wait for a GPU: only where they are needed
        value: Tensor = self.memory(embeddings, labels, ids=None if self.memory.repeats else pictures)
        return value

    def state_dict(self) -> dict[str, Any]:
        """The memory's; weights of the loss are held elsewhere."""
        return dict(self.memory.ring.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.memory.ring.load_state_dict(state_dict)


class ByPaths:
    """Hands the loss the way of each picture through the tree of labels, (B, L), or its tags, (B, C) bool, where it had
    its label, (B,).

    Args:
        compare: with a loss that `takes_paths`.
        train: the training pictures, which `pictures` counts in.
        loss: its name, for errors.
    """

    def __init__(self, compare: Compare, train: Records, loss: str) -> None:
        self.compare, self.paths = compare, degrees_of(train, loss)

    def __call__(self, embeddings: Tensor, labels: Tensor, pictures: Tensor) -> Tensor:
        self.paths = self.paths.to(pictures.device)  # once
        return self.compare(embeddings, self.paths[pictures].to(labels.device), pictures)


def degrees_of(train: Records, loss: str) -> Tensor:
    """What a loss by degrees compares the training pictures by: their tags, (N, C) bool, where they have some and it
    needs no class of theirs; else their tree, (N, L)."""
    if train.tags is not None and not _by_classes(loss):
        return torch.from_numpy(train.tags.marks)
    if train.tree is None:
        also = "" if _by_classes(loss) else "; a column tags would do as well"
        raise SettingError(
            "loss", f"loss={loss} compares by a tree of labels, and {train.name} has none; {WHO_HAS_ONE}{also}"
        )
    return torch.from_numpy(train.tree.paths)


def _by_classes(loss: str) -> bool:
    """Whether a loss has weights of its own for each class, which tags do not say."""
    return "num_classes" in required_options(loss)


def compare_of(
    loss: nn.Module, settings: MemorySettings, batches: int, shared: bool = False
) -> BatchAlone | BatchAndMemory:
    """The comparison that the settings ask for.

    Args:
        loss: of a batch.
        settings: of the memory.
        batches: in an epoch, in which its warm-up is counted.
        shared: whether several processes share each batch.
    """
    whole = Distributed(loss) if shared else loss
    if settings.size is None:
        return BatchAlone(whole)
    warmup = math.ceil(settings.warmup * batches)
    form: Any = settings.form
    try:
        return BatchAndMemory(Memory(whole, settings.size, warmup, settings.repeats, form, settings.weight))
    except ValueError as error:
        raise SettingError("memory", f"memory: {error}") from error
