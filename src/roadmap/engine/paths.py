"""Paths that mean the same from any folder, so that a run can be gone on with and evaluated from anywhere."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from roadmap.config.settings import Settings
from roadmap.models.beginning import NO_PATHS


def absolute_paths(settings: Settings) -> Settings:
    """The settings with the folders of pictures and the file of weights as absolute paths; links stay links."""
    data, model = settings.data, settings.model
    return dataclasses.replace(
        settings,
        data=dataclasses.replace(
            data,
            root=None if data.root is None else _absolute(data.root),
            test_sets={name: _absolute(root) for name, root in data.test_sets.items()},
        ),
        model=model if model.weights in NO_PATHS else dataclasses.replace(model, weights=_absolute(model.weights)),
    )


def _absolute(path: str) -> str:
    return str(Path(os.path.expanduser(path)).absolute())
