"""A whole run: from settings to a folder with a chosen model and its results."""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roadmap.config.settings import HardwareSettings, SettingError, Settings
from roadmap.data import Records
from roadmap.engine.ahead import import_thread, imports_of, pack_ahead
from roadmap.engine.arithmetic import arithmetic_of
from roadmap.engine.auto import cautions, resolve
from roadmap.engine.auxiliary import Constructor, check_auxiliary, name_of
from roadmap.engine.display import Display
from roadmap.engine.faults import explain_damage, explain_failures
from roadmap.engine.job import Job, check_dims, check_judging, job_of
from roadmap.engine.joining import Place, hardware_at, place_here, ranks_at
from roadmap.engine.launching import launch
from roadmap.engine.loop import train
from roadmap.engine.paths import absolute_paths
from roadmap.engine.results import Results
from roadmap.engine.retrievals import show_retrievals
from roadmap.engine.splits import Roster, Splits, division_of, records_of, sampler_of, splits_of
from roadmap.engine.stopping import Signals
from roadmap.engine.watch import NonFiniteError
from roadmap.models import retriever
from roadmap.ranks import Ranks
from roadmap.runs import Run

NEAREST = 10  # neighbours of each test picture that are kept


def fit(settings: Settings, quiet: bool = False, auxiliary: Constructor | None = None) -> Path:
    """Trains, chooses an epoch, tests it; the run folder holds everything that came of it.

    Args:
        settings: of the run; what says "auto" is chosen by the pictures and the hardware.
        quiet: print nothing.
        auxiliary: makes a module that is minimised beside the loss, such as its class; what only the run knows is
            passed where it asks for it by name: `channels` of the features, `embedding_size`, `num_classes`, number
            of `pictures` (`roadmap.engine.auxiliary`). None for what the settings name.

    Returns:
        The run's folder.

    Raises:
        Stopped: after Ctrl-C, SIGTERM or another request to end, with the folder, when what is done is saved.
    """
    place = place_here()
    hardware = hardware_at(settings.hardware, place)
    settings = dataclasses.replace(absolute_paths(settings), hardware=hardware)
    if place is None and hardware.devices > 1:
        return launch(hardware.devices, "fit", {"settings": settings, "quiet": quiet, "auxiliary": auxiliary})
    with ranks_at(hardware, place) as ranks, Signals(ranks) as signals, ExitStack() as at_the_end:
        return _finish(_new_job(settings, ranks, Display(quiet or not ranks.first), signals, at_the_end, auxiliary))


def _new_job(
    settings: Settings,
    ranks: Ranks,
    display: Display,
    signals: Signals,
    at_the_end: ExitStack,
    auxiliary: Constructor | None,
) -> Job:
    signals.limit(settings.hardware.time_limit)
    found = records_of(settings.data)
    records, drawn = division_of(found)
    settings, reasons = ranks.from_first(lambda: resolve(settings, records))
    check_auxiliary(settings, auxiliary)
    if auxiliary is not None:  # for the record
        settings = dataclasses.replace(settings, auxiliary={"name": name_of(auxiliary)})
    splits = splits_of(records, settings.data, settings.select)
    check_judging(settings, splits)
    _check_pictures(splits, ranks)
    # batches that cannot be made leave no folder behind
    sampler = sampler_of(splits.train, settings.data, settings.seed, ranks)
    arithmetic = arithmetic_of(settings.hardware, ranks, settings.model.freeze_backbone)
    torch.manual_seed(settings.seed)
    imports = import_thread(imports_of(settings, arithmetic.device, settings.epochs * sampler.batches))
    with explain_damage(settings):
        pack_ahead(settings, splits.everything, ranks, display.quiet)
    with ranks.turns():  # one fetches the weights
        model = retriever(settings.model, settings.data.image)
    check_dims(settings, model)
    with signals.later():
        run = Run.create(settings) if ranks.first else None
        run = run or Run(Path(settings.run or settings.out), writes=False)
        at_the_end.callback(run.close)
        at_the_end.callback(display.close)
        signals.folder = run.folder
        _store_division(run, splits.everything, found)
    display.start(run.folder, settings, splits, [*cautions(settings), *reasons, *drawn], model, arithmetic, ranks)
    imports.join()
    with explain_damage(settings):
        return job_of(settings, arithmetic, splits, sampler, model, run, display, signals, ranks, auxiliary)


