"""Who is compared with whom: queries, gallery, P_i, N_i, and the scores between them, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from roadmap.kernels import LossRule, cosine_scores, loss_from_embeddings, runs_on_triton
from roadmap.losses.arguments import check_embeddings, check_labels, check_norms, values_are_free_to_read


@dataclass(frozen=True)
class Comparison:
    """M queries against a gallery of N items.

    Attributes:
        embeddings: (M, D) vectors of the queries, of any length and float dtype.
        ref_emb: (N, D) vectors of the gallery. None: gallery item i *is* query i. Never guessed from shapes: a
            square score matrix between two different sets is an ordinary gallery call.
        query_labels: (M,) integers; an item is relevant to a query when their labels are equal.
        gallery_labels: (N,) integers.
        mined: (P_i, N_i) as (M, N) masks where a miner chose the pairs, else None.
    """

    embeddings: Tensor
    ref_emb: Tensor | None
    query_labels: Tensor
    gallery_labels: Tensor
    mined: tuple[Tensor, Tensor] | None

    @property
    def in_batch(self) -> bool:
        return self.ref_emb is None

    @cached_property
    def norms(self) -> tuple[Tensor, ...]:
        """The lengths of the vectors, (M,) and, with a gallery, (N,)."""
        both = (self.embeddings,) if self.ref_emb is None else (self.embeddings, self.ref_emb)
        return tuple(torch.linalg.vector_norm(widened(x), dim=1) for x in both)

    @cached_property
    def scores(self) -> Tensor:
        """s_ij = cos(q_i, x_j), (M, N), in float32 or better whatever autocast or TF32 settings say: tau is 0.01
        and a bfloat16 score near 0.9 is only good to 0.004."""
        if self._on_triton:
            scores: Tensor = cosine_scores(self.embeddings, self.ref_emb)
            return scores
        with torch.autocast(self.embeddings.device.type, enabled=False), _FullFloat32():
            queries = widened(self.embeddings) / self.norms[0][:, None]
            if self.ref_emb is None:
                return queries @ queries.T
            gallery = widened(self.ref_emb) / self.norms[1][:, None]
            wider = torch.promote_types(queries.dtype, gallery.dtype)
            return queries.to(wider) @ gallery.to(wider).T

    @cached_property
    def relevant(self) -> Tensor:
        """y_ij = +1 as an (M, N) mask."""
        return self.query_labels[:, None] == self.gallery_labels[None, :]

    @cached_property
    def diagonal(self) -> Tensor:
        """Where the query meets itself in the in-batch call, (M, N)."""
        return torch.eye(len(self.embeddings), dtype=torch.bool, device=self.embeddings.device)

    def positives(self, *, include_self: bool) -> Tensor:
        """P_i as an (M, N) mask."""
        chosen = self.relevant if self.mined is None else self.relevant & self.mined[0]
        if not self.in_batch:
            return chosen
        return chosen | self.diagonal if include_self else chosen & ~self.diagonal

    @property
    def negatives(self) -> Tensor:
        """N_i as an (M, N) mask."""
        return ~self.relevant if self.mined is None else ~self.relevant & self.mined[1]

    def poisoned(self, loss: Tensor) -> Tensor:
        """`loss`, or NaN if some vector had no direction and nobody could look at it without stalling a GPU."""
        if values_are_free_to_read(self.embeddings):
            return loss
        for norms in self.norms:
            loss = loss + ((norms + 1 / norms).detach() * 0).sum()
        return loss

    def fused_loss(self, rule: LossRule) -> Tensor | None:
        """The loss `rule` describes, straight from the embeddings, where a kernel takes this comparison."""
        if self.mined is not None or not self._on_triton:
            return None
        loss: Tensor = loss_from_embeddings(self.embeddings, self.query_labels, self.ref_emb, self.gallery_labels, rule)
        return loss

    @property
    def _on_triton(self) -> bool:
        return runs_on_triton(self.embeddings) and (self.ref_emb is None or runs_on_triton(self.ref_emb))


def compared(
    embeddings: Tensor,
    labels: Tensor,
    indices_tuple: Sequence[Tensor] | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
) -> Comparison:
    """The `Comparison` that a loss call asks for, with every argument checked.

    Args:
        embeddings: (M, D), any float dtype, any length: normalised here.
        labels: (M,) integers of any size and order.
        indices_tuple: pairs (a1, p, a2, n) or triplets (a, p, n) from a pytorch-metric-learning miner; only
            these pairs then enter P_i and N_i.
        ref_emb: (N, D) gallery; None compares the batch with itself.
        ref_labels: (N,) labels of the gallery.
    """
    check_embeddings("embeddings", embeddings)
    check_labels("labels", labels, "embeddings", embeddings)
    if (ref_emb is None) != (ref_labels is None):
        given, missing = ("ref_labels", "ref_emb") if ref_emb is None else ("ref_emb", "ref_labels")
        raise ValueError(f"{given} was given without {missing}; a gallery needs both")
    if ref_emb is not None and ref_labels is not None:
        _check_gallery(embeddings, ref_emb, ref_labels)
    gallery_labels = labels if ref_labels is None else ref_labels
    mined = _mined_pairs(indices_tuple, len(labels), len(gallery_labels), embeddings.device)
    c = Comparison(embeddings, ref_emb, labels, gallery_labels, mined)
    if values_are_free_to_read(embeddings):
        check_norms("embeddings", embeddings, c.norms[0].detach())
        if ref_emb is not None:
            check_norms("ref_emb", ref_emb, c.norms[1].detach())
    return c


class _FullFloat32:
    """Within, float32 products are neither TF32 nor bfloat16, whatever `torch.set_float32_matmul_precision` says.

    Not under `torch.compile`, which cannot follow a change of this setting: there the user's own choice holds.
    """

    precision: str | None = None

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            self.precision = torch.get_float32_matmul_precision()
        except RuntimeError:  # torch >= 2.9 refuses to say when its old and new settings contradict each other
            return
        # The new settings, which the old one overwrites.
        matmuls: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
        self.fine = [(matmul, matmul.fp32_precision) for matmul in matmuls if hasattr(matmul, "fp32_precision")]
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *_: object) -> None:
        if self.precision is None:
            return
        torch.set_float32_matmul_precision(self.precision)
        for matmul, precision in self.fine:
            if matmul.fp32_precision != precision:
                matmul.fp32_precision = precision


def widened(x: Tensor) -> Tensor:
    """`x` in float32 or better: half-precision scores tie where they should not."""
    return x if x.dtype == torch.float64 else x.float()


def _check_gallery(embeddings: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> None:
    check_embeddings("ref_emb", ref_emb)
    check_labels("ref_labels", ref_labels, "ref_emb", ref_emb)
    if ref_emb.shape[1] != embeddings.shape[1]:
        raise ValueError(
            f"embeddings have {embeddings.shape[1]} dimensions but ref_emb has {ref_emb.shape[1]}; "
            "both must come from the same model"
        )
    if ref_emb.device != embeddings.device:
        raise ValueError(f"ref_emb is on {ref_emb.device} but embeddings are on {embeddings.device}")


def _mined_pairs(
    indices_tuple: Sequence[Tensor] | None, M: int, N: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    if indices_tuple is None:
        return None
    if len(indices_tuple) == 3:
        anchor, positive, negative = indices_tuple
        pairs = (anchor, positive), (anchor, negative)
    elif len(indices_tuple) == 4:
        pairs = (indices_tuple[0], indices_tuple[1]), (indices_tuple[2], indices_tuple[3])
    else:
        raise ValueError(
            "indices_tuple must be triplets (anchors, positives, negatives) or pairs "
            f"(anchors, positives, anchors, negatives), got {len(indices_tuple)} tensors"
        )
    masks = []
    for rows, columns in pairs:
        mask = torch.zeros(M, N, dtype=torch.bool, device=device)
        mask[rows.to(device), columns.to(device)] = True
        masks.append(mask)
    return masks[0], masks[1]
