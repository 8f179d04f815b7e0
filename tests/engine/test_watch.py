"""Numbers that are no longer numbers stop a run: at which step, in which pictures, and with what left on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from roadmap.data import Batches, Records
from roadmap.engine import NonFiniteError, TrainState, fit, resume
from roadmap.engine.comparing import BatchAlone
from roadmap.engine.loop import train_epoch
from roadmap.engine.splits import sampler_of
from roadmap.engine.step import Outcome, step
from roadmap.engine.watch import OVERFLOWS, Watch
from roadmap.losses.named import NAMES, constructor
from roadmap.models import Retriever, load_checkpoint
from roadmap.runs import Run

from .worlds import job, last, lines, tiny

PATHS = tuple(f"{letter}.png" for letter in "abcdefgh")
RECORDS = Records("mine", Path("/none"), PATHS, np.arange(8))


def outcome(step: int, loss: float = 0.5, norm: float = 1.0, lengths: tuple[float, ...] = (1.0,) * 4) -> Outcome:
    """Of pictures h, f, d and b."""
    return Outcome(step, torch.tensor([loss, norm]), torch.tensor(lengths), torch.tensor([7, 5, 3, 1]))


def failure(found: Outcome, scaled: bool = False) -> NonFiniteError:
    watch = Watch(RECORDS, scaled)
    assert watch.push(found) is None  # not looked at yet
    with pytest.raises(NonFiniteError) as caught:
        watch.pop()
    return caught.value


def test_numbers_come_one_step_late() -> None:
    watch = Watch(RECORDS, scaled=False)
    assert watch.pop() is None
    assert watch.push(outcome(1, 0.25, 2.0)) is None
    assert watch.push(outcome(2, 0.125, 4.0))[:4] == (1, 0.25, 2.0, 4)  # type: ignore[index]
    assert watch.pop()[:4] == (2, 0.125, 4.0, 4)  # type: ignore[index]
    assert watch.pop() is None


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number(loss: float) -> None:
    error = failure(outcome(17, loss=loss))
    assert error.step == 17
    assert str(error) == (
        f"step 17: the loss is {loss}; the run stops. All of its embeddings are finite; its 4 pictures: "
        "h.png, f.png, d.png and 1 more. "
        "Try a lower optim.lr, optim.clip=1, optim.warmup=1, or hardware.precision=32"
    )
    assert error.pictures == ["h.png", "f.png", "d.png", "b.png"]


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_gradient_that_is_no_number(norm: float) -> None:
    assert f"step 3: the gradient's norm is {norm}" in str(failure(outcome(3, norm=norm)))


def test_the_pictures_without_a_usable_embedding_come_first() -> None:
    error = failure(outcome(5, loss=math.nan, lengths=(1.0, math.nan, 1.0, 0.0)))
    assert "2 of 4 pictures have an embedding that is zero or not finite: f.png, b.png." in str(error)
    assert error.pictures == ["f.png", "b.png", "h.png", "d.png"]
    every = failure(outcome(5, loss=math.nan, lengths=(math.inf,) * 4))
    assert "Every embedding of it is zero or not finite; its 4 pictures: h.png, f.png, d.png and 1 more." in str(every)


def test_a_scaler_may_overflow_so_many_times_in_a_row() -> None:
    watch = Watch(RECORDS, scaled=True)
    for number in range(1, 3 * OVERFLOWS):  # a good step among them starts the count again
        watch.push(outcome(number, norm=1.0 if number % OVERFLOWS == 0 else math.inf))
        watch.pop()
    watch = Watch(RECORDS, scaled=True)
    for number in range(1, OVERFLOWS):
        watch.push(outcome(number, norm=math.nan))
        assert watch.pop() is not None
    watch.push(outcome(99, norm=math.inf))
    with pytest.raises(NonFiniteError, match="step 99: the gradient's norm is inf"):
        watch.pop()


def test_a_scaler_excuses_no_loss() -> None:
    assert "the loss is nan" in str(failure(outcome(1, loss=math.nan, norm=math.inf), scaled=True))


# ---------------------------------------------------------------- whole runs


def poison(
    monkeypatch: pytest.MonkeyPatch, step: int, rows: tuple[int, ...] = (), value: float = math.nan
) -> list[str]:
    """From training step `step` on, the embeddings at these places of the batch become `value`.

    The list that it gives holds, when it has happened, the paths of those pictures.
    """
    real, seen, names, iterate = Retriever.forward, [0], list[str](), Batches.__iter__

    def remembered(self: Any) -> Any:
        for batch in iterate(self):
            if self._sampler is not None and seen[0] == step - 1:
                names.extend(self.records.paths[i] for i in batch.indices[list(rows)].tolist())
            yield batch

    def forward(self: Retriever, images: Tensor) -> Tensor:
        vectors = real(self, images)
        if not self.training:
            return vectors
        seen[0] += 1
        if seen[0] < step:
            return vectors
        mask = torch.ones_like(vectors)
        mask[list(rows)] = value
        return vectors * mask

    monkeypatch.setattr(Retriever, "forward", forward)
    monkeypatch.setattr(Batches, "__iter__", remembered)
    return names


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_a_picture_whose_embedding_is_no_vector(
    value: float, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 5 is the first of the third epoch: two epochs are saved and stay as they are."""
    names = poison(monkeypatch, 5, rows=(2, 6), value=value)
    with pytest.raises(NonFiniteError) as caught:
        fit(tiny(pictures, tmp_path / "run"), quiet=True)
    assert caught.value.step == 5
    assert len(names) == 2
    assert caught.value.pictures[:2] == names
    assert f"2 of 8 pictures have an embedding that is zero or not finite: {names[0]}, {names[1]}" in str(caught.value)
    told = json.loads((tmp_path / "run" / "stopped.json").read_text())
    assert told == {"step": 5, "why": str(caught.value), "pictures": caught.value.pictures}
    assert_good(tmp_path / "run", step=4)


