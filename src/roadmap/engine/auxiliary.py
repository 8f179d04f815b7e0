"""What a method needs beside a loss: a module with weights of its own, and what it does before each epoch.

A module that is given to `fit` is an `nn.Module` with

- `forward(features, labels) -> scalar`: what is added to the loss, of the features of the whole batch;
- `before_epoch(epoch, training)`, if it likes: a look at all training pictures, to change what it holds in buffers;
- `loss_parameters()`, if it likes: those of its weights that move as the loss's own do (proxies, boundaries).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roadmap.config.settings import SettingError, Settings
from roadmap.data.randomness import raw_bits
from roadmap.features import Features
from roadmap.losses.auxiliary import NONE, auxiliary_constructor, named_auxiliary
from roadmap.losses.processes import Gather, processes_of
from roadmap.ranks import ALONE, Ranks

OUTSIDE = "python:"  # before the name of a module that is not one of ours
EPOCHS = 6  # names the stream of random numbers, apart from those of samplers, crops and steps
Constructor = Callable[..., nn.Module]
Vectors = Callable[[Callable[[Features], Tensor]], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Training:
    """The training pictures, for an auxiliary module to look at before an epoch.

    Attributes:
        labels: (N,) their classes, on the device.
        vectors: (of) -> (n, K), what `of` makes of the `Features` of each picture, and (n,) which pictures they are:
            all but those that cannot be decoded. Pictures are cut as for evaluation, the network is in evaluation mode
            and keeps no graph, and every process gets the vectors of all.
        generator: of random numbers, on the CPU: a pure function of the run's seed and the epoch.
    """

    labels: Tensor
    vectors: Vectors
    generator: torch.Generator


class Auxiliary:
    """The auxiliary module of a run, in its steps and before its epochs, on one process or several.

    Args:
        module: as above; on the device.
        ranks: the processes that share each batch. Each then sees the features of the whole batch, and has the whole
            gradient of the module's weights; what it draws at random is drawn alike.
    """

    def __init__(self, module: nn.Module, ranks: Ranks = ALONE) -> None:
        self.module, self.ranks = module, ranks

    def __call__(self, features: Features, labels: Tensor, pictures: Tensor) -> Tensor:
        """What is added to the loss of a batch, of which this process may have a part."""
        processes = processes_of(None) if self.ranks.world > 1 else None
        if processes is None:
            return self._value(features._replace(pictures=pictures), labels)
        sizes = [rows for (rows,) in processes.agreed([len(labels)], labels.device)]

        def of_all(part: Tensor | None) -> Tensor | None:
            if part is None:
                return None
            everyone: Tensor = Gather.apply(part, processes, sizes, False, float(processes.count))[1]  # type: ignore[no-untyped-call]
            return everyone

        embedding = of_all(features.embedding)
        assert embedding is not None
        whole = Features(embedding, of_all(features.map), of_all(features.tokens), processes.rows(pictures, sizes))
        with processes.same_draws(labels.device):
            return self._value(whole, processes.rows(labels, sizes))

    def _value(self, features: Features, labels: Tensor) -> Tensor:
        value = self.module(features, labels)
        if not isinstance(value, Tensor) or value.numel() != 1:
            came = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"the auxiliary module {type(self.module).__name__} must give one number, got {came}")
        return value.reshape(())

    def prepare(self, epoch: int, labels: Tensor, vectors: Vectors, seed: int) -> None:
        """What the module does before an epoch, counted from 1: the same on all processes, and the same again in a run
        that is resumed there. Random numbers of the steps are left alone."""
        before_epoch: Callable[[int, Training], None] | None = getattr(self.module, "before_epoch", None)
        if before_epoch is None:
            return
        number = int(raw_bits(1, seed, EPOCHS, epoch)[0]) >> 1
        training = Training(labels, vectors, torch.Generator().manual_seed(number))
        devices = [labels.device] if labels.device.type == "cuda" else []
        before = copy.deepcopy(self.module.state_dict())
        try:
            with torch.random.fork_rng(devices), torch.no_grad():
                torch.manual_seed(number)
                before_epoch(epoch, training)
                # machines may differ in their last bits
                held = self.ranks.from_first(lambda: _on_host(self.module.state_dict()))
        except BaseException:  # a run that is stopped here does it again
            self.module.load_state_dict(before)
            raise
        if not self.ranks.first:
            self.module.load_state_dict(held)


def _on_host(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}


def check_auxiliary(settings: Settings, given: Constructor | None) -> None:
    """There is one module at most, it is here, and it can see what it needs.

    Raises:
        SettingError: which of these is not so.
    """
    name = settings.auxiliary["name"]
    if given is None and name == NONE:
        return
    told = name.removeprefix(OUTSIDE)
    if given is None and told != name:
        raise SettingError(
            "auxiliary", f"this run trains with {told}, which is none of ours; pass it: resume(folder, auxiliary=...)"
        )
    if given is not None and name not in (NONE, name_of(given)):
        raise SettingError(
            "auxiliary",
            f"auxiliary={told} is in the settings, and {name_of(given).removeprefix(OUTSIDE)} was given beside them; "
            "a run has one auxiliary module",
        )
    if settings.model.freeze_backbone:
        raise SettingError(
            "auxiliary",
            "model.freeze_backbone=true keeps the pooled features alone, and an auxiliary module sees them before they "
            "are pooled; set auxiliary=none, or model.freeze_backbone=false",
        )
    if settings.data.parts is not None:
        raise SettingError(
            "data.chunk",
            f"data.chunk={settings.data.chunk}: an auxiliary module sees the features of the whole batch, and in two "
            "passes there are only those of a chunk; leave out data.chunk, or set auxiliary=none",
        )


def name_of(given: Constructor) -> str:
    """What the settings of a run call a module that was given beside them."""
    inner: Any = getattr(given, "func", given)  # of functools.partial
    return f"{OUTSIDE}{inner.__module__}.{inner.__qualname__}"


def auxiliary_of(settings: Settings, given: Constructor | None, told: dict[str, int | None]) -> nn.Module | None:
    """The module, or None; what only the run knows is filled in where its constructor asks for it.

    Args:
        settings: with the name and the options of one that is ours.
        given: makes one that is not.
        told: `num_classes`, `embedding_size`, `channels` of the features (None: unknown), number of `pictures`.
    """
    if given is None and settings.auxiliary["name"] == NONE:
        return None
    parameters = inspect.signature(given or auxiliary_constructor(settings.auxiliary["name"])).parameters.values()
    asked = {p.name: told[p.name] for p in parameters if p.name in told and p.default is inspect.Parameter.empty}
    if "channels" in asked and asked["channels"] is None:
        raise SettingError(
            "auxiliary",
            f"auxiliary: {settings.model.name} gives features that only it knows how to pool; take another model, or "
            "set auxiliary=none",
        )
    module = named_auxiliary(**(settings.auxiliary | asked)) if given is None else given(**asked)
    if not isinstance(module, nn.Module):
        raise TypeError(f"an auxiliary module must be an nn.Module, got {type(module).__name__}")
    return module
