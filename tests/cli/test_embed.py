"""`roadmap embed`, as a person calls it: what is in the file, what is said, and what is said when it cannot be done."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from torchvision.transforms.v2 import functional as tv
from typer.testing import CliRunner

import roadmap.encoder.encoder
import roadmap.encoder.opening
from roadmap.cli.app import app
from roadmap.cli.telling import OPTION_OF, SKIP, advice
from roadmap.config.settings import DataSettings, ModelSettings, SettingError, Settings
from roadmap.data import Records, dataset, fresh_pack
from roadmap.data.pictures.packing import pack_of
from roadmap.embeddings import Embeddings
from roadmap.engine.splits import division_of
from roadmap.models import Retriever, retriever, save_checkpoint
from roadmap.report.text import readable_size
from roadmap.runs import Run
from tests.data import layouts

Call = Callable[..., Result]
IMAGE, RESIZE = 32, 36


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures in a folder per class, a checkpoint, and a run that looks as if it had been trained on the pictures."""
    folder = tmp_path_factory.mktemp("embed")
    torch.manual_seed(1)
    layouts.folder_layout(folder / "mine")
    layouts.cub_layout(folder)
    model = retriever(ModelSettings("small_cnn", dim=5), IMAGE)
    save_checkpoint(folder / "model.safetensors", model, {"resize": RESIZE})
    data = DataSettings(name="folder", root=str(folder / "mine"), image=IMAGE, resize=RESIZE, side=256, batch_size=256)
    run = Run.create(Settings(data=data, run=str(folder / "run")))
    run.save_division(division_of(dataset("folder", folder / "mine"))[0])
    save_checkpoint(run.best, model, {"resize": RESIZE, "epoch": 7})
    return folder


