"""A run under way: the engine, the model, the pictures and the state, put together from settings."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from roadmap.config.settings import SettingError, Settings
from roadmap.data import CategoryPairs, MPerClass, Records
from roadmap.engine.arithmetic import Arithmetic
from roadmap.engine.auxiliary import Auxiliary, Constructor, auxiliary_of
from roadmap.engine.average import WeightAverage
from roadmap.engine.comparing import BatchAndMemory, ByPaths, Compare, compare_of, degrees_of
from roadmap.engine.compiling import Compiling, compiling_of, runnable_model
from roadmap.engine.display import Display
from roadmap.engine.optimiser import optimiser, schedule
from roadmap.engine.passes import chunk_note, passes_of
from roadmap.engine.pictures import Pictures
from roadmap.engine.saving import load_values
from roadmap.engine.splits import Roster, Splits, check_metric
from roadmap.engine.state import Stateful, TrainState
from roadmap.engine.step import Parts
from roadmap.engine.stopping import Signals
from roadmap.evaluation import Evaluation
from roadmap.hardware import in_layout
from roadmap.losses import Matryoshka
from roadmap.losses.named import constructor, named_loss, required_options
from roadmap.models import Retriever, save_checkpoint
from roadmap.models.batch_norm import share_statistics
from roadmap.ranks import ALONE, Ranks
from roadmap.runs import Run


@dataclass(eq=False)
class Job:
    """A run under way: what it works with, and the state that changes."""

    settings: Settings
    arithmetic: Arithmetic
    splits: Splits
    sampler: MPerClass | CategoryPairs
    pictures: Pictures
    state: TrainState
    parts: Parts
    run: Run
    display: Display
    signals: Signals
    ranks: Ranks = ALONE

    @property
    def current(self) -> Retriever:
        """What an evaluation now would look at: the averaged weights, where there is an average."""
        average = self.state.average
        model = self.state.model if average is None else average.model
        assert isinstance(model, Retriever)
        return model

    @property
    def kept(self) -> Retriever:
        """The weights of the best epoch so far."""
        assert isinstance(self.state.kept, Retriever)
        return self.state.kept

    def evaluation(self, model: Retriever, records: Records, nearest: int = 0) -> Evaluation:
        """What a model achieves on pictures, as `roadmap evaluate` measures it later, to the bit."""
        return self.pictures.evaluation(model, records, nearest)

    def metrics(self, model: Retriever, records: Records) -> dict[str, float]:
        """The numbers of such an evaluation: those of the first process in all of them, which decide by them alike."""
        found = self.evaluation(model, records)
        return self.ranks.from_first(lambda: found.metrics)

    def tests(self, model: Retriever, nearest: int = 0) -> dict[str, Evaluation]:
        """By test set."""
        return {test.name: self.evaluation(model, test, nearest) for test in self.splits.tests}

    def prepare_epoch(self, epoch: int) -> None:
        """What an auxiliary module does before an epoch, counted from 1."""
        if self.parts.auxiliary is None:
            return
        train, model = self.splits.train, self.state.model
        assert isinstance(model, Retriever)
        labels = torch.from_numpy(train.labels).to(self.arithmetic.device)
        vectors = partial(self.pictures.vectors, model, train)
        self.parts.auxiliary.prepare(epoch, labels, vectors, self.settings.seed)

    def save(self) -> None:
        """The best weights, ready to use, and the state, which holds them too: it alone decides what goes on."""
        if not self.ranks.first:
            return
        if self.state.best is not None:
            about = {
                "epoch": self.state.best.epoch,
                "chosen by": self.settings.select.by,
                "metrics": self.state.best.metrics,
                "data": self.settings.data.name,
                "loss": self.settings.loss,
                "resize": self.pictures.centre.resize,
                "squeeze": self.pictures.centre.squeeze,
                "side": self.settings.data.side,
                "recipe": self.settings.recipe,
            } | self.pictures.measured
            save_checkpoint(self.run.best, self.kept, about)
        self.state.save(self.run.last)

    def position(self) -> str:
        """How far it has come, in words."""
        done, length = self.state.step, self.sampler.batches
        return f"after step {done}, in epoch {min(1 + done // length, self.settings.epochs)} of {self.settings.epochs}"

    def load(self) -> None:
        """Back to where the run was saved."""
        self.state.load_state_dict(self.ranks.from_first(lambda: load_values(self.run.last)))
        self.run.forget_after(self.state.step, self.state.judged)


def job_of(
    settings: Settings,
    arithmetic: Arithmetic,
    splits: Splits,
    sampler: MPerClass | CategoryPairs,
    model: Retriever,
    run: Run,
    display: Display,
    signals: Signals | None = None,
    ranks: Ranks = ALONE,
    auxiliary: Constructor | None = None,
    goes_on: bool = False,
) -> Job:
    """Everything a run works with, put together; pictures are packed now, if they are to be.

    Args:
        goes_on: from the state that the run folder holds, which brings the weights too.
    """
    if ranks.world > 1 and not settings.model.freeze_batch_norm:
        _check_chunks(settings, share_statistics(model))
    model = in_layout(model.to(arithmetic.device), settings.hardware)
    told = _facts(splits.train, model)
    loss, beside = _loss(settings, told), auxiliary_of(settings, auxiliary, told)
    for part in (loss, beside):
        if part is not None:
            part.to(arithmetic.device)
    by_paths = bool(getattr(loss, "takes_paths", False))
    pictures = Pictures(settings, model, arithmetic.device, display.quiet, ranks, levels=by_paths)
    compare = compare_of(loss, settings.memory, sampler.batches, shared=ranks.world > 1)
    others: dict[str, Stateful] = {"roster": Roster(splits.train), "pictures": pictures}
    others |= _stateful({"loss": loss, "auxiliary": beside})
    if isinstance(compare, BatchAndMemory):
        others["memory"] = compare
    state = _state(settings, arithmetic, model, loss, beside, others)
    for everything in {id(r): r for r in (splits.everything, *splits.tests)}.values():
        display.console.print(f"  - {pictures.open_pack(everything)}")
    comparing: Compare = ByPaths(compare, splits.train, settings.loss["name"]) if by_paths else compare
    parts = _parts(settings, arithmetic, sampler, state, comparing, beside, pictures, display, ranks)
    job = Job(settings, arithmetic, splits, sampler, pictures, state, parts, run, display, signals or Signals(), ranks)
    if goes_on:
        job.load()
    if settings.model.freeze_backbone:  # by the weights that the run has, not by those that it was put together with
        display.console.print(f"  - {pictures.keep_vectors(model, splits)}")
    return job


def _state(
    settings: Settings,
    arithmetic: Arithmetic,
    model: Retriever,
    loss: nn.Module,
    beside: nn.Module | None,
    others: dict[str, Stateful],
) -> TrainState:
    # fp16's scaler must see the gradients before they are clipped, which fused optimisers do not allow
    fused = arithmetic.device.type == "cuda" and arithmetic.scaler is None
    optimizer = optimiser(model, loss, settings.optim, fused, beside)
    average = None if settings.optim.ema is None else WeightAverage(model, settings.optim.ema)
    return TrainState(model, optimizer, arithmetic.scaler, average, copy.deepcopy(model), parts=others)


def _parts(
    settings: Settings,
    arithmetic: Arithmetic,
    sampler: MPerClass | CategoryPairs,
    state: TrainState,
    compare: Compare,
    beside: nn.Module | None,
    pictures: Pictures,
    display: Display,
    ranks: Ranks,
) -> Parts:
    """What a step works with; how the network is compiled, and what becomes of it in chunks, is said."""
    data, optim, model, steps = settings.data, settings.optim, state.model, settings.epochs * sampler.batches
    frozen = settings.model.freeze_backbone
    compiling = Compiling("no") if frozen else compiling_of(model, settings.hardware, arithmetic.device, steps)
    # what is recorded is a whole batch, asks for vectors alone, and no other process has a part in it
    recorded = data.parts is None and beside is None and ranks.world == 1
    runnable = runnable_model(model, compiling.mode, sampler.batch_size if recorded else None)
    notes = [compiling.why] if compiling.why else []
    if data.parts is not None:
        notes.append(chunk_note(model, data.parts, settings.model.freeze_batch_norm))
    for note in notes:
        display.console.print(f"  - {note}")
    return Parts(
        arithmetic,
        runnable,
        state.optimizer,
        passes_of(arithmetic, runnable, pictures.channels_last, data.parts, beside is not None),
        compare,
        schedule(optim, settings.epochs, sampler.batches),
        optim.clip,
        ranks,
        settings.seed,
        None if beside is None else Auxiliary(beside, ranks),
        round(optim.head_first * sampler.batches),
    )


def _check_chunks(settings: Settings, model: nn.Module) -> None:
    """Processes that normalise their chunks together must have as many of them, whatever pictures are left out."""
    shared = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if shared and settings.data.parts is not None and settings.data.on_error == "skip":
        raise SettingError(
            "data.on_error",
            "data.on_error=skip with data.chunk, several processes and BatchNorm: a process that leaves pictures out "
            "could have fewer chunks than the others, which would wait for it; use data.on_error=raise or "
            "model.freeze_batch_norm=true",
        )


def _stateful(modules: dict[str, nn.Module | None]) -> dict[str, Stateful]:
    """Those that hold something: weights, boundaries, clusters."""
    return {name: module for name, module in modules.items() if module is not None and module.state_dict()}


def check_judging(settings: Settings, splits: Splits) -> None:
    """A loss that compares by a tree has one, or tags, and what chooses the epoch is measured."""
    by_paths = bool(getattr(constructor(settings.loss["name"]), "takes_paths", False))
    if by_paths:
        degrees_of(splits.train, settings.loss["name"])  # or says that there are none
    check_metric(settings.select, splits, levels=by_paths, dims=settings.dims)


def check_dims(settings: Settings, model: Retriever) -> None:
    if max(settings.dims, default=0) > model.dim:
        raise SettingError("dims", f"dims={max(settings.dims)}: the model has {model.dim} dimensions; give fewer")


def _facts(train: Records, model: Retriever) -> dict[str, int | None]:
    """What only the run knows."""
    classes = len(np.unique(train.labels))
    return {
        "num_classes": classes,
        "embedding_size": model.dim,
        "channels": model.channels,
        "pictures": len(train),
    }


def _loss(settings: Settings, told: dict[str, int | None]) -> nn.Module:
    """The loss of the settings; what only the run knows is filled in where its constructor asks for it."""
    needed = required_options(settings.loss["name"])

    def of_size(dim: int) -> nn.Module:
        known = told | {"embedding_size": dim}
        return named_loss(**(settings.loss | {name: known[name] for name in needed if name in known}))

    whole = told["embedding_size"]
    assert whole is not None
    if not settings.dims:
        return of_size(whole)
    dims = sorted({*settings.dims, whole})
    return Matryoshka(of_size if "embedding_size" in needed else of_size(whole), dims)
