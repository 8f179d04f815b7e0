"""What every setting means, read from the docstrings of the settings, so that there is no second list to be wrong."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from typing import Any

from roadmap.config.settings import Settings
from roadmap.config.settings_checks import fields, kind_in_words


@dataclass(frozen=True)
class Setting:
    """One setting: its dotted name, its type in words, its default in the schema, and what it means."""

    key: str
    kind: str
    default: Any
    meaning: str


@cache
def settings() -> dict[str, Setting]:
    """Dotted name -> setting, for the whole schema. `loss` is left to the files of that group."""
    return {setting.key: setting for setting in _settings(Settings(), "")}


def _settings(part: Any, prefix: str) -> list[Setting]:
    meanings, found = attributes(type(part)), []
    for name, about in fields(part.__class__).items():
        key, value = f"{prefix}{name}", getattr(part, name)
        if dataclasses.is_dataclass(value):
            found += _settings(value, f"{key}.")
        elif key != "loss":
            found.append(Setting(key, kind_in_words(*about), value, meanings.get(name, "").replace("None", "null")))
    return found


def attributes(kind: type[Any]) -> dict[str, str]:
    """Name -> description, from the section `Attributes:` of a docstring."""
    text = inspect.cleandoc(kind.__doc__ or "")
    section = re.search(r"^Attributes:\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE)
    entries = re.split(r"^(\w+): ", textwrap.dedent(section.group(1)) if section else "", flags=re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in zip(entries[1::2], entries[2::2], strict=True)}
