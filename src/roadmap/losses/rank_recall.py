"""Recall at k by counting ranks (Patel, Tolias, Matas, CVPR 2022).

rank(k) = 1 + Σ_{j ≠ k} sigmoid((s_j - s_k) / tau)               over all other items, positives and negatives alike
R@K_i = 1/|P_i| Σ_{k ∈ P_i} sigmoid((K - rank(k)) / tau_k)        the loss is 1 minus its mean over queries and the K

Paper and released code (yash0307/RecallatK_surrogate) differ. The paper has tau_k = 1 for every K, divides by |P_i| and
ranks the other items only. The code's tau_k was K, and is 1 in its last version; it divides by min(K, |P_i|), caps
each sum at K, and the query itself, though no positive, stands in the ranking of its own positives: each rank is one
too high.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor, nn

from roadmap.kernels import LossRule, Measure, RankRule, ap_from_scores
from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_count, check_flag, check_number, check_scores
from roadmap.losses.call import value_of_one_term
from roadmap.losses.comparison import Comparison
from roadmap.losses.mixing import mixed_table
from roadmap.losses.rank_ap import mean_ap_loss, rank_terms
from roadmap.losses.terms import Terms, ap_terms

Share = Literal["positives", "reachable"]


def recall_measure(ks: Sequence[int], tau_k: float | Sequence[float], share: Share) -> Measure:
    """Recall at `ks` as a measure of ranks, with its arguments checked."""
    if isinstance(ks, (int, float, str)) or not len(ks):
        raise ValueError(f"ks must list at least one number of places, such as (1, 2, 4), got {ks!r}")
    for k in ks:
        check_count("every k of ks", k, at_least=1)
    listed = list(tau_k) if isinstance(tau_k, Sequence) else [tau_k] * len(ks)
    for t in listed:
        check_number("tau_k", t, above=0)
    if len(listed) != len(ks):
        raise ValueError(f"tau_k must be one number, or one for each of the {len(ks)} ks, got {len(listed)}")
    if share not in get_args(Share):
        raise ValueError(f"share must be 'positives' or 'reachable', got {share!r}")
    return Measure("recall", tuple(float(k) for k in ks), tuple(float(t) for t in listed), share == "reachable")


def recall_words(measure: Measure) -> str:
    """A recall in the words of its arguments; nothing for another measure."""
    share: Share = "reachable" if measure.reachable else "positives"
    ks, temperatures = [int(k) for k in measure.ks], list(measure.temperatures)
    return f"ks={ks}, tau_k={temperatures}, share={share!r}" if measure.kind == "recall" else ""


def recall_at_k(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    ks: Sequence[int] = (1, 2, 4, 8, 16),
    tau: float = 0.01,
    tau_k: float | Sequence[float] = 1.0,
    share: Share = "positives",
) -> Tensor:
    """1 - the smooth recall at `ks`, as a scalar with a gradient; `RecallAtK` says what the arguments are.

    Args:
        scores: (M, N), higher is nearer; half precision is widened to float32.
        positives: (M, N) mask of P_i.
        negatives: (M, N) mask of N_i; an item in neither is ignored.

    A query without positives does not count; if none counts the loss is 0 with zero gradients.
    """
    check_scores(scores, positives, negatives)
    check_number("tau", tau, above=0)
    rule = RankRule("smoothap", tau, measure=recall_measure(ks, tau_k, share))
    return mean_ap_loss(ap_from_scores(at_least_float32(scores), positives, negatives, rule), positives)


class RecallAtK(nn.Module):
    """The recall@k surrogate loss (Patel, Tolias, Matas, CVPR 2022), with the settings of the paper.

    It does not go to 0: with tau_k = 1 a positive that ranks first has sigmoid(0) = 1/2 of R@1, and R@1 of a query with
    three positives is 1/3 at most.

    Args:
        ks: the numbers of places; the loss is the mean over them.
        tau: temperature of the sigmoid that counts ranks, the paper's tau_2.
        tau_k: temperature of the sigmoid of k - rank, the paper's tau_1; one number, or one for each k. The released
            code had tau_k = k, and has 1 in its last version.
        share: "positives" divides by |P_i|, as the paper; "reachable" by min(k, |P_i|), as the released code.
        include_self: whether, in the in-batch call, the query is one of its own positives; not in the paper.
        mix: similarity mixup (SiMix): for every two pictures of a class in the batch a virtual one between them, as
            query and as item, whose scores are mixtures of theirs. A class of n gets n (n - 1) / 2 of them, and the
            table of all scores is held. Draws at random; with `Distributed`, every process computes the whole batch.

    >>> import torch
    >>> loss = RecallAtK(mix=True)(torch.randn(8, 16, requires_grad=True), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    >>> loss.backward()
    """

    def __init__(
        self,
        ks: Sequence[int] = (1, 2, 4, 8, 16),
        tau: float = 0.01,
        tau_k: float | Sequence[float] = 1.0,
        share: Share = "positives",
        include_self: bool = False,
        mix: bool = False,
    ) -> None:
        super().__init__()
        self.measure = recall_measure(ks, tau_k, share)
        check_number("tau", tau, above=0)
        check_flag("include_self", include_self)
        check_flag("mix", mix)
        self.tau, self.include_self, self.mix = tau, include_self, mix

    def extra_repr(self) -> str:
        return f"{recall_words(self.measure)}, tau={self.tau}, include_self={self.include_self}, mix={self.mix}"

    @property
    def whole_batch(self) -> bool:
        """Whether the rows of some queries cannot be had without those of all: mixtures are of any two."""
        return self.mix

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        own: Tensor | None = None,
    ) -> Tensor:
        if self.mix and indices_tuple is not None:
            raise ValueError("mix pairs all pictures of a class by itself; leave out indices_tuple and the miner")
        c = Comparison.of(embeddings, labels, indices_tuple, ref_emb, ref_labels, own)
        fused = None if self.mix else c.fused_loss(self.rule)
        return self.value(self.terms(c)) if fused is None else fused

    def terms(self, c: Comparison) -> Terms:
        """Sum of 1 - the recall of each query that has a positive, and their number: one term."""
        if not self.mix:
            return rank_terms(c, self.rule)
        table = mixed_table(c)
        positives = table.positives(self.include_self)
        assert self.rule.ranks is not None
        recalls = ap_from_scores(table.scores, positives, table.negatives, self.rule.ranks)
        return c.terms_or_nan(ap_terms(recalls, positives))

    value = value_of_one_term

    @property
    def rule(self) -> LossRule:
        """Without the mixtures."""
        return LossRule(RankRule("smoothap", self.tau, measure=self.measure), None, include_self=self.include_self)
