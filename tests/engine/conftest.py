"""Pictures that many tests train on, written once; packs go to a folder of the session, never to the user's cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .worlds import write_classes


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROADMAP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _one_thread_and_free_choice_of_algorithms() -> Iterator[None]:
    """The engine sets torch's global switches, as a program that trains should; the next test finds them as before."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 classes below train/, 4 others below test/, 6 pictures each."""
    root = tmp_path_factory.mktemp("data") / "pictures"
    write_classes(root / "train", range(8))
    write_classes(root / "test", range(8, 12))
    return root


@pytest.fixture(scope="session")
def nested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Classes in two folders, of which training and test have some each."""
    root = tmp_path_factory.mktemp("nested")
    for split, first in (("train", 0), ("test", 8)):
        write_classes(root / split / "a", range(first, first + 4))
        write_classes(root / split / "b", range(first + 4, first + (8 if split == "train" else 6)))
    return root
