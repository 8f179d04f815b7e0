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

from roadmap.config import settings_checks as limits
from roadmap.config.settings_checks import AUTO, setting
from roadmap.config.settings_checks import SettingError as SettingError
from roadmap.config.settings_checks import keyword_arguments as keyword_arguments

PRECISIONS = ("auto", "32", "bf16", "fp16")
COMPILING = ("auto", "no", "blocks", "default", "reduce-overhead", "max-autotune")
LEARNING = ("all", "biases")
POOLINGS = ("auto", "avg", "max", "gem", "token", "both")
PACKING = ("auto", "yes", "no", "compressed")
DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass
class DataSettings:
    """Which pictures, how they are cut, and which of them meet in a batch. "auto": what suits them and the model.

    Attributes:
        name: a dataset of `roadmap.data`: glyphs, cub, sop, inaturalist, ..., folder, table.
        root: its folder or file; None only for glyphs, which are drawn.
        test_sets: other datasets to test on, name -> root (SfM-120k is tested on roxford5k and rparis6k).
        image: side of the square pictures that the model sees.
        resize: shorter side before the centre crop of evaluation.
        squeeze: which pictures are cut as if they were squares, which loses their aspect: "no" ones, "test" ones, or
            "all", as the paper's released code did on SOP.
        scale: range of the share of the area that a random crop keeps.
        ratio: range of the width / height of a random crop.
        flip: probability of a horizontal flip.
        pack: whether pictures are decoded once and kept ("auto": yes, unless a pack would be large and none is there;
            compressed, where it would not fit the disk). "compressed" keeps JPEGs: a seventh of the disk, and lossy.
        side: shorter side of packed pictures; "auto": no smaller than `resize`.
        sampler: "m_per_class", or "category_pairs" (SOP's hard batches).
        batch_size: pictures in a batch, over all devices.
        chunk: pictures that go through the model at a time; None for the whole batch. The gradient is that of the
            batch, in the memory of a chunk, for a third more time than steps of a chunk take.
        per_class: pictures of each class in a batch.
        batches: batches in an epoch; None for as many as the pictures fill, "auto" for at least 10.
        batches_per_pair: of category_pairs, how often each pair of categories meets in an epoch.
        workers: threads or processes that prepare pictures; None for one per core.
        train_on_val: train on the validation pictures too, where the dataset has such, as released for SfM-120k.
        on_error: a picture that cannot be decoded: "raise", or "skip" and count it.
    """

    name: str = "glyphs"
    root: Optional[str] = setting(None, limits.NAMED)  # noqa: UP045 - read at run time by the command line's configuration, on Python 3.10 too
    test_sets: dict[str, str] = field(default_factory=dict)
    image: int = setting(AUTO, limits.AT_LEAST_1)
    resize: int = setting(AUTO, limits.AT_LEAST_1)
    squeeze: str = setting("no", ("no", "test", "all"))
    scale: list[float] = setting(AUTO, limits.SHARES)  # noqa: RUF009 - a dataclasses.field
    ratio: list[float] = setting([0.75, 1.3333333333333333], limits.RANGE)  # noqa: RUF009
    flip: float = setting(0.5, limits.SHARE)
    pack: str = setting("auto", PACKING)
    side: int = setting(AUTO, limits.AT_LEAST_1)
    sampler: str = setting("m_per_class", ("m_per_class", "category_pairs"))
    batch_size: int = setting(AUTO, limits.AT_LEAST_1)
    chunk: Optional[int] = setting(None, limits.AT_LEAST_1)  # noqa: UP045
    per_class: int = setting(AUTO, limits.AT_LEAST_1)
    batches: Optional[int] = setting(AUTO, limits.AT_LEAST_1)  # noqa: UP045
    batches_per_pair: int = setting(10, limits.AT_LEAST_1)
    workers: Optional[int] = setting(None, limits.AT_LEAST_0)  # noqa: UP045
    train_on_val: bool = False
    on_error: str = setting("raise", ("raise", "skip"))

    def __post_init__(self) -> None:
        limits.check(self, "data.")

    @property
    def parts(self) -> Optional[int]:  # noqa: UP045
        """`chunk`, where a batch is more than one."""
        return self.chunk if self.chunk is not None and self.chunk < self.batch_size else None


