"""HAPPIER (Ramzi et al., ECCV 2022): hierarchical AP, and a term that draws the items of a class together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from roadmap.losses.arguments import check_share
from roadmap.losses.call import value_of_two_terms
from roadmap.losses.clusters import Clusters, WithoutClusters
from roadmap.losses.comparison import Comparison
from roadmap.losses.hierarchical_ap import HierarchicalAP
from roadmap.losses.terms import Terms
from roadmap.metrics.grades import SetGrades, TreeGrades


class HAPPIER(nn.Module):
    """L_HAPPIER = (1 - lam) L_H-AP + lam L_clust.

    L_clust is the cross-entropy of a query's class, the last level of its path, among one unit vector per class:
    -log softmax(cos(q, p_c) / temperature). Every query counts, whether it has positives or not; one whose path ends in
    -1 does not. Sets of labels have no one class: take `HierarchicalAP`.

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
        check_share(lam, "H-AP + lam clusters")
        sets: SetGrades = "iou"
        self.h_ap = HierarchicalAP(
            relevance, alpha, sets, tau, rho, delta, include_self, start, offset, pull, beta, gamma, leak
        )
        self.clusters = Clusters(num_classes, embedding_size, temperature)
        self.lam, self.embedding_size = lam, embedding_size

    def extra_repr(self) -> str:
        return f"lam={self.lam}"

    @property
    def against_memory(self) -> nn.Module:
        """The loss without the clusters."""
        return WithoutClusters(self.h_ap, self.lam)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        own: Tensor | None = None,
    ) -> Tensor:
        c = Comparison.of_grades(embeddings, labels, indices_tuple, ref_emb, ref_labels, own)
        fused = self.h_ap.fused(c)
        if fused is None:
            return self.value(self.terms(c))
        return (1 - self.lam) * fused + self.lam * self.clusters.loss(c)

    def terms(self, c: Comparison) -> Terms:
        """The term of `HierarchicalAP`, and the sum of the cross-entropies with the number of queries: two terms."""
        return Terms.concatenation(self.h_ap.terms(c), self.clusters.terms(c))

    value = value_of_two_terms
