"""Where a run was made: what its numbers may depend on beside its settings."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "roadmap-retrieval",
    "torch",
    "torchvision",
    "timm",
    "triton",
    "hydra-core",
    "numpy",
    "pillow",
)


def environment() -> dict[str, Any]:
    """Python, packages, device and commit: what the numbers of a run may depend on beside its settings."""
    packages = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [Path(sys.argv[0]).name.replace("__main__.py", "roadmap"), *sys.argv[1:]],  # python -m roadmap
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": packages,
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "cpu_threads": torch.get_num_threads(),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Of the source this runs from, with "+" if it was changed since; None where it is in no repository."""
    source = Path(__file__)
    try:
        _git(
            source, "ls-files", "--error-unmatch", source.name
        )  # an environment inside another repository is not in it
        head, changed = _git(source, "rev-parse", "--short", "HEAD"), _git(source, "status", "--porcelain", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}{'+' if changed else ''}"


def _git(source: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=source.parent, capture_output=True, text=True, timeout=10, check=True
    ).stdout.strip()
