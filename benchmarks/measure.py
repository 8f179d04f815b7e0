"""What every benchmark shares: where and on what it ran, and how much memory a step took."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch


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


def cpu_peak_mib(step: Callable[[], None]) -> float:
    """Resident memory at its highest during `step`, above what was resident before it (Linux)."""
    step()
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to what is resident now
    before = _status_kib("VmRSS")
    step()
    return max(0.0, (_status_kib("VmHWM") - before) / 1024)


def _status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))
