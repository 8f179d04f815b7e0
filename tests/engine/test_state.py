"""All that changes, saved whole, loaded whole, and refused where it is not what it says."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import nn

import roadmap.atomic
from roadmap.engine import TrainState
from roadmap.engine.saving import checksum
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

        def half(values: Any, file: IO[bytes]) -> None:
            real(values, file)
            file.truncate(file.tell() // 2)
            raise KeyboardInterrupt

        monkeypatch.setattr(torch, "save", half)
    else:
        monkeypatch.setattr(roadmap.atomic.os, when, killed)
    with pytest.raises(KeyboardInterrupt):
        some(steps=3).save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [before] * len(os.listdir(tmp_path))  # perhaps a second name
    assert set(os.listdir(tmp_path)) <= {"last.pt", "previous.pt"}
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
    named = some().state_dict() | {"format": "roadmap-train-state"}
    for values in ([1, 2], {"model": 1}, named | {"version": 99}, named | {"version": 2, "format": "x"}):
        torch.save(values, path)
        with pytest.raises(ValueError, match="last.pt is not a roadmap-train-state of version 2"):
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


# ---------------------------------------------------------------- damage


def twice(tmp_path: Path) -> Path:
    """Where a state of two steps was saved, and then one of three."""
    path = tmp_path / "last.pt"
    for steps in (2, 3):
        some(steps=steps).save(path)
    return path


def step_of(path: Path) -> int:
    loaded = some(steps=0)
    loaded.load(path)
    return loaded.step


def test_the_state_before_is_kept(tmp_path: Path) -> None:
    path = twice(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["last.pt", "previous.pt"]
    assert (step_of(path), step_of(tmp_path / "previous.pt")) == (3, 2)
    some(steps=4).save(path)
    assert (step_of(path), step_of(tmp_path / "previous.pt")) == (4, 3)


def flips(content: bytes, count: int) -> list[int]:
    """Places at which a bit is flipped, spread over a file."""
    return [len(content) * i // count + 7 for i in range(count)]


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Either the state is what was saved, to the bit, or the one before is taken and that is said."""
    path = twice(tmp_path)
    content, before = path.read_bytes(), (tmp_path / "previous.pt").read_bytes()
    whole = some(steps=3).state_dict()["stateful"]
    noticed = 0
    for place in flips(content, 200):
        path.unlink()  # not through the other name
        path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        caplog.clear()
        loaded = some(steps=0)
        loaded.load(path)
        if loaded.step == 3:
            for name, part in loaded.state_dict()["stateful"].items():
                assert_equal(dict(part), dict(whole[name]), f"{place} {name}")
            continue
        noticed += 1
        assert loaded.step == 2
        assert "the run goes on from the state before it, that of step 2" in caplog.text
        assert path.read_bytes() == before  # the damaged one will not become the previous one
    assert noticed > 20


def test_flipped_weights_are_named_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    some().save(path)
    weights = some().model.state_dict()["0.weight"].numpy().tobytes()
    content = path.read_bytes()
    place = content.index(weights) + 5
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(ValueError, match=r"last.pt is damaged: its content is not what was saved, and there is none before it; start a new run"):  # fmt: skip  # noqa: E501
        some().load(path)


def test_two_damaged_states_are_refused(tmp_path: Path) -> None:
    path = twice(tmp_path)
    for name in ("last.pt", "previous.pt"):
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=r"(?s)last.pt could not be read.*nor the one before it: .*previous.pt could not be read.*start a new run"):  # fmt: skip  # noqa: E501
        some().load(path)


def test_a_file_system_without_second_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise PermissionError("links are not supported")

    monkeypatch.setattr(os, "link", refuses)
    path = twice(tmp_path)
    assert (step_of(path), step_of(tmp_path / "previous.pt")) == (3, 2)
    path.unlink()  # killed in the moment in which only the previous one is there
    assert step_of(path) == 2
    some(steps=4).save(path)
    assert step_of(path) == 4


def test_states_from_before_there_were_checksums_are_read(tmp_path: Path) -> None:
    values = some(steps=3).state_dict()
    del values["judged"], values["loss"], values["losses"]
    torch.save({"format": "roadmap-train-state", "version": 1, **values}, tmp_path / "last.pt")
    loaded = some(steps=0)
    loaded.load(tmp_path / "last.pt")
    assert (loaded.step, loaded.judged, loaded.loss, loaded.losses) == (3, 3, 0.0, 0)


def test_a_checksum_cannot_be_taken_away(tmp_path: Path) -> None:
    torch.save({"format": "roadmap-train-state", "version": 2, **some().state_dict()}, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="last.pt is damaged"):
        some().load(tmp_path / "last.pt")


@pytest.mark.parametrize(
    "other", [{"a": [1, 2]}, {"a": [12]}, {"a": (1, 2, 0)}, {"b": [1, 2, 0]}, {"a": [1, 2, 0.0]}, {"a": "[1, 2, 0]"}]
)
def test_the_checksum_tells_values_apart(other: Any) -> None:
    assert (checksum(other) == checksum({"a": [1, 2, 0]})) == (other == {"a": (1, 2, 0)})
    tensors = [
        torch.zeros(2, 3),
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(0),
        -torch.zeros(6),
    ]
    assert len({checksum(tensor) for tensor in tensors}) == len(tensors)
    assert checksum(torch.arange(6).view(2, 3).T.contiguous()) == checksum(torch.arange(6).view(2, 3).T)
