"""One unit vector per class, to which its items are drawn: what HAPPIER and SupRank add to a rank loss.

L_clust = -1/M Σ_i log( exp(cos(q_i, p_{y_i}) / temperature) / Σ_c exp(cos(q_i, p_c) / temperature) )
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roadmap.kernels import both_run_on_triton, cosine_scores
from roadmap.kernels import clusters as kernels
from roadmap.kernels.rules import AP_COUNT, AP_SUM
from roadmap.losses.arguments import check_count, check_number, outside_classes, plain, values_are_free_to_read
from roadmap.losses.comparison import Comparison
from roadmap.losses.terms import Terms
from roadmap.metrics.grades import UNKNOWN


class Clusters(nn.Module):
    """The vectors of the classes (`proxies`), and the term of a loss that they make.

    Args:
        num_classes: labels lie in [0, num_classes); of a path that of its last level, where -1 is not known.
        embedding_size: dimensions of the embeddings.
        temperature: of the softmax.
    """

    def __init__(self, num_classes: int, embedding_size: int, temperature: float) -> None:
        super().__init__()
        check_count("num_classes", num_classes, at_least=1)
        check_count("embedding_size", embedding_size, at_least=1)
        check_number("temperature", temperature, above=0)
        self.temperature = temperature
        self.proxies = nn.Parameter(torch.empty(num_classes, embedding_size))
        nn.init.uniform_(self.proxies, -1 / math.sqrt(embedding_size), 1 / math.sqrt(embedding_size))

    def extra_repr(self) -> str:
        classes, dimensions = self.proxies.shape
        return f"num_classes={classes}, embedding_size={dimensions}, temperature={self.temperature}"

    def terms(self, c: Comparison) -> Terms:
        """One term over the queries; every one whose class is known counts, whether it has positives or not."""
        classes = self._classes(c)
        if both_run_on_triton(c.embeddings, self.proxies):
            found = kernels.cluster_terms(c.embeddings, self.proxies, classes, self.temperature)
            return Terms(found[AP_SUM : AP_SUM + 1], found[AP_COUNT : AP_COUNT + 1].detach())
        return cluster_terms(cosine_scores(c.embeddings, self.proxies), classes, self.temperature)

    def loss(self, c: Comparison) -> Tensor:
        """What the term comes to; where a kernel says that in one go, it does."""
        if both_run_on_triton(c.embeddings, self.proxies):
            return kernels.cluster_loss(c.embeddings, self.proxies, self._classes(c), self.temperature)
        return self.terms(c).means[0]

    def _classes(self, c: Comparison) -> Tensor:
        """The class of each query, (M,)."""
        dimensions = self.proxies.shape[1]
        if c.embeddings.shape[1] != dimensions:
            raise ValueError(
                f"embeddings have {c.embeddings.shape[1]} dimensions but the loss was made with "
                f"embedding_size={dimensions}"
            )
        if c.query_labels.dtype == torch.bool:
            raise ValueError(
                "this loss draws items to the vector of their one class, and sets of labels have none; "
                "use HierarchicalAP for them"
            )
        if c.query_labels.ndim == 2:
            return c.query_labels[:, -1]
        # the ranks take a plain label of -1 for a class as any other, so it must have a vector too
        if values_are_free_to_read(c.query_labels):
            outside_classes(c.query_labels, len(self.proxies))
        return c.query_labels.masked_fill(c.query_labels == UNKNOWN, UNKNOWN - 1)


class WithoutClusters(nn.Module):
    """(1 - lam) of the loss beside the clusters: what a memory compares with earlier batches.

    The vectors of the classes draw the batch alone, and are in the loss of the batch already.
    """

    def __init__(self, loss: nn.Module, lam: float) -> None:
        super().__init__()
        self.loss, self.lam = loss, lam

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        value: Tensor = self.loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        return (1 - self.lam) * value


def cluster_terms(proxy_scores: Tensor, classes: Tensor, temperature: float) -> Terms:
    """The sum of -log softmax(cosine / temperature) at the class of each query, and the number of queries whose class
    is known. A class that has no vector is refused, or NaN where looking at it would stall a GPU.

    Args:
        proxy_scores: (M, classes) cosines with one vector per class.
        classes: (M,) integers in [0, classes), or -1.
    """
    count, classes = proxy_scores.shape[1], plain(classes)
    known, outside = classes != UNKNOWN, outside_classes(classes, count, least=UNKNOWN)
    places = torch.where(known, classes.clamp(0, count - 1), UNKNOWN)
    total = F.cross_entropy(proxy_scores / temperature, places, reduction="sum", ignore_index=UNKNOWN)
    total = total + torch.where(outside.any(), torch.nan, 0.0).to(total.dtype)
    return Terms(total[None], known.sum()[None])
