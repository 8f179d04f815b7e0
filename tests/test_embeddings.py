"""Embeddings on disk: what is saved comes back, what others save is understood, and nothing loaded runs code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from roadmap.embeddings import Embeddings

FILES = Path(__file__).parent / "files"


def some(dtype: torch.dtype = torch.float32, ids: bool = True) -> Embeddings:
    labels = torch.tensor([2**53 + 1, -4, 2**53])
    return Embeddings(torch.randn(3, 5).to(dtype), labels, ("a/ü.jpg", "b.jpg", "c.jpg") if ids else None)


ABOUT = {"model": "0f" * 32, "crop": {"image": 224, "resize": 256}, "precision": "bf16", "root": "/photos/\udcff"}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_class_names_and_origin_travel_with_the_vectors(tmp_path: Path, suffix: str) -> None:
    names = ("Möwe", "wren/é", "")
    saved = Embeddings(torch.eye(3), torch.tensor([2, -1, 0]), ("x", "y\udce9", "z"), names, ABOUT)
    saved.save(tmp_path / f"x{suffix}")
    loaded = Embeddings.load(tmp_path / f"x{suffix}")
    assert loaded.class_names == names
    assert loaded.about == ABOUT
    assert loaded.ids == saved.ids  # also names that are not valid text
    assert loaded.to("cpu").about == ABOUT
    some = loaded.select(torch.tensor([2, 0]))
    assert (some.ids, some.labels.tolist(), some.class_names) == (("z", "x"), [0, 2], names)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_of_the_first_version_still_load(suffix: str) -> None:
    """Written before embeddings had class names."""
    loaded = Embeddings.load(FILES / f"embeddings_version_1{suffix}")
    assert loaded.labels.tolist() == [5, -4, 2**53 + 1, 5]
    assert loaded.ids == ("a/ü.jpg", "b.jpg", "c d.png", "e.jpg")
    assert loaded.vectors[0].tolist() == pytest.approx([0.8033, 0.1748, 0.0890], abs=1e-4)
    assert (loaded.class_names, loaded.about) == ((), {})


def test_labels_must_have_a_name_each() -> None:
    for labels in ([0, 3], [-2, 0]):
        with pytest.raises(ValueError, match=r"labels must lie in 0..2 \(or -1 for none\), one for each of"):
            Embeddings(torch.eye(2), torch.tensor(labels), class_names=("a", "b", "c"))


def test_bytes_are_the_names_that_they_spell(tmp_path: Path) -> None:
    """numpy's S beside its U: an id that is written with one is the id that is written with the other."""
    labels, ids = np.array([b"wren", "Möwe".encode()]), np.array([b"a", b"b"])
    np.savez(tmp_path / "s.npz", vectors=np.eye(2), labels=labels, ids=ids)
    loaded = Embeddings.load(tmp_path / "s.npz")
    assert loaded.ids == ("a", "b")
    assert loaded.class_names == ("Möwe", "wren")
    assert loaded.labels.tolist() == [1, 0]


def test_what_others_call_about_is_not_ours(tmp_path: Path) -> None:
    for about in (np.eye(2), np.array("birds of 2019"), np.array("[1]")):
        np.savez(tmp_path / "x.npz", vectors=np.eye(2), labels=np.arange(2), about=about)
        assert Embeddings.load(tmp_path / "x.npz").about == {}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("ids", [True, False])
def test_saved_embeddings_come_back(tmp_path: Path, suffix: str, dtype: torch.dtype, ids: bool) -> None:
    saved = some(dtype, ids)
    saved.save(tmp_path / f"x{suffix}")
    loaded = Embeddings.load(tmp_path / f"x{suffix}")
    assert torch.equal(loaded.vectors.double(), saved.vectors.double())
    assert torch.equal(loaded.labels, saved.labels)
    assert loaded.ids == saved.ids
    assert [path.name for path in tmp_path.iterdir()] == [f"x{suffix}"]  # no temporary file is left


def test_files_from_elsewhere_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "theirs.npz"
    np.savez(
        path, features=np.eye(3, dtype=np.float16), targets=np.array(["wren", "gull", "wren"]), paths=["x", "y", "z"]
    )
    loaded = Embeddings.load(path)
    assert loaded.labels.tolist() == [1, 0, 1]
    assert loaded.class_names == ("gull", "wren")
    assert loaded.ids == ("x", "y", "z")
    np.savez(path, embeddings=np.eye(3), labels=np.array([1, 2, 3], np.uint8))
    assert Embeddings.load(path).labels.dtype == torch.int64


def test_python_objects_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "objects.npz"
    np.savez(path, vectors=np.eye(2), labels=np.array([1, None], dtype=object))
    with pytest.raises(ValueError, match=r"objects.npz holds Python objects, which could run code"):
        Embeddings.load(path)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"vectors": np.eye(2)}, "has no labels: expected one of labels, targets, classes, found vectors"),
        ({"labels": np.arange(2)}, "has no vectors: expected one of vectors, embeddings, features, found labels"),
        ({"vectors": np.eye(2), "labels": np.array([0.5, 1])}, "labels must be integers or strings, got float64"),
        ({"vectors": np.eye(2), "labels": np.arange(3)}, r"labels must be int64 of shape \(2,\)"),
        ({"vectors": np.arange(2), "labels": np.arange(2)}, r"vectors must be floating point of shape \(N, D\)"),
        ({"vectors": np.eye(2), "labels": np.arange(2), "ids": ["a", "a"]}, "ids must be 2 distinct names, got 2, 1"),
        ({"vectors": np.eye(2), "labels": np.array([2**63, 1], np.uint64)}, r"labels must be below 2\^63"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, parts: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "bad.npz", **parts)
    with pytest.raises(ValueError, match=message):
        Embeddings.load(tmp_path / "bad.npz")


def test_files_of_another_kind_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in .npz or .safetensors, got '.pt'"):
        some().save(tmp_path / "x.pt")
    with pytest.raises(FileNotFoundError, match="absent.npz does not exist"):
        Embeddings.load(tmp_path / "absent.npz")
    for name in ("text.npz", "text.safetensors"):
        (tmp_path / name).write_text("not what it says")
        with pytest.raises(ValueError, match=f"{name} could not be read as {Path(name).suffix}"):
            Embeddings.load(tmp_path / name)
    with (tmp_path / "one.npz").open("wb") as file:
        np.save(file, np.eye(2))
    with pytest.raises(ValueError, match=r"one.npz holds a single array"):
        Embeddings.load(tmp_path / "one.npz")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = some()
    old.save(tmp_path / "x.npz")

    def broken(*arguments: object, **options: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", broken)
    with pytest.raises(OSError, match="disk full"):
        some().save(tmp_path / "x.npz")
    monkeypatch.undo()
    assert torch.equal(Embeddings.load(tmp_path / "x.npz").vectors, old.vectors)
    assert len(list(tmp_path.iterdir())) == 1
