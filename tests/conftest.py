"""What every test shares: where outside data lies, and which tests this machine cannot run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The same examples on every run, and no deadline: a slow machine is not a wrong answer.
settings.register_profile("roadmap", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("roadmap")

# A shell that starts the tests in the background has them ignore Ctrl-C, and all that they start; some are about it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The tensors of the tests are tiny: more threads only wait for each other.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def outside_data() -> Path:
    """The folder named by ROADMAP_DATA; tests that need it skip without it."""
    root = os.environ.get("ROADMAP_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("ROADMAP_DATA is not set to a folder")
    return Path(root)
