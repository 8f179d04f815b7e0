"""AP over a soft histogram of the scores: FastAP and SoftBinAP are one formula over different bins.

h_b = Σ_j relu(1 - |s_j - c_b| / width)  over bins c_1 > c_2 > ..., h⁺_b the same over the positives
AP_i = 1/|P_i| Σ_b h⁺_b · (h⁺_1 + ... + h⁺_b) / (h_1 + ... + h_b)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_count, check_flag, check_scores
from roadmap.losses.comparison import Comparison
from roadmap.losses.rank_ap import mean_ap_loss


def fastap(scores: Tensor, positives: Tensor, negatives: Tensor, bins: int = 10) -> Tensor:
    """L_FastAP (Cakir et al., CVPR 2019): bins + 1 nodes over all cosines.

    The authors bin the squared Euclidean distance 2 - 2s of unit vectors over [0, 4]; that is the same histogram.
    """
    check_count("bins", bins, at_least=1)
    return _binned_ap_loss(scores, positives, negatives, bins + 1)


def softbinap(scores: Tensor, positives: Tensor, negatives: Tensor, bins: int = 20) -> Tensor:
    """L_SoftBinAP (Revaud et al., ICCV 2019): M = bins nodes over all cosines, the paper's default 20."""
    check_count("bins", bins, at_least=2)
    return _binned_ap_loss(scores, positives, negatives, bins)


def _binned_ap_loss(scores: Tensor, positives: Tensor, negatives: Tensor, nodes: int) -> Tensor:
    """1 - mean binned AP over the queries with a positive; `nodes` evenly spaced from +1 down to -1."""
    check_scores(scores, positives, negatives)
    wide = at_least_float32(scores)
    width = 2 / (nodes - 1)
    histograms = []
    for node in range(nodes):  # one (M, N) weight at a time: memory does not grow with the bins
        weight = (1 - (wide - (1 - node * width)).abs() / width).clamp(min=0)
        histograms.append(torch.stack([(weight * positives).sum(1), (weight * negatives).sum(1)]))
    h_pos, h_neg = torch.stack(histograms, dim=-1)  # each (M, nodes)
    found_pos = h_pos.cumsum(1)
    found = found_pos + h_neg.cumsum(1)
    # A bin before the first item holds 0 of 0; its precision multiplies h_pos = 0, so any finite value will do.
    precision = found_pos / torch.where(found > 0, found, torch.ones_like(found))
    ap = (h_pos * precision).sum(1) / positives.sum(1).clamp(min=1)
    return mean_ap_loss(ap, positives)


class FastAP(nn.Module):
    """FastAP (Cakir et al., CVPR 2019). Its authors drop the query from its own ranking: `include_self=False`.

    Args:
        bins: number of bins over the cosines; bins + 1 nodes.
        include_self: whether, in the in-batch call, the query is one of its own positives.
    """

    def __init__(self, bins: int = 10, include_self: bool = True) -> None:
        super().__init__()
        check_count("bins", bins, at_least=1)
        check_flag("include_self", include_self)
        self.bins = bins
        self.include_self = include_self

    def extra_repr(self) -> str:
        return f"bins={self.bins}, include_self={self.include_self}"

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        c = Comparison.of(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        positives = c.positives(include_self=self.include_self)
        return c.loss_or_nan(fastap(c.scores, positives, c.negatives, self.bins))


class SoftBinAP(nn.Module):
    """SoftBinAP (Revaud et al., ICCV 2019).

    Args:
        bins: number of nodes over the cosines.
        include_self: whether, in the in-batch call, the query is one of its own positives.
    """

    def __init__(self, bins: int = 20, include_self: bool = True) -> None:
        super().__init__()
        check_count("bins", bins, at_least=2)
        check_flag("include_self", include_self)
        self.bins = bins
        self.include_self = include_self

    def extra_repr(self) -> str:
        return f"bins={self.bins}, include_self={self.include_self}"

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        c = Comparison.of(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        positives = c.positives(include_self=self.include_self)
        return c.loss_or_nan(softbinap(c.scores, positives, c.negatives, self.bins))
