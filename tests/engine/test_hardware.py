"""What "auto" means where, and what is refused."""

from __future__ import annotations

import pytest
import torch

from roadmap.config.settings import HardwareSettings
from roadmap.engine.arithmetic import arithmetic_of
from roadmap.hardware import autocast_of, device_of, precision_of, repeatable
from roadmap.ranks import Ranks

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
    with pytest.raises(ValueError, match="hardware.precision=fp16 is for GPUs; on the CPU use 32 or bf16"):
        arithmetic_of(HardwareSettings(device="cpu", precision="fp16"))


@pytest.mark.parametrize(
    ("asked", "device", "bf16", "wanted"),
    [
        ("auto", CPU, True, "32"),
        ("auto", CUDA, True, "bf16"),
        ("auto", CUDA, False, "fp16"),  # a T4 or V100
        ("32", CUDA, True, "32"),
        ("fp16", CUDA, True, "fp16"),
        ("bf16", CPU, False, "bf16"),
    ],
)
def test_precision(asked: str, device: torch.device, bf16: bool, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that only emulates bf16 is slower in it than in float32, and says that it supports it unless told."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or bf16)
    settings = HardwareSettings(precision=asked)
    assert precision_of(settings, device) == wanted
    assert autocast_of(settings, device) == {"32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]


@pytest.mark.parametrize(("asked", "precision"), [("32", "32"), ("bf16", "bf16"), ("auto", "32")])
def test_a_run_has_the_precision_that_was_asked_for(asked: str, precision: str) -> None:
    arithmetic = arithmetic_of(HardwareSettings(device="cpu", precision=asked, threads=1))
    assert arithmetic.precision == precision
    assert arithmetic.device == CPU
    with arithmetic.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == {"32": torch.float32, "bf16": torch.bfloat16}[precision]


def test_threads_and_determinism_are_set() -> None:
    arithmetic_of(HardwareSettings(device="cpu", threads=2, deterministic=True))
    assert torch.get_num_threads() == 2
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    arithmetic_of(HardwareSettings(device="cpu", threads=1))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize(("threads", "here", "wanted"), [(None, 2, 3), (None, 9, 1), (None, 1, 5), (4, 2, 4)])
def test_processes_on_one_machine_share_its_cores(
    threads: int | None, here: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a number is given; alone it is torch's choice."""
    torch.set_num_threads(5)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    arithmetic_of(HardwareSettings(device="cpu", threads=threads), Ranks(0, 18, local_world=here))
    assert torch.get_num_threads() == wanted


def test_what_an_evaluation_asks_of_the_hardware_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training may try algorithms out and use other threads; also where the evaluation fails."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    torch.set_num_threads(2)

    def switches() -> tuple[bool, bool, int]:
        return torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.get_num_threads()

    with pytest.raises(ZeroDivisionError), repeatable(HardwareSettings(threads=3)):  # noqa: PT012
        assert switches() == (False, True, 3)
        raise ZeroDivisionError
    assert switches() == (True, False, 2)
    with repeatable(HardwareSettings(threads=None)):
        assert switches() == (False, True, 2)
