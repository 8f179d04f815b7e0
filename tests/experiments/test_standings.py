"""Runs side by side: what is a group, which test decides, what is in bold, and what is refused."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from typer.testing import CliRunner

from roadmap.cli.app import app
from roadmap.evaluation import Evaluation
from roadmap.experiments import Standings, compare
from roadmap.experiments.results import Measurement, Outcome, load_outcomes, outcome_of, save_outcomes
from roadmap.experiments.sheet import Cell, Sheet
from roadmap.experiments.statistics import clustered_bootstrap, holm, mcnemar
from roadmap.runs import Run

from .worlds import CLASSES, finished

NOISE = {"good": 0.5, "alike": 0.51, "bad": 1.5}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Three seeds of three losses."""
    home = tmp_path_factory.mktemp("runs")
    return {
        name: [finished(home / f"{name}{seed}", noise, seed, name=name, tau=noise) for seed in range(3)]
        for name, noise in NOISE.items()
    }


def all_of(runs: dict[str, list[Path]], seeds: int = 3) -> list[Path]:
    return [folder for folders in runs.values() for folder in folders[:seeds]]


def values(folders: list[Path], metric: str) -> list[float]:
    return [Run.open(folder).summary()["after"]["cub"][metric] for folder in folders]


def test_groups_by_what_differs_and_tests_over_seeds(runs: dict[str, list[Path]]) -> None:
    found = compare(all_of(runs))
    assert isinstance(found, Standings)
    assert list(found.standings) == ["R@1", "mAP@R"]
    standings = {one.group: one for one in found.standings["mAP@R"]}
    assert list(standings) == ["loss=good", "loss=alike", "loss=bad"]  # tau differs with the loss alone: not told
    best = max(standings.values(), key=lambda one: one.estimate.mean)
    assert best.group in ("loss=good", "loss=alike")
    assert best.versus is None
    raw = {}
    for name in runs:
        one, expected = standings[f"loss={name}"], values(runs[name], "mAP@R")
        assert list(one.seeds.values()) == expected
        assert one.estimate.mean == pytest.approx(np.mean(expected))
        assert one.estimate.sd == pytest.approx(np.std(expected, ddof=1))
        if one is not best:
            assert one.versus is not None
            assert one.versus.seeds is not None
            theirs = scipy.stats.ttest_rel(expected, values(runs[best.group.removeprefix("loss=")], "mAP@R"))
            raw[one.group] = theirs.pvalue
            assert one.versus.seeds.p == pytest.approx(theirs.pvalue)
            assert one.versus.seeds.difference < 0
    rest = [name for name in runs if name != best.group.removeprefix("loss=")]
    third = scipy.stats.ttest_rel(*(values(runs[name], "mAP@R") for name in rest)).pvalue
    corrected = holm([*raw.values(), third])  # all pairs, not only those with the best
    assert found.p_values("mAP@R") == pytest.approx(dict(zip(raw, corrected, strict=False)))
    assert [one.group for one in standings.values() if one.best] == ["loss=good", "loss=alike"]


def test_one_seed_is_tested_over_its_queries(runs: dict[str, list[Path]]) -> None:
    found = compare(all_of(runs, 1), draws=300)
    good, bad = (Evaluation.load(Run.open(runs[name][0]).evaluation_file("cub")) for name in ("good", "bad"))
    best = next(one.group for one in found.standings["R@1"] if one.versus is None)
    if best == "loss=alike":
        good = Evaluation.load(Run.open(runs["alike"][0]).evaluation_file("cub"))
    for metric in ("R@1", "mAP@R"):
        one = next(one for one in found.standings[metric] if one.group == "loss=bad")
        assert one.versus is not None
        assert one.versus.seeds is None
        assert math.isnan(one.estimate.sd)
        a, b = (side.per_query[metric].double().numpy() for side in (good, bad))
        expected = clustered_bootstrap(a, b, good.labels.numpy(), 300)
        assert one.versus.classes is not None
        assert (one.versus.classes.p, one.versus.classes.low) == pytest.approx((expected.p, expected.low))
        assert one.versus.p_classes >= expected.p
        if metric == "R@1":
            assert one.versus.mcnemar == mcnemar(a, b)
            assert one.versus.p >= max(expected.p, one.versus.mcnemar.p)
        else:
            assert one.versus.mcnemar is None
            assert one.versus.p == one.versus.p_classes
        assert not one.best
    assert any("nothing is known of how much the seed matters" in note for note in found.remarks)


