"""The report: its numbers are those of the evaluations, what it lacks is said, nothing on it can run or reach out."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from roadmap.cli.app import app
from roadmap.encoder import Encoder
from roadmap.evaluation import Evaluation, evaluate
from roadmap.experiments import compare
from roadmap.report import report, sections
from roadmap.report.completing import untrained
from roadmap.report.measures import Measures
from roadmap.report.scores import ScoreCounts, edges
from roadmap.report.sections import class_means, confusions
from roadmap.runs import Run

from .conftest import NASTY

TEST = "pictures"
VOID = {"img", "meta", "br", "wbr", "option"}


class Page(HTMLParser):
    """The tables of every part of a page, and what else a test looks at. Tags must be closed in their order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.part = ""
        self.parts: list[str] = []
        self.tables: dict[str, list[list[list[str]]]] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self.data: dict[str, Any] = {}
        self.scripts: list[str] = []
        self.text = ""
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.attributes += [(tag, name, value) for name, value in given.items()]
        if tag == "section" and "id" in given:
            self.part = given["id"]
            self.parts.append(self.part)
        if tag == "table":
            self.tables.setdefault(self.part, []).append([])
        if tag == "tr":
            self.tables[self.part][-1].append([])
        if tag in ("td", "th"):
            self.tables[self.part][-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag if tag != "script" or given.get("type") is None else "data")

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() in (tag, "data")

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "data":
            self.data = json.loads(data)
        elif inside == "script":
            self.scripts.append(data)
        elif inside != "style":
            self.text += data
            if {"td", "th"} & set(self.open):
                self.tables[self.part][-1][-1][-1] += data


