"""A run that begins where another ended, on larger pictures too: a run like any other from there on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from roadmap.config.settings import Settings
from roadmap.encoder import Encoder
from roadmap.engine import fit, plan, resume
from roadmap.engine.auto import cautions, resolve
from roadmap.engine.splits import records_of
from roadmap.evaluation import evaluate
from roadmap.models import WeightsError, load_checkpoint
from roadmap.names import CHECKPOINT

from .test_resume import stopped
from .worlds import assert_equal, assert_same_run, best_weights, lines, summary, tiny

VIT: dict[str, Any] = {"model__name": "test_vit.r160_in1k", "model__pooling": "token", "model__dim": 4}
LARGER: dict[str, Any] = {"data__image": 32, "data__resize": 36, "data__side": 36, "epochs": 2, "optim__lr": 1e-3}


@pytest.fixture(scope="module")
def first(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tiny(pictures, tmp_path_factory.mktemp("first") / "run", **VIT, epochs=2, optim__ema=0.5), quiet=True)


def second(pictures: Path, run: Path, first: Path, **changed: Any) -> Settings:
    return tiny(pictures, run, **{**VIT, "model__weights": str(first), "epochs": 1, **changed})


def test_it_begins_with_what_the_first_ended_with(first: Path, pictures: Path, tmp_path: Path) -> None:
    """Measured before it trains as the first was in the end, to the bit: the averaged weights, head included."""
    folder = fit(second(pictures, tmp_path / "second", first), quiet=True)
    assert summary(folder)["before"] == summary(first)["after"]
    before = [line["metrics"] for line in lines(folder) if line["kind"] == "before"]
    assert before == [summary(first)["after"]]


def test_larger_pictures_are_trained_evaluated_and_deployed(first: Path, pictures: Path, tmp_path: Path) -> None:
    folder = fit(second(pictures, tmp_path / "second", first, **LARGER), quiet=True)
    model, about = load_checkpoint(folder / CHECKPOINT)
    assert (model.image, about["resize"], about["side"]) == (32, 36, 36)
    assert best_weights(first)["backbone.pos_embed"].shape[1] == 1 + 1
    assert model.state_dict()["backbone.pos_embed"].shape[1] == 1 + 4
    encoder = Encoder.open(folder)
    assert (encoder.crop.size, encoder.crop.resize, encoder.side) == (32, 36, 36)
    again = evaluate(encoder).metrics
    assert_equal(again, summary(folder)["after"]["pictures"])
    held = [(run / "pictures.csv").read_text() for run in (first, folder)]
    assert held[0] == held[1]  # the same classes are held out
    assert ",val" in held[0]


@pytest.mark.parametrize("step", [1, 2, 4])
def test_it_is_resumed_to_the_bit(step: int, first: Path, pictures: Path, tmp_path: Path) -> None:
    """Killed before its first step, before anything was saved, and in its last epoch."""
    whole = fit(second(pictures, tmp_path / "whole", first, **LARGER), quiet=True)
    folder = stopped(second(pictures, tmp_path / "twice", first, **LARGER), step)
    resume(folder, quiet=True)
    assert_same_run(whole, folder)


def test_a_saved_state_needs_the_first_run_no_more(first: Path, pictures: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("config.yaml", "summary.json", "environment.json"):
        (moved / name).write_bytes((first / name).read_bytes())
    (moved / CHECKPOINT).parent.mkdir()
    (moved / CHECKPOINT).write_bytes((first / CHECKPOINT).read_bytes())
    folder = stopped(second(pictures, tmp_path / "run", moved, **LARGER), 4)
    (moved / CHECKPOINT).unlink()
    assert resume(folder, quiet=True) == folder
    assert summary(folder)["steps"] == 4


def test_what_the_first_has_seen_is_said(first: Path, pictures: Path, tmp_path: Path) -> None:
    asked = second(pictures, tmp_path / "run", first)
    assert cautions(asked) == []
    other = dataclasses.replace(asked, select=dataclasses.replace(asked.select, fraction=0.4))
    (said,) = cautions(other)
    assert said.startswith(f"WARNING: {first} was trained with select.by=held_out select.fraction=0.25: it may have")
    assert said in plan(other).reasons
    assert cautions(dataclasses.replace(other, select=dataclasses.replace(other.select, by="last"))) == []
    elsewhere = dataclasses.replace(other, data=dataclasses.replace(other.data, root=str(tmp_path)))
    assert cautions(elsewhere) == []
    unfinished = stopped(tiny(pictures, tmp_path / "unfinished", **VIT), 6)
    (said,) = cautions(second(pictures, tmp_path / "run", unfinished))
    assert said == f"WARNING: {unfinished} has not ended; this run begins with the best weights that it has so far"


def test_the_model_follows_the_run_where_it_is_left_open(first: Path, pictures: Path, tmp_path: Path) -> None:
    open_ = {"model__name": "auto", "model__layer_norm": "auto", "data__image": "auto", "data__resize": "auto"}
    asked = second(pictures, tmp_path / "run", first, **open_, data__side="auto", optim__lr="auto")
    found, reasons = resolve(asked, records_of(asked.data))
    assert (found.model.name, found.model.layer_norm, found.data.image) == (VIT["model__name"], False, 16)
    assert found.optim.lr == 1e-5  # a transformer, to fine-tune
    assert any(reason.endswith(f"as {first} left it") for reason in reasons)


def test_another_model_is_refused_before_there_is_a_folder(first: Path, pictures: Path, tmp_path: Path) -> None:
    asked = second(pictures, tmp_path / "run", first, model__dim=8)
    for call in (plan, fit):
        with pytest.raises(WeightsError, match=r"whose model\.dim is 4 and not 8"):
            call(asked)
    assert not (tmp_path / "run").exists()
