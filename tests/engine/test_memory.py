"""The engine's memory: made from settings, filled by the step, and what is said where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roadmap.config.composition import check_loss, settings_from
from roadmap.config.settings import MemorySettings, SettingError
from roadmap.engine import fit
from roadmap.engine.auto import resolve
from roadmap.engine.comparing import BatchAlone, BatchAndMemory, compare_of
from roadmap.engine.splits import division_of, records_of
from roadmap.losses import ROADMAP, Distributed, Memory

from .worlds import last, lines, tiny


def test_settings_make_the_comparison() -> None:
    loss = ROADMAP()
    alone = compare_of(loss, MemorySettings(), 10)
    assert isinstance(alone, BatchAlone)
    assert alone.loss is loss
    both = compare_of(loss, MemorySettings(50, warmup=0.25, repeats=True, form="added", weight=0.5), 10)
    assert isinstance(both, BatchAndMemory)
    memory = both.memory
    assert (memory.size, memory.warmup, memory.repeats, memory.form, memory.weight) == (50, 3, True, "added", 0.5)
    shared = compare_of(loss, MemorySettings(50), 10, shared=True)
    assert isinstance(shared, BatchAndMemory)
    assert isinstance(shared.memory.loss, Distributed)
    assert shared.memory.inner is loss


def test_the_step_compares_with_the_memory_and_the_run_holds_it(pictures: Path, tmp_path: Path) -> None:
    alone = fit(tiny(pictures, tmp_path / "alone"), quiet=True)
    folder = fit(tiny(pictures, tmp_path / "memory", memory__size=11, memory__warmup=1.0), quiet=True)
    steps = [[line["loss"] for line in lines(run) if line["kind"] == "step"] for run in (alone, folder)]
    assert steps[0][:3] == steps[1][:3]  # an epoch of two to warm up, and a memory that is empty
    assert all(one != other for one, other in zip(steps[0][3:], steps[1][3:], strict=True))
    held = last(folder)["stateful"]["memory"]
    assert held["vectors"].shape[0] == 11
    ids = held["ids"][held["order"]].tolist()
    assert len(ids) == len(set(ids)) == 11
    torch.testing.assert_close(held["vectors"].norm(dim=1), torch.ones(11))


def test_auto_remembers_the_training_pictures(pictures: Path) -> None:
    settings = settings_from(["data=folder", f"data.root={pictures}", "memory=xbm", "model=small_cnn"])
    records, _ = division_of(records_of(settings.data))
    resolved, reasons = resolve(settings, records)
    assert resolved.memory.size == len(records.split("train"))
    assert any(reason.startswith("memory.size=") and "all of them" in reason for reason in reasons)
    assert (resolved.memory.warmup, resolved.memory.repeats) == (1.0, False)


@pytest.mark.parametrize(("recipe", "root"), [("sop_resnet50", "SOP"), ("inaturalist_resnet50", "INAT")])
def test_table_2_in_one_command(recipe: str, root: str) -> None:
    asked = [f"recipe={recipe}", f"data.root={root}", "data.batch_size=64", "loss=contrastive_xbm", "memory=xbm"]
    settings = settings_from(asked)
    assert settings.memory == MemorySettings("auto", 1.0)  # type: ignore[arg-type]
    made = compare_of(ROADMAP(), MemorySettings(59_551, 1.0), 930)
    assert isinstance(made, BatchAndMemory)
    assert made.memory.warmup == 930


def test_a_loss_that_has_no_use_for_it() -> None:
    settings = settings_from(["memory=xbm", "loss=proxy_nca"])
    with pytest.raises(SettingError, match="memory: this loss compares embeddings with its own class") as caught:
        check_loss(settings)
    assert caught.value.field == "memory"
    check_loss(settings_from(["memory=xbm", "loss=contrastive_xbm"]))
    with pytest.raises(SettingError, match="takes no joined form; use form='added'"):
        check_loss(settings_from(["memory=xbm", "loss=contrastive_xbm", "memory.form=joined"]))
    with pytest.raises(SettingError, match="memory.size must be at least 1, got 0"):
        MemorySettings(size=0)


def test_a_state_of_another_size_is_refused() -> None:
    one, other = (compare_of(ROADMAP(), MemorySettings(size), 1) for size in (8, 9))
    assert isinstance(one, BatchAndMemory)
    assert isinstance(other, BatchAndMemory)
    with pytest.raises(RuntimeError, match="a memory of 8 items was saved, this one holds 9"):
        other.load_state_dict(one.state_dict())
    assert isinstance(one.memory, Memory)
