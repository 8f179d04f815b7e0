"""A run that is asked for again goes on, and only if it is the same run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roadmap.config.settings import SettingError
from roadmap.engine import fit, fit_or_resume

from .test_resume import killed
from .worlds import assert_same_run, tiny


def test_it_begins_goes_on_and_stays(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fit(tiny(pictures, tmp_path / "whole"), quiet=True)
    asked = tiny(pictures, tmp_path / "run", hardware__precision="auto", data__workers=1)
    killed(6, lambda: fit_or_resume(asked, quiet=True))
    torch.manual_seed(1234)
    monkeypatch.chdir(pictures.parent)
    asked.data.root, asked.hardware.time_limit = pictures.name, 10.0  # the same pictures, said in another way
    assert fit_or_resume(asked, quiet=True) == tmp_path / "run"
    assert_same_run(whole, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert fit_or_resume(asked, quiet=True) == tmp_path / "run"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_another_run_is_refused(pictures: Path, tmp_path: Path) -> None:
    killed(3, lambda: fit_or_resume(tiny(pictures, tmp_path / "run"), quiet=True))
    words = r"run already holds a run with optim.lr=0.01, not 0.5; give another folder, or the settings"
    with pytest.raises(SettingError, match=words) as caught:
        fit_or_resume(tiny(pictures, tmp_path / "run", optim__lr=0.5), quiet=True)
    assert caught.value.field == "optim.lr"
    with pytest.raises(SettingError, match="loss.name=roadmap, not supap"):
        fit_or_resume(tiny(pictures, tmp_path / "run", loss={"name": "supap"}), quiet=True)


def test_what_only_the_run_has_is_a_difference_too(pictures: Path, tmp_path: Path) -> None:
    """It would go on with an option of the loss, or test on pictures, that nobody asked for; a default written down is
    none."""
    loss = {"name": "roadmap", "lam": 0.25, "tau": 0.01}
    folder = tmp_path / "run"
    killed(3, lambda: fit_or_resume(tiny(pictures, folder, loss=loss), quiet=True))
    with pytest.raises(SettingError, match=r"run with loss.lam=0.25, not 0.5; give another"):
        fit_or_resume(tiny(pictures, folder, loss={"name": "roadmap"}), quiet=True)
    assert fit_or_resume(tiny(pictures, folder, loss={"name": "roadmap", "lam": 0.25}), quiet=True) == folder
    tested = tiny(pictures, tmp_path / "other", data__test_sets={"folder": str(pictures)})
    killed(3, lambda: fit_or_resume(tested, quiet=True))
    with pytest.raises(SettingError, match=rf"run with data.test_sets.folder={pictures}, not null; give another"):
        fit_or_resume(tiny(pictures, tmp_path / "other"), quiet=True)