@pytest.fixture(scope="module")
def two(trained: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Page:
    path = tmp_path_factory.mktemp("page") / "report.html"
    found = report([trained["roadmap"], trained["smoothap"]], path, queries=3)
    assert [run.missing for run in found] == [[], []]
    return Page(path)


def evaluation_of(folder: Path) -> Evaluation:
    return Evaluation.load(Run.open(folder).evaluation_file(TEST))


def kept(folder: Path) -> dict[str, Measures]:
    values = json.loads((folder / "report" / f"{TEST}.json").read_text())
    return {which: Measures.from_dict(values[which]) for which in ("before", "after")}


def test_it_has_every_part(two: Page) -> None:
    parts = ["results", "curves", "scores", "ranks", "classes", "queries", "map", "settings", "pictures", "code"]
    assert two.parts == [*parts, "hardware"]


def test_the_table_has_the_metrics_before_and_after(two: Page, trained: dict[str, Path]) -> None:
    head, *rows = two.tables["results"][0]
    before = Run.open(trained["roadmap"]).summary()["before"][TEST]
    expected = {"before training": before}
    expected |= {name: evaluation_of(folder).metrics for name, folder in trained.items()}
    assert [row[0] for row in rows] == list(expected)
    assert head[1:] == ["R@1", "R@2", "R@4", "R@8", "R-precision", "mAP@R", "mAP"]
    for row in rows:
        assert row[1:] == [f"{100 * expected[row[0]][name]:.2f}" for name in head[1:]]


def test_the_model_before_training_is_the_one_that_the_run_began_with(trained: dict[str, Path]) -> None:
    run = Run.open(trained["roadmap"])
    encoder = untrained(run.settings())
    again = evaluate(encoder, Encoder.open(run.folder).records(), progress=False)
    assert again.metrics == run.summary()["before"][TEST]
    torch.manual_seed(7)
    drawn = torch.rand(1)
    torch.manual_seed(7)
    untrained(run.settings())
    assert torch.rand(1) == drawn  # the user's own random numbers go on as if nothing had been


def test_scores_are_those_of_the_vectors(two: Page, trained: dict[str, Path]) -> None:
    encoder = Encoder.open(trained["roadmap"])
    found = encoder.embed(encoder.records().split("test"))
    scores = (found.vectors @ found.vectors.T).numpy()
    same = (found.labels[:, None] == found.labels).numpy()
    others = ~np.eye(len(found), dtype=bool)
    counts = kept(trained["roadmap"])["after"].counts
    for values, mask in ((counts.positives, same & others), (counts.negatives, ~same)):
        assert values.tolist() == np.histogram(np.clip(scores[mask], -1, 1), edges())[0].tolist()
    below = 100 * (scores[same & others] < 0.9).mean()
    above = 100 * (scores[~same] > 0.6).mean()
    words = re.sub(r"\s+", " ", two.text)
    said = f"Positive pairs below α: {below:.2f} % of 180. Negative pairs above β: {above:.2f} % of 1,080."
    assert said in words.partition("roadmap, after training")[2][:200]
    assert "α = 0.9 and β = 0.6 are those of its loss." in words
    assert "Its loss, smoothap, has no thresholds: α = 0.9 and β = 0.6 are ROADMAP's" in words


def test_ranks_begin_with_r_at_1(two: Page, trained: dict[str, Path]) -> None:
    head, *rows = two.tables["ranks"][0]
    assert head == ["k", "1", "2", "5", "10", "20"]
    values = {row[0]: row[1:] for row in rows}
    assert list(values) == ["roadmap", "before training", "smoothap", "the best possible"]  # both began alike
    for name, folder in trained.items():
        evaluation = evaluation_of(folder)
        right = evaluation.gallery_labels[evaluation.neighbours] == evaluation.labels[:, None]
        for place, k in enumerate((1, 2, 5, 10)):
            assert values[name][place] == f"{100 * right[:, :k].double().mean():.1f}"
    assert values["the best possible"] == ["100.0", "100.0", "100.0", "50.0", "25.0"]


def test_classes_go_from_worst_to_best(two: Page, trained: dict[str, Path]) -> None:
    head, *rows = two.tables["classes"][0]
    first, second = (evaluation_of(folder) for folder in trained.values())
    expected = []
    for label in first.labels.unique().tolist():
        member = first.labels == label
        values = [float(one.per_query["mAP@R"][member].mean()) for one in (first, second)]
        expected.append((*values, first.class_name(label)))
    expected.sort()
    assert [row[0] for row in rows] == [name for *_, name in expected]
    assert [row[1] for row in rows] == ["6"] * 6
    assert [row[2:4] for row in rows] == [[f"{100 * a:.2f}", f"{100 * b:.2f}"] for a, b, _ in expected]
    assert [row[4] for row in rows] == [f"{100 * (b - a):+.2f}" for a, b, _ in expected]
    assert head[2:5] == ["AP@R, % · roadmap", "AP@R, % · smoothap", "second less first"]


def test_class_means_and_confusions_are_those_of_a_loop(trained: dict[str, Path]) -> None:
    evaluation = evaluation_of(trained["roadmap"])
    tally: dict[int, list[int]] = {}
    for row, label in enumerate(evaluation.labels.tolist()):
        found = int(evaluation.gallery_labels[evaluation.neighbours[row, 0]])
        if found != label:
            tally.setdefault(label, []).append(found)
    expected = {}
    for label, wrong in tally.items():
        most = max(wrong.count(other) for other in wrong)
        expected[label] = min(other for other in wrong if wrong.count(other) == most), most
    assert confusions(evaluation) == expected
    values = evaluation.per_query["mAP@R"].clone()
    values[0] = torch.nan  # nothing to find: not counted
    some = dataclasses.replace(evaluation, per_query={"mAP@R": values})
    label = int(evaluation.labels[0])
    assert class_means(some)[label] == pytest.approx(float(values[evaluation.labels == label].nanmean()))


def test_queries_and_answers_are_those_of_the_evaluations(two: Page, trained: dict[str, Path]) -> None:
    labels = [value for tag, name, value in two.attributes if (tag, name) == ("img", "alt")]
    queries = [value for value in labels if value.startswith("query of class ")]
    first = evaluation_of(trained["roadmap"])
    assert first.ids is not None
    assert first.gallery_ids is not None
    shown = queries[0].rpartition(", ")[2]
    row = first.ids.index(shown)
    answers = labels[1:11]
    expected = []
    for place, (item, score) in enumerate(zip(first.neighbours[row].tolist(), first.scores[row].tolist(), strict=True)):
        said = "same class" if first.gallery_labels[item] == first.labels[row] else "another class"
        name = first.class_name(int(first.gallery_labels[item]))
        expected.append(f"{place + 1}: {said}, {name}, score {score:.4f}, {first.gallery_ids[item]}")
    assert answers == expected
    assert "Most improved" in two.text


def test_the_map_has_every_picture_once_for_every_model(two: Page, trained: dict[str, Path]) -> None:
    first = evaluation_of(trained["roadmap"])
    assert two.data["files"] == list(first.ids or ())
    assert [two.data["classes"][at] for at in two.data["class"]] == [first.class_name(x) for x in first.labels.tolist()]
    names = ["roadmap", "smoothap", "roadmap, before training", "smoothap, before training"]
    assert [one["name"] for one in two.data["maps"]] == names
    for one in two.data["maps"]:
        assert len(one["at"]) == 72
        assert max(map(abs, one["at"])) == two.data["scale"]
    assert "All 36 test pictures." in two.text
    flat = kept(trained["roadmap"])["after"].flat
    assert two.data["maps"][0]["at"] == np.rint(flat * two.data["scale"]).astype(int).ravel().tolist()


def test_settings_code_and_hardware_are_the_runs_own(two: Page, trained: dict[str, Path]) -> None:
    differing, whole = two.tables["settings"]
    assert [row[0] for row in differing[1:]] == [row[0] for row in whole[1:] if row[1] != row[2]]
    assert ["loss.name", "roadmap", "smoothap"] in differing
    assert ["optim.lr", "0.01", "0.01"] in whole
    environment = json.loads((trained["roadmap"] / "environment.json").read_text())
    (code,), (hardware,) = two.tables["code"], two.tables["hardware"]
    assert ["torch", *[environment["packages"]["torch"]] * 2] in code
    assert ["system", *[environment["system"]] * 2] in hardware
    assert ["device of the test", "cpu", "cpu"] in hardware
    assert ["classes", "6", "6"] in two.tables["pictures"][0]


def test_names_are_text_wherever_they_stand(two: Page) -> None:
    assert set(NASTY.values()) <= set(two.data["classes"])
    assert {tag for tag, _, _ in two.attributes} <= {
        *("html", "meta", "body", "nav", "a", "section", "div", "p", "span", "table", "tr", "th", "td", "svg", "path"),
        *(
            "text",
            "polyline",
            "circle",
            "details",
            "summary",
            "article",
            "figure",
            "img",
            "ol",
            "li",
            "i",
            "small",
            "h3",
        ),
        *("label", "select", "option", "button", "canvas", "script", "ul"),
    }
    assert not [name for _, name, _ in two.attributes if name.startswith("on")]
    assert len(two.scripts) == 1
    assert not [name for name in NASTY.values() if name in two.source]  # each has something to escape


def test_it_reaches_for_nothing_and_allows_one_script(two: Page) -> None:
    (policy,) = [value for tag, _, value in two.attributes if tag == "meta" and value.startswith("default-src")]
    digest = base64.b64encode(hashlib.sha256(two.scripts[0].encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    addresses = [value for _, name, value in two.attributes if name in ("src", "href", "action", "srcset")]
    assert {value[:11] for value in addresses if not value.startswith("#")} == {"data:image/"}
    assert not re.search(r"https?:|url\(|@import", two.source.partition("<script>")[0])
    assert not re.search(r"https?:|fetch\(|XMLHttp|import\(|eval\(|innerHTML", two.scripts[0])
    anchors = {value[1:] for value in addresses if value.startswith("#")}
    assert anchors == set(two.parts)
    ids = [value for _, name, value in two.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_the_second_report_embeds_nothing_and_is_the_same(
    two: Page, trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Encoder, "embed", lambda *_, **__: pytest.fail("embedded again"))
    report([trained["roadmap"], trained["smoothap"]], tmp_path / "again.html", queries=3)
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == two.source


@pytest.fixture
def copied(trained: dict[str, Path], tmp_path: Path) -> Path:
    """A run that a test may spoil, without what earlier reports kept."""
    folder = tmp_path / "copy"
    shutil.copytree(trained["roadmap"], folder, ignore=shutil.ignore_patterns("report", ".lock"))
    return folder


def test_what_is_kept_is_computed_again_when_the_evaluation_changes(copied: Path, tmp_path: Path) -> None:
    report([copied], tmp_path / "page.html")
    file = copied / "report" / f"{TEST}.json"
    first = json.loads(file.read_text())
    path = Run.open(copied).evaluation_file(TEST)
    evaluation = Evaluation.load(path)
    dataclasses.replace(evaluation, facts={**evaluation.facts, "notes": ["another"]}).save(path)
    file.write_text(file.read_text().replace('"how": "', '"how": "old '))
    report([copied], tmp_path / "page.html")
    second = json.loads(file.read_text())
    assert first["stamp"] != second["stamp"]
    assert second["after"] == first["after"]
    file.write_text("{")  # damaged
    report([copied], tmp_path / "page.html")
    assert json.loads(file.read_text()) == second


def test_without_embedding_it_shows_what_is_known(copied: Path, tmp_path: Path) -> None:
    (found,) = report([copied], tmp_path / "page.html", embed=False)
    assert found.missing == ["scores, precision by rank and the map: they need the pictures embedded again"]
    page = Page(tmp_path / "page.html")
    assert "they need the pictures embedded again" in page.text
    assert "map" not in page.parts
    assert {"queries", "classes", "results", "missing"} <= set(page.parts)
    assert not (copied / "report").exists()


def test_pictures_that_have_gone_are_said_and_left_out(copied: Path, tmp_path: Path) -> None:
    config = copied / "config.yaml"
    text = config.read_text()
    root = str(Run.open(copied).settings().data.root)
    config.write_text(text.replace(root, str(tmp_path / "nowhere")))
    (found,) = report([copied], tmp_path / "page.html")
    assert found.missing[0].startswith("the pictures cannot be shown, nor scores and the map be computed: ")
    assert "nowhere" in found.missing[0]
    page = Page(tmp_path / "page.html")
    assert "queries" not in page.parts
    assert "nowhere" in page.text
    assert page.tables["results"][0][1][0] == "before training"


def test_weights_that_have_gone_leave_out_what_was_before(copied: Path, tmp_path: Path) -> None:
    config = copied / "config.yaml"
    config.write_text(config.read_text().replace("weights: random", f"weights: {tmp_path}/gone.pth"))
    (found,) = report([copied], tmp_path / "page.html")
    (why,) = found.missing
    assert why.startswith("the model before training: ")
    assert "gone.pth" in why
    page = Page(tmp_path / "page.html")
    assert [one["name"] for one in page.data["maps"]] == ["copy"]
    assert "Most improved" not in page.text


def test_what_does_not_agree_with_the_run_is_said(copied: Path, tmp_path: Path) -> None:
    path = copied / "summary.json"
    summary = json.loads(path.read_text())
    summary["before"][TEST]["mAP@R"] += 0.1
    path.write_text(json.dumps(summary))
    report([copied], tmp_path / "page.html")
    assert "its weights are not the same any more" in Page(tmp_path / "page.html").text


def test_a_run_without_an_evaluation_is_refused(copied: Path, tmp_path: Path) -> None:
    Run.open(copied).evaluation_file(TEST).unlink()
    with pytest.raises(FileNotFoundError, match="has no evaluation of a test set: it is not finished.*train resume="):
        report([copied], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_runs_of_different_pictures_are_refused(trained: dict[str, Path], copied: Path, tmp_path: Path) -> None:
    path = Run.open(copied).evaluation_file(TEST)
    whole = Evaluation.load(path)
    spoilt = {
        "2 pictures are only in the first and 1 only in the second": {
            "ids": ("new.png", *(whole.ids or ())[2:]),
            "gallery_ids": ("new.png", *(whole.gallery_ids or ())[2:]),
        },
        "the pictures are in another order": {"ids": whole.ids[::-1] if whole.ids else None},
        "the same pictures have other classes": {"labels": whole.labels.flip(0)},
        "equal scores count otherwise: pessimistic and mean": {
            "facts": {**whole.facts, "settings": {**whole.facts["settings"], "ties": "mean"}}
        },
    }
    for why, changed in spoilt.items():
        dataclasses.replace(whole, **changed).save(path)
        with pytest.raises(ValueError, match=f"were not tested alike on {TEST}: {why}. A report compares runs of the"):
            report([trained["roadmap"], copied], tmp_path / "page.html")


def test_other_mistakes_are_told(trained: dict[str, Path], tmp_path: Path) -> None:
    run, page = trained["roadmap"], tmp_path / "page.html"
    with pytest.raises(ValueError, match="is named twice; name each run once"):
        report([run, run / "."], page)
    with pytest.raises(ValueError, match="has no evaluation of 'cub', it has pictures; a report is about one test set"):
        report([run], page, test="cub")
    with pytest.raises(ValueError, match="a report needs at least one run"):
        report([], page)
    with pytest.raises(ValueError, match="queries must be at least 1, got 0"):
        report([run], page, queries=0)


def test_a_device_that_is_not_there_is_an_error(copied: Path, tmp_path: Path) -> None:
    """And no report without pictures."""
    with pytest.raises(ValueError, match="hardware.device=mps"):
        report([copied], tmp_path / "r.html", device="mps")
    refused = CliRunner().invoke(app, ["report", str(copied), "-o", str(tmp_path / "r.html"), "--device", "mps"])
    assert refused.exit_code == 1
    assert "error: --device mps: " in refused.output
    assert not (tmp_path / "r.html").exists()


def test_figures_that_cannot_be_drawn_are_not_said_to_be_written(copied: Path, tmp_path: Path) -> None:
    (copied / "checkpoints" / "best.safetensors").unlink()
    words = ["report", str(copied), "-o", str(tmp_path / "r.html"), "--figures", str(tmp_path / "figures")]
    said = CliRunner().invoke(app, words).output
    assert "r.html" in said
    assert "figures as PNG and PDF" not in said
    assert "figures: they are of pictures, which cannot be shown" in said
    assert not (tmp_path / "figures").exists()


def test_runs_of_one_name_are_told_apart(trained: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(trained["roadmap"], tmp_path / "other" / "roadmap", ignore=shutil.ignore_patterns(".lock"))
    found = report([trained["roadmap"], tmp_path / "other" / "roadmap"], tmp_path / "page.html", queries=1)
    assert [run.name for run in found] == ["runs/roadmap", "other/roadmap"]
    assert "corrects" not in Page(tmp_path / "page.html").text  # twins


def test_the_command_writes_the_same_page(two: Page, trained: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "deep" / "page.html"
    words = ["report", *map(str, trained.values()), "-o", str(page), "--queries", "3"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert page.read_text(encoding="utf-8") == two.source
    assert f"wrote      {page}: " in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "absent"], "error: there is no run folder absent."),
        (["report", "."], "error: . is not a run: it has no config.yaml"),
        (["report", ".", "-o", "page.pdf"], "--out page.pdf must end in .html"),
    ],
)
def test_the_command_says_what_is_wrong(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert said in result.stderr


@pytest.mark.parametrize(("pairs", "steps"), [(100, 50), (6_000, 100), (20_000, 200)])
def test_few_pairs_are_drawn_in_wider_steps(pairs: int, steps: int) -> None:
    counts = np.bincount(np.arange(pairs) % 190, minlength=200)
    bins, (positives, negatives) = sections._shares(ScoreCounts(counts, 3 * counts, 0.9, 0.6, 0, 0))
    assert len(positives) == len(negatives) == len(bins) - 1 == steps
    assert (bins[0], bins[-1]) == (-1, 1)
    assert positives.sum() == pytest.approx(1)
    width = 200 // steps
    for number, share in enumerate(positives):
        assert share == pytest.approx(counts[number * width : (number + 1) * width].sum() / pairs)


def test_runs_are_compared_as_by_the_command(two: Page, trained: dict[str, Path]) -> None:
    sheet = compare(list(trained.values()), TEST).sheet
    lines = [sheet.names, *([cell.text for cell in row] for row in sheet.rows)]
    assert two.tables["results"][1] == list(map(list, zip(*lines, strict=True)))  # on its side: a page is narrow
    assert [note for note in sheet.notes if note not in two.text] == []


def test_runs_that_cannot_be_compared_are_shown_without_p_values(
    trained: dict[str, Path], copied: Path, tmp_path: Path
) -> None:
    path = copied / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chosen by": "last"}))
    report([trained["smoothap"], copied], tmp_path / "page.html", embed=False)
    page = Page(tmp_path / "page.html")
    assert "No p-values: smoothap has the best epoch on held-out classes, copy the last epoch" in page.text
    assert len(page.tables["results"]) == 2


@pytest.mark.parametrize(("seed", "passes"), [(0, 3), (1, 4)])
def test_runs_that_began_alike_share_what_was_before(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, passes: int
) -> None:
    folders = [tmp_path / name for name in trained]
    for old, new in zip(trained.values(), folders, strict=True):
        shutil.copytree(old, new, ignore=shutil.ignore_patterns("report", ".lock"))
    config = folders[1] / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", f"seed: {seed}"))
    embed, names = Encoder.embed, []

    def counted(self: Encoder, *given: Any, **options: Any) -> Any:
        names.append(self.name)
        return embed(self, *given, **options)

    monkeypatch.setattr(Encoder, "embed", counted)
    first, second = report(folders, tmp_path / "page.html", queries=1)
    assert len(names) == passes
    assert first.before is not None
    assert second.before is not None
    assert (first.before.metrics == second.before.metrics) is (seed == 0)
    assert {path.name for path in (folders[1] / "report").iterdir()} == {f"{TEST}.json", f"{TEST}-before.npz"}
