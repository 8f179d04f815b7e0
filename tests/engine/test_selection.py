"""Which epoch is kept: on held-out classes, the last, or on the test set, which is labelled."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from roadmap.data import Records, dataset
from roadmap.engine import fit, resume
from roadmap.engine.job import Job
from roadmap.evaluation import Evaluation
from roadmap.models import Retriever, load_checkpoint

from .worlds import Killed, assert_equal, best_weights, kill_at, last, lines, measured, summary, tiny

UNTRAINED, TESTED = 0.125, 0.25


class Judge:
    """Takes the place of the metrics: says what it was told to, epoch by epoch, and remembers what it was shown.

    The first call is for the untrained model and the one after the last epoch for the chosen one.
    """

    def __init__(self, patch: pytest.MonkeyPatch, values: Sequence[float]) -> None:
        self.says = [UNTRAINED, *values, TESTED]
        self.records: list[Records] = []
        self.weights: list[dict[str, Tensor]] = []
        patch.setattr(Job, "evaluation", self._evaluation())

    def _evaluation(self):  # type: ignore[no-untyped-def]
        def evaluation(job: Job, model: Retriever, records: Records, nearest: int = 0) -> Evaluation:
            self.records.append(records)
            self.weights.append({name: value.clone() for name, value in model.state_dict().items()})
            return measured({"mAP@R": self.says[min(len(self.records), len(self.says)) - 1], "R@1": 0.5})

        return evaluation


@pytest.mark.parametrize("by", ["held_out", "test"])
@pytest.mark.parametrize(
    ("values", "best"),
    [
        ((0.1, 0.2, 0.3, 0.4), 4),
        ((0.4, 0.3, 0.2, 0.1), 1),
        ((0.1, 0.9, 0.3, 0.4), 2),
        ((0.3, 0.3, 0.3, 0.2), 3),  # the last of equals
        ((0.0, 0.0, 0.0, 1e-9), 4),
        ((math.nan, 0.1, math.nan, 0.05), 2),  # no value is worse than any
    ],
)
def test_the_best_epoch_is_kept(
    by: str, values: tuple[float, ...], best: int, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Judge(monkeypatch, values)
    folder = fit(tiny(pictures, tmp_path / "run", select__by=by), quiet=True)
    kept = best_weights(folder)
    assert_equal(kept, judge.weights[best])
    assert_equal(judge.weights[5], judge.weights[best])  # what was tested is what was kept
    if by == "test":  # beside it the last epoch, which nobody chose
        assert_equal(judge.weights[6], judge.weights[4])
        assert (folder / "evaluations" / "last_epoch" / "pictures.npz").is_file()
    assert len(judge.weights) == 6 + (by == "test")
    if best < 4:
        assert any(not value.equal(kept[name]) for name, value in judge.weights[4].items())
    value = values[best - 1]
    assert last(folder)["best"] == {"epoch": best, "value": value, "metrics": {"mAP@R": value, "R@1": 0.5}}
    found = summary(folder)
    assert (found["best epoch"], found["chosen by"]) == (best, by)
    assert found["before"]["pictures"]["mAP@R"] == UNTRAINED
    assert found["after"]["pictures"]["mAP@R"] == TESTED
    about = load_checkpoint(folder / "checkpoints" / "best.safetensors")[1]
    assert (about["epoch"], about["chosen by"]) == (best, by)


def test_held_out_classes_are_in_neither_train_nor_test(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: set[str] = set()
    real = Job.evaluation

    def evaluation(job: Job, model: Retriever, records: Records, nearest: int = 0) -> Evaluation:
        trained.update(job.splits.train.paths)
        seen.append(records)
        return real(job, model, records, nearest)

    seen: list[Records] = []
    monkeypatch.setattr(Job, "evaluation", evaluation)
    folder = fit(tiny(pictures, tmp_path / "run"), quiet=True)
    judged = seen[1]
    classes = [{path.rsplit("/", 1)[0].split("/")[-1] for path in paths} for paths in (trained, judged.paths)]
    tested = {Path(path).parent.name for path in dataset("folder", pictures).split("test").paths}
    assert [len(some) for some in (*classes, tested)] == [6, 2, 4]
    assert len(set.union(*classes, tested)) == 12
    evaluations = [line for line in lines(folder) if line["kind"] == "evaluation"]
    assert [line["epoch"] for line in evaluations] == [1, 2, 3, 4]
    assert {line["split"] for line in evaluations} == {"validation"}
    assert {line["queries"] for line in evaluations} == {12}
    best = max(evaluations, key=lambda line: line["mAP@R"])
    assert summary(folder)["best epoch"] == best["epoch"]
    assert summary(folder)["validation"]["mAP@R"] == best["mAP@R"]


def test_choosing_on_the_test_set_is_labelled(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fit(tiny(pictures, tmp_path / "run", select__by="test"))
    said = capsys.readouterr().out
    assert said.count("CHOSEN ON THE TEST SET, as in the paper: flattering") == 2
    evaluations = [line for line in lines(folder) if line["kind"] == "evaluation"]
    assert {line["split"] for line in evaluations} == {"test"}
    assert {line["queries"] for line in evaluations} == {24}
    assert max(line["mAP@R"] for line in evaluations) == summary(folder)["after"]["pictures"]["mAP@R"]


def test_the_last_epoch_is_trained_on_all_classes_and_not_chosen(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fit(tiny(pictures, tmp_path / "run", select__by="last"))
    said = capsys.readouterr().out
    assert "train 48 of 8 classes, test 24 of 4 classes" in said
    assert "the last epoch, not chosen" in said
    assert not [line for line in lines(folder) if line["kind"] == "evaluation"]
    assert summary(folder)["best epoch"] == 4
    assert_equal(best_weights(folder), dict(last(folder)["stateful"]["model"]))


@pytest.mark.parametrize(("every", "epochs", "judged"), [(2, 4, [2, 4]), (3, 4, [3, 4]), (5, 3, [3]), (1, 2, [1, 2])])
def test_how_often_it_is_judged(
    every: int, epochs: int, judged: list[int], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Judge(monkeypatch, [0.5] * len(judged))
    folder = fit(tiny(pictures, tmp_path / "run", select__every=every, epochs=epochs), quiet=True)
    assert [line["epoch"] for line in lines(folder) if line["kind"] == "evaluation"] == judged


def test_another_metric(pictures: Path, tmp_path: Path) -> None:
    folder = fit(tiny(pictures, tmp_path / "run", select__metric="R-precision"), quiet=True)
    values = [line["R-precision"] for line in lines(folder) if line["kind"] == "evaluation"]
    assert last(folder)["best"]["value"] == max(values)


@pytest.mark.parametrize("by", ["held_out", "test"])
def test_an_unknown_metric_is_refused_before_anything_is_made(by: str, pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="select.metric='mAP@r' is not measured here, did you mean 'mAP@R'\\? There are R@1, R@2, R@4, R@8, P@1,",
    ):
        fit(tiny(pictures, tmp_path / "run", select__by=by, select__metric="mAP@r"), quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("metric", ["AP loss", "queries", "queries_without_positives"])
def test_what_is_no_merit_chooses_nothing(metric: str, pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"select.metric='{metric}' is not measured here.*mAP@R, mAP$"):
        fit(tiny(pictures, tmp_path / "run", select__metric=metric), quiet=True)


def test_the_last_epoch_needs_no_metric(pictures: Path, tmp_path: Path) -> None:
    folder = fit(tiny(pictures, tmp_path / "run", select__by="last", select__metric="beauty", epochs=1), quiet=True)
    assert summary(folder)["best epoch"] == 1


def test_a_run_without_a_test_set(pictures: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(pictures / "train", tmp_path / "only" / "train")
    folder = fit(tiny(tmp_path / "only", tmp_path / "run", epochs=2), quiet=True)
    found = summary(folder)
    assert (found["before"], found["after"]) == ({}, {})
    assert found["validation"]["queries"] == 12


def test_a_batch_that_cannot_be_made_leaves_no_folder(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a batch of 32 with 2 per class needs 16 classes, there are 6"):
        fit(tiny(pictures, tmp_path / "run", data__batch_size=32), quiet=True)
    assert not (tmp_path / "run").exists()


def test_metrics_without_a_value_survive_a_resume(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test set of single pictures has no mean; the log holds null, the table a dash."""
    judge = Judge(monkeypatch, [0.1, 0.2, 0.3, 0.4])
    judge.says[0] = math.nan
    with monkeypatch.context() as patch:
        kill_at(patch, 4)
        with pytest.raises(Killed):
            fit(tiny(pictures, tmp_path / "run"), quiet=True)
    folder = resume(tmp_path / "run", quiet=True)
    assert json.loads((folder / "summary.json").read_text())["before"]["pictures"]["mAP@R"] is None
