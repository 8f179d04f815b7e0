"""What a person typed after `roadmap train`, understood and checked before anything runs.

Hydra would find most mistakes too, but later, in its own words, and in a sweep only when the job's turn comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roadmap.config.catalogue import GROUPS, Catalogue, leaves
from roadmap.config.checks import Checker, several
from roadmap.config.parsing import HELP, TEST_SETS, did_you_mean, is_hydras, key_of, parsed, quoted, singles

# Hydra's flags that make sense here, and whether a value follows.
FLAGS = {
    "-m": False,
    "--multirun": False,
    "-c": True,
    "--cfg": True,
    "-p": True,
    "--package": True,
    "--resolve": False,
    "-cd": True,
    "--config-dir": True,
    "--hydra-help": False,
}
SWEEPS = ("-m", "--multirun")
LOOKS = ("-c", "--cfg", "--hydra-help")
OF_LOOKS = ("-p", "--package", "--resolve")  # say what `--cfg` prints


@dataclass(frozen=True)
class Request:
    """What was typed.

    Attributes:
        flags: Hydra's, with their values.
        overrides: the settings, as Hydra reads them.
        folder: of `--config-dir`, or None.
        swept: key -> its values in a sweep, each as an override of its own; only keys that have several.
    """

    flags: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    folder: Path | None = None
    swept: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def sweeps(self) -> bool:
        return any(flag in SWEEPS for flag in self.flags)

    @property
    def looks(self) -> bool:
        """Only to look at the configuration."""
        return any(flag in LOOKS for flag in self.flags)

    @property
    def catalogue(self) -> Catalogue:
        return catalogue_with(self.folder)

    def covering(self) -> list[list[str]]:
        """Combinations of overrides, without a sweep, in which every value of the sweep comes at least once."""
        fixed = [text for text in self.overrides if key_of(text) not in self.swept]
        first = {key: values[0] for key, values in self.swept.items() if values}
        combinations = [first, *({**first, key: v} for key, values in self.swept.items() for v in values[1:])]
        return [[*fixed, *combination.values()] for combination in combinations]


def understood(arguments: Sequence[str]) -> Request:
    """The request that the arguments make.

    Raises:
        ValueError: what is wrong, the nearest right thing, and where to read on.
    """
    flags, typed = _separated(arguments)
    sweeps = any(flag in SWEEPS for flag in flags)
    folder = next((Path(flags[i + 1]) for i, flag in enumerate(flags) if flag in ("-cd", "--config-dir")), None)
    if any(flag in OF_LOOKS for flag in flags) and not any(flag in LOOKS for flag in flags):
        raise ValueError(f"{', '.join(OF_LOOKS)} say how the configuration is printed; add --cfg job")
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--config-dir {folder} is not a folder")
    overrides = [parsed(quoted(text, sweeps)) for text in typed]
    swept = {o.get_key_element(): singles(o) for o in overrides if o.is_sweep_override()}
    checker = Checker(catalogue_with(folder), overrides)
    for override in overrides:
        if override.is_sweep_override() and not sweeps:
            raise ValueError(several(override))
        checker.check_key(override)
        for single in swept.get(override.get_key_element(), [override]):
            checker.check_value(single)
    return Request(
        tuple(flags),
        tuple(str(override.input_line) for override in overrides),
        folder,
        {key_of(key): tuple(str(single.input_line) for single in values) for key, values in swept.items()},
    )


def given_keys(overrides: Iterable[str], catalogue: Catalogue) -> frozenset[str]:
    """Dotted names of the settings that a person decided: by name, by choosing an option, or by a recipe."""
    given: set[str] = set()
    choices: dict[str, str] = {}
    for override in (parsed(text) for text in overrides):
        key = override.key_or_group
        if key in GROUPS:
            choices[key] = str(override.value())
        elif not is_hydras(key):
            given.add(TEST_SETS if key.startswith(f"{TEST_SETS}.") else key)
    recipe = choices.pop("recipe", "None")
    if recipe != "None":
        given |= set(leaves(catalogue.values("recipe", recipe)))
        choices = catalogue.choices(recipe) | choices
    for group, option in choices.items():
        given |= {f"{group}.{name}" for name in catalogue.values(group, option)}
    return frozenset(given)


def catalogue_with(folder: Path | None) -> Catalogue:
    """Our options, and those of a person's own folder."""
    ours = Catalogue()
    return ours if folder is None else Catalogue((*ours.folders, folder))


def _separated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    flags: list[str] = []
    typed: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if not argument.startswith("-"):
            typed.append(argument)
            continue
        name, _, value = argument.partition("=")
        if name not in FLAGS:
            bare = name.lstrip("-").replace("-", "_")
            raise ValueError(
                f"unknown option {name}{did_you_mean(name, FLAGS)} Settings are written without dashes, "
                f"such as {bare}={value or 'VALUE'}; {HELP}"
            )
        flags.append(name)
        if FLAGS[name]:
            follows = value or next(remaining, None)
            if follows is None:
                raise ValueError(f"{name} needs a value after it")
            flags.append(follows)
    return flags, typed
