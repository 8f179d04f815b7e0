"""Tests once more in a process of their own, under Triton's interpreter, which must be chosen before Triton loads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roadmap.kernels import paths

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if CUDA else "cpu")
# There numpy multiplies tiles. On some processors it rounds an element by its place in a tile, which a GPU does
# not: this older one does not either, and equal vectors tie everywhere.
INTERPRETING = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Sandybridge"}
on_triton = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="runs on a GPU or under Triton's interpreter")
starts_the_interpreter = pytest.mark.skipif(CUDA or INTERPRETED, reason="this is the process that starts the other one")


def take_path(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Sends every call of a loss, whatever its size, the way of that name: "small", "tiles" or "stored"."""
    monkeypatch.setattr(paths, "SMALL", 1 << 30 if name == "small" else 0)
    monkeypatch.setattr(paths, "STORED", 1 << 30 if name == "stored" else 0)


def check_under_the_interpreter(file: str, only: str) -> None:
    """The tests of `file` whose names match `only` pass there, and there are some."""
    here = Path(file)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(here), "-k", only]
    environment = {**os.environ, **INTERPRETING}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=here.parents[2])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert re.search(r"\b[1-9]\d* passed", done.stdout), done.stdout[-3000:]
