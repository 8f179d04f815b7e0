"""MIC: each piece beside a literal transcription, and what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roadmap.features import Features
from roadmap.losses.auxiliary import AUXILIARIES, named_auxiliary
from roadmap.losses.clustering import class_standardised, kmeans
from roadmap.losses.mic import MIC, correlation, pooled, reversed_gradient

PICTURES, CHANNELS, DIM = 24, 6, 4


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True)


@dataclass
class World:
    """Training pictures with features that were drawn; those in `lost` cannot be decoded."""

    labels: Tensor
    maps: Tensor
    lost: tuple[int, ...] = ()
    seed: int = 3

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def vectors(self, of: Callable[[Features], Tensor]) -> tuple[Tensor, Tensor]:
        places = torch.tensor([i for i in range(len(self.labels)) if i not in self.lost])
        return of(self.batch(places)), places

    def batch(self, places: Tensor) -> Features:
        embedding = unit(self.maps[places].mean((2, 3))[:, :DIM])
        return Features(embedding.requires_grad_(), map=self.maps[places], pictures=places)


def world(**changed: Any) -> World:
    return World(torch.arange(PICTURES) % 4, draw(PICTURES, CHANNELS, 3, 2), **changed)


def made(**changed: Any) -> MIC:
    torch.manual_seed(0)
    options = {"channels": CHANNELS, "embedding_size": DIM, "pictures": PICTURES, "dim": 5, "clusters": 3, "hidden": 7}
    return MIC(**(options | changed)).double()


def literal_correlation(embedding: Tensor, auxiliary: Tensor, projection: nn.Module) -> Tensor:
    """-1/(B D) sum_i sum_d (e_id r_id)^2, r_i the direction of R(a_i); nothing is reversed."""
    total = torch.zeros((), dtype=torch.float64)
    for e, a in zip(embedding, auxiliary, strict=True):
        r = projection(a[None])[0]
        r = r / r.square().sum().sqrt()
        for d in range(len(e)):
            total = total - (e[d] * r[d]) ** 2
    return total / embedding.numel()


def test_a_reversed_gradient_has_the_other_sign() -> None:
    x = draw(3, 2).requires_grad_()
    y = reversed_gradient(x)
    assert torch.equal(y, x)
    (y * torch.tensor([1.0, 5.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[-1.0, -5.0]] * 3


def test_the_adversarial_term_and_who_pulls_which_way() -> None:
    """R is pulled by the plain gradient, both embeddings by its opposite."""
    e, a = unit(draw(7, DIM)).requires_grad_(), unit(draw(7, 5, seed=1)).requires_grad_()
    torch.manual_seed(1)
    projection = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, DIM)).double()
    inputs = [e, a, *projection.parameters()]
    ours, plain = correlation(e, a, projection), literal_correlation(e, a, projection)
    torch.testing.assert_close(ours, plain)
    assert ours < 0
    pulled, wanted = torch.autograd.grad(ours, inputs), torch.autograd.grad(plain, inputs)
    for place, (one, other) in enumerate(zip(pulled, wanted, strict=True)):
        assert other.abs().max() > 1e-6
        torch.testing.assert_close(one, -other if place < 2 else other)


def test_one_adversary_learns_what_the_other_unlearns() -> None:
    """With R trained alone the term falls; with the embeddings moved alone it rises: they lose what they share."""
    e, a = nn.Parameter(draw(16, DIM)), unit(draw(16, 5, seed=1))
    torch.manual_seed(1)
    projection = nn.Linear(5, DIM).double()
    values = {}
    for name, moving in (("R", list(projection.parameters())), ("embedding", [e])):
        optimizer = torch.optim.SGD(moving, lr=1.0)
        first = float(correlation(unit(e), a, projection).detach())
        for _ in range(20):
            optimizer.zero_grad()
            correlation(unit(e), a, projection).backward()
            optimizer.step()
        values[name] = float(correlation(unit(e), a, projection).detach()) - first
    assert values["R"] < -1e-4
    assert values["embedding"] > 1e-4


def test_no_item_at_all() -> None:
    assert correlation(draw(0, DIM), draw(0, 5), nn.Linear(5, DIM).double()) == 0


def test_clusters_are_those_of_the_standardised_averages() -> None:
    here, module = world(), made()
    module.before_epoch(1, here)
    averages = torch.stack([here.maps[i].sum((1, 2)) / 6 for i in range(PICTURES)])
    wanted = kmeans(class_standardised(averages, here.labels), 3, here.generator)
    assert torch.equal(module.surrogates, wanted)
    assert set(wanted.tolist()) == {0, 1, 2}


def test_clusters_are_made_anew_every_few_epochs() -> None:
    module, seen = made(every=3), []
    for epoch in range(1, 9):
        module.surrogates.fill_(-7)
        module.before_epoch(epoch, world())
        seen.append(bool((module.surrogates >= 0).all()))
    assert seen == [True, False, False, True, False, False, True, False]


def test_the_loss_is_the_sum_that_is_written_down() -> None:
    here, module = world(), made(weight=0.5, decorrelation=30.0)
    module.before_epoch(1, here)
    batch = here.batch(torch.tensor([0, 5, 9, 13, 2, 21, 22, 23]))
    torch.manual_seed(4)  # of the distance-weighted draws
    found = module(batch, torch.zeros(8, dtype=torch.int64))
    auxiliary = unit(module.encoder(pooled(batch)))
    assert batch.pictures is not None
    torch.manual_seed(4)
    margin = module.loss(auxiliary, module.surrogates[batch.pictures])
    wanted = 0.5 * margin + 30.0 * literal_correlation(batch.embedding, auxiliary, module.projection)
    torch.testing.assert_close(found, wanted)
    assert margin > 0


def test_it_moves_everything_but_what_it_clusters() -> None:
    here, module = world(), made()
    module.before_epoch(1, here)
    batch = here.batch(torch.arange(12))
    maps = here.maps[:12].clone().requires_grad_()
    module(batch._replace(map=maps), torch.zeros(12, dtype=torch.int64)).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    assert maps.grad is not None
    assert maps.grad.any()
    assert batch.embedding.grad is not None
    assert batch.embedding.grad.any()
    assert [p.shape for p in module.loss_parameters()] == [(3,)]


def test_a_picture_that_could_not_be_decoded_has_no_cluster() -> None:
    here, module = world(lost=(5, 6)), made()
    module.before_epoch(1, here)
    assert (module.surrogates < 0).nonzero().flatten().tolist() == [5, 6]
    averages, kept = here.vectors(pooled)
    wanted = kmeans(class_standardised(averages, torch.tensor([i % 4 for i in kept.tolist()])), 3, here.generator)
    assert torch.equal(module.surrogates[kept], wanted)
    torch.manual_seed(4)
    with_it = module(here.batch(torch.tensor([0, 1, 2, 5])), torch.zeros(4, dtype=torch.int64))
    assert with_it.isfinite()


def test_tokens_are_cells_too() -> None:
    cells = draw(2, 6, CHANNELS)
    tokens = Features(draw(2, DIM), tokens=cells)
    as_map = Features(draw(2, DIM), map=cells.transpose(1, 2).unflatten(2, (3, 2)))
    torch.testing.assert_close(pooled(as_map), pooled(tokens))
    with pytest.raises(ValueError, match="neither a map nor tokens: only the backbone knows how to pool them"):
        pooled(Features(draw(2, DIM)))


def test_what_is_refused() -> None:
    module, here = made(), world()
    with pytest.raises(RuntimeError, match=r"MIC has no clusters yet; call before_epoch\(1, training\) first"):
        module(here.batch(torch.arange(4)), here.labels[:4])
    with pytest.raises(ValueError, match="MIC needs features.pictures, the places of the batch"):
        module(here.batch(torch.arange(4))._replace(pictures=None), here.labels[:4])
    with pytest.raises(ValueError, match="clusters must be >= 1, got 0"):
        made(clusters=0)
    with pytest.raises(ValueError, match="decorrelation must be >= 0, got -1"):
        made(decorrelation=-1)
    with pytest.raises(ValueError, match="24 pictures cannot be put into 25 clusters; ask for fewer"):
        made(clusters=25).before_epoch(1, here)


def test_its_file_is_its_constructor() -> None:
    """The settings for CUB; what only a run knows is null."""
    options = {name: p.default for name, p in inspect.signature(MIC).parameters.items() if p.default is not p.empty}
    for_cub = {"dim": 128, "clusters": 30, "every": 3, "weight": 1.0, "decorrelation": 2500.0}
    assert options == for_cub | {"hidden": 512, "margin": 0.2, "beta": 1.2}
    conf = pytest.importorskip("omegaconf", reason="the extra `train` is not installed").OmegaConf
    values = dict(conf.load(Path(str(files("roadmap.config.groups"))) / "auxiliary" / "mic.yaml"))
    known = {"name": "mic"} | dict.fromkeys(("channels", "embedding_size", "pictures"))
    assert values == known | options


def test_by_name() -> None:
    assert isinstance(named_auxiliary("mic", channels=3, embedding_size=2, pictures=5), AUXILIARIES["mic"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown auxiliary module 'mix', did you mean 'mic'\\? Known: none, "):
        named_auxiliary("mix")
    with pytest.raises(ValueError, match="mic has no option 'cluster', did you mean 'clusters'\\? It takes: channels,"):
        named_auxiliary("mic", cluster=3)
    with pytest.raises(
        ValueError, match=r"mic needs channels \(those of the features .*\) and embedding_size \(the dim"
    ):
        named_auxiliary("mic", pictures=3)
