"""All that changes during training, in one value that is saved and loaded whole.

What does not change (settings, pictures) is not here; what can be computed from the step (rates, batches, crops) is
not stored. A part that a later feature adds, such as a memory of past embeddings, is one more field with `state_dict`
and `load_state_dict`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from roadmap.engine.average import WeightAverage
from roadmap.engine.saving import load_values, save_values


class Stateful(Protocol):
    """What can say what it holds, and take it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass
class Best:
    """The epoch chosen so far. Epochs count from 1; 0 is the model before training."""

    epoch: int
    value: float
    metrics: dict[str, float]


@dataclass
class TrainState:
    """Everything a run needs to go on as if it had never stopped.

    Attributes:
        model: the network itself, not what wraps it for speed or for several devices.
        optimizer: with its moments.
        scaler: of fp16 gradients; anything that is `Stateful`.
        average: moving average of the weights, or None.
        kept: the network with the weights of the best epoch so far, or None.
        step: optimiser steps taken; also the sampler's position, from which epoch, batches and crops follow.
        judged: the step after which an epoch was last judged; behind `step` in the middle of an epoch, and where the
            run was stopped between an epoch and its judgement.
        loss: sum of the losses of the epoch that is under way, and
        losses: how many they are.
        seconds: that training took so far, evaluations not counted.
        best: the epoch chosen so far.
        parts: whatever else changes, by name: a loss with weights, the pictures that could not be read.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Stateful | None = None
    average: WeightAverage | None = None
    kept: nn.Module | None = None
    step: int = 0
    judged: int = 0
    loss: float = 0.0
    losses: int = 0
    seconds: float = 0.0
    best: Best | None = None
    parts: dict[str, Stateful] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only, so that loading needs no code."""
        return {
            "step": self.step,
            "judged": self.judged,
            "loss": self.loss,
            "losses": self.losses,
            "seconds": self.seconds,
            "best": None if self.best is None else asdict(self.best),
            "stateful": {name: part.state_dict() for name, part in self._stateful().items()},
            "random": _random_state(),
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        held, mine = set(values["stateful"]), set(self._stateful())
        if held != mine:
            raise ValueError(
                f"the saved state holds {sorted(held)}, this run needs {sorted(mine)}; "
                "continue with the settings it was started with"
            )
        for name, part in self._stateful().items():
            try:
                part.load_state_dict(values["stateful"][name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise ValueError(
                    f"the saved {name} does not fit this run ({error}); continue with the settings and pictures it "
                    "was started with, or start a new one"
                ) from error
        self.step, self.seconds = values["step"], values["seconds"]
        # states were once saved after epochs alone
        self.judged = values.get("judged", self.step)
        self.loss, self.losses = values.get("loss", 0.0), values.get("losses", 0)
        self.best = None if values["best"] is None else Best(**values["best"])
        _set_random_state(values["random"])

    def _stateful(self) -> dict[str, Stateful]:
        found: dict[str, Stateful | None] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "average": self.average,
            "kept": self.kept,
            **self.parts,
        }
        return {name: part for name, part in found.items() if part is not None}

    def save(self, path: Path) -> None:
        """Writes the state whole or not at all; the one before is kept beside it."""
        save_values(self.state_dict(), Path(path))

    def load(self, path: Path) -> None:
        """Takes back what `save` wrote; where that is damaged, what it wrote the time before, with a warning."""
        self.load_state_dict(load_values(Path(path)))


def last_weights(path: Path) -> dict[str, torch.Tensor]:
    """Of a saved state: the weights that an evaluation after its last step looked at, averaged where it averages."""
    held = load_values(Path(path))["stateful"]
    if "average" not in held:
        return dict(held["model"])
    return {name.removeprefix("model."): value for name, value in held["average"].items()}


def _random_state() -> dict[str, Any]:
    """Of dropout and stochastic depth; batches and crops have none."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
