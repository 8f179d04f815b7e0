"""The seams of a step: other passes through the model and other comparisons fit, and nothing else changes for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roadmap.config.settings import HardwareSettings, ModelSettings, OptimSettings
from roadmap.data import Batch
from roadmap.engine.arithmetic import Arithmetic, arithmetic_of
from roadmap.engine.comparing import BatchAlone, Compare
from roadmap.engine.optimiser import optimiser, schedule
from roadmap.engine.passes import OnePass, Passes, TwoPasses
from roadmap.engine.state import TrainState
from roadmap.engine.step import Parts, step
from roadmap.losses import ROADMAP
from roadmap.models import Retriever, retriever

from .test_step import batches


class WithMemory:
    """The batch searches itself and what came before it, which does not move."""

    def __init__(self, loss: nn.Module) -> None:
        self.loss, self.kept = loss, list[tuple[Tensor, Tensor]]()

    def __call__(self, embeddings: Tensor, labels: Tensor, pictures: Tensor) -> Tensor:
        gallery = torch.cat([embeddings, *(vectors for vectors, _ in self.kept)])
        names = torch.cat([labels, *(known for _, known in self.kept)])
        self.kept.append((embeddings.detach(), labels))
        value: Tensor = self.loss(embeddings, labels, ref_emb=gallery, ref_labels=names)
        return value


class Still:
    """A loss that moves nothing."""

    def __call__(self, embeddings: Tensor, labels: Tensor, pictures: Tensor) -> Tensor:
        return embeddings.sum() * 0


def trained(passes: Any, compare: Compare, precision: str = "32") -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights after five steps; frozen statistics, so that chunks are normalised as the whole is."""
    torch.manual_seed(0)
    settings, model = OptimSettings(name="sgd", lr=0.1), nn.Module()
    if precision == "64":  # which a retriever does not know: its head is float32
        model = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.GELU(), nn.Flatten(), nn.Linear(4 * 7 * 7, 8)).double()
        arithmetic = Arithmetic(torch.device("cpu"))  # which casts nothing
    else:
        model = retriever(ModelSettings(pooling="max", dim=8, freeze_batch_norm=True), 16)
        arithmetic = arithmetic_of(HardwareSettings(device="cpu", precision=precision))
    if isinstance(model, Retriever):
        optimizer = optimiser(model, nn.Identity(), settings, fused=False)
    else:
        optimizer = torch.optim.SGD([{"params": list(model.parameters()), "base_lr": 0.1}], lr=0.1)
    state = TrainState(model, optimizer)
    model.train()
    made: Passes = passes(arithmetic, model)
    parts = Parts(arithmetic, model, optimizer, made, compare, schedule(settings, 3, 2))
    dtype = next(model.parameters()).dtype
    outcomes = [step(state, batch._replace(images=batch.images.to(dtype)), parts) for batch in batches()]
    return [float(outcome.numbers[0]) for outcome in outcomes], dict(model.state_dict())


@pytest.mark.parametrize("chunk", [8, 3])
def test_two_passes_in_chunks_are_one_pass(chunk: int) -> None:
    def two(arithmetic: Arithmetic, model: nn.Module) -> TwoPasses:
        return TwoPasses(arithmetic, model, chunk)

    losses, weights = trained(OnePass, BatchAlone(ROADMAP()), "64")
    others, alike = trained(two, BatchAlone(ROADMAP()), "64")
    assert others == pytest.approx(losses, rel=1e-6)  # logged in float32
    for name, value in weights.items():
        torch.testing.assert_close(alike[name], value, rtol=0, atol=1e-10, msg=name)


def test_two_passes_of_bfloat16_are_one_pass_of_it() -> None:
    """Autocast comes from the engine, in either pass; a cast kept from the first would cut the graph of the second."""
    losses, weights = trained(OnePass, BatchAlone(ROADMAP()), "bf16")
    others, alike = trained(lambda *made: TwoPasses(*made, 3), BatchAlone(ROADMAP()), "bf16")
    assert others == pytest.approx(losses, rel=0.05)
    _, still = trained(OnePass, Still())
    for name, value in weights.items():
        moved = (value - still[name]).abs().max()
        assert (alike[name] - value).abs().max() <= 0.3 * moved, name
    assert any((value != still[name]).any() for name, value in weights.items())


def test_a_memory_sees_what_two_passes_embed() -> None:
    losses, _ = trained(OnePass, WithMemory(ROADMAP(include_self=False)), "64")
    others, _ = trained(lambda *made: TwoPasses(*made, 3), WithMemory(ROADMAP(include_self=False)), "64")
    assert others == pytest.approx(losses, rel=1e-6)


def test_a_memory_is_another_comparison() -> None:
    memory = WithMemory(ROADMAP(include_self=False))
    losses, _ = trained(OnePass, memory)
    alone, _ = trained(OnePass, BatchAlone(ROADMAP()))
    assert len(memory.kept) == len(losses) == 5
    assert losses[1:] != alone[1:]
    assert not any(vectors.requires_grad for vectors, _ in memory.kept)


def test_the_loss_that_is_logged_is_the_one_that_was_compared() -> None:
    class Constant:
        def __call__(self, embeddings: Tensor, labels: Tensor, pictures: Tensor) -> Tensor:
            return embeddings.sum() * 0 + 0.25

    losses, weights = trained(OnePass, Constant())
    assert losses == [0.25] * 5
    assert isinstance(batches()[0], Batch)
    assert all(value.isfinite().all() for value in weights.values())


def test_short_embeddings_have_a_direction_too() -> None:
    """Their squares vanish in float32; the loss compares directions, and so the step goes on."""

    class Short(OnePass):
        def embed(self, images: Tensor) -> Tensor:
            return super().embed(images) * 1e-25

    losses, weights = trained(Short, BatchAlone(ROADMAP()))
    assert losses[0] == pytest.approx(trained(OnePass, BatchAlone(ROADMAP()))[0][0], abs=1e-3)
    assert all(value.isfinite().all() for value in weights.values())
