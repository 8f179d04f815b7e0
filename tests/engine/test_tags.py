"""Runs whose pictures have several tags each: what the loss compares by, and what is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roadmap.config.settings import SettingError
from roadmap.data import dataset
from roadmap.encoder import Encoder
from roadmap.engine import fit, plan, resume
from roadmap.engine.comparing import BatchAlone, ByPaths, degrees_of
from roadmap.engine.splits import splits_of
from roadmap.evaluation import evaluate

from .worlds import Killed, assert_same_run, kill_at, summary, tiny

TAGGED = {f"tag {name}" for name in ("H-AP", "ASI", "NDCG", "R@1", "mAP@R", "mAP")}


def tags_of(path: str) -> set[str]:
    """Something that pictures of several classes have in common, and something of their own; some have nothing."""
    number, picture = int(path.split("/")[-2][1:]), int(Path(path).stem)
    return set() if picture == 5 else {f"hue {number % 3}", f"size {number // 4}", f"time {picture % 2}"}


def table(pictures: Path, categories: bool = False) -> Path:
    """A table beside the pictures; its name is another one with categories."""
    records = dataset("folder", pictures)
    rows = ["path,label,split,tags" + ",category" * categories]
    for path, label, split in zip(records.paths, records.labels, records.splits, strict=True):
        rows.append(f"{path},{label},{split},{'; '.join(sorted(tags_of(path)))}" + f",k{label % 2}" * categories)
    file = pictures / f"table{int(categories)}.csv"
    file.write_text("\n".join(rows))
    return file


def settings_of(pictures: Path, run: Path, categories: bool = False, **changed: Any) -> Any:
    return tiny(table(pictures, categories), run, data__name="table", **changed)


def test_the_loss_has_the_tags_of_the_pictures(pictures: Path, tmp_path: Path) -> None:
    settings = settings_of(pictures, tmp_path, categories=True)
    train = splits_of(dataset("table", settings.data.root), settings.data, settings.select).train
    given = []

    class Note(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            given.append(labels)
            return x.sum()

    chosen = torch.tensor([3, 30, 5])
    ByPaths(BatchAlone(Note()), train, "graded_ndcg")(torch.ones(3, 2), torch.zeros(3).long(), chosen)
    named = [{train.tags.names[i] for i in row.nonzero()[:, 0].tolist()} for row in given[0]]
    assert named == [tags_of(train.paths[i]) for i in (3, 30, 5)]
    assert given[0].dtype == torch.bool
    # the clusters of HAPPIER are those of classes, which tags do not say
    assert degrees_of(train, "happier").tolist() == train.tree.paths.tolist()


@pytest.mark.parametrize("name", ["hierarchical_ap", "graded_ndcg"])
def test_a_run_by_tags_is_measured_by_them_and_resumes_to_the_bit(
    name: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"loss": {"name": name}, "memory__size": 24, "epochs": 2, "select__metric": "tag NDCG"}
    whole = fit(settings_of(pictures, tmp_path / "whole", **given), quiet=True)
    (after,) = summary(whole)["after"].values()
    assert set(after) >= TAGGED
    assert not {"H-AP", "level 1 R@1"} & set(after)
    assert evaluate(Encoder.open(whole)).metrics == after, "what is measured later is what the run measured"
    kill_at(monkeypatch, 4)
    with pytest.raises(Killed):
        fit(settings_of(pictures, tmp_path / "run", **given), quiet=True)
    monkeypatch.undo()
    resume(tmp_path / "run", quiet=True)
    assert_same_run(whole, tmp_path / "run")


def test_a_loss_by_classes_wants_a_tree(pictures: Path, tmp_path: Path) -> None:
    settings = settings_of(pictures, tmp_path / "run", loss={"name": "happier"})
    for begin in (plan, fit):
        with pytest.raises(
            SettingError, match=r"loss=happier compares by a tree of labels, and table0 has none"
        ) as said:
            begin(settings)
        assert "tags" not in str(said.value)
