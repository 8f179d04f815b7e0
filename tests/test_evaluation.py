"""The protocol of each dataset, beside direct calls of the metrics and rankings written out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from roadmap.data import Records
from roadmap.embeddings import Embeddings
from roadmap.evaluation import dataset_evaluation, merits, recall_ks
from roadmap.metrics import GroundTruth, retrieval_metrics, revisited_metrics

Embed = Callable[[Records], Embeddings]


def records(splits: list[str], labels: list[int], name: str = "mine", **more: object) -> Records:
    paths = tuple(f"{i}.png" for i in range(len(splits)))
    return Records(name, Path("/none"), paths, np.asarray(labels), splits=np.asarray(splits), **more)  # type: ignore[arg-type]


def embedding(dim: int = 3, ids: bool = True) -> tuple[Embed, list[Records]]:
    """Fixed vectors by path, and what was asked for."""
    asked: list[Records] = []

    def embed(part: Records) -> Embeddings:
        asked.append(part)
        vectors = torch.stack(
            [torch.randn(dim, generator=torch.Generator().manual_seed(int(p[:-4]))) for p in part.paths]
        )
        return Embeddings(vectors, torch.from_numpy(part.labels), tuple(part.paths) if ids else None)

    return embed, asked


def test_the_ks_of_the_literature() -> None:
    assert recall_ks("cub") == recall_ks("cars") == recall_ks("anything") == (1, 2, 4, 8)
    assert recall_ks("sop") == (1, 10, 100, 1000)
    assert recall_ks("inaturalist") == (1, 4, 16, 32)
    assert recall_ks("inshop") == (1, 10, 20, 30)


def test_test_pictures_among_themselves() -> None:
    whole = records(["train"] * 3 + ["test"] * 12, [9, 9, 9, *([0] * 4 + [1] * 4 + [2] * 4)])
    embed, asked = embedding()
    found = dataset_evaluation(whole, embed)
    (test,) = asked
    assert test.paths == tuple(f"{i}.png" for i in range(3, 15))
    vectors = embed(test).vectors
    assert found == retrieval_metrics(vectors, torch.from_numpy(test.labels), ks=(1, 2, 4, 8))
    scores = torch.nn.functional.normalize(vectors.double(), dim=1)
    scores = (scores @ scores.T).fill_diagonal_(-2)
    nearest = test.labels[scores.argmax(1).numpy()]
    assert found["R@1"] == pytest.approx((nearest == test.labels).mean())
    assert found["queries"] == 12


def test_the_dataset_decides_k_unless_told() -> None:
    embed, _ = embedding()
    splits, labels = ["test"] * 8, [0, 0, 1, 1, 2, 2, 3, 3]
    assert "R@16" in dataset_evaluation(records(splits, labels, "inaturalist"), embed)
    found = dataset_evaluation(records(splits, labels, "inaturalist"), embed, ks=(3,))
    assert [name for name in found if name.startswith("R@")] == ["R@3"]


def test_queries_against_a_gallery() -> None:
    whole = records(["query"] * 4 + ["train"] * 2 + ["gallery"] * 6, [0, 0, 1, 1, 5, 5, 0, 0, 0, 1, 1, 1], "inshop")
    embed, asked = embedding()
    found = dataset_evaluation(whole, embed)
    queries, gallery = asked
    assert (len(queries), len(gallery)) == (4, 6)
    q, g = embed(queries), embed(gallery)
    assert found == retrieval_metrics(q.vectors, q.labels, g.vectors, g.labels, ks=(1, 10, 20, 30))
    a, b = (torch.nn.functional.normalize(e.vectors.double(), dim=1) for e in (q, g))
    hits = g.labels[(a @ b.T).argmax(1)] == q.labels
    assert found["R@1"] == pytest.approx(hits.double().mean().item())


def test_a_query_that_lies_in_the_gallery_does_not_find_itself() -> None:
    whole = records(["query", "query", "gallery", "gallery"], [0, 1, 0, 1])

    def embed(part: Records) -> Embeddings:  # both sides name and show the same two pictures
        return Embeddings(torch.eye(2), torch.tensor([0, 1]), ("same.png", "other.png"))

    found = dataset_evaluation(whole, embed)
    assert found["queries_without_positives"] == 2


TRUTH = (
    {"easy": [0, 1], "hard": [2], "junk": [5]},
    {"easy": [3], "hard": [], "junk": [0, 1]},
    {"easy": [], "hard": [4, 5], "junk": []},
)


def revisited(**more: object) -> Records:
    truth = tuple({kind: np.asarray(where, dtype=np.int64) for kind, where in query.items()} for query in TRUTH)
    return records(["query"] * 3 + ["gallery"] * 8, [0, 1, 2, *([-1] * 8)], "roxford5k", ground_truth=truth, **more)


def test_revisited_landmarks() -> None:
    embed, _ = embedding()
    found = dataset_evaluation(revisited(), embed)
    q, g = embed(revisited().split("query")), embed(revisited().split("gallery"))
    a, b = (torch.nn.functional.normalize(e.vectors.double(), dim=1) for e in (q, g))
    order = (a @ b.T).argsort(dim=1, descending=True)
    lists = [tuple(np.asarray(query[kind], dtype=np.int64) for query in TRUTH) for kind in ("easy", "hard", "junk")]
    wanted = revisited_metrics(order, GroundTruth(*lists))
    assert set(found) == {f"{setting} {name}" for setting, values in wanted.items() for name in values}
    for setting, values in wanted.items():
        for name, value in values.items():
            assert found[f"{setting} {name}"] == pytest.approx(value), (setting, name)
    assert found["hard queries_without_positives"] == 1


def test_revisited_landmarks_need_every_picture() -> None:
    embed, _ = embedding()

    def incomplete(part: Records) -> Embeddings:
        whole = embed(part)
        rows = torch.arange(len(whole))[1:] if part.splits is not None and part.splits[0] == "gallery" else slice(None)
        return Embeddings(whole.vectors[rows], whole.labels[rows])

    with pytest.raises(
        ValueError, match="roxford5k: the revisited protocol needs every picture, but some could not be"
    ):
        dataset_evaluation(revisited(), incomplete)


def test_nothing_to_test() -> None:
    embed, _ = embedding()
    with pytest.raises(ValueError, match=r"mine has no split \['test'\]; it has \['train'\]"):
        dataset_evaluation(records(["train"] * 2, [0, 0]), embed)


@pytest.mark.parametrize("kind", ["test", "gallery", "revisited"])
def test_merits_are_what_is_measured_and_better_when_more(kind: str) -> None:
    whole = {
        "test": records(["test"] * 4, [0, 0, 1, 1], "sop"),
        "gallery": records(["query"] * 2 + ["gallery"] * 2, [0, 1, 0, 1], "inshop"),
        "revisited": revisited(),
    }[kind]
    embed, asked = embedding(ids=False)
    names = merits(whole)
    assert asked == []
    found = dataset_evaluation(whole, embed)
    assert [name for name in found if name in names] == list(names)
    left = {name.rsplit(" ", 1)[-1] for name in found if name not in names}
    assert left == {"queries", "queries_without_positives"} | ({"loss"} if kind != "revisited" else set())
    if kind != "revisited":
        assert "R@7" in merits(whole, ks=(7,))
