"""A run is evaluated on the pictures that it did not train on, whatever became of the folder since."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from roadmap.data import Records
from roadmap.encoder import Encoder
from roadmap.engine import fit
from roadmap.engine.splits import records_of
from roadmap.evaluation import evaluate
from roadmap.runs import Run

from .worlds import summary, tiny, write_classes


def metrics(records: Records, folder: Path) -> dict[str, float]:
    """What the chosen model of a run achieves on the test pictures."""
    return evaluate(Encoder.open(folder), records).metrics


def own(run: Path) -> Records:
    """The pictures of a run's folder, read again."""
    return records_of(Run.open(run).settings().data)


@pytest.mark.parametrize("classes", [6, 24])  # some pictures of every class are tested on, or some classes whole
@pytest.mark.parametrize("change", ["renamed", "added", "removed"])
def test_the_test_pictures_stay_the_same(change: str, classes: int, tmp_path: Path) -> None:
    root = write_classes(tmp_path / "mine", range(classes))
    settings = tiny(root, tmp_path / "run", data__pack="no", data__workers=0, select__fraction=0.1, epochs=1)
    if classes == 6:
        settings.select.by = "last"
    run = Run.open(fit(settings, quiet=True))
    tested = run.division(own(run.folder))[0].split("test").paths
    trained = sorted({path.name for path in root.iterdir()} - {path.split("/")[0] for path in tested}) or ["c00"]
    if change == "renamed":
        (root / trained[0]).rename(root / "a new name")
    elif change == "added":
        shutil.copytree(root / trained[0], root / "a new class")
    else:
        kept = next(path for path in sorted(root.rglob("*.png")) if str(path.relative_to(root)) not in tested)
        kept.unlink()
    found, sentences = run.division(own(run.folder))
    left = [path for path in tested if (root / path).exists()]
    assert list(found.split("test").paths) == left
    assert len(sentences) == {"renamed": 3 if classes == 6 else 2, "added": 1, "removed": 1}[change], sentences
    if classes == 24 or change != "renamed":
        assert left == list(tested)
        assert metrics(found, run.folder) == summary(run.folder)["after"]["mine"]
    drawn_anew = fit(dataclasses.replace(settings, run=str(tmp_path / "again")), quiet=True)
    assert Run.open(drawn_anew).division(own(drawn_anew))[1] == []


def test_given_splits_are_not_stored_unless_classes_are_held_out(pictures: Path, tmp_path: Path) -> None:
    given = fit(tiny(pictures, tmp_path / "last", select__by="last", epochs=1), quiet=True)
    assert not (given / "pictures.csv").exists()
    run = Run.open(fit(tiny(pictures, tmp_path / "held", epochs=1), quiet=True))
    found, sentences = run.division(own(run.folder))
    assert sentences == []
    assert [len(found.split(name)) for name in ("train", "val", "test")] == [36, 12, 24]
    assert len(own(run.folder).split("train")) == 48


def test_a_validation_set_of_ones_own_is_not_stored(pictures: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(pictures, tmp_path / "mine"))
    write_classes(root / "val", range(20, 23))
    assert not (fit(tiny(root, tmp_path / "run", epochs=1), quiet=True) / "pictures.csv").exists()
