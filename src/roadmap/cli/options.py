"""Options that several verbs share, and how an error becomes a line that a person can act on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from roadmap.cli.data import NAMES
from roadmap.config.settings import PACKING, POOLINGS, PRECISIONS

# What a person can do something about; anything else is a fault of ours and shows its traceback.
EXPECTED = (ValueError, TypeError, OSError, ImportError, RuntimeError)
# The library speaks of settings, as `roadmap train` takes them; these verbs have options for some of them.
OPTION_OF = {
    "model.name": "MODEL",
    "model.weights": "--weights",
    "model.pooling": "--pooling",
    "model.dim": "--dim",
    "data.image": "--image",
    "data.root": "--root",
    "data.pack": "--pack",
    "data.on_error": "--on-error",
    "hardware.precision": "--precision",
    "data": "--data",
}
PICTURE_ADVICE = "Repair or remove it, or use --on-error skip"
SETTING = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, OPTION_OF))})(=|(?![\w.]))")

MODEL = "a run folder (its best epoch), a checkpoint (.safetensors), small_cnn, or the name of any timm model"
THE_PICTURES, THE_MODEL, COMPUTING = "The pictures", "The model", "Computing"  # panels of the help text

Data = Annotated[
    str | None,
    typer.Option(help=f"One of: {', '.join(NAMES)}; by default that of the run.", rich_help_panel=THE_PICTURES),
]
Root = Annotated[
    Path | None,
    typer.Option(help="Where they lie; for `table` the file. Glyphs need none.", rich_help_panel=THE_PICTURES),
]
OnError = Annotated[
    str,
    typer.Option(
        help="A picture that cannot be decoded: raise stops, skip leaves it out and says so.",
        rich_help_panel=THE_PICTURES,
    ),
]
Pack = Annotated[
    str,
    typer.Option(
        help=f"Decoded pictures, {', '.join(PACKING)}: auto uses a pack that is there, yes makes one if there is none.",
        rich_help_panel=THE_PICTURES,
    ),
]
Image = Annotated[
    int | None,
    typer.Option(min=1, help="Side of what the model sees; a checkpoint's own, or 224.", rich_help_panel=THE_PICTURES),
]
Resize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Shorter side before the centre is cut out; a checkpoint's own, or 8/7 of --image.",
        rich_help_panel=THE_PICTURES,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="Of a timm model: hub (the default), random, or a .safetensors or .pth file.", rich_help_panel=THE_MODEL
    ),
]
Pooling = Annotated[
    str | None,
    typer.Option(
        help=f"Of a timm model: {', '.join(POOLINGS)}; auto is what it was trained with.", rich_help_panel=THE_MODEL
    ),
]
Dim = Annotated[
    int | None,
    typer.Option(
        min=1, help="Of a timm model: add an untrained projection to so many dimensions.", rich_help_panel=THE_MODEL
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=COMPUTING)]
Precision = Annotated[
    str,
    typer.Option(
        help=f"Of the model: {', '.join(PRECISIONS)}; auto is bf16 on a GPU, 32 elsewhere.", rich_help_panel=COMPUTING
    ),
]
Batch = Annotated[
    int, typer.Option(min=1, help="Pictures that go through the model at once.", rich_help_panel=COMPUTING)
]


@dataclass(frozen=True)
class Asked:
    """Which model and which pictures, as typed; None where nothing was."""

    model: str
    data: str | None = None
    root: Path | None = None
    weights: str | None = None
    image: int | None = None
    resize: int | None = None
    pooling: str | None = None
    dim: int | None = None
    device: str = "auto"
    precision: str = "auto"
    batch: int = 256
    pack: str = "auto"
    on_error: str = "raise"


@contextmanager
def errors_told() -> Iterator[None]:
    """Expected errors become one line on stderr and exit code 1; ROADMAP_DEBUG=1 shows the traceback instead."""
    said = ""
    try:
        yield
    except EXPECTED as error:
        if os.environ.get("ROADMAP_DEBUG", "0") not in ("", "0"):
            raise
        said = _advised(error)
    if said:  # outside: the error would keep alive what it came from, such as processes that wait for more work
        typer.secho(f"error: {said}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1)


def _advised(error: Exception) -> str:
    """The message in the words of the command line, with what helps."""
    if isinstance(error, ModuleNotFoundError):
        return f"this needs {error.name}: pip install 'roadmap[train]'"
    said = SETTING.sub(_option, str(error))
    if type(error).__name__ == "PictureError":  # by name: importing it to look at any error would take a second
        return f"{said}. {PICTURE_ADVICE}"
    if inside := re.search(r"PictureError: (.+)", said):  # torch hands a worker's error on as text, with its traceback
        return f"{inside[1]}. {PICTURE_ADVICE}"
    return f"{said}. A smaller --batch takes less memory" if "out of memory" in said else said


def _option(found: re.Match[str]) -> str:
    setting, equals = found[1], found[2]
    if setting == "data" and not equals:  # the word
        return setting
    return f"{OPTION_OF[setting]}{' ' if equals else ''}"


def device_named(name: str) -> str:
    """What torch calls a device that was typed."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise ValueError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: no CUDA device is visible here; use --device cpu")
    return name


def readable_size(size: int) -> str:
    """Bytes for a person: 1.3 MB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.1f} GB"
