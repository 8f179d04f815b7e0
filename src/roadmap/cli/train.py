"""`roadmap train`: what was typed is checked, composed by Hydra, and handed to the engine; sweeps are Hydra's."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
import typer
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from roadmap.config.composition import check_root, composed, plain
from roadmap.config.parsing import key_of
from roadmap.config.request import Request, catalogue_with, given_keys, understood
from roadmap.config.settings import Settings

DONE, FAILED, NOT_UNDERSTOOD, INTERRUPTED = 0, 1, 2, 130
# What the engine raises with a message for a person; anything else is a fault of ours and shows its traceback.
EXPECTED = (ValueError, TypeError, OSError, ImportError, RuntimeError, ArithmeticError)
DEBUG, HYDRAS_DEBUG = "ROADMAP_DEBUG", "HYDRA_FULL_ERROR"
RESUME = "resume="
LONGEST_NAME = 200  # of a folder, in characters; file systems allow some 255 bytes


def train(arguments: Sequence[str]) -> int:
    """Does what `roadmap train ARGUMENTS` asks for; gives the exit code."""
    if any(argument in ("-h", "--help") for argument in arguments):
        from roadmap.cli.train_help import print_help

        print_help()
        return DONE
    if any(argument.startswith(RESUME) for argument in arguments):
        return _resumed(arguments)
    try:
        request = understood(arguments)
        settings = _rehearsed(request)
    except ValueError as error:
        return _refusal(error, NOT_UNDERSTOOD)
    through_hydra = request.sweeps or request.looks
    return _with_hydra(request, settings) if through_hydra else _fitted(request, settings)


def _rehearsed(request: Request) -> Settings:
    """The settings of the first run. All runs are composed so that every value of a sweep comes once: a mistake in
    the last of them is found before the first begins."""
    runs = [composed(overrides, request.folder) for overrides in request.covering()]
    if not request.looks:  # which needs no pictures
        for settings in runs:
            check_root(settings)
    if request.sweeps and runs[0].run is not None:
        raise ValueError("run=FOLDER is for a single run; in a sweep give out=FOLDER, and every run gets its own in it")
    return runs[0]


def _fitted(request: Request, settings: Settings) -> int:
    began = time.time()
    with _reported() as outcome:
        from roadmap.engine import fit

        fit(settings, given_keys(request.overrides, request.catalogue))
    if outcome == [INTERRUPTED]:
        _say_what_is_left(_folder_of(settings, began))
    return outcome[0]


def _resumed(arguments: Sequence[str]) -> int:
    others = [argument for argument in arguments if not argument.startswith(RESUME)]
    if others or len(arguments) > 1:
        said = f"resume=FOLDER goes on with the settings of that run, alone; leave out: {' '.join(others)}"
        return _refusal(ValueError(said), NOT_UNDERSTOOD)
    folder = Path(os.path.expanduser(arguments[0].removeprefix(RESUME)))
    with _reported() as outcome:
        from roadmap.engine import resume

        resume(folder)
    if outcome == [INTERRUPTED]:
        _say_what_is_left(folder)
    return outcome[0]


def _with_hydra(request: Request, settings: Settings) -> int:
    """Sweeps, `--cfg` and the like: Hydra's own command line, told where to put things."""
    folder, extra = Path(settings.out) / time.strftime("sweep_%Y-%m-%d_%H-%M-%S"), []
    typed = [key_of(override) for override in request.overrides]
    if request.sweeps:
        fixed = [key for key in typed if key not in request.swept]
        extra.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]")
        if "hydra.sweep.dir" not in typed:
            extra.append(f"hydra.sweep.dir='{folder}'")
    command = hydra.main("pkg://roadmap.config.groups", "config", version_base="1.3")(job)
    with _reported() as outcome, _arguments([*request.flags, *request.overrides, *extra]), _errors_from_hydra():
        command()
    if request.sweeps and folder.is_dir():
        said = {DONE: "All runs are in", INTERRUPTED: "stopped; what is finished is in"}
        typer.echo(f"{said.get(outcome[0], 'What could be run is in')} {folder}")
    return outcome[0]


