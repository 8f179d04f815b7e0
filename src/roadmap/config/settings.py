"""Everything that decides a training run, as plain values. A run is a pure function of these and of the pictures.

The command line composes them from `roadmap/config/groups`; a program of one's own can write them down directly:

    Settings(data=DataSettings(name="cub", root="CUB_200_2011"), epochs=20)
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

PRECISIONS = ("auto", "32", "bf16", "fp16")
COMPILING = ("auto", "no", "default", "reduce-overhead", "max-autotune")
POOLINGS = ("auto", "avg", "max", "gem", "token")
SCHEDULES = ("constant", "multistep", "cosine")
OPTIMISERS = ("adam", "adamw", "sgd")
SAMPLERS = ("m_per_class", "category_pairs")
SELECTIONS = ("held_out", "last", "test")
PACKING = ("auto", "yes", "no")
DEVICES = ("auto", "cpu", "cuda", "mps")


class SettingError(ValueError):
    """A setting that cannot be: whoever gave it, by whatever spelling, can look for it by its name.

    Attributes:
        field: the dotted name of the setting, such as "data.root"; the message begins with it or holds it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass
class DataSettings:
    """Which pictures, how they are cut, and which of them meet in a batch.

    Attributes:
        name: a dataset of `roadmap.data`: glyphs, cub, sop, inaturalist, ..., folder, table.
        root: where it lies; None only for glyphs, which are drawn.
        test_sets: other datasets to test on, name -> root (SfM-120k is tested on roxford5k and rparis6k).
        image: side of the square pictures that the model sees.
        resize: shorter side before the centre crop of evaluation.
        scale: range of the share of the area that a random crop keeps.
        ratio: range of its width / height.
        flip: probability of a horizontal flip.
        pack: whether pictures are decoded once and kept ("auto": yes, unless a pack would be large and none is there).
        side: shorter side of packed pictures.
        sampler: "m_per_class", or "category_pairs" (SOP's hard batches).
        batch_size: pictures in a batch, over all devices.
        per_class: pictures of each class in a batch.
        batches: batches in an epoch; None for as many as the pictures fill.
        batches_per_pair: of category_pairs, how often each pair of categories meets in an epoch.
        workers: threads or processes that prepare pictures; None for one per core.
        on_error: a picture that cannot be decoded: "raise", or "skip" and count it.
    """

    name: str = "glyphs"
    root: Optional[str] = None  # noqa: UP045 - read at run time by the command line's configuration, on Python 3.10 too
    test_sets: dict[str, str] = field(default_factory=dict)
    image: int = 224
    resize: int = 256
    scale: list[float] = field(default_factory=lambda: [0.16, 1.0])
    ratio: list[float] = field(default_factory=lambda: [0.75, 1.3333333333333333])
    flip: float = 0.5
    pack: str = "auto"
    side: int = 256
    sampler: str = "m_per_class"
    batch_size: int = 128
    per_class: int = 4
    batches: Optional[int] = None  # noqa: UP045
    batches_per_pair: int = 10
    workers: Optional[int] = None  # noqa: UP045
    on_error: str = "raise"

    def __post_init__(self) -> None:
        _allow("data.pack", self.pack, PACKING)
        _allow("data.sampler", self.sampler, SAMPLERS)
        _allow("data.on_error", self.on_error, ("raise", "skip"))
        for name in ("image", "resize", "side", "batch_size", "per_class", "batches", "batches_per_pair"):
            _at_least(f"data.{name}", getattr(self, name), 1)
        _at_least("data.workers", self.workers, 0)
        _share("data.flip", self.flip)
        _interval("data.scale", self.scale, most=1.0)
        _interval("data.ratio", self.ratio)