@pytest.fixture
def called(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ROADMAP_DEBUG", raising=False)
    monkeypatch.chdir(place)

    def call(model: str, *arguments: Any, out: Path = tmp_path / "vectors.npz") -> Result:
        return CliRunner().invoke(app, ["embed", model, *map(str, arguments), "--out", str(out), "--device", "cpu"])

    return call


def literal(model: Retriever, records: Records, image: int = IMAGE, resize: int = RESIZE) -> torch.Tensor:
    """Picture by picture: opened by Pillow, resized and cut by torchvision, normalised by hand."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (model.mean, model.std))
    rows = []
    for i in range(len(records)):
        pixels = torch.from_numpy(np.array(Image.open(records.path(i)).convert("RGB"))).permute(2, 0, 1)
        cut = tv.center_crop(tv.resize(pixels, [resize], antialias=True), [image, image])
        rows.append((cut.float() / 255 - mean) / std)
    with torch.inference_mode():
        return model.eval()(torch.stack(rows))


def test_the_file_holds_the_vectors_of_the_pictures(called: Call, place: Path, tmp_path: Path) -> None:
    from roadmap.models import load_checkpoint

    result = called("model.safetensors", "--data", "folder", "--root", "mine", out=tmp_path / "new" / "v.npz")
    assert result.exit_code == 0, result.output
    written = Embeddings.load(tmp_path / "new" / "v.npz")
    records = dataset("folder", place / "mine")
    model, _ = load_checkpoint(place / "model.safetensors")
    torch.testing.assert_close(written.vectors, literal(model, records), atol=1e-5, rtol=0)
    assert written.ids == records.paths
    assert written.labels.tolist() == records.labels.tolist()
    size = readable_size((tmp_path / "new" / "v.npz").stat().st_size)
    assert f"v.npz: 24 vectors of 5 dimensions, {size}" in result.output
    assert "24 of 6 classes" in result.output
    assert f"{IMAGE} pixels from the middle of {RESIZE}, on cpu, precision 32" in result.output
    assert re.search(r"24 pictures in [\d.]+ s, [\d,]+ a second", result.output)
    assert f"next       roadmap evaluate {tmp_path / 'new' / 'v.npz'}" in result.output


def test_a_run_knows_its_best_checkpoint_its_pictures_and_how_it_divided_them(
    called: Call, place: Path, tmp_path: Path
) -> None:
    alone = called("model.safetensors", "--data", "folder", "--root", "mine", "--pack", "no", out=tmp_path / "a.npz")
    result = called("run", out=tmp_path / "b.safetensors")
    assert (alone.exit_code, result.exit_code) == (0, 0), result.output
    first, second = Embeddings.load(tmp_path / "a.npz"), Embeddings.load(tmp_path / "b.safetensors")
    assert torch.equal(first.vectors, second.vectors)
    assert first.ids == second.ids
    assert "next       roadmap evaluate run, which tests on pictures that no training saw" in result.output
    assert "best.safetensors (epoch 7)" in result.output
    records = division_of(dataset("folder", place / "mine"))[0]
    result = called("run/checkpoints/best.safetensors", "--split", "test", "--data", "folder", "--root", "mine")
    assert result.exit_code == 0, result.output
    held = Embeddings.load(tmp_path / "vectors.npz")
    assert held.ids == records.split("test").paths
    assert 0 < len(held) < 24
    assert f"divided as in the run: train {24 - len(held)}, test {len(held)}" in result.output


def test_of_a_divided_dataset_the_test_set_is_taken_unless_another_is_asked_for(called: Call, tmp_path: Path) -> None:
    records = dataset("cub", "CUB_200_2011")
    for split, part in ((None, records.split("test")), ("train", records.split("train")), ("all", records)):
        more = [] if split is None else ["--split", split]
        result = called("model.safetensors", "--data", "cub", "--root", "CUB_200_2011", *more)
        assert result.exit_code == 0, result.output
        written = Embeddings.load(tmp_path / "vectors.npz")
        assert (written.ids, written.class_names) == (part.paths, records.class_names)
        again = "roadmap evaluate model.safetensors --data cub --root CUB_200_2011, which tests on pictures that"
        assert (again in result.output) == (split is not None)  # training pictures would flatter it
    result = called("model.safetensors", "--data", "cub", "--root", "CUB_200_2011", "--split", "query")
    assert result.exit_code == 1
    assert "cub has no split 'query'; choose --split NAME from: train, test, all" in result.stderr


def test_a_query_file_is_evaluated_against_a_gallery_file(called: Call, tmp_path: Path) -> None:
    root = layouts.inshop_layout(tmp_path)
    result = called("model.safetensors", "--data", "inshop", "--root", root, "--split", "gallery")
    assert "roadmap evaluate QUERY_FILE --gallery GALLERY_FILE" in result.output
    result = called("model.safetensors", "--data", "inshop", "--root", root)
    assert "inshop has no split 'test'; choose --split NAME from: train, query, gallery, all" in result.stderr


def test_any_timm_model_with_weights_from_a_file(called: Call, place: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights.pth"
    torch.save(retriever(ModelSettings("test_vit"), 64).backbone.state_dict(), weights)
    arguments = ["--data", "folder", "--root", "mine", "--weights", weights, "--image", 64, "--pooling", "avg"]
    result = called("test_vit", *arguments)
    assert result.exit_code == 0, result.output
    model = retriever(ModelSettings("test_vit", weights=str(weights), pooling="avg"), 64)
    expected = literal(model, dataset("folder", place / "mine"), 64, 73)
    torch.testing.assert_close(Embeddings.load(tmp_path / "vectors.npz").vectors, expected, atol=1e-5, rtol=0)
    assert "64 pixels from the middle of 73" in result.output
    assert called("test_vit", *arguments, "--dim", 7, "--resize", 64).exit_code == 0
    first = Embeddings.load(tmp_path / "vectors.npz").vectors
    assert first.shape == (24, 7)
    torch.manual_seed(99)
    assert called("test_vit", *arguments, "--dim", 7, "--resize", 64).exit_code == 0  # random, but the same again
    assert torch.equal(Embeddings.load(tmp_path / "vectors.npz").vectors, first)


def test_a_convolutional_checkpoint_sees_other_sizes_and_a_transformer_does_not(
    called: Call, place: Path, tmp_path: Path
) -> None:
    from roadmap.models import load_checkpoint

    result = called("model.safetensors", "--data", "folder", "--root", "mine", "--image", 64)
    assert result.exit_code == 0, result.output
    model, _ = load_checkpoint(place / "model.safetensors")
    expected = literal(model, dataset("folder", place / "mine"), 64, 72)
    torch.testing.assert_close(Embeddings.load(tmp_path / "vectors.npz").vectors, expected, atol=1e-5, rtol=0)
    save_checkpoint(tmp_path / "vit.safetensors", retriever(ModelSettings("deit_tiny_patch16_224"), 32), {})
    result = called(str(tmp_path / "vit.safetensors"), "--data", "folder", "--root", "mine", "--image", 64)
    assert result.exit_code == 1
    assert "--image 64: this deit_tiny_patch16_224 takes pictures of 32 pixels; leave --image out" in result.stderr


def test_precision_is_that_of_the_model(called: Call, tmp_path: Path) -> None:
    found = {}
    for precision in ("32", "bf16"):
        result = called("model.safetensors", "--data", "folder", "--root", "mine", "--precision", precision)
        assert f"precision {precision}" in result.output
        found[precision] = Embeddings.load(tmp_path / "vectors.npz").vectors
    assert not torch.equal(found["32"], found["bf16"])
    torch.testing.assert_close(found["32"], found["bf16"], atol=0.02, rtol=0)


@pytest.fixture
def delivered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Of every embedding: whether it read a pack, and the size of its batches."""
    seen: list[tuple[bool, int]] = []
    original = roadmap.encoder.encoder.evaluation_batches

    def noted(records: Records, crop: Any, size: int, pictures: Any, *rest: Any, **more: Any) -> Any:
        seen.append((pictures is not None, size))
        return original(records, crop, size, pictures, *rest, **more)

    monkeypatch.setattr(roadmap.encoder.encoder, "evaluation_batches", noted)
    return seen


def test_a_pack_is_made_on_request_and_used_where_there_is_one(
    called: Call, place: Path, delivered: list[tuple[bool, int]]
) -> None:
    folder = ["model.safetensors", "--data", "folder", "--root", "mine", "--batch", 9]
    records = dataset("folder", place / "mine")
    for pack in ("auto", "no"):
        assert "read       pictures decoded each time" in called(*folder, "--pack", pack).output
    assert fresh_pack(records, 256) is None
    for pack in ("yes", "auto", "no"):
        said = "decoded each time" if pack == "no" else "read from a pack of side 256"
        assert f"read       pictures {said}" in called(*folder, "--pack", pack).output
    assert fresh_pack(records, 256) is not None
    assert delivered == [(False, 9), (False, 9), (True, 9), (True, 9), (False, 9)]


def test_drawn_pictures_need_no_root_and_have_no_files(
    called: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("a/1.png", "a/2.png", "b/1.png")
    records = Records("glyphs", tmp_path / "drawn", names, np.asarray([0, 0, 1]), ("a", "b"), splits=["test"] * 3)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 40, 3), dtype=np.uint8)
    pack_of(iter(pixels), records, 40, tmp_path / "drawn")
    monkeypatch.setattr(roadmap.encoder.opening, "dataset", lambda name, root: records)
    for pack in ("auto", "no"):
        result = called("small_cnn", "--data", "glyphs", "--pack", pack)
        assert result.exit_code == 0, result.output
        assert Embeddings.load(tmp_path / "vectors.npz").ids == names
    assert "weights random" in result.output
    assert "32 pixels, on cpu" in result.output