@dataclass
class ModelSettings:
    """Backbone, pooling and head. Written down alone it is the built-in network; `Settings()` leaves it to the program.

    Attributes:
        name: "small_cnn" (built in, for small pictures), any name that timm knows, or "auto".
        weights: "random", "hub" (timm downloads them), the path of a .safetensors or .pth file, for the backbone; the
            folder of a run, to begin with all weights of its best epoch; or "auto".
        pooling: "avg", "max", "gem", "token" (class token), "both" (class token and mean of the patches, side by
            side: twice as wide), or "auto": what the backbone was trained with.
        layer_norm: normalise the pooled features, without trained scale and shift, before the projection; or "auto".
        dim: dimensions of the linear projection; None for none.
        normalise: whether vectors have length 1 in training; false leaves them as long as they come, for losses that
            look at their length (cross_entropy, sec). Evaluated and deployed they always have length 1.
        freeze_batch_norm: keep the running statistics of BatchNorm as they came (its scale and shift still learn).
        learns: what learns of the backbone: "all" of it, or its "biases" alone, some thousandths of its weights: what
            linear layers, convolutions and norms add (BitFit; Ben Zaken et al., ACL 2022). All of the head learns.
        freeze_layers: so many of the backbone's layers stay as they came, and are spared the pass backwards: the stem
            is the first, each block one more, as for `optim.layer_decay`.
        freeze_backbone: train the projection alone. Each picture goes through the backbone once, cut as for evaluation,
            and what comes out is kept: no random crops, and steps that take a CPU a millisecond. Needs `dim`.
        drop_path: stochastic depth, where the backbone has it.
        drop_distillation: load a distilled transformer's weights into the plain one, dropping its distillation token.
        stride_first: of a ResNet with bottlenecks, halve the map in the first convolution of a stage (1 x 1, as He et
            al. 2015 trained it) instead of the second (3 x 3, as torchvision and timm do); weights are for one of them.
    """

    name: str = setting("small_cnn", auto=True)
    weights: str = setting("random", auto=True)
    pooling: str = setting("auto", POOLINGS)
    layer_norm: bool = setting(False, auto=True)
    dim: Optional[int] = setting(None, limits.AT_LEAST_1)  # noqa: UP045
    normalise: bool = True
    freeze_batch_norm: bool = False
    learns: str = setting("all", LEARNING)
    freeze_layers: int = setting(0, limits.AT_LEAST_0)
    freeze_backbone: bool = False
    drop_path: float = setting(0.0, limits.BELOW_1)
    drop_distillation: bool = False
    stride_first: bool = False

    def __post_init__(self) -> None:
        limits.check(self, "model.")


@dataclass
class MemorySettings:
    """Earlier batches that a batch is compared with (cross-batch memory; Wang et al., CVPR 2020).

    Attributes:
        size: pictures in memory; null for none, "auto" for all training pictures, but no more than 60,000.
        warmup: epochs before it is used and filled, while the embeddings still change fast; fractions are allowed.
        repeats: whether older copies of a picture stay in memory when it comes again.
        form: "joined": one comparison with batch and memory together; "added": the loss of the batch plus that against
            the memory, as in XBM; "auto": joined for the AP losses and calibration, added for the others.
        weight: of the loss against the memory, in the added form.
    """

    size: Optional[int] = setting(None, limits.AT_LEAST_1, auto=True)  # noqa: UP045
    warmup: float = setting(0.0, limits.AT_LEAST_0)
    repeats: bool = False
    form: str = setting("auto", ("auto", "joined", "added"))
    weight: float = setting(1.0, limits.AT_LEAST_0)

    def __post_init__(self) -> None:
        limits.check(self, "memory.")


@dataclass
class OptimSettings:
    """How the weights move.

    Attributes:
        name: "adam", "adamw" or "sgd".
        lr: learning rate of the backbone, at the end of the warm-up; "auto": what suits the model.
        head_lr: rate of projection and pooling; None for `lr`.
        loss_lr: of the loss's own weights, where it has such (proxies, class weights); None for 100 times `lr`.
        loss_weight_decay: decay of the loss's own weights.
        auxiliary_lr: rate of the weights of an auxiliary module, which decay as the model's do; None for `head_lr`.
        weight_decay: decay of all parameters, or of matrices only (`decay_matrices_only`).
        decay_matrices_only: leave biases, scales and tokens undecayed.
        momentum: momentum of SGD; AdamW and Adam have their own.
        eps: what Adam adds to the root of its second moment; 1 makes small gradients count for less.
        layer_decay: factor on the rate per layer, from the last to the first; 1 for none.
        schedule: "constant", "multistep" or "cosine".
        milestones: epochs at which multistep multiplies the rate by `gamma`.
        gamma: the factor of multistep.
        warmup: epochs of linear warm-up; fractions are allowed.
        head_first: epochs in which the backbone rests and all else moves; fractions are allowed.
        final: cosine's last rate as a share of the first.
        clip: largest norm of the gradient; None for no limit.
        ema: decay of an average of the weights, which is what is evaluated and kept; None for none.
    """

    name: str = setting("adamw", ("adam", "adamw", "sgd"))
    lr: float = setting(1e-3, limits.ABOVE_0, auto=True)
    head_lr: Optional[float] = setting(None, limits.ABOVE_0)  # noqa: UP045
    loss_lr: Optional[float] = setting(None, limits.ABOVE_0)  # noqa: UP045
    loss_weight_decay: float = setting(0.0, limits.AT_LEAST_0)
    auxiliary_lr: Optional[float] = setting(None, limits.ABOVE_0)  # noqa: UP045
    weight_decay: float = setting(1e-4, limits.AT_LEAST_0)
    decay_matrices_only: bool = False
    momentum: float = setting(0.9, limits.BELOW_1)
    eps: float = setting(1e-8, limits.ABOVE_0)
    layer_decay: float = setting(1.0, limits.ABOVE_0)
    schedule: str = setting("constant", ("constant", "multistep", "cosine"))
    milestones: list[int] = field(default_factory=list)
    gamma: float = setting(0.3, limits.ABOVE_0)
    warmup: float = setting(0.0, limits.AT_LEAST_0)
    head_first: float = setting(0.0, limits.AT_LEAST_0)
    final: float = setting(0.0, limits.SHARE)
    clip: Optional[float] = setting(None, limits.ABOVE_0)  # noqa: UP045
    ema: Optional[float] = setting(None, limits.INSIDE)  # noqa: UP045

    def __post_init__(self) -> None:
        limits.check(self, "optim.")


@dataclass
class SelectSettings:
    """Which epoch's weights are kept as the best.

    Attributes:
        by: "held_out": the best on training classes that are held out; "last": the last epoch, trained on all classes;
            "test": the best on the test set, as the paper's released code did, which flatters the result;
            "auto": the first, where there are classes enough.
        fraction: share of the training classes that is held out, where the dataset has no validation split of its own.
        metric: metric by which the best epoch is chosen, such as "mAP@R" or "R@1".
        every: epochs between evaluations; the last is always evaluated.
    """

    by: str = setting("held_out", ("auto", "held_out", "last", "test"))
    fraction: float = setting(0.1, limits.INSIDE)
    metric: str = "mAP@R"
    every: int = setting(1, limits.AT_LEAST_1)

    def __post_init__(self) -> None:
        limits.check(self, "select.")


@dataclass
class HardwareSettings:
    """Where and how it is computed. Losses and scores are float32 whatever is chosen.

    Attributes:
        device: "auto", "cpu", "cuda", "mps".
        devices: how many devices on each machine, with a process for each; they share the batch. On a CPU, how many
            processes. "auto": all GPUs of the machine.
        nodes: machines; more than one are started by torchrun or Slurm.
        precision: of the model: "32", "bf16", "fp16" (with a gradient scaler), or "auto": bf16 on a GPU, fp16 on one
            that is too old for it, 32 elsewhere.
        compile: "blocks" for those that the network repeats, in seconds, its pass recorded as a CUDA graph; a mode of
            torch.compile for the whole network, in a minute; "no"; or "auto": on a GPU blocks, where the run is long
            enough to pay for it.
        channels_last: memory layout in which convolutions are faster.
        deterministic: refuse operations that differ from run to run.
        threads: of the CPU; None for torch's choice.
        time_limit: minutes after which a run saves itself and leaves, to be resumed; None for no limit.
    """

    device: str = setting("auto", DEVICES)
    devices: int = setting(1, limits.AT_LEAST_1, auto=True)
    nodes: int = setting(1, limits.AT_LEAST_1)
    precision: str = setting("auto", PRECISIONS)
    compile: str = setting("auto", COMPILING)
    channels_last: bool = True
    deterministic: bool = False
    threads: Optional[int] = setting(None, limits.AT_LEAST_1)  # noqa: UP045
    time_limit: Optional[float] = setting(None, limits.ABOVE_0)  # noqa: UP045

    def __post_init__(self) -> None:
        limits.check(self, "hardware.")


@dataclass
class Settings:
    """A whole run.

    Attributes:
        loss: its name ("roadmap", "supap", ...) under "name", and what its constructor takes.
        auxiliary: what is minimised beside it, with weights of its own: its name ("mic", ...; "none" for nothing) under
            "name", and what its constructor takes.
        dims: for vectors that can be cut (Matryoshka): the loss is also that of the first so many dimensions, each of
            them added, and so are the metrics; [] for whole vectors alone.
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
    auxiliary: dict[str, Any] = field(default_factory=lambda: {"name": "none"})
    memory: MemorySettings = field(default_factory=MemorySettings)
    dims: list[int] = setting([], limits.DIMENSIONS)  # noqa: RUF009
    optim: OptimSettings = field(
        default_factory=lambda: OptimSettings(lr=AUTO, schedule="cosine", warmup=0.5)  # type: ignore[arg-type]
    )
    select: SelectSettings = field(default_factory=lambda: SelectSettings(by=AUTO))
    hardware: HardwareSettings = field(default_factory=HardwareSettings)
    epochs: int = setting(AUTO, limits.AT_LEAST_1)
    seed: int = setting(0, limits.AT_LEAST_0)
    checkpoint_minutes: float = setting(1.0, limits.AT_LEAST_0)
    out: str = setting("runs", limits.NAMED)
    run: Optional[str] = setting(None, limits.NAMED)  # noqa: UP045
    recipe: Optional[str] = None  # noqa: UP045

    def __post_init__(self) -> None:
        limits.check(self, "")
        if "name" not in self.loss:
            raise SettingError("loss.name", "loss must have a name, such as {'name': 'roadmap'}")
        if "name" not in self.auxiliary:
            raise SettingError("auxiliary.name", "auxiliary must have a name, such as {'name': 'none'}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON or YAML; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """The Settings that `as_dict` described; an unknown key is refused, with the nearest known one."""
        parts = {
            "data": DataSettings,
            "model": ModelSettings,
            "memory": MemorySettings,
            "optim": OptimSettings,
            "select": SelectSettings,
            "hardware": HardwareSettings,
        }
        given = keyword_arguments(cls, values, "")
        for name, kind in parts.items():
            if name not in given:
                continue
            if not isinstance(given[name], Mapping):
                came = f"{type(given[name]).__name__} {given[name]!r}"
                raise SettingError(name, f"{name} must hold settings by name, got {came}")
            given[name] = kind(**keyword_arguments(kind, given[name], f"{name}."))
        return cls(**given)
