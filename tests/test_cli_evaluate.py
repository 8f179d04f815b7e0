"""`roadmap evaluate`: its table, its JSON, its errors; on files as anyone may bring them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from roadmap.cli import app
from roadmap.embed import Embeddings
from roadmap.metrics import load_ground_truth, retrieval_metrics, revisited_metrics_of_vectors

run = CliRunner().invoke


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
    ("arguments", "message"),
    [
        (["absent.npz"], "absent.npz does not exist"),
        (["birds.npz", "--ks", "1,x"], "--ks must be whole numbers with commas between"),
        (["birds.npz", "--ks", "0"], "ks must be whole numbers of at least 1"),
        (["birds.npz", "--memory", "lots"], "--memory must be a number with B, KB, MB or GB"),
        (["birds.npz", "--memory", "1KB"], "memory must be at least"),
        (["birds.npz", "--device", "abacus"], "--device must be auto, cpu, cuda or cuda:N, got 'abacus'"),
        (["zero.npz"], "queries row 1 is zero"),
    ],
)
def test_errors_are_one_line_and_exit_1(
    saved: tuple[Path, Embeddings], arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved[0].parent)
    Embeddings(torch.eye(3) * torch.tensor([1.0, 0, 1]), torch.arange(3)).save("zero.npz")
    result = run(app, ["evaluate", *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stdout == ""


def test_memory_is_read_in_its_unit(saved: tuple[Path, Embeddings]) -> None:
    for text in ("256MB", "0.25GB", "262144KB", "268435456B", "256mb"):
        assert run(app, ["evaluate", str(saved[0]), "--memory", text, "--device", "cpu"]).exit_code == 0