def test_options_of_a_loss_are_told_where_runs_of_it_differ_in_them(tmp_path: Path) -> None:
    folders = [
        finished(tmp_path / "a", 0.5, name="supap", tau=0.01),
        finished(tmp_path / "b", 0.5, name="roadmap", lam=0.5),
        finished(tmp_path / "c", 0.5, name="roadmap", lam=0.7),
    ]
    found = compare(folders)
    assert [one.group for one in found.standings["R@1"]] == [
        "loss=supap",
        "loss=roadmap loss.lam=0.5",
        "loss=roadmap loss.lam=0.7",
    ]
    assert all(one.best for one in found.standings["R@1"])  # the same vectors: no test tells them apart


def test_the_last_epoch_is_compared_where_it_was_kept(tmp_path: Path) -> None:
    folders = [finished(tmp_path / "a", 0.5, by="test", last=1.5), finished(tmp_path / "b", 0.6, by="last", name="x")]
    with pytest.raises(ValueError, match="a has the best epoch on the test set, b the last epoch: one choice flatters"):
        compare(folders)
    found = compare(folders, epoch="last")
    assert found.selection == "the last epoch"
    assert found.standings["mAP@R"][0].estimate.mean == pytest.approx(
        outcome_of(folders[0]).test("cub", "last").metrics["mAP@R"]
    )
    assert found.standings["mAP@R"][0].estimate.mean < found.standings["mAP@R"][1].estimate.mean
    held = finished(tmp_path / "c", 0.5, by="held_out", name="y")
    with pytest.raises(ValueError, match="c kept no last epoch of cub: its epoch was chosen by held_out"):
        compare([*folders, held], epoch="last")


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("select.every", 5, "a and b have the best epoch on the test set, but looked for more often in one"),
        ("select.metric", "R@1", r"but by another metric \(select.metric=mAP@R and select.metric=R@1\)"),
    ],
)
def test_epochs_that_were_not_looked_for_alike_are_refused(
    tmp_path: Path, setting: str, value: object, said: str
) -> None:
    def runs(by: str) -> list[Outcome]:
        one, two = (
            outcome_of(finished(tmp_path / by / name, noise, by=by, last=noise + 0.1, name=name))
            for name, noise in (("a", 0.5), ("b", 0.6))
        )
        return [one, dataclasses.replace(two, settings={**two.settings, setting: value})]

    chosen = runs("test")
    with pytest.raises(ValueError, match=said):
        compare(chosen)
    assert compare(chosen, epoch="last").selection == "the last epoch"
    assert compare(runs("last")).selection == "the last epoch"  # which nobody chose


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"each": 6}, "were tested on other pictures, or by another protocol"),
        ({"by": "held_out"}, "a has the last epoch, b the best epoch on held-out classes"),
        ({"data": "sop"}, r"were trained on other pictures \(cub and sop"),
        ({"test": "roxford5k"}, "were not tested on the same pictures"),
        ({}, "a and b are the same run twice: same settings, seed 0"),
    ],
)
def test_what_is_not_comparable_is_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    folders = [finished(tmp_path / "a", 0.5), finished(tmp_path / "b", 0.5, **changed)]
    with pytest.raises(ValueError, match=said):
        compare(folders)


def changed(run: Outcome, **told: Any) -> Outcome:
    """As if its evaluation had been another."""
    found = dataclasses.replace(run.tests["cub"]["chosen"], **told)
    return dataclasses.replace(run, tests={"cub": {"chosen": found}})


def test_what_cannot_be_counted_alike_is_refused(tmp_path: Path) -> None:
    one, other = (outcome_of(finished(tmp_path / name, 0.5, name=name)) for name in "ab")
    measured = other.tests["cub"]["chosen"]
    diverged = changed(other, metrics={**measured.metrics, "mAP@R": math.nan})
    with pytest.raises(ValueError, match="mAP@R of b is nan: it diverged, or no query of cub has anything to find"):
        compare([one, diverged])
    fewer = changed(other, metrics={**measured.metrics, "queries": 119}, pictures="")
    with pytest.raises(ValueError, match="a and b were tested on other pictures"):
        compare([one, fewer])
    without = measured.per_query["R@1"].copy()
    without[3] = np.nan  # a query that has a positive for one and none for the other
    with pytest.raises(ValueError, match=r"a and b have R@1 of other queries of cub"):
        compare([one, changed(other, per_query={**measured.per_query, "R@1": without})])
    with pytest.raises(ValueError, match="epoch=best must be chosen or last"):
        compare([one, other], epoch="best")
    with pytest.raises(ValueError, match="more of AP loss is not better"):
        compare([one, other], metrics=["R@1", "AP loss"])