@dataclass
class ModelSettings:
    """Backbone, pooling and head.

    Attributes:
        name: "small_cnn" (built in, for small pictures) or any name that timm knows.
        weights: "random", "hub" (timm downloads them), or the path of a .safetensors or .pth file.
        pooling: "avg", "max", "gem", "token" (class token), or "auto": what the backbone was trained with.
        layer_norm: normalise the pooled features, without trained scale and shift, before the projection.
        dim: dimensions of the linear projection; None for none.
        freeze_batch_norm: keep the running statistics of BatchNorm as they came (its scale and shift still learn).
        drop_path: stochastic depth, where the backbone has it.
        drop_distillation: load a distilled transformer's weights into the plain one, dropping its distillation token.
    """

    name: str = "small_cnn"
    weights: str = "random"
    pooling: str = "auto"
    layer_norm: bool = False
    dim: Optional[int] = None  # noqa: UP045
    freeze_batch_norm: bool = False
    drop_path: float = 0.0
    drop_distillation: bool = False

    def __post_init__(self) -> None:
        _allow("model.pooling", self.pooling, POOLINGS)
        _at_least("model.dim", self.dim, 1)
        if not 0 <= self.drop_path < 1:
            raise ValueError(f"model.drop_path must be at least 0 and below 1, got {self.drop_path}")


