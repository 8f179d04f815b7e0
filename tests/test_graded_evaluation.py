"""Evaluation by the levels of a tree and with fewer dimensions, beside direct calls of the metrics."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from roadmap.cli.app import app
from roadmap.config.settings import SettingError
from roadmap.data import CentreCrop, Records, Tree, dataset, evaluation_batches
from roadmap.data.trees import merged_trees, tree_over_classes
from roadmap.embeddings import Embeddings
from roadmap.encoder import embeddings_of
from roadmap.evaluation import Evaluation, evaluate, merits
from roadmap.metrics import GroundTruth, graded_metrics, retrieval_metrics
from roadmap.refinement import Refinement

from .data import layouts

CLASSES = ("ant", "bee", "cod", "dab")
ABOVE = {"kingdom": ["insect", "insect", "fish", "fish"]}
NAMES = ["H-AP", "ASI", "NDCG", "kingdom R@1", "kingdom mAP@R"]


def birds(items: int = 24, seed: int = 0, dim: int = 6) -> Embeddings:
    labels = torch.arange(items) % 4
    vectors = torch.randn(items, dim, generator=torch.Generator().manual_seed(seed))
    tree = tree_over_classes(ABOVE, labels.numpy(), CLASSES, "species")
    return Embeddings(vectors, labels, tuple(f"{seed}/{i}" for i in range(items)), CLASSES, {"root": "/x"}, tree)


def renumbered(some: Embeddings) -> Embeddings:
    """The same in other numbers: classes and nodes in another order, and one more of each."""
    names = ("dab", "cod", "elk", "bee", "ant")
    labels = torch.tensor([names.index(CLASSES[label]) for label in some.labels.tolist()])
    above = {"kingdom": ["fish", "fish", "beast", "insect", "insect"]}
    tree = tree_over_classes(above, labels.numpy(), names, "species")
    return dataclasses.replace(some, labels=labels, class_names=names, tree=tree)


@pytest.mark.parametrize("ties", ["pessimistic", "mean"])
def test_levels_are_measured_beside_the_classes(ties):
    whole = birds()
    found = evaluate(whole, levels=True, ties=ties)
    plain = evaluate(whole, ties=ties)
    direct, values = graded_metrics(
        whole.vectors, whole.tree.paths, levels=("kingdom", "species"), ties=ties, per_query=True
    )
    assert found.metrics == plain.metrics | {name: direct[name] for name in NAMES}
    assert list(found.metrics) == [*plain.metrics, *NAMES]
    assert all(torch.equal(found.per_query[name], values[name]) for name in NAMES)
    assert set(plain.metrics).isdisjoint(NAMES)


def test_a_gallery_in_other_numbers_is_compared_by_names():
    queries, gallery = birds(12), birds(20, seed=1)
    same = evaluate(queries, gallery, levels=True).metrics
    assert evaluate(queries, renumbered(gallery), levels=True).metrics == same
    assert evaluate(renumbered(queries), gallery, levels=True).metrics == same
    direct = graded_metrics(queries.vectors, queries.tree.paths, gallery.vectors, gallery.tree.paths)
    assert same["H-AP"] == direct["H-AP"]


def test_a_query_does_not_find_itself_in_its_gallery():
    whole = birds()
    assert evaluate(whole, whole, levels=True).metrics == evaluate(whole, levels=True).metrics


def test_few_dimensions_are_measured_as_if_there_were_no_more():
    whole = birds()
    found = evaluate(whole, dims=(4, 2, 6))
    assert found.metrics == evaluate(whole).metrics | {
        f"{d}-d {name}": value
        for d in (2, 4)
        for name, value in retrieval_metrics(whole.vectors[:, :d], whole.labels).items()
        if name not in ("AP loss", "queries", "queries_without_positives")
    }
    few = retrieval_metrics(whole.vectors[:, :2], whole.labels, per_query=True)[1]
    assert torch.equal(found.per_query["2-d mAP@R"], few["mAP@R"])
    gallery = birds(20, seed=1)
    alone = retrieval_metrics(whole.vectors[:, :3], whole.labels, gallery.vectors[:, :3], gallery.labels)
    assert evaluate(whole, gallery, dims=[3]).metrics["3-d mAP"] == alone["mAP"]


def test_dimensions_of_landmarks_and_of_refined_vectors():
    truth = GroundTruth((np.asarray([0]),) * 2, (np.asarray([1]),) * 2, (np.zeros(0, dtype=int),) * 2)
    queries, images = birds(2), birds(5, seed=1)
    assert "2-d medium trapezoidal mAP" in evaluate(queries, images, truth=truth, dims=[2]).metrics
    whole = birds()
    few = dataclasses.replace(whole, vectors=whole.vectors[:, :3])
    refined = evaluate(whole, dims=[3], refinement=Refinement(expand=2)).metrics["3-d mAP"]
    assert refined == evaluate(few, refinement=Refinement(expand=2)).metrics["mAP"]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_keep_the_tree_and_what_was_measured(suffix, tmp_path):
    whole = birds()
    whole.save(tmp_path / f"v{suffix}")
    back = Embeddings.load(tmp_path / f"v{suffix}")
    assert np.array_equal(back.tree.paths, whole.tree.paths)
    assert (back.tree.levels, back.tree.nodes) == (whole.tree.levels, whole.tree.nodes)
    found = evaluate(back, levels=True, dims=[2])
    found.save(tmp_path / "e.npz")
    again = Evaluation.load(tmp_path / "e.npz")
    assert again.metrics == found.metrics
    assert torch.equal(again.per_query["kingdom mAP@R"], found.per_query["kingdom mAP@R"])
    rows = torch.tensor([3, 1])
    assert back.select(rows).tree.paths.tolist() == whole.tree.paths[[3, 1]].tolist()


def test_a_tree_of_somebody_else_needs_no_names(tmp_path):
    whole = birds()
    paths = np.stack([7 - whole.labels.numpy() // 2, 1000 + whole.labels.numpy()], axis=1)
    np.savez(tmp_path / "v.npz", vectors=whole.vectors.numpy(), labels=paths[:, 1], tree=paths)
    found = evaluate(Embeddings.load(tmp_path / "v.npz"), levels=True).metrics
    assert found["level 1 mAP@R"] == evaluate(whole, levels=True).metrics["kingdom mAP@R"]
    np.savez(tmp_path / "v.npz", vectors=whole.vectors.numpy(), labels=paths[:, 1], tree=paths[:, 0])
    with pytest.raises(ValueError, match=r"v.npz: tree must hold integers of shape \(N, levels\), got int64 \(24,\)"):
        Embeddings.load(tmp_path / "v.npz")
    np.savez(tmp_path / "v.npz", vectors=whole.vectors.numpy(), labels=paths[:, 1] + 1, tree=paths)
    with pytest.raises(ValueError, match="the finest level of the tree must be the labels"):
        Embeddings.load(tmp_path / "v.npz")


def test_embedding_pictures_keeps_the_tree_of_those_that_could_be_read(tmp_path):
    for number, name in enumerate(["a/one/0.png", "a/two/0.png", "b/three/0.png", "b/three/1.png"]):
        layouts.write_picture(tmp_path / name, number)
    (tmp_path / "a/one/0.png").write_bytes(b"no picture")
    records = dataset("folder", tmp_path)
    batches = evaluation_batches(records, CentreCrop(8, 8), 2, None, torch.device("cpu"), 0, "skip", side=8)
    found = embeddings_of(torch.nn.Flatten(), batches)
    assert found.ids == records.paths[1:]
    assert np.array_equal(found.tree.paths, records.tree.paths[1:])


def test_trees_are_merged_by_names_and_others_refused():
    one, other = birds(4).tree, renumbered(birds(4)).tree
    mine, theirs = merged_trees(one, other)
    assert np.array_equal(mine.paths, theirs.paths)
    assert mine.nodes[1] == ("ant", "bee", "cod", "dab", "elk")
    bare = Tree(one.paths, one.levels, ((), ()))
    with pytest.raises(ValueError, match="level kingdom have names in one tree and none in the other"):
        merged_trees(one, bare)
    with pytest.raises(ValueError, match="one tree has the levels kingdom, species, the other a, b"):
        merged_trees(one, Tree(one.paths, ("a", "b"), one.nodes))


def test_what_can_be_chosen_by_is_what_will_be_measured():
    whole = birds()
    records = Records("toy", Path("."), whole.ids, whole.labels.numpy(), CLASSES, tree=whole.tree)
    found = evaluate(whole, levels=True, dims=[2]).metrics
    known = [n for n in found if n not in ("AP loss", "queries", "queries_without_positives")]
    assert list(merits(records, levels=True, dims=[2])) == known
    assert set(merits(records)).isdisjoint(NAMES)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: evaluate(dataclasses.replace(birds(), tree=None), levels=True), "the pictures have none; glyphs, cub"),
        (
            lambda: evaluate(birds(), dataclasses.replace(birds(seed=1), tree=None), levels=True),
            "the gallery has none",
        ),
        (lambda: evaluate(birds(), levels=True, refinement=Refinement(rerank=3)), "leave rerank out"),
        (lambda: evaluate(birds(), dims=[7]), "dims=7: the vectors have 6 dimensions; give whole numbers up to that"),
        (lambda: evaluate(birds(), dims=[0]), "dims=0: the vectors have 6 dimensions"),
        (lambda: evaluate(birds(), dims=[True]), "dims=True: the vectors have 6 dimensions"),
    ],
)
def test_what_cannot_be_is_refused_in_words(call, message):
    with pytest.raises(SettingError, match=message):
        call()


def test_the_command_shows_and_writes_them(tmp_path):
    birds().save(tmp_path / "v.npz")
    command = ["evaluate", str(tmp_path / "v.npz"), "--levels", "--dims", "2,4", "--json", str(tmp_path / "m.json")]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    found = evaluate(birds(), levels=True, dims=[2, 4]).metrics
    for name in ("kingdom R@1", "H-AP", "4-d mAP@R"):
        assert name in shown.output
        assert f"{100 * found[name]:.2f} %" in shown.output
    assert json.loads((tmp_path / "m.json").read_text())["metrics"] == found
    wrong = CliRunner().invoke(app, ["evaluate", str(tmp_path / "v.npz"), "--dims", "9"])
    assert wrong.exit_code == 1
    assert "--dims 9: the vectors have 6 dimensions" in " ".join(wrong.output.split())
