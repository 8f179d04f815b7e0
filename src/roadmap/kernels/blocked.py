"""AP from a score matrix by plain torch, a block of positive pairs at a time: bounded memory on any device.

The pair (i, k) owns row i of the scores, shifted by s_k. Its ranks need nothing but that row, so value and
derivative come out of the same block and nothing of size (M, N, N) is ever held. With r⁺, r⁻ the two ranks of k

    ∂AP_i/∂r⁺ =  r⁻ / (r⁺ + r⁻)² / |P_i|        ∂AP_i/∂r⁻ = -r⁺ / (r⁺ + r⁻)² / |P_i|
    ∂r/∂s_j = H'(s_j - s_k)                      ∂r/∂s_k = -Σ_j H'(s_j - s_k)

Another measure than AP (`rules.Measure`) has other derivatives by r⁺ and r⁻, and nothing else changes (measures.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from roadmap.kernels.measures import gains, norms, slopes
from roadmap.kernels.rules import RankRule

# Elements in flight: a few arrays of this size stay in the second-level caches of two ordinary cores.
BLOCK_ELEMENTS = 1 << 18


def ap_and_slope(
    scores: Tensor, positives: Tensor, negatives: Tensor, rule: RankRule, with_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """AP_i (or what the rule's measure makes of the ranks), (M,), 0 where P_i is empty; and ∂AP_i/∂s_ij, (M, N), when
    asked for."""
    M, N = scores.shape
    ap = scores.new_zeros(M)
    slope = torch.zeros_like(scores) if with_slope else None
    pair_query, pair_k = positives.nonzero(as_tuple=True)
    size = positives.sum(1).clamp(min=1)  # |P_i|
    measure = rule.measure_or_ap
    norm = norms(measure, size, scores)
    share = 1 / norm
    height = max(1, BLOCK_ELEMENTS // max(N, 1))
    for first in range(0, len(pair_k), height):
        query, k = pair_query[first : first + height], pair_k[first : first + height]
        one_of_pair = torch.arange(len(k), device=k.device)
        pos, neg = positives[query], negatives[query]
        pos[one_of_pair, k] = False  # j ∈ P_i \ k
        rows = scores[query]
        t = rows - rows[one_of_pair, k][:, None]
        rank_pos, rank_neg, slope_pos, slope_neg = _ranks(t, pos, neg, rule, with_slope)
        ap.index_add_(0, query, gains(measure, rank_pos, rank_neg, size[query]))
        if slope is None or slope_neg is None:
            continue
        by_pos, by_neg = slopes(measure, rank_pos, rank_neg, size[query], share[query])
        grad = slope_neg.mul_(by_neg[:, None])
        if slope_pos is not None:
            grad += slope_pos.mul_(by_pos[:, None])
        grad[one_of_pair, k] = -grad.sum(1)
        slope.index_add_(0, query, grad)
    return ap / norm, slope


def _ranks(
    t: Tensor, pos: Tensor, neg: Tensor, rule: RankRule, with_slope: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """rank⁺, rank⁻ and the slopes of H⁺ (None: a step has none) and H⁻ at every t, masked."""
    smooth = torch.sigmoid(t / rule.tau)
    slope_pos = slope_neg = None
    if rule.kind == "smoothap":
        rank_pos = 1 + (smooth * pos).sum(1)
        rank_neg = (smooth * neg).sum(1)
        if with_slope:
            slope = smooth * (1 - smooth) / rule.tau
            slope_pos, slope_neg = slope * pos, slope * neg
        return rank_pos, rank_neg, slope_pos, slope_neg
    rank_pos = 1 + ((t >= 0) & pos).sum(1).to(t.dtype)
    far = t > rule.delta
    h = torch.where(far, rule.rho * (t - rule.delta) + rule.top, torch.where(t >= 0, smooth + rule.start, smooth))
    rank_neg = (h * neg).sum(1)
    if with_slope:
        slope_neg = smooth.mul_(1 - smooth).div_(rule.tau).masked_fill_(far, rule.rho) * neg
    return rank_pos, rank_neg, None, slope_neg