def test_queries_without_positives_count_for_nobody(tmp_path: Path) -> None:
    one, other = (outcome_of(finished(tmp_path / name, noise, name=name)) for name, noise in (("a", 0.5), ("b", 1.0)))

    def without(run: Outcome) -> Outcome:
        kept = {name: values.copy() for name, values in run.tests["cub"]["chosen"].per_query.items()}
        for values in kept.values():
            values[:10] = np.nan
        return changed(run, per_query=kept)

    tests = {one.group: one.versus for one in compare([without(one), without(other)]).standings["R@1"]}
    found = tests["loss=b"]
    assert found is not None
    assert found.classes is not None
    assert found.mcnemar is not None
    a, b = (run.tests["cub"]["chosen"].per_query["R@1"][10:] for run in (one, other))
    assert found.mcnemar == mcnemar(a, b)
    assert found.classes.n == CLASSES - 2  # of five each


def test_a_run_that_is_counted_twice_is_noticed(tmp_path: Path) -> None:
    """A copy under another seed begun at the same second is refused; the same numbers by themselves are told."""
    first = outcome_of(finished(tmp_path / "a", 0.5, name="x"))
    other = outcome_of(finished(tmp_path / "b", 1.0, name="y"))
    copy = dataclasses.replace(first, name="copy", settings={**first.settings, "seed": 7})
    with pytest.raises(ValueError, match="a and copy are one run under two seeds: begun at the same second"):
        compare([first, copy, other])
    later = dataclasses.replace(copy, about={**copy.about, "started": "2026-01-01T00:00:00+0000"})
    found = compare([first, later, other])
    assert any("seeds 0 and 7 of loss=x have the same numbers" in text for text in found.remarks)
    cells = [cell.text for cell in found.sheet.rows[0]]
    assert cells[2] == f"{100 * first.tests['cub']['chosen'].metrics['R@1']:.2f} ± 0.00"
    assert "95 %" not in found.sheet.columns  # of two equal runs and of one nothing is known of their spread


def test_what_else_may_explain_a_difference_is_told(tmp_path: Path) -> None:
    one, other = (outcome_of(finished(tmp_path / name, 0.5, name=name)) for name in "ab")
    assert not any("differ" in text for text in compare([one, other]).remarks)
    about = {"commit": "0ld", "gpus": ["NVIDIA H200"], "packages": {"torch": "2.9"}, "started": ""}
    moved = dataclasses.replace(other, about={**other.about, **about})
    told = "\n".join(compare([one, moved]).remarks)
    for what in ("code", "hardware", "torch", "precision"):
        assert f"the runs differ in {what}, which a difference may come from too (loss=a: " in told
    assert "loss=b: 0ld" in told
    assert "loss=b: NVIDIA H200" in told
    # what the processor takes "auto" to be is no other precision
    exact = dataclasses.replace(other, settings={**other.settings, "hardware.precision": "32"})
    assert not any("differ" in text for text in compare([one, exact]).remarks)


def test_seeds_may_come_in_any_order(runs: dict[str, list[Path]]) -> None:
    folders = all_of(runs)
    shuffled = [folders[place] for place in (2, 0, 1, 5, 4, 3, 7, 8, 6)]
    first, again = compare(folders), compare(shuffled)
    assert again.standings == first.standings
    assert [list(one.seeds) for one in again.standings["R@1"]] == [[0, 1, 2]] * 3


def test_a_folder_of_runs_says_which_are_not_finished(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1), ("c", 2)):
        finished(tmp_path / name, 0.5, seed)
    (tmp_path / "b" / "summary.json").unlink()
    found = compare([tmp_path])
    assert found.standings["R@1"][0].estimate.n == 2
    assert "not finished, and left out: b" in found.remarks
    assert not any("folders of runs" in text for text in found.remarks)
    finished(tmp_path / "sweep" / "d", 0.5, 3)
    deeper = compare([tmp_path])
    assert f"folders of runs in folders, and left out: {tmp_path / 'sweep'}" in deeper.remarks
    assert deeper.standings == found.standings


