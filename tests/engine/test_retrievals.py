"""What a run measured is kept with it, and some of it can be looked at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from roadmap.data import dataset, picture
from roadmap.engine import fit
from roadmap.engine.retrievals import FRAME, GAP, GREEN, GREY, RED, retrieval_image
from roadmap.evaluation import Evaluation
from roadmap.runs import Run

from .worlds import IMAGE, job, measured, summary, tiny

TILE = IMAGE + 2 * FRAME + GAP


def test_the_evaluation_of_each_test_set_is_kept(pictures: Path, tmp_path: Path) -> None:
    folder = fit(tiny(pictures, tmp_path / "run"), quiet=True)
    kept = Evaluation.load(Run.open(folder).evaluation_file("pictures"))
    assert kept.metrics == summary(folder)["after"]["pictures"]
    assert len(kept.ids or ()) == 24
    assert kept.per_query["R@1"].mean().item() == pytest.approx(kept.metrics["R@1"])
    assert kept.neighbours.shape == (24, 10)
    assert [path.name for path in (folder / "evaluations").iterdir()] == ["pictures.npz"]


@pytest.mark.parametrize("pack", ["yes", "no"])
def test_a_row_shows_a_query_and_what_is_found_for_it(pack: str, pictures: Path, tmp_path: Path) -> None:
    made = job(tiny(pictures, tmp_path / "run", data__pack=pack, data__resize=20, data__image=20))
    (test,) = made.splits.tests
    evaluation = made.evaluation(made.current, test, nearest=3)
    image = retrieval_image(made.pictures, test, evaluation)
    made.run.close()
    assert image is not None
    tile = 20 + 2 * FRAME + GAP
    assert image.shape == (8 * tile, 4 * tile, 3)
    assert evaluation.ids is not None
    shown = [0, 3, 7, 10, 13, 16, 20, 23]  # of 24, evenly
    whole = dataset("folder", pictures)
    for row, query in enumerate(shown):
        found = evaluation.neighbours[query].tolist()
        for column, place in enumerate([query, *found]):
            corner = image[row * tile :, column * tile :]
            right = bool(evaluation.labels[place] == evaluation.labels[query])
            assert tuple(corner[0, 0]) == (GREY if column == 0 else GREEN if right else RED)
            inside = corner[FRAME : FRAME + 20, FRAME : FRAME + 20]
            pixels = picture(whole.root / evaluation.ids[place])
            assert np.abs(inside.astype(int) - pixels.astype(int)).max() <= 1


def test_nothing_to_show_is_no_picture(pictures: Path, tmp_path: Path) -> None:
    made = job(tiny(pictures, tmp_path / "run"))
    (test,) = made.splits.tests
    assert retrieval_image(made.pictures, test, measured({"R@1": 0.5})) is None
    made.run.close()


def test_tensorboard_shows_them(pictures: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = fit(tiny(pictures, tmp_path / "run"), quiet=True)
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    (image,) = events.Images("retrievals/pictures")
    assert (image.step, image.width, image.height) == (8, 8 * TILE, 8 * TILE)
    tags = events.Tags()["scalars"]
    assert [tag for tag in tags if tag.startswith("step")] == [
        "step/loss",
        "step/gradient norm",
        "step/lr",
        "step/pictures per second",
    ]
    values = {tag: [event.value for event in events.Scalars(tag)] for tag in tags}
    curves = [values[tag] for tag in tags if len(values[tag]) > 1]
    assert len({tuple(curve) for curve in curves}) >= len(curves) - 2  # R@4 and R@8 may both be 1


def test_a_picture_that_is_gone_by_then_does_not_fail_the_run(pictures: Path, tmp_path: Path) -> None:
    made = job(tiny(pictures, tmp_path / "run"))
    (test,) = made.splits.tests
    evaluation = made.evaluation(made.current, test, nearest=3)
    made.run.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made.pictures, "centres", lambda records: torch.zeros(len(records) - 1, 3, IMAGE, IMAGE))
        assert retrieval_image(made.pictures, test, evaluation) is None
