"""A run that was started with relative paths is the same run from any other folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from roadmap.config.settings import DataSettings, ModelSettings, Settings
from roadmap.engine import fit, resume
from roadmap.engine.paths import absolute_paths
from roadmap.engine.splits import records_of
from roadmap.models import retriever, save_checkpoint
from roadmap.runs import Run

from .test_resume import stopped
from .worlds import IMAGE, assert_same_run, summary, tiny, write_classes


def test_a_relative_run_goes_on_and_is_read_from_elsewhere(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "other" / "data").mkdir(parents=True)
    shutil.copytree(pictures, tmp_path / "work" / "data" / "pictures")
    write_classes(tmp_path / "work" / "more", range(30, 33))
    write_classes(tmp_path / "other" / "data" / "pictures", range(40, 44))  # what a relative root would find there
    save_checkpoint(tmp_path / "work" / "start.safetensors", retriever(ModelSettings(pooling="max"), IMAGE), {})
    given = {"model__weights": "start.safetensors", "data__test_sets": {"folder": "more"}}
    monkeypatch.chdir(tmp_path / "work")
    whole = fit(tiny(Path("data/pictures"), tmp_path / "whole", **given), quiet=True)
    folder = stopped(tiny(Path("data/pictures"), Path("../twice"), **given), step=6).resolve()
    monkeypatch.chdir(tmp_path / "other")
    settings = Run.open(folder).settings()
    assert settings.data.root == str(tmp_path / "work" / "data" / "pictures")
    assert settings.data.test_sets == {"folder": str(tmp_path / "work" / "more")}
    assert settings.model.weights == str(tmp_path / "work" / "start.safetensors")
    found, changes = Run.open(folder).division(records_of(settings.data))
    assert (len(found), changes) == (72, [])
    resume(folder, quiet=True)
    assert_same_run(whole, folder)
    assert list(summary(folder)["after"]) == ["more"]


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    data = DataSettings(name="folder", root="~/pictures", test_sets={"a": "~/b", "c": "link/d"})
    found = absolute_paths(Settings(data=data, model=ModelSettings(weights="~/w.pth")))
    assert found.data.root == "/home/me/pictures"
    assert found.data.test_sets == {"a": "/home/me/b", "c": str(tmp_path / "link" / "d")}
    assert found.model.weights == "/home/me/w.pth"


@pytest.mark.parametrize("weights", ["random", "hub"])
def test_what_is_no_path_stays(weights: str) -> None:
    settings = Settings(model=ModelSettings(weights=weights))
    assert absolute_paths(settings) == settings
