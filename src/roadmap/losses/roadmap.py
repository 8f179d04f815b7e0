"""ROADMAP, Eq. (2): SupAP and calibration over one comparison."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from roadmap.kernels import CalibrationRule, LossRule, RankRule
from roadmap.losses.arguments import Average, check_number
from roadmap.losses.calibration import Calibration, calibration
from roadmap.losses.comparison import compared
from roadmap.losses.rank_ap import SupAP, supap


class ROADMAP(nn.Module):
    """L_ROADMAP = (1 - lam) L_SupAP + lam L_calibr., Eq. (2).

    Args:
        lam: weight of the calibration, in [0, 1].
        tau, rho, delta, include_self: see `SupAP`.
        alpha, beta, average: see `Calibration`.

    >>> import torch
    >>> embeddings = torch.randn(8, 16, requires_grad=True)
    >>> loss = ROADMAP()(embeddings, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    >>> loss.backward()
    """

    def __init__(
        self,
        lam: float = 0.5,
        tau: float = 0.01,
        rho: float = 100.0,
        delta: float | None = None,
        alpha: float = 0.9,
        beta: float = 0.6,
        average: Average = "violating",
        include_self: bool = True,
    ) -> None:
        super().__init__()
        check_number("lam", lam, at_least=0)
        if lam > 1:
            raise ValueError(f"lam must be <= 1: the loss is (1 - lam) SupAP + lam calibration, got {lam}")
        self.lam = lam
        self.supap = SupAP(tau, rho, delta, include_self)
        self.calibration = Calibration(alpha, beta, average)

    def extra_repr(self) -> str:
        return f"lam={self.lam}"

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        c = compared(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        ranks, scores = self.supap, self.calibration
        rule = LossRule(
            RankRule("supap", ranks.tau, ranks.rho, ranks.delta),
            CalibrationRule(scores.alpha, scores.beta, scores.average),
            ap_weight=1 - self.lam,
            calibration_weight=self.lam,
            include_self=ranks.include_self,
        )
        fused = c.fused_loss(rule)
        if fused is not None:
            return fused
        positives = c.positives(include_self=ranks.include_self)
        ap_loss = supap(c.scores, positives, c.negatives, ranks.tau, ranks.rho, ranks.delta)
        pairs = c.positives(include_self=False)
        score_loss = calibration(c.scores, pairs, c.negatives, scores.alpha, scores.beta, scores.average)
        return c.poisoned((1 - self.lam) * ap_loss + self.lam * score_loss)