def test_files_of_results_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    save_outcomes(tmp_path / "old", "cub", [outcome_of(finished(tmp_path / "a", 0.5))])
    (tmp_path / "a").rename(tmp_path / "before")
    save_outcomes(tmp_path / "new", "cub", [outcome_of(finished(tmp_path / "a", 1.5))])
    (tmp_path / "old" / "cub.npz").rename(tmp_path / "new" / "cub.npz")
    with pytest.raises(
        ValueError, match=r"cub.jsonl and cub.npz are not of the same runs: R@1 of a \(cub, chosen epoch"
    ):
        compare([tmp_path / "new" / "cub.jsonl"])


def test_files_of_results_that_are_damaged_are_named(tmp_path: Path) -> None:
    runs = [outcome_of(finished(tmp_path / name, noise, name=name)) for name, noise in (("a", 0.5), ("b", 1.5))]
    save_outcomes(tmp_path, "cub", runs)
    lines, values = tmp_path / "cub.jsonl", tmp_path / "cub.npz"
    whole, arrays = lines.read_bytes(), values.read_bytes()
    for damaged in (arrays[:100], arrays[:-300], b""):
        values.write_bytes(damaged)
        with pytest.raises(ValueError, match="cub.npz holds no values of queries that could be read.*copied whole?"):
            compare([lines])
    values.write_bytes(arrays)
    for damaged in (whole[:-300], whole[: whole.index(b"\n") + 1] + b"{}\n"):
        lines.write_bytes(damaged)
        with pytest.raises(ValueError, match="line 2 of .*cub.jsonl is no result that could be read.*copied whole?"):
            compare([lines])
    lines.write_bytes(whole)
    values.unlink()
    found = compare([lines])  # its means are left
    assert "R@1 was not kept query by query, for all pairs of groups: these have no test over queries" in found.remarks


