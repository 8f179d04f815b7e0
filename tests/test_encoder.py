"""An encoder gives the same run the same bits: from training, from the command line, from Python."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

from roadmap.cli.app import app
from roadmap.config.settings import DataSettings, ModelSettings, SettingError, Settings
from roadmap.data import UNLABELLED, CentreCrop, Records, dataset, evaluation_batches, pack, pack_for
from roadmap.embeddings import Embeddings
from roadmap.encoder import Encoder, embeddings_of
from roadmap.engine import fit
from roadmap.evaluation import evaluate
from roadmap.models import load_checkpoint, retriever, save_checkpoint
from roadmap.runs import Run

from .engine.worlds import tiny, write_classes


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train and test classes of noise; larger than the side that packs keep, so that shrinking them counts."""
    folder = tmp_path_factory.mktemp("encoder") / "pictures"
    write_classes(folder / "train", range(8))
    write_classes(folder / "test", range(8, 12))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))


def run_of(pictures: Path, folder: Path, **more: Any) -> Path:
    settings = tiny(pictures, folder, data__side=12, data__resize=18, data__image=16, **more)
    return fit(dataclasses.replace(settings, epochs=1), quiet=True)


def evaluated(what: Path, out: Path, *more: object) -> dict[str, Any]:
    """By the command."""
    done = CliRunner().invoke(app, ["evaluate", str(what), "--json", str(out), *map(str, more)])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("precision", ["32", "bf16"])
@pytest.mark.parametrize("packed", ["yes", "no"])
def test_training_command_and_python_give_the_same_bits(
    pictures: Path, tmp_path: Path, precision: str, packed: str
) -> None:
    folder = run_of(pictures, tmp_path / "run", hardware__precision=precision, data__pack=packed)
    trained = json.loads((folder / "summary.json").read_text())["after"]["pictures"]
    found = evaluated(folder, tmp_path / "m.json")
    assert found["metrics"] == trained
    assert found["settings"]["precision"] == precision
    encoder = Encoder.open(folder)
    assert encoder.precision == precision
    assert evaluate(encoder).metrics == trained
    done = CliRunner().invoke(app, ["embed", str(folder), "--split", "test", "--out", str(tmp_path / "v.npz")])
    assert done.exit_code == 0, done.output
    file, test = Embeddings.load(tmp_path / "v.npz"), encoder.records().split("test")
    ours = encoder.embed(test)
    assert torch.equal(file.vectors, ours.vectors)
    assert file.about == ours.about
    assert (file.ids, file.class_names) == (test.paths, test.class_names)
    assert evaluate(file).metrics == trained
    model, _ = load_checkpoint(folder / "checkpoints" / "best.safetensors")
    training = Encoder.of(model.to(memory_format=torch.channels_last), Run.open(folder).settings(), torch.device("cpu"))
    assert torch.equal(training.embed(test).vectors, ours.vectors)
    assert training.digest == encoder.digest


def test_the_precision_of_a_run_is_told_apart(pictures: Path, tmp_path: Path) -> None:
    """If the two were equal to the bit, the test above would show nothing."""
    folder = run_of(pictures, tmp_path / "run", hardware__precision="bf16")
    test = dataset("folder", pictures).split("test")
    half, full = (Encoder.open(folder, precision=p).embed(test) for p in (None, "32"))
    assert not torch.equal(half.vectors, full.vectors)
    assert (half.about["precision"], full.about["precision"]) == ("bf16", "32")


