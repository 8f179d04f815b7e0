"""The README is true: its code runs, its commands are what they say, its links lead somewhere."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LOSSES = ["ROADMAP", "SupAP", "Calibration", "SmoothAP", "FastAP", "SoftBinAP", "BlackBoxAP", "average_precision"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small only lose by being shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


def recipe(target: str) -> list[str]:
    """The commands that make runs for `target` once everything is installed."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    # An old file cannot be newer than the stamp: only the target's own recipe is left.
    dry = ["make", "--dry-run", "--no-print-directory", "--old-file=.venv/.installed", target]
    # A make that runs these tests passes its own flags on, which would confuse this one.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    return [line for line in done.stdout.splitlines() if line.strip()]


def test_its_code_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(blocks("python")) == 3
    names: dict[str, Any] = {}
    for block in blocks("python"):  # one after the other, as a reader would
        exec(compile(block, "README.md", "exec"), names)
    assert names["value"].item() > 0
    assert names["model"].weight.grad.abs().max() > 0
    assert "'mAP@R':" in capsys.readouterr().out


def test_its_loop_trains() -> None:
    """The same code, given batches that can be learnt, lowers the loss."""
    code = blocks("python")[0].replace("range(3)", "range(1)")
    names: dict[str, Any] = {}
    exec(compile(code.replace("in batches:", "in batches * 40:"), "README.md", "exec"), names)
    pictures, labels = names["batches"][0]
    fresh = type(names["model"])(64, 16)
    assert names["loss"](names["model"](pictures), labels) < names["loss"](fresh(pictures), labels) / 2


def test_these_are_its_commands() -> None:
    assert commands() == [
        "make demo",
        "make test",
        "pip install '.[train]'",
        "roadmap train data=folder data.root=PICTURES",
        "roadmap train recipe=cub_vits data.root=CUB_200_2011",
        "roadmap evaluate runs/NAME --page retrievals.html",
        "roadmap report runs/NAME -o report.html",
        "roadmap index runs/NAME PICTURES -o INDEX",
        "roadmap serve INDEX",
        "pip install .",
        "roadmap train -m data=folder data.root=PICTURES loss=smoothap,roadmap seed=0,1,2",
        "roadmap compare runs/sweep_*",
        "roadmap reproduce table3 --dataset glyphs --seeds 2",
    ]


def test_make_demo_is_the_demonstration() -> None:
    """Its own tests run it (tests/test_demo.py)."""
    (line,) = recipe("demo")
    assert shlex.split(line) == [".venv/bin/python", "-m", "roadmap.demo", "--out", "demo"]


def test_the_commands_on_ones_own_pictures_run(tmp_path: Path) -> None:
    """As printed, on few pictures, with the smallest of networks and two steps; the service is started by the test of
    its guide, and what the paper's table would take is only asked."""
    from PIL import Image

    _draw_pictures(tmp_path / "PICTURES")
    few = ["epochs=1", "data.batches=2", "hardware.device=cpu"]
    short = {"train": [*few, "run=runs/NAME"], "train -m": [*few, "seed=0"], "reproduce": ["--dry-run"]}
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "ROADMAP_CACHE": str(tmp_path / "cache")}
    left_out = ("recipe=", "roadmap serve")
    for command in [c for c in commands() if c.startswith("roadmap ") and not any(part in c for part in left_out)]:
        words = [found for word in shlex.split(command)[1:] for found in _as_a_shell_would(word, tmp_path)]
        more = short.get("train -m" if "-m" in words else words[0], [])
        line = [sys.executable, "-c", "from roadmap.cli.app import app; app()", *words, *more]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    assert (tmp_path / "runs" / "NAME" / "checkpoints" / "best.safetensors").is_file()
    assert (tmp_path / "retrievals.html").is_file()
    assert (tmp_path / "report.html").is_file()
    assert (tmp_path / "INDEX").is_dir()
    (code,) = blocks("py")  # the same from Python, on the run that was just made
    for i, name in enumerate(("a.jpg", "b.jpg")):
        Image.open(tmp_path / "PICTURES" / "class 0" / f"{i}.png").save(tmp_path / name)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    trained = json.loads((tmp_path / "runs" / "NAME" / "summary.json").read_text())["after"]
    (measured,) = trained.values()
    assert ast.literal_eval(done.stdout)["mAP@R"] == measured["mAP@R"]


