"""What "auto" comes to: every setting that the program may choose, from the pictures and the hardware, with reasons."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from roadmap.config.settings import Settings
from roadmap.config.settings_checks import AUTO
from roadmap.data import Records
from roadmap.data.datasets.sources import GLYPH_SIZE
from roadmap.data.pictures.images import PictureError, picture_size
from roadmap.data.randomness import permutation
from roadmap.data.records import Ints
from roadmap.engine.inheritance import cautions_about_weights
from roadmap.engine.joining import hardware_here
from roadmap.engine.splits import MANY_CLASSES, held_out_classes
from roadmap.hardware import device_of
from roadmap.losses.named import OF_LENGTHS
from roadmap.models import WeightsError
from roadmap.models.backbones import SMALL_CNN, is_transformer, outline
from roadmap.models.beginning import left_by
from roadmap.models.hub import check_hub, hub_file

CHOSEN = {
    "data": ("image", "resize", "scale", "side", "batch_size", "per_class", "batches"),
    "model": ("name", "weights", "layer_norm"),
    "memory": ("size",),
    "optim": ("lr",),
    "select": ("by",),
    "": ("epochs",),
}
WARNING = "WARNING: "  # begins a reason that must not be overlooked
LOOKED_AT = 64  # pictures whose size is looked at
TINY_SIDE, SMALL_SIDE = 48, 112  # median shorter side up to which pictures count as such
PRETRAINED = {"cuda": ("vit_small_patch14_dinov2", 224), "cpu": ("efficientnet_lite0", 160)}
PICTURES_SEEN = 200_000  # by a pretrained network over all epochs; from scratch five times as many
GLYPHS_EPOCHS = 7
REMEMBERED = 60_000  # pictures in memory, at most (Table 2)


def resolve(settings: Settings, records: Records, fetch: bool = True) -> tuple[Settings, list[str]]:
    """Settings in which no "auto" is left that pictures, model or training decide, and the reasons, a sentence each.

    A reason that is a warning comes first. What a person gave stays; where nothing is "auto", nothing is looked at.

    Args:
        settings: as composed or written down.
        records: of `settings.data`, with their splits.
        fetch: download the weights of the network that is chosen; else only look whether they can be had.
    """
    if not unresolved(settings) or "train" not in records.split_names():
        return settings, []  # without training pictures it is refused, with reasons, where the splits are made
    choice = _Choice(copy.deepcopy(settings), records, fetch)
    _choose_model(choice)
    _choose_pictures(choice)
    _choose_epochs(choice)
    _choose_selection(choice)
    _choose_batches(choice)
    _choose_memory(choice)
    return Settings.from_dict(choice.settings.as_dict()), [*choice.warnings, *choice.reasons]


def cautions(settings: Settings) -> list[str]:
    """What can be trained and is rarely meant, a warning each; of settings in which nothing is left open."""
    data, loss, found = settings.data, settings.loss["name"], []
    if data.sampler == "m_per_class" and data.batch_size == data.per_class and settings.memory.size is None:
        found.append(
            f"{WARNING}each batch of {data.batch_size} pictures is of one class, so that none is compared with another "
            "class; raise data.batch_size, or remember earlier batches with memory=xbm"
        )
    model = settings.model
    if model.weights == "random" and (model.learns != "all" or model.freeze_layers):
        asked = "learns=biases" if model.learns != "all" else f"freeze_layers={model.freeze_layers}"
        found.append(
            f"{WARNING}model.{asked} with model.weights=random: what does not learn stays random; give trained weights"
        )
    found += [f"{WARNING}{said}" for said in cautions_about_weights(settings)]
    if settings.model.normalise and loss in OF_LENGTHS:
        found.append(
            f"{WARNING}the loss {loss} is about the length of vectors, which model.normalise=true makes 1; "
            "give model.normalise=false"
        )
    return found


def unresolved(settings: Settings) -> list[str]:
    """Dotted names of the settings that are still to be chosen."""
    values = settings.as_dict()
    found = []
    for part, names in CHOSEN.items():
        inside = values[part] if part else values
        found += [f"{part}.{name}".lstrip(".") for name in names if inside[name] == AUTO]
    return found


class _Choice:
    """Settings in the making.

    Attributes:
        settings: what is known so far; `set` replaces "auto".
        records: the pictures.
        fetch: whether weights may be downloaded.
        reasons, warnings: what is to be said about it.
    """

    def __init__(self, settings: Settings, records: Records, fetch: bool) -> None:
        self.settings, self.records, self.fetch = settings, records, fetch
        self.reasons: list[str] = []
        self.warnings: list[str] = []
        self._side: int | None = None

    def free(self, dotted: str) -> bool:
        return bool(self._value(dotted) == AUTO)

    def set(self, why: str, **values: Any) -> None:
        """Dotted names with two underscores for the dot: set(why, data__image=32). What is not "auto" stays."""
        taken = []
        for name, value in values.items():
            dotted = name.replace("__", ".")
            if self.free(dotted):
                part, _, field = dotted.rpartition(".")
                setattr(getattr(self.settings, part) if part else self.settings, field, value)
                taken.append(f"{dotted}={value}")
        if taken and why:
            self.reasons.append(f"{' '.join(taken)}: {why}")

    @property
    def side(self) -> int:
        """The median shorter side of the pictures."""
        if self._side is None:
            drawn = self.settings.data.name == "glyphs"
            self._side = GLYPH_SIZE if drawn else median_side(self.records, self.settings.data.name)
        return self._side

    @property
    def from_scratch(self) -> bool:
        return self.settings.model.weights == "random"

    @property
    def on_gpu(self) -> bool:
        return device_of(self.settings.hardware.device).type == "cuda"

    def _value(self, dotted: str) -> Any:
        part, _, field = dotted.rpartition(".")
        return getattr(getattr(self.settings, part) if part else self.settings, field)


def _choose_model(choice: _Choice) -> None:
    model = choice.settings.model
    if (before := left_by(model.weights)) is not None:
        choice.set(f"as {model.weights} left it", model__name=before[0].name, model__layer_norm=before[0].layer_norm)
    # centred features: without, all cosines are positive and thresholds on them hinder
    small = {"model__name": SMALL_CNN, "model__weights": "random", "model__layer_norm": True}
    if choice.free("model.name"):
        name, _ = PRETRAINED["cuda" if choice.on_gpu else "cpu"]
        if model.weights == "random":
            choice.set("a network that starts at random learns from scratch", **small)
        elif choice.free("model.weights") and choice.side <= SMALL_SIDE:
            why = f"half of the pictures have a shorter side of {choice.side} pixels or less"
            choice.set(f"{why}, too small for a pretrained network", **small)
        elif choice.free("model.weights") and not _reachable(choice, name):
            choice.set("learns from scratch, see the warning", **small)
        else:
            why = "pretrained, fast to fine-tune on a GPU" if choice.on_gpu else "pretrained and light, for a CPU"
            choice.set(why, model__name=name, model__weights="hub", model__layer_norm=False)
    published = model.name != SMALL_CNN
    choice.set(
        f"what suits {model.name}", model__weights="hub" if published else "random", model__layer_norm=not published
    )


def _reachable(choice: _Choice, name: str) -> bool:
    """Whether the weights of a network are here or can be fetched; a warning where not."""
    try:
        hub_file(name) if choice.fetch else check_hub(name)
    except WeightsError as error:
        data, file = choice.settings.data, f"{name}.safetensors"
        bring = f"curl -L -o {file} {error.address}" if error.address else f"download the weights of {name} as {file}"
        choice.warnings.append(
            f"{WARNING}no pretrained network can be had here, so a small one learns from scratch and will find much "
            f"less: {error.reason}. For a pretrained one, on a machine with network run\n    {bring}\n"
            f"bring that file here, and run\n    roadmap train data={data.name} data.root={data.root} "
            f"model.name={name} model.weights={file}"
        )
        return False
    return True


def _choose_pictures(choice: _Choice) -> None:
    """Their size and crops, and the rate, which follows the model."""
    data, name = choice.settings.data, choice.settings.model.name
    free = {key for key in ("data.image", "data.scale", "data.side", "optim.lr") if choice.free(key)}
    if choice.from_scratch and free:
        size = 32 if choice.side <= TINY_SIDE else 64 if choice.side <= SMALL_SIDE else 96
        scale, side = ([0.5, 1.0], 0) if choice.side <= SMALL_SIDE else ([0.3, 1.0], 128)
    else:
        _, size = PRETRAINED["cuda" if choice.on_gpu else "cpu"]
        scale, side = [0.16, 1.0], 256
    if (before := left_by(choice.settings.model.weights)) is not None:
        size = before[1]
    if free & {"data.image", "optim.lr"}:
        backbone, size = outline(name, size)
        _choose_rate(choice, is_transformer(backbone))
    image = size if "data.image" in free else data.image
    resize = (image if choice.from_scratch else image * 8 // 7) if choice.free("data.resize") else data.resize
    why = f"sizes that suit {name}{' and the pictures' if choice.from_scratch else ''}"
    choice.set(why, data__image=image, data__resize=resize, data__scale=scale, data__side=max(side, resize))


def _choose_rate(choice: _Choice, transformer: bool) -> None:
    """The same on every machine: a rate belongs to a model and where its weights come from."""
    name = choice.settings.model.name
    if choice.settings.model.freeze_backbone:
        choice.set("a projection after a frozen backbone", optim__lr=1e-3)
        return
    if choice.from_scratch:
        rate, why = (1e-2 if name == SMALL_CNN else 1e-3), "from scratch"
    else:
        rate, why = (1e-5 if transformer else 1e-4), "to fine-tune"
    if choice.settings.model.learns == "biases":
        rate, why = 10 * rate, f"{why}, its biases alone"
    kind = "a small network" if name == SMALL_CNN else "a transformer" if transformer else "a convolutional network"
    choice.set(f"{kind}, {why}", optim__lr=rate)


def _choose_epochs(choice: _Choice) -> None:
    if choice.settings.data.name == "glyphs":
        choice.set("enough for the built-in characters", epochs=GLYPHS_EPOCHS)
        return
    train = len(choice.records.split("train"))
    seen = PICTURES_SEEN * (5 if choice.from_scratch else 1)
    choice.set(f"{train:,} training pictures", epochs=int(np.clip(round(seen / max(1, train)), 3, 60)))


def _choose_selection(choice: _Choice) -> None:
    if not choice.free("select.by"):
        return
    classes = len(class_sizes(choice.records))
    if classes < MANY_CLASSES and "val" not in choice.records.split_names():
        why = f"{classes} training classes are too few to hold some out for choosing the epoch"
        choice.set(why, select__by="last")
    choice.set("", select__by="held_out")


def _choose_batches(choice: _Choice) -> None:
    data, select = choice.settings.data, choice.settings.select
    if not any(map(choice.free, ("data.per_class", "data.batch_size", "data.batches"))):
        return
    sizes = class_sizes(choice.records)
    holds_out = select.by == "held_out" and "val" not in choice.records.split_names()
    spare = len(sizes) - (held_out_classes(choice.records, select.fraction) if holds_out else 0)
    why = f"{len(sizes)} training classes of {int(np.median(sizes))} pictures (median)"
    per_class = (4 if np.median(sizes) >= 4 else 2) if choice.free("data.per_class") else data.per_class
    classes, hardware = max(1, min(max(2, 128 // per_class), spare)), hardware_here(choice.settings.hardware)
    processes = hardware.devices * hardware.nodes
    if (even := next((k for k in range(classes, 0, -1) if per_class * k % processes == 0), 0)) != classes:
        why += f", shared equally by {processes} processes"
    choice.set(why, data__per_class=per_class, data__batch_size=per_class * (even or classes))
    if int(sizes.sum()) // data.batch_size < 10:
        choice.set("so that an epoch is more than a few steps", data__batches=10)
    choice.set("", data__batches=None)


def _choose_memory(choice: _Choice) -> None:
    train = len(choice.records.split("train"))
    most = "all of them" if train <= REMEMBERED else f"{REMEMBERED:,} are what the paper could afford"
    choice.set(f"{train:,} training pictures, {most}", memory__size=min(train, REMEMBERED))


def class_sizes(records: Records) -> Ints:
    """Pictures in each training class that has two or more; the others are left out of training."""
    _, sizes = np.unique(records.split("train").labels, return_counts=True)
    if not (sizes > 1).any():
        raise ValueError(
            f"{records.name}: no training class has two or more pictures; "
            "a picture is compared with others of its class"
        )
    return np.asarray(sizes[sizes > 1], dtype=np.int64)


def median_side(records: Records, name: str) -> int:
    """Of some of the pictures, read from their headers; what cannot be read is left to the decoder to report."""
    sides = []
    for index in permutation(len(records), 0, len(records))[:LOOKED_AT]:
        try:
            sides.append(min(picture_size(records.path(int(index)))))
        except PictureError:
            continue
    if not sides:
        raise ValueError(
            f"none of {min(LOOKED_AT, len(records))} pictures below {records.root} could be opened; "
            f"run: roadmap data check {name} {records.root}"
        )
    return int(np.median(sides))
