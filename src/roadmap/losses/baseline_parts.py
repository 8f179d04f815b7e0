"""What the baselines of `roadmap.losses.pml` need and pytorch-metric-learning does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PairSumPerQuery(nn.Module):
    """A reducer: 1/M times the sum over the pairs of all M queries, as the contrastive losses of XBM and IRT_R.

    The library's own take the mean over the non-zero pairs, or cannot take a gallery (`PerAnchorReducer`).
    """

    def forward(self, loss_dict: dict[str, dict[str, Any]], embeddings: Tensor, labels: Tensor) -> Tensor:
        total = (embeddings * 0).sum()
        for part in loss_dict.values():
            pairs = part["losses"]
            if isinstance(pairs, Tensor):  # the library puts the int 0 where there is no pair
                total = total + (
                    pairs if part["reduction_type"] == "already_reduced" else pairs.sum() / len(embeddings)
                )
        return total


class LinearClassifier(nn.Module):
    """Cross-entropy of a linear classifier over the embeddings, in the library's call. Weights and bias start at 0."""

    uses_lengths = True  # a longer embedding has larger logits

    def __init__(self, num_classes: int, embedding_size: int, label_smoothing: float) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.weight = nn.Parameter(torch.zeros(num_classes, embedding_size))
        self.bias = nn.Parameter(torch.zeros(num_classes))

    def forward(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any = None, ref_emb: Any = None, ref_labels: Any = None
    ) -> Tensor:
        check_whole_batch("cross-entropy", indices_tuple, ref_emb)
        dtype = embeddings.dtype
        logits = F.linear(embeddings, self.weight.to(dtype), self.bias.to(dtype))
        return F.cross_entropy(logits, labels.long(), label_smoothing=self.label_smoothing)


def check_whole_batch(name: str, indices_tuple: object, ref_emb: object) -> None:
    """For a loss that compares all items of the batch with weights of its own; the first words are the library's."""
    if ref_emb is not None:
        raise ValueError("ref_emb is not supported for this loss function")
    if indices_tuple is not None:
        raise ValueError(f"{name} takes every item of the batch; leave out indices_tuple and the miner")


def koleo(embeddings: Tensor) -> Tensor:
    """The differential-entropy regulariser of Kozachenko and Leonenko: -1/M sum_i log min_{j != i} |z_i - z_j|.

    It pushes every unit vector z_i away from its nearest neighbour (El-Nouby et al., 2021, Eq. 3; Sablayrolles et
    al., ICLR 2019). Two equal vectors cost a finite -log 1e-8 and have no gradient: there is no way apart.

    Args:
        embeddings: (M, D), any length; normalised here.
    """
    if len(embeddings) < 2:
        return (embeddings * 0).sum()
    z = F.normalize(embeddings, dim=1)
    nearest = (z.detach() @ z.detach().T).fill_diagonal_(-torch.inf).argmax(1)
    mean_log: Tensor = (torch.linalg.vector_norm(z - z[nearest], dim=1) + 1e-8).log().mean()
    return -mean_log


def pairs_of_complete_queries(
    embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A miner: all pairs of the queries that have both a positive and a negative."""
    relevant = labels[:, None] == (labels if ref_labels is None else ref_labels)[None, :]
    positives = relevant if ref_labels is not None else relevant.clone().fill_diagonal_(False)
    complete = (positives.any(1) & (~relevant).any(1))[:, None]
    anchors, others = (positives & complete).nonzero(as_tuple=True)
    negative_anchors, strangers = (~relevant & complete).nonzero(as_tuple=True)
    return anchors, others, negative_anchors, strangers
