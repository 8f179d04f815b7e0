"""The toy demonstration: its set is as hard as it says, its numbers are the losses' own, its words follow them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

pytest.importorskip("matplotlib")

from roadmap.losses import ROADMAP, SmoothAP, SupAP
from roadmap.metrics import retrieval_metrics
from roadmap.toy import courses as toy
from roadmap.toy.__main__ import findings, main, table


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors this small only lose by being shared out; the command does the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def courses() -> dict[str, toy.Course]:
    return {name: toy.course(name, [0], 12, 0.5, lambda: None) for name in toy.LOSSES}


def test_strangers_lie_with_another_class() -> None:
    embeddings, labels = toy.toy_set(seed=0)
    assert embeddings.shape == (256, 8)
    assert torch.allclose(embeddings.norm(dim=1), torch.ones(256))
    centres = torch.stack([embeddings[labels == c][: toy.ITEMS - toy.STRANGERS].mean(0) for c in labels.unique()])
    own = cosine_similarity(embeddings, centres[labels])
    other = cosine_similarity(embeddings, centres.roll(-1, dims=0)[labels])
    strangers = torch.arange(256) % toy.ITEMS >= toy.ITEMS - toy.STRANGERS
    # Most strangers are outranked by far more than tau = 0.01, which is what makes the set hard.
    assert (other - own)[strangers].median() > 0.1
    assert (own - other)[~strangers].median() > 0.1


def test_an_epoch_shows_every_class_once() -> None:
    _, labels = toy.toy_set(seed=0)
    batches = toy.epoch_of_batches(torch.Generator().manual_seed(0))
    assert batches.shape == (8, 16)
    assert batches.unique().numel() == 128
    assert sorted(labels[batches].flatten().unique().tolist()) == list(range(32))
    assert all(labels[b].unique(return_counts=True)[1].tolist() == [4] * 4 for b in batches)


def test_ap_in_batches_is_the_mean_of_the_batches() -> None:
    embeddings, labels = toy.toy_set(seed=1)
    batches = toy.epoch_of_batches(torch.Generator().manual_seed(1))
    one_by_one = [toy.ap_of(embeddings[b], labels[b]) for b in batches]
    assert toy.ap_of(embeddings, labels, batches) == pytest.approx(sum(one_by_one) / len(one_by_one))
    assert toy.ap_of(normalize(torch.eye(32)[labels]), labels) == 1


def test_ap_of_the_set_leaves_the_query_out_of_its_own_ranking() -> None:
    embeddings, labels = toy.toy_set(seed=1)
    assert toy.ap_of(embeddings, labels) == pytest.approx(retrieval_metrics(embeddings, labels)["mAP"], abs=1e-5)


@pytest.mark.parametrize("name", toy.LOSSES)
def test_the_function_whose_gradient_is_shown_is_the_module_that_trains(name: str) -> None:
    embeddings, labels = toy.toy_set(seed=2)
    batch = toy.epoch_of_batches(torch.Generator().manual_seed(2))[0]
    module, on_scores = toy.LOSSES[name]
    c = toy.Comparison.of(embeddings[batch], labels[batch])
    expected = module()(embeddings[batch], labels[batch])
    assert on_scores(c.scores, c.positives(include_self=True), c.negatives).item() == pytest.approx(expected.item())


def test_what_the_paper_claims_is_seen(courses: dict[str, toy.Course]) -> None:
    starts = {(round(float(c.ap[0, 0]), 6), round(float(c.batch_ap[0, 0]), 6)) for c in courses.values()}
    assert len(starts) == 1  # the same start for all
    smooth, sup, both = courses["SmoothAP"], courses["SupAP"], courses["ROADMAP"]
    assert smooth.pushes.none > 0.1
    assert smooth.pushes.down > 0
    assert sup.pushes.none < 0.05
    assert sup.pushes.down == 0
    assert smooth.ap[0, -1] < sup.ap[0, -1] < both.ap[0, -1]
    assert smooth.gap[0, -1] > sup.gap[0, -1] > both.gap[0, -1] > 0
    for c in courses.values():
        assert c.pushes.up + c.pushes.none + c.pushes.down == pytest.approx(1)
        assert c.loss[0, -1] < c.loss[0, 0]


def test_a_seed_gives_the_same_numbers(courses: dict[str, toy.Course]) -> None:
    again = toy.course("ROADMAP", [0], 12, 0.5, lambda: None)
    assert torch.equal(again.ap, courses["ROADMAP"].ap)
    assert torch.equal(again.loss, courses["ROADMAP"].loss)
    assert not torch.equal(toy.course("ROADMAP", [5], 1, 0.5, lambda: None).ap[:, :1], again.ap[:, :1])


def test_the_words_follow_the_numbers(courses: dict[str, toy.Course]) -> None:
    assert "the gap falls to" in findings(courses)[1]
    wide = replace(courses["ROADMAP"], batch_ap=courses["ROADMAP"].batch_ap + 1)
    assert "the gap does not fall" in findings(courses | {"ROADMAP": wide})[1]
    assert f"{float(courses['SmoothAP'].ap[0, -1]):.3f}" in findings(courses)[0]
    rows = table(courses).splitlines()
    assert [row.split()[0] for row in rows[2:-1]] == list(toy.LOSSES)
    assert f"{float(courses['SupAP'].ap[0, -1]):.3f}" in rows[2 + list(toy.LOSSES).index("SupAP")]


def test_the_command_draws_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "new"), "--epochs", "1", "--seeds", "1"]) == 0
    picture = tmp_path / "new" / "toy.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    out, err = capsys.readouterr()
    assert str(picture) in out
    assert err == ""  # the progress line is for terminals
    for name in toy.LOSSES:
        assert re.search(rf"^{name}\s+0\.\d{{3}}", out, re.MULTILINE)


def test_adam_is_another_course(courses: dict[str, toy.Course]) -> None:
    adam = toy.course("ROADMAP", [0], 3, 0.01, lambda: None, "adam")
    assert torch.equal(adam.ap[:, :1], courses["ROADMAP"].ap[:, :1])
    assert adam.ap[0, -1] > adam.ap[0, 0]
    assert not torch.equal(adam.ap, toy.course("ROADMAP", [0], 3, 0.01, lambda: None).ap)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs and --seeds must be at least 1, got 0 and 3"),
        (["--learning-rate", "-1"], "--learning-rate must be > 0, got -1.0"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_modules_have_the_defaults_of_the_paper() -> None:
    assert (SmoothAP().tau, SupAP().rho, ROADMAP().lam) == (0.01, 100.0, 0.5)
