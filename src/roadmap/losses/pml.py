"""The baselines outside the AP family, each with the settings of its paper or, where they differ, its released code,
behind the call of our own losses; and `PMLLoss`, our own losses for that library's wrappers.

>>> import torch
>>> loss = multi_similarity()
>>> loss(torch.randn(8, 16, requires_grad=True), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])).backward()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from roadmap.losses.arguments import check_count, check_number
from roadmap.losses.baseline_parts import LinearClassifier, PairSumPerQuery, koleo, pairs_of_complete_queries
from roadmap.losses.metric_learning import MetricLearning, check_module
from roadmap.losses.proxy_graph import ProxyGraph

try:
    from pytorch_metric_learning import distances, losses, miners
    from pytorch_metric_learning.utils.common_functions import TorchInitWrapper
except ImportError as missing:
    raise ImportError(
        "roadmap.losses.pml needs pytorch-metric-learning; install it with `pip install roadmap-retrieval[pml]`"
    ) from missing

__all__ = ["RECIPES", "MetricLearning", "PMLLoss"]


class PMLLoss(losses.BaseMetricLossFunction):  # type: ignore[misc]
    """One of our losses as a loss of pytorch-metric-learning, for that library's own wrappers, which ask for one:
    `CrossBatchMemory`, `DistributedLossWrapper`, `SelfSupervisedLoss`, `MultipleLosses`, and its trainers.

    Its values and gradients are those of the loss it holds. `CrossBatchMemory` and an efficient
    `DistributedLossWrapper` choose the pairs themselves and leave the query out of them, whatever `include_self` says.

    Args:
        loss: a loss such as `roadmap.losses.ROADMAP()`.
        options: the library's own, such as `embedding_regularizer`; a reducer gets one number, already reduced.

    >>> import torch
    >>> from pytorch_metric_learning.losses import CrossBatchMemory
    >>> from roadmap.losses import ROADMAP
    >>> memory = CrossBatchMemory(PMLLoss(ROADMAP()), embedding_size=16, memory_size=64)
    >>> memory(torch.randn(8, 16, requires_grad=True), torch.arange(8) // 2).backward()
    """

    def __init__(self, loss: nn.Module, **options: Any) -> None:
        check_module("loss", loss)
        super().__init__(**options)
        self.loss = loss

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """As the library's, which would make a gallery of the batch before the loss can tell one from the other."""
        self.reset_stats()
        # some of its wrappers number the items on the CPU
        labels, ref_labels = (
            some.to(embeddings.device) if isinstance(some, Tensor) else some for some in (labels, ref_labels)
        )
        parts = self.compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        self.add_embedding_regularization_to_loss_dict(parts, embeddings)
        return self.reducer(parts, embeddings, labels)

    def compute_loss(self, embeddings: Any, labels: Any, indices_tuple: Any, ref_emb: Any, ref_labels: Any) -> Any:
        value = self.loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        return {"loss": {"losses": value, "indices": None, "reduction_type": "already_reduced"}}


def _admit(wrapper: Any) -> None:
    """Adds `PMLLoss` to the losses that a wrapper of the library takes: it asks for the name of the class, from a list
    of its own, and not for what the class is."""
    known = wrapper.supported_losses()
    if PMLLoss.__name__ not in known:
        wrapper.supported_losses = staticmethod(lambda: [*known, PMLLoss.__name__])


for _wrapper in (losses.CrossBatchMemory, losses.SelfSupervisedLoss):
    _admit(_wrapper)


def contrastive_xbm(neg_margin: float = 0.5) -> MetricLearning:
    """Contrastive loss as in XBM (Wang et al., CVPR 2020): 1/M sum_i (sum_pos (1 - s) + sum_neg [s - 0.5]+)."""
    check_number("neg_margin", neg_margin)
    return MetricLearning(_contrastive(neg_margin))


def contrastive_irt(neg_margin: float = 0.5, entropy_weight: float = 0.7) -> MetricLearning:
    """Contrastive loss with the differential-entropy regulariser, as IRT_R (El-Nouby et al., 2021).

    With a memory, as there, the entropy is that of the batch, and counts once.
    """
    check_number("neg_margin", neg_margin)
    check_number("entropy_weight", entropy_weight, at_least=0)
    return MetricLearning(
        _contrastive(neg_margin, embedding_regularizer=koleo, embedding_reg_weight=entropy_weight),
        against_memory=contrastive_xbm(neg_margin),
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


def multi_similarity(alpha: float = 2.0, beta: float = 40.0, base: float = 0.5, epsilon: float = 0.1) -> MetricLearning:
    """Multi-similarity (Wang et al., CVPR 2019) with its miner; the settings its authors released (their paper says
    beta = 50)."""
    check_number("alpha", alpha, above=0)
    check_number("beta", beta, above=0)
    check_number("base", base)
    check_number("epsilon", epsilon, at_least=0)
    return MetricLearning(losses.MultiSimilarityLoss(alpha, beta, base), miners.MultiSimilarityMiner(epsilon))


def proxy_gml(
    num_classes: int, embedding_size: int, proxies: int = 12, ratio: float = 0.05, proxy_weight: float = 0.3
) -> MetricLearning:
    """ProxyGML (Zhu et al., NeurIPS 2020): classification by the nearest of several proxies a class; see `ProxyGraph`.

    The released settings of CUB and Cars; those of SOP are proxies=1, proxy_weight=0.
    """
    settings = {"proxies": proxies, "ratio": ratio, "proxy_weight": proxy_weight}
    return _with_proxies(ProxyGraph, num_classes, embedding_size, **settings)


def proxy_nca(num_classes: int, embedding_size: int) -> MetricLearning:
    """ProxyNCA (Movshovitz-Attias et al., ICCV 2017): softmax over -|x - p|^2 of unit vectors, temperature 1.

    The paper leaves the positive proxy out of the sum; the library, like ProxyNCA++, keeps it: a probability.
    """
    return _with_proxies(losses.ProxyNCALoss, num_classes, embedding_size, softmax_scale=1)


def proxy_nca_pp(num_classes: int, embedding_size: int, temperature: float = 1 / 9) -> MetricLearning:
    """ProxyNCA++ (Teh et al., ECCV 2020): the probability of the positive proxy at temperature 1/9.

    Proxies start as released, at N(0, 1/8^2): a short one turns faster, and the released rates are for that length.
    """
    check_number("temperature", temperature, above=0)
    start = TorchInitWrapper(nn.init.normal_, std=1 / 8)
    scale = 1 / temperature
    return _with_proxies(losses.ProxyNCALoss, num_classes, embedding_size, softmax_scale=scale, weight_init_func=start)


def normalised_softmax(num_classes: int, embedding_size: int, temperature: float = 0.05) -> MetricLearning:
    """Softmax over the cosines with one unit vector per class, temperature 0.05 (Zhai and Wu, BMVC 2019).

    Class vectors start as released, uniform within +-1 / sqrt(embedding_size), of length 0.58: under SGD a vector turns
    by the rate over its squared length, which is 6,000 times less for the library's normal start at 2,048 dimensions.
    """
    check_number("temperature", temperature, above=0)
    check_count("embedding_size", embedding_size, at_least=1)
    edge = embedding_size**-0.5
    start = TorchInitWrapper(nn.init.uniform_, a=-edge, b=edge)
    return _with_proxies(
        losses.NormalizedSoftmaxLoss, num_classes, embedding_size, temperature=temperature, weight_init_func=start
    )


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
        proxy_gml,
        proxy_nca,
        proxy_nca_pp,
        triplet_distance_weighted,
        triplet_semihard,
    )
}
"""Name -> function, for configurations. Those with class weights take num_classes and embedding_size."""
