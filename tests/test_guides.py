"""The guides are true: their commands run in the order in which they stand, and give the files that they promise."""

from __future__ import annotations

import ast
import csv
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
import yaml
from typer.testing import CliRunner

from roadmap.cli.app import app
from roadmap.config.settings import ModelSettings
from roadmap.models import retriever

from .data import layouts
from .waiting import PATIENCE

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "docs" / "guides"
GUIDE_NAMES = ("own-pictures", "evaluate", "own-loop", "cluster", "search")
OWN_PICTURES, EVALUATE, OWN_LOOP, CLUSTER, SEARCH = (GUIDES / f"{name}.md" for name in GUIDE_NAMES)
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
    if words[:2] == ["roadmap", "train"] and not any(word.startswith("resume=") for word in words):
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


def content_of(address: str) -> str:
    """What is served there, once it answers: the address is told a moment before."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            with urlopen(address, timeout=PATIENCE) as page:
                return str(page.read().decode())
        except URLError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def test_five_commands_lead_to_a_search(own: Walk, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(own.folder / "runs" / "first")
    walk = Walk(own.folder)
    walk.follow(SEARCH)
    shown = {line.split()[0] for line in blocks(SEARCH, "text")[0].splitlines()}
    assert shown <= {line.split()[0] for line in walk.lines if line.strip()}
    assert (own.folder / "found.html").read_text().count("data:image/png") == 11
    assert (own.folder / "found.png").is_file()
    served = re.search(r"^roadmap serve (\S+)$", "\n".join(blocks(SEARCH, "console")), re.MULTILINE)
    assert served is not None
    command = [sys.executable, "-m", "roadmap", "serve", served[1], "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=own.folder, env=environment, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            (address,) = (line.split()[1] for line in islice(serving.stdout, 2) if line.startswith("page"))
            assert "<html" in content_of(address)
        finally:
            serving.terminate()
    (code,) = blocks(SEARCH, "python")
    exec(compile(code, "search.md", "exec"), {})
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "1.000 U+0416/DejaVuSans.png"
    assert "U+0416" not in last


def test_the_compose_file_is_whole() -> None:
    whole = yaml.safe_load((ROOT / "examples" / "milvus" / "compose.yaml").read_text())
    services = whole["services"]
    assert {"etcd", "minio", "pulsar", "proxy", "querynode", "datanode", "indexnode"} <= services.keys()
    for name, service in services.items():
        assert not service["image"].endswith("latest")
        assert set(service.get("depends_on", ())) <= services.keys(), name


def test_a_loop_of_ones_own_runs_in_two_processes(tmp_path: Path) -> None:
    """As printed, but for the sizes in one line and a tiny network without its weights."""
    (code,) = blocks(OWN_LOOP, "python")
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 40
    sizes = next(line for line in lines if line.startswith("MODEL, SIDE"))
    small = 'MODEL, SIDE, BATCH, CHUNK, REMEMBERED, EPOCHS = "test_vit", 160, 8, 3, 10, 2'
    code = (
        code.replace(sizes, small)
        .replace("pretrained=True", "pretrained=False")
        .replace("num_workers=4", "num_workers=0")
    )
    script = tmp_path / "train.py"
    script.write_text(code)
    layouts.folder_layout(tmp_path / "PICTURES", classes=4, pictures=4, size=(40, 30))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr
    assert re.findall(r"^epoch (\d): loss 0\.\d+$", run.stdout, re.MULTILINE) == ["1", "2"]
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert len(state["memory"]["ring.order"]) == 10  # of 16 pictures that came, in 2 epochs of 2 batches
    assert all(value.isfinite().all() for value in state["model"].values())


def test_the_guide_to_clusters_runs(own: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    for words in commands(CLUSTER):
        if words[0] == "torchrun":
            launcher, place = [sys.executable, "-m", "torch.distributed.run"], words.index("roadmap")
            own.run([*launcher, *words[1:place], *shortened(words[place:])])
        else:
            own.run(shortened(words))
    for name in ("limited", "two"):
        assert json.loads((own.folder / "runs" / name / "summary.json").read_text())["steps"] == 2
    (program,) = blocks(CLUSTER, "python")
    compile(program, "sweep.py", "exec")  # tests/cluster/sweep.py runs it, with the commands for Slurm


def test_gains_of_better_answers_are_those_that_were_measured() -> None:
    with (ROOT / "benchmarks" / "results" / "answers.csv").open(newline="", encoding="utf-8") as file:
        measured = {row["option"]: row for row in csv.DictReader(file)}
    told = re.findall(
        r"^\| ([\w, ]+) \| ([\d.]+) \| ([+-][\d.]+) \| ([\d.]+) \| ([+-][\d.]+) \|$", SEARCH.read_text(), re.M
    )
    assert len(told) == 7
    for option, *numbers in told:
        assert numbers == [measured[option][column] for column in ("R@1", "R@1 gain", "mAP@R", "mAP@R gain")]


def test_what_int8_costs_is_what_was_measured() -> None:
    with (ROOT / "benchmarks" / "results" / "export.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = ("form", "R@1", "R@1 change", "mAP@R", "mAP@R change", "MB")
    measured = [tuple(row[column] for column in columns) for row in rows]
    told = re.findall(
        r"^\| (torch|float32|int8) \| ([\d.]+) \| ([+-][\d.]+) \| ([\d.]+) \| ([+-][\d.]+) \| ?([\d.]*) ?\|$",
        SEARCH.read_text(),
        re.M,
    )
    assert told == measured
