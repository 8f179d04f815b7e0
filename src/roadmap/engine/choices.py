"""Defaults for pictures of one's own, chosen by how many they are and how large, each with its reason."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from roadmap.config.settings import Settings
from roadmap.data import Records
from roadmap.data.randomness import permutation
from roadmap.data.records import Ints
from roadmap.engine.splits import MANY_CLASSES, division_of, held_out_classes
from roadmap.engine.splits import OWN as OWN
from roadmap.hardware import device_of
from roadmap.models import WeightsError
from roadmap.models.backbones import SMALL as SMALL_CNN
from roadmap.models.hub import hub_file

LOOKED_AT = 64  # pictures whose size is looked at
SMALL, MIDDLE = 48, 112  # median shorter side up to which pictures count as such
PICTURES_SEEN = 200_000  # by a pretrained network over all epochs; from scratch five times as many


def chosen(settings: Settings, records: Records, given: frozenset[str] | None) -> tuple[Settings, Records, list[str]]:
    """Settings with what nobody gave filled in, records with a test split, and the reasons, a sentence each.

    Datasets with a recipe are left as they are; so are settings that a person gave.
    """
    if settings.data.name not in OWN:
        return settings, records, []
    reasons: list[str] = []
    if records.splits is None:
        records, drawn = division_of(records)
        reasons += drawn
    if given is None:
        return settings, records, reasons
    if "train" not in records.split_names():
        return settings, records, reasons  # refused, with reasons, where the splits are made
    settings = copy.deepcopy(settings)
    choice = _Choice(settings, given, reasons)
    sizes = _class_sizes(records)
    _choose_size_and_model(choice, records)
    _choose_selection(choice, records, len(sizes))
    _choose_batches(choice, records, sizes)
    return settings, records, reasons


class _Choice:
    """Sets a setting unless a person gave it."""

    def __init__(self, settings: Settings, given: frozenset[str], reasons: list[str]) -> None:
        self.settings, self.given, self.reasons = settings, given, reasons

    def set(self, why: str, **values: Any) -> None:
        """Dotted names with two underscores for the dot: set(why, data__image=32)."""
        taken = []
        for name, value in values.items():
            dotted = name.replace("__", ".")
            if dotted in self.given:
                continue
            part, _, field = dotted.rpartition(".")
            setattr(getattr(self.settings, part) if part else self.settings, field, value)
            taken.append(f"{dotted}={value}")
        if taken:
            self.reasons.append(f"{' '.join(taken)}: {why}")


def _class_sizes(records: Records) -> Ints:
    """Pictures in each training class that has two or more; the others are left out of training."""
    _, sizes = np.unique(records.split("train").labels, return_counts=True)
    if not (sizes > 1).any():
        raise ValueError(
            f"{records.name}: no training class has two or more pictures; "
            "a picture is compared with others of its class"
        )
    return np.asarray(sizes[sizes > 1], dtype=np.int64)


def _choose_size_and_model(choice: _Choice, records: Records) -> None:
    side = _median_side(records)
    gpu = device_of(choice.settings.hardware.device).type == "cuda"
    small = _from_scratch(choice)
    if side <= MIDDLE:
        size = 32 if side <= SMALL else 64
        why = f"half of the pictures have a shorter side of {side} pixels or less, too small for a pretrained network"
        choice.set(why, data__image=size, data__resize=size, data__side=size, data__scale=[0.5, 1.0], **small)
        _choose_epochs(choice, records, 5 * PICTURES_SEEN)
        return
    name = "vit_small_patch14_dinov2" if gpu else "efficientnet_lite0"
    scratch = _reason_for_scratch(choice, name)
    if scratch is not None:
        choice.set(scratch, data__image=96, data__resize=96, data__side=128, data__scale=[0.3, 1.0], **small)
        _choose_epochs(choice, records, 5 * PICTURES_SEEN)
        return
    why = "pretrained, fast to fine-tune on a GPU" if gpu else "pretrained and light, for a CPU"
    size = 224 if gpu else 160
    choice.set(why, model__name=name, model__weights="hub", model__pooling="auto", model__layer_norm=False)
    choice.set("for fine-tuning", data__image=size, data__resize=size * 8 // 7, optim__lr=1e-5 if gpu else 1e-4)
    _choose_epochs(choice, records, PICTURES_SEEN)


def _from_scratch(choice: _Choice) -> dict[str, Any]:
    """What suits the small network; another one that a person gave takes a gentler rate."""
    another = "model.name" in choice.given and choice.settings.model.name != SMALL_CNN
    return {
        "model__name": SMALL_CNN,
        "model__weights": "random",
        "model__layer_norm": not another,
        "optim__lr": 1e-3 if another else 1e-2,
        "optim__schedule": "cosine",
        "optim__warmup": 0.5,
    }


def _reason_for_scratch(choice: _Choice, name: str) -> str | None:
    """Why nothing pretrained is taken; None where it is: the one called `name`, or what a person gave."""
    model, given = choice.settings.model, choice.given
    if ("model.weights" in given and model.weights == "random") or ("model.name" in given and model.name == SMALL_CNN):
        return "a network that starts at random learns from scratch"
    if {"model.name", "model.weights"} & given:
        return None
    try:
        hub_file(name)
    except WeightsError as error:
        return f"a small network learns from scratch, much weaker than a pretrained one: {error}"
    return None


def _choose_epochs(choice: _Choice, records: Records, seen: int) -> None:
    train = int((records.splits == "train").sum()) if records.splits is not None else len(records)
    epochs = int(np.clip(round(seen / max(1, train)), 3, 60))
    choice.set(f"{train:,} training pictures", epochs=epochs)


def _choose_selection(choice: _Choice, records: Records, classes: int) -> None:
    if classes < MANY_CLASSES and "val" not in records.split_names():
        choice.set(f"{classes} training classes are too few to hold some out for choosing the epoch", select__by="last")


def _choose_batches(choice: _Choice, records: Records, sizes: Ints) -> None:
    data, select = choice.settings.data, choice.settings.select
    holds_out = select.by == "held_out" and "val" not in records.split_names()
    spare = len(sizes) - (held_out_classes(len(sizes), select.fraction) if holds_out else 0)
    per_class = data.per_class if "data.per_class" in choice.given else 4 if np.median(sizes) >= 4 else 2
    batch = per_class * max(1, min(max(2, 128 // per_class), spare))
    why = f"{len(sizes)} training classes of {int(np.median(sizes))} pictures (median)"
    choice.set(why, data__per_class=per_class, data__batch_size=batch)
    if int(sizes.sum()) // data.batch_size < 10:
        choice.set("so that an epoch is more than a few steps", data__batches=10)


def _median_side(records: Records) -> int:
    """Of some of the pictures, read from their headers; what cannot be read is left to the decoder to report."""
    sides = []
    for index in permutation(len(records), 0, len(records))[:LOOKED_AT]:
        try:
            with Image.open(records.path(int(index))) as picture:
                sides.append(min(picture.size))
        except (OSError, UnidentifiedImageError, ValueError):
            continue
    if not sides:
        raise ValueError(
            f"none of {min(LOOKED_AT, len(records))} pictures below {records.root} could be opened; "
            f"run: roadmap data check folder {records.root}"
        )
    return int(np.median(sides))
