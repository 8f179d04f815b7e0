"""`roadmap evaluate`: its table, its JSON, its errors; on files as anyone may bring them, and on models."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from roadmap.cli.app import app
from roadmap.config.settings import DataSettings, ModelSettings, Settings
from roadmap.data import CentreCrop, Records, dataset, evaluation_batches
from roadmap.embeddings import Embeddings
from roadmap.encoder import embeddings_of
from roadmap.engine.splits import division_of
from roadmap.metrics import load_ground_truth, retrieval_metrics, revisited_metrics_of_vectors
from roadmap.models import load_checkpoint, retriever, save_checkpoint
from roadmap.runs import Run
from tests.data import layouts

run = CliRunner().invoke
Call = Callable[..., Result]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Embeddings]:
    labels = torch.arange(24) % 5
    labels[0] = 77
    vectors = torch.randn(5, 6)[labels % 5] + 0.8 * torch.randn(24, 6)
    embeddings = Embeddings(vectors, labels, tuple(f"{i}.jpg" for i in range(24)))
    embeddings.save(tmp_path / "birds.npz")
    return tmp_path / "birds.npz", embeddings


def test_table_and_json_hold_the_metrics(saved: tuple[Path, Embeddings], tmp_path: Path) -> None:
    path, embeddings = saved
    out = tmp_path / "new" / "metrics.json"
    result = run(app, ["evaluate", str(path), "--ks", "1,3", "--json", str(out), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    expected = retrieval_metrics(embeddings.vectors, embeddings.labels, ks=(1, 3))
    content = json.loads(out.read_text())
    assert content["metrics"] == expected
    assert (content["vectors"], content["dimensions"], content["ties"]) == (24, 6, "pessimistic")
    for name in ("R@1", "R@3", "mAP@R", "mAP", "queries_without_positives"):
        assert name in result.output
    assert f"{100 * expected['mAP']:.2f} %" in result.output
    assert "birds.npz: 24 x 6 among themselves" in result.output


def test_files_of_two_roots_are_compared_by_class_name(tmp_path: Path) -> None:
    """Each numbered for itself, with the same ids for other photos: R@1 is 100 %, not 0."""
    for name, classes in (("q", ("gull", "wren")), ("g", ("auk", "gull", "wren"))):
        eye = torch.eye(3)[-len(classes) :]
        about = {"root": f"/{name}", "model": "0"}
        ids = tuple(f"{i}.jpg" for i in range(len(classes)))
        Embeddings(eye, torch.arange(len(classes)), ids, classes, about).save(tmp_path / f"{name}.npz")
    arguments = ["evaluate", str(tmp_path / "q.npz"), "--gallery", str(tmp_path / "g.npz"), "--device", "cpu"]
    result = run(app, [*arguments, "--json", str(tmp_path / "m.json")])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "m.json").read_text())["metrics"]["R@1"] == 1.0
    assert "2 ids are in both, such as '0.jpg', but below different folders (/q and /g)" in result.output


def test_a_gallery_excludes_the_query_by_its_id(saved: tuple[Path, Embeddings], tmp_path: Path) -> None:
    path, embeddings = saved
    order = torch.randperm(24)
    assert embeddings.ids is not None
    gallery = Embeddings(embeddings.vectors[order], embeddings.labels[order], tuple(embeddings.ids[i] for i in order))
    gallery.save(tmp_path / "gallery.safetensors")
    out = tmp_path / "m.json"
    arguments = ["evaluate", str(path), "--gallery", str(tmp_path / "gallery.safetensors"), "--json", str(out)]
    assert run(app, [*arguments, "--ties", "mean", "--device", "cpu"]).exit_code == 0
    alone = retrieval_metrics(embeddings.vectors, embeddings.labels, ties="mean")
    assert json.loads(out.read_text())["metrics"] == alone


def test_equal_scores_count_as_told(tmp_path: Path) -> None:
    vectors, labels = torch.eye(3)[torch.arange(12) % 3], torch.arange(12) // 3  # every picture ties with three others
    Embeddings(vectors, labels).save(tmp_path / "tied.npz")
    found = {}
    for ties in ("pessimistic", "mean"):
        options = ["--ties", ties, "--json", str(tmp_path / "m.json"), "--device", "cpu"]
        assert run(app, ["evaluate", str(tmp_path / "tied.npz"), *options]).exit_code == 0
        found[ties] = json.loads((tmp_path / "m.json").read_text())
        assert found[ties]["ties"] == ties
        assert found[ties]["metrics"] == retrieval_metrics(vectors, labels, ties=ties)
    assert found["mean"]["metrics"]["mAP"] > found["pessimistic"]["metrics"]["mAP"]


def test_means_over_no_query_are_null(tmp_path: Path) -> None:
    Embeddings(torch.eye(3), torch.arange(3)).save(tmp_path / "alone.npz")
    result = run(app, ["evaluate", str(tmp_path / "alone.npz"), "--json", str(tmp_path / "m.json"), "--device", "cpu"])
    assert result.exit_code == 0
    metrics = json.loads((tmp_path / "m.json").read_text())["metrics"]
    assert metrics["mAP"] is None
    assert metrics["queries_without_positives"] == 3


def test_revisited_protocol_by_name(tmp_path: Path) -> None:
    names = [f"db{i}" for i in range(20)]
    kinds = np.random.default_rng(0).integers(0, 6, (3, 20))
    gnd = [
        {kind: np.flatnonzero(row == i).tolist() for i, kind in enumerate(("easy", "hard", "junk"))} for row in kinds
    ]
    truth_path = tmp_path / "gnd_small.pkl"
    truth_path.write_bytes(pickle.dumps({"gnd": gnd, "imlist": names, "qimlist": ["q0", "q1", "q2"]}))
    queries, database = torch.randn(3, 4), torch.randn(20, 4)
    order = torch.randperm(20)
    zeros = torch.zeros(20, dtype=torch.int64)
    Embeddings(queries, zeros[:3], ("q0", "q1", "q2")).save(tmp_path / "q.npz")
    Embeddings(database[order], zeros, tuple(names[i] for i in order)).save(tmp_path / "d.npz")
    arguments = ["evaluate", str(tmp_path / "q.npz"), "--revisited", str(truth_path), "--device", "cpu"]
    result = run(app, [*arguments, "--gallery", str(tmp_path / "d.npz"), "--json", str(tmp_path / "m.json")])
    assert result.exit_code == 0, result.output
    expected = revisited_metrics_of_vectors(queries, database, load_ground_truth(truth_path))
    metrics = json.loads((tmp_path / "m.json").read_text())["metrics"]
    assert metrics["hard trapezoidal mAP"] == expected["hard"]["trapezoidal mAP"]
    assert metrics["medium mP@5"] == expected["medium"]["mP@5"]
    assert "--revisited needs --gallery" in run(app, arguments).stderr
    Embeddings(database, zeros, tuple(f"x{i}" for i in range(20))).save(tmp_path / "d.npz")
    result = run(app, [*arguments, "--gallery", str(tmp_path / "d.npz")])
    assert "the database embeddings lack 20 images of the ground truth, the first 'db0'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "began", "message"),
    [
        (["absent.npz"], True, "absent.npz does not exist"),
        (["birds.npz", "--ks", "1,x"], False, "--ks must be whole numbers with commas between"),
        (["birds.npz", "--ks", ""], False, "--ks must be whole numbers with commas between"),
        (["birds.npz", "--dims", ","], False, "--dims must be whole numbers with commas between"),
        (["birds.npz", "--page", "x.pdf"], False, "--page x.pdf must end in .html"),
        (["birds.npz", "--ks", "0"], True, "ks must be whole numbers of at least 1"),
        (["birds.npz", "--memory", "lots"], False, "--memory must be a number with B, KB, MB or GB"),
        (["birds.npz", "--memory", "1KB"], True, "memory must be at least"),
        (["birds.npz", "--device", "abacus"], True, "--device must be auto, cpu, cuda, cuda:N or mps, got 'abacus'"),
        (["zero.npz"], True, "queries row 1 is zero"),
    ],
)
def test_errors_are_one_line_and_exit_1(
    saved: tuple[Path, Embeddings], arguments: list[str], began: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read at all is told before anything begins; the rest after the line that says what began."""
    monkeypatch.chdir(saved[0].parent)
    Embeddings(torch.eye(3) * torch.tensor([1.0, 0, 1]), torch.arange(3)).save("zero.npz")
    result = run(app, ["evaluate", *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == (f"reading    {arguments[0]}\n" if began else "")


def test_what_makes_numbers_mean_little_is_said(tmp_path: Path) -> None:
    points, labels = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) // 2

    def said(name: str, of: torch.Tensor, *more: str, **named: Any) -> list[str]:
        Embeddings(points, of, **named).save(tmp_path / name)
        result = run(app, ["evaluate", str(tmp_path / name), *more])
        assert result.exit_code == 0, result.output
        return [line.split(maxsplit=1)[1] for line in result.stdout.splitlines() if line.startswith("remark ")]

    assert said("good.npz", labels) == []
    (one,) = said("one.npz", torch.zeros(8, dtype=torch.int64))
    assert one == "all that is searched is of one class: every answer is right, which says nothing of the model"
    lost = "{} of 8 queries have nothing of their class to find, and count in no mean"
    assert said("alone.npz", torch.arange(8).clamp(min=1)) == [lost.format(6)]
    ids = tuple("abcdefgh")
    gallery = ("--gallery", str(tmp_path / "good.npz"))
    itself = "without ids in both files, a query that is in the gallery too finds itself"
    assert said("same.npz", labels, *gallery) == [itself]
    assert said("named.npz", labels + 9, *gallery, ids=ids) == [lost.format(8), itself]
    assert said("good.npz", labels, *gallery, ids=ids) == []


def test_memory_is_read_in_its_unit(saved: tuple[Path, Embeddings]) -> None:
    for text in ("256MB", "0.25GB", "262144KB", "268435456B", "256mb"):
        assert run(app, ["evaluate", str(saved[0]), "--memory", text, "--device", "cpu"]).exit_code == 0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets in miniature, a checkpoint, and a run that looks as if it had been trained on one of them."""
    folder = tmp_path_factory.mktemp("evaluate")
    torch.manual_seed(2)
    layouts.folder_layout(folder / "mine")
    layouts.folder_layout(folder / "split" / "train", 2)
    layouts.folder_layout(folder / "split" / "test", 3, 3)
    layouts.folder_layout(folder / "single", 1)
    layouts.sop_layout(folder)
    layouts.inshop_layout(folder)
    layouts.revisited_layout(folder)
    model = retriever(ModelSettings("small_cnn"), 24)
    save_checkpoint(folder / "model.safetensors", model, {"resize": 24, "epoch": 4, "loss": math.nan})
    data = DataSettings(name="folder", root=str(folder / "mine"), image=24, resize=24, side=256, batch_size=256)
    trained = Run.create(Settings(data=data, run=str(folder / "run")))
    trained.save_division(division_of(dataset("folder", folder / "mine"))[0])
    save_checkpoint(trained.best, model, {"resize": 24})
    return folder


@pytest.fixture
def called(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(place)

    def call(*arguments: Any) -> Result:
        return run(app, ["evaluate", *map(str, arguments), "--json", str(tmp_path / "m.json"), "--device", "cpu"])

    return call


def vectors(place: Path, records: Records) -> Embeddings:
    """By the library alone."""
    model, _ = load_checkpoint(place / "model.safetensors")
    return embeddings_of(model, evaluation_batches(records, CentreCrop(24, 24, model.mean, model.std), workers=0))


def test_a_run_is_evaluated_on_its_own_test_set(called: Call, place: Path, tmp_path: Path) -> None:
    records = division_of(dataset("folder", place / "mine"))[0]
    expected = vectors(place, records.split("test"))
    assert 0 < len(expected) < 24
    for more in ([], ["--data", "folder", "--root", "mine"], ["--data", "folder"], ["--split", "test"]):
        result = called("run", *more)
        assert result.exit_code == 0, result.output
        content = json.loads((tmp_path / "m.json").read_text())
        assert content["metrics"] == retrieval_metrics(expected.vectors, expected.labels)
        assert content["data"]["notes"] == [f"divided as in the run: train {24 - len(expected)}, test {len(expected)}"]
        assert content["data"]["notes"][0] in result.output
    assert f"run on mine: {len(expected)} x 256 among themselves" in result.output
    assert "add --page FILE.html" in result.output
    for split, part in (("train", records.split("train")), ("all", records)):
        assert called("run", "--split", split).exit_code == 0
        some = vectors(place, part)
        metrics = json.loads((tmp_path / "m.json").read_text())["metrics"]
        assert metrics == retrieval_metrics(some.vectors, some.labels)
    result = called("run", "--split", "val")
    assert "mine has no split 'val'; choose --split NAME from: train, test, all" in result.stderr
    result = called("run", "--data", "folder", "--root", "single")  # others than it was trained on
    assert "single has no test set" in result.output
    assert "divided as in the run" not in result.output


def test_json_says_which_model_which_pictures_and_how(called: Call, place: Path, tmp_path: Path) -> None:
    result = called("model.safetensors", "--data", "folder", "--root", "split", "--batch", 5, "--ks", "1,5")
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "m.json").read_text(), parse_constant=pytest.fail)
    digest = content["model"].pop("digest")
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert content["model"] == {
        "name": "model",
        "architecture": "small_cnn",
        "weights": "model.safetensors (epoch 4)",
        "dimensions": 256,
        "checkpoint": "model.safetensors",
        "about": {"resize": 24, "epoch": 4, "loss": None},
    }
    assert content["data"] == {
        "name": "split",
        "root": str((place / "split").resolve()),
        "read": "files, decoded",
        "queries": 9,
        "gallery": None,
        "classes": 3,
        "skipped": {},
        "notes": [],
    }
    assert content["settings"] == {
        "image": 24,
        "resize": 24,
        "side": 256,
        "device": "cpu",
        "precision": "32",
        "batch": 5,
        "ties": "pessimistic",
        "ks": [1, 5],
    }
    test = vectors(place, dataset("folder", place / "split").split("test"))
    expected = retrieval_metrics(test.vectors, test.labels, ks=(1, 5))
    assert content["metrics"] == pytest.approx(expected)
    assert "R@2" not in content["metrics"]
    assert f"{100 * expected['mAP@R']:.2f} %" in result.output


def test_without_a_test_set_all_pictures_search_one_another_and_it_is_said(
    called: Call, place: Path, tmp_path: Path
) -> None:
    result = called("model.safetensors", "--data", "folder", "--root", "mine")
    assert result.exit_code == 0, result.output
    assert "mine has no test set: all 24 pictures search one another" in result.output
    everything = vectors(place, dataset("folder", place / "mine"))
    content = json.loads((tmp_path / "m.json").read_text())
    assert content["metrics"] == retrieval_metrics(everything.vectors, everything.labels)
    result = called("model.safetensors", "--data", "folder", "--root", "single")
    assert "all pictures are of one class: every answer is right" in result.output
    assert json.loads((tmp_path / "m.json").read_text())["metrics"]["R@1"] == 1


def test_published_datasets_have_their_own_ks(called: Call, place: Path, tmp_path: Path) -> None:
    result = called("model.safetensors", "--data", "sop", "--root", ".")
    assert result.exit_code == 0, result.output
    metrics = json.loads((tmp_path / "m.json").read_text())["metrics"]
    assert [name for name in metrics if name.startswith("R@")] == ["R@1", "R@10", "R@100", "R@1000"]
    (place / "mine").rename(place / "inshop")  # the name of a folder does not make it a dataset
    try:
        assert called("model.safetensors", "--data", "folder", "--root", "inshop").exit_code == 0
    finally:
        (place / "inshop").rename(place / "mine")
    assert "R@2" in json.loads((tmp_path / "m.json").read_text())["metrics"]


def test_queries_are_searched_in_a_gallery(called: Call, place: Path, tmp_path: Path) -> None:
    result = called("model.safetensors", "--data", "inshop", "--root", ".", "--page", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    records = dataset("inshop", place)
    queries, gallery = (vectors(place, records.split(name)) for name in ("query", "gallery"))
    expected = retrieval_metrics(
        queries.vectors, queries.labels, gallery.vectors, gallery.labels, ks=(1, 10, 20, 30), query_index=[-1]
    )
    content = json.loads((tmp_path / "m.json").read_text())
    assert content["metrics"] == expected
    assert (content["data"]["queries"], content["data"]["gallery"]) == (1, 2)
    assert "1 of 1 classes, searched in 2 of 1 classes" in result.output
    assert "1 x 256 against 2" in result.output
    assert "id_00000080" in (tmp_path / "page.html").read_text()


def test_landmarks_are_easy_medium_and_hard(called: Call, place: Path, tmp_path: Path) -> None:
    result = called("model.safetensors", "--data", "roxford5k", "--root", "roxford5k")
    assert result.exit_code == 0, result.output
    records = dataset("roxford5k", place / "roxford5k")
    queries, gallery = (vectors(place, records.split(name)) for name in ("query", "gallery"))
    truth = load_ground_truth(place / "roxford5k" / "gnd_roxford5k.pkl")
    expected = revisited_metrics_of_vectors(queries.vectors, gallery.vectors, truth)
    content = json.loads((tmp_path / "m.json").read_text())
    assert content["metrics"]["medium trapezoidal mAP"] == expected["medium"]["trapezoidal mAP"]
    assert {"easy", "medium", "hard"} == {name.split()[0] for name in content["metrics"]}
    assert content["settings"]["ks"] is None
    assert "2 of 2 classes, searched in 3, in " in result.output
    assert "--page" not in result.output
    for more in (["--page", "p.html"], ["--ks", "1"]):
        result = called("model.safetensors", "--data", "roxford5k", "--root", "roxford5k", *more)
        assert result.exit_code == 1
        assert "has easy, hard and junk answers and no classes: leave --ks and --page out" in result.stderr


def test_the_page_shows_queries_and_what_they_retrieve(called: Call, tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    result = called("run", "--page", page)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "run on mine" in text
    assert text.count("data:image") > 6
    for number in range(6):
        assert f"class_{number}" in text
    metrics = json.loads((tmp_path / "m.json").read_text())["metrics"]
    assert f"{100 * metrics['mAP@R']:.1f}" in text
    assert f"wrote      {page}" in result.output


def test_the_table_comes_before_a_page_that_cannot_be_drawn(called: Call, tmp_path: Path) -> None:
    root = layouts.folder_layout(tmp_path / "alone", 3, 1)
    result = called("model.safetensors", "--data", "folder", "--root", root, "--page", tmp_path / "page.html")
    assert result.exit_code == 1
    assert re.search(r"queries_without_positives \S +3 ", result.stdout)
    assert "none of the 3 queries looked at has another picture of its class to find" in result.stderr


def test_a_safetensors_file_is_vectors_or_a_model_by_what_it_holds(
    called: Call, saved: tuple[Path, Embeddings]
) -> None:
    file = saved[0].with_suffix(".safetensors")
    saved[1].save(file)
    result = called(file)
    assert "birds.safetensors: 24 x 6 among themselves" in result.output
    result = called("model.safetensors", "--data", "folder", "--root", "mine")
    assert "model on mine: 24 x 256 among themselves" in result.output


def test_a_picture_that_cannot_be_decoded_is_counted(called: Call, tmp_path: Path) -> None:
    root = layouts.folder_layout(tmp_path / "some")
    (root / "class_1" / "2.png").write_bytes(b"nothing")
    arguments = ["model.safetensors", "--data", "folder", "--root", root, "--page", tmp_path / "page.html"]
    assert "2.png: not a picture that Pillow can read. Repair or remove it" in called(*arguments).stderr
    result = called(*arguments, "--on-error", "skip")
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "m.json").read_text())
    assert content["data"]["skipped"] == {"class_1/2.png": "not a picture that Pillow can read"}
    assert content["metrics"]["queries"] == content["data"]["queries"] == 23


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.safetensors"], "--data is missing: which pictures?"),
        (["model.safetensors", "--data", "cub"], "--root is missing: give --root FOLDER. Caltech-UCSD Birds"),
        (["model.safetensors", "--data", "spo", "--root", "."], "unknown dataset 'spo', did you mean 'sop'?"),
        (["resnet5", "--data", "folder", "--root", "mine"], "did you mean 'resnet50'"),
        (
            ["model.safetensors", "--data", "folder", "--root", "mine", "--weights", "hub"],
            "--weights is for timm models",
        ),
        (["run", "--gallery", "x.npz", "--memory", "1GB"], "--gallery, --memory cannot be used: run is a model"),
        (["run", "--memory", "1GB"], "leave it out"),
        (["run", "--ks", "x"], "--ks must be whole numbers"),
        (["birds.npz", "--data", "cub", "--image", "9"], "--data, --image cannot be used: birds.npz holds vectors"),
        (["birds.npz", "--page", "p.html"], "--page cannot be used: birds.npz holds vectors; leave it out"),
        (["damaged.safetensors", "--data", "folder", "--root", "mine"], "damaged.safetensors could not be read as a"),
        (["damaged.safetensors"], "damaged.safetensors could not be read as .safetensors"),
        (["mine"], "mine is not a run: it has no config.yaml"),
        (
            ["model.safetensors", "--data", "sfm120k", "--root", "sfm"],
            "sfm120k has no split 'test'; choose --split NAME",
        ),
    ],
)
def test_errors_of_models_are_one_line_and_exit_1(
    called: Call, place: Path, saved: tuple[Path, Embeddings], tmp_path: Path, arguments: list[str], message: str
) -> None:
    saved[1].save(place / "birds.npz")
    (place / "damaged.safetensors").write_bytes((place / "model.safetensors").read_bytes()[:300])
    if "sfm" in arguments:
        layouts.sfm_layout(place / "sfm")
    result = called(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "m.json").exists()


def test_unknown_options_are_usage_errors(called: Call) -> None:
    assert called("run", "--tise", "mean").exit_code == 2
    assert called("run", "--batch", "none").exit_code == 2
