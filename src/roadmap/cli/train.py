"""`roadmap train`: what was typed is composed, checked, and handed to the engine; sweeps are Hydra's."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

import typer
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from roadmap.cli.telling import FAILED, INTERRUPTED, is_debugging, is_reader_gone, say_error, say_start
from roadmap.cli.train_help import print_help
from roadmap.config.command import Command, command_of, key_of
from roadmap.config.composition import CONFIG, OWN_FILES, check_data, check_loss, hydra_with, plain, settings_from
from roadmap.config.settings import SettingError, Settings
from roadmap.config.words import in_quotes

DONE, NOT_UNDERSTOOD = 0, 2
# What the engine raises with a message for a person; anything else is a fault of ours and shows its traceback.
EXPECTED = (ValueError, TypeError, OSError, ImportError, RuntimeError, ArithmeticError)
STARTED = frozenset(("RANK", "SLURM_PROCID"))  # by torchrun, by Slurm
LONGEST_NAME = 200  # of a folder, in characters; file systems allow some 255 bytes


def train(arguments: Sequence[str]) -> int:
    """Does what `roadmap train ARGUMENTS` asks for; gives the exit code."""
    with _only_the_first_prints():
        return _train(arguments)


def _train(arguments: Sequence[str]) -> int:
    code = NOT_UNDERSTOOD
    try:
        if not {"-h", "--help"}.isdisjoint(arguments):
            print_help([word for word in arguments if word not in ("-h", "--help")])
            return DONE
        command = command_of(arguments)
        runs = [] if command.looks or command.resume else _rehearsal(command)
        code = FAILED
        _carry_out(command, runs)
    except KeyboardInterrupt as stop:
        typer.echo(f"\n{stop}" if str(stop) else "\nstopped")  # the engine says what is left, and how to go on
        return getattr(stop, "exit_code", INTERRUPTED)
    except EXPECTED as error:
        if is_debugging() or is_reader_gone(error):
            raise
        return _tell(error, code) if _is_to_tell(error) else code
    return DONE


def _rehearsal(command: Command) -> list[Settings]:
    """The settings of runs in which every value of a sweep comes once: a mistake in the last of them is found before
    the first begins."""
    runs = [settings_from(overrides, command.folder) for overrides in command.covering()]
    _say_what_begins(command, runs)
    for settings in runs:
        check_data(settings)
    for settings in {str((settings.loss, settings.auxiliary)): settings for settings in runs}.values():
        check_loss(settings)
    if command.flags.multirun and runs[0].run is not None:
        said = "run=FOLDER is for a single run; in a sweep give out=FOLDER, and every run gets its own in it"
        raise SettingError("run", said)
    return runs


def _say_what_begins(command: Command, runs: Sequence[Settings]) -> None:
    first = runs[0]
    named = "" if first.recipe is None else f"recipe {first.recipe}: "
    what = "a sweep" if command.flags.multirun else f"{first.loss['name']} on {first.data.name}, seed {first.seed}"
    say_start(f"starting   {named}{what}")


def _carry_out(command: Command, runs: Sequence[Settings]) -> None:
    if command.looks:
        _look(command)
        return
    if command.flags.multirun:
        _sweep(command, Path(runs[0].out) / time.strftime("sweep_%Y-%m-%d_%H-%M-%S"))
        return
    if command.resume is not None:
        say_start(f"going on   {command.resume}")
    from roadmap.engine import fit, plan, resume

    if command.resume is not None:
        resume(command.resume, epochs=command.epochs)
    elif command.flags.dry_run:
        typer.echo("\n".join(plan(runs[0]).lines()))
    else:
        fit(runs[0])


def _look(command: Command) -> None:
    """`--cfg` and `--hydra-help`."""
    flags, parser = command.flags, get_args_parser()
    settings_from(command.overrides, command.folder)  # says in our words what is wrong
    with hydra_with(command.folder) as hydra:
        if flags.hydra_help:
            hydra.hydra_help(CONFIG, parser, parser.parse_args(["--hydra-help"]))
        else:
            hydra.show_cfg(CONFIG, list(command.overrides), flags.cfg, flags.package, flags.resolve)


def _sweep(command: Command, folder: Path) -> None:
    """A run for every combination of values, each in its own folder, and a table of what came of them."""
    keys = [key_of(text) for text in command.overrides]
    fixed = [key for key in keys if key not in command.swept]
    told = [f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]"]
    if "hydra.sweep.dir" not in keys:
        told.append(f"hydra.sweep.dir={in_quotes(str(folder))}")
    from roadmap.runs.comparison import table_text

    said = "What could be run is in"
    try:
        with hydra_with(command.folder) as hydra:
            hydra.multirun(CONFIG, job, [*command.overrides, *told])
        said = "All runs are in"
    finally:
        if folder.is_dir():
            typer.echo(f"\n{table_text(folder)}\n{said} {folder}")


def job(config: DictConfig) -> str:
    """One run of a sweep; at module level, so that launchers can send it to other processes and machines."""
    context = HydraConfig.get()
    settings, what = plain(config), context.job.override_dirname
    name = re.sub(r"[^\w.,=+-]+", "_", what)
    if not 0 < len(name) <= LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}{context.job.num}"
    settings.run = str(Path(context.sweep.dir) / name)
    typer.secho(f"\n{what}  ->  {settings.run}", bold=True)
    own = [f"--config-dir={source.path}" for source in context.runtime.config_sources if source.provider == OWN_FILES]
    with _as_if_alone(["train", *own, *context.overrides.task, f"run={settings.run}"]):
        try:
            from roadmap.engine import fit_or_resume

            return str(fit_or_resume(settings))  # a launcher may put a job that was stopped back into its queue
        except EXPECTED as error:
            if is_debugging():
                raise
            if _is_to_tell(error):
                _tell(f"{what}: {error}")
            # plain, so that any launcher can carry it; what went wrong stands above
            raise RuntimeError(f"not every run of the sweep was finished; see above: {what}: {error}") from None


@contextmanager
def _as_if_alone(arguments: Sequence[str]) -> Iterator[None]:
    """As if this one run had been asked for alone: what starts it again, for several devices, reads sys.argv."""
    context = HydraConfig.instance()
    kept, context.cfg, sys.argv = (context.cfg, sys.argv), None, [sys.argv[0], *arguments]
    try:
        yield
    finally:
        context.cfg, sys.argv = kept


@contextmanager
def _only_the_first_prints() -> Iterator[None]:
    """Of the processes that torchrun or Slurm started, each of which runs this command."""
    if STARTED.isdisjoint(os.environ):
        yield
        return
    from roadmap.engine.joining import is_first

    with open(os.devnull, "w") as nowhere, nullcontext() if is_first() else redirect_stdout(nowhere):
        yield


def _is_to_tell(error: Exception) -> bool:
    if STARTED.isdisjoint(os.environ):
        return True
    from roadmap.engine.joining import is_to_tell

    return is_to_tell(error)


def _tell(error: Exception | str, code: int = FAILED) -> int:
    say_error(str(error))
    return code
