"""A full disk, a picture that goes away, a reader that is killed, a GPU that is too small: for real, where possible."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from roadmap.cli.app import app
from roadmap.encoder import Encoder
from roadmap.engine import fit, loop, resume
from roadmap.engine.faults import RunError, fitting_pictures
from roadmap.evaluation import evaluate
from roadmap.runs import Run

from . import worlds
from .test_stopping import calling
from .worlds import assert_same_run, tiny

# A disk of its own for a process and its children, that can be made larger when it is full
ON_A_DISK = """
import subprocess, sys
from pathlib import Path
from roadmap.engine import fit, resume
from roadmap.engine.faults import RunError
from tests.engine.worlds import assert_same_run, tiny
disk, pictures, whole, size = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
try:
    fit(tiny(pictures, disk / "run"), quiet=True)
except RunError as failure:
    print(failure)
assert not [path for path in disk.rglob("*") if ".partial" in path.name]
subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
resume(disk / "run", quiet=True)
assert_same_run(whole, disk / "run")
"""


@pytest.fixture(scope="module")
def whole(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tiny(pictures, tmp_path_factory.mktemp("faults") / "whole"), quiet=True)


# a state is 7.6 MB, the best weights 1.5: the first state, the second, and the log come upon the end
@pytest.mark.parametrize(
    ("size", "kept"), [("4m", "Nothing was saved yet, so it begins again"), ("12m", "What was saved is whole")]
)
def test_a_full_disk(size: str, kept: str, whole: Path, pictures: Path, tmp_path: Path) -> None:
    alone = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    command = [*alone, sys.executable, "-c", ON_A_DISK, tmp_path, pictures, whole, size]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    said = rf"the disk of {tmp_path}/run is full.*\. Free some of it\. {kept}\. Go on:  roadmap train resume={tmp_path}"
    assert re.match(said, found.stdout), found.stdout


def test_a_picture_that_goes_away(pictures: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(pictures, tmp_path / "pictures"))
    unpacked: dict[str, Any] = {"data__pack": "no", "data__workers": 0, "data__batches": 8}
    kept = fit(tiny(root, tmp_path / "whole", **unpacked), quiet=True)
    away = tmp_path / "away"
    with calling(loop, "step", 12, lambda: (root / "train").rename(away)), pytest.raises(RunError) as caught:
        fit(tiny(root, tmp_path / "run", **unpacked), quiet=True)
    words = (
        rf"a picture could not be read: {root}/train/c0\d/\d.png: .*\. Put it back as it was: .*"
        rf"data.on_error=skip .* What was saved is whole\. Go on:  roadmap train resume={tmp_path}/run"
    )
    assert re.match(words, str(caught.value)), caught.value
    away.rename(root / "train")
    resume(tmp_path / "run", quiet=True)
    assert_same_run(kept, tmp_path / "run")


@pytest.mark.parametrize("pack", ["yes", "no"])
def test_a_picture_that_was_never_whole(pack: str, pictures: Path, tmp_path: Path) -> None:
    """The error says what helps; what helps works, in the same folder, and what is said to come next, too."""
    root = Path(shutil.copytree(pictures, tmp_path / "my pictures"))
    damaged = next((root / "test").rglob("*.png"))
    damaged.write_bytes(damaged.read_bytes()[:200])
    words = (
        rf"a picture could not be read: {damaged}: .*\. Repair or remove it, or give data.on_error=skip, which leaves "
        rf"it out; `roadmap data check folder '{root}'` names all such pictures$"
    )
    asked: dict[str, Any] = {"data__pack": pack, "data__workers": 0, "epochs": 1}
    with pytest.raises(RunError) as caught:
        fit(tiny(root, tmp_path / "run", **asked), quiet=True)
    assert re.match(words, str(caught.value)), caught.value
    folder = fit(tiny(root, tmp_path / "run", data__on_error="skip", **asked), quiet=True)
    found = Run(folder).summary()
    assert found["skipped pictures"] == 1
    # as the run did, without being asked
    assert evaluate(Encoder.open(folder)).metrics == found["after"][root.name]
    result = CliRunner().invoke(app, ["evaluate", str(folder)])
    assert result.exit_code == 0, result.output
    assert f"left out   1 picture that could not be decoded: {damaged.relative_to(root)}" in result.output
    result = CliRunner().invoke(app, ["evaluate", str(folder), "--on-error", "raise"])
    assert f"{damaged}: " in result.stderr


def kill_a_child() -> None:
    """One of the processes that this one started, as a system does that is short of memory."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")