def test_a_damaged_picture_stops_or_is_left_out(called: Call, tmp_path: Path) -> None:
    root = layouts.folder_layout(tmp_path / "some")
    for number in range(5):
        (root / "class_3" / f"broken{number}.png").write_bytes(b"nothing")
    arguments = ["model.safetensors", "--data", "folder", "--root", root]
    result = called(*arguments)
    assert result.exit_code == 1
    assert re.fullmatch(
        r"error: \S+broken0.png: not a picture that Pillow can read. Repair or remove it, or use --on-error skip\n",
        result.stderr,
    )
    result = called(*arguments, "--on-error", "skip")
    assert result.exit_code == 0, result.output
    names = "class_3/broken0.png, class_3/broken1.png, class_3/broken2.png, ..."
    assert f"left out   5 pictures that could not be decoded: {names}" in result.output
    assert len(Embeddings.load(tmp_path / "vectors.npz")) == 24
    result = called(*arguments, "--pack", "yes", "--on-error", "skip")
    assert "left out   5 pictures" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.safetensors"], "--data is missing: which pictures? One of glyphs, cub"),
        (["model.safetensors", "--data", "cub"], "--root is missing: give --root FOLDER. Caltech-UCSD"),
        (["model.safetensors", "--data", "folder"], "--root is missing: give --root FOLDER. ROOT is a folder with"),
        (["model.safetensors", "--data", "cup"], "unknown dataset 'cup', did you mean 'cub'?"),
        (["model.safetensors", "--data", "sop", "--root", "mine"], "no Ebay_train.txt in mine. Stanford Online"),
        (["model.safetensors", "--data", "folder", "--root", "absent"], "absent is not a folder"),
        (
            ["model.safetensors", "--data", "folder", "--root", "mine", "--split", "test"],
            "mine has no split 'test'; choose --split NAME from: all",
        ),
        (["run", "--weights", "hub"], "--weights is for timm models; run/checkpoints/best.safe"),
        (["run", "--dim", "4", "--pooling", "max"], "--pooling, --dim are for timm models"),
        (["resnet5", "--data", "folder", "--root", "mine"], "no run folder or checkpoint resnet5, and MODEL must be"),
        (["resnet5", "--data", "folder", "--root", "mine"], "did you mean 'resnet50'"),
        (["runs/absent", "--data", "folder"], "there is no run folder or checkpoint runs/absent. MODEL is a run"),
        (["absent.safetensors", "--data", "folder"], "there is no run folder or checkpoint absent.safetensors"),
        (["mine"], "mine is not a run: it has no config.yaml"),
        (["."], ". is not a run but holds 1; name one of them, such as run"),
        (["empty", "--data", "folder"], "empty has no checkpoint yet: empty/checkpoints/best.safetensors is written"),
        (["last.pt"], "last.pt is no checkpoint of a model, which ends in .safetensors"),
        (
            ["damaged.safetensors", "--data", "folder", "--root", "mine"],
            "damaged.safetensors could not be read as a checkpoint, is it",
        ),
        (
            ["raw.safetensors", "--data", "folder", "--root", "mine"],
            "raw.safetensors holds weights but is no checkpoint of a trained",
        ),
        (
            ["raw.safetensors", "--data", "folder", "--root", "mine"],
            "weights of a backbone go into --weights raw.safetensors",
        ),
        (["test_vit", "--weights", "no.pth", "--data", "glyphs"], '--weights must be "random", "hub" or an existing'),
        (["test_vit", "--weights", "random", "--image", "40", "--data", "glyphs"], "set --image to a multiple"),
        (["small_cnn", "--pooling", "gemm", "--data", "glyphs"], "--pooling must be one of auto, avg, max, gem"),
        (["small_cnn", "--precision", "fp8", "--data", "glyphs"], "--precision must be one of auto, 32, bf16, fp16"),
        (["small_cnn", "--pack", "maybe", "--data", "glyphs"], "--pack must be one of auto, yes, no"),
        (["small_cnn", "--on-error", "cry", "--data", "glyphs"], "--on-error must be one of raise, skip"),
        (["run", "--resize", "8"], "resize must be at least size, got resize 8 and size 32"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(
    called: Call, place: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    from safetensors.torch import save_file

    (place / "last.pt").touch()
    (place / "damaged.safetensors").write_bytes((place / "model.safetensors").read_bytes()[:500])
    save_file({"conv.weight": torch.eye(2)}, place / "raw.safetensors")
    (place / "empty").mkdir(exist_ok=True)
    (place / "empty" / "config.yaml").touch()
    if arguments == ["."]:
        (place / "empty" / "config.yaml").unlink()
    result = called(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "vectors.npz").exists()


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_without_a_checkpoint_is_waited_for_or_resumed(saved: bool, called: Call, tmp_path: Path) -> None:
    """Also where nothing was saved yet: it then begins again."""
    run = Run.create(Settings(run=str(tmp_path / "young")))
    said = f"{run.folder} has no checkpoint yet: {run.best} is written once an epoch was evaluated; wait for it, or "
    if saved:
        run.last.touch()
    assert called(str(run.folder)).stderr == f"error: {said}go on with the run: roadmap train resume={run.folder}\n"


def test_a_run_that_was_tested_elsewhere_asks_where(called: Call, tmp_path: Path, place: Path) -> None:
    data = DataSettings(
        name="sfm120k",
        root="sfm",
        test_sets={"roxford5k": "ox", "rparis6k": "paris"},
        image=IMAGE,
        resize=IMAGE,
        side=IMAGE,
        batch_size=64,
    )
    run = Run.create(Settings(data=data, run=str(tmp_path / "landmarks")))
    run.best.write_bytes((place / "model.safetensors").read_bytes())
    result = called(str(tmp_path / "landmarks"))
    assert "say which: --data roxford5k --root ox or --data rparis6k --root paris" in result.stderr


def test_the_hub_out_of_reach_is_told_with_what_to_bring(called: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda **_: None)
    result = called("test_vit", "--data", "folder", "--root", "mine")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the weights of test_vit could not be fetched")
    assert "copy the file here, and set --weights FILE" in result.stderr


def test_the_ending_is_looked_at_first_and_usage_errors_are_2(called: Call, tmp_path: Path) -> None:
    result = called("absent", out=tmp_path / "vectors.txt")
    assert (result.exit_code, result.stderr) == (
        1,
        f"error: --out {tmp_path}/vectors.txt must end in .npz or .safetensors\n",
    )
    assert called("run", "--batch", 0).exit_code == 2
    assert CliRunner().invoke(app, ["embed", "run"]).exit_code == 2


def test_a_fault_shows_its_traceback_on_request(called: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROADMAP_DEBUG", "1")
    assert isinstance(called("mine").exception, FileNotFoundError)


def test_settings_are_told_by_the_name_of_their_option() -> None:
    said = advice(ValueError("set model.weights=FILE or data.image; your data, model.weights_x, a/data.root="))
    assert said == "set --weights FILE or --image; your data, model.weights_x, a/data.root="
    assert advice(SettingError("split", "no split 'x'; give split=y")) == "no split 'x'; give --split y"
    assert advice(ValueError("no split 'x'; give split=y")) == "no split 'x'; give split=y"
    worker = "Caught PictureError in worker\nTraceback ...\nroadmap.data.PictureError: a.png: empty\n"
    assert advice(RuntimeError(worker), SKIP) == "a.png: empty. Repair or remove it, or use --on-error skip"
    assert advice(RuntimeError(worker)) == "a.png: empty. Repair or remove it"
    assert advice(PermissionError(13, "Permission denied", "a.npz")) == "a.npz: Permission denied"
    again = "; free some space, then give the same command again"
    assert advice(OSError(28, "No space left on device")) == f"the disk is full (No space left on device){again}"
    for said in ("write error in a.faiss (No space left on device)", "rows.sqlite: database or disk is full"):
        assert advice(RuntimeError(said)) == f"the disk is full ({said}){again}"
    assert advice(RuntimeError("CUDA out of memory")).endswith("A smaller --batch takes less memory")
    assert advice(ModuleNotFoundError(name="timm")) == "this needs timm: pip install 'roadmap-retrieval[train]'"
    options = CliRunner().invoke(app, ["embed", "--help"]).output
    for option in OPTION_OF.values():
        assert option in options


def test_sizes_are_readable() -> None:
    assert [readable_size(n) for n in (0, 999, 1000, 12_345, 6_789_000, 3_210_000_000)] == [
        *("0 B", "999 B", "1.0 kB", "12.3 kB", "6.8 MB", "3.2 GB")
    ]