def assert_good(folder: Path, step: int) -> None:
    """The last state is that of `step`, whole and finite, and so are the best weights and all that is logged."""
    saved = last(folder)
    assert saved["step"] == step
    for values in (saved["stateful"]["model"], load_checkpoint(Run(folder).best)[0].state_dict()):
        assert all(value.isfinite().all() for value in values.values())
    assert all(math.isfinite(line["loss"]) for line in lines(folder) if line["kind"] == "step")
    assert max(line["step"] for line in lines(folder) if line["kind"] == "evaluation") == step
    assert not (folder / "summary.json").exists()


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_leaves_it_to_the_watch(
    name: str, pictures: Path, nested: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses refuse such embeddings themselves where looking is free, without knowing the pictures."""
    by_tree = getattr(constructor(name), "takes_paths", False) is True
    made = job(tiny(nested if by_tree else pictures, tmp_path / "run", loss={"name": name}))
    poison(monkeypatch, 1, rows=(3,))
    watch = Watch(made.splits.train, scaled=False)
    batches = made.pictures.training(made.splits.train, sampler_of(made.splits.train, made.settings.data, 0))
    with pytest.raises(NonFiniteError, match="step 1: .*1 of 8 pictures"):
        train_epoch(made, batches, watch)
    made.run.close()


@pytest.mark.parametrize("number", [4, 6])
def test_a_weight_that_is_no_number(
    number: int, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step of an epoch (4) is looked at before its epoch is judged or saved."""
    real = TrainState.__setattr__

    def poisoned(self: TrainState, name: str, value: Any) -> None:
        real(self, name, value)
        if name == "step" and value == number - 1:
            with torch.no_grad():
                next(self.model.parameters())[0, 0, 0, 0] = math.nan

    monkeypatch.setattr(TrainState, "__setattr__", poisoned)
    with pytest.raises(NonFiniteError, match=f"step {number}: the loss is nan; .*Every embedding of it is zero or not"):
        fit(tiny(pictures, tmp_path / "run"), quiet=True)
    assert_good(tmp_path / "run", step=2 if number == 4 else 4)


class ExplodingGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, vectors: Tensor) -> Tensor:
        return vectors.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.inf


def test_a_gradient_that_explodes_behind_a_fine_loss(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = Retriever.forward, [0]

    def forward(self: Retriever, images: Tensor) -> Tensor:
        seen[0] += self.training
        vectors = real(self, images)
        exploded: Tensor = ExplodingGradient.apply(vectors)  # type: ignore[no-untyped-call]
        return exploded if seen[0] == 6 else vectors

    monkeypatch.setattr(Retriever, "forward", forward)
    with pytest.raises(
        NonFiniteError, match="step 6: the gradient's norm is (nan|inf); .*All of its embeddings are fin"
    ):
        fit(tiny(pictures, tmp_path / "run"), quiet=True)
    assert_good(tmp_path / "run", step=4)


def test_a_run_that_goes_on_is_no_longer_stopped(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        poison(patch, 5, rows=(1,))
        with pytest.raises(NonFiniteError):
            fit(tiny(pictures, tmp_path / "run"), quiet=True)
    folder = resume(tmp_path / "run", quiet=True)  # perhaps on another machine, where it does not happen
    assert not (folder / "stopped.json").exists()
    assert (folder / "summary.json").exists()


def test_a_loss_that_refuses_for_a_reason_of_its_own_is_not_hidden(pictures: Path, tmp_path: Path) -> None:
    made = job(tiny(pictures, tmp_path / "run"))

    class Refusing(nn.Module):
        def forward(self, *_: Tensor) -> Tensor:
            raise ValueError("labels must be something else")

    object.__setattr__(made.parts, "compare", BatchAlone(Refusing()))
    sampler = sampler_of(made.splits.train, made.settings.data, 0)
    batch = next(iter(made.pictures.training(made.splits.train, sampler)))
    with pytest.raises(ValueError, match="labels must be something else"):
        step(made.state, batch, made.parts)
    made.run.close()
