"""A toy set that is hard on purpose, and the course it takes under each loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from roadmap.losses import (
    ROADMAP,
    BlackBoxAP,
    Calibration,
    FastAP,
    SmoothAP,
    SoftBinAP,
    SupAP,
    average_precision,
    blackboxap,
    calibration,
    fastap,
    smoothap,
    softbinap,
    supap,
)
from roadmap.losses.comparison import Comparison

CLASSES, ITEMS, DIMENSIONS = 32, 8, 8  # a set of 256 items, crowded: 32 classes in 8 dimensions
STRANGERS = 3  # items of each class that begin in the midst of another class
BATCH_CLASSES, BATCH_ITEMS = 4, 4  # a batch sees 16 items of 4 classes
FAINT = 1e-3  # a push below this share of the loss's strongest one is called none

# Adam divides each coordinate's step by its past gradients, and so gives a vanishing gradient back its size.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
ScoreLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _roadmap(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    """Eq. (2) on scores. The query's own score of 1 is above alpha, so it may stay among the positives."""
    return (supap(scores, positives, negatives) + calibration(scores, positives, negatives)) / 2


# Each loss twice: as the module that trains, and as the function of scores whose gradient is looked at.
LOSSES: dict[str, tuple[Callable[[], nn.Module], ScoreLoss]] = {
    "SmoothAP": (SmoothAP, smoothap),
    "BlackBoxAP": (BlackBoxAP, blackboxap),
    "FastAP": (lambda: FastAP(include_self=True), fastap),  # as the others, so that all see the same positives
    "SoftBinAP": (SoftBinAP, softbinap),
    "SupAP": (SupAP, supap),
    "Calibration": (Calibration, calibration),
    "ROADMAP": (ROADMAP, _roadmap),
}


@dataclass(frozen=True)
class Pushes:
    """What a loss does at the start to the positives that some negative outranks, as shares of them."""

    up: float
    none: float
    down: float


@dataclass(frozen=True)
class Course:
    """How one loss moved the set, averaged over the seeds; entry 0 of each curve is the common start.

    Attributes:
        ap: (seeds, epochs + 1) exact AP over the whole set.
        batch_ap: (seeds, epochs + 1) mean exact AP inside batches.
        loss: (seeds, epochs + 1) mean of the loss over the same batches.
        pushes: what the first gradients do.
        positives, negatives: scores of all pairs at the end, of the first seed.
        seconds: time taken.
    """

    ap: Tensor
    batch_ap: Tensor
    loss: Tensor
    pushes: Pushes
    positives: Tensor
    negatives: Tensor
    seconds: float

    @property
    def gap(self) -> Tensor:
        return self.batch_ap - self.ap


