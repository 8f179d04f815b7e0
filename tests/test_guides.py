"""The guides are true: their commands run in the order in which they stand, and give the files that they promise."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from roadmap.cli.app import app
from roadmap.config.settings import ModelSettings
from roadmap.models import retriever

from .data import layouts

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "docs" / "guides"
OWN_PICTURES, EVALUATE = (GUIDES / f"{name}.md" for name in ("own-pictures", "evaluate"))
LETTERS = {*range(0x410, 0x450), *range(0x531, 0x557)}  # of the scripts that the guides draw, instead of all characters
# The commands as printed, but for what would take minutes: fewer steps, and tiny backbones under the large ones' names.
STEPS = {"epochs": "1", "data.batches": "2", "hardware.threads": "1", "hardware.device": "cpu"}
TINY = {"resnet50": "test_resnet", "vit_small_patch14_dinov2": "test_vit"}
SMALL = {"data.image": "32", "data.resize": "36", "--image": "32"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    lines = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def shortened(words: list[str]) -> list[str]:
    """The same command on less."""
    words = [TINY.get(word, word) for word in words]
    for place, word in enumerate(words):
        key, equals, value = word.partition("=")
        if equals:
            words[place] = f"{key}={SMALL.get(key) or TINY.get(value) or value}"
        elif word in SMALL:
            words[place + 1] = SMALL[word]
    if words[:2] == ["roadmap", "train"]:
        kept = [word for word in words if word.partition("=")[0] not in STEPS]
        return [*kept, *(f"{key}={value}" for key, value in STEPS.items())]
    return words


@dataclass
class Walk:
    """A guide that was followed: where, and what was printed."""

    folder: Path
    said: str = ""
    lines: list[str] = field(default_factory=list)

    def follow(self, page: Path) -> None:
        for words in commands(page):
            self.run(shortened(words))

    def run(self, words: list[str]) -> None:
        if words[0] != "roadmap":
            subprocess.run(words, cwd=self.folder, check=True)
            return
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, f"{shlex.join(words)}\n{result.output}"
        assert "Traceback" not in result.output
        self.said += result.output
        self.lines += result.stdout.splitlines()


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder to work in, in which fewer letters are drawn, and weights lie that others would download."""
    folder = tmp_path_factory.mktemp("guides")
    drawing = importlib.import_module("roadmap.data.datasets.glyphs")  # a function of that name hides it
    characters = drawing._characters
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("ROADMAP_CACHE", str(folder / "cache"))
        patch.setattr(drawing, "_characters", lambda face: characters(face) & LETTERS)
        torch.save(retriever(ModelSettings("test_resnet"), 32).backbone.state_dict(), "resnet50.pth")
        torch.save(retriever(ModelSettings("test_vit"), 32).backbone.state_dict(), "dinov2_vits14.pth")
        yield folder


@pytest.fixture(scope="module")
def own(elsewhere: Path) -> Walk:
    walk = Walk(elsewhere)
    walk.follow(OWN_PICTURES)
    return walk


def test_own_pictures_become_a_model_a_page_and_vectors(own: Walk) -> None:
    measured = json.loads((own.folder / "metrics.json").read_text())
    summary = json.loads((own.folder / "runs/first/summary.json").read_text())
    assert measured["metrics"] == summary["after"]["PICTURES"]  # as the guide says: the same table again
    assert (own.folder / "retrievals.html").read_text().count("data:image") > 50
    assert (own.folder / "vectors.npz").is_file()


def test_the_run_folder_is_as_described(own: Walk) -> None:
    table = OWN_PICTURES.read_text(encoding="utf-8").partition("## 5")[2].partition("## 6")[0]
    described = re.findall(r"^\| `([\w./]+)` \|", table, re.MULTILINE)
    run = own.folder / "runs" / "first"
    assert all((run / name).exists() for name in described)
    there = {path.name for path in run.iterdir()} - {"checkpoints"}
    assert there <= {Path(name).name for name in described}


def shape(line: str) -> str:
    """A line without its numbers, which are of a longer run."""
    return " ".join(re.sub(r"[\d,.]+", "0", line.removesuffix(" (best)").replace("epochs", "epoch")).split())


@pytest.mark.parametrize("number", range(4))
def test_what_the_guide_shows_is_what_is_printed(own: Walk, number: int) -> None:
    shown = blocks(OWN_PICTURES, "text")[number].splitlines()
    # the tests give these, so that nothing is chosen; and the columns of a table are as wide as their numbers
    given = re.compile(r"  - (epochs|data\.batches)=|.*\.\.\.$|[┏┡┃└]")
    said = {shape(line) for line in own.lines}
    metrics = {line.split("│")[1].strip() for line in own.lines if line.startswith("│")}
    for line in shown:
        if line.startswith("│"):
            assert line.split("│")[1].strip() in metrics
        elif not given.match(line):
            assert shape(line) in said, line
    assert len(shown) >= 2


def test_its_code_runs_on_the_vectors(own: Walk, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(OWN_PICTURES, "python")
    exec(compile(code, "own-pictures.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 5


def strings(path: Path) -> Iterator[str]:
    """The strings of a file that are not its documentation; what is filled in is left out of them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def test_errors_that_are_explained_are_errors_that_there_are() -> None:
    explained = OWN_PICTURES.read_text(encoding="utf-8").partition("## When something goes wrong")[2]
    quoted = re.findall(r"^\| `([^`]+)` \|", explained, re.MULTILINE)
    assert len(quoted) >= 8
    source = [text for path in (ROOT / "src").rglob("*.py") for text in strings(path)]
    for message in quoted:
        parts = [part.strip() for part in message.split("...")]
        assert any(all(part in text for part in parts) for text in source), message


def test_the_guide_to_evaluating_runs(own: Walk) -> None:
    layouts.cub_layout(own.folder)
    walk = Walk(own.folder)
    walk.follow(EVALUATE)
    keys = set(json.loads((own.folder / "cub.json").read_text()))
    assert keys == set(json.loads(blocks(EVALUATE, "json")[0]))
    assert "mAP@R" in walk.said


def test_what_python_says_is_what_the_command_said(own: Walk, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(EVALUATE, "python")
    exec(compile(code, "evaluate.md", "exec"), {})
    first, *others = capsys.readouterr().out.splitlines()
    metrics = json.loads((own.folder / "metrics.json").read_text())["metrics"]
    assert first == f"R@1 {100 * metrics['R@1']:.2f}, mAP@R {100 * metrics['mAP@R']:.2f}"
    assert len(others) == 3


@pytest.mark.parametrize("page", sorted(GUIDES.glob("*.md")), ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert [t for t in targets if "://" not in t and not (page.parent / t.partition("#")[0]).exists()] == []
