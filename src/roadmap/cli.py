"""The `roadmap` command: parse, call, print. What a verb needs is imported when it runs."""

from __future__ import annotations

import json
import math
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roadmap.cli_data import app as data_app

if TYPE_CHECKING:
    from roadmap.embed import Embeddings

app = typer.Typer(
    name="roadmap",
    help="Train, evaluate and serve image-retrieval models by optimising average precision directly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.add_typer(data_app, name="data")


@app.callback()
def _verbs() -> None:
    """Keeps the verb on the command line while there is only one."""


# Everything after the verb is Hydra's: settings, groups, sweeps, and a help text of its own.
@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def train(context: typer.Context) -> None:
    """Train a model; `roadmap train --help` explains recipes and every setting."""
    try:
        from roadmap.cli_train import train as trained
    except ModuleNotFoundError as missing:
        if missing.name not in ("hydra", "omegaconf"):
            raise
        typer.secho(f"error: training needs {missing.name}: pip install 'roadmap[train]'", fg="red", err=True)
        raise typer.Exit(1) from missing
    raise typer.Exit(trained(context.args))


class Ties(str, Enum):
    pessimistic = "pessimistic"
    mean = "mean"


@app.command()
def evaluate(
    embeddings: Annotated[Path, typer.Argument(help="Vectors with labels: .npz or .safetensors.")],
    gallery: Annotated[
        Path | None, typer.Option(help="Search in these instead of among the embeddings; ids tell who is the query.")
    ] = None,
    ks: Annotated[str, typer.Option(help="The k of Recall@k, with commas between.")] = "1,2,4,8",
    ties: Annotated[Ties, typer.Option(help="Equal scores: against the query, or the mean over orders.")] = (
        Ties.pessimistic
    ),
    revisited: Annotated[
        Path | None, typer.Option(help="A gnd_*.pkl file: the revisited Oxford/Paris protocol; needs --gallery.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda, cuda:1, ...")] = "auto",
    memory: Annotated[str, typer.Option(help="Working memory, such as 512MB or 2GB.")] = "512MB",
    out: Annotated[Path | None, typer.Option("--json", help="Write the values to this file as well.")] = None,
) -> None:
    """Print retrieval metrics of saved embeddings, and write them as JSON.

    The files hold `vectors` (N, D), `labels` (N,) and, if you like, `ids` (N,); `embeddings`, `features`, `targets` and
    the like are understood.
    """
    from roadmap.embed import Embeddings
    from roadmap.evaluate import retrieval_evaluation, revisited_evaluation
    from roadmap.metrics import load_ground_truth

    try:
        chosen, numbers, budget = _device(device), _numbers(ks), _bytes(memory)
        queries = Embeddings.load(embeddings).to(chosen)
        items = None if gallery is None else Embeddings.load(gallery).to(chosen)
        if revisited is None:
            values = retrieval_evaluation(queries, items, numbers, ties.value, budget)
        elif items is None:
            raise ValueError("--revisited needs --gallery: the queries are not among the database images")
        else:
            values = revisited_evaluation(queries, items, load_ground_truth(revisited))
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from error
    _print_table(values, embeddings, queries, items)
    if out is not None:
        _write_json(out, values, embeddings, gallery, queries, ties.value)


def _device(name: str) -> str:
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


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--ks must be whole numbers with commas between, such as 1,10,100, got {text!r}") from None


def _bytes(text: str) -> int:
    units = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "B": 1}
    for unit, size in units.items():
        number = text.upper().strip().removesuffix(unit)
        if number != text.upper().strip():
            try:
                return int(float(number) * size)
            except ValueError:
                break
    raise ValueError(f"--memory must be a number with B, KB, MB or GB, such as 512MB, got {text!r}")


def _print_table(values: dict[str, float], path: Path, queries: Embeddings, items: Embeddings | None) -> None:
    from rich.console import Console
    from rich.table import Table

    among = "among themselves" if items is None else f"against {len(items):,}"
    title = f"{path.name}: {len(queries):,} x {queries.vectors.shape[1]} {among}"
    table = Table(title=title, title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in values.items():
        share = not isinstance(value, int)  # counts are int, everything else lies between 0 and 1
        table.add_row(name, ("-" if math.isnan(value) else f"{100 * value:.2f} %") if share else f"{value:,}")
    Console().print(table)


def _write_json(
    out: Path, values: dict[str, float], embeddings: Path, gallery: Path | None, queries: Embeddings, ties: str
) -> None:
    content: dict[str, Any] = {
        "embeddings": str(embeddings),
        "gallery": None if gallery is None else str(gallery),
        "vectors": len(queries),
        "dimensions": queries.vectors.shape[1],
        "ties": ties,
        # JSON has no NaN: a mean over no query is null
        "metrics": {name: None if math.isnan(value) else value for name, value in values.items()},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=2) + "\n")
