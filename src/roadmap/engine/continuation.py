"""A run that is asked for again, by a scheduler that puts jobs back into its queue: it goes on where it was stopped."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roadmap.config.settings import SettingError, Settings
from roadmap.config.settings_checks import as_typed
from roadmap.engine.joining import hardware_at, place_here, ranks_at
from roadmap.engine.paths import absolute_paths
from roadmap.engine.training import fit, resume
from roadmap.losses.named import constructor
from roadmap.runs import Run

OF_THE_PROCESS = ("run", "out", "hardware.time_limit", "hardware.devices", "hardware.nodes")  # not what is computed


def fit_or_resume(settings: Settings, quiet: bool = False) -> Path:
    """Begins the run, or goes on with it where its folder (`settings.run`) holds it already.

    A run that has ended stays as it is.

    Raises:
        SettingError: the folder holds a run with other settings.
        Stopped: as in `fit`.
    """
    place = place_here()
    with ranks_at(hardware_at(settings.hardware, place), place) as ranks:  # the first looks, and all do the same
        folder, ended = ranks.from_first(lambda: _run_there(settings))
    if folder is None:
        return fit(settings, quiet)
    return folder if ended else resume(folder, quiet=quiet)


def _run_there(settings: Settings) -> tuple[Path | None, bool]:
    """The folder, if it holds the run already, and whether that has ended."""
    if settings.run is None or not (Path(settings.run) / "config.yaml").is_file():
        return None, False
    run = Run.open(Path(settings.run))
    asked, held = (_in_full(some) for some in (absolute_paths(settings), run.settings()))
    for name, wanted, found in _differences(asked, held):
        if name not in OF_THE_PROCESS:
            raise SettingError(
                name,
                f"{run.folder} already holds a run with {name}={as_typed(found)}, not {as_typed(wanted)}; "
                "give another folder, or the settings that it was started with",
            )
    return run.folder, bool(run.summary())


def _in_full(settings: Settings) -> dict[str, Any]:
    """The settings, and what the options of the loss are that they leave out."""
    values = settings.as_dict()
    parameters = inspect.signature(constructor(settings.loss["name"])).parameters.values()
    left = {p.name: p.default for p in parameters if p.default is not p.empty}
    return values | {"loss": left | values["loss"]}


def _differences(asked: Mapping[str, Any], held: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name, what is asked for and what is held, None where it is not there; "auto" asks for nothing."""
    for name in {**asked, **held}:
        wanted, found = asked.get(name), held.get(name)
        if isinstance(wanted, Mapping) and isinstance(found, Mapping):
            yield from _differences(wanted, found, f"{where}{name}.")
        elif wanted != "auto" and wanted != found:
            yield f"{where}{name}", wanted, found
