"""The grammar of the command line, and the one place where Hydra's refusals become words with the nearest name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf

from roadmap.config.options import GROUPS, NAMED, options, settings
from roadmap.config.settings import SettingError
from roadmap.names import did_you_mean, did_you_mean_setting, nearest

TEST_SETS = "data.test_sets"
HELP = "`roadmap train --help` lists every setting"


def override_of(text: str, sweeps: bool) -> Override:
    """What was typed, as Hydra reads it; refused where it is no setting, or not one that can be changed like this."""
    if "=" not in text and not text.startswith("~"):
        near = nearest(text, options("recipe"))
        hint = f" For a recipe write recipe={near}." if near else ""
        raise SettingError(text, f"{text!r} is not understood: settings are written as key=value.{hint} {HELP}")
    try:
        override = OverridesParser.create().parse_override(_text_for_hydra(text, sweeps))
    except HydraException as error:
        (key, _, value), reason = text.partition("="), " ".join(str(error).split())
        said = f"{text!r} is not understood ({reason}); put special characters in quotes, the outer ones for the shell"
        raise SettingError(key, f"{said}: '{key}=\"{value}\"'") from error
    if not sweeps and override.is_sweep_override():
        said = f"{override.key_or_group} has several values; to try each in a run of its own, add -m"
        kind = settings()[override.key_or_group].kind if override.key_or_group in settings() else ""
        one = f". If it is one list, write {override.key_or_group}=[...]" if kind.startswith("a list") else ""
        raise SettingError(override.key_or_group, said + one)
    _check_change(override)
    return override


def is_hydras(key: str) -> bool:
    """Whether a key belongs to Hydra itself, such as hydra/launcher."""
    return re.match(r"hydra([./]|$)", key) is not None


def _check_change(override: Override) -> None:
    """Hydra lets settings be added, left out and replaced by others; here they are only changed."""
    key = override.key_or_group
    if is_hydras(key) or key.startswith(f"{TEST_SETS}."):
        return
    if key in [f"{group}.name" for group in NAMED]:
        group = key.partition(".")[0]
        what = {"loss": "a loss", "auxiliary": "an auxiliary module"}[group]
        raise SettingError(key, f"{what} is chosen with its options: {group}=NAME, not {key}=NAME")
    if override.type is OverrideType.DEL:
        raise SettingError(key, f"~{key}: a setting cannot be left out; set it to null, or to what you want")
    adds = override.type in (OverrideType.ADD, OverrideType.FORCE_ADD)
    if adds and key in {*settings(), *GROUPS}:
        raise SettingError(key, f"+{key}: there is nothing to add; write {key}=... without the +")
    if adds or override.package is not None:
        raise unknown(override.get_key_element().lstrip("+"), {})
    if key in GROUPS and not override.is_sweep_override() and not isinstance(override.value(), str):
        came = "null" if override.value() is None else override.value()
        raise SettingError(key, f"{key} is chosen by name, got {came}. Options: {', '.join(options(key))}")


def refusal(
    error: Exception, texts: Sequence[str], config: Callable[[Sequence[str]], DictConfig], folder: Path | None
) -> SettingError:
    """Why Hydra could not compose these overrides, in words; `config` composes others."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.partition("/")
        if group in GROUPS:
            return unknown_option(group, option, options(group, folder))
        group, _, option = error.missing_cfg_file.rpartition("/")
        return unknown_option(group, option, error.options or [])
    keys = [text.partition("=")[0].lstrip("+") for text in texts]
    groups = [text for text, key in zip(texts, keys, strict=True) if key in GROUPS]
    values = OmegaConf.to_container(config(groups))
    assert isinstance(values, dict)
    known = set(_leaves(values))
    for key in keys:
        if not (key in GROUPS or key in known or is_hydras(key) or key.startswith(f"{TEST_SETS}.")):
            return unknown(key, {group: values[group] for group in NAMED})
    return SettingError("", " ".join(str(error).split()))


def unknown(key: str, named: Mapping[str, Mapping[str, Any]]) -> SettingError:
    """A setting that there is not, with the nearest. `named`: the loss and the auxiliary module that are chosen."""
    part, _, name = key.partition(".")
    own = {group: [f"{group}.{option}" for option in chosen if option != "name"] for group, chosen in named.items()}
    every = [*settings(), *(option for options_ in own.values() for option in options_)]
    near = did_you_mean_setting(key, own.get(part) or [*every, *GROUPS, "resume"])
    inside = [s.partition(".")[2] for s in every if s.startswith(f"{part}.")]
    if part in named:
        where = f" of {part}={named[part]['name']}"
        has = f" It has: {', '.join(inside)}" if inside else " It has none"
        return SettingError(key, f"unknown setting {key}{where}{near}{has}")
    known = f"Settings of {part}: {', '.join(inside)}; " if inside and name else ""
    return SettingError(key, f"unknown setting {key}{near} {known}{HELP}")


def unknown_option(group: str, option: str, known: Iterable[str]) -> SettingError:
    """An option that a group has not, with the nearest."""
    if group == "data" and ("/" in option or Path(option).exists()):
        said = f"unknown data {option!r}; for pictures of your own write: data=folder data.root={option}"
        return SettingError(group, said)
    batch = re.fullmatch(r"(\w+)_b(\d+)", option)
    if group == "recipe" and batch and batch[1] in known:
        said = f"a batch size is a setting: recipe={batch[1]} data.batch_size={batch[2]}"
        return SettingError(group, f"unknown recipe {option!r}; {said}")
    near = did_you_mean(option, known)
    return SettingError(group, f"unknown {group} {option!r}{near} Options: {', '.join(known)}")


def _leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterable[str]:
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")


def _text_for_hydra(text: str, sweeps: bool) -> str:
    """The override with the text of paths and names in quotes, so that `~`, brackets and commas are just characters."""
    key, equals, value = text.partition("=")
    name = key.lstrip("+")
    is_test_set = name.startswith(f"{TEST_SETS}.")
    is_text = is_test_set or (name not in GROUPS and name in settings() and settings()[name].kind.startswith("text"))
    several = sweeps and re.search(r",|^\w+\(.*\)$", value)
    if not is_text or not equals or several or value == "null" or value[:1] in ("'", '"'):
        return text
    # test sets are the one place with names of one's own, which Hydra has to be told to add
    return f"{'++' if is_test_set else key.removesuffix(name)}{name}={in_quotes(os.path.expanduser(value))}"


def in_quotes(text: str) -> str:
    """Text as Hydra reads it back, whatever is in it."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    escaped += "\\" * (len(escaped) - len(escaped.rstrip("\\")))  # or the last one would escape the closing quote
    return f"'{escaped}'"
