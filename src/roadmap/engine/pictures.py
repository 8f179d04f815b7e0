"""Where the pictures of a run are read from and how they are cut: random crops to train on, centres to judge by."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import torch

from roadmap.config.settings import DataSettings, Settings
from roadmap.data import (
    Batches,
    CategoryPairs,
    CentreCrop,
    MPerClass,
    Pack,
    RandomCrop,
    Records,
    evaluation_batches,
    fresh_pack,
    pack,
    pack_folder,
    training_batches,
)
from roadmap.data.pictures.packing import OnError
from roadmap.embeddings import Embeddings, embedded
from roadmap.models import Retriever

LARGE_PACK = 50 << 30  # bytes; "auto" makes no larger one unasked
log = logging.getLogger("roadmap.engine")


def on_error_of(data: DataSettings) -> OnError:
    """What the settings say about a picture that cannot be decoded, in the type that the data functions take."""
    return "skip" if data.on_error == "skip" else "raise"


def pack_of_all(records: Records, data: DataSettings, progress: bool = True) -> Pack | None:
    """The pack of a dataset, made now if the settings say so; None: files are decoded again every epoch."""
    found = fresh_pack(records, data.side)
    drawn = found is not None and found.folder == records.root  # has no files to decode instead
    if found is not None and (drawn or data.pack != "no"):
        return found
    if data.pack == "no":
        return None
    size = 4 * len(records) * data.side**2  # at a width of 4/3 of the height
    if data.pack == "auto":
        home = pack_folder(records, data.side)
        nearest = next(parent for parent in home.parents if parent.exists())
        if size > min(LARGE_PACK, shutil.disk_usage(nearest).free // 2):
            log.warning(
                "a pack of %s would take about %.0f GB: every epoch decodes its files again; data.pack=yes makes it",
                records.name,
                size / 1e9,
            )
            return None
    return pack(records, data.side, on_error=on_error_of(data), progress=progress)


class Pictures:
    """Delivers the crops of a run: random ones for training, central ones for evaluation.

    Args:
        settings: of the run.
        model: whose mean and standard deviation normalise the pictures.
        device: where they are delivered.
        quiet: show no bars.

    Attributes:
        skipped: path -> reason, of pictures that could not be decoded, in training and evaluation.
    """

    def __init__(self, settings: Settings, model: Retriever, device: torch.device, quiet: bool = False) -> None:
        self.settings, self.device, self.quiet = settings, device, quiet
        data = settings.data
        low, high = data.scale
        narrow, wide = data.ratio
        self.random = RandomCrop(data.image, (low, high), (narrow, wide), data.flip, model.mean, model.std)
        self.centre = CentreCrop(data.image, max(data.image, data.resize), model.mean, model.std)
        self.skipped: dict[str, str] = {}
        self._packs: dict[tuple[str, Path], Pack | None] = {}  # tables can lie side by side in one folder

    def state_dict(self) -> dict[str, Any]:
        """The pictures that were skipped: a resumed run may not meet all of them again."""
        return {"skipped": dict(self.skipped)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped.update(state_dict["skipped"])

    def packed(self, everything: Records) -> None:
        """Opens the pack of a dataset, or makes it, before its splits are asked for."""
        if (everything.name, everything.root) not in self._packs:
            self._packs[everything.name, everything.root] = pack_of_all(everything, self.settings.data, not self.quiet)

    def _pack(self, records: Records) -> Pack | None:
        whole = self._packs.get((records.name, records.root))
        return None if whole is None else whole.of(records)

    def training(self, train: Records, sampler: MPerClass | CategoryPairs) -> Batches:
        data = self.settings.data
        batches = training_batches(
            train,
            sampler,
            self.random,
            self._pack(train),
            self.device,
            self.settings.seed,
            data.workers,
            on_error_of(data),
        )
        batches.skipped = self.skipped  # one list for the whole run
        return batches

    def embedded(self, model: Retriever, records: Records, autocast: torch.dtype | None) -> Embeddings:
        """The embeddings of `records`, centre crops."""
        data = self.settings.data
        batches = evaluation_batches(
            records,
            self.centre,
            max(64, data.batch_size),
            self._pack(records),
            self.device,
            data.workers,
            on_error_of(data),
        )
        batches.skipped = self.skipped
        return embedded(model, batches, autocast, progress=False if self.quiet else None)
