"""From overrides to `Settings`: Hydra composes, the settings check their values, and `words` says what went wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra.version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from roadmap.config.settings import OptimSettings, SettingError, Settings
from roadmap.config.settings_checks import AUTO
from roadmap.config.words import refusal

# Here, so that a process which a launcher starts has it as soon as it imports the job.
# Of the optimiser only the rate is open: what an option does not name is off, whatever `Settings()` would choose.
_SCHEMA = Settings(optim=OptimSettings(lr=AUTO))  # type: ignore[arg-type]
ConfigStore.instance().store(name="schema", node=_SCHEMA.as_dict())

CONFIG = "config"
OWN_FILES = "command-line"  # what Hydra calls the folder of --config-dir


@contextmanager
def hydra_with(folder: Path | None) -> Iterator[Hydra]:
    """Hydra on our files, and on those of a folder of one's own; its globals are empty before and after."""
    hydra.version.setbase("1.3")
    path = create_config_search_path("pkg://roadmap.config.groups")
    if folder is not None:
        path.prepend(OWN_FILES, f"file://{folder.resolve()}", SearchPathQuery(provider="schema"))
    try:
        yield Hydra.create_main_hydra2("train", path)
    finally:
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None


def settings_from(overrides: Sequence[str], folder: Path | None = None) -> Settings:
    """The settings of one run.

    Args:
        overrides: as Hydra reads them, without sweeps.
        folder: with options and recipes of one's own.

    Raises:
        SettingError: what cannot be composed, or is not allowed.
    """
    with hydra_with(folder) as composer:

        def config(texts: Sequence[str]) -> DictConfig:
            return composer.compose_config(CONFIG, list(texts), RunMode.RUN, from_shell=False)

        try:
            return plain(config(overrides))
        except (HydraException, ValueError) as error:
            if isinstance(error, SettingError):
                raise
            raise refusal(error, overrides, config, folder) from error


def plain(config: DictConfig) -> Settings:
    """The settings that a composed configuration describes."""
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    settings = Settings.from_dict({str(name): value for name, value in values.items() if name != "hydra"})
    settings.out = os.path.expanduser(settings.out)
    return settings


def check_data(settings: Settings) -> None:
    """The dataset is known, and lies somewhere unless it is drawn; says where to get it and what is expected there."""
    from roadmap.data.datasets import DRAWN, READERS, dataset

    name = settings.data.name
    if name not in READERS or (settings.data.root is None and name != DRAWN):
        dataset(name, None)  # says it


def check_loss(settings: Settings) -> None:
    """Its constructor takes its options, and so does that of an auxiliary module; what only a run knows is made up. A
    memory is something to it, if one is asked for."""
    from roadmap.losses import Memory
    from roadmap.losses.named import named_loss, required_options

    try:
        told = dict.fromkeys(required_options(settings.loss["name"]), 2)
        loss = named_loss(**(settings.loss | told))
    except (TypeError, ValueError) as error:
        raise SettingError("loss", f"loss.{error}") from error
    _check_auxiliary(settings)
    if settings.memory.size is not None:
        try:
            Memory(loss, 1, form=settings.memory.form)  # type: ignore[arg-type]
        except ValueError as error:
            raise SettingError("memory", f"memory: {error}") from error


def _check_auxiliary(settings: Settings) -> None:
    from roadmap.losses.auxiliary import NONE, named_auxiliary, needed_options

    name = settings.auxiliary["name"]
    if name == NONE:
        return
    try:
        named_auxiliary(**(settings.auxiliary | dict.fromkeys(needed_options(name), 2)))
    except (TypeError, ValueError) as error:
        raise SettingError("auxiliary", f"auxiliary.{error}") from error
