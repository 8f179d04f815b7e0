"""A run that begins with the weights of another: what is to be said of what that one has seen."""

from __future__ import annotations

from pathlib import Path

from roadmap.config.settings import Settings
from roadmap.engine.paths import absolute_paths
from roadmap.models.beginning import checkpoint_before
from roadmap.runs import Run


def cautions_about_weights(settings: Settings) -> list[str]:
    """That the other run has not ended; and where it was not judged on the classes that this one is to be judged on."""
    if checkpoint_before(settings.model.weights) is None:
        return []
    run = Run.open(Path(settings.model.weights).expanduser())
    theirs, found = run.settings(), []
    if not run.summary():
        found.append(f"{run.folder} has not ended; this run begins with the best weights that it has so far")
    select = theirs.select
    held, alike = (settings.select.by, settings.select.fraction), _pictures(theirs) == _pictures(settings)
    if alike and held[0] == "held_out" and held != (select.by, select.fraction):
        found.append(
            f"{run.folder} was trained with select.by={select.by} select.fraction={select.fraction:g}: it may "
            "have learned from classes that this run holds out, and what is measured on them then flatters; train both "
            "with the same"
        )
    return found


def _pictures(settings: Settings) -> tuple[str, str | None]:
    data = absolute_paths(settings).data
    return data.name, data.root
