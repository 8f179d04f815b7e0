"""SEC: a loss, and a constraint that brings the embeddings onto one sphere (Zhang, Li, Zhang, NeurIPS 2020)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_number
from roadmap.losses.distributed import Distributed, against_memory, takes_own, takes_paths
from roadmap.losses.metric_learning import check_module


class SphericalConstraint(nn.Module):
    """Any loss + weight x mean_i (|x_i| - mu)^2, where mu is the mean length of the batch; called as the loss is.

    A loss of cosines moves x_i by a gradient that is orthogonal to it and falls as 1 / |x_i|: short vectors turn fast
    and long ones hardly. The constraint brings all to one length ("Deep Metric Learning with Spherical Embedding"). It
    alone moves lengths. With a gallery it holds the queries. `Distributed` shows it the whole batch on every process.

    The model must give vectors at their own length: where they come normalised there is nothing to constrain.

    Args:
        loss: any loss of this package or of `roadmap.losses.pml`. `Distributed` and `Memory` go around this one.
        weight: of the constraint, eta in the paper.
        momentum: rho of the paper's appendix D. mu is (1 - momentum) x the mu of the call before + momentum x the mean
            length of this batch; the first call takes its own. 1: no average over calls. In evaluation mode
            (`loss.eval()`) mu stays as it is.

    Attributes:
        uses_lengths: True: normalised embeddings would make another loss of it.
        against_memory: the loss without the constraint: what a memory compares with earlier batches, so that the
            lengths of the batch count once.

    >>> import torch
    >>> from roadmap.losses import ROADMAP
    >>> loss = SphericalConstraint(ROADMAP(), weight=0.5)
    >>> loss(torch.randn(8, 16, requires_grad=True), torch.arange(8) // 2).backward()
    """

    uses_lengths = True
    mu: Tensor

    def __init__(self, loss: nn.Module, weight: float = 1.0, momentum: float = 1.0) -> None:
        super().__init__()
        check_module("loss", loss)
        if isinstance(loss, SphericalConstraint):
            raise ValueError("the loss has the constraint already; pass the loss inside it")
        if isinstance(loss, Distributed) or getattr(loss, "goes_outside", False):
            around = type(loss).__name__
            raise ValueError(f"a {around} goes around the constraint: write {around}(SphericalConstraint(loss), ...)")
        check_number("weight", weight, at_least=0)
        check_number("momentum", momentum, above=0)
        if momentum > 1:
            raise ValueError(f"momentum must be <= 1, got {momentum}")
        self.loss = loss
        self.weight, self.momentum = weight, momentum
        if momentum < 1:
            self.register_buffer("mu", torch.tensor(torch.nan))  # NaN: no call yet

    def extra_repr(self) -> str:
        return f"weight={self.weight}, momentum={self.momentum}"

    @property
    def against_memory(self) -> nn.Module:
        return against_memory(self.loss)

    @property
    def takes_own(self) -> bool:
        return takes_own(self.loss)

    @property
    def takes_paths(self) -> bool:
        return takes_paths(self.loss)

    @property
    def embedding_size(self) -> int | None:
        """The dimension that the loss was made for, where it has class weights; else None."""
        found: int | None = getattr(self.loss, "embedding_size", None)
        return found

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        own: Tensor | None = None,
    ) -> Tensor:
        places = {} if own is None else {"own": own}
        value: Tensor = self.loss(embeddings, labels, indices_tuple, ref_emb, ref_labels, **places)
        return value + self.weight * self._spread(embeddings)

    def _spread(self, embeddings: Tensor) -> Tensor:
        """mean_i (|x_i| - mu)^2. mu has no gradient; without momentum it would be zero."""
        if len(embeddings) == 0:
            return at_least_float32(embeddings).sum()
        lengths = torch.linalg.vector_norm(at_least_float32(embeddings), dim=1)
        apart: Tensor = lengths - self._centre(lengths.detach().mean())
        return (apart**2).mean()

    def _centre(self, mean: Tensor) -> Tensor:
        if self.momentum == 1:
            return mean
        before = self.mu.to(mean)
        moved = (1 - self.momentum) * before + self.momentum * mean if self.training else before
        centre = torch.where(before.isnan(), mean, moved)
        if self.training:
            self.mu.copy_(centre)
        return centre