def test_a_run_brings_its_crop_batch_layout_and_threads(pictures: Path, tmp_path: Path) -> None:
    folder = run_of(pictures, tmp_path / "run", data__batch_size=12, hardware__channels_last=False, hardware__threads=1)
    encoder = Encoder.open(folder)
    assert (encoder.crop.size, encoder.crop.resize, encoder.side, encoder.batch) == (16, 18, 12, 64)
    assert (encoder.name, encoder.checkpoint) == ("run", folder / "checkpoints" / "best.safetensors")
    assert encoder.hardware.threads == 1
    weight = next(p for p in encoder.model.parameters() if p.ndim == 4)
    assert weight.is_contiguous()
    threads, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    encoder.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    try:
        encoder.embed(dataset("folder", pictures).split("test"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert set(seen) == {1}
    other = Encoder.open(folder, batch=7, image=32, resize=40)
    assert (other.batch, other.crop.size, other.crop.resize) == (7, 32, 40)
    assert Encoder.open(folder, image=32).crop.resize == 36  # in proportion


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_to_be_seen_larger_is_not_shrunk_first(alone: bool, pictures: Path, tmp_path: Path) -> None:
    """Pictures of 20 pixels, of which the run keeps 12: who asks for 40 sees 20, not 12 enlarged."""
    what = run_of(pictures, tmp_path / "run")
    if alone:
        what = shutil.copy(what / "checkpoints" / "best.safetensors", tmp_path / "alone.safetensors")
    sides = [Encoder.open(what, **more).side for more in ({}, {"image": 16, "resize": 18}, {"image": 8})]
    assert sides == [12, 12, 12]
    assert [Encoder.open(what, **more).side for more in ({"image": 32}, {"resize": 40})] == [36, 40]
    larger, test = Encoder.open(what, image=32, resize=40), dataset("folder", pictures).split("test")
    whole = dataclasses.replace(larger, side=1_000)
    assert torch.equal(larger.embed(test).vectors, whole.embed(test).vectors)


def test_a_checkpoint_alone_cuts_pictures_as_its_run_did(pictures: Path, tmp_path: Path) -> None:
    folder = run_of(pictures, tmp_path / "run", data__squeeze="test")
    shutil.copy(folder / "checkpoints" / "best.safetensors", tmp_path / "alone.safetensors")
    alone, whole = Encoder.open(tmp_path / "alone.safetensors", batch=64), Encoder.open(folder)
    assert alone.run is None
    assert alone.crop == whole.crop
    assert alone.crop.squeeze
    assert alone.side == whole.side == 12
    test = dataset("folder", pictures).split("test")
    assert torch.equal(alone.embed(test).vectors, whole.embed(test).vectors)


def test_paths_and_open_pictures_need_no_dataset(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder.open(run_of(pictures, tmp_path / "run"))
    test = dataset("folder", pictures).split("test")
    expected = encoder.embed(test).vectors
    monkeypatch.chdir(pictures)
    by_path = encoder.embed([Path(path) for path in test.paths])
    assert torch.equal(by_path.vectors, expected)
    assert by_path.labels.tolist() == [UNLABELLED] * len(test)
    assert by_path.ids == test.paths
    assert by_path.about["root"] == str(pictures.resolve())
    opened = [Image.open(test.path(i)) for i in range(len(test))]
    by_image = encoder.embed(opened)
    assert torch.equal(by_image.vectors, expected)
    assert by_image.ids is None
    assert by_image.labels.tolist() == [UNLABELLED] * len(test)
    assert by_image.about["model"] == encoder.digest
    for one in ("a.jpg", Path("a.jpg")):
        with pytest.raises(TypeError, match=r"pictures are given as a list, also of one: embed\(\['a.jpg'\]\)"):
            encoder.embed(one)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Records, paths, or Pillow images, all of one kind; got PngImageFile among"):
        encoder.embed([test.paths[0], opened[0]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="pictures: there is no picture to embed"):
        encoder.embed([])


def test_a_picture_that_is_open_is_read_as_a_file_is(tmp_path: Path) -> None:
    """Turned as its camera says, white behind what is transparent, greyscale widened."""
    encoder = Encoder.open("small_cnn")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 4), dtype=np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(pixels[..., :3]).save(tmp_path / "turned.png", exif=turned)
    Image.fromarray(pixels).save(tmp_path / "clear.png")
    Image.fromarray(pixels[..., 0]).save(tmp_path / "grey.png")
    paths = sorted(tmp_path.glob("*.png"))
    assert torch.equal(encoder.embed(paths).vectors, encoder.embed([Image.open(path) for path in paths]).vectors)


def test_the_digest_is_of_the_weights_and_of_what_else_decides_the_vectors(pictures: Path, tmp_path: Path) -> None:
    folder = run_of(pictures, tmp_path / "run")
    encoder, again = Encoder.open(folder), Encoder.open(folder / "checkpoints" / "best.safetensors", precision="bf16")
    assert encoder.digest == again.digest
    assert len(encoder.digest) == 64
    before = encoder.digest
    with torch.no_grad():
        next(encoder.model.parameters()).mul_(1.001)
    assert encoder.digest != before  # not that of an older state
    other = retriever(ModelSettings("small_cnn", pooling="max", dim=8), 16)
    same = retriever(ModelSettings("small_cnn", pooling="avg", dim=8), 16)
    same.load_state_dict(other.state_dict())
    digests = {Encoder.of(model, tiny(pictures, folder), torch.device("cpu")).digest for model in (other, same)}
    assert len(digests) == 2


def test_a_run_is_evaluated_on_the_pictures_that_it_kept_for_it(tmp_path: Path) -> None:
    """Renaming a class, adding one and losing a picture moves nothing else, and is said."""
    root = write_classes(tmp_path / "own", range(6))
    folder = run_of(root, tmp_path / "run", select__by="last")
    tested = set(Encoder.open(folder).records().split("test").paths)
    assert 0 < len(tested) < 36
    before = evaluated(folder, tmp_path / "m.json")
    assert before["metrics"] == json.loads((folder / "summary.json").read_text())["after"]["own"]
    write_classes(tmp_path / "more", range(6, 8))
    for new in (tmp_path / "more").iterdir():
        new.rename(root / f"a_{new.name}")  # comes first, and would move every draw
    after = evaluated(folder, tmp_path / "m.json")
    assert after["metrics"] == before["metrics"]
    assert any("12 pictures are new since the run began and left out" in note for note in after["data"]["notes"])
    lost = sorted(tested)[0]
    (root / lost).unlink()
    less = evaluated(folder, tmp_path / "m.json")
    assert less["metrics"]["queries"] == len(tested) - 1
    assert any(f"test pictures of the run is missing ({lost})" in note for note in less["data"]["notes"])
    assert set(Encoder.open(folder).records().split("test").paths) == tested - {lost}


def test_a_run_finds_its_pictures_from_any_folder_and_where_they_moved(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_classes(tmp_path / "home" / "own", range(6))
    monkeypatch.chdir(tmp_path / "home")
    folder = run_of(Path("own"), Path("run"), select__by="last").resolve()
    (tmp_path / "away" / "own").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "away")  # where other pictures have that name
    here = Encoder.open(folder).records()
    assert here.root.resolve() == root.resolve()
    root.rename(tmp_path / "moved")
    moved = Encoder.open(folder).records(root=tmp_path / "moved")
    assert moved.split("test").paths == here.split("test").paths
    with pytest.raises(FileNotFoundError, match="own is not a folder or a file that exists"):
        Encoder.open(folder).records()
    with pytest.raises(ValueError, match=r"none of the 36 pictures of the run is below .* is it another folder than"):
        Encoder.open(folder).records(root=pictures)
    others = Encoder.open(folder).records("folder", pictures)
    assert others.split_names() == ("train", "test")  # other pictures keep their own division


def test_a_relative_root_of_an_older_run_is_refused_in_words(tmp_path: Path) -> None:
    data = DataSettings(name="folder", root="own", image=16, resize=16, side=16, batch_size=8)
    run = Run.create(Settings(data=data, run=str(tmp_path / "run")))
    save_checkpoint(run.best, retriever(ModelSettings("small_cnn"), 16), {"resize": 16})
    with pytest.raises(SettingError, match="run found its pictures in own, relative to a folder that it did not note"):
        Encoder.open(run.folder).records()
    done = CliRunner().invoke(app, ["evaluate", str(run.folder)])
    assert done.exit_code == 1
    assert "give --root PATH, the whole path of own" in done.stderr


def test_a_device_of_its_own_where_it_is_here(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_of(pictures, tmp_path / "run")  # on the CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Encoder.open(folder).device == torch.device("cpu")
    for name, said in (("cuda:2", "is not there; there is cuda:0, cuda:1"), ("cpu:1", "must be auto, cpu, cuda")):
        with pytest.raises(SettingError, match=said):
            Encoder.open(folder, device=name)


def test_the_side_of_a_pack_is_that_of_the_run(pictures: Path, tmp_path: Path) -> None:
    """Pictures of 20 pixels in a run that keeps 12: with its pack and without, the same."""
    encoder = Encoder.open(run_of(pictures, tmp_path / "run"))
    test = dataset("folder", pictures).split("test")
    made, _ = pack_for(dataset("folder", pictures), encoder.side, "yes", progress=False)
    assert made is not None
    assert made.side == 12
    assert torch.equal(encoder.embed(test, pack=made).vectors, encoder.embed(test).vectors)
    larger = dataclasses.replace(encoder, side=20)
    assert not torch.equal(larger.embed(test).vectors, encoder.embed(test).vectors)


# ---------------------------------------------------------------- batches of pictures through any model


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
    found = embeddings_of(Colour(), evaluation_batches(some, CROP, batch_size=2, pictures=pictures, workers=0))
    assert levels(found) == [150, 0, 90, 180, 30]
    assert found.labels.tolist() == [105, 100, 103, 106, 101]
    assert found.ids == ("5.png", "0.png", "3.png", "6.png", "1.png")
    assert found.vectors.dtype == torch.float32


def test_names_that_are_not_distinct_are_left_out(tmp_path: Path) -> None:
    twice = coloured(tmp_path / "grey").select([1, 2, 1])
    found = embeddings_of(Colour(), evaluation_batches(twice, CROP, workers=0))
    assert found.ids is None
    assert levels(found) == [30, 60, 30]


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_evaluated_and_left_in_the_mode_it_was_in(tmp_path: Path, training: bool) -> None:
    model = Colour().train(training)
    model.frozen.eval()
    embeddings_of(model, evaluation_batches(coloured(tmp_path / "grey"), CROP, workers=0))
    assert model.modes == [False]
    assert model.training is training
    assert model.frozen.training is False  # also parts that have a mode of their own


def test_the_mode_comes_back_after_an_error_too(tmp_path: Path) -> None:
    class Failing(Colour):
        def forward(self, images: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    model = Failing().train()
    with pytest.raises(RuntimeError, match="out of memory"):
        embeddings_of(model, evaluation_batches(coloured(tmp_path / "grey"), CROP, workers=0))
    assert model.training


@pytest.mark.parametrize("packed", [False, True])
def test_pictures_that_cannot_be_read_are_left_out(tmp_path: Path, packed: bool) -> None:
    whole = coloured(tmp_path / "grey")
    for name in ("0.png", "4.png", "6.png"):  # the last is a batch of its own
        (tmp_path / "grey" / name).write_bytes(b"")
    pictures = pack(whole, 10, tmp_path / "pack", workers=0, on_error="skip", progress=False) if packed else None
    batches = evaluation_batches(whole, CROP, batch_size=3, pictures=pictures, workers=0, on_error="skip")
    found = embeddings_of(Colour(), batches)
    assert levels(found) == [30, 60, 90, 150]
    assert found.labels.tolist() == [101, 102, 103, 105]
    assert found.ids == ("1.png", "2.png", "3.png", "5.png")
    assert set(batches.skipped) == {"0.png", "4.png", "6.png"}


def test_nothing_to_embed(tmp_path: Path) -> None:
    none = coloured(tmp_path / "grey").select([])
    with pytest.raises(ValueError, match="grey: there is no picture to embed"):
        embeddings_of(Colour(), evaluation_batches(none, CROP, workers=0))


def test_autocast_is_for_the_model_alone(tmp_path: Path) -> None:
    whole = coloured(tmp_path / "grey")
    model = Colour()
    half = embeddings_of(model, evaluation_batches(whole, CROP, workers=0), autocast=torch.bfloat16)
    full = embeddings_of(model, evaluation_batches(whole, CROP, workers=0))
    assert model.seen == [torch.bfloat16, torch.float32]
    assert half.vectors.dtype == torch.float32
    assert not torch.equal(half.vectors, full.vectors)
    torch.testing.assert_close(half.vectors, full.vectors, rtol=1e-2, atol=1e-3)
    assert not torch.is_autocast_enabled("cpu")


def test_embeddings_are_ordinary_tensors(tmp_path: Path) -> None:
    """What was computed without gradients can be used with them, and be changed."""
    found = embeddings_of(Colour(), evaluation_batches(coloured(tmp_path / "grey"), CROP, workers=0))
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
    embeddings_of(model, evaluation_batches(coloured(tmp_path / "grey"), CROP, workers=0))
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    assert model.weight.grad is not None
