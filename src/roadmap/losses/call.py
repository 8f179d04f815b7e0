"""The call that all losses have, written once for those that are sums over queries.

Such a loss says its `terms` over a comparison and the `value` they come to, and takes its `forward` from here:

    class SupAP(nn.Module):
        forward = forward_by_rule
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from roadmap.kernels import LossRule
from roadmap.losses.comparison import Comparison
from roadmap.losses.terms import Terms


class ByTerms(Protocol):
    def terms(self, c: Comparison) -> Terms: ...

    def value(self, terms: Terms) -> Tensor: ...


class ByRule(ByTerms, Protocol):
    @property
    def rule(self) -> LossRule: ...


def forward_by_terms(
    self: ByTerms,
    embeddings: Tensor,
    labels: Tensor,
    indices_tuple: Sequence[Tensor] | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    own: Tensor | None = None,
) -> Tensor:
    """The loss of a batch, or of queries against a gallery; `Comparison.of` says what the arguments are."""
    return self.value(self.terms(Comparison.of(embeddings, labels, indices_tuple, ref_emb, ref_labels, own)))


def forward_by_rule(
    self: ByRule,
    embeddings: Tensor,
    labels: Tensor,
    indices_tuple: Sequence[Tensor] | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    own: Tensor | None = None,
) -> Tensor:
    """As `forward_by_terms`; where a kernel computes what `rule` describes in one go, it does."""
    c = Comparison.of(embeddings, labels, indices_tuple, ref_emb, ref_labels, own)
    fused = c.fused_loss(self.rule)
    return self.value(self.terms(c)) if fused is None else fused


class TwoParts(Protocol):
    lam: float


def value_of_two_terms(self: TwoParts, terms: Terms) -> Tensor:
    """(1 - lam) of the first and lam of the second; `terms` may be sums over several comparisons."""
    means = terms.means
    return (1 - self.lam) * means[0] + self.lam * means[1]


def value_of_one_term(self: object, terms: Terms) -> Tensor:
    """The loss that `terms` come to; they may be sums over several comparisons."""
    return terms.means[0]
