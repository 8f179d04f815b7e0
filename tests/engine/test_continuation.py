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