def job(config: DictConfig) -> str:
    """One run of a sweep; at module level, so that launchers can send it to other processes and machines."""
    context = HydraConfig.get()
    settings, overrides = plain(config), list(context.overrides.task)
    own = [source.path for source in context.runtime.config_sources if source.provider == "command-line"]
    given = given_keys(overrides, catalogue_with(Path(own[0]) if own else None))
    name = re.sub(r"[^\w.,=+-]+", "_", context.job.override_dirname)
    if not 0 < len(name) <= LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}{context.job.num}"
    settings.run = str(Path(context.sweep.dir) / name)
    typer.secho(f"\n{context.job.override_dirname}  ->  {settings.run}", bold=True)
    typed = ["train", *(f"--config-dir={folder}" for folder in own), *overrides, f"run={settings.run}"]
    with _outside_hydra(typed):
        try:
            from roadmap.engine import fit

            return str(fit(settings, given))
        except EXPECTED as error:
            if _debugging():
                raise
            said = f"{context.job.override_dirname}: {error}"
            _refusal(said, FAILED)
            # plain, so that any launcher can carry it; what went wrong stands above
            raise RuntimeError(f"not every run of the sweep was finished; see above: {said}") from None


@contextmanager
def _reported() -> Iterator[list[int]]:
    """Runs what is inside; the list it gives then holds the exit code. Expected errors are told, not thrown."""
    outcome = [DONE]
    try:
        yield outcome
    except KeyboardInterrupt:
        outcome[0] = INTERRUPTED
    except SystemExit as left:  # Hydra's own refusals
        outcome[0] = left.code if isinstance(left.code, int) else FAILED
    except EXPECTED as error:
        if _debugging():
            raise
        outcome[0] = _refusal(error, FAILED)


@contextmanager
def _arguments(arguments: Sequence[str]) -> Iterator[None]:
    """Hydra, and what starts further processes, read sys.argv."""
    kept = sys.argv
    sys.argv = [kept[0], *arguments]
    try:
        yield
    finally:
        sys.argv = kept


@contextmanager
def _outside_hydra(arguments: Sequence[str]) -> Iterator[None]:
    """As if this one run had been asked for alone: several devices start it again, each for itself."""
    context = HydraConfig.instance()
    kept, context.cfg = context.cfg, None
    try:
        with _arguments(arguments):
            yield
    finally:
        context.cfg = kept


@contextmanager
def _errors_from_hydra() -> Iterator[None]:
    """Errors come to us instead of being printed, with a traceback, by Hydra."""
    kept = {name: os.environ.get(name) for name in (DEBUG, HYDRAS_DEBUG)}
    os.environ[DEBUG] = "1" if _debugging() else "0"  # what was asked for; processes of launchers inherit it
    os.environ[HYDRAS_DEBUG] = "1"
    try:
        yield
    finally:
        HydraConfig.instance().cfg = None  # Hydra leaves it set, as if its job went on
        for name, value in kept.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _debugging() -> bool:
    """Whether tracebacks are wanted; our own variable counts before Hydra's."""
    return os.environ.get(DEBUG, os.environ.get(HYDRAS_DEBUG, "")) not in ("", "0")


def _refusal(error: Exception | str, code: int) -> int:
    typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
    return code


def _folder_of(settings: Settings, since: float) -> Path | None:
    """The folder of the run that was just stopped, if it came to have one."""
    if settings.run is not None:
        return Path(settings.run)
    made = [path.parent for path in Path(settings.out).glob("*/config.yaml") if path.stat().st_mtime >= since - 1]
    return max(made, key=lambda folder: folder.stat().st_mtime, default=None)


def _say_what_is_left(folder: Path | None) -> None:
    if folder is None or not folder.is_dir():
        typer.echo("\nstopped before a run folder was made")
    elif any((folder / "checkpoints").glob("*")):
        typer.echo(
            f"\nstopped; the last epoch that was saved is kept. Go on:  roadmap train resume={folder}\n"
            f"Look at it:  tensorboard --logdir {folder}"
        )
    else:
        typer.echo(f"\nstopped before an epoch was saved; its settings are in {folder}/config.yaml")
