"""Any pytorch-metric-learning loss, with or without a miner, behind the call of our own losses; and the recipes of
the baselines outside the AP family, each with the settings of its paper.

>>> import torch
>>> loss = multi_similarity()
>>> loss(torch.randn(8, 16, requires_grad=True), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])).backward()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_count, check_number, values_are_free_to_read
from roadmap.losses.baseline_parts import LinearClassifier, PairSumPerQuery, koleo, pairs_of_complete_queries
from roadmap.losses.comparison import Comparison

try:
    from pytorch_metric_learning import distances, losses, miners
except ImportError as missing:
    raise ImportError(
        "roadmap.losses.pml needs pytorch-metric-learning; install it with `pip install roadmap[pml]`"
    ) from missing

Miner = Callable[..., Sequence[Tensor]]


class MetricLearning(nn.Module):
    """A loss of pytorch-metric-learning, called as ours are: same arguments, same checks, float32 or better.

    What a query without positives costs is the wrapped loss's own matter (a contrastive loss still pushes its
    negatives away); where it has nothing to compare, the result is 0 with zero gradients, for the embeddings and for
    the loss's own parameters, so that no rank of a multi-GPU run waits for another. Give those parameters to an
    optimiser: `loss.parameters()`. A float64 batch turns them into float64, which is what the library does.

    Args:
        loss: a loss such as `pytorch_metric_learning.losses.TripletMarginLoss()`.
        miner: chooses the pairs or triplets, such as `pytorch_metric_learning.miners.MultiSimilarityMiner()`; any
            callable (embeddings, labels, ref_emb, ref_labels) -> indices will do.
        num_classes: for a loss with class proxies: labels must lie in [0, num_classes).
        embedding_size: for a loss with class proxies: the dimension of the embeddings.
    """

    def __init__(
        self,
        loss: nn.Module,
        miner: Miner | None = None,
        num_classes: int | None = None,
        embedding_size: int | None = None,
    ) -> None:
        super().__init__()
        for name, part in (("loss", loss), ("miner", miner)):
            if isinstance(part, type):
                raise TypeError(f"{name} must be an instance, got the class {part.__name__}; use {part.__name__}(...)")
        if not isinstance(loss, nn.Module):
            raise TypeError(f"loss must be an nn.Module, got {type(loss).__name__}")
        if miner is not None and not callable(miner):
            raise TypeError(f"miner must be callable, got {type(miner).__name__}")
        if num_classes is not None:
            check_count("num_classes", num_classes, at_least=1)
        if embedding_size is not None:
            check_count("embedding_size", embedding_size, at_least=1)
        self.loss = loss
        self.miner = miner
        self.num_classes = num_classes
        self.embedding_size = embedding_size

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        c = Comparison.of(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        if indices_tuple is not None and self.miner is not None:
            raise ValueError("indices_tuple was given, but this loss has a miner of its own; leave one of them out")
        if self.embedding_size not in (None, embeddings.shape[1]):
            raise ValueError(
                f"embeddings have {embeddings.shape[1]} dimensions but the loss was made with "
                f"embedding_size={self.embedding_size}"
            )
        labels, zero = self._class_labels(labels)
        # Every input and parameter gets a gradient, if only zero.
        reached = [x for x in (embeddings, ref_emb, *self.loss.parameters()) if x is not None and x.is_floating_point()]
        zero = zero + sum((at_least_float32(x) * 0).sum() for x in reached)
        if len(c.query_labels) == 0 or len(c.gallery_labels) == 0:
            return c.loss_or_nan(zero)
        with torch.autocast(embeddings.device.type, enabled=False):
            value = self._called(at_least_float32(embeddings), labels, indices_tuple, ref_emb, ref_labels)
        return c.loss_or_nan(value + zero)

    # The library's control flow hangs on values (which pairs exist, which violate), which no compiler follows.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _called(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> Tensor:
        gallery: dict[str, Tensor] = {}
        if ref_emb is not None and ref_labels is not None:
            wider = torch.promote_types(embeddings.dtype, ref_emb.dtype)
            embeddings = embeddings.to(wider)
            # New tensor objects: the library takes a gallery that *is* the batch for the in-batch call.
            gallery = {"ref_emb": ref_emb.to(wider).view_as(ref_emb), "ref_labels": ref_labels.clone()}
        if self.miner is not None:
            indices_tuple = self.miner(embeddings, labels, **gallery)
        try:
            value: Any = self.loss(embeddings, labels, indices_tuple, **gallery)
        except ValueError as refusal:
            if gallery and "ref_emb is not supported" in str(refusal):
                raise ValueError(
                    f"{type(self.loss).__name__} compares embeddings with its own class weights, or only within the "
                    "batch, and takes no gallery; leave out ref_emb and ref_labels"
                ) from refusal
            raise
        if not isinstance(value, Tensor) or value.numel() != 1:
            came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{type(self.loss).__name__} must return one number, got {came}; give it another reducer")
        return value.reshape(())

    def _class_labels(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The labels, and 0, or NaN where a label has no class and looking at it would stall a GPU."""
        zero = torch.zeros((), device=labels.device)
        if self.num_classes is None:
            return labels, zero
        unknown = (labels < 0) | (labels >= self.num_classes)
        if values_are_free_to_read(labels):
            if bool(unknown.any()):
                raise ValueError(
                    f"labels must lie in [0, {self.num_classes}), the classes this loss has weights for, got "
                    f"{int(labels[unknown][0])}; number the training classes from 0 and pass num_classes"
                )
            return labels, zero
        return labels.clamp(0, self.num_classes - 1), zero.masked_fill(unknown.any(), torch.nan)


