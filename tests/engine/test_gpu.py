"""What only a GPU does: gradients scaled in float16, numbers read while the next step runs, fused optimisers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roadmap.engine import NonFiniteError, fit, resume
from roadmap.models import Retriever

from .worlds import Killed, kill_at, last, lines, summary, tiny

pytestmark = pytest.mark.gpu
CUDA: dict[str, Any] = {"hardware__device": "cuda", "hardware__compile": "no"}


@pytest.mark.parametrize("precision", ["32", "bf16", "fp16"])
def test_a_run_on_the_gpu_is_resumed(precision: str, pictures: Path, tmp_path: Path) -> None:
    changed = CUDA | {"hardware__precision": precision, "optim__ema": 0.9, "optim__clip": 1.0}
    settings = tiny(pictures, tmp_path / "run", **changed)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, 6)
        with pytest.raises(Killed):
            fit(settings, quiet=True)
    scaler = last(tmp_path / "run")["stateful"].get("scaler")
    assert (scaler is not None) == (precision == "fp16")
    folder = resume(tmp_path / "run", quiet=True)
    assert last(folder)["step"] == 8
    assert summary(folder)["steps"] == 8
    if precision == "fp16":
        assert last(folder)["stateful"]["scaler"]["scale"] > 1


def test_losses_are_those_of_the_cpu(pictures: Path, tmp_path: Path) -> None:
    exact = CUDA | {"hardware__precision": "32", "optim__lr": 1e-3}
    fit(tiny(pictures, tmp_path / "gpu", **exact), quiet=True)
    fit(tiny(pictures, tmp_path / "cpu", optim__lr=1e-3), quiet=True)
    gpu, cpu = ([line["loss"] for line in lines(tmp_path / name) if line["kind"] == "step"] for name in ("gpu", "cpu"))
    assert gpu[:2] == pytest.approx(cpu[:2], abs=2e-2)


def test_the_pictures_of_a_failed_step_are_named(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = Retriever.forward, [0]

    def forward(self: Retriever, images: Tensor) -> Tensor:
        seen[0] += self.training
        vectors = real(self, images)
        mask = torch.ones_like(vectors)
        mask[2] = math.nan
        return vectors * mask if self.training and seen[0] >= 5 else vectors

    monkeypatch.setattr(Retriever, "forward", forward)
    with pytest.raises(NonFiniteError, match="step 5: .* 1 of 8 pictures have an embedding that is zero or not finite"):
        fit(tiny(pictures, tmp_path / "run", **CUDA), quiet=True)
    assert last(tmp_path / "run")["step"] == 4
    assert (tmp_path / "run" / "stopped.json").is_file()


def test_two_processes_on_one_gpu_train_as_one(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They talk through the host (gloo): the library for GPUs refuses two on one."""
    monkeypatch.setenv("ROADMAP_SHARED_GPU", "1")
    exact = CUDA | {"hardware__precision": "32", "optim__name": "sgd", "optim__ema": 0.5}
    fit(tiny(pictures, tmp_path / "one", **exact), quiet=True)
    fit(tiny(pictures, tmp_path / "two", hardware__devices=2, **exact), quiet=True)
    one, two = (lines(tmp_path / name) for name in ("one", "two"))
    assert two[0] == one[0]  # before training
    for name in ("loss", "gradient norm"):
        values = [[line[name] for line in some if line["kind"] == "step"][:4] for some in (one, two)]
        assert values[1] == pytest.approx(values[0], rel=1e-2), name
