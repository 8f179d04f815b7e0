"""The grammar of settings on the command line: Hydra's, with friendlier paths and messages."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from roadmap.config.catalogue import GROUPS, Catalogue
from roadmap.config.meaning import settings

TEST_SETS = "data.test_sets"
ENUMERATED = (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP, ValueType.RANGE_SWEEP)
HELP = "`roadmap train --help` lists every setting"


def quoted(text: str, sweeps: bool) -> str:
    """The override with the text of paths and names in quotes, so that `~`, brackets and commas are just characters."""
    key, equals, value = text.partition("=")
    name = key.lstrip("+")
    is_test_set = name.startswith(f"{TEST_SETS}.")
    is_text = is_test_set or (name not in GROUPS and name in settings() and settings()[name].kind.startswith("text"))
    several = sweeps and re.search(r",|^\w+\(.*\)$", value)
    if not is_text or not equals or several or value == "null" or value[:1] in ("'", '"'):
        return text
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", os.path.expanduser(value))
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    escaped += "\\" * trailing  # or the last one would escape the closing quote
    # test sets are the one place with names of one's own, which Hydra has to be told to add
    return f"{'++' if is_test_set else key.removesuffix(name)}{name}='{escaped}'"


def parsed(text: str) -> Override:
    if "=" not in text and not text.startswith("~"):
        near = did_you_mean(text, Catalogue().options("recipe"))
        hint = f" For a recipe write recipe={text}." if "did you mean" in near else ""
        raise ValueError(f"{text!r} is not understood: settings are written as key=value.{hint} {HELP}")
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = " ".join(str(error).split())
        key, _, value = text.partition("=")
        raise ValueError(
            f"{text!r} is not understood ({reason}); put special characters in quotes, the outer ones for the shell: "
            f"'{key}=\"{value}\"'"
        ) from error


def singles(override: Override) -> list[Override]:
    """The values of a sweep as overrides of their own; none where they cannot be listed beforehand."""
    if not override.is_sweep_override() or override.value_type not in ENUMERATED:
        return []
    prefix = override.input_line.partition("=")[0] if override.input_line else override.get_key_element()
    return [parsed(f"{prefix}={value}") for value in override.sweep_string_iterator()]


def key_of(text: str) -> str:
    """The key of an override."""
    return text.partition("=")[0].lstrip("+~")


def is_hydras(key: str) -> bool:
    """Whether a key belongs to Hydra itself, such as hydra/launcher."""
    return re.match(r"hydra([./]|$)", key) is not None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known name: by its last part if that is unique, else by spelling."""
    known = list(dict.fromkeys(known))
    tail = name.rpartition(".")[2]
    same = [key for key in known if key.rpartition(".")[2] == tail]
    tails = {key.rpartition(".")[2]: key for key in reversed(known)}
    if len(same) == 1:
        return f", did you mean {same[0]}?"
    near = difflib.get_close_matches(name, known, 1)
    if not near:
        near = [tails[match] for match in difflib.get_close_matches(tail, tails, 1, 0.75)]
    return f", did you mean {near[0]}?" if near else "."
