"""The start of a run, shortened: this process imports what takes it seconds while others decode the pictures."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Sequence

import torch

from roadmap.config.settings import Settings
from roadmap.data import Records, pack_for
from roadmap.engine.compiling import COMPILER, may_compile
from roadmap.engine.pictures import on_error_of
from roadmap.models.backbones import SMALL_CNN
from roadmap.ranks import Ranks

SOON = 1_000  # pictures that a core decodes in some seconds


def imports_of(settings: Settings, device: torch.device, steps: int) -> list[str]:
    """What a run will import beside the engine: the library of its backbone, the compiler if it may be used."""
    backbone = [] if settings.model.name == SMALL_CNN else ["timm"]
    frozen = settings.model.freeze_backbone
    return backbone + ([COMPILER] if not frozen and may_compile(settings.hardware, device, steps) else [])


def import_thread(names: Sequence[str]) -> threading.Thread:
    """A thread that imports modules; join it before this process is forked. A module that cannot be imported, for
    whatever reason, is an error only where it is needed."""

    def load() -> None:
        for name in names:
            with contextlib.suppress(Exception):  # libraries that do not fit each other raise anything
                importlib.import_module(name)

    thread = threading.Thread(target=load, daemon=True, name="importing")
    thread.start()
    return thread


def pack_ahead(settings: Settings, records: Records, ranks: Ranks, quiet: bool = False) -> None:
    """Makes the pack of the pictures now if that takes seconds; longer work waits until the model is there, so that a
    mistake in its name or its weights is told first."""
    data = settings.data
    with ranks.turns():
        if len(records) <= SOON * (os.cpu_count() or 1):
            pack_for(records, data.side, data.pack, on_error=on_error_of(data), progress=False if quiet else None)
