"""The epochs of a run: train, judge, save."""

from __future__ import annotations

import math
import time

from roadmap.data import Batches
from roadmap.engine.job import Job
from roadmap.engine.splits import judged_pictures
from roadmap.engine.state import Best
from roadmap.engine.step import step
from roadmap.engine.watch import Reading, Watch

LOGGED = 20  # steps of an epoch that are logged, at most: a line costs the host half a millisecond


def train(job: Job) -> None:
    """All that is left of a run's epochs, from wherever its state stands."""
    state, length = job.state, job.sampler.batches
    job.sampler.seek(state.step)
    batches = job.pictures.training(job.splits.train, job.sampler)
    watch = Watch(job.splits.train, state.scaler is not None, job.ranks, job.settings.data.batch_size)
    job.display.training(job.settings.epochs, state.step, length, job.settings.data.batch_size)
    saved = time.monotonic()
    for epoch in range(1 + state.judged // length, 1 + job.settings.epochs):
        if state.step < epoch * length:  # else it was stopped before it was judged
            if state.step % length == 0:  # else it was prepared when it began
                job.prepare_epoch(epoch)
            train_epoch(job, batches, watch)
        _judge(job, epoch)
        if epoch == job.settings.epochs or time.monotonic() - saved >= 60 * job.settings.checkpoint_minutes:
            with job.signals.later():
                job.save()
            saved = time.monotonic()


def train_epoch(job: Job, batches: Batches, watch: Watch) -> None:
    """The batches that are left of an epoch. When it returns, every number of it has been looked at."""
    began = time.monotonic()
    pace, length = Pace(began), len(batches)
    if job.state.step % length == 0:
        job.state.loss, job.state.losses = 0.0, 0
    job.parts.model.train()
    with job.signals.later():
        for batch in batches:
            told = job.ranks.largest(job.signals.number or 0)  # on its way while the step is taken
            _note(job, watch.push(step(job.state, batch, job.parts)), pace, length)
            if number := told() if job.ranks.world > 1 else job.signals.number:
                job.signals.obey(number)
                break
        _note(job, watch.pop(), pace, length)
        job.pictures.share_skipped()
        job.state.seconds += time.monotonic() - began


class Pace:
    """Pictures a second over whole intervals between logged steps, by when steps were done: the numbers of a step are
    read while the next one runs, those of the last step of an epoch at once."""

    def __init__(self, began: float) -> None:
        self._since, self._pictures = began, 0

    def add(self, reading: Reading) -> None:
        self._pictures += reading.pictures

    def rate(self, reading: Reading) -> float:
        """Since it was last asked, up to this step."""
        rate = self._pictures / max(1e-9, reading.time - self._since)
        self._since, self._pictures = reading.time, 0
        return rate


def _note(job: Job, reading: Reading | None, pace: Pace, length: int) -> None:
    if reading is None:
        return
    pace.add(reading)
    job.state.loss += reading.loss
    job.state.losses += 1
    job.display.step(reading.loss, reading.pictures)
    within = 1 + (reading.step - 1) % length
    if within % -(-length // LOGGED) == 0 or within == length:
        values = {
            "epoch": -(-reading.step // length),
            "loss": reading.loss,
            "gradient norm": reading.norm,
            "lr": job.parts.schedule(reading.step - 1) * job.settings.optim.lr,
            "pictures per second": pace.rate(reading),
        }
        job.run.log("step", reading.step, values)


def _judge(job: Job, epoch: int) -> None:
    """Evaluates where the settings say so, and keeps the weights if they are the best so far."""
    select, last = job.settings.select, epoch == job.settings.epochs
    judged = select.by != "last" and (last or epoch % select.every == 0)
    records, split = judged_pictures(select, job.splits) if judged else (None, None)
    values = {} if records is None else job.metrics(job.current, records)
    with job.signals.later():
        better = False
        if split is not None:
            job.run.log("evaluation", job.state.step, {"epoch": epoch, "split": split, **values})
            better = job.state.best is None or _at_least(values[select.metric], job.state.best.value)
        if better or (select.by == "last" and last):
            job.state.best = Best(epoch, values[select.metric] if judged else 0.0, values)
            job.kept.load_state_dict(job.current.state_dict())
        job.state.judged = job.state.step
        mean = job.state.loss / job.state.losses if job.state.losses else math.nan
        job.display.epoch(epoch, mean, split, values, better)


def _at_least(value: float, than: float) -> bool:
    """Of equals the later epoch is better: few held-out classes are soon all found, and training goes on to help.

    Any number is more than none: metrics are NaN where no query has a positive.
    """
    return value >= than or math.isnan(than)