def test_a_reader_that_is_killed(pictures: Path, tmp_path: Path) -> None:
    unpacked: dict[str, Any] = {"data__pack": "no", "data__workers": 1, "data__batches": 30, "epochs": 1}
    with calling(loop, "step", 2, kill_a_child), pytest.raises(RunError) as caught:
        fit(tiny(pictures, tmp_path / "run", **unpacked), quiet=True)
    words = r"a process that reads pictures was killed \(DataLoader worker .*Fewer data.workers.*Nothing was saved yet"
    assert re.match(words, str(caught.value)), caught.value
    resume(tmp_path / "run", quiet=True)
    assert Run(tmp_path / "run").summary()["steps"] == 30


def test_readers_outlive_a_signal_that_goes_to_all(pictures: Path, tmp_path: Path) -> None:
    """Slurm and a terminal tell every process of a job: the run saves, instead of failing for want of a reader."""
    unpacked: dict[str, Any] = {"data__pack": "no", "data__workers": 1, "data__batches": 8}
    kept = fit(tiny(pictures, tmp_path / "whole", **unpacked), quiet=True)

    def tell_readers() -> None:
        for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
            os.kill(int(pid), signal.SIGTERM)

    with (
        calling(loop, "step", 10, tell_readers),  # more batches are needed than were read ahead
        calling(loop, "step", 14, lambda: os.kill(os.getpid(), signal.SIGTERM)),
        pytest.raises(KeyboardInterrupt, match="stopped and saved after step 14"),
    ):
        fit(tiny(pictures, tmp_path / "run", **unpacked), quiet=True)
    resume(tmp_path / "run", quiet=True)
    assert_same_run(kept, tmp_path / "run")


class Narrow(nn.Module):
    """A device on which so many pictures fit, and no more."""

    def __init__(self, inside: nn.Module, most: int) -> None:
        super().__init__()
        self.inside, self.most = inside, most

    def forward(self, images: Tensor) -> Tensor:
        if len(images) > self.most and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total of ...")
        found: Tensor = self.inside(images)
        return found


@pytest.mark.parametrize(("most", "fit_at_once"), [(5, 4), (3, 2), (1, None)])
def test_how_many_pictures_fit_is_tried(most: int, fit_at_once: int | None, pictures: Path, tmp_path: Path) -> None:
    job = worlds.job(tiny(pictures, tmp_path / "run"))  # batches of 8
    job.state.model = Narrow(job.state.model, most)
    assert fitting_pictures(job, RuntimeError()) == fit_at_once


def test_a_device_that_is_too_small(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = loop.step

    def step(state: Any, batch: Any, parts: Any) -> Any:
        if state.step == 5:
            state.model = Narrow(state.model, 5)
            state.model(batch.images)
        return real(state, batch, parts)

    monkeypatch.setattr(loop, "step", step)
    with pytest.raises(RunError) as caught:
        fit(tiny(pictures, tmp_path / "run"), quiet=True)
    assert str(caught.value) == (
        "the memory of cpu is too small for 8 pictures of 16 pixels in small_cnn (CUDA out of memory). 4 pictures at "
        "once fit, as a trial just showed: data.chunk=4 keeps the batch, for a third more time (two passes), or "
        "data.batch_size=4 makes it smaller. If another program has taken the memory, the run goes on as it is once "
        f"that has ended. What was saved is whole. Go on:  roadmap train resume={tmp_path / 'run'}"
    )
    assert worlds.last(tmp_path / "run")["step"] == 4


@pytest.mark.gpu
def test_a_gpu_that_is_too_small(pictures: Path, tmp_path: Path) -> None:
    settings = tiny(
        pictures, tmp_path / "run", hardware__device="cuda", data__image=224, data__resize=224, data__batch_size=512
    )
    settings.data.per_class, settings.model.name, settings.hardware.compile = 128, "resnet50", "no"
    settings.hardware.precision = "32"
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(8 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(RunError) as caught:
            fit(settings, quiet=True)
        found = re.search(r"(\d+) pictures at once fit, as a trial just showed", str(caught.value))
        assert found is not None, caught.value
        assert "hardware.precision=bf16 takes about half" in str(caught.value)
        settings.data.per_class = int(found[1]) // 4
        settings.data.batch_size, settings.run = 4 * settings.data.per_class, str(tmp_path / "smaller")
        fit(settings, quiet=True)  # and so they do
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_command_says_it_and_fails(pictures: Path, tmp_path: Path) -> None:
    Run.create(tiny(pictures, tmp_path / "run")).close()
    with calling(loop, "step", 1, lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory. Tried"))):
        result = CliRunner().invoke(app, ["train", f"resume={tmp_path / 'run'}"])
    assert result.exit_code == 1
    assert "error: the memory of cpu is too small for 8 pictures" in result.output
    assert "Traceback" not in result.output
