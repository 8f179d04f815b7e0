"""The tables and figures of the paper as rows that can be run: `definitions.yaml` and `published.csv`, put together."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from roadmap.config.settings import SettingError
from roadmap.experiments.published import Number, numbers
from roadmap.losses.named import NAMES
from roadmap.names import did_you_mean

DRAWN = "glyphs"  # needs no pictures and no weights
NOT_HERE = "this method is not part of the project"


@dataclass(frozen=True)
class Row:
    """One training run, for each of several seeds, and the numbers that it is set beside.

    Attributes:
        name: of the row, as in published.csv.
        dataset, backbone: of the published number.
        batch_size: None where the paper prints none.
        overrides: the settings that give it, as `roadmap train` takes them; () where it cannot be run.
        numbers: as published.
        why_not: it cannot be run; empty where it can.
        stand_in: what is run in place of something else, in words.
    """

    name: str
    dataset: str
    backbone: str
    batch_size: int | None
    overrides: tuple[str, ...]
    numbers: tuple[Number, ...] = ()
    why_not: str = ""
    stand_in: str = ""

    @property
    def key(self) -> str:
        """What tells its runs from those of others; rows of several tables may share one."""
        return ",".join(text.removeprefix("recipe=") for text in self.overrides)

    @property
    def recipe(self) -> str:
        return self.overrides[0].removeprefix("recipe=") if self.overrides else ""


@dataclass(frozen=True)
class Experiment:
    """A table or a figure.

    Attributes:
        name: "table3", "fig4a".
        title: in a line.
        rows: of runs, in the order of the paper.
        derived: "gap" or "increase" where its numbers are computed from pairs of runs, else "".
    """

    name: str
    title: str
    rows: tuple[Row, ...] = field(default=(), repr=False)
    derived: str = ""

    @property
    def heading(self) -> str:
        """As the paper calls it: "Table 3: ..."."""
        called = re.sub(r"^table(\d+)$", r"Table \1", re.sub(r"^fig(\d+\w?)$", r"Fig. \1", self.name))
        return f"{called}: {self.title}"


@cache
def _definitions() -> dict[str, dict[str, Any]]:
    import yaml

    text = files("roadmap.experiments").joinpath("definitions.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def experiment_names() -> tuple[str, ...]:
    """All that can be reproduced, in the order of the paper."""
    return tuple(_definitions())


def paper_names() -> tuple[str, ...]:
    """Those that the paper has."""
    return tuple(name for name in experiment_names() if re.fullmatch(r"table\d+|fig\d+\w?", name))


def experiment(
    name: str, dataset: str | None = None, backbone: str | None = None, only: Sequence[str] = ()
) -> Experiment:
    """A table or a figure.

    Args:
        name: of `experiment_names`.
        dataset: only its rows of this one; where it has none, its first rows with these pictures in place of their own.
        backbone: likewise, such as "vits".
        only: of these names; () for all.
    """
    found = _definitions()
    if name not in found:
        raise SettingError("name", f"unknown experiment {name!r}{did_you_mean(name, found)} Known: {', '.join(found)}")
    about = found[name]
    rows = _published_rows(about)
    if "on" in about:
        where, on, batch = str(about["on"]).split()
        rows += [_more(row, texts, where, on, int(batch), about) for row, texts in about["more"].items()]
    if only:
        _check_names(only, name, rows, bool(about.get("derived")))
    rows = _chosen([row for row in rows if not only or row.name in only], dataset, backbone)
    return Experiment(name, about["title"], tuple(rows), about.get("derived", ""))


def _check_names(only: Sequence[str], name: str, rows: Sequence[Row], pairs: bool) -> None:
    if pairs:
        raise SettingError("only", f"the rows of {name} are pairs, which are run together; leave it out")
    names = list(dict.fromkeys(row.name for row in rows))
    if strange := [one for one in only if one not in names]:
        raise SettingError(
            "only", f"{name} has no row {strange[0]!r}{did_you_mean(strange[0], names)} It has: {', '.join(names)}"
        )


def _published_rows(about: Mapping[str, Any]) -> list[Row]:
    """In the order of the file, the numbers of a row together."""
    together: dict[tuple[Any, ...], list[Number]] = {}
    for number in numbers():
        if number.table in about["published"]:
            together.setdefault((number.row, number.dataset, number.backbone, number.batch_size), []).append(number)
    if about.get("derived"):
        return [row for key, found in together.items() for row in _pair(key, found, about)]
    return [_row(found, about) for found in together.values()]


def _row(found: Sequence[Number], about: Mapping[str, Any]) -> Row:
    name, dataset, backbone, batch = found[0].row, found[0].dataset, found[0].backbone, found[0].batch_size
    own = about.get("rows", {}).get(name) or _settings_of(name)
    if not own:
        return Row(name, dataset, backbone, batch, (), tuple(found), NOT_HERE)
    bare, _, width = backbone.partition(" ")
    recipe = about.get("recipes", {}).get(f"{dataset} {bare}", f"{dataset}_{bare}")
    size = batch or about.get("batches", {}).get(bare)
    wide = [f"model.dim={width.removesuffix('-d')}"] if re.fullmatch(r"\d+-d", width) else []
    batches = [f"data.batch_size={size}"] if size else []
    return Row(name, dataset, backbone, batch, (f"recipe={recipe}", *batches, *wide, *own), tuple(found))


def _settings_of(name: str) -> list[str]:
    """ "roadmap lam=0.2" -> loss=roadmap loss.lam=0.2; [] for a name that is no loss here."""
    loss, *options = name.split()
    return [f"loss={loss}", *(f"loss.{option}" for option in options)] if loss in NAMES else []


def _more(name: str, own: Sequence[str], dataset: str, backbone: str, batch: int, about: Mapping[str, Any]) -> Row:
    recipe = about.get("recipes", {}).get(f"{dataset} {backbone}", _recipe(dataset, backbone))
    return Row(name, dataset, backbone, batch, (f"recipe={recipe}", f"data.batch_size={batch}", *own))


def _pair(key: tuple[Any, ...], found: Sequence[Number], about: Mapping[str, Any]) -> list[Row]:
    """SupAP and ROADMAP, of which the published number says how the second differs from the first."""
    _, dataset, backbone, batch = key
    size = batch or about.get("batches", {}).get(backbone)
    batches = [f"data.batch_size={size}"] if size else []
    return [
        Row(loss, dataset, backbone, batch, (f"recipe={dataset}_{backbone}", *batches, f"loss={loss}"), tuple(given))
        for loss, given in (("supap", ()), ("roadmap", found))
    ]


def _chosen(rows: Sequence[Row], dataset: str | None, backbone: str | None) -> list[Row]:
    """The rows of a dataset and a backbone; where there are none, the first ones, with these in place of their own."""
    pictures, networks = [row.dataset for row in rows], [row.backbone.split()[0] for row in rows]
    wanted = dataset if dataset in pictures else ("cub" if "cub" in pictures else pictures[0])
    rows = rows if dataset is None else [row for row in rows if row.dataset == wanted]
    if backbone is not None:
        bare = backbone if backbone in networks else networks[0]
        rows = [row for row in rows if row.backbone.split()[0] == bare]
    return [_standing_in(row, dataset or row.dataset, backbone or row.backbone.split()[0]) for row in rows]


def _standing_in(row: Row, dataset: str, backbone: str) -> Row:
    """The same loss on other pictures, or with another network; which ones are said wherever the row is shown."""
    said = [f"{new} in place of {old}" for new, old in ((dataset, row.dataset),) if new != old]
    if dataset == DRAWN != row.dataset:
        said += [f"its small network in place of {row.backbone.split()[0]}"]
    elif backbone != row.backbone.split()[0]:
        said += [f"{backbone} in place of {row.backbone.split()[0]}"]
    if not said or row.why_not:
        return row
    rest = [text for text in row.overrides[1:] if dataset != DRAWN or not text.startswith("model.")]
    overrides = (f"recipe={_recipe(dataset, backbone)}", *rest)
    return dataclasses.replace(row, overrides=overrides, stand_in=", ".join(said))


def _recipe(dataset: str, backbone: str) -> str:
    return DRAWN if dataset == DRAWN else f"{dataset}_{backbone}"
