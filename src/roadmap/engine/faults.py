"""What can happen to a run through no fault of its settings: what it was, what to do, and that nothing is lost."""

from __future__ import annotations

import errno
import gc
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import torch

from roadmap.atomic import FULL_WORDS
from roadmap.data.pictures.images import PictureError
from roadmap.engine.compiling import Recorded

if TYPE_CHECKING:
    from roadmap.config.settings import Settings
    from roadmap.engine.job import Job

FULL = (errno.ENOSPC, errno.EDQUOT)
MOMENTS = 2  # numbers that Adam keeps of each weight
LOADER = re.compile(r"DataLoader worker \(pid")


class RunError(RuntimeError):
    """A run that could not go on. The message says what came, what helps, and how to go on."""


@contextmanager
def explain_damage(settings: Settings, goes_on: bool = False) -> Iterator[None]:
    """A picture that cannot be read, inside, is told with what helps.

    Args:
        settings: of the run.
        goes_on: it has trained already, and needs the pictures that it began with.
    """
    try:
        yield
    except PictureError as error:
        raise RunError(_damage(error, settings, goes_on)) from error


@contextmanager
def explain_failures(job: Job) -> Iterator[None]:
    """What ends the run inside is told in words; errors that have their own are left alone."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        said = _explanation(error, job)
        if said is None:
            raise
        raise RunError(said) from error
    except Exception as error:  # of libraries with kinds of their own
        if not _disk_is_full(error):
            raise
        raise RunError(f"{_full(error, job.run.folder)}. {_go_on(job)}") from error


def _damage(error: PictureError, settings: Settings, goes_on: bool) -> str:
    said = f"a picture could not be read: {error}"
    if goes_on:
        return (
            f"{said}. Put it back as it was: a run goes on only with the pictures that it began with. A new run with "
            "data.on_error=skip leaves such pictures out and counts them"
        )
    data = settings.data
    named = f"`roadmap data check {data.name} {quote(str(data.root))}` names all such pictures"
    return f"{said}. Repair or remove it, or give data.on_error=skip, which leaves it out; {named}"


def _explanation(error: Exception, job: Job) -> str | None:
    if isinstance(error, PictureError) and not job.run.has_state():
        return _damage(error, job.settings, goes_on=False)  # going on would meet it again
    said = _cause(error, job)
    return None if said is None else f"{said}. {_go_on(job)}"


def _cause(error: Exception, job: Job) -> str | None:
    if _disk_is_full(error):
        return _full(error, job.run.folder)
    if isinstance(error, torch.OutOfMemoryError):
        return _short_of_memory(error, job)
    if isinstance(error, PictureError):
        return _damage(error, job.settings, goes_on=True)
    if LOADER.search(str(error)):
        return (
            f"a process that reads pictures was killed ({str(error).strip().rstrip('.')}), as a system does that is "
            "short of memory. Fewer data.workers take less of it; data.pack=yes reads without such processes"
        )
    return None


def _go_on(job: Job) -> str:
    """What is there, and how to use it."""
    kept = "What was saved is whole" if job.run.has_state() else "Nothing was saved yet, so it begins again"
    return f"{kept}. Go on:  roadmap train resume={quote(str(job.run.folder))}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those in whose wake it came."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _disk_is_full(error: BaseException) -> bool:
    return any(
        (isinstance(one, OSError) and one.errno in FULL) or FULL_WORDS.search(str(one)) for one in _causes(error)
    )


def _full(error: BaseException, folder: Path) -> str:
    files = (one.filename for one in _causes(error) if isinstance(one, OSError) and one.errno in FULL)
    name = next((str(file) for file in files if file), None)
    return f"the disk of {folder} is full{'' if name is None else f': {name} could not be written'}. Free some of it"


def _short_of_memory(error: torch.OutOfMemoryError, job: Job) -> str:
    data, device = job.settings.data, job.arithmetic.device
    tried = str(error).partition(". ")[0]
    said = (
        f"the memory of {device} is too small for {data.batch_size} pictures of {data.image} pixels in "
        f"{job.settings.model.name} ({tried})"
    )
    fit = fitting_pictures(job, error)
    if fit is None:
        advice = "A smaller data.batch_size or data.image, or a smaller model, takes less"
    else:
        advice = (
            f"{fit} pictures at once fit, as a trial just showed: data.chunk={fit} keeps the batch, for a third more "
            f"time (two passes), or data.batch_size={fit} makes it smaller"
        )
    if job.settings.hardware.precision == "32" and device.type == "cuda":
        advice += "; hardware.precision=bf16 takes about half"
    free = "If another program has taken the memory, the run goes on as it is once that has ended"
    return f"{said}. {advice}. {free}"


def fitting_pictures(job: Job, error: BaseException) -> int | None:
    """How many pictures go through the model and back at once, by trying ever smaller halves of a batch.

    None where not even two do, or where other processes wait for this one. The run must have ended: its gradients and
    random numbers are changed.

    Args:
        job: that ran out of memory.
        error: which it ended with; what its frames hold is let go.
    """
    if job.ranks.world > 1:
        return None
    traceback.clear_frames(error.__traceback__)
    if isinstance(job.parts.model, Recorded):
        job.parts.model.forget()
    number = job.settings.data.parts or job.settings.data.batch_size
    while (number := number // 2) > 1:
        job.parts.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if job.arithmetic.device.type == "cuda":
            torch.cuda.empty_cache()
        if _fits(job, number):
            return number
    return None


def _fits(job: Job, number: int) -> bool:
    side, model = job.settings.data.image, job.state.model.train()
    moving = [parameter for group in job.parts.optimizer.param_groups for parameter in group["params"]]
    try:
        # the optimiser's moments, which it has from its first step on
        later = [] if job.parts.optimizer.state else [torch.empty_like(p) for p in moving for _ in range(MOMENTS)]
        images = torch.zeros(number, 3, side, side, device=job.arithmetic.device)
        with job.arithmetic.autocast():
            embeddings = model(images)
        embeddings.float().sum().backward()
        del later
    except torch.OutOfMemoryError:
        return False
    return True
