"""The engine's step beside a loop that is written out with torch alone: the same weights, to the last bit."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from roadmap.config.settings import HardwareSettings, ModelSettings, OptimSettings
from roadmap.data import (
    Batch,
    Batches,
    CentreCrop,
    MPerClass,
    RandomCrop,
    dataset,
    evaluation_batches,
    training_batches,
)
from roadmap.embeddings import Embeddings
from roadmap.encoder import embeddings_of
from roadmap.engine import fit
from roadmap.engine.arithmetic import arithmetic_of
from roadmap.engine.average import WeightAverage
from roadmap.engine.comparing import BatchAlone
from roadmap.engine.optimiser import optimiser, schedule
from roadmap.engine.passes import OnePass
from roadmap.engine.state import TrainState
from roadmap.engine.step import Outcome, Parts, step
from roadmap.losses import ROADMAP
from roadmap.losses.named import named_loss
from roadmap.models import Retriever, load_checkpoint, retriever

from .worlds import assert_equal, best_weights, last, tiny

STEPS = 5


def batches() -> list[Batch]:
    draw = torch.Generator().manual_seed(3)
    labels = torch.arange(4).repeat_interleave(2)
    return [
        Batch(torch.randn(8, 3, 16, 16, generator=draw), labels[torch.randperm(8, generator=draw)], torch.arange(8))
        for _ in range(STEPS)
    ]


def fresh(seed: int = 0) -> Retriever:
    torch.manual_seed(seed)
    return retriever(ModelSettings(pooling="max", dim=8), 16)


def engine_steps(
    settings: OptimSettings, loss: nn.Module, precision: str = "32", scaler: GradScaler | None = None
) -> tuple[TrainState, list[Outcome], Retriever]:
    """The state, the outcomes and the model after five steps; an epoch is two batches."""
    model = fresh()
    arithmetic = arithmetic_of(HardwareSettings(device="cpu", precision=precision, threads=1))
    arithmetic.scaler = scaler
    optimizer = optimiser(model, loss, settings, fused=False)
    average = None if settings.ema is None else WeightAverage(model, settings.ema)
    state = TrainState(model, optimizer, arithmetic.scaler, average)
    passes = OnePass(arithmetic, model)
    rates = schedule(settings, 3, 2)
    parts = Parts(arithmetic, model, optimizer, passes, BatchAlone(loss), rates, settings.clip)
    return state, [step(state, batch, parts) for batch in batches()], model


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=1e-4),
}


@pytest.mark.parametrize("name", list(OPTIMISERS))
@pytest.mark.parametrize("clip", [None, 0.05])
def test_five_steps_are_those_of_a_plain_loop(name: str, clip: float | None) -> None:
    settings = OptimSettings(name=name, lr=0.1, schedule="multistep", milestones=[1, 2], gamma=0.5, clip=clip)
    state, outcomes, ours = engine_steps(settings, ROADMAP())
    assert clip is None or outcomes[0].numbers[1] > clip  # it did clip
    theirs, loss = fresh(), ROADMAP()
    optimizer = OPTIMISERS[name](theirs.parameters())
    decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    for batch, outcome in zip(batches(), outcomes, strict=True):
        value = loss(theirs(batch.images), batch.labels)
        value.backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), math.inf if clip is None else clip)
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
        assert outcome.numbers.tolist() == [value.item(), norm.item()]
    assert_equal(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert state.step == STEPS
    assert [outcome.step for outcome in outcomes] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("clip", [None, 0.05])
def test_steps_with_scaled_gradients_are_those_without(clip: float | None) -> None:
    """As in fp16, which takes a GPU. By a power of two nothing is rounded: norm, clipping and weights are the same."""
    settings = OptimSettings(lr=0.1, clip=clip, ema=0.9)
    scaler = GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    state, outcomes, _ = engine_steps(settings, ROADMAP(), scaler=scaler)
    plain, wanted, _ = engine_steps(settings, ROADMAP())
    assert [found.numbers.tolist() for found in outcomes] == [found.numbers.tolist() for found in wanted]
    for one, other in ((state.model, plain.model), (state.average, plain.average)):
        assert one is not None
        assert other is not None
        assert_equal(dict(one.state_dict()), dict(other.state_dict()))
    assert state.scaler is scaler
    assert scaler.get_scale() == 2.0**14  # it was raised after every second step


class Overflowing(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.inf


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_step_whose_scaled_gradients_overflow_is_left_out(clip: float | None) -> None:
    """The first two of five; the statistics of BatchNorm have seen their batches."""

    class Twice(ROADMAP):
        calls = 0

        def forward(self, embeddings: Tensor, *more: Any) -> Tensor:  # type: ignore[override]
            self.calls += 1
            value = super().forward(embeddings, *more)
            overflowing: Tensor = Overflowing.apply(value)  # type: ignore[no-untyped-call]
            return overflowing if self.calls <= 2 else value

    scaler = GradScaler("cpu", init_scale=2.0**12)
    state, outcomes, model = engine_steps(OptimSettings(lr=0.1, clip=clip), Twice(), scaler=scaler)
    assert [bool(found.numbers[1].isfinite()) for found in outcomes] == [False, False, True, True, True]
    assert all(found.numbers[0].isfinite() for found in outcomes)
    assert (state.step, scaler.get_scale()) == (5, 2.0**10)
    theirs, loss = fresh(), ROADMAP()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.1, weight_decay=1e-4)
    for number, batch in enumerate(batches()):
        value = loss(theirs(batch.images), batch.labels)
        if number < 2:
            continue
        value.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(dict(model.state_dict()), dict(theirs.state_dict()))


def test_no_gradient_is_left_over() -> None:
    _, _, model = engine_steps(OptimSettings(), ROADMAP())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_weights_of_the_loss_take_part(clip: float | None) -> None:
    options = {"num_classes": 4, "embedding_size": 8}
    torch.manual_seed(7)
    ours = named_loss("cross_entropy", **options)
    torch.manual_seed(7)
    theirs = named_loss("cross_entropy", **options)
    _, outcomes, model = engine_steps(OptimSettings(lr=0.01, loss_lr=0.5, clip=clip), ours)
    plain = fresh()
    groups = [
        {"params": list(plain.parameters()), "lr": 0.01, "weight_decay": 1e-4},
        {"params": list(theirs.parameters()), "lr": 0.5, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    every = [*plain.parameters(), *theirs.parameters()]
    for batch, outcome in zip(batches(), outcomes, strict=True):
        value = theirs(plain(batch.images), batch.labels)
        value.backward()
        norm = nn.utils.clip_grad_norm_(every, clip or math.inf)  # one norm for all that moves
        optimizer.step()
        optimizer.zero_grad()
        assert outcome.numbers.tolist() == [value.item(), norm.item()]
    assert_equal(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert_equal(dict(model.state_dict()), dict(plain.state_dict()))


def test_the_average_is_the_one_written_out() -> None:
    settings = OptimSettings(lr=0.1, ema=0.3)
    state, _, model = engine_steps(settings, ROADMAP())
    plain, loss = fresh(), ROADMAP()
    wanted = {name: p.detach().double().clone() for name, p in plain.named_parameters()}
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=1e-4)
    for number, batch in enumerate(batches()):
        loss(plain(batch.images), batch.labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        decay = min(0.3, (1 + number) / (10 + number))  # 0.1, 0.18, 0.25, 0.3, 0.3
        for name, parameter in plain.named_parameters():
            wanted[name] = decay * wanted[name] + (1 - decay) * parameter.detach().double()
    assert isinstance(state.average, WeightAverage)
    averaged = dict(state.average.model.named_parameters())
    assert list(averaged) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(averaged[name].double(), value, rtol=1e-6, atol=1e-7)
        assert not averaged[name].requires_grad
    assert_equal(dict(state.average.model.named_buffers()), dict(plain.named_buffers()))  # statistics are copied
    assert_equal(dict(model.state_dict()), dict(plain.state_dict()))  # averaging moves nothing


def test_an_average_forgets_nothing_at_decay_one() -> None:
    for decay in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=f"optim.ema must lie strictly between 0 and 1, got {decay}"):
            WeightAverage(fresh(), decay)


def test_bfloat16_is_autocast_and_the_loss_sees_float32() -> None:
    seen: list[Tensor] = []

    class Looking(ROADMAP):
        def forward(self, embeddings: Tensor, *more: Any) -> Tensor:  # type: ignore[override]
            seen.append(embeddings)
            assert not torch.is_autocast_enabled("cpu")
            return super().forward(embeddings, *more)

    _, outcomes, ours = engine_steps(OptimSettings(lr=0.1), Looking(), precision="bf16")
    theirs, loss = fresh(), ROADMAP()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.1, weight_decay=1e-4)
    for batch in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            vectors = theirs(batch.images.bfloat16())
        loss(vectors.float(), batch.labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(vectors.dtype == torch.float32 for vectors in seen)
    assert_equal(dict(ours.state_dict()), dict(theirs.state_dict()))
    single = engine_steps(OptimSettings(lr=0.1), ROADMAP())[1]
    assert outcomes[0].numbers[0] != single[0].numbers[0]  # it was not float32 all along


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_whole_run_is_a_plain_loop_over_the_batches(channels_last: bool, pictures: Path, tmp_path: Path) -> None:
    """Data, sampler, crops, evaluation between the epochs and the kept weights: nothing else touches the weights."""
    settings = tiny(
        pictures, tmp_path / "run", select__by="last", hardware__channels_last=channels_last, data__pack="no"
    )
    settings.data.workers = 0
    fit(settings, quiet=True)

    train = dataset("folder", pictures).split("train")
    torch.manual_seed(0)
    model = retriever(settings.model, 16)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sampler = MPerClass(train.labels, 8, 2, 2, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-4)
    crop = RandomCrop(16, (0.5, 1.0), mean=model.mean, std=model.std)
    loss, feed = ROADMAP(), training_batches(train, sampler, crop, workers=0)
    for _ in range(settings.epochs):
        model.train()
        for batch in feed:
            loss(model(batch.images), batch.labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(last(tmp_path / "run")["stateful"]["model"], dict(model.state_dict()))
    assert_equal(best_weights(tmp_path / "run"), dict(model.state_dict()))


def test_frozen_statistics_stay_through_training_and_evaluation(pictures: Path, tmp_path: Path) -> None:
    fit(tiny(pictures, tmp_path / "run", model__freeze_batch_norm=True, epochs=1), quiet=True)
    torch.manual_seed(0)
    start = retriever(ModelSettings(pooling="max"), 16).state_dict()
    after = last(tmp_path / "run")["stateful"]["model"]
    for name, value in after.items():
        assert torch.equal(value, start[name]) == ("running" in name or "num_batches" in name), name


def test_evaluation_changes_nothing(pictures: Path, tmp_path: Path) -> None:
    """Twice as many evaluations, the same weights."""
    for every in (1, 4):
        fit(tiny(pictures, tmp_path / f"{every}", select__every=every), quiet=True)
    often, seldom = (last(tmp_path / name)["stateful"] for name in ("1", "4"))
    assert_equal(often["model"], seldom["model"])
    assert_equal(often["optimizer"], seldom["optimizer"])


def test_the_average_is_what_is_judged_and_kept(pictures: Path, tmp_path: Path) -> None:
    fit(tiny(pictures, tmp_path / "run", optim__ema=0.9, select__by="last"), quiet=True)
    saved = last(tmp_path / "run")["stateful"]
    kept = best_weights(tmp_path / "run")
    assert_equal(kept, {name.removeprefix("model."): value for name, value in saved["average"].items()})
    assert not torch.equal(kept["backbone.blocks.0.0.weight"], saved["model"]["backbone.blocks.0.0.weight"])


def test_the_metrics_are_of_the_weights_in_evaluation_mode(pictures: Path, tmp_path: Path) -> None:
    """The summary's `after` recomputed from the checkpoint: the nearest neighbour, written out."""
    folder = fit(tiny(pictures, tmp_path / "run"), quiet=True)
    model, about = load_checkpoint(folder / "checkpoints" / "best.safetensors")
    test = dataset("folder", pictures).split("test")
    crop = CentreCrop(16, about["resize"], model.mean, model.std)
    with torch.no_grad():
        (batch,) = evaluation_batches(test, crop, workers=0)
        vectors = copy.deepcopy(model).eval()(batch.images).double()
    scores = (vectors @ vectors.T).fill_diagonal_(-2)
    nearest = torch.from_numpy(test.labels)[scores.argmax(1)]
    r_at_1 = (nearest == torch.from_numpy(test.labels)).double().mean().item()
    after = json.loads((folder / "summary.json").read_text())["after"]["pictures"]
    assert after["R@1"] == pytest.approx(r_at_1)
    assert 0 < r_at_1 < 1  # a number that says something


@pytest.mark.parametrize(("precision", "dtype"), [("32", None), ("bf16", torch.bfloat16)])
def test_evaluation_computes_in_the_precision_of_the_run(
    precision: str, dtype: torch.dtype | None, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.dtype | None] = []

    def looking(model: Retriever, batches: Batches, autocast: torch.dtype | None, *more: Any) -> Embeddings:
        asked.append(autocast)
        return embeddings_of(model, batches, autocast, *more)

    monkeypatch.setattr("roadmap.encoder.encoder.embeddings_of", looking)
    fit(tiny(pictures, tmp_path / "run", hardware__precision=precision, epochs=1), quiet=True)
    assert asked == [dtype] * 3  # untrained, validation, test
