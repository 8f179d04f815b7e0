"""Pictures with several tags each: read from tables, kept in files, merged by name, measured."""

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
from roadmap.data import Records, Tags, dataset
from roadmap.data.tags import merged_tags, named_tags
from roadmap.data.trees import tree_over_classes
from roadmap.embeddings import Embeddings
from roadmap.evaluation import evaluate, merits
from roadmap.metrics import graded_metrics
from roadmap.refinement import Refinement

NAMES = [f"tag {name}" for name in ("H-AP", "ASI", "NDCG", "R@1", "mAP@R", "mAP")]
WORDS = ("beach", "dog", "night", "rain")


def written(path: Path, text: str) -> Records:
    path.write_text(text, encoding="utf-8")
    return dataset("table", path)


def sets_of(tags: Tags) -> list[set[str]]:
    return [{tags.names[i] for i in np.flatnonzero(row)} for row in tags.marks]


@pytest.mark.parametrize("between", [";", "|", " ; ", "| "])
def test_a_column_of_tags(between, tmp_path):
    rows = [["dog", "beach"], [], ["night"], ["dog", "dog", ""]]
    lines = [f"{i}.jpg,a,{between.join(row)}" for i, row in enumerate(rows)]
    found = written(tmp_path / "t.csv", "\n".join(["path,label,tags", *lines]))
    assert found.tags.names == ("beach", "dog", "night")
    assert sets_of(found.tags) == [set(row) - {""} for row in rows]
    assert sets_of(found.select([2, 0]).tags) == [{"night"}, {"dog", "beach"}]
    found.save(tmp_path / "r.json")
    again = Records.load(tmp_path / "r.json")
    assert np.array_equal(again.tags.marks, found.tags.marks)
    assert again.tags.names == found.tags.names
    older = {name: value for name, value in found.as_dict().items() if name != "tags"}
    assert Records.from_dict(older).tags is None


def test_other_separators_and_lists(tmp_path):
    semicolons = written(tmp_path / "s.csv", 'path;label;tags\n0.jpg;a;"dog;beach"\n1.jpg;b;dog|night\n')
    assert sets_of(semicolons.tags) == [{"dog", "beach"}, {"dog", "night"}]
    commas = written(tmp_path / "c.csv", 'path,label,tags\n0.jpg,a,"dog, beach"\n1.jpg,b,\n')
    assert sets_of(commas.tags) == [{"dog", "beach"}, set()]
    assert written(tmp_path / "n.csv", "path,label,tags\n0.jpg,a,\n1.jpg,b,\n").tags is None
    assert written(tmp_path / "o.csv", "path,label\n0.jpg,a\n").tags is None
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    lists = {"path": ["0.jpg", "1.jpg", "2.jpg"], "label": ["a", "b", "b"], "tags": [["dog", "new york, ny"], [], None]}
    parquet.write_table(pyarrow.table(lists), tmp_path / "t.parquet")
    assert sets_of(dataset("table", tmp_path / "t.parquet").tags) == [{"dog", "new york, ny"}, set(), set()]


def tagged(items: int = 24, seed: int = 0, names: tuple[str, ...] = WORDS) -> Embeddings:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(items) % 4
    marks = torch.rand(items, len(names), generator=generator).numpy() < 0.3
    vectors = torch.randn(items, 6, generator=generator)
    ids = tuple(f"{seed}/{i}" for i in range(items))
    return Embeddings(vectors, labels, ids, ("a", "b", "c", "d"), {"root": "/x"}, tags=Tags(marks, names))


def measured(some: Embeddings, other: Embeddings | None = None) -> dict[str, float]:
    found = evaluate(some, other, levels=True).metrics
    return {name: found[name] for name in NAMES}


@pytest.mark.parametrize("ties", ["pessimistic", "mean"])
def test_tags_are_measured_beside_the_classes(ties):
    whole = tagged()
    found, plain = evaluate(whole, levels=True, ties=ties), evaluate(whole, ties=ties)
    direct, values = graded_metrics(whole.vectors, whole.tags.marks, ties=ties, per_query=True)
    assert found.metrics == plain.metrics | {name: direct[name.removeprefix("tag ")] for name in NAMES}
    assert list(found.metrics) == [*plain.metrics, *NAMES]
    for name in NAMES:
        assert torch.equal(found.per_query[name].nan_to_num(-1), values[name.removeprefix("tag ")].nan_to_num(-1))


def test_tags_and_a_tree_are_both_measured():
    whole = tagged()
    tree = tree_over_classes({"kingdom": ["x", "x", "y", "y"]}, whole.labels.numpy(), whole.class_names, "class")
    both = evaluate(dataclasses.replace(whole, tree=tree), levels=True).metrics
    alone = evaluate(dataclasses.replace(whole, tree=tree, tags=None), levels=True).metrics
    assert both == alone | measured(whole)


def test_a_gallery_in_other_columns_is_compared_by_names():
    queries, gallery = tagged(12), tagged(20, seed=1)
    same = measured(queries, gallery)
    assert same == {
        f"tag {n}": v
        for n, v in graded_metrics(queries.vectors, queries.tags.marks, gallery.vectors, gallery.tags.marks).items()
        if f"tag {n}" in NAMES
    }
    order = [3, 1, 0, 2]
    wide = np.concatenate([gallery.tags.marks[:, order], np.ones((20, 1), dtype=bool)], axis=1)
    other = Tags(wide, (*(WORDS[i] for i in order), "everywhere"))
    one, two = merged_tags(queries.tags, other)
    assert one.names == two.names == (*WORDS, "everywhere")
    assert sets_of(one) == sets_of(queries.tags)
    assert sets_of(two) == sets_of(other)
    narrow = dataclasses.replace(gallery, tags=Tags(other.marks[:, :-1], other.names[:-1]))
    assert measured(queries, narrow) == same
    assert measured(queries, dataclasses.replace(gallery, tags=other))["tag H-AP"] != same["tag H-AP"]


