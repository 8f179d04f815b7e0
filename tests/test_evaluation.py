"""The protocol of each dataset, beside direct calls of the metrics and rankings written out."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from roadmap.config.settings import SettingError
from roadmap.data import UNLABELLED, CentreCrop, Records
from roadmap.embeddings import Embeddings
from roadmap.evaluation import Evaluation, evaluate, merits, recall_ks, records_to_search
from roadmap.evaluation.neighbours import nearest_items
from roadmap.kernels.counts import pair_scores
from roadmap.metrics import GroundTruth, retrieval_metrics, revisited_metrics
from roadmap.metrics.vectors import unit_vectors


def records(splits: list[str] | None, labels: list[int], name: str = "mine", **more: object) -> Records:
    paths = tuple(f"{i}.png" for i in range(len(labels)))
    given = None if splits is None else np.asarray(splits)
    return Records(name, Path("/none"), paths, np.asarray(labels), splits=given, **more)  # type: ignore[arg-type]


class Fixed:
    """Stands for an encoder: fixed vectors by path; remembers what was asked of it."""

    name, weights, checkpoint, about, side, device, precision, batch = "fixed", "none", None, {}, 8, "cpu", "32", 4
    crop, model = CentreCrop(8, 8), SimpleNamespace(settings=SimpleNamespace(name="none"))

    def __init__(self, dim: int = 3, ids: bool = True, lost: tuple[str, ...] = ()) -> None:
        self.dim, self.ids, self.lost = dim, ids, lost
        self.asked: list[Records] = []

    def embed(self, part: Records, **_: object) -> Embeddings:
        self.asked.append(part)
        kept = [i for i, path in enumerate(part.paths) if path not in self.lost]
        part = part.select(kept)
        draws = (torch.Generator().manual_seed(int(path[:-4])) for path in part.paths)
        vectors = torch.stack([torch.randn(self.dim, generator=draw) for draw in draws])
        about = {"model": "0", "root": "/none", "skipped": dict.fromkeys(self.lost, "lost")}
        names = tuple(part.paths) if self.ids else None
        return Embeddings(vectors, torch.from_numpy(part.labels), names, part.class_names, about)


def measured(whole: Records, encoder: Fixed | None = None, **more: Any) -> Evaluation:
    return evaluate(encoder or Fixed(), whole, **more)  # type: ignore[arg-type]


def test_the_ks_of_the_literature() -> None:
    assert recall_ks("cub") == recall_ks("cars") == recall_ks("anything") == (1, 2, 4, 8)
    assert recall_ks("sop") == (1, 10, 100, 1000)
    assert recall_ks("inaturalist") == (1, 4, 16, 32)
    assert recall_ks("inshop") == (1, 10, 20, 30)


def test_test_pictures_among_themselves() -> None:
    whole = records(["train"] * 3 + ["test"] * 12, [9, 9, 9, *([0] * 4 + [1] * 4 + [2] * 4)])
    fixed = Fixed()
    found = measured(whole, fixed).metrics
    (test,) = fixed.asked
    assert test.paths == tuple(f"{i}.png" for i in range(3, 15))
    vectors = fixed.embed(test).vectors
    assert found == retrieval_metrics(vectors, torch.from_numpy(test.labels), ks=(1, 2, 4, 8))
    scores = torch.nn.functional.normalize(vectors.double(), dim=1)
    scores = (scores @ scores.T).fill_diagonal_(-2)
    nearest = test.labels[scores.argmax(1).numpy()]
    assert found["R@1"] == pytest.approx((nearest == test.labels).mean())
    assert found["queries"] == 12


def test_the_dataset_decides_k_unless_told() -> None:
    splits, labels = ["test"] * 8, [0, 0, 1, 1, 2, 2, 3, 3]
    assert "R@16" in measured(records(splits, labels, "inaturalist")).metrics
    found = measured(records(splits, labels, "inaturalist"), ks=(3,)).metrics
    assert [name for name in found if name.startswith("R@")] == ["R@3"]


def test_queries_against_a_gallery() -> None:
    whole = records(["query"] * 4 + ["train"] * 2 + ["gallery"] * 6, [0, 0, 1, 1, 5, 5, 0, 0, 0, 1, 1, 1], "inshop")
    fixed = Fixed()
    found = measured(whole, fixed).metrics
    queries, gallery = fixed.asked
    assert (len(queries), len(gallery)) == (4, 6)
    q, g = fixed.embed(queries), fixed.embed(gallery)
    assert found == retrieval_metrics(q.vectors, q.labels, g.vectors, g.labels, ks=(1, 10, 20, 30))
    a, b = (torch.nn.functional.normalize(e.vectors.double(), dim=1) for e in (q, g))
    hits = g.labels[(a @ b.T).argmax(1)] == q.labels
    assert found["R@1"] == pytest.approx(hits.double().mean().item())


def test_a_query_that_lies_in_the_gallery_does_not_find_itself() -> None:
    two = Embeddings(torch.eye(2), torch.tensor([0, 1]), ("same.png", "other.png"))
    found = evaluate(two, two)
    assert found.metrics["queries_without_positives"] == 2
    assert found.neighbours.tolist() == [[1, -1], [0, -1]]


TRUTH = (
    {"easy": [0, 1], "hard": [2], "junk": [5]},
    {"easy": [3], "hard": [], "junk": [0, 1]},
    {"easy": [], "hard": [4, 5], "junk": []},
)


def revisited(**more: object) -> Records:
    truth = tuple({kind: np.asarray(where, dtype=np.int64) for kind, where in query.items()} for query in TRUTH)
    return records(["query"] * 3 + ["gallery"] * 8, [0, 1, 2, *([-1] * 8)], "roxford5k", ground_truth=truth, **more)


def test_revisited_landmarks() -> None:
    whole = measured(revisited())
    found = whole.metrics
    q, g = Fixed().embed(revisited().split("query")), Fixed().embed(revisited().split("gallery"))
    a, b = (torch.nn.functional.normalize(e.vectors.double(), dim=1) for e in (q, g))
    order = (a @ b.T).argsort(dim=1, descending=True)
    lists = [tuple(np.asarray(query[kind], dtype=np.int64) for query in TRUTH) for kind in ("easy", "hard", "junk")]
    wanted = revisited_metrics(order, GroundTruth(*lists))
    assert set(found) == {f"{setting} {name}" for setting, values in wanted.items() for name in values}
    for setting, values in wanted.items():
        for name, value in values.items():
            assert found[f"{setting} {name}"] == pytest.approx(value), (setting, name)
    assert found["hard queries_without_positives"] == 1
    assert list(whole.per_query) == [name for name in found if "queries" not in name]
    for name, values in whole.per_query.items():
        assert values.nanmean().item() == pytest.approx(found[name]), name
    assert whole.per_query["hard mP@1"].isnan().tolist() == [False, True, False]


def test_revisited_landmarks_need_every_picture() -> None:
    with pytest.raises(
        ValueError, match="roxford5k: the revisited protocol needs every picture, but some could not be"
    ):
        measured(revisited(), Fixed(lost=("3.png",)))


def test_nothing_to_test() -> None:
    with pytest.raises(SettingError, match="mine has no split 'test'; choose split=NAME from: train, all") as caught:
        measured(records(["train"] * 2, [0, 0]))
    assert caught.value.field == "split"


@pytest.mark.parametrize("kind", ["test", "gallery", "revisited"])
def test_merits_are_what_is_measured_and_better_when_more(kind: str) -> None:
    whole = {
        "test": records(["test"] * 4, [0, 0, 1, 1], "sop"),
        "gallery": records(["query"] * 2 + ["gallery"] * 2, [0, 1, 0, 1], "inshop"),
        "revisited": revisited(),
    }[kind]
    names = merits(whole)
    found = measured(whole, Fixed(ids=False)).metrics
    assert [name for name in found if name in names] == list(names)
    left = {name.rsplit(" ", 1)[-1] for name in found if name not in names}
    assert left == {"queries", "queries_without_positives"} | ({"loss"} if kind != "revisited" else set())
    if kind != "revisited":
        assert "R@7" in merits(whole, ks=(7,))


# ---------------------------------------------------------------- every query, and its neighbours


def test_every_query_has_its_values_its_class_and_its_neighbours() -> None:
    whole = records(["train"] * 2 + ["test"] * 9, [3, 3, 0, 0, 0, 1, 1, 1, 2, 2, -1], class_names=("a", "b", "c", "d"))
    fixed = Fixed(dim=2)
    found = measured(whole, fixed, nearest=4)
    (test,) = fixed.asked
    assert found.ids == found.gallery_ids == test.paths
    assert [found.class_name(label) for label in found.labels.tolist()] == [*"aaabbbcc", "unlabelled"]
    assert found.positives.tolist() == [2, 2, 2, 2, 2, 2, 1, 1, 0]
    q = torch.nn.functional.normalize(fixed.embed(test).vectors.double(), dim=1)
    for i, (places, scores) in enumerate(zip(found.neighbours.tolist(), found.scores.tolist(), strict=True)):
        order = sorted((j for j in range(9) if j != i), key=lambda j: -float(q[i] @ q[j]))
        assert places == order[:4]
        assert scores == pytest.approx([float(q[i] @ q[j]) for j in places], abs=1e-6)
        hits = [test.labels[j] == test.labels[i] for j in order[: int(found.positives[i])]]
        if hits:
            precision = [sum(hits[: k + 1]) / (k + 1) for k in range(len(hits)) if hits[k]]
            assert found.per_query["mAP@R"][i].item() == pytest.approx(sum(precision) / len(hits))
    assert math.isnan(found.per_query["mAP@R"][8])  # it has no label, and so nothing to find
    assert found.metrics["queries_without_positives"] == 1
    assert found.per_query["R@1"][:8].mean().item() == found.metrics["R@1"]


def test_pictures_without_a_label_are_nobodys_class() -> None:
    bare = Embeddings(torch.eye(3), torch.full((3,), UNLABELLED), ("a", "b", "c"), ("x",), {"root": "/one"})
    others = dataclasses.replace(bare, ids=("d", "e", "f"))
    for found in (evaluate(bare), evaluate(bare, others)):
        assert found.metrics["queries_without_positives"] == 3
        assert found.positives.tolist() == [0, 0, 0]
    theirs = Embeddings(torch.eye(3), torch.full((3,), -1))  # another program's number for a class
    assert evaluate(theirs).metrics["queries_without_positives"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("own", [True, False])
def test_neighbours_are_ranked_by_the_scores_of_the_metrics(dtype: torch.dtype, own: bool) -> None:
    """Among many copies, which a plain product of this shape rounds apart by where they stand."""
    draw = torch.Generator().manual_seed(5)
    vectors = torch.randn(5, 67, generator=draw, dtype=dtype).repeat(201, 1)[:1003]
    q = unit_vectors(vectors, "queries")
    some, labels = torch.tensor([0, 501, 1002]), torch.arange(1003) % 4
    itself = some if own else torch.full_like(some, -1)
    places, scores = nearest_items(q[some], q, itself, (labels[some], labels), 180, "pessimistic")
    exact = pair_scores(q[some], q, torch.arange(1003).expand(3, -1).contiguous())
    if own:
        exact[torch.arange(3), some] = -torch.inf
    for i in range(3):
        right = labels == labels[some[i]]
        order = sorted(range(1003), key=lambda j: (-exact[i, j].item(), bool(right[j]), j))
        assert places[i].tolist() == order[:180]
        assert scores[i].tolist() == exact[i, order[:180]].tolist()
    assert (scores.diff(dim=1) == 0).sum() > 500  # copies tie


@pytest.mark.parametrize("count", [1, 10])
def test_candidates_are_enough_however_many_copies_there_are(count: int) -> None:
    """The wrong ones among 300 copies come first, and all of them stand behind the right ones."""
    q = unit_vectors(torch.ones(300, 5), "queries")
    labels = (torch.arange(300) >= 280).long()  # 280 of the query's class, then 20 of another
    places, _ = nearest_items(q[:1], q, torch.tensor([0]), (labels[:1], labels), count, "pessimistic")
    assert places[0].tolist() == list(range(280, 280 + count))


def test_a_shown_order_never_contradicts_the_ap_beside_it() -> None:
    """The AP@R of the order that is kept is the AP@R that is kept, of copies too."""
    draw = torch.Generator().manual_seed(1)
    vectors = torch.randn(12, 48, generator=draw).repeat(8, 1) + 3e-8 * torch.randn(96, 48, generator=draw)
    found = evaluate(Embeddings(vectors, torch.arange(96) % 5), nearest=40)
    for i in range(96):
        count = int(found.positives[i])
        hits = (found.gallery_labels[found.neighbours[i, :count]] == found.labels[i]).double()
        precision = hits.cumsum(0) / torch.arange(1, count + 1)
        assert (precision * hits).sum().item() / count == pytest.approx(found.per_query["mAP@R"][i].item())


@pytest.mark.parametrize("alone", [True, False])
def test_a_saved_evaluation_comes_back(tmp_path: Path, alone: bool) -> None:
    whole = records(["query"] * 3 + ["gallery"] * 5, [0, 1, 1, 0, 0, 1, 2, -1], class_names=("a", "b", "ü"))
    saved = measured(whole, Fixed(lost=("4.png",)), nearest=2) if not alone else evaluate(Fixed().embed(whole))
    saved.save(tmp_path / "new" / "e.npz")
    loaded = Evaluation.load(tmp_path / "new" / "e.npz")
    for field in dataclasses.fields(Evaluation):
        one, other = getattr(saved, field.name), getattr(loaded, field.name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        elif field.name == "per_query":
            assert list(one) == list(other)
            for name in one:
                torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other, field.name
    assert (loaded.gallery_ids == loaded.ids) is alone
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["e.npz"]


def test_what_is_no_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in .npz, got '.pt'"):
        evaluate(Embeddings(torch.eye(2), torch.zeros(2, dtype=torch.int64))).save(tmp_path / "e.pt")
    with pytest.raises(FileNotFoundError, match=r"absent.npz does not exist"):
        Evaluation.load(tmp_path / "absent.npz")
    (tmp_path / "text.npz").write_text("no")
    np.savez(tmp_path / "other.npz", vectors=np.eye(2))
    np.savez(tmp_path / "objects.npz", text=np.array([None], dtype=object))
    np.savez(tmp_path / "newer.npz", text=np.frombuffer(b'{"format": "roadmap-evaluation", "version": 9}', np.uint8))
    for name in ("text", "other", "objects", "newer"):
        with pytest.raises(ValueError, match=f"{name}.npz is no evaluation that could be read"):
            Evaluation.load(tmp_path / f"{name}.npz")


# ---------------------------------------------------------------- labels and ids of two files


def birds(names: list[str], shuffle: int, root: str | None = None, ids: tuple[str, ...] | None = None) -> Embeddings:
    """A clear direction for every class, whose number is its place among the sorted names of this file alone."""
    known = sorted(set(names))
    draws = [torch.Generator().manual_seed(sum(name.encode())) for name in names]
    vectors = torch.stack([torch.randn(16, generator=draw) for draw in draws])
    noise = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(shuffle))
    about = {} if root is None else {"root": root}
    labels = torch.tensor([known.index(name) for name in names])
    return Embeddings(vectors + 0.01 * noise, labels, ids, tuple(known), about)


def test_classes_are_compared_by_name() -> None:
    """Each file numbers its classes for itself: wren is 1 here and 2 there."""
    queries, gallery = birds(["gull", "wren", "tern"], 0), birds(["wren", "auk", "gull", "auk"], 1)
    found = evaluate(queries, gallery)
    assert found.metrics["R@1"] == 1.0
    assert found.metrics["queries_without_positives"] == 1  # there is no tern
    assert found.positives.tolist() == [1, 1, 0]
    names = [found.class_name(found.gallery_labels[row[0]].item()) for row in found.neighbours.tolist()]
    assert names[:2] == ["gull", "wren"]
    assert [found.class_name(label) for label in found.labels.tolist()] == ["gull", "wren", "tern"]


def test_string_labels_of_two_files_mean_what_they_say(tmp_path: Path) -> None:
    for name, labels in (("q", ["gull", "wren"]), ("g", ["auk", "gull", "wren"])):
        vectors = birds(labels, len(name)).vectors.numpy()
        np.savez(tmp_path / f"{name}.npz", vectors=vectors, labels=np.array(labels))
    queries, gallery = (Embeddings.load(tmp_path / f"{name}.npz") for name in "qg")
    assert evaluate(queries, gallery).metrics["R@1"] == 1.0


def test_names_and_mere_numbers_are_not_compared() -> None:
    named = birds(["gull", "wren"], 0)
    bare = dataclasses.replace(named, class_names=())
    for queries, gallery, who in ((named, bare, "queries"), (bare, named, "gallery")):
        with pytest.raises(ValueError, match=f"the labels of the {who} are classes with names, those of the"):
            evaluate(queries, gallery)
    assert evaluate(bare, bare).metrics["R@1"] == 1.0


def test_two_classes_of_one_name_are_refused_unless_both_sides_number_them_alike() -> None:
    twins = Embeddings(torch.eye(3), torch.arange(3), class_names=("a", "b", "a"))
    assert evaluate(twins, twins).metrics["R@1"] == 1.0
    with pytest.raises(ValueError, match="two classes of the queries are called 'a', so that names cannot tell them"):
        evaluate(twins, dataclasses.replace(twins, class_names=("a", "b", "c")))


def test_vectors_of_different_models_are_refused() -> None:
    one = Embeddings(torch.eye(2), torch.zeros(2, dtype=torch.int64), about={"model": "aa" * 32, "name": "first"})
    other = dataclasses.replace(one, about={"model": "bb" * 32, "name": "second"})
    with pytest.raises(ValueError, match=r"embedded by first \(aaaaaaaaaaaa\) and the gallery by second \(bbbb"):
        evaluate(one, other)
    half = dataclasses.replace(one, about={**one.about, "precision": "bf16", "crop": {"image": 224}})
    full = dataclasses.replace(one, about={**one.about, "precision": "32", "crop": {"image": 256}})
    assert evaluate(half, full).facts["notes"] == [
        "queries and gallery differ in crop: image 224 and image 256",
        "queries and gallery differ in precision: bf16 and 32",
    ]


IDS = ("a.jpg", "b.jpg")


def test_the_same_id_below_another_root_is_another_picture() -> None:
    queries, gallery = birds(["gull", "wren"], 0, "/one", IDS), birds(["gull", "wren"], 1, "/two", IDS)
    found = evaluate(queries, gallery)
    assert found.metrics["R@1"] == 1.0
    (note,) = found.facts["notes"]
    assert note.startswith("2 ids are in both, such as 'a.jpg', but below different folders (/one and /two)")
    same = evaluate(queries, birds(["gull", "wren"], 1, "/one", IDS))
    assert same.metrics["queries_without_positives"] == 2
    assert same.facts["notes"] == []


def test_one_picture_reached_from_two_roots_is_one() -> None:
    inner = birds(["gull", "wren"], 0, "/one/birds", IDS)
    outer = birds(["gull", "wren"], 1, "/one", tuple(f"birds/{name}" for name in IDS))
    assert evaluate(inner, outer).metrics["queries_without_positives"] == 2


def test_ids_of_which_one_side_has_no_root_are_refused_where_they_meet() -> None:
    known, old = birds(["gull", "wren"], 0, "/one", IDS), birds(["gull", "wren"], 1, None, IDS)
    for queries, gallery, who in ((known, old, "gallery"), (old, known, "queries")):
        with pytest.raises(ValueError, match=f"2 ids are in both files, such as 'a.jpg'.* but the {who} do not say"):
            evaluate(queries, gallery)
    others = dataclasses.replace(old, ids=("c.jpg", "d.jpg"))
    assert evaluate(known, others).metrics["R@1"] == 1.0
    assert evaluate(old, old).metrics["queries_without_positives"] == 2


def test_bytes_and_text_are_the_same_id(tmp_path: Path) -> None:
    vectors, labels = birds(["gull", "wren"], 0).vectors.numpy(), np.array(["gull", "wren"])
    np.savez(tmp_path / "u.npz", vectors=vectors, labels=labels, ids=np.array(IDS))
    np.savez(tmp_path / "s.npz", vectors=vectors, labels=labels, ids=np.array(IDS, dtype="S"))
    text, raw = (Embeddings.load(tmp_path / f"{kind}.npz") for kind in "us")
    for queries, gallery in ((text, raw), (raw, text)):
        assert evaluate(queries, gallery).metrics["queries_without_positives"] == 2


# ---------------------------------------------------------------- which pictures


def test_a_split_searches_itself() -> None:
    whole = records(["train"] * 4 + ["val"] * 4 + ["test"] * 4, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5])
    for split, first, last in (("train", 0, 4), ("val", 4, 8), ("test", 8, 12), ("all", 0, 12), (None, 8, 12)):
        queries, gallery = records_to_search(whole, split).evaluation()
        assert queries.paths == whole.paths[first:last]
        assert gallery is None
    with pytest.raises(SettingError, match="mine has no split 'query'; choose split=NAME from: train, val, test, all"):
        records_to_search(whole, "query")
    asked = records_to_search(revisited(), "query")  # by their landmarks: easy, hard and junk are of the gallery
    assert (asked.ground_truth, asked.split_names()) == ((), ("test",))
    shop = records(["query", "gallery", "gallery"], [0, 0, 1])
    assert [len(part) for part in records_to_search(shop).evaluation() if part is not None] == [1, 2]
    assert len(records_to_search(shop, "all").evaluation()[0]) == 3


def test_what_a_person_should_hear_is_noted() -> None:
    bare = records_to_search(records(None, [0, 0, 1]))
    assert bare.notes[0].startswith("mine has no test set: all 3 pictures search one another")
    alone = records_to_search(records(["test"] * 3, [0, 0, 0]))
    assert alone.notes == ("all pictures are of one class: every answer is right, which says nothing of the model",)
    found = measured(records(None, [0, 0, 1]))
    assert found.facts["data"]["notes"] == [bare.notes[0]]


def test_the_facts_say_what_was_measured() -> None:
    found = measured(records(["test"] * 4, [0, 0, 1, 1]), Fixed(lost=("2.png",)), ks=(1,))
    assert found.title == "fixed on mine: 3 x 3 among themselves"
    assert found.facts["data"] == {
        "name": "mine",
        "root": "/none",
        "read": "files, decoded",
        "queries": 3,
        "gallery": None,
        "classes": 2,
        "skipped": {"2.png": "lost"},
        "notes": [],
    }
    assert found.facts["settings"]["ks"] == [1]
    assert found.facts["model"]["digest"] == "0"


def test_what_cannot_be_searched_in_what_is_said() -> None:
    two = Embeddings(torch.eye(2), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match="embeddings are searched in embeddings; to search in Records, give an Encoder"):
        evaluate(two, records(["test"], [0]))
    with pytest.raises(TypeError, match="an Encoder is evaluated on Records"):
        measured(two)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="give gallery=...: the queries of the revisited protocol are not"):
        evaluate(two, truth=GroundTruth((), (), ()))
