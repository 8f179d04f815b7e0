"""All that can be told: groups and their options, from the YAML files; settings, from the docstrings of the schema."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from roadmap.config.settings import Settings
from roadmap.config.settings_checks import fields, kind_in_words

GROUPS = {
    "recipe": "Everything at once: the paper's runs, and modern counterparts.",
    "data": "Which pictures.",
    "model": "Backbone, pooling and head.",
    "loss": "What is minimised.",
    "auxiliary": "What is minimised beside the loss, with weights of its own.",
    "memory": "Earlier batches that a batch is compared with.",
    "optim": "How the weights move.",
    "select": "Which epoch is kept.",
    "hardware": "Where and how it is computed.",
}
NAMED = ("loss", "auxiliary")  # groups whose settings are those of a constructor
FOLDER = Path(str(files("roadmap.config.groups")))


def options(group: str, folder: Path | None = None) -> dict[str, str]:
    """Option -> the first line of its file, in alphabetical order; with those of a folder of one's own."""
    paths = {p.stem: p for home in (folder, FOLDER) if home is not None for p in (home / group).glob("*.yaml")}
    return {name: (_comment(paths[name].read_text(encoding="utf-8"))[0] or [""])[0] for name in sorted(paths)}


def parts_of(group: str, option: str) -> tuple[list[str], str]:
    """The comment that one of our files opens with, line by line, and what follows."""
    return _comment((FOLDER / group / f"{option}.yaml").read_text(encoding="utf-8"))


def _comment(text: str) -> tuple[list[str], str]:
    lines = text.splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    comment = [line[1:].removeprefix(" ") for line in lines[:end] if not line.startswith("# @")]  # @: for Hydra
    return comment, "\n".join(lines[end:])


class Setting(NamedTuple):
    """One setting: its dotted name, its type in words, its default in the schema, and what it means."""

    key: str
    kind: str
    default: Any
    meaning: str


@cache
def settings() -> dict[str, Setting]:
    """Dotted name -> setting, for the whole schema. Those of `NAMED` groups are left to their files."""
    return {setting.key: setting for setting in _settings(Settings(), "")}


def _settings(part: Any, prefix: str) -> list[Setting]:
    meanings, found = attributes(type(part)), []
    for name, about in fields(part.__class__).items():
        key, value = f"{prefix}{name}", getattr(part, name)
        if dataclasses.is_dataclass(value):
            found += _settings(value, f"{key}.")
        elif key not in NAMED:
            found.append(Setting(key, kind_in_words(*about), value, meanings.get(name, "").replace("None", "null")))
    return found


def attributes(kind: type[Any]) -> dict[str, str]:
    """Name -> description, from the section `Attributes:` of a docstring."""
    text = inspect.cleandoc(kind.__doc__ or "")
    section = re.search(r"^Attributes:\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE)
    entries = re.split(r"^(\w+): ", textwrap.dedent(section.group(1)) if section else "", flags=re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in zip(entries[1::2], entries[2::2], strict=True)}