def _check_pictures(splits: Splits, ranks: Ranks) -> None:
    """Processes on different machines may look at different disks."""
    if ranks.world == 1:
        return
    tests = [("test", part) for test in splits.tests for part in test.evaluation()]
    parts = [("training", splits.train), ("validation", splits.val), *tests]
    rosters = ranks.from_all([(what, Roster(part)) for what, part in parts if part is not None])
    for rank, found in enumerate(rosters):
        for (what, here), (_, first) in zip(found, rosters[0], strict=False):  # with other galleries come other queries
            if here.digest != first.digest:
                raise ValueError(
                    f"process {rank} finds other {what} pictures ({here.size}) than the first ({first.size}); "
                    "every machine needs the same ones at the same place"
                )


def resume(folder: Path, epochs: int | None = None, quiet: bool = False, auxiliary: Constructor | None = None) -> Path:
    """Goes on with a run that was stopped, from its last saved state, as if it had not been.

    Where nothing was saved yet, it begins again from the start.

    Args:
        folder: of the run.
        epochs: train this many in all, instead of those that the run was started with. The result is that of a run
            started with so many, so a schedule that is stretched over the whole run (cosine) cannot be lengthened.
            Where not every epoch is judged (`select.every`), the one that was judged as the last stays judged.
        quiet: print nothing.
        auxiliary: what `fit` was given.

    Raises:
        Stopped: as in `fit`.
    """
    place = place_here()
    hardware = _hardware_of(folder, place)
    if place is None and hardware.devices > 1:
        arguments = {"folder": folder, "epochs": epochs, "quiet": quiet, "auxiliary": auxiliary}
        return launch(hardware.devices, "resume", arguments)
    with ranks_at(hardware, place) as ranks, Signals(ranks) as signals, ExitStack() as at_the_end:
        run = Run.open(folder) if ranks.first else Run(folder, writes=False)
        display = Display(quiet or not ranks.first)
        signals.folder = run.folder
        at_the_end.callback(run.close)
        at_the_end.callback(display.close)
        run.lock()
        return _finish(_stopped_job(run, hardware, epochs, ranks, display, signals, auxiliary))


def _hardware_of(folder: Path, place: Place | None) -> HardwareSettings:
    """Of a run that goes on. Whoever started several processes says how many; they need not be as many as before."""
    if place is None:
        return hardware_at(Run.open(folder).settings().hardware, None)
    elsewhere = place.rank > 0 and not Path(folder).exists()  # the run's folder need not be on every machine
    stored = HardwareSettings() if elsewhere else Run.open(folder).settings().hardware
    return hardware_at(dataclasses.replace(stored, devices=1, nodes=1), place)


def _stopped_job(
    run: Run,
    hardware: HardwareSettings,
    epochs: int | None,
    ranks: Ranks,
    display: Display,
    signals: Signals,
    auxiliary: Constructor | None,
) -> Job:
    stored, has_state = ranks.from_first(lambda: (run.settings(), run.has_state()))
    # as many devices as there are now; the rest is the run's, also where its folder is not
    hardware = dataclasses.replace(stored.hardware, devices=hardware.devices, nodes=hardware.nodes)
    settings = dataclasses.replace(stored, run=str(run.folder), hardware=hardware)
    check_auxiliary(settings, auxiliary)
    signals.limit(settings.hardware.time_limit)
    found = records_of(settings.data)
    records, changes = ranks.from_first(lambda: run.division(found))
    records, _ = division_of(records)
    splits = splits_of(records, settings.data, settings.select)
    splits = dataclasses.replace(splits, val_given="val" in found.split_names())
    _check_pictures(splits, ranks)
    sampler = sampler_of(splits.train, settings.data, settings.seed, ranks)
    if not has_state:
        _store_division(run, splits.everything, found)
    longer = settings if epochs is None else _with_epochs(settings, epochs)
    arithmetic = arithmetic_of(settings.hardware, ranks, settings.model.freeze_backbone)
    torch.manual_seed(settings.seed)
    # a saved state brings the weights: the file they first came from is not needed again
    start = dataclasses.replace(settings.model, weights="random") if has_state else settings.model
    model = retriever(start, settings.data.image)
    display.start(run.folder, longer, splits, changes, model, arithmetic, ranks)
    with explain_damage(longer, has_state):
        job = job_of(longer, arithmetic, splits, sampler, model, run, display, signals, ranks, auxiliary, has_state)
    if not has_state:
        run.forget_after(-1)
    if longer.epochs != settings.epochs:
        _check_epochs(job, settings.epochs)
        with signals.later():
            run.remove("summary.json")  # it is no longer true
            run.save_settings(longer)
    return job


