"""A finished run can be given more epochs: it becomes the run that was started with so many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roadmap.engine import fit, resume
from roadmap.runs import Run

from .test_resume import killed
from .worlds import assert_same_run, tiny


@pytest.mark.parametrize("select", [{"select__by": "last"}, {"select__every": 2}])
@pytest.mark.parametrize("schedule", [{}, {"optim__schedule": "multistep", "optim__milestones": [3, 5]}])
def test_a_finished_run_is_lengthened(
    schedule: dict[str, Any], select: dict[str, Any], pictures: Path, tmp_path: Path
) -> None:
    """As if it had been started with so many epochs."""
    whole = fit(tiny(pictures, tmp_path / "whole", epochs=6, **schedule, **select), quiet=True)
    folder = fit(tiny(pictures, tmp_path / "run", epochs=4, **schedule, **select), quiet=True)
    assert resume(folder, epochs=6, quiet=True) == folder
    assert_same_run(whole, folder)


def test_a_lengthened_run_that_is_stopped_goes_on_to_its_new_end(pictures: Path, tmp_path: Path) -> None:
    whole = fit(tiny(pictures, tmp_path / "whole", epochs=6), quiet=True)
    folder = fit(tiny(pictures, tmp_path / "run", epochs=4), quiet=True)
    killed(11, lambda: resume(folder, epochs=6, quiet=True))
    assert not (folder / "summary.json").exists()  # of four epochs
    resume(folder, quiet=True)
    assert_same_run(whole, folder)


def test_a_run_that_cannot_be_lengthened_stays_as_it_is(pictures: Path, tmp_path: Path) -> None:
    folder = fit(tiny(pictures, tmp_path / "run", optim__schedule="cosine"), quiet=True)
    with pytest.raises(ValueError, match="epochs=6: the learning rate of this run falls along a cosine to the end of its 4 epochs") as caught:  # fmt: skip  # noqa: E501
        resume(folder, epochs=6, quiet=True)
    assert "model.weights=RUN that begins where this one ended" in str(caught.value)
    assert caught.value.field == "epochs"  # type: ignore[attr-defined]
    other = fit(tiny(pictures, tmp_path / "other"), quiet=True)
    with pytest.raises(ValueError, match="epochs=3: the run has trained 4 of its 4 epochs already; give more"):
        resume(other, epochs=3, quiet=True)
    for run in (folder, other):
        assert Run.open(run).settings().epochs == 4
        assert (run / "summary.json").exists()
