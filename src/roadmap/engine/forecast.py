"""What a run would do, without doing it: what is chosen and why, its steps, and what it would take."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import torch

from roadmap.config.settings import Settings
from roadmap.data import fresh_pack
from roadmap.data.pictures.packing import expected_bytes
from roadmap.engine.auto import WARNING, cautions, median_side, resolve
from roadmap.engine.auxiliary import check_auxiliary
from roadmap.engine.job import check_dims, check_judging
from roadmap.engine.joining import hardware_here
from roadmap.engine.results import duration, processes_words
from roadmap.engine.splits import division_of, records_of, sampler_of, searched_pictures, size_words, splits_of
from roadmap.hardware import autocast_of, device_of
from roadmap.models import Retriever
from roadmap.models.beginning import check_weights
from roadmap.models.network import untrained_retriever
from roadmap.ranks import Ranks

TRIED = 8  # pictures of 224 pixels in the batch that is timed on a CPU, or as many smaller ones; on a GPU a whole batch
# in checkpoints: twice the weights in last.pt, the same in previous.pt, the best weights; in both states Adam's
# two moments of what learns
BYTES_PER_WEIGHT, BYTES_PER_LEARNER = 20, 16


@dataclass(frozen=True)
class Plan:
    """A run that has not begun.

    Attributes:
        settings: as they would be stored with the run: nothing is left to be chosen.
        reasons: for what was chosen, a sentence each.
        pictures: split -> pictures and classes, in words.
        steps: of all epochs.
        disk: bytes that the run would add: checkpoints, and a pack of the pictures where one would be made.
        rate: pictures a second that this machine trains, tried on one batch.
    """

    settings: Settings
    reasons: list[str]
    pictures: dict[str, str]
    steps: int
    disk: int
    rate: float

    @property
    def seconds(self) -> float:
        """An estimate: reading pictures, evaluations and what processes tell each other are not counted."""
        return self.steps * self.settings.data.batch_size / (self.rate * self.processes)

    @property
    def processes(self) -> int:
        return self.settings.hardware.devices * self.settings.hardware.nodes

    def lines(self) -> list[str]:
        """The plan in words."""
        data, model, optim = self.settings.data, self.settings.model, self.settings.optim
        chunks = "" if data.parts is None else f" in chunks of {data.parts}"
        batch = f"batches of {data.batch_size}{chunks}, {data.per_class} of a class"
        return [
            *(f"{reason}\n" for reason in self.reasons if reason.startswith(WARNING)),
            f"pictures   {data.name}: {', '.join(f'{name} {count}' for name, count in self.pictures.items())}",
            f"model      {model.name}, weights {model.weights}, pictures of {data.image} pixels",
            f"training   {_count(self.settings.epochs, 'epoch')}, {_count(self.steps, 'step')}, {batch}, "
            f"{optim.name} at {optim.lr:g}",
            *([f"processes  {processes_words(self.settings)}"] if self.processes > 1 else []),
            *(f"  - {reason}" for reason in self.reasons if not reason.startswith(WARNING)),
            f"time       about {duration(self.seconds)} (an estimate: {self.rate:,.0f} pictures a second, tried on a "
            f"batch here{self._together()}; {self._uncounted()} and evaluations are not counted)",
            f"disk       about {_size(self.disk)} (an estimate)",
            "Nothing was written. Leave out --dry-run to start.",
        ]

    def _uncounted(self) -> str:
        once = "putting each picture through the backbone, where that is not kept yet"
        return once if self.settings.model.freeze_backbone else "reading pictures"

    def _together(self) -> str:
        if self.processes == 1:
            return ""
        return f", times {self.processes} processes with a device each; what they tell each other is not counted"


def plan(settings: Settings) -> Plan:
    """What `fit(settings)` would do. Nothing is written, nothing downloaded; built-in pictures are drawn once."""
    settings = dataclasses.replace(settings, hardware=hardware_here(settings.hardware))
    records, drawn = division_of(records_of(settings.data))
    settings, reasons = resolve(settings, records, fetch=False)
    check_auxiliary(settings, None)
    splits = splits_of(records, settings.data, settings.select)
    check_judging(settings, splits)
    everyone = Ranks(world=settings.hardware.devices * settings.hardware.nodes)
    sampler = sampler_of(splits.train, settings.data, settings.seed, everyone)
    check_weights(settings.model)
    model = untrained_retriever(settings.model, settings.data.image)
    check_dims(settings, model)
    tests = {
        "test" if len(splits.tests) == 1 else f"test {test.name}": searched_pictures(test) for test in splits.tests
    }
    named = {"train": splits.train, "validation": splits.val, **tests}
    pictures = {name: size_words(part) for name, part in named.items() if part is not None}
    disk = sum((BYTES_PER_WEIGHT + BYTES_PER_LEARNER * w.requires_grad) * w.numel() for w in model.parameters())
    for part in {(part.name, part.root): part for part in (records, *splits.tests)}.values():
        compressed = settings.data.pack == "compressed"
        if settings.data.pack != "no" and fresh_pack(part, settings.data.side, compressed=compressed) is None:
            side = min(settings.data.side, median_side(part, part.name))  # smaller pictures are kept as they are
            disk += expected_bytes(part, side, compressed)
    steps = settings.epochs * sampler.batches
    return Plan(
        settings, [*splits.notes, *cautions(settings), *reasons, *drawn], pictures, steps, disk, _rate(model, settings)
    )


def _rate(model: Retriever, settings: Settings) -> float:
    """Pictures a second, forwards and backwards, of the second of two batches; of two chunks, where it is chunks."""
    device = device_of(settings.hardware.device)
    model, dtype = model.to(device), autocast_of(settings.hardware, device)
    image, count = settings.data.image, settings.data.parts or settings.data.batch_size
    frozen = settings.model.freeze_backbone
    if device.type != "cuda" and not frozen:  # vectors are small
        count = min(count, TRIED * max(1, round((224 / image) ** 2)))
    images = torch.randn(count, *((model.width,) if frozen else (3, image, image)), device=device)
    taken = 0.0
    for _ in range(2):
        began = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            if settings.data.parts is not None:
                with torch.no_grad():
                    model(images)
            vectors = model(images)
        vectors.square().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken = time.perf_counter() - began
    return count / taken


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
