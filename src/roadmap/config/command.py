"""What a person typed after `roadmap train`: flags, settings, and which of them have several values."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roadmap.config.settings import SettingError
from roadmap.config.words import HELP, override_of
from roadmap.names import did_you_mean

SWITCHES = ("--multirun", "--dry-run", "--resolve", "--hydra-help")
WITH_VALUE = {"--cfg": "-c", "--package": "-p", "--config-dir": "-cd"}


@dataclass(frozen=True)
class Command:
    """What was typed.

    Attributes:
        flags: `multirun`, `dry_run`, `cfg`, `hydra_help` and those that say how `cfg` is printed.
        overrides: the settings, as Hydra reads them.
        swept: key -> its values in a sweep, each as an override of its own; only keys that have several.
        folder: with options and recipes of one's own (`--config-dir`), or None.
        resume: the folder of a run to go on with, or None.
        epochs: how many that run shall have; None for as many as it was told.
    """

    flags: argparse.Namespace
    overrides: tuple[str, ...] = ()
    swept: dict[str, tuple[str, ...]] = field(default_factory=dict)
    folder: Path | None = None
    resume: Path | None = None
    epochs: int | None = None

    @property
    def looks(self) -> bool:
        """Only to see the configuration."""
        return bool(self.flags.cfg or self.flags.hydra_help)

    def covering(self) -> list[list[str]]:
        """Combinations of overrides, without a sweep, in which every value of the sweep comes at least once."""
        fixed = [text for text in self.overrides if key_of(text) not in self.swept]
        first = {key: values[0] for key, values in self.swept.items() if values}
        combinations = [first, *({**first, key: v} for key, values in self.swept.items() for v in values[1:])]
        return [[*fixed, *combination.values()] for combination in combinations]


def key_of(text: str) -> str:
    """The key of an override."""
    return text.partition("=")[0].lstrip("+~")


def command_of(arguments: Sequence[str]) -> Command:
    """The command that the arguments make.

    Raises:
        SettingError: what is wrong, the nearest right thing, and where to read on.
    """
    flags, typed = _separate(arguments)
    keys = {key_of(text): text.partition("=")[2] for text in typed}
    if "resume" in keys:
        return _resumption(flags, keys)
    if "data.root" in keys and keys["data.root"] != "null" and keys.keys().isdisjoint(("data", "data.name", "recipe")):
        root = f"data.root={keys['data.root']}"
        raise SettingError("data.root", f"{root} needs data=NAME: data=folder {root} for your own pictures")
    overrides = [override_of(text, flags.multirun) for text in typed]
    swept = {
        o.key_or_group: tuple(f"{o.key_or_group}={value}" for value in o.sweep_string_iterator())
        if o.is_discrete_sweep()
        else ()
        for o in overrides
        if o.is_sweep_override()
    }
    folder = None if flags.config_dir is None else Path(flags.config_dir)
    if folder is not None and not folder.is_dir():
        raise SettingError("", f"--config-dir {folder} is not a folder")
    if (flags.package or flags.resolve) and not flags.cfg:
        raise SettingError("", "--package and --resolve say how the configuration is printed; add --cfg job")
    if flags.dry_run and flags.multirun:
        raise SettingError("", "--dry-run is for a single run; leave out -m")
    return Command(flags, tuple(str(o.input_line) for o in overrides), swept, folder)


def _resumption(flags: argparse.Namespace, keys: dict[str, str]) -> Command:
    others = ["-m"] * flags.multirun + ["--dry-run"] * flags.dry_run
    if others := others + [f"{key}={value}" for key, value in keys.items() if key not in ("resume", "epochs")]:
        said = "resume=FOLDER goes on with the settings of that run; beside it only epochs=N, for more of them"
        raise SettingError("resume", f"{said}; leave out: {' '.join(others)}")
    epochs = keys.get("epochs")
    if epochs is not None and not (epochs.isdigit() and int(epochs) > 0):
        raise SettingError("epochs", f"epochs must be a whole number, got {epochs!r}")
    folder = Path(os.path.expanduser(keys["resume"]))
    return Command(flags, resume=folder, epochs=None if epochs is None else int(epochs))


def _separate(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Flags, and the settings."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in SWITCHES:
        parser.add_argument(name, *(["-m"] if name == "--multirun" else []), action="store_true")
    for name, short in WITH_VALUE.items():
        parser.add_argument(short, name)
    try:
        flags, typed = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise SettingError("", f"{error.argument_name} {error.message}") from error
    for text in typed:
        if text.startswith("-"):
            name, _, value = text.partition("=")
            near, bare = did_you_mean(name, [*SWITCHES, *WITH_VALUE]), name.lstrip("-").replace("-", "_")
            said = f"unknown option {name}{near} Settings are written without dashes, such as {bare}={value or 'VALUE'}"
            raise SettingError(name, f"{said}; {HELP}")
    return flags, typed
