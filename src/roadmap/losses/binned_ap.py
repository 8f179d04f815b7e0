"""AP over a soft histogram of the scores: FastAP and SoftBinAP are one formula over different bins.

h_b = Σ_j relu(1 - |s_j - c_b| / width)  over bins c_1 > c_2 > ..., h⁺_b the same over the positives
AP_i = 1/|P_i| Σ_b h⁺_b · (h⁺_1 + ... + h⁺_b) / (h_1 + ... + h_b)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_count, check_flag, check_scores
from roadmap.losses.call import forward_by_terms, value_of_one_term
from roadmap.losses.comparison import Comparison
from roadmap.losses.terms import Terms, ap_terms

# Scores whose weights are held at once.
CPU_BLOCK, GPU_BLOCK = 1 << 18, 1 << 24
Weight = Callable[[Tensor, int], Tensor]


def fastap(scores: Tensor, positives: Tensor, negatives: Tensor, bins: int = 10) -> Tensor:
    """L_FastAP (Cakir et al., CVPR 2019): bins + 1 nodes over all cosines.

    The authors bin the squared Euclidean distance 2 - 2s of unit vectors over [0, 4]; that is the same histogram.
    """
    check_count("bins", bins, at_least=1)
    check_scores(scores, positives, negatives)
    return _terms(at_least_float32(scores), positives, negatives, bins + 1).means[0]


def softbinap(scores: Tensor, positives: Tensor, negatives: Tensor, bins: int = 20) -> Tensor:
    """L_SoftBinAP (Revaud et al., ICCV 2019): M = bins nodes over all cosines, the paper's default 20."""
    check_count("bins", bins, at_least=2)
    check_scores(scores, positives, negatives)
    return _terms(at_least_float32(scores), positives, negatives, bins).means[0]


def _terms(scores: Tensor, positives: Tensor, negatives: Tensor, nodes: int) -> Terms:
    """Sum of 1 - binned AP over the queries with a positive; `nodes` evenly spaced from +1 down to -1."""
    h_pos, h_neg = _Histograms.apply(scores, positives, negatives, nodes)  # type: ignore[no-untyped-call]
    found_pos = h_pos.cumsum(1)
    found = found_pos + h_neg.cumsum(1)
    # A bin before the first item holds 0 of 0; its precision multiplies h_pos = 0, so any finite value will do.
    precision = found_pos / torch.where(found > 0, found, torch.ones_like(found))
    ap = (h_pos * precision).sum(1) / positives.sum(1).clamp(min=1)
    return ap_terms(ap, positives)


class _Histograms(torch.autograd.Function):
    """(2, M, nodes): h⁺ and h⁻. Keeps the scores alone and weighs them again on the way back: autograd would keep
    a weight for every score and node."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, positives: Tensor, negatives: Tensor, nodes: int) -> Tensor:
        return _sums_over_items(_triangle, scores, positives, negatives, nodes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.nodes = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return _PulledBack.apply(upstream, *ctx.saved_tensors, ctx.nodes), None, None, None  # type: ignore[no-untyped-call]


class _PulledBack(torch.autograd.Function):
    """(M, N): the sum over the nodes of a gradient there times the slope of each score's triangle.

    A function of its own, so that the loss has second derivatives: it is linear in the gradient, and a triangle has
    no curvature.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(upstream: Tensor, scores: Tensor, positives: Tensor, negatives: Tensor, nodes: int) -> Tensor:
        blocks = []
        for rows in _blocks(scores):
            up_pos, up_neg = upstream[:, rows].unsqueeze(-1)
            total = torch.zeros_like(scores[rows])
            for node, centre in enumerate(_centres(nodes)):
                chosen = torch.where(positives[rows], up_pos[:, node], torch.where(negatives[rows], up_neg[:, node], 0))
                total = total + _slope(scores[rows] - centre, nodes) * chosen
            blocks.append(total)
        return torch.cat(blocks) if blocks else torch.zeros_like(scores)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *tensors, ctx.nodes = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        scores, positives, negatives = ctx.saved_tensors
        sums = _sums_over_items(_slope, scores, positives, negatives, ctx.nodes, upstream)
        return sums, torch.zeros_like(scores), None, None, None


