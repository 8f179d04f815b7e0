"""What scores with masks of positives and negatives must be: one set of checks, for the metrics and the losses."""

from __future__ import annotations

import torch
from torch import Tensor


def check_scores(scores: Tensor, positives: Tensor, negatives: Tensor, *, values: bool = True) -> None:
    """Refuse what is not a (queries, gallery) table of finite scores with two masks that do not overlap.

    Args:
        values: look at the values too; a training step on a GPU does not, since reading one back stalls the stream.
    """
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores must be a torch.Tensor, got {type(scores).__name__}")
    if scores.ndim != 2:
        raise ValueError(
            f"scores must have shape (queries, gallery), got {tuple(scores.shape)}; use scores[None] for one query"
        )
    if not scores.is_floating_point():
        raise TypeError(f"scores must be floating point, got {scores.dtype}")
    for name, mask in (("positives", positives), ("negatives", negatives)):
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            came = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"{name} must be a bool mask, got {came}")
        if mask.shape != scores.shape:
            raise ValueError(f"{name} has shape {tuple(mask.shape)} but scores has {tuple(scores.shape)}")
        if mask.device != scores.device:
            raise ValueError(f"{name} is on {mask.device} but scores is on {scores.device}")
    if values:
        _check_values(scores, positives, negatives)


def _check_values(scores: Tensor, positives: Tensor, negatives: Tensor) -> None:
    if bool((positives & negatives).any()):
        raise ValueError("an item is both in positives and in negatives; each may be in one, or in neither (ignored)")
    if not bool(scores.isfinite().all()):
        row, column = (int(v) for v in (~scores.isfinite()).nonzero()[0])
        raise ValueError(f"scores[{row}, {column}] is {float(scores[row, column])}; scores must be finite")