def test_a_query_does_not_find_itself_in_its_gallery_and_better_answers_are_measured():
    whole = tagged()
    assert measured(whole, whole) == measured(whole)
    refined = evaluate(whole, levels=True, refinement=Refinement(expand=2)).metrics
    assert refined["tag H-AP"] != measured(whole)["tag H-AP"]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_keep_the_tags(suffix, tmp_path):
    whole = tagged()
    whole.save(tmp_path / f"v{suffix}")
    back = Embeddings.load(tmp_path / f"v{suffix}")
    assert np.array_equal(back.tags.marks, whole.tags.marks)
    assert back.tags.names == WORDS
    assert measured(back) == measured(whole)
    rows = torch.tensor([3, 1])
    assert back.select(rows).tags.marks.tolist() == whole.tags.marks[[3, 1]].tolist()
    bare = dataclasses.replace(whole, tags=Tags(whole.tags.marks))
    bare.save(tmp_path / f"b{suffix}")
    assert Embeddings.load(tmp_path / f"b{suffix}").tags.names == ()


def test_tags_of_somebody_else_are_zeros_and_ones_or_text(tmp_path):
    whole = tagged()
    parts = {"vectors": whole.vectors.numpy(), "labels": whole.labels.numpy()}
    np.savez(tmp_path / "v.npz", tags=whole.tags.marks.astype(np.uint8), **parts)
    assert measured(Embeddings.load(tmp_path / "v.npz")) == measured(whole)
    texts = [" ; ".join(sorted(some)) for some in sets_of(whole.tags)]
    np.savez(tmp_path / "v.npz", tags=np.array(texts), **parts)
    assert Embeddings.load(tmp_path / "v.npz").tags.names == WORDS
    assert measured(Embeddings.load(tmp_path / "v.npz")) == measured(whole)
    np.savez(tmp_path / "v.npz", tags=2 * whole.tags.marks, **parts)
    with pytest.raises(ValueError, match=r"v.npz: tags must be bool of shape \(pictures, tags\), got int64 \(24, 4\)"):
        Embeddings.load(tmp_path / "v.npz")
    np.savez(tmp_path / "v.npz", tags=whole.tags.marks[:5], **parts)
    with pytest.raises(ValueError, match="there are tags of 5 pictures, but 24 vectors"):
        Embeddings.load(tmp_path / "v.npz")


def test_what_can_be_chosen_by_is_what_will_be_measured():
    whole = tagged()
    records = Records("toy", Path("."), whole.ids, whole.labels.numpy(), whole.class_names, tags=whole.tags)
    found = evaluate(whole, levels=True).metrics
    known = [name for name in found if name not in ("AP loss", "queries", "queries_without_positives")]
    assert list(merits(records, levels=True)) == known
    assert not set(merits(records)) & set(NAMES)


def test_the_command_shows_and_writes_them(tmp_path):
    tagged().save(tmp_path / "v.npz")
    command = ["evaluate", str(tmp_path / "v.npz"), "--levels", "--json", str(tmp_path / "m.json")]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    found = evaluate(tagged(), levels=True).metrics
    assert json.loads((tmp_path / "m.json").read_text())["metrics"] == found
    for name in NAMES:
        assert name in shown.output
        assert f"{100 * found[name]:.2f} %" in shown.output


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: Tags(np.ones((2, 3))),
            ValueError,
            r"tags must be bool of shape \(pictures, tags\), got float64 \(2, 3",
        ),
        (lambda: Tags(np.ones(3, dtype=bool)), ValueError, r"got bool \(3,\)"),
        (lambda: Tags(np.ones((3, 0), dtype=bool)), ValueError, r"got bool \(3, 0\)"),
        (
            lambda: Tags(np.ones((3, 2), dtype=bool), ("a", "a")),
            ValueError,
            "tags need 2 different names, one each, got 1",
        ),
        (
            lambda: dataclasses.replace(tagged(), tags=tagged(5).tags),
            ValueError,
            "there are tags of 5 pictures, but 24 vectors",
        ),
        (
            lambda: Records("toy", Path("."), ("a", "b"), np.zeros(2), ("x",), tags=tagged(5).tags),
            ValueError,
            "there are tags of 5 pictures, but 2 pictures",
        ),
        (
            lambda: measured(tagged(), dataclasses.replace(tagged(seed=1), tags=None)),
            SettingError,
            "levels are those of a tree of labels, and the pictures have none; .*; a column tags would do as well",
        ),
        (
            lambda: measured(tagged(), dataclasses.replace(tagged(seed=1), tags=Tags(tagged(seed=1).tags.marks))),
            SettingError,
            "tags of queries and gallery cannot be compared: the tags of one have names and those of the other are ",
        ),
        (
            lambda: merged_tags(Tags(np.ones((2, 3), dtype=bool)), Tags(np.ones((2, 4), dtype=bool))),
            ValueError,
            "one has 3 tags without names and the other 4",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_no_tags_at_all_are_none():
    assert named_tags([[], []]) is None
