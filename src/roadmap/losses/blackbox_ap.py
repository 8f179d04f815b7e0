"""AP through a blackbox ranker (Rolínek et al., CVPR 2020; Vlastelica et al., ICLR 2020).

The ranking rk(s) minimises <s, rk> over the permutations, so its derivative is replaced by that of a piecewise
linear interpolation: with g = ∂L/∂rk, one more ranking at s + lam·g gives

    ∂L/∂s = (rk(s + lam·g) - rk(s)) / lam
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_flag, check_number, check_scores
from roadmap.losses.comparison import Comparison
from roadmap.losses.rank_ap import mean_ap_loss

Perturbation = Literal["fixed", "random"]


def blackboxap(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    lam: float = 4.0,
    margin: float = 0.02,
    perturbation: Perturbation = "fixed",
) -> Tensor:
    """L_BlackBoxAP: 1 - AP of the scores after positives were lowered and negatives raised by margin / 2.

    Ranks are divided by the length of the list, as the authors do, so that `lam` means the same at every batch
    size. With margin = 0 the value is the exact AP loss.

    Args:
        scores: (M, N), higher is nearer.
        positives: (M, N) mask of P_i.
        negatives: (M, N) mask of N_i.
        lam: how far the scores are moved along the gradient before ranking again.
        margin: margin asked between positives and negatives; without one the loss vanishes once the order is right.
        perturbation: "fixed": every score moves by margin / 2. "random", as the authors' released code: each by
            margin / 2 times |z|, z ~ N(0, 1) drawn anew for every score and call from torch's generator.
    """
    check_scores(scores, positives, negatives)
    check_number("lam", lam, above=0)
    check_number("margin", margin, at_least=0)
    check_perturbation(perturbation)
    wide = at_least_float32(scores)
    # drawn without regard to the masks, which would show in later draws
    sizes = margin / 2 * torch.randn_like(wide).abs() if perturbation == "random" else margin / 2
    shifted = wide + sizes * (negatives.to(wide.dtype) - positives.to(wide.dtype))
    loss: Tensor = _BlackboxAPLoss.apply(shifted, positives, negatives, lam)  # type: ignore[no-untyped-call]
    return loss


def check_perturbation(perturbation: str) -> None:
    if perturbation not in get_args(Perturbation):
        raise ValueError(f"perturbation must be 'fixed' or 'random', got {perturbation!r}")


def _normalised_ranks(scores: Tensor, ranked: Tensor, listed: Tensor) -> Tensor:
    """rank among the `ranked` items / number of `listed` items: rank(k) = #{j ranked: s_j >= s_k}, as in Eq. (3).

    Counting instead of sorting positions makes ties cost the same whatever their order in memory.
    """
    ascending = (-scores).masked_fill(~ranked, math.inf).sort(dim=1).values
    count = torch.searchsorted(ascending, (-scores).contiguous(), right=True).to(scores.dtype)
    return count / listed.sum(1, keepdim=True).clamp(min=1)


class _BlackboxAPLoss(torch.autograd.Function):
    """The loss whole, not the ranker alone: the second ranking is not linear in the gradient that arrives, so a
    loss scaled for float16 gradients (`GradScaler`) or weighted in a sum would otherwise be moved by another lam."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, positives: Tensor, negatives: Tensor, lam: float) -> Tensor:
        listed = positives | negatives
        ranks = _normalised_ranks(scores, listed, listed)
        among_positives = _normalised_ranks(scores, positives, listed)
        precision = torch.where(positives, among_positives / torch.where(positives, ranks, 1), 0)
        # L = mean_i 1 - 1/|P_i| Σ_k rk⁺_k / rk_k, so that g_k = ∂L/∂rk_k = precision_k / rk_k / (|P_i| · queries)
        pairs = positives.sum(1, keepdim=True).clamp(min=1) * positives.any(1).sum().clamp(min=1)
        grad = torch.where(positives, precision / torch.where(positives, ranks, 1), 0) / pairs
        ctx.save_for_backward(scores, listed, ranks, grad)
        ctx.lam = lam
        return mean_ap_loss(precision.sum(1) / positives.sum(1).clamp(min=1), positives)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        scores, listed, ranks, grad = ctx.saved_tensors
        moved = _normalised_ranks(scores + ctx.lam * grad, listed, listed)
        return upstream * torch.where(listed, (moved - ranks) / ctx.lam, 0), None, None, None


class BlackBoxAP(nn.Module):
    """BlackBoxAP (Rolínek et al., CVPR 2020).

    Args:
        lam: interpolation parameter of the blackbox ranker.
        margin: margin asked between positives and negatives.
        include_self: whether, in the in-batch call, the query is one of its own positives.
        perturbation: "fixed", or "random" as the authors' released code; see `blackboxap`.
    """

    def __init__(
        self,
        lam: float = 4.0,
        margin: float = 0.02,
        include_self: bool = True,
        perturbation: Perturbation = "fixed",
    ) -> None:
        super().__init__()
        check_number("lam", lam, above=0)
        check_number("margin", margin, at_least=0)
        check_flag("include_self", include_self)
        check_perturbation(perturbation)
        self.lam = lam
        self.margin = margin
        self.include_self = include_self
        self.perturbation: Perturbation = perturbation

    def extra_repr(self) -> str:
        return (
            f"lam={self.lam}, margin={self.margin}, include_self={self.include_self}, "
            f"perturbation={self.perturbation!r}"
        )

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
        positives = c.positives(include_self=self.include_self)
        return c.loss_or_nan(blackboxap(c.scores, positives, c.negatives, self.lam, self.margin, self.perturbation))
