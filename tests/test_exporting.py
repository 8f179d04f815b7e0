"""A model as an ONNX file: the same vectors, the same index, and words for what cannot be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import roadmap.encoder.exporting
from roadmap.cli.app import app
from roadmap.cli.export import even_places
from roadmap.config.settings import SettingError
from roadmap.data import dataset
from roadmap.embeddings import Embeddings
from roadmap.encoder import Encoder
from roadmap.encoder.exporting import _agreement, export
from roadmap.search import Index, index_pictures

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
MODELS: dict[str, dict[str, Any]] = {
    "small_cnn": {"image": 32},
    "test_vit": {"image": 32, "weights": "random", "resize": 40, "dim": 9},
    "test_resnet": {"image": 64, "weights": "random", "pooling": "gem"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    random = np.random.default_rng(0)
    for name in range(4):
        (folder / "P" / str(name)).mkdir(parents=True)
        for i in range(6):
            pixels = 50 * name + random.integers(0, 60, (70, 90, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "P" / str(name) / f"{i}.png")
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_the_vectors_are_those_of_torch(root: Path, name: str, tmp_path: Path) -> None:
    encoder = Encoder.open(name, device="cpu", **MODELS[name])
    records = dataset("folder", root / "P")
    done = export(encoder, tmp_path / "m.onnx", records)
    assert done.difference < 1e-5
    opened = Encoder.open(tmp_path / "m.onnx")
    assert opened.description() == encoder.description()
    ours, theirs = encoder.embed(records), opened.embed(records)
    assert torch.allclose(ours.vectors, theirs.vectors, atol=1e-5)
    assert (ours.ids, ours.about) == (theirs.ids, theirs.about)
    # of any number, and without any of our code
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    side = encoder.crop.size
    for count in (1, 3):
        images = torch.randn(count, 3, side, side)
        with torch.no_grad():
            right = encoder.model.eval()(images)
        assert np.allclose(session.run(None, {"images": images.numpy()})[0], right.numpy(), atol=1e-5)


@pytest.mark.parametrize("name", ["small_cnn", "test_vit"])
def test_int8_is_small_near_and_another_model(root: Path, name: str, tmp_path: Path) -> None:
    encoder = Encoder.open(name, device="cpu", **MODELS[name])
    records = dataset("folder", root / "P")
    done = export(encoder, tmp_path / "m8.onnx", records, int8=True)
    export(encoder, tmp_path / "m.onnx", records)
    assert 0.95 < done.cosine < 1
    assert (tmp_path / "m8.onnx").stat().st_size < 0.6 * (tmp_path / "m.onnx").stat().st_size
    opened = Encoder.open(tmp_path / "m8.onnx")
    assert opened.precision == "int8"
    assert opened.digest != encoder.digest
    index_pictures(encoder, root / "P", tmp_path / "I", engine="exact")
    with Index.open(tmp_path / "I") as index:
        with pytest.raises(ValueError, match="these queries were made with another model and precision than the index"):
            index.search(opened.embed(records))
        exact = Encoder.open(tmp_path / "m.onnx").embed(records)
        assert [found[0] for found in index.search(exact, 1).ids] == list(exact.ids or ())


def test_a_graph_that_gives_other_vectors_is_not_kept(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder.open("small_cnn", device="cpu")
    other = Encoder.open("small_cnn", device="cpu")
    with torch.no_grad():
        for weights in other.model.parameters():
            weights.add_(0.1 * torch.randn_like(weights))
    graph = roadmap.encoder.exporting._graph
    monkeypatch.setattr(roadmap.encoder.exporting, "_graph", lambda model, image: graph(other.model.eval(), image))
    with pytest.raises(ValueError, match="gives other vectors than torch: they differ by up to"):
        export(encoder, tmp_path / "m.onnx", dataset("folder", root / "P"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [-1.0, float("nan")])
@pytest.mark.parametrize("int8", [False, True])
def test_vectors_that_are_no_longer_the_models_are_refused(int8: bool, wrong: float, tmp_path: Path) -> None:
    """Of whole numbers where half of the pictures have other vectors, else where one has."""
    before, labels = torch.eye(4), torch.zeros(4, dtype=torch.int64)
    after = before.clone()
    after[0] *= wrong
    pair = [Embeddings(vectors, labels) for vectors in (before, after)]
    if int8 and wrong == wrong:
        assert _agreement(tmp_path, *pair, int8).cosine == -1
        after[1:3] *= wrong
    with pytest.raises(ValueError, match="no longer those of the model" if int8 else "gives other vectors than torch"):
        _agreement(tmp_path, *pair, int8)


def test_what_is_refused(root: Path, tmp_path: Path) -> None:
    encoder = Encoder.open("small_cnn", device="cpu")
    records = dataset("folder", root / "P")
    with pytest.raises(ValueError, match="must end in .onnx, got '.bin'"):
        export(encoder, tmp_path / "m.bin", records)
    export(encoder, tmp_path / "m.onnx", records)
    opened = Encoder.open(tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="is an ONNX model already"):
        export(opened, tmp_path / "n.onnx", records)
    with pytest.raises(SettingError, match=r"data.image is fixed in .*m.onnx: leave it out"):
        Encoder.open(tmp_path / "m.onnx", image=64)
    with pytest.raises(SettingError, match=r"hardware.precision=bf16: .*m.onnx is of precision 32; leave it out"):
        Encoder.open(tmp_path / "m.onnx", precision="bf16")
    (tmp_path / "x.onnx").write_bytes(b"no model")
    with pytest.raises(ValueError, match="x.onnx could not be opened as an ONNX model"):
        Encoder.open(tmp_path / "x.onnx")
    (tmp_path / "strange.onnx").write_bytes(roadmap.encoder.exporting._graph(encoder.model.eval(), 32))
    with pytest.raises(ValueError, match="strange.onnx does not say how pictures are cut for it"):
        Encoder.open(tmp_path / "strange.onnx")
    with pytest.raises(FileNotFoundError, match="there is no run folder or checkpoint absent.onnx"):
        Encoder.open("absent.onnx")


def test_the_command(root: Path, tmp_path: Path) -> None:
    where = ["--data", "folder", "--root", str(root / "P"), "--device", "cpu"]
    result = CliRunner().invoke(app, ["export", "small_cnn", "-o", str(tmp_path / "m8.onnx"), "--int8", *where])
    assert result.exit_code == 0, result.output
    assert "compared   24 pictures: components differ by at most" in result.output
    assert "R@1        torch " in result.output
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path / "m8.onnx"), *where])
    assert result.exit_code == 0, result.output
    assert "precision int8" in result.output


def test_the_pictures_that_are_compared_keep_classes_together() -> None:
    assert even_places(5, 9) == [0, 1, 2, 3, 4]
    some = even_places(1000, 64)
    assert len(some) == len(set(some)) == 64
    assert (some[:9], some[-1]) == ([0, 1, 2, 3, 4, 5, 6, 7, 141], 999)


def test_an_encoder_that_averages_flips_is_exported_without(root: Path, tmp_path: Path) -> None:
    """The file holds the network; who opens it says whether flips are averaged."""
    records = dataset("folder", root / "P").select(range(4))
    done = export(Encoder.open("small_cnn", device="cpu", flip=True), tmp_path / "m.onnx", records)
    assert torch.equal(done.torch.vectors, Encoder.open("small_cnn", device="cpu").embed(records).vectors)
    assert not Encoder.open(tmp_path / "m.onnx").flip


def test_flips_are_averaged(root: Path) -> None:
    plain = Encoder.open("small_cnn", device="cpu")
    flipped = dataclasses.replace(plain, flip=True)
    images = [Image.open(root / f"P/{name}.png").resize((32, 32)) for name in ("1/2", "2/3")]
    mirrored = [image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for image in images]
    right = torch.nn.functional.normalize(plain.embed(images).vectors + plain.embed(mirrored).vectors, dim=1)
    assert torch.allclose(flipped.embed(images).vectors, right, atol=1e-5)
    assert torch.allclose(flipped.embed(mirrored).vectors, right, atol=1e-5)
    records = dataset("folder", root / "P")
    assert not torch.allclose(flipped.embed(records).vectors, plain.embed(records).vectors, atol=1e-4)
    assert flipped.description()["crop"] == {**plain.description()["crop"], "flip": True}
