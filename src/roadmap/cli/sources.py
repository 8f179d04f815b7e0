"""From what was typed to a model and the pictures that it is to look at, for `roadmap embed` and `roadmap evaluate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer

from roadmap.cli.models import Named, named_model
from roadmap.cli.options import Asked, device_named
from roadmap.config.settings import DataSettings, HardwareSettings, Settings
from roadmap.data import UNLABELLED, CentreCrop, Pack, Records, dataset, evaluation_batches, fresh_pack
from roadmap.data.datasets import READERS
from roadmap.data.pictures.policy import SIDE
from roadmap.embeddings import Embeddings, embedded
from roadmap.engine.choices import OWN, chosen
from roadmap.engine.pictures import on_error_of, pack_of_all
from roadmap.hardware import autocast_of, laid_out, precision_of

SHOWN = 3  # skipped pictures that are named


@dataclass(eq=False)
class Source:
    """A model and pictures, ready to be put together.

    Attributes:
        named: the model, on the CPU until it is used.
        crop: how pictures are cut for it.
        data: where the pictures lie and how they are delivered.
        hardware: the precision.
        device: where the model runs.
        records: all pictures; where a run trained on them without given splits, with those that it made.
        pack: of all of them, decoded; None: files are decoded.
        divided: whether the pictures came with splits of their own.
        division: how the run divided pictures that came without; a sentence each.
        notes: what else a person should hear.
        skipped: pictures that could not be decoded.
        pictures, seconds: how many were embedded, and how long it took.
    """

    named: Named
    crop: CentreCrop
    data: DataSettings
    hardware: HardwareSettings
    device: torch.device
    records: Records
    pack: Pack | None
    divided: bool
    division: tuple[str, ...]
    notes: tuple[str, ...]
    skipped: list[str] = field(default_factory=list)
    pictures: int = 0
    seconds: float = 0.0

    @property
    def own(self) -> bool:
        """Whether these are somebody's own pictures and no published dataset."""
        return self.data.name in OWN

    def embeddings(self, part: Records) -> Embeddings:
        """Of some of the records, on the device."""
        batches = evaluation_batches(
            part,
            self.crop,
            self.data.batch_size,
            self.decoded(part),
            self.device,
            0 if len(part) <= self.data.batch_size else None,  # a single batch is not worth starting processes
            on_error_of(self.data),
        )
        began = time.monotonic()
        model = laid_out(self.named.model.to(self.device), self.hardware)  # as in training, to the bit
        found = embedded(model, batches, autocast_of(self.hardware, self.device))
        self.seconds += time.monotonic() - began
        self.pictures += len(found)
        self.skipped += batches.skipped
        return found

    def decoded(self, part: Records) -> Pack | None:
        """The pack of some of the records; None: their files are decoded."""
        return None if self.pack is None else self.pack.of(part)

    def settings(self) -> dict[str, Any]:
        """What decided the vectors beside the model and the pictures, as plain values."""
        return {
            "image": self.crop.size,
            "resize": self.crop.resize,
            "device": str(self.device),
            "precision": precision_of(self.hardware, self.device),
            "batch": self.data.batch_size,
            "pack": self.data.pack,
            "on error": self.data.on_error,
        }

    def announce(self, *parts: Records) -> None:
        """Prints what is about to be looked at, by what, and what was decided."""
        model = self.named
        counted = ", searched in ".join(_counted(part) for part in parts)
        typer.echo(f"model      {model.name}: {model.architecture}, {model.model.dim} dimensions, {model.weights}")
        typer.echo(f"pictures   {self.data.name}{'' if self.data.root is None else f' {self.data.root}'}: {counted}")
        cut = "" if self.crop.resize == self.crop.size else f" from the middle of {self.crop.resize}"
        precision = precision_of(self.hardware, self.device)
        typer.echo(f"computed   {self.crop.size} pixels{cut}, on {self.device}, precision {precision}")
        for note in self.notes:
            typer.echo(f"  - {note}")

    def report(self) -> None:
        """Prints how long it took and what was left out."""
        rate = self.pictures / max(self.seconds, 1e-9)
        typer.echo(f"embedded   {self.pictures:,} pictures in {self.seconds:.1f} s, {rate:,.0f} a second")
        if self.skipped:
            more = ", ..." if len(self.skipped) > SHOWN else ""
            typer.echo(f"left out   {_skipped(self.skipped)}: {', '.join(self.skipped[:SHOWN])}{more}")


