"""Steps of a recorded pass are those of a plain one: with a recording made on the CPU as torch makes it on a GPU, where
all that it gives lies in one place and is written over by the next call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from roadmap.config.settings import HardwareSettings, OptimSettings
from roadmap.data import Batch
from roadmap.engine.arithmetic import Arithmetic, arithmetic_of
from roadmap.engine.average import WeightAverage
from roadmap.engine.comparing import BatchAlone
from roadmap.engine.compiling import Recorded
from roadmap.engine.optimiser import schedule
from roadmap.engine.passes import OnePass
from roadmap.engine.state import TrainState
from roadmap.engine.step import Outcome, Parts, step
from roadmap.losses import ROADMAP
from roadmap.ranks import ALONE, Ranks

from .test_step import batches
from .worlds import assert_equal, job, tiny


def recording(played: list[int]) -> Any:
    """What stands for torch.cuda.make_graphed_callables; notes in `played` of how many pictures a pass was."""

    def make(module: nn.Module, arguments: tuple[Tensor], allow_unused_input: bool) -> nn.Module:
        (images,) = arguments
        weights, forward, mode = tuple(module.parameters()), module.forward, module.training
        for _ in range(3):  # it warms up, which draws and counts
            vectors = module(images)
            gradients = torch.autograd.grad(vectors, weights, torch.rand_like(vectors), allow_unused=allow_unused_input)
        given, gradients_given = vectors.detach().clone(), [g if g is None else g.clone() for g in gradients]
        graphs: list[Tensor] = []

        class Play(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, new: Tensor, *_: Tensor) -> Tensor:
                images.copy_(new)
                with torch.enable_grad():
                    graphs.append(forward(images))
                given.copy_(graphs[-1].detach())
                return given.detach()

            @staticmethod
            def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
                found = torch.autograd.grad(graphs.pop(), weights, gradient, allow_unused=True)
                for place, new in zip(gradients_given, found, strict=True):
                    if place is not None:
                        place.copy_(new)
                return None, *(place if place is None else place.detach() for place in gradients_given)

        def play(new: Tensor) -> Any:
            if module.training != mode:
                return forward(new)
            played.append(len(new))
            return Play.apply(new, *weights)  # type: ignore[no-untyped-call]

        module.forward = play  # type: ignore[method-assign]
        return module

    return make


class Net(nn.Module):
    """Draws random numbers, counts statistics, and has a weight that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.dropout = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5)
        self.projection, self.unused = nn.Linear(8, 4), nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        cells = self.dropout(self.norm(self.convolution(images)))
        return normalize(self.projection(cells.float().mean((2, 3))), dim=1)


def steps(precision: str, recorded: bool) -> tuple[TrainState, list[Outcome], list[Tensor]]:
    """Of five batches, of which the first and the third lack pictures; the embeddings as they are in the end."""
    torch.manual_seed(4)
    model = Net()
    arithmetic: Arithmetic = arithmetic_of(HardwareSettings(device="cpu", precision=precision, threads=1))
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "lr": 0.1, "base_lr": 0.1}])
    state = TrainState(model, optimizer, average=WeightAverage(model, 0.5))
    runnable = Recorded(model, 8) if recorded else model
    passes, loss, seen = OnePass(arithmetic, runnable), ROADMAP(), list[Tensor]()

    class Looking(BatchAlone):
        def __call__(self, embeddings: Tensor, labels: Tensor, pictures: Tensor) -> Tensor:
            seen.append(embeddings.detach())
            return super().__call__(embeddings, labels, pictures)

    parts = Parts(arithmetic, runnable, optimizer, passes, Looking(loss), schedule(OptimSettings(), 3, 2), clip=0.05)
    outcomes = []
    for number, batch in enumerate(batches()):
        short = Batch(*(part[:6] for part in batch)) if number in (0, 2) else batch
        runnable.train()
        outcomes.append(step(state, short, parts))
        with torch.no_grad():  # neither is played
            runnable(batch.images)
            runnable.eval()(batch.images)
    return state, outcomes, seen


@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_recorded_steps_are_plain_ones(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, norms, clipped steps, averages, statistics and random numbers, to the last bit; and what the loss saw of
    a batch is not changed by the next."""
    played: list[int] = []
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", recording(played))
    plain, wanted, theirs = steps(precision, recorded=False)
    drawn = torch.rand(3)
    state, outcomes, ours = steps(precision, recorded=True)
    assert played == [8] * 3
    assert torch.equal(torch.rand(3), drawn)
    assert [found.numbers.tolist() for found in outcomes] == [found.numbers.tolist() for found in wanted]
    assert_equal(ours, theirs)
    assert_equal(dict(state.model.state_dict()), dict(plain.model.state_dict()))
    assert state.average is not None
    assert plain.average is not None
    assert_equal(dict(state.average.state_dict()), dict(plain.average.state_dict()))


@pytest.mark.parametrize(
    ("changes", "ranks", "batch"),
    [
        ({}, ALONE, 8),
        ({"data__chunk": 3}, ALONE, None),
        ({"data__chunk": 8}, ALONE, 8),  # a chunk that holds the batch
        ({"auxiliary": {"name": "horde", "dim": 16}}, ALONE, None),
        ({}, Ranks(0, 2), None),
    ],
)
def test_what_is_recorded(
    changes: dict[str, Any],
    ranks: Ranks,
    batch: int | None,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole batches, of which the vectors alone are asked for, in a single process."""
    asked: list[int | None] = []

    def runnable_model(model: nn.Module, mode: str, recorded: int | None) -> nn.Module:
        asked.append(recorded)
        return model

    monkeypatch.setattr("roadmap.engine.job.runnable_model", runnable_model)
    job(tiny(pictures, tmp_path / "run", **changes), ranks).run.close()
    assert asked == [batch]