def _with_epochs(settings: Settings, epochs: int) -> Settings:
    if settings.optim.schedule == "cosine" and epochs != settings.epochs:
        raise SettingError(
            "epochs",
            f"epochs={epochs}: the learning rate of this run falls along a cosine to the end of its {settings.epochs} "
            f"epochs, so a run of {epochs} is another from its first step on; start a new one with epochs={epochs}, "
            "or one with model.weights=RUN that begins where this one ended",
        )
    return dataclasses.replace(settings, epochs=epochs)


def _check_epochs(job: Job, before: int) -> None:
    done = job.state.step // job.sampler.batches
    if job.settings.epochs <= done:
        raise SettingError(
            "epochs",
            f"epochs={job.settings.epochs}: the run has trained {done} of its {before} epochs already; give more",
        )


def _store_division(run: Run, division: Records, found: Records) -> None:
    """Stores the splits where the program drew one: drawn again later, from other pictures, they would be others."""
    if found.splits is None or not np.array_equal(division.splits, found.splits):  # type: ignore[arg-type]
        run.save_division(division)


def _finish(job: Job) -> Path:
    """All that is left to do; what hinders it is told in words."""
    with explain_failures(job):
        return _train_and_test(job)


def _train_and_test(job: Job) -> Path:
    """Train, test, write it down."""
    try:
        before = _before(job)
        train(job)
        tests = job.tests(job.kept, NEAREST)
        # beside an epoch that was chosen on the test set, which flatters, the last one, which nobody chose
        last = job.tests(job.current) if job.settings.select.by == "test" else {}
    except NonFiniteError as error:
        job.run.write_json("stopped.json", {"step": error.step, "why": str(error), "pictures": error.pictures})
        raise
    except KeyboardInterrupt:
        if job.ranks.first and not job.signals.torn:
            job.save()
            job.signals.saved = job.position()
        raise
    if not job.ranks.first:
        return job.run.folder
    for name, evaluation in tests.items():
        evaluation.save(job.run.evaluation_file(name))
    for name, evaluation in last.items():
        path = job.run.evaluation_file(name)
        evaluation.save(path.parent / "last_epoch" / path.name)
    show_retrievals(job, tests)
    after = {name: evaluation.metrics for name, evaluation in tests.items()}
    results = Results(before, after, job.state.best, len(job.pictures.skipped))
    job.run.remove("stopped.json")
    job.run.write_json("summary.json", _summary(job, results))
    job.display.finish(job.run, job.settings, job.splits, results)
    return job.run.folder


def _summary(job: Job, results: Results) -> dict[str, Any]:
    best = results.best
    return {
        "before": results.before,
        "after": results.after,
        "best epoch": None if best is None else best.epoch,
        "chosen by": job.settings.select.by,
        "validation": None if best is None else best.metrics,
        "epochs": job.settings.epochs,
        "steps": job.state.step,
        "training seconds": job.state.seconds,
        "skipped pictures": results.skipped,
    }


def _before(job: Job) -> dict[str, dict[str, float]]:
    """The test metrics of the model before training; a resumed run finds them in its log."""
    logged = job.ranks.from_first(lambda: [line for line in job.run.history() if line["kind"] == "before"])
    if logged:
        tests = logged[0]["metrics"].items()
        return {name: {k: math.nan if v is None else v for k, v in values.items()} for name, values in tests}
    before = {name: evaluation.metrics for name, evaluation in job.tests(job.current).items()}
    job.run.log("before", 0, {"metrics": before})
    job.display.before(job.settings, before)
    return before
