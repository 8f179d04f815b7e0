"""All that changes, saved whole, loaded whole, and refused where it is not what it says."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roadmap.atomic
from roadmap.engine import TrainState
from roadmap.engine.state import Best

from .worlds import assert_equal


class Ema(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)


def some(seed: int = 0, steps: int = 3, **more: Any) -> TrainState:
    """A state with everything in it that can be, after a few steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    given: dict[str, Any] = {
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**seed),
        "average": Ema(model),
        "kept": copy.deepcopy(model),
        "parts": {"loss": nn.Linear(2, 3)},
    }
    state = TrainState(model, optimizer, **(given | more))
    for _ in range(steps):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
    return state


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    saved = some(seed=1)
    saved.best, saved.seconds = Best(2, 0.5, {"mAP@R": 0.5, "queries": 3}), 1.5
    saved.save(tmp_path / "last.pt")
    drawn = torch.rand(5)

    loaded = some(seed=2, steps=1)
    loaded.load(tmp_path / "last.pt")
    assert torch.equal(torch.rand(5), drawn)  # random numbers go on where they were
    assert (loaded.step, loaded.best, loaded.seconds) == (3, saved.best, 1.5)
    ours, theirs = loaded.state_dict()["stateful"], saved.state_dict()["stateful"]
    assert set(ours) == {"model", "optimizer", "scaler", "average", "kept", "loss"}
    for name in ours:
        assert_equal(dict(ours[name]), dict(theirs[name]), name)
    assert os.listdir(tmp_path) == ["last.pt"]


def test_a_loaded_optimiser_moves_as_the_saved_one_would(tmp_path: Path) -> None:
    """Moments, step counts and rates are there, and belong to the same parameters."""
    one = some(seed=1)
    one.save(tmp_path / "last.pt")
    other = some(seed=2, steps=0)
    other.load(tmp_path / "last.pt")
    batch = torch.randn(8, 4)
    for state in (one, other):
        state.model(batch).square().sum().backward()
        state.optimizer.step()
    assert_equal(dict(one.model.state_dict()), dict(other.model.state_dict()))


def test_before_the_first_epoch_is_judged_there_is_no_best(tmp_path: Path) -> None:
    some().save(tmp_path / "last.pt")
    loaded = some()
    loaded.best = Best(1, 1.0, {})
    loaded.load(tmp_path / "last.pt")
    assert loaded.best is None


@pytest.mark.parametrize("when", ["save", "fsync", "replace"])
def test_a_kill_while_saving_leaves_the_state_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Before the temporary file is written, between writing and renaming, and at the renaming itself."""
    path = tmp_path / "last.pt"
    some(steps=1).save(path)
    before = path.read_bytes()

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    if when == "save":
        real = torch.save

        def half(values: Any, to: str) -> None:
            real(values, to)
            content = Path(to).read_bytes()
            Path(to).write_bytes(content[: len(content) // 2])
            raise KeyboardInterrupt

        monkeypatch.setattr(torch, "save", half)
    else:
        monkeypatch.setattr(roadmap.atomic.os, when, killed)
    with pytest.raises(KeyboardInterrupt):
        some(steps=3).save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["last.pt"]
    loaded = some()
    loaded.load(path)
    assert loaded.step == 1


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_file_that_would_run_code_is_refused_and_does_nothing(tmp_path: Path, how: str) -> None:
    victim, path = tmp_path / "exploded", tmp_path / "last.pt"
    values = some().state_dict() | {"best": Bomb(victim)}
    if how == "torch":
        torch.save(values, path)
    else:
        path.write_bytes(pickle.dumps(values, protocol=2))
    with pytest.raises(ValueError, match="last.pt could not be read as a saved state"):
        some().load(path)
    assert not victim.exists()


def test_files_that_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    with pytest.raises(FileNotFoundError, match=r"there is no saved state at .*last.pt"):
        some().load(path)
    for content in (b"", b"text", b"u", bytes(range(256))):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="last.pt could not be read as a saved state"):
            some().load(path)
    some().save(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="last.pt could not be read as a saved state"):
        some().load(path)
    for values in ([1, 2], {"model": 1}, some().state_dict() | {"version": 99}, some().state_dict() | {"format": "x"}):
        torch.save(values, path)
        with pytest.raises(ValueError, match="last.pt is not a roadmap-train-state of version 1"):
            some().load(path)


def test_a_state_of_other_settings_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    some().save(path)
    with pytest.raises(ValueError, match=r"the saved state holds \['average', .*\], this run needs \['kept', "):
        some(average=None).load(path)
    some(average=None, parts={}).save(path)
    with pytest.raises(ValueError, match="continue with the settings it was started with"):
        some().load(path)


def test_weights_of_another_shape_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    some(kept=None).save(path)
    wide = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    other = TrainState(wide, torch.optim.AdamW(wide.parameters()), scaler=torch.amp.GradScaler("cpu"))
    other.average, other.parts = Ema(wide), {"loss": nn.Linear(2, 3)}
    with pytest.raises(ValueError, match="(?s)the saved model does not fit this run.*continue with the settings"):
        other.load(path)
