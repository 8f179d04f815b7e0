"""SupRank (Ramzi et al., "Optimization of Rank Losses for Image Retrieval", 2023): a rank loss whose ranks are counted
as SupAP counts them, and in place of the calibration a proxy for each class, which holds it together across batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor, nn

from roadmap.kernels import NDCG, LossRule, Measure, RankRule, ap_from_scores
from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_flag, check_labels, check_number, check_scores, check_share
from roadmap.losses.call import forward_by_rule, value_of_one_term, value_of_two_terms
from roadmap.losses.clusters import Clusters, WithoutClusters, cluster_terms
from roadmap.losses.comparison import Comparison
from roadmap.losses.rank_ap import check_h_minus, mean_ap_loss, rank_terms
from roadmap.losses.rank_recall import Share, recall_measure, recall_words
from roadmap.losses.terms import Terms

Ranking = Literal["ap", "ndcg", "recall"]


def suprank(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    proxy_scores: Tensor,
    classes: Tensor,
    lam: float = 0.1,
    temperature: float = 0.05,
    measure: Ranking = "ap",
    tau: float = 0.01,
    rho: float = 100.0,
    delta: float | None = None,
    start: float = 0.5,
    offset: float | None = None,
    ks: Sequence[int] = (1, 2, 4, 8, 16),
    tau_k: float | Sequence[float] = 1.0,
    share: Share = "reachable",
) -> Tensor:
    """(1 - lam) L_rank + lam L_DG, as a scalar with a gradient; `SupRank` says what the arguments are.

    Args:
        scores, positives, negatives: as in `roadmap.losses.supap`.
        proxy_scores: (M, C) cosines of the queries with the proxies of all classes.
        classes: (M,) the class of each query, in [0, C); -1 for one that has no proxy.
    """
    check_scores(scores, positives, negatives)
    _check_weights(lam, temperature)
    if proxy_scores.ndim != 2 or len(proxy_scores) != len(scores):
        raise ValueError(
            f"proxy_scores must have shape ({len(scores)}, classes), a row for each query, got "
            f"{tuple(proxy_scores.shape)}"
        )
    check_labels("classes", classes, "scores", scores)
    delta = check_h_minus(tau, rho, delta, start, offset)
    rule = RankRule("supap", tau, rho, delta, start, offset, _measure(measure, ks, tau_k, share))
    ranking = mean_ap_loss(ap_from_scores(at_least_float32(scores), positives, negatives, rule), positives)
    return (1 - lam) * ranking + lam * cluster_terms(at_least_float32(proxy_scores), classes, temperature).means[0]


def _measure(measure: Ranking, ks: Sequence[int], tau_k: float | Sequence[float], share: Share) -> Measure | None:
    if measure not in get_args(Ranking):
        raise ValueError(f"measure must be 'ap', 'ndcg' or 'recall', got {measure!r}")
    recall = recall_measure(ks, tau_k, share)
    return {"ap": None, "ndcg": NDCG, "recall": recall}[measure]


def _check_weights(lam: float, temperature: float) -> None:
    check_share(lam, "rank loss + lam proxies")
    check_number("temperature", temperature, above=0)


class SupRank(nn.Module):
    """(1 - lam) L_rank + lam L_DG: a rank loss, and a proxy for each class that holds it together across batches.

    L_rank is 1 - AP, 1 - NDCG or 1 - recall at k over ranks counted with a step H⁺ and H⁻ of Eq. (4): `SupAP`,
    `SupNDCG`, or the recall that way. L_DG is the cluster loss of HAPPIER (`roadmap.losses.clusters`). Every query
    counts in it, whether it has positives or not; a gallery is ranked but has no proxies. The proxies are weights: give
    `loss.parameters()` to an optimiser (the released settings: Adam at a rate of its own).

    Args:
        num_classes: of the training set; labels of the queries lie in [0, num_classes).
        embedding_size: dimensions of the embeddings.
        lam: weight of the proxies, in [0, 1]. Released: 0.1, in one of five settings for NDCG 0.5; for recall 1 + 1.
        temperature: of the softmax.
        measure: "ap", "ndcg" or "recall".
        tau, rho, delta, include_self, start, offset: see `SupAP`.
        ks, tau_k, share: of the recall, see `RecallAtK`; as released, it divides by what k places can hold.

    >>> import torch
    >>> loss = SupRank(num_classes=4, embedding_size=16)
    >>> loss(torch.randn(8, 16, requires_grad=True), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])).backward()
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        lam: float = 0.1,
        temperature: float = 0.05,
        measure: Ranking = "ap",
        tau: float = 0.01,
        rho: float = 100.0,
        delta: float | None = None,
        include_self: bool = True,
        start: float = 0.5,
        offset: float | None = None,
        ks: Sequence[int] = (1, 2, 4, 8, 16),
        tau_k: float | Sequence[float] = 1.0,
        share: Share = "reachable",
    ) -> None:
        super().__init__()
        _check_weights(lam, temperature)
        check_flag("include_self", include_self)
        delta = check_h_minus(tau, rho, delta, start, offset)
        ranks = RankRule("supap", tau, rho, delta, start, offset, _measure(measure, ks, tau_k, share))
        self.clusters = Clusters(num_classes, embedding_size, temperature)
        self.lam, self.rule = lam, LossRule(ranks, None, include_self=include_self)

    def extra_repr(self) -> str:
        ranks = self.rule.ranks
        assert ranks is not None
        said = f"lam={self.lam}, measure={ranks.measure_or_ap.kind!r}, tau={ranks.tau}, rho={ranks.rho}"
        said += f", delta={ranks.delta:.6g}, include_self={self.rule.include_self}, start={ranks.start}"
        said += f", offset={ranks.offset}"
        more = recall_words(ranks.measure_or_ap)
        return f"{said}, {more}" if more else said

    @property
    def embedding_size(self) -> int:
        """The dimension that the proxies were made for."""
        return int(self.clusters.proxies.shape[1])

    @property
    def against_memory(self) -> nn.Module:
        """The loss without the proxies."""
        return WithoutClusters(_Ranks(self.rule), self.lam)

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
        fused = c.fused_loss(self.rule)
        if fused is None:
            return self.value(self.terms(c))
        return (1 - self.lam) * fused + self.lam * self.clusters.loss(c)

    def terms(self, c: Comparison) -> Terms:
        """The term of the ranks, and the cross-entropies with the number of queries: two terms."""
        return Terms.concatenation(rank_terms(c, self.rule), self.clusters.terms(c))

    value = value_of_two_terms


class _Ranks(nn.Module):
    """The rank loss alone."""

    def __init__(self, rule: LossRule) -> None:
        super().__init__()
        self.rule = rule

    forward = forward_by_rule

    def terms(self, c: Comparison) -> Terms:
        return rank_terms(c, self.rule)

    value = value_of_one_term