def classes(records: Records) -> int:
    """How many there are; pictures without a label belong to none."""
    return len(np.unique(records.labels[records.labels != UNLABELLED]))


def _counted(records: Records) -> str:
    known = classes(records)
    return f"{len(records):,}{f' of {known:,} classes' if known else ''}"


def source(asked: Asked) -> Source:
    """The model and the pictures that were asked for; nothing is computed yet."""
    device, hardware = torch.device(device_named(asked.device)), HardwareSettings(precision=asked.precision)
    _check_data(asked)
    model = named_model(asked)
    trained_on = None if model.run is None else model.run.settings()
    name, root = _place(asked, trained_on)
    records = _records(name, root)
    divided, division = records.splits is not None, list[str]()
    own_run = trained_on is not None and _same_pictures(trained_on.data, name, root)
    if trained_on is not None and own_run:
        _, records, division = chosen(trained_on, records, None)
    data = DataSettings(
        name=name,
        root=None if root is None else str(root),
        pack=asked.pack,
        side=trained_on.data.side if trained_on is not None and own_run else max(SIDE, model.resize),
        batch_size=asked.batch,
        on_error=asked.on_error,
    )
    crop = CentreCrop(model.image, model.resize, model.model.mean, model.model.std)
    packed = _pack(records, data)
    return Source(model, crop, data, hardware, device, records, packed, divided, tuple(division), tuple(records.notes))


def _check_data(asked: Asked) -> None:
    """What is wrong with the options about pictures, before a model is built or fetched."""
    DataSettings(pack=asked.pack, on_error=asked.on_error)
    if asked.data is not None and asked.data not in READERS:
        dataset(asked.data, "")  # says that it is unknown, with the nearest


def _place(asked: Asked, trained_on: Settings | None) -> tuple[str, Path | None]:
    """Which dataset, and where it lies: as asked, or that of the run."""
    if asked.data is not None:
        return asked.data, asked.root
    if trained_on is None:
        raise ValueError(f"--data is missing: which pictures? One of {', '.join(READERS)}; folder for your own")
    if others := trained_on.data.test_sets:
        offers = " or ".join(f"--data {name} --root {root}" for name, root in others.items())
        raise ValueError(f"{asked.model} was tested on other pictures than it was trained on; say which: {offers}")
    root = asked.root if asked.root is not None else trained_on.data.root
    return trained_on.data.name, None if root is None else Path(root)


def _records(name: str, root: Path | None) -> Records:
    if root is not None:
        return dataset(name, root)
    if name != "glyphs":
        from roadmap.config.composition import check_root

        check_root(Settings(data=DataSettings(name=name)))  # says what is missing, and where to get it
    return dataset(name)


def _same_pictures(trained: DataSettings, name: str, root: Path | None) -> bool:
    if trained.root is None or root is None:
        return trained.name == name and trained.root is None and root is None
    return trained.name == name and Path(trained.root).resolve() == root.resolve()


def _pack(records: Records, data: DataSettings) -> Pack | None:
    """Decoded pictures: those that are there, or made if asked for. For a single pass making them does not pay."""
    if data.pack == "yes":
        return pack_of_all(records, data)
    drawn = (records.root / "pack.json").is_file()  # there are no files to decode
    return fresh_pack(records, data.side) if data.pack == "auto" or drawn else None


def _skipped(pictures: Sequence[str]) -> str:
    return f"{len(pictures):,} picture{'' if len(pictures) == 1 else 's'} that could not be decoded"
