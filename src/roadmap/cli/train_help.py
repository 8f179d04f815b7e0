"""`roadmap train --help`, made from the YAML files and the docstrings of the settings."""

from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from roadmap.config.catalogue import GROUPS, Catalogue
from roadmap.config.meaning import Setting, settings

INTRODUCTION = """\
Trains a network that finds the pictures of the same class first: average precision is optimised directly. Every run \
gets a folder of its own with its settings, log, checkpoints and results; `roadmap embed` and `roadmap evaluate` take \
it from there.

A run is described by settings, key=value. GROUP=OPTION takes a whole set of them from a file, key=value changes one. \
A recipe chooses among the groups and adds values; what you type counts more than the recipe, whatever the order."""

EXAMPLES = {
    "The built-in characters, in a minute or two on a CPU": "roadmap train",
    "Your own pictures, a folder per class; says what it chose for you": "roadmap train data=folder data.root=PICTURES",
    "A recipe, with another loss and seed": "roadmap train recipe=cub_vits data.root=CUB_200_2011 loss=supap seed=3",
    "A sweep: nine runs, each in its own folder": (
        "roadmap train -m recipe=cub_vits data.root=CUB_200_2011 loss=smoothap,supap,roadmap seed=1,2,3"
    ),
    "One GPU in float32, no compiling, a larger batch": (
        "roadmap train recipe=cub_resnet50 data.root=CUB_200_2011 hardware=gpu hardware.precision=32 "
        "hardware.compile=no data.batch_size=256"
    ),
}

FLAGS = {
    "-m, --multirun": "a sweep: a run for every combination of values with commas between (also range(1,4)); "
    "hydra/launcher=joblib or submitit_slurm runs them in parallel or on a cluster, once that plugin is installed",
    "--cfg job": "print the settings that would be used, and stop",
    "--config-dir FOLDER": "options and recipes of your own: FOLDER/recipe/mine.yaml becomes recipe=mine",
    "--hydra-help": "Hydra's own help",
}

ENDING = """\
A setting that does not exist is an error that names the nearest one. null means none. Paths and names are taken as \
are; a list is written data.scale=[0.2,1]. resume=FOLDER, alone, goes on with a run that was stopped.

Exit codes: 0 done, 1 failed, 2 not understood, 130 stopped by Ctrl-C, which keeps the last saved epoch. \
ROADMAP_DEBUG=1 shows tracebacks."""

TOP = "the run"
PIPED_WIDTH = 110


def print_help() -> None:
    """Prints it; to a pipe as plain lines of a fixed width."""
    console = Console(highlight=False)
    if console.is_terminal:
        _print(console)
        return
    plain = Console(file=io.StringIO(), width=PIPED_WIDTH, highlight=False)
    with plain.capture() as captured:
        _print(plain)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _print(console: Console) -> None:
    console.print(Text.assemble(("roadmap train ", "bold"), "[GROUP=OPTION ...] [key=value ...] [-m]"))
    console.print()
    console.print(Padding(Text(INTRODUCTION), (0, 0, 1, 2)))
    _heading(console, "Examples")
    for what, command in EXAMPLES.items():
        console.print(Padding(Text(what), (0, 0, 0, 2)))
        # unwrapped, so that it can be copied
        console.print(Text(f"    {command}", "cyan"), soft_wrap=True)
    console.print()
    _print_options(console)
    _print_settings(console)
    _heading(console, "Flags")
    console.print(_columns([(Text(flag, "cyan"), Text(meaning)) for flag, meaning in FLAGS.items()]))
    console.print()
    console.print(Padding(Text(ENDING), (0, 0, 0, 2)))


def _print_options(console: Console) -> None:
    catalogue = Catalogue()
    for group, meaning in GROUPS.items():
        _heading(console, f"{group}=...", meaning)
        rows = [(Text(name, "cyan"), Text(line)) for name, line in catalogue.options(group).items()]
        console.print(_columns(rows))
        console.print()


def _print_settings(console: Console) -> None:
    parts: dict[str, list[Setting]] = {}
    for setting in settings().values():
        parts.setdefault(setting.key.rpartition(".")[0] or TOP, []).append(setting)
    for part in (TOP, *(name for name in parts if name != TOP)):
        _heading(console, f"Settings of {part}", "with their defaults, which options and recipes may change")
        rows = [(Text(f"{s.key}={shown(s.default)}", "cyan"), Text(_meaning(s))) for s in parts[part]]
        console.print(_columns(rows))
        console.print()
    _print_losses(console)


def _print_losses(console: Console) -> None:
    catalogue = Catalogue()
    _heading(
        console, "Settings of the losses", "with their defaults; num_classes and embedding_size fill themselves in"
    )
    for loss in catalogue.options("loss"):
        notes, values = catalogue.notes("loss", loss), catalogue.values("loss", loss)
        console.print(Text(f"  with loss={loss}"))
        named = [(name, value) for name, value in values.items() if name != "name"]
        rows = [(Text(f"  loss.{name}={shown(value)}", "cyan"), Text(notes.get(name, ""))) for name, value in named]
        console.print(_columns(rows))
    console.print()


def shown(value: Any) -> str:
    """A value as it would be typed."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{','.join(shown(item) for item in value)}]"
    return str(value)


def _meaning(setting: Setting) -> str:
    return re.sub(r"\bNone\b", "null", setting.meaning)


def _heading(console: Console, title: str, meaning: str = "") -> None:
    console.print(Text.assemble((title, "bold"), f"  {meaning}" if meaning else ""))


def _columns(rows: list[tuple[Text, Text]]) -> Padding:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return Padding(table, (0, 0, 0, 2))
