"""Miniature runs: noisy pictures of a pattern per class, and settings that train on them within a second."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from roadmap.config.settings import (
    DataSettings,
    HardwareSettings,
    ModelSettings,
    OptimSettings,
    SelectSettings,
    Settings,
)
from roadmap.engine import loop
from roadmap.engine.arithmetic import arithmetic_of
from roadmap.engine.display import Display
from roadmap.engine.job import Job, job_of
from roadmap.engine.splits import records_of, sampler_of, splits_of
from roadmap.evaluation import Evaluation
from roadmap.models import load_checkpoint, retriever
from roadmap.ranks import ALONE, Ranks
from roadmap.runs import Run

SIDE, IMAGE = 20, 16
TIMED = {"pictures per second", "training seconds"}


def write_classes(root: Path, classes: Iterable[int], each: int = 6, side: int = SIDE, noise: float = 90.0) -> Path:
    """ROOT/c07/3.png and so on: a pattern of the class's own below noise that makes the classes hard to tell apart."""
    for label in classes:
        draw = np.random.default_rng(label)
        pattern = draw.integers(0, 256, (side, side, 3))
        folder = root / f"c{label:02d}"
        folder.mkdir(parents=True)
        for number in range(each):
            noisy = np.clip(pattern + draw.normal(0, noise, pattern.shape), 0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(folder / f"{number}.png")
    return root


def tiny(root: Path, run: Path, **changed: Any) -> Settings:
    """Settings of a short run; changed by dotted names with two underscores for the dot: optim__ema=0.5."""
    settings = Settings(
        data=DataSettings(
            name="folder",
            root=str(root),
            image=IMAGE,
            resize=IMAGE,
            side=SIDE,
            scale=[0.5, 1.0],
            batch_size=8,
            per_class=2,
            batches=2,
            workers=1,
        ),
        model=ModelSettings(pooling="max"),
        optim=OptimSettings(lr=1e-2),
        select=SelectSettings(fraction=0.25),
        hardware=HardwareSettings(device="cpu", threads=1),
        epochs=4,
        checkpoint_minutes=0.0,
        run=str(run),
    )
    for name, value in changed.items():
        part, _, field = name.rpartition("__")
        setattr(getattr(settings, part) if part else settings, field, value)
    return Settings.from_dict(settings.as_dict())  # checks the changed values too


def job(settings: Settings, ranks: Ranks = ALONE) -> Job:
    """What `fit` puts together before it trains."""
    arithmetic = arithmetic_of(settings.hardware, vectors=settings.model.freeze_backbone)
    splits = splits_of(records_of(settings.data), settings.data, settings.select)
    torch.manual_seed(settings.seed)
    model = retriever(settings.model, settings.data.image)
    sampler = sampler_of(splits.train, settings.data, settings.seed, ranks)
    run, display = Run.create(settings), Display(quiet=True)
    return job_of(settings, arithmetic, splits, sampler, model, run, display, ranks=ranks)


def measured(metrics: dict[str, float]) -> Evaluation:
    """An evaluation that says this, of no picture at all."""
    none = torch.zeros(0, dtype=torch.int64)
    return Evaluation(metrics, {}, none, none, None, (), none.view(0, 0), none.view(0, 0), none, None, {})


def lines(folder: Path) -> list[dict[str, Any]]:
    """The log of a run without what depends on the clock."""
    text = (folder / "metrics.jsonl").read_text()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMED} for line in text.splitlines()]


def summary(folder: Path) -> dict[str, Any]:
    return {k: v for k, v in json.loads((folder / "summary.json").read_text()).items() if k not in TIMED}


def last(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    return {name: value for name, value in values.items() if name != "checksum"}  # which is of the clock too


def best_weights(folder: Path) -> dict[str, Tensor]:
    return load_checkpoint(folder / "checkpoints" / "best.safetensors")[0].state_dict()


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    """Nested values that are the same to the last bit; says where they differ."""
    if isinstance(a, Tensor):
        same = torch.equal(a, b)
        assert same, f"{where}: shapes {tuple(a.shape)} and {tuple(b.shape)}, other values"
    elif isinstance(a, dict):
        assert list(a) == list(b), f"{where}: {list(a)} are not {list(b)}"
        for name in a:
            assert_equal(a[name], b[name], f"{where}.{name}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), f"{where}: {len(a)} is not {len(b)}"
        for place, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_equal(one, other, f"{where}[{place}]")
    else:
        assert a == b, f"{where}: {a!r} is not {b!r}"


def files(folder: Path) -> set[str]:
    """Of a run, but for TensorBoard's, which has a new one with every start."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name for name in found if not name.startswith("tensorboard")}


def assert_same_run(one: Path, other: Path) -> None:
    """The same log, results, weights, state, settings and files, to the last bit, but for the clock and the folder."""
    assert_equal(lines(one), lines(other), "log")
    assert_equal(summary(one), summary(other), "summary")
    assert_equal(best_weights(one), best_weights(other), "best weights")
    a, b = last(one), last(other)
    a.pop("seconds"), b.pop("seconds")
    assert_equal(a, b, "state")
    a, b = (Run.open(folder).settings().as_dict() for folder in (one, other))
    for settings in (a, b):  # where and how long, not what is computed
        settings.pop("run"), settings["hardware"].pop("time_limit")
    assert_equal(a, b, "settings")
    # how often a run was saved is a matter of the clock
    assert sorted((files(one) ^ files(other)) - {"checkpoints/previous.pt"}) == []


def assert_same_evaluations(one: Path, other: Path) -> None:
    """The same values and neighbours of every test picture."""
    for file in (one / "evaluations").iterdir():
        a, b = (vars(Evaluation.load(run / "evaluations" / file.name)) for run in (one, other))
        assert_equal(a, b, file.name)


class Killed(BaseException):
    """Stands for whatever ends a process without asking."""


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Ends the run at the beginning of step `number`, counted from 1."""
    real: Callable[..., Any] = loop.step

    def step(state: Any, batch: Any, parts: Any) -> Any:
        if state.step + 1 == number:
            raise Killed
        return real(state, batch, parts)

    monkeypatch.setattr(loop, "step", step)