def toy_set(seed: int) -> tuple[Tensor, Tensor]:
    """Unit vectors (256, 8) and labels (256,): each class round its own centre, save a few strangers.

    A stranger lies between the next class's centre and its own, nearer to the other: negatives outrank its
    positives by far more than tau = 0.01, which is where a sigmoid no longer has a slope.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = normalize(torch.randn(CLASSES, DIMENSIONS, generator=generator), dim=1)
    noise = normalize(torch.randn(CLASSES, ITEMS, DIMENSIONS, generator=generator), dim=2)
    home = centres[:, None, :].expand(-1, ITEMS, -1).clone()
    home[:, -STRANGERS:] = home[:, -STRANGERS:] / 2 + centres.roll(-1, dims=0)[:, None, :]
    labels = torch.arange(CLASSES).repeat_interleave(ITEMS)
    return normalize((home + noise / 2).flatten(0, 1), dim=1), labels


def epoch_of_batches(generator: torch.Generator) -> Tensor:
    """(batches, items) indices: every class once, a few random items of each."""
    classes = torch.randperm(CLASSES, generator=generator)
    items = torch.rand(CLASSES, ITEMS, generator=generator).argsort(1)[:, :BATCH_ITEMS]
    return (classes[:, None] * ITEMS + items).reshape(-1, BATCH_CLASSES * BATCH_ITEMS)


def ap_of(embeddings: Tensor, labels: Tensor, batches: Tensor | None = None) -> float:
    """Mean exact AP over the whole set or inside `batches`, each item a query for the others."""
    rows = torch.arange(len(embeddings))[None] if batches is None else batches
    unit = normalize(embeddings.detach(), dim=1)[rows]  # (batches, items, D)
    scores = (unit @ unit.transpose(1, 2)).flatten(0, 1)  # each query against its own batch
    relevant = (labels[rows][:, :, None] == labels[rows][:, None, :]).flatten(0, 1)
    itself = torch.eye(rows.shape[1], dtype=torch.bool).repeat(len(rows), 1)
    return float(average_precision(scores, relevant & ~itself, ~relevant))


def loss_of(loss: nn.Module, embeddings: Tensor, labels: Tensor, batches: Tensor) -> float:
    with torch.no_grad():
        return sum(float(loss(embeddings[b], labels[b])) for b in batches) / len(batches)


def first_pushes(loss: ScoreLoss, embeddings: Tensor, labels: Tensor, batches: Tensor) -> Pushes:
    """The sign of -∂L/∂s for each positive that a negative of its batch outranks."""
    found = []
    for b in batches:
        c = Comparison.of(embeddings[b], labels[b])
        scores = c.scores.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(scores, c.positives(include_self=True), c.negatives), scores)
        best_negative = scores.masked_fill(c.relevant, -2).amax(1, keepdim=True)
        outranked = c.positives(include_self=False) & (scores < best_negative)
        found.append(-gradient[outranked])
    push = torch.cat(found)
    faint = FAINT * push.abs().max()
    up, none, down = (float(x.float().mean()) for x in (push > faint, push.abs() <= faint, push < -faint))
    return Pushes(up, none, down)


def course(
    name: str,
    seeds: Sequence[int],
    epochs: int,
    learning_rate: float,
    tick: Callable[[], None],
    optimizer_name: str = "sgd",
) -> Course:
    """Train the toy set of each seed under the loss `name`; `tick` is called after every epoch."""
    began = time.perf_counter()
    module, on_scores = LOSSES[name]
    loss = module()
    curves, pushes, scores = [], [], []
    for seed in seeds:
        start, labels = toy_set(seed)
        judged = torch.cat([epoch_of_batches(torch.Generator().manual_seed(1000 + seed + k)) for k in range(4)])
        pushes.append(first_pushes(on_scores, start, labels, judged))
        embeddings = start.clone().requires_grad_()
        optimizer = OPTIMIZERS[optimizer_name]([embeddings], lr=learning_rate)
        generator = torch.Generator().manual_seed(seed)
        curve = [_measured(loss, embeddings, labels, judged)]
        for _ in range(epochs):
            for batch in epoch_of_batches(generator):
                optimizer.zero_grad()
                loss(embeddings[batch], labels[batch]).backward()
                optimizer.step()
            curve.append(_measured(loss, embeddings, labels, judged))
            tick()
        curves.append(curve)
        c = Comparison.of(embeddings.detach(), labels)
        scores.append((c.scores[c.positives(include_self=False)], c.scores[c.negatives]))
    ap, batch_ap, value = torch.tensor(curves).unbind(-1)
    mean = Pushes(*(sum(getattr(p, k) for p in pushes) / len(pushes) for k in ("up", "none", "down")))
    return Course(ap, batch_ap, value, mean, *scores[0], time.perf_counter() - began)


def _measured(loss: nn.Module, embeddings: Tensor, labels: Tensor, batches: Tensor) -> tuple[float, float, float]:
    """AP of the whole set, AP inside `batches`, loss over `batches`."""
    some = batches[:: len(batches) // 8]
    return ap_of(embeddings, labels), ap_of(embeddings, labels, batches), loss_of(loss, embeddings, labels, some)
