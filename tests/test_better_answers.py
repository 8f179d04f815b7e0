"""Evaluation with refinements: what is measured is what they find, against loops over whole rankings."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from roadmap.cli.app import app
from roadmap.config.settings import SettingError
from roadmap.embeddings import Embeddings
from roadmap.evaluation import evaluate
from roadmap.evaluation.reranking import Reranking
from roadmap.metrics import GroundTruth
from roadmap.refinement import Refinement, Whitening, augmented_gallery, expanded_queries, reranked


def made(count: int, seed: int = 0) -> Embeddings:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 6
    centres = torch.randn(6, 8, generator=torch.Generator().manual_seed(9))
    vectors = centres[labels] + torch.randn(count, 8, generator=generator)
    return Embeddings(vectors, labels, tuple(f"{seed} {i}" for i in range(count)))


def literal(order: list[int], right: list[bool]) -> dict[str, float]:
    """R@1, mAP@R and AP of one query, from the places that were found in order."""
    hits = [right[i] for i in order]
    relevant = sum(right)
    precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(relevant) if hits[i]]
    every = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits)) if hits[i]]
    return {"R@1": float(hits[0]), "mAP@R": math.fsum(precisions) / relevant, "mAP": math.fsum(every) / relevant}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("rerank", [0, 2, 25, 100])
def test_what_is_measured_is_what_is_found(alone: bool, rerank: int) -> None:
    queries, gallery = made(40), made(40) if alone else made(30, 1)
    refinement = Refinement(augment=2, expand=3, rerank=rerank)
    found = evaluate(queries, None if alone else gallery, refinement=refinement)
    held = augmented_gallery(gallery.vectors, 2)
    own = torch.arange(40) if alone else torch.full((40,), -1)
    asked = expanded_queries(queries.vectors, held, 3, 3.0, own if alone else None)
    for q in range(40):
        others = [i for i in range(len(held)) if not (alone and i == q)]
        order = sorted(others, key=lambda i: -float(asked[q] @ held[i]))
        if rerank:
            count = min(rerank, len(others))
            first = reranked(asked[q : q + 1], held[others], count)[1][0].tolist()
            first = [others[i] for i in first]
            order = first + [i for i in order if i not in first]
        right = [bool(gallery.labels[i] == queries.labels[q]) and i in others for i in range(len(held))]
        for name, value in literal(order, right).items():
            assert float(found.per_query[name][q]) == pytest.approx(value, abs=1e-9)
        assert found.neighbours[q].tolist() == order[: min(10, rerank or 10)]
    assert "queries expanded by their 3 nearest" in found.facts["notes"][-1]
    plain = evaluate(queries, None if alone else gallery)
    assert found.metrics.keys() == plain.metrics.keys()
    assert found.metrics["queries"] == 40


def test_a_query_that_has_another_label_in_the_gallery_is_no_wrong_answer_to_itself() -> None:
    """Re-ranked or not, it is left out by its id: as if it were not in the gallery at all."""
    queries = made(24)
    gallery = dataclasses.replace(queries, labels=torch.where(torch.arange(24) == 5, 77, queries.labels))
    others = gallery.select(torch.tensor([i for i in range(24) if i != 5]))
    for refinement in (Refinement(), Refinement(rerank=2)):
        found, without = (evaluate(queries, of, refinement=refinement).per_query for of in (gallery, others))
        for name in ("R@1", "mAP@R", "mAP"):
            assert float(found[name][5]) == pytest.approx(float(without[name][5]), abs=1e-9)


def test_nothing_asked_for_changes_nothing() -> None:
    assert evaluate(made(30), refinement=Refinement()).metrics == evaluate(made(30)).metrics


def test_a_query_without_a_class_does_not_count() -> None:
    some = Embeddings(torch.randn(6, 4), torch.tensor([0, 0, 1, 2, 2, 2]), tuple("abcdef"))
    found = evaluate(some, refinement=Refinement(rerank=3))
    assert found.metrics["queries_without_positives"] == 1
    assert math.isnan(float(found.per_query["R@1"][2]))
    none = Embeddings(torch.randn(3, 4), torch.tensor([0, 1, 2]), tuple("abc"))
    assert math.isnan(evaluate(none, refinement=Refinement(rerank=2)).metrics["mAP@R"])


def test_landmarks_are_not_reranked() -> None:
    nothing = torch.zeros(0, dtype=torch.int64).numpy()
    truth = GroundTruth((torch.zeros(1, dtype=torch.int64).numpy(),) * 2, (nothing,) * 2, (nothing,) * 2)
    with pytest.raises(SettingError, match="rerank=N is not for landmarks"):
        evaluate(made(2), made(30, 1), truth=truth, refinement=Refinement(rerank=5))


def test_the_command(tmp_path: Path) -> None:
    made(40).save(tmp_path / "v.npz")
    Whitening.fit(made(40).vectors).save(tmp_path / "w.npz")
    more = ["--whiten", str(tmp_path / "w.npz"), "--expand", "3", "--augment", "2", "--rerank", "9"]
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path / "v.npz"), *more, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    right = evaluate(made(40), refinement=Refinement(Whitening.load(tmp_path / "w.npz"), 2, 3, 9))
    assert f"{100 * right.metrics['mAP@R']:.2f} %" in result.output
    assert "vectors whitened to 8 dimensions" in result.output
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path / "v.npz"), "--whiten", "absent"])
    assert "error: --whiten must be own, own:DIM or a file, got 'absent'" in result.stderr


def test_what_is_reranked_stays_before_what_is_not() -> None:
    """Nearly equal vectors: the cosine of any that is left over is higher than the score of a re-ranked one."""
    vectors = 1 + 0.1 * torch.randn(60, 8, generator=torch.Generator().manual_seed(3))
    ranking = Reranking(vectors, vectors, torch.arange(60), 25)
    every = ranking._every(slice(0, 60))
    every[torch.arange(60), torch.arange(60)] = -torch.inf
    assert torch.equal(every.topk(25, dim=1).indices.sort(dim=1).values, ranking.places.sort(dim=1).values)
    assert torch.equal(
        every.gather(1, ranking.places).sort(dim=1, descending=True).indices[:, 0], torch.zeros(60).long()
    )
