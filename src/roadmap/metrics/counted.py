"""Metrics of one query each, from counts alone: for every positive, who scores at least as high, and who higher.

All tensors are (n, P): n queries, their positives from the highest score down, short rows filled up at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from roadmap.metrics.scores import check_scores
from roadmap.metrics.vectors import fixed_order_sum

Ties = Literal["pessimistic", "mean"]


def check_ties(ties: str) -> None:
    if ties not in get_args(Ties):
        raise ValueError(f"ties must be one of {get_args(Ties)}, got {ties!r}")


class PositiveCounts(NamedTuple):
    """For each positive of each query, in its ranking (without the query itself and without junk)."""

    valid: Tensor  # (n, P) bool: a positive, not a filled-up place
    positives_at_least: Tensor  # positives with score >= its own, itself among them: rank+ of Eq 1
    positives_above: Tensor  # positives with score > its own
    negatives_at_least: Tensor  # negatives with score >= its own: rank- of Eq 1 with H(0) = 1
    negatives_above: Tensor | None  # negatives with score > its own; only the mean over ties asks for it


def counts_of_scores(scores: Tensor, positives: Tensor, negatives: Tensor) -> PositiveCounts:
    """Counts from scores that are already there.

    Args:
        scores: (n, N), higher is nearer.
        positives: (n, N) bool; negatives: (n, N) bool; an item in neither is not in the ranking.
    """
    most = int(positives.sum(1).max())
    own = torch.where(positives, scores, -torch.inf).sort(dim=1, descending=True).values[:, :most].contiguous()
    valid = torch.arange(most, device=scores.device) < positives.sum(1, keepdim=True)
    own = torch.where(valid, own, -torch.inf)
    falling, others = -own, torch.where(negatives, -scores, torch.inf).sort(dim=1).values
    return PositiveCounts(
        valid,
        torch.searchsorted(falling, falling, right=True),
        torch.searchsorted(falling, falling, right=False),
        torch.searchsorted(others, falling, right=True),
        torch.searchsorted(others, falling, right=False),
    )


def average_precision(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor | None = None,
    *,
    reduction: Literal["mean", "none"] = "mean",
    ties: Ties = "pessimistic",
) -> Tensor:
    """Exact AP, Eqs. (1) and (3), in float64. No gradient.

    Args:
        scores: (M, N), finite, higher is nearer.
        positives: (M, N) mask of P_i.
        negatives: (M, N) mask of N_i; an item in neither is not in the ranking. None: all that are not positive.
        reduction: "mean" over the queries that have a positive (NaN if none has), or "none": (M,), NaN where
            P_i is empty.
        ties: "pessimistic": H(0) = 1 as in Eq. (3), a tie counts against the positive; "mean": the expectation over
            all orders of equal scores.
    """
    check_ties(ties)
    if reduction not in ("mean", "none"):
        raise ValueError(f"reduction must be 'mean' or 'none', got {reduction!r}")
    if negatives is None:
        negatives = ~positives if isinstance(positives, Tensor) and positives.dtype == torch.bool else positives
    check_scores(scores, positives, negatives)
    ap = torch.full((len(scores),), torch.nan, dtype=torch.float64, device=scores.device)
    if bool(positives.any()):
        # widened: ties stay ties, and no search among half-precision numbers exists on a CPU
        wide = scores.detach().to(torch.promote_types(scores.dtype, torch.float32))
        ap = average_precision_of(counts_of_scores(wide, positives, negatives), ties)
    return ap.nanmean() if reduction == "mean" else ap


def query_value_names(ks: Sequence[int]) -> list[str]:
    """What `query_values` computes."""
    return [*(f"R@{k}" for k in ks), "P@1", "R-precision", "mAP@R", "mAP", "AP loss"]


def query_values(counts: PositiveCounts, ks: Sequence[int], ties: Ties) -> dict[str, Tensor]:
    """Every metric of every query, (n,) float64; each query must have a positive."""
    hits = {f"R@{k}": hit(counts, k, ties) for k in ks}
    ap = average_precision_of(counts, ties)
    return hits | {
        "P@1": hit(counts, 1, ties),
        "R-precision": r_precision(counts, ties),
        "mAP@R": average_precision_at_r(counts, ties),
        "mAP": ap,
        "AP loss": 1 - ap,
    }


def hit(counts: PositiveCounts, k: int, ties: Ties) -> Tensor:
    """Recall@k: whether a positive is among the first k. Only the group of the best positive matters."""
    if ties == "pessimistic":  # the negatives of a tied group come first
        return (counts.negatives_at_least[:, 0] < k).double()
    above, tied, group = _first_group(counts)
    places = (k - above).clamp(min=0).minimum(group)  # of the first k, those this group takes
    # no positive there: all `places` are taken by tied negatives, C(tied, places) / C(group, places)
    log_miss = (tied + 1).lgamma() - (tied - places + 1).clamp(min=1).lgamma()
    log_miss += (group - places + 1).lgamma() - (group + 1).lgamma()
    return torch.where(places > tied, 1.0, 1 - log_miss.exp())


def average_precision_of(counts: PositiveCounts, ties: Ties) -> Tensor:
    """AP of Eq 1: the mean of rank+ / rank over the positives; H(0) = 1 unless the mean over orders is asked for."""
    if ties == "pessimistic":
        found = counts.positives_at_least.double()
        return row_means(found / (found + counts.negatives_at_least), counts.valid)
    _, _, group = tied_groups(counts)
    return row_means(_expected_precision(counts, places=group), counts.valid)


def r_precision(counts: PositiveCounts, ties: Ties) -> Tensor:
    """The share of positives among the first R, R being their number."""
    r = counts.valid.sum(1, keepdim=True)
    if ties == "pessimistic":
        return row_means((worst_rank(counts) <= r).double(), counts.valid)
    above_positive, above_negative, group = tied_groups(counts)
    places = (r - above_positive - above_negative).clamp(min=0).minimum(group)
    return row_means(places / group, counts.valid)


def average_precision_at_r(counts: PositiveCounts, ties: Ties) -> Tensor:
    """mAP@R of one query: the sum over the positives among the first R of their precision, divided by R."""
    r = counts.valid.sum(1, keepdim=True)
    if ties == "pessimistic":
        rank = worst_rank(counts)
        return row_means(torch.where(rank <= r, _order(counts) / rank, 0.0), counts.valid)
    above_positive, above_negative, group = tied_groups(counts)
    places = (r - above_positive - above_negative).clamp(min=0).minimum(group)
    return row_means(_expected_precision(counts, places), counts.valid)


def _order(counts: PositiveCounts) -> Tensor:
    """1, 2, ... P: the rank among positives when tied positives are told apart."""
    return torch.arange(1, counts.valid.shape[1] + 1, device=counts.valid.device, dtype=torch.float64)


def worst_rank(counts: PositiveCounts) -> Tensor:
    """The rank of each positive when, in every tied group, the negatives come first."""
    return _order(counts) + counts.negatives_at_least


def tied_groups(counts: PositiveCounts) -> tuple[Tensor, Tensor, Tensor]:
    """Of each positive: positives above its tied group, negatives above it, and the group's size; float64."""
    assert counts.negatives_above is not None, "the mean over ties needs the counts of strictly higher negatives"
    group = counts.positives_at_least - counts.positives_above + counts.negatives_at_least - counts.negatives_above
    # a filled-up place has no group; 1 keeps its (unused) arithmetic finite
    group = torch.where(counts.valid, group, 1)
    return counts.positives_above.double(), counts.negatives_above.double(), group.double()