@dataclass
class OptimSettings:
    """How the weights move.

    Attributes:
        name: "adam", "adamw" or "sgd" (with momentum 0.9).
        lr: learning rate of the backbone, at the end of the warm-up.
        head_lr: of projection and pooling; None for the same.
        loss_lr: of the loss's own weights, where it has such (proxies, class weights); None for 100 times `lr`.
        weight_decay: of all parameters, or of matrices only (`decay_matrices_only`).
        decay_matrices_only: leave biases, scales and tokens undecayed.
        layer_decay: factor on the rate per layer, from the last to the first; 1 for none.
        schedule: "constant", "multistep" or "cosine".
        milestones: epochs at which multistep multiplies the rate by `gamma`.
        gamma: that factor.
        warmup: epochs of linear warm-up; fractions are allowed.
        final: cosine's last rate as a share of the first.
        clip: largest norm of the gradient; None for no limit.
        ema: decay of an average of the weights, which is what is evaluated and kept; None for none.
    """

    name: str = "adamw"
    lr: float = 1e-3
    head_lr: Optional[float] = None  # noqa: UP045
    loss_lr: Optional[float] = None  # noqa: UP045
    weight_decay: float = 1e-4
    decay_matrices_only: bool = False
    layer_decay: float = 1.0
    schedule: str = "constant"
    milestones: list[int] = field(default_factory=list)
    gamma: float = 0.3
    warmup: float = 0.0
    final: float = 0.0
    clip: Optional[float] = None  # noqa: UP045
    ema: Optional[float] = None  # noqa: UP045

    def __post_init__(self) -> None:
        _allow("optim.name", self.name, OPTIMISERS)
        _allow("optim.schedule", self.schedule, SCHEDULES)
        for name in ("lr", "head_lr", "loss_lr", "layer_decay", "gamma", "clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"optim.{name} must be above 0, got {value}")
        for name in ("weight_decay", "warmup"):
            _at_least(f"optim.{name}", getattr(self, name), 0)
        _share("optim.final", self.final)
        _between("optim.ema", self.ema)


@dataclass
class SelectSettings:
    """Which epoch's weights are kept as the best.

    Attributes:
        by: "held_out": the best on training classes that are held out; "last": the last epoch, trained on all classes;
            "test": the best on the test set, as the paper did, which flatters the result.
        fraction: of the training classes that are held out, where the dataset has no validation split of its own.
        metric: what is compared, such as "mAP@R" or "R@1".
        every: epochs between evaluations; the last is always evaluated.
    """

    by: str = "held_out"
    fraction: float = 0.1
    metric: str = "mAP@R"
    every: int = 1

    def __post_init__(self) -> None:
        _allow("select.by", self.by, SELECTIONS)
        _at_least("select.every", self.every, 1)
        _between("select.fraction", self.fraction)


@dataclass
class HardwareSettings:
    """Where and how it is computed. Losses and scores are float32 whatever is chosen.

    Attributes:
        device: "auto", "cpu", "cuda", "mps".
        devices: how many of them.
        precision: of the model: "32", "bf16", "fp16" (with a gradient scaler), or "auto": bf16 on a GPU, 32 elsewhere.
        compile: torch.compile's mode, "no", or "auto": on a GPU when the run is long enough to pay for compiling.
        channels_last: memory layout in which convolutions are faster.
        deterministic: refuse operations that differ from run to run.
        threads: of the CPU; None for torch's choice.
    """

    device: str = "auto"
    devices: int = 1
    precision: str = "auto"
    compile: str = "auto"
    channels_last: bool = True
    deterministic: bool = False
    threads: Optional[int] = None  # noqa: UP045

    def __post_init__(self) -> None:
        _allow("hardware.device", self.device, DEVICES)
        _allow("hardware.precision", self.precision, PRECISIONS)
        _allow("hardware.compile", self.compile, COMPILING)
        _at_least("hardware.devices", self.devices, 1)
        _at_least("hardware.threads", self.threads, 1)


@dataclass
class Settings:
    """A whole run.

    Attributes:
        loss: its name ("roadmap", "supap", ...) under "name", and what its constructor takes.
        epochs: passes over the training pictures.
        seed: of weights, batches and crops.
        checkpoint_minutes: least time between two saved states, looked at after each epoch; 0 saves every epoch.
        out: folder that run folders are made in.
        run: the run's own folder; None for a new one in `out`, named by date, data and loss.
        recipe: the recipe these came from, for the record.
    """

    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    loss: dict[str, Any] = field(default_factory=lambda: {"name": "roadmap"})
    optim: OptimSettings = field(default_factory=OptimSettings)
    select: SelectSettings = field(default_factory=SelectSettings)
    hardware: HardwareSettings = field(default_factory=HardwareSettings)
    epochs: int = 10
    seed: int = 0
    checkpoint_minutes: float = 1.0
    out: str = "runs"
    run: Optional[str] = None  # noqa: UP045
    recipe: Optional[str] = None  # noqa: UP045

    def __post_init__(self) -> None:
        _at_least("epochs", self.epochs, 1)
        _at_least("seed", self.seed, 0)
        _at_least("checkpoint_minutes", self.checkpoint_minutes, 0)
        if "name" not in self.loss:
            raise ValueError("loss must have a name, such as {'name': 'roadmap'}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON or YAML; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """The Settings that `as_dict` described; an unknown key is refused, with the nearest known one."""
        parts = {
            "data": DataSettings,
            "model": ModelSettings,
            "optim": OptimSettings,
            "select": SelectSettings,
            "hardware": HardwareSettings,
        }
        given = known(cls, values, "")
        for name in given.keys() & {"loss", *parts}:
            if not isinstance(given[name], Mapping):
                what = "its name and options, such as {'name': 'roadmap'}" if name == "loss" else "settings by name"
                raise ValueError(f"{name} must hold {what}, got {type(given[name]).__name__} {given[name]!r}")
        for name, kind in parts.items():
            if name in given:
                given[name] = kind(**known(kind, given[name], f"{name}."))
        return cls(**given)


def known(kind: type[Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values as keyword arguments of a dataclass; an unknown name is an error that offers the nearest."""
    names = [f.name for f in dataclasses.fields(kind)]
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise ValueError(
                f"unknown setting {where}{name}{f', did you mean {where}{near[0]}?' if near else ''} "
                f"Known: {', '.join(names)}"
            )
    return dict(values)


def _allow(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, 1)
        raise ValueError(
            f"{name} must be one of {', '.join(allowed)}, got {value!r}{f'; did you mean {near[0]!r}?' if near else ''}"
        )


def _at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in 0..1, got {value}")


def _between(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < 1:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {value}")


def _interval(name: str, value: Sequence[float], most: float = math.inf) -> None:
    if len(value) != 2 or not 0 < value[0] <= value[1] <= most:
        limit = "" if math.isinf(most) else f" <= {most:g}"
        raise ValueError(f"{name} must be two numbers, 0 < low <= high{limit}, got {value}")
