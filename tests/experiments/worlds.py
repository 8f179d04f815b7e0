"""Finished runs without training: settings, and an evaluation of vectors that are more or less good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from roadmap.config.settings import DataSettings, OptimSettings, SelectSettings, Settings
from roadmap.embeddings import Embeddings
from roadmap.evaluation import evaluate
from roadmap.runs import Run

CLASSES, EACH = 24, 5  # as many as a bootstrap over classes needs, and more


def vectors(noise: float, seed: int, each: int = EACH, classes: int = CLASSES) -> Embeddings:
    """Items of several classes around the centre of each."""
    draw = torch.Generator().manual_seed(1000 * seed + round(100 * noise))
    centres = torch.randn(classes, 6, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(classes).repeat_interleave(each)
    points = centres[labels] + noise * torch.randn(len(labels), 6, generator=draw)
    return Embeddings(points, labels, tuple(f"{i}.png" for i in range(len(labels))))


def finished(
    folder: Path, noise: float, seed: int = 0, by: str = "last", last: float | None = None, each: int = EACH,
    data: str = "cub", test: str = "cub", classes: int = CLASSES, **loss: Any,
) -> Path:  # fmt: skip
    """A run that was tested; `last`: the noise of its last epoch, where that was kept beside the chosen one."""
    settings = Settings(
        data=DataSettings(name=data), loss={"name": "roadmap"} | loss, optim=OptimSettings(),
        select=SelectSettings(by=by), seed=seed, epochs=9, run=str(folder),
    )  # fmt: skip
    run = Run.create(settings)
    found = evaluate(vectors(noise, seed, each, classes), nearest=0)
    found.save(run.evaluation_file(test))
    if last is not None:
        path = run.evaluation_file(test)
        evaluate(vectors(last, seed, each, classes), nearest=0).save(path.parent / "last_epoch" / path.name)
    summary = {
        "before": {}, "after": {test: found.metrics}, "best epoch": 5, "chosen by": by, "epochs": 9, "steps": 90,
        "training seconds": 18.0, "skipped pictures": 0,
    }  # fmt: skip
    run.write_json("summary.json", summary)
    run.close()
    return folder
