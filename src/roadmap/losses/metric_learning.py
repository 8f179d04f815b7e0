"""Any loss with the call of pytorch-metric-learning, with or without a miner, behind the call of our own losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_count, outside_classes, values_are_free_to_read
from roadmap.losses.comparison import Comparison
from roadmap.losses.uncompiled import uncompiled

Miner = Callable[..., Sequence[Tensor]]


class MetricLearning(nn.Module):
    """A loss of pytorch-metric-learning, called as ours are: same arguments, same checks, float32 or better.

    What a query without positives costs is the wrapped loss's own matter (a contrastive loss still pushes its
    negatives away); where it has nothing to compare, the result is 0 with zero gradients, for the embeddings and for
    the loss's own parameters, so that no rank of a multi-GPU run waits for another. Give those parameters to an
    optimiser: `loss.parameters()`. A float64 batch turns them into float64, which is what the library does.

    Args:
        loss: a loss such as `pytorch_metric_learning.losses.TripletMarginLoss()`.
        miner: chooses the pairs or triplets, such as `pytorch_metric_learning.miners.MultiSimilarityMiner()`; any
            callable (embeddings, labels, ref_emb, ref_labels) -> indices will do.
        num_classes: for a loss with class proxies: labels must lie in [0, num_classes).
        embedding_size: for a loss with class proxies: the dimension of the embeddings.
        against_memory: the same without what the loss adds for the batch alone (a regulariser): what a memory compares
            with earlier batches. None: it adds no such thing.
    """

    def __init__(
        self,
        loss: nn.Module,
        miner: Miner | None = None,
        num_classes: int | None = None,
        embedding_size: int | None = None,
        against_memory: nn.Module | None = None,
    ) -> None:
        super().__init__()
        check_module("loss", loss)
        check_instance("miner", miner)
        if miner is not None and not callable(miner):
            raise TypeError(f"miner must be callable, got {type(miner).__name__}")
        if num_classes is not None:
            check_count("num_classes", num_classes, at_least=1)
        if embedding_size is not None:
            check_count("embedding_size", embedding_size, at_least=1)
        self.loss = loss
        self.miner = miner
        self.num_classes = num_classes
        self.embedding_size = embedding_size
        if against_memory is not None:
            self.against_memory = against_memory

    @property
    def uses_lengths(self) -> bool:
        """Whether normalised embeddings would make another loss of it."""
        return bool(getattr(self.loss, "uses_lengths", False))

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        c = Comparison.of(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        if indices_tuple is not None and self.miner is not None:
            raise ValueError("indices_tuple was given, but this loss has a miner of its own; leave one of them out")
        if self.embedding_size not in (None, embeddings.shape[1]):
            raise ValueError(
                f"embeddings have {embeddings.shape[1]} dimensions but the loss was made with "
                f"embedding_size={self.embedding_size}"
            )
        labels, zero = self._class_labels(c.query_labels)
        # Every input and parameter gets a gradient, if only zero.
        reached = [x for x in (embeddings, ref_emb, *self.loss.parameters()) if x is not None and x.is_floating_point()]
        zero = zero + sum((at_least_float32(x) * 0).sum() for x in reached)
        if len(c.query_labels) == 0 or len(c.gallery_labels) == 0:
            return c.loss_or_nan(zero)
        with torch.autocast(embeddings.device.type, enabled=False):
            value = self._value(at_least_float32(embeddings), labels, indices_tuple, ref_emb, c.gallery_labels)
        return c.loss_or_nan(value + zero)

    # The library's control flow hangs on values (which pairs exist, which violate), which no compiler follows.
    @uncompiled
    def _value(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor,
    ) -> Tensor:
        gallery: dict[str, Tensor] = {}
        if ref_emb is not None:
            wider = torch.promote_types(embeddings.dtype, ref_emb.dtype)
            embeddings = embeddings.to(wider)
            # New tensor objects: the library takes a gallery that *is* the batch for the in-batch call.
            gallery = {"ref_emb": ref_emb.to(wider).view_as(ref_emb), "ref_labels": ref_labels.clone()}
        if self.miner is not None:
            indices_tuple = self.miner(embeddings, labels, **gallery)
        try:
            value: Any = self.loss(embeddings, labels, indices_tuple, **gallery)
        except ValueError as refusal:
            if gallery and "ref_emb is not supported" in str(refusal):
                raise ValueError(
                    f"{type(self.loss).__name__} compares embeddings with its own class weights, or only within the "
                    "batch, and takes no gallery; leave out ref_emb and ref_labels"
                ) from refusal
            raise
        if not isinstance(value, Tensor) or value.numel() != 1:
            came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{type(self.loss).__name__} must return one number, got {came}; give it another reducer")
        return value.reshape(())

    def _class_labels(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The labels, and 0, or NaN where a label has no class and looking at it would stall a GPU."""
        zero = torch.zeros((), device=labels.device)
        if self.num_classes is None:
            return labels, zero
        outside = outside_classes(labels, self.num_classes)
        if values_are_free_to_read(labels):
            return labels, zero
        return labels.clamp(0, self.num_classes - 1), zero.masked_fill(outside.any(), torch.nan)


def check_module(name: str, part: object) -> None:
    check_instance(name, part)
    if not isinstance(part, nn.Module):
        raise TypeError(f"{name} must be an nn.Module, got {type(part).__name__}")


def check_instance(name: str, part: object) -> None:
    if isinstance(part, type):
        raise TypeError(f"{name} must be an instance, got the class {part.__name__}; use {part.__name__}(...)")
