"""MIC: what classes share, learned beside what tells them apart (Roth, Brattoli and Ommer, ICCV 2019)."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roadmap.features import Features
from roadmap.losses.arguments import check_count, check_number, values_are_free_to_read
from roadmap.losses.clustering import class_standardised, kmeans
from roadmap.losses.named import named_loss


class TrainingPictures(Protocol):
    """What `MIC.before_epoch` asks for: `roadmap.engine.auxiliary.Training` has it."""

    @property
    def labels(self) -> Tensor: ...

    @property
    def vectors(self) -> Any: ...

    @property
    def generator(self) -> torch.Generator: ...


class MIC(nn.Module):
    """An auxiliary encoder of the features that the embedding is made of, and what keeps the two apart.

    Before every few epochs the training pictures are clustered by their features, from which mean and deviation of
    their class are taken (`class_standardised`): pictures of one cluster share what their classes do not explain, such
    as a pose or a background. The auxiliary encoder E_beta, one linear layer on the average of the cells, learns to
    tell the clusters apart by a margin loss with distance-weighted sampling, as the embedding E_alpha does for the
    classes when the run's loss is `margin_distance_weighted`. A projection R predicts the embedding from the auxiliary
    one, and reversed gradients keep it from succeeding (`correlation`). The sum is

        weight * L_margin(E_beta, clusters) + decorrelation * L_d.

    Settings are those released for CUB; SOP has 50 clusters and decorrelation 250.

    Args:
        channels: of the features.
        embedding_size: of the embedding.
        pictures: in the training set.
        dim: of the auxiliary embedding.
        clusters: that pictures are put into.
        every: epochs after which they are clustered anew.
        weight: of the auxiliary margin loss.
        decorrelation: weight of the adversarial term.
        hidden: width of R.
        margin: on both sides of the boundary,
        beta: from which each cluster's boundary starts; it is learned.

    The released code differs in this: the first clusters are of features of an early layer with class means alone taken
    away, the later ones of the auxiliary embedding as it is; the auxiliary loss has batches of its own, in 80 % of the
    steps, with a fifth of random pictures; here it is of the same batch, in every step.
    """

    surrogates: Tensor

    def __init__(
        self,
        channels: int,
        embedding_size: int,
        pictures: int,
        dim: int = 128,
        clusters: int = 30,
        every: int = 3,
        weight: float = 1.0,
        decorrelation: float = 2500.0,
        hidden: int = 512,
        margin: float = 0.2,
        beta: float = 1.2,
    ) -> None:
        super().__init__()
        counts = {"channels": channels, "embedding_size": embedding_size, "pictures": pictures, "dim": dim}
        for name, count in (counts | {"clusters": clusters, "every": every, "hidden": hidden}).items():
            check_count(name, count, at_least=1)
        check_number("weight", weight, at_least=0)
        check_number("decorrelation", decorrelation, at_least=0)
        self.clusters, self.every, self.weight, self.decorrelation = clusters, every, weight, decorrelation
        self.encoder = nn.Linear(channels, dim)
        self.projection = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, embedding_size))
        self.loss = named_loss("margin_distance_weighted", margin=margin, beta=beta, num_classes=clusters)
        self.register_buffer("surrogates", torch.full((pictures,), -1, dtype=torch.int64))

    def loss_parameters(self) -> list[nn.Parameter]:
        """The boundaries of the clusters, which move as the weights of a loss do."""
        return list(self.loss.parameters())

    def before_epoch(self, epoch: int, training: TrainingPictures) -> None:
        """New clusters, before epochs 1, 1 + every, 1 + 2 every, ..."""
        if (epoch - 1) % self.every:
            return
        vectors, places = training.vectors(pooled)
        standard = class_standardised(vectors, training.labels[places])
        self.surrogates.fill_(-1)
        self.surrogates[places] = kmeans(standard, self.clusters, training.generator)

    def forward(self, features: Features, labels: Tensor) -> Tensor:
        """What is added to the loss of a batch; `features.pictures` says which surrogate labels are its own."""
        if features.pictures is None:
            raise ValueError("MIC needs features.pictures, the places of the batch among the training pictures")
        surrogates = self.surrogates[features.pictures]
        known = surrogates >= 0
        if values_are_free_to_read(known) and len(known) and not known.any():
            raise RuntimeError("MIC has no clusters yet; call before_epoch(1, training) first")
        auxiliary = F.normalize(self.encoder(pooled(features)), dim=1)
        value: Tensor = self.weight * self.loss(auxiliary[known], surrogates[known])
        embedding = F.normalize(features.embedding, dim=1)
        return value + self.decorrelation * correlation(embedding, auxiliary, self.projection)


def pooled(features: Features) -> Tensor:
    """(B, C): the average of the cells."""
    return features.cells.mean(1)


def correlation(embedding: Tensor, auxiliary: Tensor, projection: nn.Module) -> Tensor:
    """-mean (reverse(E_alpha) * normalised R(reverse(E_beta)))^2, over items and dimensions: the adversarial term L_d.

    Minimised, it lets R find what the two embeddings have in common; reversed, its gradient takes that out of both.

    Args:
        embedding: (B, D), unit vectors.
        auxiliary: (B, A), unit vectors.
        projection: R, (B, A) -> (B, D).
    """
    found = F.normalize(projection(reversed_gradient(auxiliary)), dim=1)
    return -(reversed_gradient(embedding) * found).square().sum() / max(1, embedding.numel())


def reversed_gradient(x: Tensor) -> Tensor:
    """`x` itself, whose gradient changes its sign on the way back (Ganin and Lempitsky, ICML 2015)."""
    found: Tensor = _Reversed.apply(x)  # type: ignore[no-untyped-call]
    return found


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient
