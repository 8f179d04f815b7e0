"""Runs with a loss that compares by a tree of labels, and runs whose vectors can be cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from roadmap.config.composition import settings_from
from roadmap.config.settings import SettingError
from roadmap.data import dataset
from roadmap.encoder import Encoder
from roadmap.engine import fit, resume
from roadmap.engine.comparing import BatchAlone, ByPaths
from roadmap.engine.splits import splits_of
from roadmap.evaluation import Evaluation, evaluate
from roadmap.losses import ROADMAP, Matryoshka, SupAP, named

from .worlds import Killed, assert_same_run, job, kill_at, summary, tiny

GRADED = {"H-AP", "ASI", "NDCG", "folder 1 R@1", "folder 1 mAP@R"}


class OfTwoLevels(nn.Module):
    """SupAP by classes and by the folder above them; remembers what it was given."""

    takes_paths = True
    seen: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x, labels, indices_tuple=None, ref_emb=None, ref_labels=None):
        self.seen.append(labels)
        return SupAP()(x, labels[:, -1]) + SupAP()(x, labels[:, 0])


@pytest.fixture
def by_tree(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    monkeypatch.setitem(named.OWN, "two_levels", OfTwoLevels)
    monkeypatch.setattr(OfTwoLevels, "seen", [])
    return OfTwoLevels.seen


def test_the_loss_has_the_paths_of_the_pictures_and_the_rest_their_labels(nested: Path) -> None:
    settings = tiny(nested, nested)
    train = splits_of(dataset("folder", nested), settings.data, settings.select).train
    given = []

    class Note(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            given.append(labels)
            return x.sum()

    pictures = torch.tensor([3, 30, 0])
    ByPaths(BatchAlone(Note()), train, "note")(torch.ones(3, 2), torch.from_numpy(train.labels)[pictures], pictures)
    assert given[0].tolist() == train.tree.paths[[3, 30, 0]].tolist()
    assert given[0][:, -1].tolist() == train.labels[[3, 30, 0]].tolist()
    assert train.labels.max() + 1 == len(set(train.labels.tolist())), "numbered without gaps, and the tree with them"
    names = [train.tree.nodes[0][node] for node in given[0][:, 0].tolist()]
    assert names == [train.paths[i].split("/")[1] for i in (3, 30, 0)]


def test_a_run_by_a_tree_is_measured_by_it_and_chosen_by_it(
    nested: Path, tmp_path: Path, by_tree: list[Tensor]
) -> None:
    settings = tiny(nested, tmp_path / "run", loss={"name": "two_levels"}, select__metric="H-AP", epochs=2)
    folder = fit(settings, quiet=True)
    assert {tuple(paths.shape) for paths in by_tree} == {(8, 2)}
    (after,) = summary(folder)["after"].values()
    assert set(after) >= GRADED
    assert summary(folder)["validation"]["H-AP"] > 0
    again = evaluate(Encoder.open(folder)).metrics
    assert again == after, "what is measured later is what the run measured, without being asked"
    assert set(evaluate(Encoder.open(folder), levels=False).metrics).isdisjoint(GRADED)
    (file,) = (folder / "evaluations").glob("*.npz")
    assert len(Evaluation.load(file).per_query["H-AP"]) == 36


def test_pictures_without_a_tree_are_refused_before_a_folder_is_made(
    pictures: Path, tmp_path: Path, by_tree: list[Tensor]
) -> None:
    with pytest.raises(
        SettingError, match=r"loss=two_levels compares by a tree of labels, and pictures has none; glyphs"
    ):
        fit(tiny(pictures, tmp_path / "run", loss={"name": "two_levels"}), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_run_for_few_dimensions_is_measured_with_them(pictures: Path, tmp_path: Path) -> None:
    changed = {"dims": [4, 2], "model__dim": 8, "select__metric": "4-d mAP@R", "epochs": 2}
    folder = fit(tiny(pictures, tmp_path / "run", **changed), quiet=True)
    (after,) = summary(folder)["after"].values()
    assert {"2-d R@1", "4-d mAP@R", "R@1"} <= set(after)
    assert json.loads((folder / "summary.json").read_text())["validation"]["4-d mAP@R"] > 0
    encoder = Encoder.open(folder)
    assert evaluate(encoder).metrics == after
    assert "2-d R@1" not in evaluate(encoder, dims=()).metrics
    assert "3-d R@1" in evaluate(encoder, dims=[3]).metrics


def test_the_loss_of_such_a_run_is_the_sum_over_prefixes(pictures: Path, tmp_path: Path) -> None:
    made = job(tiny(pictures, tmp_path / "a", dims=[4, 2], model__dim=8)).parts.compare.loss
    assert isinstance(made, Matryoshka)
    assert (made.dims, made.weights) == ((2, 4, 8), (1, 1, 1))
    x, labels = torch.randn(6, 8), torch.arange(6) // 2
    torch.testing.assert_close(made(x, labels), sum(ROADMAP()(x[:, :d], labels) for d in (2, 4, 8)))
    proxies = job(tiny(pictures, tmp_path / "b", dims=[3], model__dim=8, loss={"name": "proxy_nca"}))
    assert [tuple(p.shape)[1] for p in proxies.parts.compare.loss.parameters()] == [3, 8]
    remembers = job(tiny(pictures, tmp_path / "c", dims=[3], model__dim=8, memory__size=9)).parts.compare
    assert isinstance(remembers.memory.inner, Matryoshka)
    assert remembers.memory.form == "joined"


def test_it_resumes_to_the_bit(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"dims": [3], "model__dim": 8, "loss": {"name": "proxy_nca"}, "epochs": 2}
    whole = fit(tiny(pictures, tmp_path / "whole", **changed), quiet=True)
    with monkeypatch.context() as patch:
        kill_at(patch, 3)
        with pytest.raises(Killed):
            fit(tiny(pictures, tmp_path / "parts", **changed), quiet=True)
    resume(tmp_path / "parts", quiet=True)
    assert_same_run(whole, tmp_path / "parts")


def test_too_many_dimensions_are_refused_before_a_folder_is_made(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="dims=9: the model has 8 dimensions; give fewer"):
        fit(tiny(pictures, tmp_path / "run", dims=[4, 9], model__dim=8, select__by="last"), quiet=True)
    assert not (tmp_path / "run").exists()


def test_dims_are_a_setting_of_the_command_line() -> None:
    assert settings_from(["dims=[64,128]"]).dims == [64, 128]
    assert settings_from([]).dims == []
    with pytest.raises(SettingError, match=r"dims must be different numbers of at least 1, got \[64, 64\]"):
        settings_from(["dims=[64,64]"])
    with pytest.raises(SettingError, match="dims must be a list of whole numbers"):
        settings_from(["dims=64"])


@pytest.mark.parametrize("name", ["hierarchical_ap", "happier", "graded_ndcg"])
def test_losses_of_graded_relevance_train_with_a_memory_and_resume_to_the_bit(
    name: str, nested: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory holds paths, the clusters of HAPPIER are weights; both are in the saved state."""
    given = {"loss": {"name": name}, "memory__size": 24, "epochs": 2}
    whole = fit(tiny(nested, tmp_path / "whole", **given), quiet=True)
    (after,) = summary(whole)["after"].values()
    assert after.keys() >= GRADED
    kill_at(monkeypatch, 4)  # of 4: the first epoch is saved
    with pytest.raises(Killed):
        fit(tiny(nested, tmp_path / "run", **given), quiet=True)
    monkeypatch.undo()
    resume(tmp_path / "run", quiet=True)
    assert_same_run(whole, tmp_path / "run")