def _as_a_shell_would(word: str, folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.glob(word)) if "*" in word else [word]


def _draw_pictures(folder: Path) -> None:
    """Six classes of eight pictures of 24 pixels: a colour each, and noise."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for label in range(6):
        (folder / f"class {label}").mkdir(parents=True)
        for i in range(8):
            noise = random.integers(0, 60, (24, 24, 3))
            noise[:, :, label % 3] += 30 * (label + 1)
            Image.fromarray(noise.astype("uint8")).save(folder / f"class {label}" / f"{i}.png")


def test_the_number_of_recipes_is_right() -> None:
    recipes = list((ROOT / "src" / "roadmap" / "config" / "groups" / "recipe").glob("*.yaml"))
    assert f"one of {len(recipes)} recipes" in README


def test_make_test_checks_style_types_and_tests_and_is_what_runs_elsewhere() -> None:
    lines = recipe("test")
    assert lines[-1] == ".venv/bin/python -m pytest --numprocesses auto"
    assert [Path(line.split()[0]).name for line in lines[:-1]] == ["ruff", "ruff", "mypy"]
    script = ROOT / ".ci" / "run"
    assert script.read_text(encoding="utf-8").splitlines()[-1] == "make test"
    assert os.access(script, os.X_OK)


def test_each_target_installs_first() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    install = re.search(r"^\$\(STAMP\): pyproject.toml constraints.txt\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert install is not None
    assert "-m venv" in install[1]
    assert "--constraint constraints.txt --editable '.[dev]'" in install[1]
    for target, first in (("demo", "$(STAMP)"), ("toy", "$(STAMP)"), ("lint", "$(STAMP)"), ("test", "lint")):
        assert re.search(rf"^{target}: {re.escape(first)}", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t.partition("#")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page: Path) -> None:
    """`page.md#heading`, as it is spelt in an address."""
    targets = re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", page.read_text(encoding="utf-8"))
    missing = []
    for file, _, heading in (target.partition("#") for target in targets if "://" not in target):
        found = page.parent / file if file else page
        if found.suffix == ".md" and heading not in headings(found):
            missing.append(f"{file}#{heading}")
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    """`tests/...`, `docs/...` and the like; names that stand for many (`NAME`, `*`) are left out."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w/.])((?:tests|src|benchmarks|docs|experiments|examples)/[\w./-]*\w)(?![\w*{])", text)
    places = [ROOT, ROOT / "src" / "roadmap"]
    written = [name for name in named if "NAME" not in name]
    assert [n for n in written if not any((p / f"{n}{end}").exists() for p in places for end in ("", ".py"))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_choices_that_are_named_are_there(page: Path) -> None:
    """`loss=NAME`, `recipe=ONE,OTHER` and the like are files of the groups; `recipe=mine` is the reader's."""
    groups = ROOT / "src" / "roadmap" / "config" / "groups"
    text = re.sub(r"^```py.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    groups_of_settings = "|".join(sorted(folder.name for folder in groups.iterdir() if folder.is_dir()))
    named = re.findall(rf"(?<![\w./])({groups_of_settings})=([a-z]\w*(?:,[a-z]\w*\b(?!=))*)", text)
    chosen = [(group, name) for group, names in named for name in names.split(",") if name != "mine"]
    assert [f"{group}={name}" for group, name in chosen if not (groups / group / f"{name}.yaml").is_file()] == []


def headings(page: Path) -> set[str]:
    """Of a page, as they are spelt in addresses: small letters, hyphens for spaces, nothing else."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = (re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", prose, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_what_it_says_is_here_can_be_imported() -> None:
    import roadmap.losses

    for name in LOSSES:
        assert f"`{name}`" in README
        assert hasattr(roadmap.losses, name)
    for module in re.findall(r"`(roadmap(?:\.\w+)+)`", README):
        path = ROOT / "src" / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), module


def test_constraints_pin_every_requirement_exactly_and_name_no_address() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    for line in lines:
        assert re.fullmatch(r'[a-z0-9.-]+==[\w.]+( ; python_version (<|>=) "3\.\d+")?', line), line
    pinned = {line.partition("==")[0] for line in lines}
    requirements = re.findall(r'"([A-Za-z][\w.-]*)>=[\d.]+"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert {"torch", "numpy", "pytest"} <= set(requirements)
    assert {name.lower().replace("_", "-") for name in requirements} <= pinned
