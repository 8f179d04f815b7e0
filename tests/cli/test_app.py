"""The command itself: its version, its help, its other name, and how soon it says what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roadmap import __version__
from roadmap.cli.app import app

from ..engine.worlds import write_classes

SOURCE = Path(__file__).parents[2] / "src"
ALONE = """
import sys
from typer.testing import CliRunner
from roadmap.cli.app import app
result = CliRunner().invoke(app, sys.argv[1:])
print(result.exit_code, "torch" in sys.modules, result.stderr.strip())
"""


def python(*arguments: str, folder: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"roadmap {__version__}\n")
    assert python("-m", "roadmap", "--version") == f"roadmap {__version__}"


VERBS = [
    "embed",
    "evaluate",
    "index",
    "search",
    "export",
    "serve",
    "compare",
    "gap",
    "reproduce",
    "report",
    "data",
    "train",
]


@pytest.mark.parametrize("verb", [[], *([name] for name in VERBS), ["data", "check"]])
def test_both_ways_to_ask_for_help(verb: list[str]) -> None:
    short, long = (CliRunner().invoke(app, [*verb, option]) for option in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0
    assert short.output == long.output
    assert len(short.output) > 200


def test_the_help_fits_a_narrow_terminal() -> None:
    """Lines break where the terminal ends, not where the source does; examples stand below one another."""
    shown = CliRunner().invoke(app, ["evaluate", "--help"], env={"COLUMNS": "60", "TERMINAL_WIDTH": "60"}).output
    prose = [line.strip() for line in shown.partition("Arguments")[0].splitlines()]
    first = prose.index("roadmap evaluate vectors.npz --json metrics.json")
    assert prose[first + 1] == "roadmap evaluate runs/first --page retrievals.html"
    paragraph = prose[next(i for i, line in enumerate(prose) if line.startswith("A model is evaluated")) : first - 1]
    assert len(paragraph) > 5
    assert all(len(line) > 45 for line in paragraph[:-1])


def test_without_a_verb_the_help_is_shown() -> None:
    assert "evaluate" in python("-m", "roadmap", "--help")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["embed", "absent/run", "--out", "v.npz"], "there is no run folder or checkpoint absent/run"),
        (["embed", ".", "--out", "v.txt"], "--out v.txt must end in .npz or .safetensors"),
        (["evaluate", "."], ". is not a run: it has no config.yaml"),
        (["evaluate", "resnet50"], "--data is missing: which pictures?"),
        (["evaluate", "resnet50", "--data", "cup"], "unknown dataset 'cup', did you mean 'cub'?"),
        (["evaluate", "resnet50", "--data", "cub"], "--root is missing: give --root FOLDER. Caltech"),
        (["evaluate", "resnet50", "--data", "cub", "--root", "absent"], "absent is not a folder or a file that exists"),
        (["evaluate", "resnet50", "--data", "glyphs", "--precision", "8"], "--precision must be one of auto, 32, bf16"),
        (["evaluate", "resnet50", "--data", "glyphs", "--ks", "one"], "--ks must be whole numbers with commas between"),
        (["evaluate", "v.npz", "--page", "p.html"], "--page cannot be used: v.npz holds vectors"),
        (["index", "absent/run", ".", "-o", "i"], "there is no run folder or checkpoint absent/run"),
        (["index", "resnet50", "absent", "-o", "i"], "absent is not a folder or a table that exists"),
        (["search", "absent", "q.png"], "absent holds no index; make one"),
        (["search", ".", "q.png", "--box", "1,2"], "--box must be X,Y,W,H in pixels"),
        (["export", "resnet50", "-o", "m.pt"], "--out m.pt must end in .onnx"),
        (["evaluate", "v.npz", "--expand", "-3"], "--expand must be 0 or more, got -3"),
        (["evaluate", "v.npz", "--memory", "much"], "--memory must be a number with B, KB, MB or GB"),
    ],
)
def test_what_can_be_told_at_once_is(arguments: list[str], said: str, tmp_path: Path) -> None:
    """torch takes two seconds to import; a misspelt name does not wait for it."""
    found = python("-c", ALONE, *arguments, folder=tmp_path)
    assert found.startswith("1 False error: ")
    assert said in found


@pytest.mark.parametrize("words", [["evaluate"], ["embed", "--out", "v.npz"], ["report"]])
def test_a_misspelt_run_is_told_from_those_that_are_there(words: list[str], tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    said = python("-c", ALONE, *words, "runs/frist", folder=tmp_path)
    assert "1 False error: there is no run folder" in said
    assert "runs/frist, did you mean 'runs/first'?" in said
    assert "runs is not a run but holds 2; name one of them, such as runs/first" in python(
        "-c", ALONE, *words, "runs", folder=tmp_path
    )


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (["train", "recipe=glyphs", "loss=supap", "seed=3"], "starting   recipe glyphs: supap on glyphs, seed 3"),
        (["train", "-m", "seed=0,1", "out={folder}"], "starting   a sweep"),
        (["train", "resume={folder}"], "going on   {folder}"),
        (["evaluate", "resnet50", "--data", "glyphs"], "opening    resnet50"),
        (["embed", "resnet50", "--data", "glyphs", "--out", "{folder}/v.npz"], "opening    resnet50"),
        (["evaluate", "v.npz"], "reading    v.npz"),
        (["index", "resnet50", "{folder}", "-o", "i"], "opening    resnet50"),
        (["gap", "v.npz"], "comparing  batches with the whole: v.npz"),
    ],
)
def test_the_first_line_comes_before_torch(typed: list[str], line: str, tmp_path: Path) -> None:
    """Importing it takes seconds; here it cannot be imported at all."""
    without = "import sys; sys.modules['torch'] = None\n" + ALONE + "print(result.stdout)"
    found = python("-c", without, *(word.format(folder=tmp_path) for word in typed), folder=tmp_path)
    said, begun = found.splitlines()
    assert begun == line.format(folder=tmp_path)
    assert "error: " in said
    assert "torch" in said


COMPILER = {"torch._inductor.compile_fx", "torch._inductor.codegen"}
HEAVY = COMPILER | {"torchvision", "timm", "huggingface_hub", "matplotlib", "scipy", "sklearn", "pandas", "pyarrow"}
TRAINING = {"hydra", "omegaconf", "tensorboard", "torch._dynamo"}  # torch's optimisers import the last
OWN = {"torchvision", "timm", "huggingface_hub", "torch._dynamo"}  # timm imports the others
RANDOM = ["--weights", "random", "--data", "folder", "--root", "pictures"]
TINY = ["data=folder", "data.root=pictures", "model=small_cnn", "epochs=1", "data.batches=1", "data.batch_size=8"]


@pytest.mark.parametrize(
    ("typed", "unused"),
    [
        (["embed", "small_cnn", *RANDOM, "--out", "v.npz"], HEAVY | TRAINING),
        (["evaluate", "small_cnn", *RANDOM], HEAVY | TRAINING),
        (["evaluate", "vit_tiny_patch16_224", "--image", "32", *RANDOM], (HEAVY | TRAINING) - OWN),
        (["train", *TINY, "run=run"], HEAVY),
    ],
    ids=["embed", "evaluate", "evaluate timm", "train"],
)
def test_a_command_imports_neither_a_compiler_nor_what_it_does_not_use(
    typed: list[str], unused: set[str], tmp_path: Path
) -> None:
    """Each takes about as long as torch itself."""
    write_classes(tmp_path / "pictures", range(8))
    shown = ALONE.replace("result.stderr.strip()", f"*sorted({unused!r} & set(sys.modules))")
    assert python("-c", shown, *typed, folder=tmp_path).splitlines()[-1] == "0 True"


LEAVING = """
import atexit, concurrent.futures, sys, threading, time
import roadmap.cli.app as command

