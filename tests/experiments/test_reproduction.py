"""A table, run for real on a few pictures: what it costs, what cannot be run, going on, and the verdicts."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from roadmap.cli.app import app
from roadmap.engine import fit
from roadmap.evaluation import Evaluation
from roadmap.experiments.definitions import NOT_HERE, Experiment, Row, experiment
from roadmap.experiments.gap import save_gap
from roadmap.experiments.published import Number, numbers
from roadmap.experiments.reproduction import Means, note, prospect_lines, prospects, reasons, run_rows
from roadmap.experiments.results import CHOSEN, LAST, Measurement, Outcome, all_outcomes, outcome_of, save_outcomes
from roadmap.experiments.statistics import estimate
from roadmap.experiments.verdicts import ALLOWANCE, relative, sheet_of, side_by_side, tolerance, verdict
from roadmap.models import load_checkpoint, retriever, save_checkpoint
from roadmap.runs import Run

from ..engine.worlds import tiny, write_classes

SMALL = ("data.batch_size=8", "data.per_class=2", "data.image=16", "hardware=cpu", "data.workers=1", "select.every=1")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    write_classes(root / "train", range(6), each=4)
    write_classes(root / "test", range(6, 10), each=4)
    return root


@pytest.fixture(scope="module")
def place(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `roadmap reproduce smallest` left its runs and results."""
    home = tmp_path_factory.mktemp("reproduced")
    settings = [f"--set={text}" for text in ("data=folder", f"data.root={pictures}", *SMALL)]
    folders = ["--out", str(home / "runs"), "--results", str(home / "results"), "--export", str(home / "tables")]
    result = CliRunner().invoke(app, ["reproduce", "smallest", "--seeds", "1", *settings, *folders])
    assert result.exit_code == 0, result.output
    (home / "output.txt").write_text(result.output)
    return home


def means(place: Path, pictures: Path) -> Means:
    return Means({}, ("data=folder", f"data.root={pictures}", *SMALL), place / "runs", place / "results")


def test_the_smallest_table_is_run(place: Path) -> None:
    said = (place / "output.txt").read_text()
    assert "can be run   3 of 3 rows, 3 runs left, about 1 s" in said
    assert "loss=roadmap,epochs=1,data.batches=2, seed 0  ->" in said
    outcomes = all_outcomes(place / "results")
    assert sorted((one.settings["loss.name"], one.seed) for one in outcomes) == [
        (loss, 0) for loss in ("roadmap", "smoothap", "supap")
    ]
    for one in outcomes:
        (test,) = one.tests
        assert set(one.tests[test]) == {CHOSEN, LAST}
        again = outcome_of(place / "runs" / one.name)
        assert again.tests[test][LAST].metrics == one.tests[test][LAST].metrics
        assert list(again.tests[test][CHOSEN].per_query["R@1"]) == list(one.tests[test][CHOSEN].per_query["R@1"])
    assert {path.suffix for path in (place / "tables").iterdir()} == {".md", ".tex", ".csv", ".html"}
    assert "with " + " ".join(means(place, place).told) in " ".join(said.split())
    assert json.loads((place / "results" / "not_run.json").read_text()) == {}


def test_the_same_call_goes_on_where_it_was_stopped(place: Path, pictures: Path) -> None:
    """A finished run is not run again; one that was stopped is gone on with; a missing one is begun."""
    at_hand, table = means(place, pictures), experiment("smallest")
    assert [prospect.left for prospect in prospects(table, 1, at_hand)] == [(), (), ()]
    stopped, begun = at_hand.folder(table.rows[0], 0), at_hand.folder(table.rows[0], 1)
    (stopped / "summary.json").unlink()
    untouched = (at_hand.folder(table.rows[1], 0) / "summary.json").stat().st_mtime_ns
    found = prospects(table, 2, at_hand)
    assert [prospect.left for prospect in found] == [(0, 1), (1,), (1,)]
    said: list[str] = []
    run_rows(found[:1], at_hand, said.append)
    assert [line.partition("  ->")[0][-6:] for line in said] == ["seed 0", "seed 1"]
    assert (stopped / "summary.json").is_file()
    assert (begun / "summary.json").is_file()
    assert (at_hand.folder(table.rows[1], 0) / "summary.json").stat().st_mtime_ns == untouched