def contrastive_xbm(neg_margin: float = 0.5) -> MetricLearning:
    """Contrastive loss as in XBM (Wang et al., CVPR 2020): 1/M sum_i (sum_pos (1 - s) + sum_neg [s - 0.5]+)."""
    check_number("neg_margin", neg_margin)
    return MetricLearning(_contrastive(neg_margin))


def contrastive_irt(neg_margin: float = 0.5, entropy_weight: float = 0.7) -> MetricLearning:
    """Contrastive loss with the differential-entropy regulariser, as IRT_R (El-Nouby et al., 2021)."""
    check_number("neg_margin", neg_margin)
    check_number("entropy_weight", entropy_weight, at_least=0)
    return MetricLearning(
        _contrastive(neg_margin, embedding_regularizer=koleo, embedding_reg_weight=entropy_weight),
    )


def _contrastive(neg_margin: float, **regularizer: Any) -> nn.Module:
    loss: nn.Module = losses.ContrastiveLoss(
        pos_margin=1,
        neg_margin=neg_margin,
        distance=distances.CosineSimilarity(),
        reducer=PairSumPerQuery(),
        **regularizer,
    )
    return loss


def triplet_semihard(margin: float = 0.2) -> MetricLearning:
    """Triplets whose negative is further than the positive, but by less than the margin (Schroff et al., CVPR 2015).

    Squared Euclidean differences of unit vectors and margin 0.2 as there; every such triplet of the batch is taken.
    """
    check_number("margin", margin, above=0)
    squared = distances.LpDistance(power=2)
    miner = miners.TripletMarginMiner(margin=margin, type_of_triplets="semihard", distance=squared)
    return MetricLearning(losses.TripletMarginLoss(margin=margin, distance=squared), miner)


def triplet_distance_weighted(margin: float = 0.2) -> MetricLearning:
    """Triplet loss with distance-weighted sampling of the negatives (Wu et al., ICCV 2017: cut-offs 0.5 and 1.4)."""
    check_number("margin", margin, above=0)
    return MetricLearning(losses.TripletMarginLoss(margin=margin), miners.DistanceWeightedMiner(0.5, 1.4))


def margin_distance_weighted(margin: float = 0.2, beta: float = 1.2, num_classes: int | None = None) -> MetricLearning:
    """Margin loss with distance-weighted sampling (Wu et al., ICCV 2017: margin 0.2, learned boundary from 1.2).

    With `num_classes` each class learns a boundary of its own; without it all share one.
    """
    check_number("margin", margin, above=0)
    check_number("beta", beta, above=0)
    if num_classes is not None:
        check_count("num_classes", num_classes, at_least=1)
    loss = losses.MarginLoss(margin=margin, beta=beta, learn_beta=True, num_classes=num_classes)
    return MetricLearning(loss, miners.DistanceWeightedMiner(0.5, 1.4), num_classes)


