"""What "auto" means where, and what is refused."""

from __future__ import annotations

import pytest
import torch

from roadmap.config.settings import HardwareSettings
from roadmap.engine.hardware import engine_of, runnable_model
from roadmap.hardware import autocast_of, device_of, precision_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_auto_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of("auto") == CUDA
    without_gpu(monkeypatch)
    assert device_of("auto") == CPU


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match="hardware.device=cuda: no CUDA device is visible here; use hardware.device=cpu"
    ):
        device_of("cuda")
    with pytest.raises(ValueError, match="hardware.device=mps: there is none here; use hardware.device=cpu"):
        device_of("mps")
    with pytest.raises(ValueError, match="hardware.device must be auto, cpu, cuda, cuda:N or mps, got 'gpu'"):
        device_of("gpu")


def test_half_precision_with_a_scaler_needs_a_gpu() -> None:
    """Lightning would turn it into bfloat16 with a warning, and the evaluation would still be in float16."""
    with pytest.raises(ValueError, match="hardware.precision=fp16 is for GPUs; on the CPU use 32 or bf16"):
        engine_of(HardwareSettings(device="cpu", precision="fp16"))


@pytest.mark.parametrize(
    ("asked", "device", "bf16", "wanted"),
    [
        ("auto", CPU, True, "32"),
        ("auto", CUDA, True, "bf16"),
        ("auto", CUDA, False, "fp16"),
        ("32", CUDA, True, "32"),
        ("fp16", CUDA, True, "fp16"),
        ("bf16", CPU, False, "bf16"),
    ],
)
def test_precision(asked: str, device: torch.device, bf16: bool, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)
    settings = HardwareSettings(precision=asked)
    assert precision_of(settings, device) == wanted
    assert autocast_of(settings, device) == {"32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]


@pytest.mark.parametrize(("precision", "fabrics"), [("32", "32-true"), ("bf16", "bf16-mixed"), ("auto", "32-true")])
def test_the_engine_has_the_precision_that_was_asked_for(precision: str, fabrics: str) -> None:
    fabric = engine_of(HardwareSettings(device="cpu", precision=precision, threads=1))
    assert fabric.strategy.precision.precision == fabrics
    assert fabric.device == CPU


def test_threads_and_determinism_are_set() -> None:
    engine_of(HardwareSettings(device="cpu", threads=2, deterministic=True))
    assert torch.get_num_threads() == 2
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    engine_of(HardwareSettings(device="cpu", threads=1))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    ("mode", "device", "steps", "wanted"),
    [
        ("auto", CPU, 10**6, "as it is"),
        ("auto", CUDA, 3999, "as it is"),
        ("auto", CUDA, 4000, None),
        ("no", CUDA, 10**6, "as it is"),
        ("default", CPU, 1, None),
        ("reduce-overhead", CPU, 1, "reduce-overhead"),
    ],
)
def test_compiling(
    mode: str, device: torch.device, steps: int, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(torch, "compile", lambda model, mode: asked.append(mode) or model)
    model = torch.nn.Linear(1, 1)
    assert runnable_model(model, HardwareSettings(compile=mode), device, steps) is model
    assert asked == ([] if wanted == "as it is" else [wanted])
