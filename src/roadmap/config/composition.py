"""From overrides to `Settings`: Hydra composes, the schema checks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from roadmap.config.settings import Settings

# Here, so that a process which a launcher starts has it as soon as it imports the job.
ConfigStore.instance().store(name="schema", node=Settings)

OWN_PICTURES = {
    "folder": "a folder with a folder of pictures per class: PATH/CLASS/picture.jpg",
    "table": "a .csv or .parquet file with the columns path and label, one picture a line",
}


def composed(overrides: Iterable[str], folder: Path | None = None) -> Settings:
    """The settings of one run.

    Args:
        overrides: as Hydra reads them, without sweeps.
        folder: with options and recipes of one's own.

    Raises:
        ValueError: what cannot be composed, or is not allowed.
    """
    extra = [] if folder is None else [f"hydra.searchpath=['file://{folder.resolve()}']"]
    try:
        with initialize_config_module("roadmap.config.groups", version_base="1.3"):
            return plain(compose("config", [*overrides, *extra]))
    except HydraException as error:
        raise ValueError(" ".join(str(error).split())) from error


def plain(config: DictConfig) -> Settings:
    """The settings that a composed configuration describes."""
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    settings = Settings.from_dict({str(name): value for name, value in values.items()})
    settings.out = os.path.expanduser(settings.out)
    return settings


def check_root(settings: Settings) -> None:
    """The dataset is known, and pictures that are not drawn lie somewhere; says what is expected there."""
    name = settings.data.name
    if name == "glyphs":
        return
    expected = f"PATH is {OWN_PICTURES[name]}." if name in OWN_PICTURES else _expected(name)
    if settings.data.root is None:
        raise ValueError(f"data={name} needs its pictures: add data.root=PATH. {expected}")


def _expected(name: str) -> str:
    from roadmap.data.datasets import SOURCES, dataset, explanation

    if name not in SOURCES:
        dataset(name, ".")  # says that it is unknown, with the nearest name
    return explanation(name).replace("ROOT", "PATH")
