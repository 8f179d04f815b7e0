"""Embeddings on disk: what is saved comes back, what others save is understood, and nothing loaded runs code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from roadmap.data import CentreCrop, Records, evaluation_batches, pack
from roadmap.embeddings import Embeddings, embedded


def some(dtype: torch.dtype = torch.float32, ids: bool = True) -> Embeddings:
    labels = torch.tensor([2**53 + 1, -4, 2**53])
    return Embeddings(torch.randn(3, 5).to(dtype), labels, ("a/ü.jpg", "b.jpg", "c.jpg") if ids else None)


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


# ---------------------------------------------------------------- pictures -> Embeddings


class Colour(nn.Module):
    """The mean colour of a picture; remembers how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))
        self.frozen = nn.Dropout(0.5).eval()
        self.modes: list[bool] = []
        self.seen: list[torch.dtype] = []

    def forward(self, images: Tensor) -> Tensor:
        assert len(images) > 0
        self.modes.append(self.training)
        found = images.mean((2, 3)) @ self.weight
        self.seen.append(found.dtype)
        return found


def coloured(folder: Path, count: int = 7, labels: list[int] | None = None) -> Records:
    """Pictures of one level of grey each: 0, 30, 60, ..."""
    folder.mkdir(exist_ok=True)
    for i in range(count):
        Image.fromarray(np.full((10, 12, 3), 30 * i, np.uint8)).save(folder / f"{i}.png")
    return Records(
        "grey", folder, tuple(f"{i}.png" for i in range(count)), np.asarray(labels or range(100, 100 + count))
    )


CROP = CentreCrop(8, 8, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def levels(embeddings: Embeddings) -> list[int]:
    return [round(255 * value) for value in embeddings.vectors[:, 0].tolist()]


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_in_the_order_of_the_records_with_labels_and_names(tmp_path: Path, packed: bool) -> None:
    whole = coloured(tmp_path / "grey")
    some = whole.select([5, 0, 3, 6, 1])
    pictures = pack(whole, 10, tmp_path / "pack", workers=0, progress=False).of(some) if packed else None
    found = embedded(Colour(), evaluation_batches(some, CROP, batch_size=2, pictures=pictures, workers=0))
    assert levels(found) == [150, 0, 90, 180, 30]
    assert found.labels.tolist() == [105, 100, 103, 106, 101]
    assert found.ids == ("5.png", "0.png", "3.png", "6.png", "1.png")
    assert found.vectors.dtype == torch.float32


def test_names_that_are_not_distinct_are_left_out(tmp_path: Path) -> None:
    twice = coloured(tmp_path / "grey").select([1, 2, 1])
    found = embedded(Colour(), evaluation_batches(twice, CROP, workers=0))
    assert found.ids is None
    assert levels(found) == [30, 60, 30]


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_evaluated_and_left_in_the_mode_it_was_in(tmp_path: Path, training: bool) -> None:
    model = Colour().train(training)
    model.frozen.eval()
    embedded(model, evaluation_batches(coloured(tmp_path / "grey"), CROP, workers=0))
    assert model.modes == [False]
    assert model.training is training
    assert model.frozen.training is False  # also parts that have a mode of their own


def test_the_mode_comes_back_after_an_error_too(tmp_path: Path) -> None:
    class Failing(Colour):
        def forward(self, images: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    model = Failing().train()
    with pytest.raises(RuntimeError, match="out of memory"):
        embedded(model, evaluation_batches(coloured(tmp_path / "grey"), CROP, workers=0))
    assert model.training


@pytest.mark.parametrize("packed", [False, True])
def test_pictures_that_cannot_be_read_are_left_out(tmp_path: Path, packed: bool) -> None:
    whole = coloured(tmp_path / "grey")
    for name in ("0.png", "4.png", "6.png"):  # the last is a batch of its own
        (tmp_path / "grey" / name).write_bytes(b"")
    pictures = pack(whole, 10, tmp_path / "pack", workers=0, on_error="skip", progress=False) if packed else None
    batches = evaluation_batches(whole, CROP, batch_size=3, pictures=pictures, workers=0, on_error="skip")
    found = embedded(Colour(), batches)
    assert levels(found) == [30, 60, 90, 150]
    assert found.labels.tolist() == [101, 102, 103, 105]
    assert found.ids == ("1.png", "2.png", "3.png", "5.png")
    assert set(batches.skipped) == {"0.png", "4.png", "6.png"}


def test_nothing_to_embed(tmp_path: Path) -> None:
    none = coloured(tmp_path / "grey").select([])
    with pytest.raises(ValueError, match="grey: there is no picture to embed"):
        embedded(Colour(), evaluation_batches(none, CROP, workers=0))


def test_autocast_is_for_the_model_alone(tmp_path: Path) -> None:
    whole = coloured(tmp_path / "grey")
    model = Colour()
    half = embedded(model, evaluation_batches(whole, CROP, workers=0), autocast=torch.bfloat16)
    full = embedded(model, evaluation_batches(whole, CROP, workers=0))
    assert model.seen == [torch.bfloat16, torch.float32]
    assert half.vectors.dtype == torch.float32
    assert not torch.equal(half.vectors, full.vectors)
    torch.testing.assert_close(half.vectors, full.vectors, rtol=1e-2, atol=1e-3)
    assert not torch.is_autocast_enabled("cpu")


def test_embeddings_are_ordinary_tensors(tmp_path: Path) -> None:
    """What was computed without gradients can be used with them, and be changed."""
    found = embedded(Colour(), evaluation_batches(coloured(tmp_path / "grey"), CROP, workers=0))
    weight = torch.ones(3, requires_grad=True)
    (found.vectors @ weight).sum().backward()
    assert weight.grad is not None
    found.vectors.mul_(2)
    found.labels.add_(1)
    assert not found.vectors.requires_grad


def test_a_model_can_be_trained_after_it_was_evaluated(tmp_path: Path) -> None:
    """What it keeps from the evaluation, such as a table of positions, must not be in its way."""

    class Remembering(Colour):
        table: Tensor | None = None

        def forward(self, images: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.ones(3, device=images.device)
            return images.mean((2, 3)) @ self.weight * self.table

    model = Remembering().train()
    embedded(model, evaluation_batches(coloured(tmp_path / "grey"), CROP, workers=0))
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    assert model.weight.grad is not None
