"""Who is compared with whom: queries, gallery, P_i, N_i, and the scores between them, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from roadmap.kernels import LossRule, both_run_on_triton, cosine_scores, fused_loss, loss_terms
from roadmap.kernels.directions import directions
from roadmap.kernels.graded import LEFT_OUT
from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import (
    check_embeddings,
    check_grades,
    check_labels,
    check_norms,
    label_kind,
    plain,
    values_are_free_to_read,
)
from roadmap.losses.relevance import Relevance, check_tree
from roadmap.losses.terms import Terms


@dataclass(frozen=True)
class Comparison:
    """M queries against a gallery of N items. Made by `Comparison.of`, which checks its arguments.

    Attributes:
        embeddings: (M, D) vectors of the queries, of any length and float dtype.
        ref_emb: (N, D) vectors of the gallery. None: gallery item i *is* query i. Never guessed from shapes: a
            square score matrix between two different sets is an ordinary gallery call.
        query_labels: (M,) int64; an item is relevant to a query when their labels are equal. For a loss of graded
            relevance also (M, L) integers, paths in a label tree from coarse to fine, or (M, C) bool, sets of labels.
        gallery_labels: (N,) int64, or as the queries'.
        mined: (P_i, N_i) as (M, N) masks where a miner chose the pairs, else None.
        places: `own` as it was given, or None.
        given: grades (M, N) where they came pair by pair, or None: they follow from the labels.
    """

    embeddings: Tensor
    ref_emb: Tensor | None
    query_labels: Tensor
    gallery_labels: Tensor
    mined: tuple[Tensor, Tensor] | None = None
    places: Tensor | None = None
    given: Tensor | None = None
    # Not functools.cached_property, whose lock torch.compile cannot follow.
    _computed: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        own: Tensor | None = None,
        *,
        graded: bool = False,
    ) -> Comparison:
        """The comparison that a loss call asks for, with every argument checked.

        Args:
            embeddings: (M, D), any float dtype, any length: normalised here.
            labels: (M,) integers of any type, size and order.
            indices_tuple: pairs (a1, p, a2, n) or triplets (a, p, n) from a pytorch-metric-learning miner; only
                these pairs then enter P_i and N_i.
            ref_emb: (N, D) gallery; None compares the batch with itself.
            ref_labels: (N,) labels of the gallery.
            own: (M,) integers, where each query stands in the gallery, -1 for nowhere; None: nowhere. Rows of a batch
                that was gathered from several processes, or that sits in its own memory, stand in their gallery.
            graded: whether labels may be paths, (M, L) integers, or sets, (M, C) bool.
        """
        check_embeddings("embeddings", embeddings)
        check_labels("labels", labels, "embeddings", embeddings, graded)
        if (ref_emb is None) != (ref_labels is None):
            given, missing = ("ref_labels", "ref_emb") if ref_emb is None else ("ref_emb", "ref_labels")
            raise ValueError(f"{given} was given without {missing}; a gallery needs both")
        if ref_emb is not None and ref_labels is not None:
            _check_gallery(embeddings, labels, ref_emb, ref_labels, graded)
        labels = plain(labels)
        gallery_labels = labels if ref_labels is None else plain(ref_labels)
        if own is not None:
            _check_own(own, embeddings, ref_emb, labels, gallery_labels)
        mined = _mined_pairs(indices_tuple, len(labels), len(gallery_labels), embeddings.device)
        c = cls(embeddings, ref_emb, labels, gallery_labels, mined, own)
        if values_are_free_to_read(embeddings):
            _check_values(c)
        return c

    @classmethod
    def of_grades(
        cls,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        own: Tensor | None = None,
        grades: Tensor | None = None,
    ) -> Comparison:
        """As `of`, for a loss of graded relevance.

        Args:
            labels, ref_labels: plain labels, paths or sets. With `grades` they say nothing and may be None.
            grades: (M, N), how relevant each item is to each query: above 0 for positives, 0 for negatives, below 0
                for those that are in no ranking. None: as the labels say.
        """
        if grades is None:
            return cls.of(embeddings, labels, indices_tuple, ref_emb, ref_labels, own, graded=True)  # type: ignore[arg-type]
        alike, others = (
            None if x is None else torch.zeros(len(x), dtype=torch.int64, device=x.device)
            for x in (embeddings, ref_emb)
        )
        assert alike is not None
        c = cls.of(embeddings, alike, indices_tuple, ref_emb, others, own)
        check_grades(grades, len(c.query_labels), len(c.gallery_labels), embeddings.device)
        return replace(c, given=grades)

    @property
    def own(self) -> Tensor:
        """Where each query stands in the gallery, (M,) int64; -1 for nowhere. Without a gallery, at its own place."""
        device, M = self.embeddings.device, len(self.embeddings)
        if self.places is not None:
            return self.places.long()
        if self.ref_emb is None:
            return torch.arange(M, device=device)
        return torch.full((M,), -1, device=device)

    @property
    def lengths(self) -> tuple[Tensor, ...]:
        """The lengths of the vectors, (M,) and, with a gallery, (N,). No gradient."""
        both = (self.embeddings,) if self.ref_emb is None else (self.embeddings, self.ref_emb)
        return tuple(directions(at_least_float32(x))[1] for x in both)

    @property
    def scores(self) -> Tensor:
        """s_ij = cos(q_i, x_j), (M, N), in float32 or better whatever autocast or TF32 settings say: tau is 0.01
        and a bfloat16 score near 0.9 is only good to 0.004."""
        if "scores" not in self._computed:
            self._computed["scores"] = cosine_scores(self.embeddings, self.ref_emb)
        return self._computed["scores"]

    @property
    def relevant(self) -> Tensor:
        """y_ij = +1 as an (M, N) mask."""
        return self.query_labels[:, None] == self.gallery_labels[None, :]

    @property
    def itself(self) -> Tensor:
        """Where a query meets itself, (M, N)."""
        columns = torch.arange(len(self.gallery_labels), device=self.embeddings.device)
        return (self.own[:, None] == columns) & self.relevant

    def positives(self, *, include_self: bool) -> Tensor:
        """P_i as an (M, N) mask."""
        others = self.relevant if self.mined is None else self.relevant & self.mined[0]
        return others | self.itself if include_self else others & ~self.itself

    @property
    def negatives(self) -> Tensor:
        """N_i as an (M, N) mask."""
        return ~self.relevant if self.mined is None else ~self.relevant & self.mined[1]

    @property
    def is_binary(self) -> bool:
        """Whether an item is relevant or not, and nothing between: plain labels."""
        return self.given is None and self.query_labels.ndim == 1

    def grades(self, relevance: Relevance, *, include_self: bool) -> Tensor:
        """How relevant every item is, (M, N), in the type of the scores: above 0 for P_i, 0 for N_i, `LEFT_OUT` for an
        item in neither. A query is no negative of its own, whatever its labels say of it."""
        queries, gallery, dtype = self.query_labels, self.gallery_labels, self.scores.dtype
        rule, depth = relevance.of(queries), 1 if queries.ndim == 1 else queries.shape[1]
        closeness = self.relevant.short() if self.is_binary else self.given
        if closeness is None:
            closeness = rule.closeness(queries, gallery, dtype)
        at_own = self.own[:, None] == torch.arange(len(gallery), device=queries.device)
        positives, negatives = closeness > 0, (closeness == 0) & ~at_own
        if self.mined is not None:
            positives, negatives = positives & (self.mined[0] | at_own), negatives & self.mined[1]
        if not include_self:
            positives = positives & ~at_own
        among = torch.where(positives, closeness, 0)
        found = among.to(dtype) if self.given is not None else rule.grades(among, depth, dtype)
        return torch.where(positives | negatives, found, LEFT_OUT)

    def loss_or_nan(self, loss: Tensor) -> Tensor:
        """`loss`, or NaN if some vector had no direction and nobody could look at it without stalling a GPU."""
        if values_are_free_to_read(self.embeddings):
            return loss
        for lengths in self.lengths:
            loss = loss + ((lengths + 1 / lengths) * 0).sum()
        return loss

    def terms_or_nan(self, terms: Terms) -> Terms:
        """`terms`, whose sums are NaN where `loss_or_nan` is."""
        return Terms(self.loss_or_nan(terms.sums), terms.counts)

    def terms(self, rule: LossRule) -> Tensor | None:
        """The terms of the loss `rule` describes, straight from the embeddings; None where a miner chose the pairs."""
        if self.mined is not None:
            return None
        return loss_terms(self.embeddings, self.query_labels, self.ref_emb, self.gallery_labels, self.places, rule)

    def fused_loss(self, rule: LossRule) -> Tensor | None:
        """The loss `rule` describes, straight from the embeddings, where a kernel does that in one go."""
        if self.mined is not None or not both_run_on_triton(self.embeddings, self.ref_emb):
            return None
        return fused_loss(self.embeddings, self.query_labels, self.ref_emb, self.gallery_labels, self.places, rule)


def _check_values(c: Comparison) -> None:
    for name, x, lengths in zip(("embeddings", "ref_emb"), (c.embeddings, c.ref_emb), c.lengths, strict=False):
        assert x is not None
        check_norms(name, x, lengths)
    if c.query_labels.ndim == 2 and c.query_labels.dtype != torch.bool:
        check_tree(c.query_labels, c.gallery_labels)


def _check_gallery(embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor, graded: bool) -> None:
    check_embeddings("ref_emb", ref_emb)
    check_labels("ref_labels", ref_labels, "ref_emb", ref_emb, graded)
    if graded and label_kind(labels) != label_kind(ref_labels):
        raise ValueError(
            f"labels are {label_kind(labels)} but ref_labels are {label_kind(ref_labels)}; both must be of one kind"
        )
    if ref_emb.shape[1] != embeddings.shape[1]:
        raise ValueError(
            f"embeddings have {embeddings.shape[1]} dimensions but ref_emb has {ref_emb.shape[1]}; "
            "both must come from the same model"
        )
    if ref_emb.device != embeddings.device:
        raise ValueError(f"ref_emb is on {ref_emb.device} but embeddings are on {embeddings.device}")


def _check_own(own: Tensor, embeddings: Tensor, ref_emb: Tensor | None, labels: Tensor, gallery_labels: Tensor) -> None:
    if ref_emb is None:
        raise ValueError("own was given without ref_emb; without a gallery every query stands at its own place")
    check_labels("own", own, "embeddings", embeddings)
    if not values_are_free_to_read(embeddings) or not len(own):
        return
    N = len(gallery_labels)
    if int(own.min()) < -1 or int(own.max()) >= N:
        raise ValueError(
            f"own must hold places in the gallery, 0 to {N - 1}, or -1 for nowhere; "
            f"got {int(own.min())} to {int(own.max())}"
        )
    stands = own >= 0
    differs = gallery_labels[own.clamp(min=0).long()] != labels if N else stands
    strange = stands & (differs if differs.ndim == 1 else differs.any(1))
    if bool(strange.any()):
        row = int(strange.nonzero()[0])
        raise ValueError(
            f"own[{row}] is {int(own[row])}, but the gallery item there has label "
            f"{gallery_labels[own[row]].tolist()} and the query {labels[row].tolist()}: they cannot be one item"
        )


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
        if rows.shape != columns.shape:
            raise ValueError(
                f"indices_tuple pairs {tuple(rows.shape)} anchors with {tuple(columns.shape)} items; each has one"
            )
        _check_indices("query", rows, M)
        _check_indices("gallery item", columns, N)
        mask = torch.zeros(M, N, dtype=torch.bool, device=device)
        mask[rows.to(device), columns.to(device)] = True
        masks.append(mask)
    return masks[0], masks[1]


def _check_indices(what: str, indices: Tensor, count: int) -> None:
    """An index below zero would count from the end. Values are looked at where that is free."""
    if not values_are_free_to_read(indices) or not indices.numel():
        return
    least, most = int(indices.min()), int(indices.max())
    if least < 0 or most >= count:
        raise ValueError(f"indices_tuple names {what} {least if least < 0 else most}, but they are 0 to {count - 1}")
