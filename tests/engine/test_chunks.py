"""`data.chunk`: a run in two passes beside the same run in one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from roadmap.config.settings import DataSettings
from roadmap.data import ChunkedBatch
from roadmap.engine import fit
from roadmap.engine.forecast import plan
from roadmap.engine.passes import OnePass, TwoPasses, chunk_note

from .worlds import job, lines, tiny

VIT = {"model__name": "test_vit.r160_in1k", "model__pooling": "auto", "select__by": "last", "epochs": 2}


def test_a_run_in_chunks_is_the_run_in_one_pass(pictures: Path, tmp_path: Path) -> None:
    """A transformer has no batch statistics. The rate is small, so that float32's last bits stay last bits."""
    changed = {**VIT, "optim__lr": 1e-5}
    one = fit(tiny(pictures, tmp_path / "one", **changed), quiet=True)
    two = fit(tiny(pictures, tmp_path / "two", **changed, data__chunk=3), quiet=True)
    steps = [[line for line in lines(folder) if line["kind"] == "step"] for folder in (one, two)]
    assert len(steps[0]) == 4
    for ours, theirs in zip(*steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert ours["gradient norm"] == pytest.approx(theirs["gradient norm"], rel=1e-2)


def test_only_chunks_reach_the_model(pictures: Path, tmp_path: Path) -> None:
    made = job(tiny(pictures, tmp_path / "run", data__chunk=3))
    assert isinstance(made.parts.passes, TwoPasses)
    seen: list[int] = []
    made.state.model.register_forward_hook(lambda _, images, __: seen.append(len(images[0])))
    batch = next(iter(made.pictures.training(made.splits.train, made.sampler)))
    assert isinstance(batch, ChunkedBatch)
    vectors = made.parts.passes.embed(batch.images)
    assert seen == [3, 3, 2]
    made.parts.passes.pull_back(made.parts.compare(vectors, batch.labels, batch.indices))
    assert seen == [3, 3, 2] * 2
    assert any(weight.grad is not None and weight.grad.any() for weight in made.state.model.parameters())
    made.run.close()


@pytest.mark.parametrize("chunk", [8, 100, None])
def test_a_chunk_that_holds_the_batch_changes_nothing(chunk: int | None, pictures: Path, tmp_path: Path) -> None:
    made = job(tiny(pictures, tmp_path / "run", data__chunk=chunk))
    assert isinstance(made.parts.passes, OnePass)
    batch = next(iter(made.pictures.training(made.splits.train, made.sampler)))
    assert isinstance(batch.images, torch.Tensor)
    made.run.close()


def test_one_pass_takes_no_chunks(pictures: Path, tmp_path: Path) -> None:
    made = job(tiny(pictures, tmp_path / "run"))
    with pytest.raises(TypeError, match="one pass needs the whole batch in one tensor"):
        made.parts.passes.embed([torch.zeros(2, 3, 16, 16)])
    made.run.close()


def test_the_plan_says_so(pictures: Path, tmp_path: Path) -> None:
    said = "\n".join(plan(tiny(pictures, tmp_path / "run", data__chunk=3)).lines())
    assert "batches of 8 in chunks of 3, 2 of a class" in said


def test_a_run_says_what_chunks_mean_for_it(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tiny(pictures, tmp_path / "run", data__chunk=3, epochs=1))
    said = " ".join(capsys.readouterr().out.split())
    assert "each batch goes through the model twice, 3 pictures at a time; batch normalisation sees a chunk" in said
    assert "normalisation" not in chunk_note(nn.BatchNorm1d(2), 3, frozen=True)
    assert "normalisation" not in chunk_note(nn.LayerNorm(2), 3, frozen=False)


@pytest.mark.parametrize("value", [0, -1])
def test_a_chunk_is_at_least_one_picture(value: int) -> None:
    with pytest.raises(ValueError, match=f"data.chunk must be at least 1, got {value}"):
        DataSettings(chunk=value)
    with pytest.raises(ValueError, match=r"data.chunk must be a whole number or null, got 2.5"):
        DataSettings(chunk=2.5)  # type: ignore[arg-type]