def _sums_over_items(
    weight: Weight, scores: Tensor, positives: Tensor, negatives: Tensor, nodes: int, factor: Tensor | None = None
) -> Tensor:
    """(2, M, nodes): Σ_j weight(s_j - c_b) · factor_j over the positives and over the negatives."""
    blocks = []
    for rows in _blocks(scores):
        histograms = []
        for centre in _centres(nodes):  # one (rows, N) weight at a time: memory does not grow with the bins
            each = weight(scores[rows] - centre, nodes)
            each = each if factor is None else each * factor[rows]
            histograms.append(torch.stack([(each * positives[rows]).sum(1), (each * negatives[rows]).sum(1)]))
        blocks.append(torch.stack(histograms, dim=-1))
    return torch.cat(blocks, dim=1) if blocks else scores.new_zeros(2, 0, nodes)


def _centres(nodes: int) -> list[float]:
    """Evenly spaced from +1 down to -1."""
    return [1 - node * 2 / (nodes - 1) for node in range(nodes)]


def _triangle(t: Tensor, nodes: int) -> Tensor:
    return (1 - t.abs() / (2 / (nodes - 1))).clamp(min=0)


def _slope(t: Tensor, nodes: int) -> Tensor:
    """The derivative of `_triangle`."""
    width = 2 / (nodes - 1)
    return torch.where(1 - t.abs() / width >= 0, -t.sign() / width, 0)


def _blocks(scores: Tensor) -> list[slice]:
    """Rows to do at a time."""
    most = CPU_BLOCK if scores.device.type == "cpu" else GPU_BLOCK
    height = max(1, most // max(1, scores.shape[1]))
    return [slice(top, top + height) for top in range(0, scores.shape[0], height)]


class FastAP(nn.Module):
    """FastAP (Cakir et al., CVPR 2019).

    Args:
        bins: number of bins over the cosines; bins + 1 nodes.
        include_self: whether, in the in-batch call, the query is one of its own positives. Its authors and the tables
            of the ROADMAP paper leave it out.
    """

    def __init__(self, bins: int = 10, include_self: bool = False) -> None:
        super().__init__()
        check_count("bins", bins, at_least=1)
        check_flag("include_self", include_self)
        self.bins = bins
        self.include_self = include_self

    def extra_repr(self) -> str:
        return f"bins={self.bins}, include_self={self.include_self}"

    forward = forward_by_terms

    def terms(self, c: Comparison) -> Terms:
        """Sum of 1 - AP_i over the queries that have a positive, and their number: one term."""
        positives = c.positives(include_self=self.include_self)
        return c.terms_or_nan(_terms(c.scores, positives, c.negatives, self.bins + 1))

    value = value_of_one_term


class SoftBinAP(nn.Module):
    """SoftBinAP (Revaud et al., ICCV 2019).

    Args:
        bins: number of nodes over the cosines.
        include_self: whether, in the in-batch call, the query is one of its own positives.
    """

    def __init__(self, bins: int = 20, include_self: bool = True) -> None:
        super().__init__()
        check_count("bins", bins, at_least=2)
        check_flag("include_self", include_self)
        self.bins = bins
        self.include_self = include_self

    def extra_repr(self) -> str:
        return f"bins={self.bins}, include_self={self.include_self}"

    forward = forward_by_terms

    def terms(self, c: Comparison) -> Terms:
        """Sum of 1 - AP_i over the queries that have a positive, and their number: one term."""
        positives = c.positives(include_self=self.include_self)
        return c.terms_or_nan(_terms(c.scores, positives, c.negatives, self.bins))

    value = value_of_one_term