def test_what_the_results_hold_can_be_left_out(place: Path, pictures: Path, tmp_path: Path) -> None:
    table = experiment("smallest", only=["roadmap"])
    elsewhere = dataclasses.replace(means(place, pictures), out=tmp_path)  # as on a machine that trained nothing
    assert [prospect.left for prospect in prospects(table, 1, elsewhere)] == [(0,)]
    missing = dataclasses.replace(elsewhere, missing=True)
    (prospect,) = prospects(table, 99, missing)
    held = {one.seed for one in all_outcomes(place / "results") if one.settings["loss.name"] == "roadmap"}
    assert set(prospect.left) == set(range(99)) - held
    said: list[str] = []
    run_rows(prospects(table, 1, missing), missing, said.append)
    assert not said
    assert not list(tmp_path.iterdir())
    # its gap is not among them: that needs the run
    other = dataclasses.replace(missing, results=tmp_path / "without")
    save_outcomes(other.results, "glyphs", [outcome_of(means(place, pictures).folder(table.rows[0], 0))])
    assert [one.left for one in prospects(table, 1, other)] == [()]
    with_gaps = dataclasses.replace(table, derived="gap")
    assert [one.left for one in prospects(with_gaps, 1, other)] == [(0,)]


def test_the_gap_of_runs_is_measured_and_kept(place: Path, pictures: Path) -> None:
    at_hand, table = means(place, pictures), experiment("smallest")
    supap, roadmap = table.rows[1:]
    number = Number("10", "roadmap", "cub", "resnet50", None, "decrease of DG_AP in %", "3.7", "", "x")
    pair = Experiment("table10", "t", (supap, dataclasses.replace(roadmap, numbers=(number,))), "gap")
    run_rows(prospects(pair, 1, at_hand), at_hand, print, gap=True)
    outcomes = all_outcomes(at_hand.results)
    kept = {one.settings["loss.name"]: one.about["gap"] for one in outcomes if "gap" in one.about}
    assert kept["supap"]["batches"] == {"size": 8, "sampler": "m_per_class", "per_class": 2, "draws": 5, "seed": 0}
    (line,) = side_by_side(pair, outcomes, {})
    a, b = kept["supap"]["DG_AP"], kept["roadmap"]["DG_AP"]
    assert line.chosen is not None
    assert line.chosen.mean == pytest.approx(100 * (a - b) / a)
    # a run of one epoch, which is the chosen and the last
    assert line.last is not None
    assert line.last.mean == line.chosen.mean


@pytest.mark.parametrize("ema", [None, 0.5])
def test_the_gap_of_the_last_epoch_is_that_of_its_weights(ema: float | None, pictures: Path, tmp_path: Path) -> None:
    folder = fit(tiny(pictures, tmp_path / "run", select__by="test", optim__ema=ema), quiet=True)
    best = Run.open(folder).best
    model, about = load_checkpoint(best)
    untrained = retriever(model.settings, model.image)  # as if the best epoch had been before the first
    save_checkpoint(best, untrained, about)
    save_gap(folder)
    found = outcome_of(folder).about
    assert found["DG_AP"][CHOSEN] != found["DG_AP"][LAST]
    assert found["DG_AP"][LAST] == found["gap"]["last epoch"]["DG_AP"]
    (kept,) = (folder / "evaluations" / "last_epoch").iterdir()
    measured = Evaluation.load(kept)
    assert found["gap"]["last epoch"]["mean_ap"] == pytest.approx(measured.metrics["mAP"], abs=1e-6)


