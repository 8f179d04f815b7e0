"""What every benchmark shares: where and on what it ran, and how much memory a step took."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

MEBIBYTE = 1 << 20


def hardware(device: str) -> str:
    """The device in words: the GPU's name, or the processor's with the number of threads torch uses."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        model = ""
    return f"{model or platform.processor() or platform.machine()} x {torch.get_num_threads()} threads"


def commit() -> str:
    """The commit that ran, with + where the tree differs from it; ROADMAP_COMMIT where there is no repository."""
    here = Path(__file__).parent
    try:
        name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        if name.returncode:
            return os.environ.get("ROADMAP_COMMIT", "unknown")
        tree = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True)
    except OSError:
        return os.environ.get("ROADMAP_COMMIT", "unknown")
    return name.stdout.strip() + ("+" if tree.stdout.strip() else "")


def provenance(device: str) -> dict[str, str]:
    """Columns that every CSV carries."""
    return {
        "device": device,
        "hardware": hardware(device),
        "torch": torch.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
    }


def memory_mib(device: str) -> float:
    """Memory in use now: resident on the CPU (Linux), torch's allocator on the GPU. Peaks count from here on."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / MEBIBYTE
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to what is resident now
    return _status_kib("VmRSS") / 1024


def memory_peak_mib(device: str) -> float:
    """The most memory in use since `memory_mib` was asked."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / MEBIBYTE
    return _status_kib("VmHWM") / 1024


def peak_mib(step: Callable[[], None], device: str) -> float:
    """Memory at its highest during a second `step`, above what lay there before it."""
    step()
    before = memory_mib(device)
    step()
    return max(0.0, memory_peak_mib(device) - before)


def _status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))
