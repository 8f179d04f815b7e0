"""What a person typed after `roadmap train`: flags, settings, and which of them have several values."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roadmap.config.settings import SettingError
from roadmap.config.words import HELP, override_of
from roadmap.names import did_you_mean

DRY, SWEEPS, LOOKS, FOLDER = (
    ("--dry-run",),
    ("-m", "--multirun"),
    ("-c", "--cfg", "--hydra-help"),
    ("-cd", "--config-dir"),
)
OF_LOOKS = ("-p", "--package", "--resolve")  # say what `--cfg` prints
WITH_VALUE = ("-c", "--cfg", "-p", "--package", *FOLDER)


@dataclass(frozen=True)
class Command:
    """What was typed.

    Attributes:
        flags: with their values.
        overrides: the settings, as Hydra reads them.
        swept: key -> its values in a sweep, each as an override of its own; only keys that have several.
        resume: the folder of a run to go on with, or None.
        epochs: how many that run shall have; None for as many as it was given.
    """

    flags: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    swept: dict[str, tuple[str, ...]] = field(default_factory=dict)
    resume: Path | None = None
    epochs: int | None = None

    @property
    def folder(self) -> Path | None:
        """Of `--config-dir`."""
        return next((Path(self.flags[i + 1]) for i, flag in enumerate(self.flags) if flag in FOLDER), None)

    def has(self, flags: Sequence[str]) -> bool:
        """Whether one of these was given: DRY, SWEEPS (-m), LOOKS (only to see the configuration)."""
        return not set(flags).isdisjoint(self.flags)

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
        return _resumption(keys, [*flags, *(text for text in typed if key_of(text) not in ("resume", "epochs"))])
    if "data.root" in keys and keys["data.root"] != "null" and keys.keys().isdisjoint(("data", "data.name", "recipe")):
        root = f"data.root={keys['data.root']}"
        raise SettingError("data.root", f"{root} needs data=NAME: data=folder {root} for your own pictures")
    sweeps = not set(SWEEPS).isdisjoint(flags)
    overrides = [override_of(text, sweeps) for text in typed]
    swept = {o.key_or_group: o for o in overrides if o.is_sweep_override()}
    values = {
        key: tuple(f"{key}={value}" for value in o.sweep_string_iterator()) if o.is_discrete_sweep() else ()
        for key, o in swept.items()
    }
    command = Command(tuple(flags), tuple(str(o.input_line) for o in overrides), values)
    if command.has(OF_LOOKS) and not command.has(LOOKS):
        raise SettingError("", f"{', '.join(OF_LOOKS)} say how the configuration is printed; add --cfg job")
    if command.folder is not None and not command.folder.is_dir():
        raise SettingError("", f"--config-dir {command.folder} is not a folder")
    if command.has(DRY) and sweeps:
        raise SettingError("", "--dry-run is for a single run; leave out -m")
    return command


def _resumption(keys: dict[str, str], others: Sequence[str]) -> Command:
    if others:
        said = "resume=FOLDER goes on with the settings of that run; beside it only epochs=N, for more of them"
        raise SettingError("resume", f"{said}; leave out: {' '.join(others)}")
    epochs = keys.get("epochs")
    if epochs is not None and not (epochs.isdigit() and int(epochs) > 0):
        raise SettingError("epochs", f"epochs must be a whole number, got {epochs!r}")
    return Command(resume=Path(os.path.expanduser(keys["resume"])), epochs=None if epochs is None else int(epochs))


def _separate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags with their values, and the rest."""
    flags: list[str] = []
    typed: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if not argument.startswith("-"):
            typed.append(argument)
            continue
        name, _, value = argument.partition("=")
        if name not in (known := (*DRY, *SWEEPS, *LOOKS, *OF_LOOKS, *FOLDER)):
            setting = f"{name.lstrip('-').replace('-', '_')}={value or 'VALUE'}"
            said = f"unknown option {name}{did_you_mean(name, known)} Settings are written without dashes, such as"
            raise SettingError(name, f"{said} {setting}; {HELP}")
        flags.append(name)
        if name in WITH_VALUE:
            follows = value or next(remaining, None)
            if follows is None:
                raise SettingError(name, f"{name} needs a value after it")
            flags.append(follows)
    return flags, typed