def test_what_is_not_at_hand_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROADMAP_DATA", raising=False)
    at_hand = Means(out=tmp_path / "runs", results=tmp_path / "results")
    table = experiment("table4", "cub", "resnet50")
    found = prospects(table, 1, at_hand)
    lines = prospect_lines(found)
    assert lines[0].startswith("can be run   0 of 18 rows")
    assert any("the pictures of cub are not at hand: --root cub=FOLDER" in line for line in lines)
    mic = [prospect for prospect in found if prospect.row.name == "MIC"]
    absent = [dataclasses.replace(mic[0], why_not=NOT_HERE)]
    assert any("MIC on cub" in line and "not part of the project" in line for line in prospect_lines(absent))
    run_rows(found, at_hand, print)
    told = reasons(at_hand.results)
    assert told["cub_resnet50_table4,loss=roadmap"].startswith("the pictures of cub are not at hand")
    lines_of_table = side_by_side(table, [], told)
    assert {line.verdict for line in lines_of_table} == {"not run"}
    assert len(lines_of_table) == sum(len(row.numbers) for row in table.rows)
    assert "the pictures of cub are not at hand" in sheet_of(table, lines_of_table).markdown()
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_leaves_nothing_behind(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROADMAP_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    settings = [f"--set={text}" for text in ("data=folder", f"data.root={pictures}", *SMALL)]
    for given in (["smallest", "--seeds", "1", *settings], ["table4", "--dataset", "cub"]):
        result = CliRunner().invoke(app, ["reproduce", *given, "--dry-run"])
        assert result.exit_code == 0, result.output
        assert "can be run   " in result.output
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_at_hand_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = experiment("table5", "cub", "resnet50", ["roadmap"])
    absent = tmp_path / "none.safetensors"
    at_hand = Means({"cub": tmp_path}, (f"model.weights={absent}",), tmp_path / "runs", tmp_path / "results")
    (prospect,) = prospects(table, 1, at_hand)
    assert prospect.why_not == f"the weights {absent} are not at hand: --set model.weights=FILE"
    note([prospect], at_hand)
    assert reasons(at_hand.results)[table.rows[0].key] == "the weights none.safetensors are not at hand"
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from_hub = dataclasses.replace(at_hand, settings=(), known={})
    (prospect,) = prospects(table, 1, from_hub)
    assert prospect.why_not.startswith("the weights of resnet50.tv_in1k could not be fetched (HF_HUB_OFFLINE is set")
    note([prospect], from_hub)
    assert reasons(at_hand.results)[table.rows[0].key] == "the weights of resnet50.tv_in1k could not be fetched"


def test_a_row_that_is_not_understood_leaves_the_others(place: Path, pictures: Path) -> None:
    at_hand, table = means(place, pictures), experiment("smallest")
    wrong = dataclasses.replace(table.rows[0], name="wrong", overrides=(*table.rows[0].overrides, "loss.tua=1"))
    found = prospects(dataclasses.replace(table, rows=(wrong, *table.rows)), 3, at_hand)
    assert [prospect.why_not[:28] for prospect in found] == ["unknown setting loss.tua of ", "", "", ""]
    assert [prospect.seconds > 0 for prospect in found[1:]] == [True, True, True]


def outcome(row: Row, seed: int, chosen: float, last: float, *extra: str) -> Outcome:
    tests = {
        "cub": {
            CHOSEN: Measurement(5, {"R@1": 0.5, "mAP@R": chosen}),
            LAST: Measurement(9, {"R@1": 0.4, "mAP@R": last}),
        }
    }
    about = {"key": row.key, "with": list(extra), "training seconds": 1200.0, "epochs": 10}
    return Outcome(f"{row.key}{seed}{extra}", {"seed": seed}, "test", "cub", tests, about)


def test_published_and_measured_side_by_side() -> None:
    table = experiment("table5", "cub", "resnet50")
    row = next(row for row in table.rows if row.name == "roadmap")  # 64.05 ± 0.51, 25.27 ± 0.12
    measured = [outcome(row, seed, value, value - 0.01) for seed, value in enumerate((0.2510, 0.2530, 0.2541))]
    lines = [line for line in side_by_side(table, measured, {}) if line.row.name == "roadmap"]
    assert [(line.metric, line.verdict) for line in lines] == [("R@1", "differs"), ("mAP@R", "OK")]
    assert lines[1].chosen is not None
    assert lines[1].chosen.mean == pytest.approx(25.27)
    assert lines[1].last is not None
    assert lines[1].chosen.mean - lines[1].last.mean == pytest.approx(1.0)
    other = side_by_side(table, [*measured, outcome(row, 0, 0.2, 0.2, "model=resnet50_v1")], {})
    told = [line for line in other if line.row.name == "roadmap" and line.metric == "mAP@R"]
    assert [(line.verdict, line.why) for line in told] == [("OK", ""), ("differs", "with model=resnet50_v1")]
    assert sum(line.verdict == "not run" for line in other) == 8


def test_the_increase_is_of_runs_with_the_same_seed() -> None:
    table = experiment("fig5", "cub")
    supap, roadmap = table.rows[:2]
    runs = [outcome(supap, 0, 0.20, 0.2), outcome(supap, 1, 0.25, 0.2), outcome(roadmap, 1, 0.26, 0.2)]
    line = next(line for line in side_by_side(table, runs, {}) if line.row.key == roadmap.key)
    assert line.chosen is not None
    assert (line.chosen.mean, line.chosen.n) == (pytest.approx(4.0), 1)
    assert line.last is not None
    assert line.last.mean == 0


def test_minutes_are_of_the_machine_and_stand_ins_are_not_judged() -> None:
    table = experiment("table2", "sop")
    row = table.rows[1]
    lines = [line for line in side_by_side(table, [outcome(row, 0, 0.5, 0.5)], {}) if line.row is row]
    minutes = next(line for line in lines if line.metric == "minutes per epoch")
    assert minutes.chosen is not None
    assert (minutes.chosen.mean, minutes.verdict) == (2.0, "other hardware")
    swapped = experiment("fig4a", "cub")
    (line, *_) = side_by_side(swapped, [outcome(swapped.rows[0], 0, 0.5, 0.5)], {})
    assert (line.verdict, line.why) == ("measured", "cub in place of inaturalist")


def test_tolerances_by_hand() -> None:
    """Student's interval for the difference of two means, t being 2.7764 at 4 and 2.4469 at 6 degrees of freedom, and
    half of the last digit."""
    five = next(n for n in numbers() if (n.table, n.value) == ("5", "25.27"))  # ± 0.12
    one, three = estimate([25.0]), estimate([25.0, 25.2, 25.4])
    assert tolerance(five, one) == pytest.approx(0.005 + 2.7764 * 0.12 * (1 / 5 + 1) ** 0.5, rel=1e-4)
    pooled = ((4 * 0.12**2 + 2 * 0.2**2) / 6) ** 0.5
    assert tolerance(five, three) == pytest.approx(0.005 + 2.4469 * pooled * (1 / 5 + 1 / 3) ** 0.5, rel=1e-4)
    single = next(n for n in numbers() if n.table == "3" and n.value == "25.3")
    assert tolerance(single, three) == pytest.approx(0.05 + 4.3027 * 0.2 * (1 + 1 / 3) ** 0.5, rel=1e-4)
    assert tolerance(single, one) == ALLOWANCE
    assert verdict(single, estimate([26.3])) == "OK"
    assert verdict(single, estimate([26.31])) == "differs"
    # runs that are all alike say nothing of how much runs differ
    assert tolerance(single, estimate([25.0, 25.0])) == ALLOWANCE
    assert tolerance(five, estimate([25.0, 25.0])) == pytest.approx(
        0.005 + 2.7764 * 0.12 * (1 / 5 + 1 / 2) ** 0.5, rel=1e-4
    )


def test_what_is_right_differs_in_one_of_twenty() -> None:
    """Five published runs and three measured ones of the same thing, printed with two digits."""
    draw, found = np.random.default_rng(0), 0
    for _ in range(1000):
        ours, theirs = draw.normal(25, 0.3, 3), draw.normal(25, 0.3, 5)
        mean, sd = f"{theirs.mean():.2f}", f"{theirs.std(ddof=1):.2f}"
        number = Number("5", "x", "cub", "resnet50", 128, "mAP@R", mean, sd, "trained for the paper, five runs")
        found += verdict(number, estimate(ours)) == "differs"
    assert 30 <= found <= 70


def test_of_a_gap_that_is_not_positive_there_is_no_percentage() -> None:
    assert relative(0.08, 0.10, "decrease of DG_AP in %") == pytest.approx(20)
    assert relative(0.12, 0.10, "increase of mAP@R in %") == pytest.approx(20)
    assert math.isnan(relative(0.08, -0.10, "decrease of DG_AP in %"))
    assert math.isnan(relative(0.08, 0.0, "decrease of DG_AP in %"))


def test_a_run_without_a_number_is_named() -> None:
    table = experiment("table5", "cub", "resnet50")
    row = next(row for row in table.rows if row.name == "roadmap")
    runs = [outcome(row, seed, value, value) for seed, value in enumerate((0.25, math.nan, 0.26))]
    line = next(line for line in side_by_side(table, runs, {}) if line.row is row and line.metric == "mAP@R")
    assert line.chosen is not None
    assert line.chosen.n == 2
    assert line.why == f"without {row.key}1(), which gave no number"


def test_the_command_says_what_there_is_and_what_is_wrong() -> None:
    listed = CliRunner().invoke(app, ["reproduce"])
    assert listed.exit_code == 0
    assert re.search("^table5  +AP losses at batch 128, five runs$", listed.output, re.MULTILINE)
    for words, said in (
        (["table33"], "unknown experiment 'table33', did you mean 'table3'?"),
        (["table3", "--only", "roadmp"], "table3 has no row 'roadmp', did you mean 'roadmap'? It has: smoothap, supap"),
        (["table10", "--only", "roadmap"], "the rows of table10 are pairs, which are run together; leave it out"),
        (["table3", "--set", "epochs"], "--set must be KEY=VALUE, such as epochs=10, got 'epochs'"),
        (["table3", "--dataset", "glyps"], "--dataset glyps is unknown, did you mean 'glyphs'? Known: glyphs, cub"),
        (["table3", "--root", "cub"], "--root must be DATASET=FOLDER, such as cub=CUB_200_2011, got 'cub'"),
    ):
        wrong = CliRunner().invoke(app, ["reproduce", *words])
        assert wrong.exit_code == 1
        assert said in wrong.output.replace("\n", " ")