def ending(prog_name):
    pool = concurrent.futures.ThreadPoolExecutor(1)  # that nobody shuts down
    printed = threading.Event()
    threading.Thread(target=lambda: (printed.wait(60), time.sleep(0.1), print("a thread"))).start()
    pool.submit(lambda: (time.sleep(0.1), print("a pool"), printed.set()))
    atexit.register(print, "a handler")
    sys.exit({code})

command.app = ending
command.main()
"""


@pytest.mark.parametrize(
    ("code", "left", "said"), [("None", 0, ""), ("3", 3, ""), ("'no such thing'", 1, "no such thing\n")]
)
def test_what_is_under_way_is_finished_before_the_command_leaves(code: str, left: int, said: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LEAVING.replace("{code}", code)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (left, said)
    assert ran.stdout.splitlines() == ["a pool", "a thread", "a handler"]


INTERRUPTED = """
import sys

class CtrlC:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
from roadmap.__main__ import main
sys.argv[1:] = {words!r}
main()
"""


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        ("typer", [], ""),
        ("roadmap.cli.report", [], ""),
        ("roadmap.encoder", ["evaluate", "small_cnn", "--data", "glyphs"], "stopped"),
        ("roadmap.data.checking", ["data", "check", "folder", "."], "stopped"),
        (
            "roadmap.search",
            ["index", "small_cnn", ".", "-o", "i"],
            "stopped; the same command goes on with what is left",
        ),
        ("roadmap.experiments.definitions", ["reproduce"], "stopped; the same command goes on with what is left"),
        ("roadmap.engine", ["train"], ""),
    ],
)
def test_ctrl_c_leaves_without_a_traceback_at_any_moment(module: str, words: list[str], said: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(module=module, words=words)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr.strip()) == (130, said)


ABSENT = """
import sys

class Absent:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from roadmap.__main__ import main
sys.argv[1:] = {words!r}
main()
"""


@pytest.mark.parametrize(
    ("modules", "words", "said"),
    [
        (["typer", "rich"], ["--help"], "error: the command line needs typer: pip install 'roadmap-retrieval[train]'"),
        (
            ["onnx"],
            ["export", "small_cnn", "-o", "m.onnx"],
            "error: this needs onnx: pip install 'roadmap-retrieval[export]'",
        ),
        (["fastapi"], ["serve", "i"], "error: serving needs fastapi: pip install 'roadmap-retrieval[serve]'"),
        (["hydra"], ["train"], "error: training needs hydra: pip install 'roadmap-retrieval[train]'"),
        (
            ["PIL"],
            ["evaluate", "small_cnn", "--data", "glyphs"],
            "error: this needs PIL: pip install 'roadmap-retrieval[train]'",
        ),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(modules: list[str], words: list[str], said: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ABSENT.format(modules=modules, words=words)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr.strip()) == (1, said)


@pytest.mark.parametrize("words", [["train", "--help"], ["evaluate", "--help"], ["reproduce"]])
def test_nobody_is_told_of_a_reader_who_left(words: list[str]) -> None:
    """As in `roadmap train --help | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(
        [sys.executable, "-m", "roadmap", *words],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert ran.stderr == ""
