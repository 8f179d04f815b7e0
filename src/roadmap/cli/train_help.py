"""`roadmap train --help`, made from the YAML files and the docstrings of the settings."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from roadmap.config.options import GROUPS, NAMED, Setting, options, parts_of, settings
from roadmap.config.settings_checks import as_typed
from roadmap.config.words import unknown, unknown_option
from roadmap.experiments.published import lines_of

INTRODUCTION = """\
roadmap train [GROUP=OPTION ...] [key=value ...] [-m] [--dry-run]

Trains a network that finds the pictures of the same class first. Every run gets a folder of its own with its
settings, log, weights and results; `roadmap embed` and `roadmap evaluate` take it from there.

GROUP=OPTION takes a set of settings from a file, key=value changes one. A recipe is a whole run in one name;
what you type overrides it, in any order. "auto" leaves a setting to the program, which says what it chose."""

EXAMPLES = {
    "The built-in characters, in a minute or two on a CPU": "roadmap train",
    "Your own pictures, a folder per class; says what it chose for you": "roadmap train data=folder data.root=PICTURES",
    "The same, only to see what would be chosen, with time and disk": (
        "roadmap train data=folder data.root=PICTURES --dry-run"
    ),
    "A recipe, with another loss and seed": "roadmap train recipe=cub_vits data.root=CUB_200_2011 loss=supap seed=3",
    "A sweep: nine runs, each in its own folder, and a table": (
        "roadmap train -m recipe=cub_vits data.root=CUB_200_2011 loss=smoothap,supap,roadmap seed=1,2,3"
    ),
    "Go on with a run that was stopped; lengthen one that is finished": "roadmap train resume=runs/NAME epochs=40",
}

FLAGS = {
    "-m, --multirun": "a run for every combination of values with commas between, or range(1,4); on a cluster with "
    "hydra/launcher=submitit_slurm, once that plugin is installed",
    "--dry-run": "show what would be chosen, with time and disk; nothing is written",
    "--cfg job": "print the settings as they are composed, and stop",
    "--config-dir FOLDER": "options and recipes of your own: FOLDER/recipe/mine.yaml becomes recipe=mine",
    "--help WHAT": "a group (data), an option (loss=roadmap, recipe=cub_vits) or a setting (optim.lr), explained",
}

ENDING = """\
null means none; a list is written data.scale=[0.2,1]. Exit codes: 0 done, 1 failed, 2 not understood, 130
stopped by Ctrl-C, which keeps what was done. ROADMAP_DEBUG=1 shows tracebacks."""

WIDTH, COLUMN = 110, 12


def print_help(topics: Sequence[str] = ()) -> None:
    """The whole of it, or what is asked for: a group, GROUP=OPTION or a setting."""
    for lines in [_topic(topic) for topic in topics] or [_overview()]:
        print("\n".join(lines))


def _overview() -> Iterable[str]:
    yield INTRODUCTION
    yield "\nExamples"
    for what, command in EXAMPLES.items():
        yield from (f"  {what}", f"    {command}")
    yield "\nGroups and their options"
    for group in GROUPS:
        yield from _columns(f"{group}=", ", ".join(options(group)), COLUMN)
    yield "\nSettings"
    for part in ("", *(group for group in GROUPS if group not in ("recipe", *NAMED))):
        inside = [key for key in settings() if key.rpartition(".")[0] == part and key not in GROUPS]
        yield from _columns(f"{part}.".lstrip("."), ", ".join(key.rpartition(".")[2] for key in inside), COLUMN)
    for group in NAMED:
        yield from _columns(f"{group}.", f"those of its constructor: --help {group}=NAME", COLUMN)
    yield "\nFlags"
    for flag, meaning in FLAGS.items():
        yield from _columns(flag, meaning, 22)
    yield f"\n{ENDING}"


def _topic(topic: str) -> Iterable[str]:
    group, _, option = topic.partition("=")
    if group in GROUPS and option:
        if option not in options(group):
            raise unknown_option(group, option, options(group))
        comment, body = parts_of(group, option)
        yield from (*comment, *(f"  {line}" for line in lines_of(comment)), "", body)
    elif group in GROUPS:
        yield from (f"{group}=...  {GROUPS[group]}", "")
        for name, headline in options(group).items():
            yield from _columns(name, headline, 28)
        yield ""
        for setting in settings().values():
            yield from _explanation(setting) if setting.key.startswith(f"{group}.") else ()
    elif topic in settings():
        yield from _explanation(settings()[topic])
    else:
        raise unknown(topic, {})


def _explanation(setting: Setting) -> list[str]:
    return _columns(f"{setting.key}={as_typed(setting.default)}", setting.meaning, 30)


def _columns(name: str, text: str, width: int) -> list[str]:
    """Two columns; a name that is too long for the first has a line of its own."""
    lines = textwrap.wrap(text, WIDTH - width - 2) or [""]
    if len(name) < width - 1:
        return [f"  {name:<{width}}{lines[0]}".rstrip(), *(f"  {'':<{width}}{line}" for line in lines[1:])]
    return [f"  {name}", *(f"  {'':<{width}}{line}" for line in lines)]
