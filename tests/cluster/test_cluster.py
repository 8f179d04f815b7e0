"""Launchers for real, as far as they are installed: a job that its scheduler stops and puts back goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from hydra.types import RunMode

from roadmap.config.composition import CONFIG, hydra_with
from roadmap.config.settings import Settings
from roadmap.engine import fit, fit_or_resume

from ..engine.worlds import assert_same_run, lines, tiny, write_classes
from ..waiting import PATIENCE


class Train:
    """A run as a job of submitit, with what that asks of a job that can be put back into the queue."""

    def __call__(self, settings: dict[str, object]) -> str:
        return str(fit_or_resume(Settings.from_dict(settings), quiet=True))

    def checkpoint(self, settings: dict[str, object]) -> object:
        import submitit

        return submitit.helpers.DelayedSubmission(self, settings)


def test_a_job_that_submitit_puts_back_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its executor on this machine, which tells a job of its time limit as Slurm's does."""
    submitit = pytest.importorskip("submitit")
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_classes(tmp_path / "pictures" / "train", range(8))
    write_classes(tmp_path / "pictures" / "test", range(8, 12))
    asked = {"epochs": 1, "data__batches": 100, "checkpoint_minutes": 60.0}
    whole = fit(tiny(tmp_path / "pictures", tmp_path / "whole", **asked), quiet=True)
    executor = submitit.LocalExecutor(tmp_path / "jobs", max_num_timeout=3)
    executor.update_parameters(timeout_min=5)
    job = executor.submit(Train(), tiny(tmp_path / "pictures", tmp_path / "run", **asked).as_dict())
    try:
        patience = time.monotonic() + PATIENCE
        while not (tmp_path / "run" / "metrics.jsonl").is_file() or len(lines(tmp_path / "run")) < 2:
            assert time.monotonic() < patience, job.stderr()
            time.sleep(0.01)
        os.kill(int(Path(f"/proc/{job.job_id}/task/{job.job_id}/children").read_text()), signal.SIGUSR2)
        assert job.result() == str(tmp_path / "run")
    finally:
        job.cancel()
    assert "Caught signal SIGUSR2" in job.stdout() + job.stderr()
    assert_same_run(whole, tmp_path / "run")


def test_the_options_for_slurm_are_those_of_its_launcher() -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    with hydra_with(None) as hydra:
        found = hydra.compose_config(CONFIG, ["hydra/launcher=slurm"], RunMode.MULTIRUN, from_shell=False)
    assert found.hydra.launcher._target_.endswith(".SlurmLauncher")
    assert (found.hydra.launcher.signal_delay_s, found.hydra.launcher.max_num_timeout) == (120, 1000)