def lifted_structure(margin: float = 1.0) -> MetricLearning:
    """Lifted structure (Song et al., CVPR 2016), margin 1, generalised to all positives (Hermans et al., 2017).

    [log sum_pos e^d + log sum_neg e^(1 - d)]+ per query. A query for which one of the sums is empty has log 0 and
    adds nothing; the library alone would let its negatives count.
    """
    check_number("margin", margin, above=0)
    return MetricLearning(losses.GeneralizedLiftedStructureLoss(neg_margin=margin), pairs_of_complete_queries)


def multi_similarity(alpha: float = 2.0, beta: float = 50.0, base: float = 0.5, epsilon: float = 0.1) -> MetricLearning:
    """Multi-similarity (Wang et al., CVPR 2019) with its miner; the settings its authors released."""
    check_number("alpha", alpha, above=0)
    check_number("beta", beta, above=0)
    check_number("base", base)
    check_number("epsilon", epsilon, at_least=0)
    return MetricLearning(losses.MultiSimilarityLoss(alpha, beta, base), miners.MultiSimilarityMiner(epsilon))


def proxy_nca(num_classes: int, embedding_size: int) -> MetricLearning:
    """ProxyNCA (Movshovitz-Attias et al., ICCV 2017): softmax over -|x - p|^2 of unit vectors, temperature 1.

    The paper leaves the positive proxy out of the sum; the library, like ProxyNCA++, keeps it: a probability.
    """
    return _with_proxies(losses.ProxyNCALoss, num_classes, embedding_size, softmax_scale=1)


def proxy_nca_pp(num_classes: int, embedding_size: int, temperature: float = 1 / 9) -> MetricLearning:
    """ProxyNCA++ (Teh et al., ECCV 2020): the probability of the positive proxy at temperature 1/9."""
    check_number("temperature", temperature, above=0)
    return _with_proxies(losses.ProxyNCALoss, num_classes, embedding_size, softmax_scale=1 / temperature)


def normalised_softmax(num_classes: int, embedding_size: int, temperature: float = 0.05) -> MetricLearning:
    """Softmax over the cosines with one unit vector per class, temperature 0.05 (Zhai and Wu, BMVC 2019)."""
    check_number("temperature", temperature, above=0)
    return _with_proxies(losses.NormalizedSoftmaxLoss, num_classes, embedding_size, temperature=temperature)


def cross_entropy(num_classes: int, embedding_size: int, label_smoothing: float = 0.1) -> MetricLearning:
    """Cross-entropy of a linear classifier, label smoothing 0.1 (Boudiaf et al., ECCV 2020).

    The classifier sees the embeddings as they come, at the length the model gives them.
    """
    check_number("label_smoothing", label_smoothing, at_least=0)
    if label_smoothing > 1:
        raise ValueError(f"label_smoothing must be <= 1, got {label_smoothing}")
    return _with_proxies(LinearClassifier, num_classes, embedding_size, label_smoothing=label_smoothing)


def _with_proxies(
    loss: Callable[..., nn.Module], num_classes: int, embedding_size: int, **settings: Any
) -> MetricLearning:
    check_count("num_classes", num_classes, at_least=1)
    check_count("embedding_size", embedding_size, at_least=1)
    made = loss(num_classes=num_classes, embedding_size=embedding_size, **settings)
    return MetricLearning(made, num_classes=num_classes, embedding_size=embedding_size)


RECIPES: dict[str, Callable[..., MetricLearning]] = {
    recipe.__name__: recipe
    for recipe in (
        contrastive_irt,
        contrastive_xbm,
        cross_entropy,
        lifted_structure,
        margin_distance_weighted,
        multi_similarity,
        normalised_softmax,
        proxy_nca,
        proxy_nca_pp,
        triplet_distance_weighted,
        triplet_semihard,
    )
}
"""Name -> function, for configurations. Those with class weights take num_classes and embedding_size."""
