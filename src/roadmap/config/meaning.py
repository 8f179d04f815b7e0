"""What every setting means, read from the docstrings of the settings, so that there is no second list to be wrong."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import types
from dataclasses import dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from roadmap.config.settings import Settings

KINDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list[int]: "a list of whole numbers, such as [30,70]",
    list[float]: "a list of numbers, such as [0.16,1]",
    dict[str, str]: "names with values, such as {roxford5k:FOLDER}",
}


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        key: its dotted name.
        kind: its type, in words.
        default: of the schema; an option or a recipe may say otherwise.
        meaning: from the docstring of its dataclass.
    """

    key: str
    kind: str
    default: Any
    meaning: str


@cache
def settings() -> dict[str, Setting]:
    """Dotted name -> setting, for the whole schema. `loss` is left to the files of that group."""
    return {setting.key: setting for setting in _settings(Settings, "")}


def _settings(kind: type[Any], prefix: str) -> list[Setting]:
    meanings, hints, found = attributes(kind), get_type_hints(kind), []
    for field in dataclasses.fields(kind):
        hint, key = hints[field.name], f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found += _settings(hint, f"{key}.")
        elif key != "loss":
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            found.append(Setting(key, in_words(hint), default, meanings.get(field.name, "")))
    return found


def in_words(hint: Any) -> str:
    """A type, for a person."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = next(part for part in get_args(hint) if part is not type(None))
        return f"{in_words(inner)} or null"
    return KINDS.get(hint, str(hint))


def attributes(kind: type[Any]) -> dict[str, str]:
    """Name -> description, from the section `Attributes:` of a docstring."""
    text = inspect.cleandoc(kind.__doc__ or "")
    section = re.search(r"^Attributes:\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE)
    described: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(section.group(1)).splitlines() if section else []:
        start = re.match(r"(\w+): (.*)", line)
        if start:
            name, described[start.group(1)] = start.group(1), start.group(2)
        elif line.strip() and name:
            described[name] += f" {line.strip()}"
    return described
