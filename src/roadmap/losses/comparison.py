"""Who is compared with whom: queries, gallery, P_i, N_i, and the scores between them, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from roadmap.losses.arguments import check_embeddings, check_labels, check_norms, values_are_free_to_read


@dataclass(frozen=True)
class Comparison:
    """M queries against a gallery of N items.

    Attributes:
        queries: (M, D) unit vectors, float32 or float64.
        gallery: (N, D) unit vectors; the same tensor as `queries` in the in-batch call.
        query_labels: (M,) integers; an item is relevant to a query when their labels are equal.
        gallery_labels: (N,) integers.
        in_batch: whether gallery item i *is* query i. Never guessed from shapes: a square score matrix
            between two different sets is an ordinary gallery call.
        mined: (P_i, N_i) as (M, N) masks where a miner chose the pairs, else None.
        norms: the lengths the vectors had, for `poisoned`.
    """

    queries: Tensor
    gallery: Tensor
    query_labels: Tensor
    gallery_labels: Tensor
    in_batch: bool
    mined: tuple[Tensor, Tensor] | None
    norms: tuple[Tensor, ...]

    @cached_property
    def scores(self) -> Tensor:
        """s_ij = cos(q_i, x_j), (M, N), in float32 or better whatever autocast or TF32 settings say: tau is 0.01
        and a bfloat16 score near 0.9 is only good to 0.004."""
        with torch.autocast(self.queries.device.type, enabled=False), _FullFloat32():
            return self.queries @ self.gallery.T

    @cached_property
    def relevant(self) -> Tensor:
        """y_ij = +1 as an (M, N) mask."""
        return self.query_labels[:, None] == self.gallery_labels[None, :]

    @cached_property
    def diagonal(self) -> Tensor:
        """Where the query meets itself in the in-batch call, (M, N)."""
        return torch.eye(len(self.queries), dtype=torch.bool, device=self.queries.device)

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
        if values_are_free_to_read(self.queries):
            return loss
        for norms in self.norms:
            loss = loss + ((norms + 1 / norms) * 0).sum()
        return loss


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
    queries, query_norms = _unit_vectors("embeddings", embeddings)
    if ref_emb is None or ref_labels is None:
        gallery, gallery_labels, norms = queries, labels, [query_norms]
    else:
        _check_gallery(embeddings, ref_emb, ref_labels)
        gallery, gallery_norms = _unit_vectors("ref_emb", ref_emb)
        gallery_labels, norms = ref_labels, [query_norms, gallery_norms]
        wider = torch.promote_types(queries.dtype, gallery.dtype)
        queries, gallery = queries.to(wider), gallery.to(wider)
    return Comparison(
        queries,
        gallery,
        labels,
        gallery_labels,
        in_batch=ref_emb is None,
        mined=_mined_pairs(indices_tuple, len(queries), len(gallery), queries.device),
        norms=tuple(norms),
    )


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


def _unit_vectors(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of `x` at length one, in float32 or better, and the lengths they had (detached)."""
    wide = widened(x)
    norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    if values_are_free_to_read(x):
        check_norms(name, x, norms[:, 0].detach())
    return wide / norms, norms.detach()


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