def test_a_damaged_file_of_a_run_is_named(tmp_path: Path) -> None:
    run = finished(tmp_path / "a", 0.5)
    for name in ("summary.json", "environment.json"):
        kept = (run / name).read_text()
        (run / name).write_text(kept[: len(kept) // 2])
        with pytest.raises(ValueError, match=f"a/{name} is damaged: .*copied whole?"):
            compare([run])
        (run / name).write_text(kept)


def test_runs_that_are_not_there_or_not_finished(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a run: it has no config.yaml"):
        compare([tmp_path])
    unfinished = finished(tmp_path / "a", 0.5)
    (unfinished / "summary.json").unlink()
    with pytest.raises(ValueError, match="is not finished; go on with it: roadmap train resume="):
        compare([unfinished])
    with pytest.raises(ValueError, match="there is nothing to compare"):
        compare([])
    with pytest.raises(ValueError, match="b has no metric mAP@7, did you mean 'mAP@R'\\? It has R@1"):
        compare([finished(tmp_path / "b", 0.5)], metrics=["mAP@7"])


def test_seeds_that_none_shares_are_not_tested(tmp_path: Path) -> None:
    folders = [finished(tmp_path / "a", 0.5, 0), finished(tmp_path / "b", 1.5, 1, name="x")]
    found = compare(folders)
    (p,) = found.p_values("R@1").values()
    assert math.isnan(p)
    assert any("no seed in common" in note for note in found.remarks)
    worse = next(one for one in found.standings["R@1"] if one.versus is not None)
    assert not worse.best  # which nothing could test
    assert ", not tested" in str(found)


def test_results_in_small_files_say_the_same(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    outcomes = [outcome_of(folder) for folder in all_of(runs)]
    save_outcomes(tmp_path, "cub", outcomes[:4])
    save_outcomes(tmp_path, "cub", outcomes[2:])  # again, and more
    assert len(load_outcomes(tmp_path / "cub.jsonl")) == 9
    again, first = compare([tmp_path / "cub.jsonl"]), compare(outcomes)
    assert again.standings["R@1"] == first.standings["R@1"]
    assert again.p_values("mAP@R") == first.p_values("mAP@R")
    text = (tmp_path / "cub.jsonl").read_text()
    assert str(runs["good"][0].parent) not in text  # no folder of this machine


def test_both_epochs_of_a_run_are_kept_query_by_query(tmp_path: Path) -> None:
    first = outcome_of(finished(tmp_path / "a", 0.5, by="test", last=1.5))
    save_outcomes(tmp_path, "cub", [first])
    (again,) = load_outcomes(tmp_path / "cub.jsonl")
    for epoch in ("chosen", "last"):
        for metric in ("R@1", "mAP@R"):
            kept, whole = (one.test("cub", epoch).per_query[metric] for one in (again, first))
            assert kept == pytest.approx(whole, abs=1e-6)
    assert (first.test("cub").per_query["R@1"] != first.test("cub", "last").per_query["R@1"]).any()
    assert (first.test("cub").epoch, first.test("cub", "last").epoch) == (5, 9)


def test_every_way_to_write_it(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    home = runs["good"][0].parent
    endings = ("txt", "md", "tex", "csv", "html")
    command = ["compare", str(home), *(word for ending in endings for word in ("--out", str(tmp_path / f"t.{ending}")))]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "loss=good" in result.output
    texts = {ending: (tmp_path / f"t.{ending}").read_text() for ending in endings}
    mean = f"{100 * np.mean(values(runs['bad'], 'mAP@R')):.2f}"
    for text in texts.values():
        assert "loss=bad" in text.replace("\\_", "_")
        assert mean in text
    rows = list(csv.DictReader(io.StringIO(texts["csv"])))
    assert [row["group"] for row in rows] == sorted(["loss=alike", "loss=good", "loss=bad"])
    assert [row["mAP@R"].endswith("*") for row in rows] == [True, False, True]
    assert texts["md"].count("**") == 2 * texts["tex"].count("\\textbf{") == 2 * texts["html"].count("<b>") > 0
    assert texts["tex"].count(r"\\") == 5
    refused = CliRunner().invoke(app, ["compare", str(home), "--out", str(tmp_path / "t.pdf")])
    assert "loss=good" not in refused.output  # before anything is computed
    assert refused.exit_code == 1
    assert "must end in one of .txt, .md, .tex, .csv, .html, got '.pdf'" in refused.output.replace("\n", " ")


def test_every_column_can_be_told_from_the_others(runs: dict[str, list[Path]]) -> None:
    """Both metrics have an interval, a difference and p-values."""
    found = compare(all_of(runs))
    sheet = found.sheet
    assert len(set(sheet.columns)) < len(sheet.columns) == len(set(sheet.names))
    assert sheet.over == (("", 2), ("R@1", 7), ("mAP@R", 6))
    first = next(csv.DictReader(io.StringIO(sheet.csv())))
    (told,) = (one for one in found.standings["R@1"] if one.group == first["group"])
    assert first["R@1: 95 %"] == f"{100 * told.estimate.low:.2f} to {100 * told.estimate.high:.2f}"
    assert first["R@1: 95 %"] != first["mAP@R: 95 %"]
    for one, line in zip(found.standings["R@1"], csv.DictReader(io.StringIO(sheet.csv())), strict=True):
        over = None if one.versus is None else one.versus.seeds
        assert line["R@1: to the best"] == ("best" if over is None else f"{100 * over.difference:+.2f}")
    assert sheet.markdown().startswith("| group | runs | R@1 | R@1: 95 % | ")
    head = r"\multicolumn{2}{c}{} & \multicolumn{7}{c}{R@1} & \multicolumn{6}{c}{mAP@R} \\"
    assert f"{head}\n\\cmidrule(lr){{3-9}} \\cmidrule(lr){{10-15}}" in sheet.latex()
    over = "<th class='over' colspan='2'></th><th class='over' colspan='7'>R@1</th>"
    assert f"<thead><tr>{over}<th class='over' colspan='6'>mAP@R</th></tr>" in sheet.html()


def test_a_terminal_has_a_table_for_each_metric(runs: dict[str, list[Path]]) -> None:
    found = compare(all_of(runs))
    _, first, second, *_ = str(found).split("\n\n")
    for table, metric in ((first, "R@1"), (second, "mAP@R")):
        lines = table.splitlines()[:5]
        assert re.match(rf"group +runs  {metric} ", lines[0])
        assert [line.split()[0] for line in lines[2:]] == ["loss=good", "loss=alike", "loss=bad"]
        assert max(map(len, lines)) <= 112
    notes = str(found).partition("  - a star stands for bold\n")[2].splitlines()
    assert all(len(line) <= 80 for line in notes)
    assert all(line.startswith(("  - ", "    ")) for line in notes)
    assert " ".join(found.notes) in " ".join(" ".join(line[4:] for line in notes).split())


def test_columns_that_say_nothing_are_left_out(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    assert compare(runs["good"][:1]).sheet.columns == ("group", "runs", "R@1", "mAP@R")
    few = [finished(tmp_path / name, 0.5, classes=12, name=name) for name in "ab"]
    found = compare(few)
    assert found.sheet.columns == (
        "group",
        "runs",
        *(("R@1", "to the best", "effect", "p, McNemar")),
        "mAP@R",
        "to the best",
    )
    assert any("no pair of groups could be tested" in note for note in found.notes)
    assert not any("Holm" in note or "paired t-test" in note or "p, classes" in note for note in found.notes)
    assert sum("12 classes" in text for text in found.remarks) == 1  # though there are two metrics


def test_a_difference_is_told_where_nothing_can_test_it(tmp_path: Path) -> None:
    """One seed and few classes: mAP@R has no test."""
    folders = [finished(tmp_path / name, noise, classes=12, name=name) for name, noise in (("a", 0.5), ("b", 1.5))]
    one, other = compare(folders).standings["mAP@R"]
    expected = 100 * (other.estimate.mean - one.estimate.mean)
    assert f"{expected:+.2f}, not tested" in [cell.text for cell in compare(folders).sheet.rows[1]]


def test_an_interval_ends_where_a_metric_does() -> None:
    metrics = [{"R@1": value, "mAP@R": 1 - value} for value in (0.98, 1.0, 0.99)]
    runs = [
        Outcome(f"r{seed}", {"seed": seed, "loss.name": "x"}, "last", "", {"cub": {"chosen": Measurement(1, one)}})
        for seed, one in enumerate(metrics)
    ]
    found = compare(runs)
    assert found.standings["R@1"][0].estimate.high > 1
    cells = [cell.text for cell in found.sheet.rows[0]]
    assert cells[3].endswith(" to 100.00")
    assert cells[5].startswith("0.00 to ")


def test_what_was_asked_for_and_is_not_there_is_refused(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    """Never left out silently."""
    with pytest.raises(ValueError, match="good0 has no metric mAPR, did you mean 'mAP@R'\\? It has R@1, R@2"):
        compare(all_of(runs), metrics=["R@1", "mAPR"])
    lacking = outcome_of(runs["bad"][0])
    metrics = {name: value for name, value in lacking.test("cub").metrics.items() if name != "mAP"}
    namesake = outcome_of(runs["bad"][1])
    with pytest.raises(ValueError, match="bad0 has no metric mAP, did"):
        compare([changed(lacking, metrics=metrics), dataclasses.replace(namesake, name="bad0")], metrics=["mAP"])
    with pytest.raises(ValueError, match="by what are the runs to be compared.* They have R@1"):
        compare(all_of(runs), metrics=[""])
    assert list(compare(runs["good"], metrics=["mAP", "mAP"]).standings) == ["mAP"]
    sop = [finished(tmp_path / name, 0.5, name=name, test="sop") for name in "ab"]
    with pytest.raises(ValueError, match=r"same pictures \(cub: good0 and 8 more; sop: a and 1 more\)"):
        compare([*all_of(runs), *sop])
    with pytest.raises(ValueError, match="test=sop must be a test set of every run, the runs have cub"):
        compare(all_of(runs), test="sop")
    with pytest.raises(ValueError, match="test=sop must be a test set of every run, only a and 1 more have it"):
        compare([*all_of(runs), *sop], test="sop")
    for option, value in (("--test", "sop"), ("--epoch", "best")):
        refused = CliRunner().invoke(app, ["compare", str(runs["good"][0]), option, value])
        assert f"error: {option} {value} must be" in refused.output


def test_the_commands_of_the_page_work_on_the_sweep_that_it_begins_with(tmp_path: Path) -> None:
    """Whose epochs are chosen on held-out classes, as those of recipe=glyphs are."""
    for name, noise in NOISE.items():
        finished(tmp_path / "sweep" / name, noise, name=name, by="held_out")
    page = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text(encoding="utf-8")
    block = page.partition("## Compare runs")[2].partition("```sh\n")[2].partition("```")[0]
    sweep, *commands = block.splitlines()
    assert "recipe=glyphs" in sweep
    assert len(commands) == 2
    for command in commands:
        here = command.replace("runs/sweep_DATE", str(tmp_path / "sweep")).replace("table.", f"{tmp_path}/table.")
        result = CliRunner().invoke(app, here.split()[1:])
        assert result.exit_code == 0, result.output


def test_a_sheet_keeps_what_means_something_elsewhere() -> None:
    sheet = Sheet("t", ("a_b", "%"), ((Cell("x|y & <z>"), Cell("1 ± 2", True)),), ("50 % & more",))
    assert "x\\|y & <z>" in sheet.markdown()
    assert r"x|y \& $<$z$>$ & \textbf{1 $\pm$ 2} \\" in sheet.latex()
    assert "<td>x|y &amp; &lt;z&gt;</td><td><b>1 ± 2</b></td>" in sheet.html()
    assert not re.search(r"https?://|src=", sheet.html())
    assert sheet.csv().splitlines() == ["a_b,%", "x|y & <z>,1 ± 2*"]


def test_a_number_below_zero_has_a_minus_in_latex() -> None:
    sheet = Sheet("t", ("a", "b"), ((Cell("a-1 x=1e-05"), Cell("-4.07")), (Cell("-"), Cell("-0.16 to -0.02", True))))
    assert r"a-1 x=1e-05 & $-$4.07 \\" in sheet.latex()
    assert r"- & \textbf{$-$0.16 to $-$0.02} \\" in sheet.latex()


def test_two_seeds_are_said_to_show_little(runs: dict[str, list[Path]]) -> None:
    (said,) = [text for text in compare(all_of(runs, 2)).remarks if text.startswith("two seeds in common show only")]
    assert "need not be as good" in said
    assert not any("two seeds" in text for text in (*compare(all_of(runs)).remarks, *compare(all_of(runs, 1)).remarks))


def test_one_group_has_notes_of_no_test(runs: dict[str, list[Path]]) -> None:
    found = compare(runs["good"])
    assert found.notes == ("one group: there is nothing to compare it with",)
    assert compare(runs["good"][:1]).remarks == ("one run each: nothing is known of how much the seed matters",)


def test_a_last_epoch_that_was_the_chosen_one_is_kept_once(tmp_path: Path) -> None:
    first = outcome_of(finished(tmp_path / "a", 0.5, by="test", last=1.5))
    best, last = (first.test("cub", epoch) for epoch in ("chosen", "last"))
    same = dataclasses.replace(best, epoch=last.epoch)  # the last epoch was the best
    apart = dataclasses.replace(last, epoch=best.epoch)  # other values, whatever the epochs are called
    cases = {"same": (same, same), "apart": (best, apart), "other": (best, last)}
    for name, (chosen, after) in cases.items():
        run = dataclasses.replace(first, tests={"cub": {"chosen": chosen, "last": after}})
        save_outcomes(tmp_path, name, [run])
        (again,) = load_outcomes(tmp_path / f"{name}.jsonl")
        for epoch, wanted in (("chosen", chosen), ("last", after)):
            for metric, values in wanted.per_query.items():
                assert again.test("cub", epoch).per_query[metric] == pytest.approx(values, abs=1e-6)
    with np.load(tmp_path / "same.npz") as once, np.load(tmp_path / "other.npz") as twice:
        assert (len(once.files), len(twice.files)) == (3, 5)  # labels, and R@1 and mAP@R of each epoch


def test_a_run_that_a_file_of_results_has_under_two_names_counts_once(tmp_path: Path) -> None:
    """Tables share runs: that at the default of an option is one of the table of this option too."""
    runs = [outcome_of(finished(tmp_path / f"{name}{seed}", noise, seed, name=name)) for seed in (0, 1)
            for name, noise in (("supap", 0.5), ("roadmap", 0.6))]  # fmt: skip
    again = dataclasses.replace(runs[1], name="by another table")
    save_outcomes(tmp_path, "all", [*runs, again])
    found = compare([tmp_path / "all.jsonl"])
    assert [one.estimate.n for one in found.standings["R@1"]] == [2, 2]
    assert str(found) == str(compare(runs))
    # the same settings and seed, and other answers: one of them is not what it says
    other = dataclasses.replace(runs[0], name="by another table", settings=again.settings, tests=runs[0].tests)
    save_outcomes(tmp_path, "odd", [*runs, other])
    with pytest.raises(ValueError, match="roadmap0 and by another table are the same run twice"):
        compare([tmp_path / "odd.jsonl"])
    with pytest.raises(ValueError, match="roadmap0 and by another table are the same run twice"):
        compare([*runs, again])  # which somebody named one by one
