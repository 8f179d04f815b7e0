"""ROADMAP, Eq. (2): SupAP and calibration over one comparison."""

from __future__ import annotations

from torch import Tensor, nn

from roadmap.kernels import LossRule
from roadmap.kernels.rules import AP_COUNT, AP_SUM
from roadmap.losses.arguments import Average, check_share
from roadmap.losses.call import forward_by_rule
from roadmap.losses.comparison import Comparison
from roadmap.losses.rank_ap import SupAP
from roadmap.losses.terms import Terms
from roadmap.losses.thresholds import Calibration


class ROADMAP(nn.Module):
    """L_ROADMAP = (1 - lam) L_SupAP + lam L_calibr., Eq. (2).

    Args:
        lam: weight of the calibration, in [0, 1]. The released code adds the two 1 + 1; twice the loss is the same
            step under Adam, but for the weight decay, which then counts half as much (docs/maths.md).
        tau, rho, delta, include_self, start, offset: see `SupAP`.
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
        start: float = 0.5,
        offset: float | None = None,
    ) -> None:
        super().__init__()
        check_share(lam, "SupAP + lam calibration")
        self.lam = lam
        self.supap = SupAP(tau, rho, delta, include_self, start, offset)
        self.calibration = Calibration(alpha, beta, average)

    def extra_repr(self) -> str:
        return f"lam={self.lam}"

    forward = forward_by_rule

    def terms(self, c: Comparison) -> Terms:
        """The term of `SupAP` and the two of `Calibration`, from one pass over the scores."""
        found = c.terms(self.rule)
        if found is None:
            return Terms.concatenation(self.supap.terms(c), self.calibration.terms(c))
        return Terms(found[AP_SUM::2], found[AP_COUNT::2].detach())

    def value(self, terms: Terms) -> Tensor:
        """The loss that `terms` come to; they may be sums over several comparisons."""
        means = terms.means
        return (1 - self.lam) * means[0] + self.lam * (means[1] + means[2])

    @property
    def rule(self) -> LossRule:
        ranks, scores = self.supap.rule, self.calibration.rule
        return LossRule(ranks.ranks, scores.calibration, 1 - self.lam, self.lam, ranks.include_self)
