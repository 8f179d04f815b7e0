"""How ranks are counted fast. Chosen by device and size; the losses above see four functions.

    loss_terms       any device: the sums and counts of a rank loss and calibration, in bounded memory
    fused_loss       GPU: the loss itself in the same pass
    ap_from_scores   any device: AP of a score matrix, a block or a row at a time
    cosine_scores    any device: scores at float32 accuracy, whatever TF32 setting the process runs under

`import roadmap.kernels` needs torch alone; Triton is imported when a GPU tensor first arrives. With TRITON_INTERPRET=1
the Triton kernels also take CPU tensors, which is how they are tested without a GPU.
"""

from __future__ import annotations

from torch import Tensor

from roadmap.kernels import eager, transforms
from roadmap.kernels.paths import both_run_on_triton, is_plain_call, runs_on_triton
from roadmap.kernels.rules import AP, NDCG, TERMS, CalibrationRule, LossRule, Measure, RankRule

__all__ = [
    "AP",
    "NDCG",
    "TERMS",
    "CalibrationRule",
    "LossRule",
    "Measure",
    "RankRule",
    "ap_from_scores",
    "both_run_on_triton",
    "cosine_scores",
    "fused_loss",
    "loss_terms",
    "runs_on_triton",
]


def loss_terms(
    queries: Tensor,
    query_labels: Tensor,
    gallery: Tensor | None,
    gallery_labels: Tensor,
    own: Tensor | None,
    rule: LossRule,
) -> Tensor:
    """The six sums and counts (`rules.AP_SUM` ...) of the loss that `rule` describes, (TERMS,); the sums have a
    gradient. A term that the rule leaves out is zero.

    M queries (M, D) against a gallery (N, D), None for the batch itself; `own` says where each query stands in it
    (`LossCall`). Vectors of any length and float dtype come in; a zero or non-finite one makes the sums NaN.
    """
    return _rank_loss(queries, gallery, query_labels, gallery_labels, own, rule, True)


def fused_loss(
    queries: Tensor,
    query_labels: Tensor,
    gallery: Tensor | None,
    gallery_labels: Tensor,
    own: Tensor | None,
    rule: LossRule,
) -> Tensor:
    """The loss that `rule` describes, with its weights, where `both_run_on_triton`; arguments as in `loss_terms`."""
    return _rank_loss(queries, gallery, query_labels, gallery_labels, own, rule, False)


def _rank_loss(
    queries: Tensor,
    gallery: Tensor | None,
    query_labels: Tensor,
    gallery_labels: Tensor,
    own: Tensor | None,
    rule: LossRule,
    as_terms: bool,
) -> Tensor:
    out: Tensor
    if is_plain_call(queries):
        out = eager.RankLoss.apply(queries, gallery, query_labels, gallery_labels, own, rule, as_terms)  # type: ignore[no-untyped-call]
        return out
    return transforms.rank_loss((queries, gallery, query_labels, gallery_labels, own), rule, as_terms)


def ap_from_scores(scores: Tensor, positives: Tensor, negatives: Tensor, rule: RankRule) -> Tensor:
    """AP_i under the rule's H⁺ and H⁻, or another measure of the ranks, (M,), with its derivative; 0 for an empty P_i.
    Float32 or float64 scores."""
    if is_plain_call(scores):
        ap: Tensor = eager.ApFromScores.apply(scores, positives, negatives, rule)  # type: ignore[no-untyped-call]
        return ap
    return transforms.ap_from_scores(scores, positives, negatives, rule)


def cosine_scores(queries: Tensor, gallery: Tensor | None) -> Tensor:
    """cos(q_i, g_j), (M, N), float32 or better; `gallery` None compares the batch with itself. Copies of a vector get
    equal scores."""
    if is_plain_call(queries):
        scores: Tensor = eager.CosineScores.apply(queries, gallery)  # type: ignore[no-untyped-call]
        return scores
    return transforms.cosine_scores(queries, gallery)
