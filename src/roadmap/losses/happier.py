"""HAPPIER (Ramzi et al., ECCV 2022): hierarchical AP, and a term that draws the items of a class together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roadmap.kernels import cosine_scores
from roadmap.losses.arguments import check_count, check_number, values_are_free_to_read
from roadmap.losses.comparison import Comparison
from roadmap.losses.hierarchical_ap import HierarchicalAP
from roadmap.losses.relevance import UNKNOWN, SetGrades, TreeGrades
from roadmap.losses.terms import Terms


def cluster_terms(proxy_scores: Tensor, classes: Tensor, temperature: float) -> Terms:
    """L_clust before the division: the sum of -log softmax(cosine / temperature) at the class of each query, and the
    number of queries whose class is known. A class that has no proxy is refused, or NaN where looking stalls a GPU.

    Args:
        proxy_scores: (M, classes) cosines with one vector per class.
        classes: (M,) integers in [0, classes), or -1.
    """
    count = proxy_scores.shape[1]
    known, outside = classes != UNKNOWN, (classes < UNKNOWN) | (classes >= count)
    if values_are_free_to_read(classes) and bool(outside.any()):
        raise ValueError(
            f"the finest labels must lie in [0, {count}), the classes this loss has weights for, got "
            f"{int(classes[outside][0])}; number the training classes from 0 and pass num_classes"
        )
    places = torch.where(known, classes.clamp(0, count - 1), UNKNOWN).long()
    total = F.cross_entropy(proxy_scores / temperature, places, reduction="sum", ignore_index=UNKNOWN)
    total = total + torch.where(outside.any(), torch.nan, 0.0).to(total.dtype)
    return Terms(total[None], known.sum()[None])


class HAPPIER(nn.Module):
    """L_HAPPIER = (1 - lam) L_H-AP + lam L_clust.

    L_clust is the cross-entropy of a query's class, the last level of its path, among one unit vector per class:
    -log softmax(cos(q, p_c) / temperature). Every query counts, whether it has positives or not; one whose class is -1
    does not. Sets of labels have no one class: take `HierarchicalAP`.

    Args:
        num_classes: of the finest level; labels there lie in [0, num_classes).
        embedding_size: dimensions of the embeddings.
        lam: weight of the clusters, in [0, 1].
        temperature: of the softmax.
        relevance, alpha, tau, rho, delta, include_self, start, offset, pull, beta, gamma, leak: see `HierarchicalAP`.
    """

    takes_paths = True

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        lam: float = 0.1,
        temperature: float = 0.05,
        relevance: TreeGrades = "shared",
        alpha: float = 1.0,
        tau: float = 0.01,
        rho: float = 100.0,
        delta: float | None = None,
        include_self: bool = True,
        start: float = 0.5,
        offset: float | None = None,
        pull: bool = False,
        beta: float = 25.0,
        gamma: float = 0.5,
        leak: float = 10.0,
    ) -> None:
        super().__init__()
        check_count("num_classes", num_classes, at_least=1)
        check_count("embedding_size", embedding_size, at_least=1)
        check_number("lam", lam, at_least=0)
        if lam > 1:
            raise ValueError(f"lam must be <= 1: the loss is (1 - lam) H-AP + lam clusters, got {lam}")
        check_number("temperature", temperature, above=0)
        sets: SetGrades = "iou"
        self.h_ap = HierarchicalAP(
            relevance, alpha, sets, tau, rho, delta, include_self, start, offset, pull, beta, gamma, leak
        )
        self.lam, self.temperature, self.embedding_size = lam, temperature, embedding_size
        self.proxies = nn.Parameter(torch.empty(num_classes, embedding_size))
        nn.init.uniform_(self.proxies, -1 / math.sqrt(embedding_size), 1 / math.sqrt(embedding_size))

    def extra_repr(self) -> str:
        classes, dimensions = self.proxies.shape
        return f"num_classes={classes}, embedding_size={dimensions}, lam={self.lam}, temperature={self.temperature}"

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        own: Tensor | None = None,
    ) -> Tensor:
        return self.value(self.terms(Comparison.of_grades(embeddings, labels, indices_tuple, ref_emb, ref_labels, own)))

    def terms(self, c: Comparison) -> Terms:
        """The term of `HierarchicalAP`, and the sum of the cross-entropies with the number of queries: two terms."""
        return Terms.concatenation(self.h_ap.terms(c), self._cluster_terms(c))

    def value(self, terms: Terms) -> Tensor:
        """The loss that `terms` come to; they may be sums over several comparisons."""
        means = terms.means
        return (1 - self.lam) * means[0] + self.lam * means[1]

    def _cluster_terms(self, c: Comparison) -> Terms:
        if c.query_labels.dtype == torch.bool:
            raise ValueError(
                "HAPPIER draws items to the vector of their one class, and sets of labels have none; "
                "use HierarchicalAP for them"
            )
        if c.embeddings.shape[1] != self.embedding_size:
            raise ValueError(
                f"embeddings have {c.embeddings.shape[1]} dimensions but the loss was made with "
                f"embedding_size={self.embedding_size}"
            )
        classes = c.query_labels if c.query_labels.ndim == 1 else c.query_labels[:, -1]
        return cluster_terms(cosine_scores(c.embeddings, self.proxies), classes, self.temperature)
