"""Keeping an index in step with a folder: new, changed, touched and deleted files, and those that cannot be read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roadmap.search import Index

from .cases import ABOUT, Vectors, new_index


class Embedder:
    """A picture's vector is made of its bytes; files that begin with "bad" cannot be read."""

    def __init__(self, root: Path, fail_after: int | None = None) -> None:
        self.root, self.asked, self.fail_after = root, [], fail_after  # type: ignore[var-annotated]

    def __call__(self, ids: Sequence[str]) -> tuple[Vectors, dict[str, list[Any]]]:
        if self.fail_after is not None and len(self.asked) >= self.fail_after:
            raise KeyboardInterrupt
        self.asked += ids
        good = [name for name in ids if not (self.root / name).read_text().startswith("bad")]
        skipped = {name: "cannot be decoded" for name in ids if name not in good}
        rows = [vector_of((self.root / name).read_text()) for name in good]
        vectors = torch.stack(rows) if rows else torch.empty(0, 16)
        labels = torch.zeros(len(good), dtype=torch.int64)
        found = Vectors(vectors, labels, tuple(good), ("owl",), {**ABOUT, "skipped": skipped})
        return found, {"year": [2000 + len(name) for name in good]}


def vector_of(content: str) -> torch.Tensor:
    return torch.randn(16, generator=torch.Generator().manual_seed(sum(map(ord, content))))


def listed(root: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(root.iterdir())}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.jpg").write_text(f"picture {i}")
    return folder


def test_a_file_that_cannot_be_read_does_not_end_it_all(root: Path, tmp_path: Path) -> None:
    """As one without the right to read it, or one that goes away between the list of a folder and the look at it."""
    files = {**listed(root), "gone.jpg": root / "gone.jpg"}
    reason = {"gone.jpg": "No such file or directory"}
    with new_index(tmp_path / "i") as index:
        assert dict(index.sync(files, Embedder(root), at_once=4).skipped) == reason
        assert len(index) == 10
        first = Embedder(root)
        assert dict(index.sync(files, first).skipped) == reason
        assert first.asked == []  # it was tried again, and the others were not
        (root / "gone.jpg").write_text("picture")
        assert index.sync(files, Embedder(root)).changed == ("gone.jpg",)
        assert len(index) == 11
        (root / "gone.jpg").unlink()  # it was there once: its vector goes, too
        assert dict(index.sync(files, Embedder(root)).skipped) == reason
        assert len(index) == 10


def test_only_what_changed_is_embedded(root: Path, tmp_path: Path) -> None:
    with new_index(tmp_path / "i") as index:
        first = Embedder(root)
        changes = index.sync(listed(root), first, at_once=4)
        assert changes.new == tuple(f"{i}.jpg" for i in range(10))
        assert first.asked == list(changes.new)
        (root / "new.jpg").write_text("a new one")
        (root / "3.jpg").write_text("picture X")  # of the same size
        os.utime(root / "3.jpg", ns=(1, 1))
        os.utime(root / "4.jpg", ns=(2, 2))  # touched
        (root / "5.jpg").unlink()
    with Index.open(tmp_path / "i", write=True) as index:
        second = Embedder(root)
        changes = index.sync(listed(root), second)
        assert (changes.new, changes.changed, changes.deleted) == (("new.jpg",), ("3.jpg",), ("5.jpg",))
        assert list(changes.touched) == ["4.jpg"]
        assert second.asked == ["new.jpg", "3.jpg"]
        assert sorted(index.ids()) == sorted(listed(root))
        assert index.search(vector_of("picture X"), 1).ids == [["3.jpg"]]
        assert index.search(vector_of("picture 5"), 1).scores[0][0] < 0.99
        third = index.sync(listed(root), Embedder(root, fail_after=0))  # nothing to embed
        assert not third
        assert (len(third.same), dict(third.touched)) == (10, {})


def test_an_interruption_keeps_what_was_done(root: Path, tmp_path: Path) -> None:
    with new_index(tmp_path / "i") as index:
        with pytest.raises(KeyboardInterrupt):
            index.sync(listed(root), Embedder(root, fail_after=6), at_once=3)
        assert len(index) == 6
    with Index.open(tmp_path / "i", write=True) as index:
        rest = Embedder(root)
        index.sync(listed(root), rest)
        assert rest.asked == ["6.jpg", "7.jpg", "8.jpg", "9.jpg"]
        assert len(index) == 10


def test_a_picture_that_cannot_be_read_is_not_tried_again_until_it_changes(root: Path, tmp_path: Path) -> None:
    (root / "2.jpg").write_text("bad one")
    with new_index(tmp_path / "i") as index:
        index.sync(listed(root), Embedder(root))
        assert len(index) == 9
        again = index.changes(listed(root))
        assert not again
        assert again.skipped == {"2.jpg": "cannot be decoded"}
        os.utime(root / "2.jpg", ns=(3, 3))  # touched
        assert list(index.sync(listed(root), Embedder(root, fail_after=0)).touched) == ["2.jpg"]
        assert index.changes(listed(root)).skipped == {"2.jpg": "cannot be decoded"}
        (root / "2.jpg").write_text("mended one")
        (root / "7.jpg").write_text("bad now, and longer")  # it was good
        changes = index.sync(listed(root), Embedder(root))
        assert changes.changed == ("2.jpg", "7.jpg")
        assert sorted(set(listed(root)) - set(index.ids())) == ["7.jpg"]
        (root / "7.jpg").unlink()
        assert index.sync(listed(root), Embedder(root)).deleted == ("7.jpg",)
        assert "7.jpg" not in index.storage.rows.files()


def test_pictures_that_were_not_asked_for_are_refused(root: Path, tmp_path: Path) -> None:
    embed = Embedder(root)

    def strange(ids: Sequence[str]) -> Any:
        vectors, rows = embed(ids)
        return replace(vectors, ids=("who.jpg", *(vectors.ids or ())[1:])), rows

    with new_index(tmp_path / "i") as index:
        with pytest.raises(ValueError, match="asked for 10 pictures, got one that was not among them: 'who.jpg'"):
            index.sync(listed(root), strange)
        assert len(index) == 0


def test_a_removed_picture_that_is_still_in_the_folder_comes_back(root: Path, tmp_path: Path) -> None:
    with new_index(tmp_path / "i") as index:
        index.sync(listed(root), Embedder(root))
        index.remove(["1.jpg"])
        assert index.sync(listed(root), Embedder(root)).new == ("1.jpg",)
