"""Triplet SCT: one triplet per query, and a linear push where the negative is the nearer one (Xuan et al., 2020)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_number, check_scores
from roadmap.losses.call import forward_by_terms, value_of_one_term
from roadmap.losses.comparison import Comparison
from roadmap.losses.terms import Terms

Method = Literal["sct", "hn", "shn"]
Positive = Literal["easy", "hard"]


def triplet_sct(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    method: Method = "sct",
    lam: float = 1.0,
    temperature: float = 0.1,
    positive: Positive = "easy",
    ceiling: float | None = 0.8,
    copies: float | None = 0.9999,
) -> Tensor:
    """The mean over the queries that have a triplet (a, p, n) of

        lam s_an                           if s_an > s_ap, or s_an > ceiling
        log(1 + e^((s_an - s_ap) / T))     else.

    Args:
        scores: (M, N), higher is nearer.
        positives: (M, N) mask of P_i, without the query itself.
        negatives: (M, N) mask of N_i.
        method, lam, temperature, positive, ceiling, copies: see `TripletSCT`.
    """
    check_scores(scores, positives, negatives)
    _check(method, lam, temperature, positive, ceiling, copies)
    triplets = _triplets(at_least_float32(scores), positives, negatives, method, positive, copies)
    return _terms(*triplets, method, lam, temperature, ceiling).means[0]


class TripletSCT(nn.Module):
    """Selectively contrastive triplets (Xuan, Stylianou, Liu, Pless, "Hard negative examples are hard, but useful",
    ECCV 2020).

    Each query a takes its easiest positive p and its hardest negative n. Where the negative is the nearer one, the
    gradient of a triplet pulls the query towards both; the loss is then lam s_an alone, which only pushes it away from
    the negative. Elsewhere it is the softmax of the two scores. A query without a positive or a negative adds nothing.

    Args:
        method: "sct"; "hn", the same triplets with the softmax alone, which collapses; "shn", semi-hard negatives: the
            nearest that is no nearer than the positive, and a query that has none adds nothing.
        lam: weight of the linear push.
        temperature: of the softmax.
        positive: "easy", the nearest; "hard", the furthest.
        ceiling: a negative with a higher score is pushed linearly too, whatever the positive's; None for the paper's
            equation. The released code has 0.8, and its results are those that others cite.
        copies: a positive with a higher score is taken for a copy of the query's picture, and left out; None for none.

    >>> import torch
    >>> TripletSCT()(torch.randn(8, 16, requires_grad=True), torch.arange(8) // 2).backward()
    """

    def __init__(
        self,
        method: Method = "sct",
        lam: float = 1.0,
        temperature: float = 0.1,
        positive: Positive = "easy",
        ceiling: float | None = 0.8,
        copies: float | None = 0.9999,
    ) -> None:
        super().__init__()
        _check(method, lam, temperature, positive, ceiling, copies)
        self.method: Method = method
        self.lam, self.temperature = lam, temperature
        self.positive: Positive = positive
        self.ceiling, self.copies = ceiling, copies

    def extra_repr(self) -> str:
        said = f"method={self.method!r}, lam={self.lam}, temperature={self.temperature}, positive={self.positive!r}"
        return said + f", ceiling={self.ceiling}, copies={self.copies}"

    forward = forward_by_terms

    def terms(self, c: Comparison) -> Terms:
        """The sum over the queries that have a triplet, and their number: one term."""
        positives = c.positives(include_self=False)
        triplets = _triplets(c.scores, positives, c.negatives, self.method, self.positive, self.copies)
        return c.terms_or_nan(_terms(*triplets, self.method, self.lam, self.temperature, self.ceiling))

    value = value_of_one_term


def _triplets(
    scores: Tensor, positives: Tensor, negatives: Tensor, method: Method, positive: Positive, copies: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """s_ap and s_an of every query, (M,), and whether it has both. Of equal scores the first counts."""
    if scores.shape[1] == 0:  # nothing to take a maximum of
        nothing = scores.sum(1)
        return nothing, nothing, torch.zeros_like(nothing, dtype=torch.bool)
    seen = scores.detach()
    if copies is not None:
        positives = positives & (seen <= copies)
    easy = positive == "easy"
    ranked = torch.where(positives, seen if easy else -seen, -torch.inf)
    s_ap = scores.gather(1, ranked.argmax(1, keepdim=True))
    if method == "shn":
        negatives = negatives & (seen <= s_ap.detach())
    s_an = scores.gather(1, torch.where(negatives, seen, -torch.inf).argmax(1, keepdim=True))
    return s_ap[:, 0], s_an[:, 0], positives.any(1) & negatives.any(1)


def _terms(
    s_ap: Tensor, s_an: Tensor, complete: Tensor, method: Method, lam: float, temperature: float, ceiling: float | None
) -> Terms:
    values = -F.logsigmoid((s_ap - s_an) / temperature)  # softplus is linear beyond 20
    if method == "sct":
        hard = s_an > s_ap if ceiling is None else (s_an > s_ap) | (s_an > ceiling)
        values = torch.where(hard, lam * s_an, values)
    return Terms((values * complete).sum()[None], complete.sum()[None])


def _check(
    method: str, lam: float, temperature: float, positive: str, ceiling: float | None, copies: float | None
) -> None:
    if method not in get_args(Method):
        raise ValueError(f"method must be 'sct', 'hn' or 'shn', got {method!r}")
    if positive not in get_args(Positive):
        raise ValueError(f"positive must be 'easy' or 'hard', got {positive!r}")
    check_number("lam", lam, at_least=0)
    check_number("temperature", temperature, above=0)
    for name, value in (("ceiling", ceiling), ("copies", copies)):
        if value is not None:
            check_number(name, value, above=-1)
