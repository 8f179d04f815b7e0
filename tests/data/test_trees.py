"""Trees of labels: what each dataset has above its classes, what is refused, and that a tree goes where records go."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadmap.data import Records, Tree, dataset
from roadmap.data.datasets.cub import group_by_name
from roadmap.data.datasets.inaturalist import TAXONOMY
from roadmap.data.trees import UNKNOWN, tree_over_classes

from . import layouts


def ways(records: Records) -> dict[str, tuple[str, ...]]:
    """Class -> the names on its way, from the coarsest level on; "?" where a level is not known."""
    tree = records.tree
    return {
        tree.nodes[-1][path[-1]]: tuple("?" if n == UNKNOWN else tree.nodes[d][n] for d, n in enumerate(path))
        for path in tree.paths.tolist()
    }


def test_sop_has_categories_over_products(tmp_path):
    records = dataset("sop", layouts.sop_layout(tmp_path, pictures=False))
    assert records.tree.levels == ("category", "product")
    assert ways(records)["1"] == ("bicycle", "1")
    assert ways(records)["12"] == ("chair", "12")
    assert [records.category_names[c] for c in records.categories] == [
        records.tree.nodes[0][n] for n in records.tree.paths[:, 0]
    ]


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.filterwarnings("ignore:.*has no Inat_dataset_splits")
def test_inaturalist_has_the_folders_above_its_species(lists, tmp_path):
    records = dataset("inaturalist", layouts.inaturalist_layout(tmp_path, lists))
    assert records.tree.levels == ("supercategory", "species")
    assert ways(records)["100"] == ("Aves", "100")
    assert ways(records)["109"] == ("Fungi", "109")


@pytest.mark.parametrize("where", ["categories.json", "train2018.json"])
def test_inaturalist_has_the_whole_taxonomy_where_the_annotations_hold_it(where, tmp_path):
    layouts.inaturalist_layout(tmp_path, lists=True)
    listed = [
        {"id": 100 + i, "name": f"s{i}", "kingdom": "K", "phylum": "P", "class": "C" if i < 5 else "D"}
        | {"order": "O", "family": f"F{i // 2}", "genus": "other"}
        for i in range(10)
    ]
    (tmp_path / where).write_text(json.dumps(listed if where == "categories.json" else {"categories": listed}))
    records = dataset("inaturalist", tmp_path)
    assert records.tree.levels == (*TAXONOMY, "species")
    assert ways(records)["103"] == ("K", "K/P", "K/P/C", "K/P/C/O", "K/P/C/O/F1", "K/P/C/O/F1/other", "103")
    assert len(records.tree.nodes[5]) == 6, "a genus of one name in different families is not one genus"
    assert records.category_names == ("Aves", "Fungi"), "the categories of the sampler stay those of the folders"


def test_a_taxonomy_that_lacks_a_species_is_not_used(tmp_path):
    layouts.inaturalist_layout(tmp_path, lists=True)
    entry = {"id": 100, "name": "s", **dict.fromkeys(TAXONOMY, "x")}
    (tmp_path / "categories.json").write_text(json.dumps([entry]))
    assert dataset("inaturalist", tmp_path).tree.levels == ("supercategory", "species")


def test_cub_groups_species_by_the_last_word_of_their_names(tmp_path):
    records = dataset("cub", layouts.cub_layout(tmp_path))
    assert records.tree.levels == ("group", "species")
    assert ways(records)["001.Albatross"] == ("Albatross", "001.Albatross")
    assert group_by_name("004.Groove_billed_Ani") == "Ani"
    assert records.categories is None, "batches are drawn as before"


def test_the_groups_of_the_real_cub(outside_data):
    records = dataset("cub", outside_data / "cub")
    sizes = dict.fromkeys(records.tree.nodes[0], 0)
    for group, _ in ways(records).values():
        sizes[group] += 1
    assert len(sizes) == 70
    assert sum(sizes.values()) == 200
    assert {name: sizes[name] for name in ("Albatross", "Ani", "Warbler", "Sparrow", "Gull")} == {
        "Albatross": 3,
        "Ani": 1,
        "Warbler": 25,
        "Sparrow": 21,
        "Gull": 8,
    }
    assert len(np.unique(records.split("test").tree.paths[:, 0])) == 24


def test_every_product_of_the_real_sop_is_in_one_category(outside_data):
    records = dataset("sop", outside_data / "sop")
    assert records.tree.paths.shape == (120_053, 2)
    assert len(records.tree.nodes[0]) == 12
    assert np.array_equal(records.tree.paths[:, 0], records.categories)


def test_glyphs_have_scripts_over_characters_also_where_they_were_drawn_before(tmp_path):
    drawn = dataset("glyphs", tmp_path / "g")
    assert drawn.tree.levels == ("script", "character")
    assert np.array_equal(drawn.tree.paths[:, 0], drawn.categories)
    old = json.loads((tmp_path / "g" / "records.json").read_text())
    del old["tree"]
    (tmp_path / "g" / "records.json").write_text(json.dumps(old))
    assert np.array_equal(dataset("glyphs", tmp_path / "g").tree.paths, drawn.tree.paths)


def write_pictures(root, *names: str) -> None:
    for number, name in enumerate(names):
        layouts.write_picture(root / name, number)


def test_nested_folders_are_a_tree(tmp_path):
    write_pictures(tmp_path, "a/x/one/1.png", "a/x/two/1.png", "a/y/one/1.png", "b/x/one/1.png")
    records = dataset("folder", tmp_path)
    assert records.tree.levels == ("folder 1", "folder 2", "class")
    assert ways(records) == {
        "a/x/one": ("a", "a/x", "a/x/one"),
        "a/x/two": ("a", "a/x", "a/x/two"),
        "a/y/one": ("a", "a/y", "a/y/one"),
        "b/x/one": ("b", "b/x", "b/x/one"),
    }


def test_folders_of_different_depths_leave_levels_unknown(tmp_path):
    write_pictures(tmp_path, "a/1.png", "a/x/1.png", "b/x/one/1.png", "c/1.png")
    assert ways(dataset("folder", tmp_path)) == {
        "a": ("a", "?", "a"),
        "a/x": ("a", "a/x", "a/x"),
        "b/x/one": ("b", "b/x", "b/x/one"),
        "c": ("c", "?", "c"),
    }


def test_folders_that_all_pictures_share_are_no_level(tmp_path):
    write_pictures(tmp_path / "flat", "all/one/1.png", "all/two/1.png")
    assert dataset("folder", tmp_path / "flat").tree is None
    write_pictures(tmp_path / "deep", "all/a/one/1.png", "all/b/two/1.png")
    assert ways(dataset("folder", tmp_path / "deep"))["all/a/one"] == ("a", "all/a/one")


def test_splits_are_no_level(tmp_path):
    write_pictures(tmp_path, "train/a/one/1.png", "train/b/two/1.png", "test/a/one/2.png")
    records = dataset("folder", tmp_path)
    assert ways(records) == {"a/one": ("a", "a/one"), "b/two": ("b", "b/two")}
    assert ways(records.split("test")) == {"a/one": ("a", "a/one")}


def table(tmp_path, text: str) -> Records:
    (tmp_path / "t.csv").write_text(text)
    return dataset("table", tmp_path / "t.csv")


def test_columns_of_a_table_are_levels_in_their_order(tmp_path):
    records = table(
        tmp_path,
        "path,level_order,level_family,label,category\n1.png,A,other,one,k\n2.png,A,other,two,k\n3.png,B,other,three,l\n4.png,,,four,l\n",
    )
    assert records.tree.levels == ("order", "family", "class")
    assert ways(records) == {
        "one": ("A", "A/other", "one"),
        "two": ("A", "A/other", "two"),
        "three": ("B", "B/other", "three"),
        "four": ("?", "?", "four"),
    }
    assert records.category_names == ("k", "l")


def test_a_table_with_categories_has_them_above_its_labels(tmp_path):
    records = table(tmp_path, "path,label,category\n1.png,one,k\n2.png,two,l\n3.png,one,k\n")
    assert records.tree.levels == ("category", "class")
    assert ways(records)["two"] == ("l", "two")
    assert table(tmp_path, "path,label\n1.png,one\n2.png,two\n").tree is None


def test_columns_that_are_no_tree_are_said_and_not_read(tmp_path):
    records = table(tmp_path, "path,label,category\n1.png,one,k\n2.png,two,l\n3.png,one,l\n")
    assert records.tree is None
    assert records.category_names == ("k", "l")
    assert records.notes == (
        "the columns category are no tree: one stands under 'k' and under 'l' (rows 1 and 3), so there are no levels "
        "above the labels",
    )


def toy(paths) -> Records:
    paths = np.asarray(paths)
    nodes = tuple(tuple(f"{level}{i}" for i in range(5)) for level in "ab")
    tree = Tree(paths, ("genus", "species"), nodes)
    return Records("toy", ".", tuple(f"{i}.png" for i in range(len(paths))), paths[:, -1], nodes[-1], tree=tree)


@given(st.lists(st.sampled_from([(0, 0), (0, 1), (1, 2), (UNKNOWN, 3), (UNKNOWN, UNKNOWN), (1, UNKNOWN)]), max_size=12))
def test_a_tree_goes_where_its_records_go(paths):
    whole = toy(np.asarray(paths, dtype=np.int64).reshape(-1, 2))
    back = Records.from_dict(json.loads(json.dumps(whole.as_dict())))
    assert np.array_equal(back.tree.paths, whole.tree.paths)
    assert back.tree.levels == whole.tree.levels
    assert back.tree.nodes == whole.tree.nodes
    turned = whole.select(np.arange(len(whole))[::-1])
    assert turned.tree.paths.tolist() == [list(path) for path in paths[::-1]]
    assert turned.tree.paths[:, -1].tolist() == turned.labels.tolist()


def test_splits_and_files_keep_the_tree(tmp_path):
    whole = dataclasses.replace(toy([(0, 0), (0, 1), (1, 2), (1, 2)]), splits=np.asarray(["train", "test"] * 2))
    assert whole.split("test").tree.paths.tolist() == [[0, 1], [1, 2]]
    assert whole.split_by_class(0.5).tree is whole.tree
    whole.save(tmp_path / "r.json")
    assert Records.load(tmp_path / "r.json").tree.paths.tolist() == whole.tree.paths.tolist()


def test_records_that_were_saved_before_there_were_trees_can_be_read():
    values = toy([(0, 0)]).as_dict()
    del values["tree"]
    assert Records.from_dict(values).tree is None


def test_what_stands_above_unlabelled_pictures_is_not_known():
    tree = tree_over_classes({"genus": ["a", "b"]}, np.asarray([1, -1, 0]), ["x", "y"])
    assert tree.paths.tolist() == [[1, 1], [-1, -1], [0, 0]]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: toy([(0, 0), (1, 0)]), "species 'b0' stands under 'a0' and under 'a1'; in a tree it has one place"),
        (lambda: toy([(0, 0), (-1, 0)]), r"species 'b0' stands under 'a0' and under '\?'"),
        (lambda: toy([(0, 9)]), r"species must lie in 0..4 \(or -1\), got 9..9"),
        (lambda: toy([(-2, 0)]), r"genus must lie in 0..4 \(or -1\), got -2..-2"),
        (lambda: Tree(np.zeros((2, 3)), ("a", "b"), ((), ())), r"got shape \(2, 3\), 2 names of levels and nodes of 2"),
        (lambda: Tree(np.zeros((1, 2)), ("a", "a"), (("x",), ("y",))), "levels of a tree must have different names"),
        (lambda: Tree(np.zeros((1, 1)), ("a",), (("x", "x"),)), "two nodes of the level a have one name"),
        (
            lambda: dataclasses.replace(toy([(0, 0), (0, 1)]), labels=np.asarray([0, 0])),
            "the finest level of the tree must be the labels",
        ),
    ],
)
def test_what_is_no_tree_is_refused_in_words(build, message):
    with pytest.raises(ValueError, match=message):
        build()
