"""A whole run: from settings to a folder with a chosen model and its results."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path

import torch

from roadmap.config.settings import Settings
from roadmap.data import Batches
from roadmap.engine.choices import chosen
from roadmap.engine.display import Display
from roadmap.engine.hardware import engine_of
from roadmap.engine.job import Job, job_of
from roadmap.engine.splits import check_metric, judging, records_of, sampler_of, splits_of
from roadmap.engine.state import Best
from roadmap.engine.step import NonFiniteError, Watch, step
from roadmap.models import retriever
from roadmap.runs import Run

LOGGED = 20  # steps of an epoch that are logged, at most: a line costs the host half a millisecond


def fit(settings: Settings, given: frozenset[str] | None = None, quiet: bool = False) -> Path:
    """Trains, chooses an epoch, tests it; the run folder holds everything that came of it.

    Args:
        settings: of the run.
        given: dotted names of settings that a person gave, such as "model.name"; for pictures of one's own, the others
            are chosen by their number and size. None: all were given.
        quiet: print nothing.

    Returns:
        The run's folder.
    """
    display = Display(quiet)
    records = records_of(settings.data)
    settings, records, reasons = chosen(settings, records, given)
    fabric = engine_of(settings.hardware)
    splits = splits_of(records, settings.data, settings.select)
    check_metric(settings.select, splits)
    sampler_of(splits.train, settings.data, settings.seed)  # batches that cannot be made leave no folder behind
    torch.manual_seed(settings.seed)
    model = retriever(settings.model, settings.data.image)
    run = Run.create(settings)
    display.start(run.folder, settings, splits, reasons, model, fabric)
    return _trained(job_of(settings, fabric, splits, model, run, display))


def resume(folder: Path, quiet: bool = False) -> Path:
    """Goes on with a run that was stopped, from its last saved state, as if it had not been."""
    run, display = Run.open(folder), Display(quiet)
    settings = dataclasses.replace(run.settings(), run=str(folder))
    records = records_of(settings.data)
    settings, records, _ = chosen(settings, records, None)
    fabric = engine_of(settings.hardware)
    splits = splits_of(records, settings.data, settings.select)
    torch.manual_seed(settings.seed)
    # the saved state brings the weights: the file they first came from is not needed again
    model = retriever(dataclasses.replace(settings.model, weights="random"), settings.data.image)
    display.start(run.folder, settings, splits, [], model, fabric)
    job = job_of(settings, fabric, splits, model, run, display)
    job.load()
    return _trained(job)


def _trained(job: Job) -> Path:
    try:
        before = _before(job)
        _train(job)
        after = job.tested(job.kept)
    except NonFiniteError as error:
        job.run.write_json("stopped.json", {"step": error.step, "why": str(error), "pictures": error.pictures})
        raise
    finally:
        job.display.close()
        job.run.close()
    best = job.state.best
    job.run.remove("stopped.json")
    job.run.write_json(
        "summary.json",
        {
            "before": before,
            "after": after,
            "best epoch": None if best is None else best.epoch,
            "chosen by": job.settings.select.by,
            "validation": None if best is None else best.metrics,
            "epochs": job.settings.epochs,
            "steps": job.state.step,
            "training seconds": job.state.seconds,
            "skipped pictures": len(job.pictures.skipped),
        },
    )
    job.display.finish(job.run, job.settings, before, after, best, len(job.pictures.skipped))
    return job.run.folder


def _before(job: Job) -> dict[str, dict[str, float]]:
    """The test metrics of the untrained model; a resumed run finds them in its log."""
    logged = [line for line in job.run.history() if line["kind"] == "before"]
    if logged:
        tests = logged[0]["metrics"].items()
        return {name: {k: math.nan if v is None else v for k, v in values.items()} for name, values in tests}
    before = job.tested(job.current)
    job.run.log("before", 0, {"metrics": before})
    job.display.before(before)
    return before


def _train(job: Job) -> None:
    """All remaining epochs."""
    sampler = job.sampler
    sampler.seek(job.state.step)
    batches = job.pictures.training(job.splits.train, sampler)
    watch = Watch(job.splits.train, scaled=job.state.scaler is not None)
    job.display.training(job.settings.epochs * sampler.batches, job.state.step, job.settings.data.batch_size)
    saved = time.monotonic()
    for epoch in range(1 + job.state.step // sampler.batches, 1 + job.settings.epochs):
        began = time.monotonic()
        train_epoch(job, batches, watch)
        job.state.seconds += time.monotonic() - began
        _judge(job, epoch)
        if epoch == job.settings.epochs or time.monotonic() - saved >= 60 * job.settings.checkpoint_minutes:
            job.save()
            saved = time.monotonic()


def train_epoch(job: Job, batches: Batches, watch: Watch) -> None:
    """The batches that are left of an epoch. When it returns, every number of it has been looked at."""
    job.parts.model.train()
    for batch in batches:
        _note(job, watch.push(step(job.state, batch, job.parts)), len(batches))
    _note(job, watch.pop(), len(batches))


def _note(job: Job, done: tuple[int, float, float] | None, batches: int) -> None:
    if done is None:
        return
    number, loss, norm = done
    job.display.step(loss)
    within = 1 + (number - 1) % batches
    if within % -(-batches // LOGGED) == 0 or within == batches:
        rate = job.parts.schedule(number - 1) * job.settings.optim.lr
        values = {
            "epoch": -(-number // batches),
            "loss": loss,
            "gradient norm": norm,
            "lr": rate,
            "pictures per second": job.display.rate(),
        }
        job.run.log("step", number, values)


def _judge(job: Job, epoch: int) -> None:
    """Evaluates where the settings say so, and keeps the weights if they are the best so far."""
    select, last = job.settings.select, epoch == job.settings.epochs
    if select.by == "last":
        if last:
            job.state.best = Best(epoch, 0.0, {})
            job.kept.load_state_dict(job.current.state_dict())
        job.display.epoch(epoch, None, {})
        return
    if epoch % select.every and not last:
        job.display.epoch(epoch, None, {})
        return
    records, split = judging(select, job.splits)
    values = job.metrics(job.current, records)
    job.run.log("evaluation", job.state.step, {"epoch": epoch, "split": split, **values})
    better = job.state.best is None or _at_least(values[select.metric], job.state.best.value)
    if better:
        job.state.best = Best(epoch, values[select.metric], values)
        job.kept.load_state_dict(job.current.state_dict())
    job.display.epoch(epoch, split, values, better)


def _at_least(value: float, than: float) -> bool:
    """Of equals the later epoch is better: few held-out classes are soon all found, and training goes on to help.

    Any number is more than none: metrics are NaN where no query has a positive.
    """
    return value >= than or math.isnan(than)
