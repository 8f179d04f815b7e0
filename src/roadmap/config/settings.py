"""Everything that decides a training run, as plain values. A run is a pure function of these and of the pictures.

The command line composes them from `roadmap/config/groups`; a program of one's own can write them down directly:

    Settings(data=DataSettings(name="cub", root="CUB_200_2011"), epochs=20)

"auto" stands for what the program chooses from the pictures and the hardware (`roadmap.engine.auto.resolve`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from roadmap.config import settings_checks as checks
from roadmap.config.settings_checks import AUTO, choosable
from roadmap.config.settings_checks import SettingError as SettingError
from roadmap.names import did_you_mean

PRECISIONS = ("auto", "32", "bf16", "fp16")
COMPILING = ("auto", "no", "default", "reduce-overhead", "max-autotune")
POOLINGS = ("auto", "avg", "max", "gem", "token")
SCHEDULES = ("constant", "multistep", "cosine")
OPTIMISERS = ("adam", "adamw", "sgd")
SAMPLERS = ("m_per_class", "category_pairs")
SELECTIONS = ("auto", "held_out", "last", "test")
PACKING = ("auto", "yes", "no")
DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass
class DataSettings:
    """Which pictures, how they are cut, and which of them meet in a batch. "auto": what suits them and the model.

    Attributes:
        name: a dataset of `roadmap.data`: glyphs, cub, sop, inaturalist, ..., folder, table.
        root: where it lies; None only for glyphs, which are drawn.
        test_sets: other datasets to test on, name -> root (SfM-120k is tested on roxford5k and rparis6k).
        image: side of the square pictures that the model sees.
        resize: shorter side before the centre crop of evaluation.
        squeeze: which pictures are cut as if they were squares, which loses their aspect: "no" ones, "test" ones, or
            "all", as the paper's released code did on SOP.
        scale: range of the share of the area that a random crop keeps.
        ratio: range of its width / height.
        flip: probability of a horizontal flip.
        pack: whether pictures are decoded once and kept ("auto": yes, unless a pack would be large and none is there).
        side: shorter side of packed pictures; "auto": no smaller than `resize`.
        sampler: "m_per_class", or "category_pairs" (SOP's hard batches).
        batch_size: pictures in a batch, over all devices.
        per_class: pictures of each class in a batch.
        batches: batches in an epoch; None for as many as the pictures fill, "auto" for at least 10.
        batches_per_pair: of category_pairs, how often each pair of categories meets in an epoch.
        workers: threads or processes that prepare pictures; None for one per core.
        train_on_val: train on the validation pictures too, where the dataset has such, as released for SfM-120k.
        on_error: a picture that cannot be decoded: "raise", or "skip" and count it.
    """

    name: str = "glyphs"
    root: Optional[str] = None  # noqa: UP045 - read at run time by the command line's configuration, on Python 3.10 too
    test_sets: dict[str, str] = field(default_factory=dict)
    image: int = choosable()
    resize: int = choosable()
    squeeze: str = "no"
    scale: list[float] = choosable()  # noqa: RUF009 - a dataclasses.field
    ratio: list[float] = field(default_factory=lambda: [0.75, 1.3333333333333333])
    flip: float = 0.5
    pack: str = "auto"
    side: int = choosable()
    sampler: str = "m_per_class"
    batch_size: int = choosable()
    per_class: int = choosable()
    batches: Optional[int] = choosable()  # noqa: UP045
    batches_per_pair: int = 10
    workers: Optional[int] = None  # noqa: UP045
    train_on_val: bool = False
    on_error: str = "raise"

    def __post_init__(self) -> None:
        checks.check_types(self, "data.")
        checks.check_choice("data.pack", self.pack, PACKING)
        checks.check_choice("data.sampler", self.sampler, SAMPLERS)
        checks.check_choice("data.squeeze", self.squeeze, ("no", "test", "all"))
        checks.check_choice("data.on_error", self.on_error, ("raise", "skip"))
        for name in ("image", "resize", "side", "batch_size", "per_class", "batches", "batches_per_pair"):
            checks.check_at_least(f"data.{name}", getattr(self, name), 1)
        checks.check_at_least("data.workers", self.workers, 0)
        checks.check_range("data.flip", self.flip, "[0", "1]", "lie in 0..1")
        checks.check_interval("data.scale", self.scale, most=1.0)
        checks.check_interval("data.ratio", self.ratio)


@dataclass
class ModelSettings:
    """Backbone, pooling and head. Written down alone it is the built-in network; `Settings()` leaves it to the program.

    Attributes:
        name: "small_cnn" (built in, for small pictures), any name that timm knows, or "auto".
        weights: "random", "hub" (timm downloads them), the path of a .safetensors or .pth file, or "auto".
        pooling: "avg", "max", "gem", "token" (class token), or "auto": what the backbone was trained with.
        layer_norm: normalise the pooled features, without trained scale and shift, before the projection; or "auto".
        dim: dimensions of the linear projection; None for none.
        freeze_batch_norm: keep the running statistics of BatchNorm as they came (its scale and shift still learn).
        drop_path: stochastic depth, where the backbone has it.
        drop_distillation: load a distilled transformer's weights into the plain one, dropping its distillation token.
        stride_first: of a ResNet with bottlenecks, halve the map in the first convolution of a stage (1 x 1, as He et
            al. 2015 trained it) instead of the second (3 x 3, as torchvision and timm do); weights are for one of them.
    """

    name: str = choosable("small_cnn")
    weights: str = choosable("random")
    pooling: str = "auto"
    layer_norm: bool = choosable(False)
    dim: Optional[int] = None  # noqa: UP045
    freeze_batch_norm: bool = False
    drop_path: float = 0.0
    drop_distillation: bool = False
    stride_first: bool = False

    def __post_init__(self) -> None:
        checks.check_types(self, "model.")
        checks.check_choice("model.pooling", self.pooling, POOLINGS)
        checks.check_at_least("model.dim", self.dim, 1)
        checks.check_range("model.drop_path", self.drop_path, "[0", "1)", "be at least 0 and below 1")


@dataclass
class OptimSettings:
    """How the weights move.

    Attributes:
        name: "adam", "adamw" or "sgd" (with momentum 0.9).
        lr: learning rate of the backbone, at the end of the warm-up; "auto": what suits the model.
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
    lr: float = choosable(1e-3)
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
        checks.check_types(self, "optim.")
        checks.check_choice("optim.name", self.name, OPTIMISERS)
        checks.check_choice("optim.schedule", self.schedule, SCHEDULES)
        for name in ("lr", "head_lr", "loss_lr", "layer_decay", "gamma", "clip"):
            checks.check_above_0(f"optim.{name}", getattr(self, name))
        for name in ("weight_decay", "warmup"):
            checks.check_at_least(f"optim.{name}", getattr(self, name), 0)
        checks.check_range("optim.final", self.final, "[0", "1]", "lie in 0..1")
        checks.check_range("optim.ema", self.ema, "(0", "1)", "lie strictly between 0 and 1")


@dataclass
class SelectSettings:
    """Which epoch's weights are kept as the best.

    Attributes:
        by: "held_out": the best on training classes that are held out; "last": the last epoch, trained on all classes;
            "test": the best on the test set, as the paper's released code did, which flatters the result;
            "auto": the first, where there are classes enough.
        fraction: of the training classes that are held out, where the dataset has no validation split of its own.
        metric: what is compared, such as "mAP@R" or "R@1".
        every: epochs between evaluations; the last is always evaluated.
    """

    by: str = choosable("held_out")
    fraction: float = 0.1
    metric: str = "mAP@R"
    every: int = 1

    def __post_init__(self) -> None:
        checks.check_types(self, "select.")
        checks.check_choice("select.by", self.by, SELECTIONS)
        checks.check_at_least("select.every", self.every, 1)
        checks.check_range("select.fraction", self.fraction, "(0", "1)", "lie strictly between 0 and 1")


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
        checks.check_types(self, "hardware.")
        checks.check_choice("hardware.device", self.device, DEVICES)
        checks.check_choice("hardware.precision", self.precision, PRECISIONS)
        checks.check_choice("hardware.compile", self.compile, COMPILING)
        checks.check_at_least("hardware.devices", self.devices, 1)
        checks.check_at_least("hardware.threads", self.threads, 1)


@dataclass
class Settings:
    """A whole run.

    Attributes:
        loss: its name ("roadmap", "supap", ...) under "name", and what its constructor takes.
        epochs: passes over the training pictures; "auto": fewer, the more pictures there are.
        seed: of weights, batches and crops.
        checkpoint_minutes: least time between two saved states, looked at after each epoch; 0 saves every epoch.
        out: folder that run folders are made in.
        run: the run's own folder; None for a new one in `out`, named by date, data and loss.
        recipe: the recipe these came from, for the record.
    """

    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=lambda: ModelSettings(AUTO, AUTO, layer_norm=AUTO))  # type: ignore[arg-type]
    loss: dict[str, Any] = field(default_factory=lambda: {"name": "roadmap"})
    optim: OptimSettings = field(
        default_factory=lambda: OptimSettings(lr=AUTO, schedule="cosine", warmup=0.5)  # type: ignore[arg-type]
    )
    select: SelectSettings = field(default_factory=lambda: SelectSettings(by=AUTO))
    hardware: HardwareSettings = field(default_factory=HardwareSettings)
    epochs: int = choosable()
    seed: int = 0
    checkpoint_minutes: float = 1.0
    out: str = "runs"
    run: Optional[str] = None  # noqa: UP045
    recipe: Optional[str] = None  # noqa: UP045

    def __post_init__(self) -> None:
        checks.check_types(self, "")
        checks.check_at_least("epochs", self.epochs, 1)
        checks.check_at_least("seed", self.seed, 0)
        checks.check_at_least("checkpoint_minutes", self.checkpoint_minutes, 0)
        if "name" not in self.loss:
            raise SettingError("loss.name", "loss must have a name, such as {'name': 'roadmap'}")

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
        for name, kind in parts.items():
            if name not in given:
                continue
            if not isinstance(given[name], Mapping):
                came = f"{type(given[name]).__name__} {given[name]!r}"
                raise SettingError(name, f"{name} must hold settings by name, got {came}")
            given[name] = kind(**known(kind, given[name], f"{name}."))
        return cls(**given)


def known(kind: type[Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values as keyword arguments of a dataclass; an unknown name is an error that offers the nearest."""
    names = [f.name for f in dataclasses.fields(kind)]
    for name in values:
        if name not in names:
            near = did_you_mean(f"{where}{name}", [f"{where}{other}" for other in names])
            raise SettingError(f"{where}{name}", f"unknown setting {where}{name}{near} Known: {', '.join(names)}")
    return dict(values)
