"""`roadmap train`, as a person calls it; the engine is replaced by one that notes what it was asked for."""

from __future__ import annotations

import json
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from click.testing import Result
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import roadmap.cli.app as cli
from roadmap.cli.train import job
from roadmap.cli.train_help import EXAMPLES
from roadmap.config.command import command_of
from roadmap.config.composition import settings_from
from roadmap.config.settings import DataSettings, OptimSettings, Settings
from roadmap.engine.auto import unresolved


class Engine(ModuleType):
    """Stands for roadmap.engine: `fit` makes the run folder, remembers, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__("roadmap.engine")
        self.fitted: list[Settings] = []
        self.argv: list[list[str]] = []
        self.fails: Callable[[Settings], BaseException | None] = lambda settings: None

    def fit(self, settings: Settings) -> Path:
        assert not HydraConfig.initialized()
        self.fitted.append(settings)
        self.argv.append(sys.argv)
        failure = self.fails(settings)
        if failure is not None:
            raise failure
        folder = Path(settings.run or f"{settings.out}/{len(self.fitted)}")
        (folder / "checkpoints").mkdir(parents=True, exist_ok=settings.run is None)
        (folder / "config.yaml").write_text(yaml.safe_dump(settings.as_dict()))
        after = {"glyphs": {"R@1": 0.5 + settings.seed / 100, "mAP@R": 0.25}}
        (folder / "summary.json").write_text(json.dumps({"after": after, "best epoch": 3}))
        return folder

    def fit_or_resume(self, settings: Settings) -> Path:
        return self.fit(settings)

    def resume(self, folder: Path, epochs: int | None = None) -> Path:
        failure = self.fails(Settings())
        if failure is not None:
            raise failure
        self.argv.append([str(folder), str(epochs)])
        return folder

    def plan(self, settings: Settings) -> SimpleNamespace:
        return SimpleNamespace(lines=lambda: [f"would train {settings.data.name}", "Nothing was written."])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    stub = Engine()
    monkeypatch.setitem(sys.modules, "roadmap.engine", stub)
    monkeypatch.chdir(tmp_path)
    for name in ("ROADMAP_DEBUG", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    return stub


def called(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["train", *arguments])


def fitted(engine: Engine, *arguments: str) -> Settings:
    result = called(*arguments)
    assert result.exit_code == 0, result.output
    (settings,) = engine.fitted
    engine.fitted.clear()
    return settings


def test_alone_it_trains_on_glyphs(engine: Engine) -> None:
    settings = fitted(engine)
    assert (settings.data.name, settings.model.name, settings.loss["name"]) == ("glyphs", "auto", "roadmap")
    assert settings.loss["rho"] == 100.0
    assert (settings.select.by, settings.epochs, settings.optim.lr) == ("auto", "auto", "auto")
    assert isinstance(settings.data.scale, list)  # plain values, not Hydra's
    assert type(settings.loss) is dict


def test_what_is_typed_counts_more_than_the_recipe(engine: Engine) -> None:
    settings = fitted(engine, "recipe=cub_vits", "loss=supap", "seed=3", "data.root=/birds")
    assert (settings.recipe, settings.loss["name"], settings.seed) == ("cub_vits", "supap", 3)
    assert "lam" not in settings.loss
    assert (settings.model.name, settings.optim.lr, settings.epochs) == ("vit_small_patch14_dinov2", 3e-6, 20)
    # groups, whatever the order, bring all of their values
    settings = fitted(engine, "optim=sgd", "model=resnet50", "recipe=cub_vits", "data.root=/birds", "epochs=2")
    assert (settings.optim.name, settings.optim.lr, settings.optim.schedule) == ("sgd", 0.01, "cosine")
    assert (settings.model.dim, settings.model.pooling, settings.epochs) == (512, "avg", 2)
    assert settings.data.batch_size == 128


def test_what_nobody_decided_is_left_to_the_engine(engine: Engine) -> None:
    settings = fitted(engine, "data=folder", "data.root=/pictures")
    assert unresolved(settings) == unresolved(Settings(data=DataSettings(name="folder", root="/pictures")))
    settings = fitted(engine, "data=folder", "data.root=/pictures", "model=resnet50", "epochs=3")
    assert unresolved(settings) == [*unresolved(settings)[:7], "select.by"]  # of the pictures, and which epoch
    assert fitted(engine, "recipe=cub_vits", "data.root=/birds", "data.image=auto").data.image == "auto"
    left = unresolved(fitted(engine, "recipe=cub_resnet50", "data.root=/birds"))
    assert left == ["data.side"]  # as large as the pictures are cut


REFUSED = {
    "optim.lrr=3": r"unknown setting optim.lrr, did you mean 'optim.lr'\? Settings of optim: name, lr, head_lr, ",
    "lr=3": r"unknown setting lr, did you mean 'optim.lr'\?",
    "batchsize=3": r"unknown setting batchsize, did you mean 'data.batch_size'\?",
    "model.batch_size=3": r"did you mean 'data.batch_size'\?",
    "qqq.zzz=3": r"unknown setting qqq.zzz\. `roadmap train --help` lists every setting",
    "resum=runs/first": r"unknown setting resum, did you mean 'resume'\?",
    "los=supap": r"unknown setting los, did you mean 'loss'\?",
    "+new.key=4": r"unknown setting new.key\. `roadmap",
    "++new.key=4": r"unknown setting new.key\. `roadmap",
    "+optim.lr=4": r"\+optim.lr: there is nothing to add; write optim.lr=... without the \+",
    "~optim.clip": r"~optim.clip: a setting cannot be left out; set it to null",
    "optim@other=sgd": r"unknown setting optim@other",
    "loss=supapp": r"unknown loss 'supapp', did you mean 'supap'\? Options: blackboxap, calibration, ",
    "recipe=cub_vit": r"unknown recipe 'cub_vit', did you mean 'cub_vits'\? Options: cross_entropy, cub_deit, ",
    "loss=3": r"loss is chosen by name, got 3. Options: blackboxap",
    "model=null": r"model is chosen by name, got null",
    "loss={name:supap}": r"loss is chosen by name",
    "data=/my/pictures": r"for pictures of your own write: data=folder data.root=/my/pictures",
    "epochs=ten": r"epochs must be a whole number or auto, got 'ten'",
    "epochs=1.5": r"epochs must be a whole number or auto, got 1.5",
    "epochs=null": r"epochs must be a whole number or auto, got null",
    "data.flip=true": r"data.flip must be a number, got true",
    "model.dim=wide": r"model.dim must be a whole number or null, got 'wide'",
    "model.layer_norm=3.5": r"model.layer_norm must be true or false or auto, got 3.5",
    "data.scale=[0.2,x]": r"data.scale must be a list of numbers, such as \[0.16,1\] or auto, got \[0.2, 'x'\]",
    "data.scale=0.2,1": r"data.scale has several values; .* add -m. If it is one list, write data.scale=\[...\]",
    "seed=1,2": r"seed has several values; to try each in a run of its own, add -m\n",
    "loss.taau=2": r"unknown setting loss.taau of loss=roadmap, did you mean 'loss.tau'\? It has: lam, tau, ",
    "loss=fastap loss.tau=2": r"unknown setting loss.tau of loss=fastap\. It has: bins, include_self",
    "loss.tau=low": r"loss.tau must be a number, got str 'low'",
    "loss.delta=low": r"loss.delta must be a number, got str 'low'",
    "loss.include_self=3": r"loss.include_self must be True or False, got int 3",
    "loss=fastap loss.bins=2.5": r"loss.bins must be an int, got float 2.5",
    "loss.name=supap": r"loss=NAME, not loss.name=NAME",
    "optim.schedule=cosin": r"optim.schedule must be one of constant, .* did you mean 'cosine'\?",
    "epochs=0": r"epochs must be at least 1, got 0",
    "data=cub": r"data.root is missing: give data.root=FOLDER. Caltech-UCSD .* obtained from .* ROOT: images.txt",
    "data=folder": r"data.root is missing: give data.root=FOLDER. ROOT is a folder .* ROOT/CLASS/picture.jpg",
    "data=table": r"data.root is missing: give data.root=FOLDER. ROOT is a .csv or .parquet",
    "data.name=cubb data.root=/x": r"unknown dataset 'cubb', did you mean 'cub'\?",
    "cub_vits": r"'cub_vits' is not understood: settings are written as key=value. For a recipe write recipe=cub_vits",
    "seed=(1": r"'seed=\(1' is not understood .* put special characters in quotes",
    "--loss supap": r"unknown option --loss. Settings are written without dashes, such as loss=VALUE",
    "--cgf job": r"unknown option --cgf, did you mean '--cfg'\?",
    "--package optim": r"--package and --resolve say how the configuration is printed; add --cfg job",
    "--config-dir": r"--config-dir expected one argument",
    "--config-dir /nowhere": r"--config-dir /nowhere is not a folder",
    "hydra.nothing=1": r"Could not override 'hydra.nothing'",
    "resume=runs/1 seed=3": r"resume=FOLDER goes on with the settings of that run; .* epochs=N.*; leave out: seed=3",
    "-m resume=runs/1": r"resume=FOLDER goes on with .*; leave out: -m",
    "resume=runs/1 --dry-run": r"resume=FOLDER goes on with .*; leave out: --dry-run",
    "resume=runs/1 epochs=ten": r"epochs must be a whole number, got 'ten'",
    "data.root=/pictures": r"/pictures needs data=NAME: data=folder data.root=/pictures for your own pictures",
    "-m data.root=/a,/b": r"needs data=NAME",
    "recipe=cub_resnet50_b128": r"unknown recipe 'cub_resnet50_b128'; .* recipe=cub_resnet50 data.batch_size=128",
    "loss.average=al": r"loss.average must be 'violating' or 'all', got 'al'",
    "~data": r"~data: a setting cannot be left out",
    "recipe=null": r"recipe is chosen by name, got null",
    "hydra/launcher=jobli": r"unknown hydra/launcher 'jobli'",
    "--dry-run -m seed=1,2": r"--dry-run is for a single run; leave out -m",
    "-m loss=smoothap,supapp": r"unknown loss 'supapp', did you mean 'supap'\?",
    "-m seed=1,2 epochs=1,ten": r"epochs must be a whole number or auto, got 'ten'",
    "-m optim.lrr=1,2": r"unknown setting optim.lrr, did you mean 'optim.lr'\?",
    "-m optim.schedule=cosine,cosin": r"optim.schedule must be one of .* got 'cosin'",
    "-m epochs=range(0,3)": r"epochs must be at least 1, got 0",
    "-m loss=smoothap,fastap loss.tau=0.1": r"unknown setting loss.tau of loss=fastap",
    "-m data=glyphs,cub": r"data.root is missing: give data.root=FOLDER. Caltech-UCSD",
    "-m seed=1,2 run=here": r"run=FOLDER is for a single run; in a sweep give out=FOLDER",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_mistakes_are_found_before_anything_runs(typed: str, engine: Engine, tmp_path: Path) -> None:
    result = called(*shlex.split(typed))
    assert result.exit_code == 2, result.output
    assert re.search(r"^error: .*" + REFUSED[typed], result.stderr, re.DOTALL)
    assert "Traceback" not in result.output
    assert engine.fitted == []
    assert list(tmp_path.iterdir()) == []


PATHS = [
    "/a (1), b",
    "it's",
    "a=b",
    "a#b;c",
    "back\\",
    "q\\'s",
    "007",
    "1e3",
    "null.jpg",
    "[x]",
    "{y}",
    "ärger/ß",
    " x ",
]


@pytest.mark.parametrize("path", PATHS)
def test_paths_are_read_as_they_are(path: str) -> None:
    for key in ("data.test_sets.cub", "model.weights", "out", "run"):
        assert value_of(f"{key}={path}") == path
    assert value_of(f"data.root={path}", "data=folder") == path


@given(st.text(st.characters(exclude_categories=["C", "Zl", "Zp"], exclude_characters="$"), min_size=1))
def test_any_path_is_read_as_it_is(path: str) -> None:
    assert value_of(f"data.root=/{path}", "data=folder") == f"/{path}"


def value_of(*typed: str) -> object:
    text = command_of(typed).overrides[0]
    return OverridesParser.create().parse_override(text).value()


def test_paths_arrive_as_they_are(engine: Engine) -> None:
    path = "it's (1), [a]=\\"
    settings = fitted(engine, "data=folder", f"data.root={path}", f"data.test_sets.cub={path}", f"run=here/{path}")
    assert (settings.data.root, settings.data.test_sets, settings.run) == (path, {"cub": path}, f"here/{path}")


def test_home_is_expanded_and_null_is_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    assert fitted(engine, "data=folder", "data.root=~/birds").data.root == "/home/ann/birds"
    assert fitted(engine, "data.root=null", "model.dim=null").data.root is None
    assert fitted(engine, "hardware.precision=32").hardware.precision == "32"
    assert fitted(engine, "data=folder", "data.root='quoted, once'").data.root == "quoted, once"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad\nvalue"),
        TypeError("bad type"),
        FileNotFoundError("no such file"),
        ImportError("not installed"),
        RuntimeError("out of memory"),
        FloatingPointError("loss is nan at step 3"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_engine_cannot_do_is_said_without_a_traceback(error: Exception, engine: Engine) -> None:
    engine.fails = lambda settings: error
    result = called()
    assert (result.exit_code, result.stderr) == (1, f"error: {error}\n")
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", ["ROADMAP_DEBUG", "HYDRA_FULL_ERROR"])
def test_tracebacks_can_be_asked_for(name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("bad")
    engine.fails = lambda settings: error
    monkeypatch.setenv(name, "1")
    assert called().exception is error
    monkeypatch.setenv(name, "0")
    assert called().exit_code == 1


def test_our_own_faults_are_not_hidden(engine: Engine) -> None:
    engine.fails = lambda settings: KeyError("forgotten")
    assert isinstance(called().exception, KeyError)


class Stopped(KeyboardInterrupt):
    """What the engine raises when a run was told to stop."""

    exit_code = 143


def test_an_interrupted_run_says_what_is_left(engine: Engine) -> None:
    engine.fails = lambda settings: Stopped("stopped and saved epoch 3. Go on:  roadmap train resume=runs/mine")
    for result in (called(), called("resume=runs/mine")):
        assert result.exit_code == 143
        assert "stopped and saved epoch 3. Go on:  roadmap train resume=runs/mine\n" in result.output
    engine.fails = lambda settings: KeyboardInterrupt()
    result = called()
    assert (result.exit_code, result.output) == (130, "starting   roadmap on glyphs, seed 0\n\nstopped\n")


def test_resume_hands_the_folder_on(engine: Engine) -> None:
    assert called("resume=runs/mine").exit_code == 0
    assert called("resume=runs/mine", "epochs=40").exit_code == 0
    assert engine.argv == [["runs/mine", "None"], ["runs/mine", "40"]]
    engine.fails = lambda settings: FileNotFoundError("runs/mine is not a run")
    result = called("resume=runs/mine")
    assert (result.exit_code, result.stderr) == (1, "error: runs/mine is not a run\n")


def test_a_dry_run_only_tells(engine: Engine, tmp_path: Path) -> None:
    result = called("data=folder", "data.root=/pictures", "--dry-run")
    begun = "starting   roadmap on folder, seed 0\n"
    assert (result.exit_code, result.output) == (0, f"{begun}would train folder\nNothing was written.\n")
    assert engine.fitted == []
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_gives_every_run_a_folder_and_leaves_nothing_else(engine: Engine, tmp_path: Path) -> None:
    before = sys.argv
    result = called("-m", "loss=smoothap,roadmap", "seed=1,2", "data.batch_size=32", "out=my runs")
    assert result.exit_code == 0, result.output
    assert sys.argv is before
    (sweep,) = (tmp_path / "my runs").iterdir()
    assert sorted(path.name for path in sweep.iterdir()) == [
        *sorted(f"loss={loss},seed={seed}" for loss in ("smoothap", "roadmap") for seed in (1, 2)),
        "multirun.yaml",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my runs"]
    assert {(s.loss["name"], s.seed, s.data.batch_size) for s in engine.fitted} == {
        (loss, seed, 32) for loss in ("smoothap", "roadmap") for seed in (1, 2)
    }
    for settings, argv in zip(engine.fitted, engine.argv, strict=True):
        # several devices run this again: alone, into the same folder
        again = settings_from(command_of(argv[2:]).overrides)
        assert argv[1] == "train"
        assert (again.loss, again.seed, again.run) == (settings.loss, settings.seed, settings.run)
    assert f"All runs are in my runs/{sweep.name}" in result.output
    assert TABLE in result.output


TABLE = """
run                   R@1    mAP@R  best epoch
loss=roadmap,seed=1   51.00  25.00  3
loss=roadmap,seed=2   52.00  25.00  3
loss=smoothap,seed=1  51.00  25.00  3
loss=smoothap,seed=2  52.00  25.00  3
All runs are in """


def test_a_failing_run_does_not_stop_the_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.fails = lambda settings: ValueError("bad luck") if settings.seed == 1 else None
    result = called("-m", "seed=1,2")
    assert result.exit_code == 1
    assert [settings.seed for settings in engine.fitted] == [1, 2]
    assert result.stderr.startswith("error: seed=1: bad luck\n")
    assert result.stderr.endswith("error: not every run of the sweep was finished; see above: seed=1: bad luck\n")
    assert "Traceback" not in result.output
    assert "What could be run is in runs/sweep_" in result.output
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    shown = called("-m", "seed=1")
    assert str(shown.exception) == "bad luck"
    engine.fails = lambda settings: KeyboardInterrupt()
    assert called("-m", "seed=1").exit_code == 130


@pytest.mark.parametrize("name", ["it's", "a\\'b", "back\\", "two [words]"])
def test_a_sweep_goes_to_a_folder_of_any_name(name: str, engine: Engine, tmp_path: Path) -> None:
    result = called("-m", "seed=1,2", f"out={name}")
    assert result.exit_code == 0, result.output
    (sweep,) = (tmp_path / name).iterdir()
    assert [fitted.run for fitted in engine.fitted] == [f"{name}/{sweep.name}/seed={seed}" for seed in (1, 2)]


def test_folders_of_a_sweep_have_possible_names(engine: Engine) -> None:
    assert called("-m", "model.weights=/a/b.pth,/c/d e.pth", "hydra.sweep.dir=here").exit_code == 0
    assert [settings.run for settings in engine.fitted] == [
        "here/model.weights=_a_b.pth",
        "here/model.weights=_c_d_e.pth",
    ]
    assert [settings.model.weights for settings in engine.fitted] == ["/a/b.pth", "/c/d e.pth"]
    engine.fitted.clear()
    long = "x" * 300
    assert called("-m", f"model.weights=/{long}1,/{long}2").exit_code == 0
    assert len({settings.run for settings in engine.fitted}) == 2
    assert all(len(Path(settings.run or "").name) < 255 for settings in engine.fitted)


def test_a_job_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(job)) is job


def test_the_configuration_can_be_looked_at(engine: Engine, tmp_path: Path) -> None:
    result = called("--cfg", "job", "recipe=cub_vits", "loss=supap")  # no root needed to look
    assert result.exit_code == 0, result.output
    assert Settings.from_dict(yaml.safe_load(result.output)) == settings_from(["recipe=cub_vits", "loss=supap"])
    assert engine.fitted == []
    assert list(tmp_path.iterdir()) == []


def test_recipes_of_ones_own(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "mine/recipe").mkdir(parents=True)
    (tmp_path / "mine/recipe/quick.yaml").write_text(
        "# @package _global_\n# Quick\ndefaults:\n  - override /loss: fastap\n\nrecipe: quick\nepochs: 2\n"
    )
    for arguments in (["--config-dir", "mine"], ["-m", "--config-dir", "mine", "seed=1,2"]):
        assert called("recipe=quick", *arguments, "loss.bins=5").exit_code == 0
        assert engine.fitted[0].run is None
        for settings in engine.fitted:
            assert (settings.recipe, settings.epochs, settings.loss["bins"]) == ("quick", 2, 5)
    assert len(engine.fitted) == 3
    assert "--config-dir=" in str(engine.argv[-1])
    (tmp_path / "mine/model").mkdir()
    (tmp_path / "mine/model/wide.yaml").write_text("# Wide\nname: small_cnn\ndim: 512\n")
    assert called("--config-dir=mine", "model=wide").exit_code == 0  # no optimiser of that name is needed
    settings = engine.fitted[-1]
    assert (settings.model.dim, settings.optim) == (512, OptimSettings(lr="auto"))  # type: ignore[arg-type]


@pytest.mark.parametrize("command", EXAMPLES.values())
def test_the_examples_work(command: str, engine: Engine) -> None:
    program, verb, *arguments = shlex.split(command)
    assert (program, verb) == ("roadmap", "train")
    if "-m" in arguments:  # nine runs would take long; sweeps are run above
        request = command_of(arguments)
        assert [len(values) for values in request.swept.values()] == [3, 3]
        assert all(settings_from(overrides).data.root == "CUB_200_2011" for overrides in request.covering()[:1])
    else:
        assert called(*arguments).exit_code == 0


def test_hydra_is_imported_only_when_a_run_is_asked_for() -> None:
    names = "('hydra', 'omegaconf', 'torch', 'rich.table')"
    code = f"import sys, roadmap.cli.app; print([m for m in {names} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_without_hydra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if re.match(r"hydra|roadmap\.(config|cli\.train)", name)]:
        monkeypatch.delitem(sys.modules, name)

    class Blocker:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "hydra":
                raise ModuleNotFoundError("No module named 'hydra'", name="hydra")

    monkeypatch.setattr(sys, "meta_path", [Blocker(), *sys.meta_path])
    result = called()
    assert result.exit_code == 1
    assert "error: training needs hydra: pip install 'roadmap-retrieval[train]'" in result.stderr


def test_a_word_of_the_verb_is_in_the_list() -> None:
    assert "train" in CliRunner().invoke(cli.app, ["--help"]).output
