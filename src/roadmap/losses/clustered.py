"""Any rank loss, and a proxy for each class beside it: the cluster term of SupRank and HAPPIER around ROADMAP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from roadmap.losses.arguments import check_share
from roadmap.losses.clusters import Clusters, WithoutClusters
from roadmap.losses.comparison import Comparison
from roadmap.losses.distributed import against_memory
from roadmap.losses.metric_learning import check_module
from roadmap.losses.terms import Terms


class ClusteredLoss(nn.Module):
    """(1 - lam) loss + lam L_clust: a loss of this package that is sums over queries, and a proxy for each class.

    The calibration bounds scores within a batch; the proxies hold a class together across batches
    (`roadmap.losses.clusters`). `SupRank` has them in the place of the calibration, this loss beside it. The proxies
    are weights: give `loss.parameters()` to an optimiser.

    Args:
        loss: with terms and a value, such as `ROADMAP`, `SupAP`, `SmoothAP`, `RecallAtK`.
        num_classes: of the training set; labels of the queries lie in [0, num_classes).
        embedding_size: dimensions of the embeddings.
        lam: weight of the proxies, in [0, 1].
        temperature: of the softmax over proxies.

    >>> import torch
    >>> from roadmap.losses import ROADMAP
    >>> loss = ClusteredLoss(ROADMAP(), num_classes=4, embedding_size=16)
    >>> loss(torch.randn(8, 16, requires_grad=True), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])).backward()
    """

    def __init__(
        self, loss: nn.Module, num_classes: int, embedding_size: int, lam: float = 0.1, temperature: float = 0.05
    ) -> None:
        super().__init__()
        check_module("loss", loss)
        if not (hasattr(loss, "terms") and hasattr(loss, "value")):
            raise ValueError(
                f"loss must be sums over queries, with terms and a value, such as ROADMAP(), got {type(loss).__name__}"
            )
        check_share(lam, "loss + lam proxies")
        self.loss, self.lam = loss, lam
        self.clusters = Clusters(num_classes, embedding_size, temperature)

    def extra_repr(self) -> str:
        return f"lam={self.lam}"

    @property
    def embedding_size(self) -> int:
        """The dimension that the proxies were made for."""
        return int(self.clusters.proxies.shape[1])

    @property
    def against_memory(self) -> nn.Module:
        """The loss without the proxies."""
        return WithoutClusters(against_memory(self.loss), self.lam)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        own: Tensor | None = None,
    ) -> Tensor:
        c = Comparison.of(embeddings, labels, indices_tuple, ref_emb, ref_labels, own)
        ranking = self.loss(embeddings, labels, indices_tuple, ref_emb, ref_labels, own)
        value: Tensor = (1 - self.lam) * ranking + self.lam * self.clusters.loss(c)
        return value

    def terms(self, c: Comparison) -> Terms:
        """Those of the loss, and the cross-entropies with the number of queries."""
        ranking: Terms = self._ranking.terms(c)
        return Terms.concatenation(ranking, self.clusters.terms(c))

    def value(self, terms: Terms) -> Tensor:
        """The loss that `terms` come to; they may be sums over several comparisons."""
        ranking = Terms(terms.sums[:-1], terms.counts[:-1])
        inner: Tensor = self._ranking.value(ranking)
        value: Tensor = (1 - self.lam) * inner + self.lam * terms.means[-1]
        return value

    @property
    def _ranking(self) -> Any:
        return self.loss
