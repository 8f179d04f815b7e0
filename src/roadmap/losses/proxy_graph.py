"""ProxyGML: a picture is classified by the few proxies nearest to it (Zhu, Yang, Deng, Liu, NeurIPS 2020)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roadmap.losses.arguments import check_count, check_number
from roadmap.losses.baseline_parts import check_whole_batch


class ProxyGraph(nn.Module):
    """The loss of ProxyGML, in the call of pytorch-metric-learning.

    S_ij is the cosine of sample i and proxy j. Of each row the k = ceil(ratio x C x N) largest are kept, N + 1 or more,
    the proxies of the sample's own class before all others. Labels flow back from the proxies: Z_ic sums what was kept
    of class c, and a softmax over the classes of which anything was kept is asked for the label. The proxies are
    classified likewise, by all proxies, with a weight:

        L = -mean_i log softmax_M(Z_i)[y_i] + proxy_weight x (-mean_j log softmax(Z^p_j)[y_j]).

    Args:
        num_classes: C.
        embedding_size: dimensions.
        proxies: N, of each class.
        ratio: share of all proxies that a sample is compared with, in (0, 1].
        proxy_weight: lambda in the paper.
    """

    def __init__(self, num_classes: int, embedding_size: int, proxies: int, ratio: float, proxy_weight: float) -> None:
        super().__init__()
        check_count("num_classes", num_classes, at_least=1)
        check_count("embedding_size", embedding_size, at_least=1)
        check_count("proxies", proxies, at_least=1)
        check_number("ratio", ratio, above=0)
        if ratio > 1:
            raise ValueError(f"ratio must be <= 1, the share of all proxies, got {ratio}")
        check_number("proxy_weight", proxy_weight, at_least=0)
        self.classes, self.per_class, self.ratio, self.proxy_weight = num_classes, proxies, ratio, proxy_weight
        self.proxies = nn.Parameter(torch.empty(num_classes * proxies, embedding_size))
        # As released: uniform within +-1 / sqrt(fan), the fan being the number of proxies.
        edge = len(self.proxies) ** -0.5
        nn.init.uniform_(self.proxies, -edge, edge)

    def extra_repr(self) -> str:
        said = f"num_classes={self.classes}, proxies={self.per_class}, ratio={self.ratio}"
        return said + f", proxy_weight={self.proxy_weight}"

    @property
    def kept(self) -> int:
        """k: how many proxies a sample is compared with. With those of its own class alone nothing would be told apart.

        Less a rounding: 0.07 x 100 is 7.000000000000001.
        """
        share = math.ceil(self.ratio * len(self.proxies) - 1e-9)
        return min(max(share, self.per_class + 1), len(self.proxies))

    def forward(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any = None, ref_emb: Any = None, ref_labels: Any = None
    ) -> Tensor:
        check_whole_batch("ProxyGML", indices_tuple, ref_emb)
        proxies = F.normalize(self.proxies.to(embeddings.dtype), dim=1)
        loss = self._sample_loss(F.normalize(embeddings, dim=1) @ proxies.T, labels.long())
        if self.proxy_weight > 0:
            owners = torch.arange(len(proxies), device=labels.device) // self.per_class
            loss = loss + self.proxy_weight * F.cross_entropy(self._by_class(proxies @ proxies.T), owners)
        return loss

    def _sample_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        owners = torch.arange(len(self.proxies), device=labels.device) // self.per_class
        first = scores.detach() + 4 * (labels[:, None] == owners)  # cosines are 2 apart at most
        kept = torch.zeros_like(scores).scatter(1, first.topk(self.kept, dim=1).indices, 1)
        reached = self._by_class(kept) > 0
        logits = self._by_class(scores * kept).masked_fill(~reached, -torch.inf)
        return F.cross_entropy(logits, labels)

    def _by_class(self, values: Tensor) -> Tensor:
        """(M, C N) -> (M, C), summed over the proxies of each class."""
        return values.view(len(values), self.classes, self.per_class).sum(2)