def _first_group(counts: PositiveCounts) -> tuple[Tensor, Tensor, Tensor]:
    """Of the best positive: negatives above its tied group, negatives in it, and its size; float64."""
    assert counts.negatives_above is not None, "the mean over ties needs the counts of strictly higher negatives"
    above = counts.negatives_above[:, 0].double()
    tied = counts.negatives_at_least[:, 0] - above
    return above, tied, counts.positives_at_least[:, 0] + tied


def _expected_precision(counts: PositiveCounts, places: Tensor) -> Tensor:
    """The expected precision at a positive, over all orders of its tied group, where it falls on the first `places`.

    With A positives and a items above the group of g items, p of them positive: the positive stands at each r in
    1..g with probability 1/g; the others are then before it with probability (r-1)/(g-1) each. So

        1/g sum_{r=1}^{places} (A + 1 + (r-1) c) / (a + r),   c = (p-1)/(g-1),

    and with A + 1 + (r-1) c = c (a + r) + (A + 1 - c - c a) the sum is
    places c + (A + 1 - c - c a) (H(a + places) - H(a)), H the harmonic numbers.
    """
    above_positive, above_negative, group = tied_groups(counts)
    tied_positives = (counts.positives_at_least - counts.positives_above).double()
    c = (tied_positives - 1) / (group - 1).clamp(min=1)
    return expected_ratio(above_positive + 1, c, above_positive + above_negative, group, places)


def expected_ratio(first: Tensor, slope: Tensor, above: Tensor, group: Tensor, places: Tensor) -> Tensor:
    """1/g sum_{r=1}^{places} (first + (r-1) slope) / (above + r), in closed form."""
    harmonic = torch.digamma(above + places + 1) - torch.digamma(above + 1)
    expected = (places * slope + (first - slope - slope * above) * harmonic) / group
    # alone in its group: exactly, without the cancellation of two large digammas
    return torch.where(group == 1, (places > 0) * first / (above + 1), expected)


def row_means(values: Tensor, valid: Tensor) -> Tensor:
    """Row means over the valid places; by descending score and in a fixed order, so that no input order shows."""
    return fixed_order_sum(torch.where(valid, values, 0.0)) / valid.sum(1)
