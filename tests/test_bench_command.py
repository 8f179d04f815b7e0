"""The benchmark of commands reads what a run prints."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from roadmap.config.settings import DataSettings, OptimSettings, SelectSettings, Settings
from roadmap.engine import fit

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from bench_command import JUDGED, Line, parts_of, reached, seconds_until


def test_the_first_epoch_that_is_good_enough_is_read_off_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = DataSettings(name="glyphs", image=32, resize=32, flip=0.0, batches=2)
    select = SelectSettings(by="test", every=1)
    fit(Settings(data=data, optim=OptimSettings(lr=1e-2), select=select, epochs=2, out=str(tmp_path)))
    lines: list[Line] = [(float(at), line) for at, line in enumerate(capsys.readouterr().out.splitlines())]
    first, second = [float(match[3]) for _, line in lines if (match := JUDGED.search(line))]
    assert first != second
    assert reached(lines, first) == 1
    assert reached(lines, max(first, second) + 0.01) is None
    better = max(first, second)
    assert reached(lines, better) == 1 + (second > first)


def test_the_time_until_then_is_compiling_and_training_without_judging() -> None:
    stamps = {"run a": 2, "pictures read from": 3, "before training": 4, "epoch 1 of 2": 9, "epoch 2 of 2": 11}
    lines = [*((float(at), text) for text, at in stamps.items()), (12.0, "cub, test"), (13.0, "exit 0")]
    marks = {"start": "^run", "pictures": "read from", "before": "before"}
    parts = parts_of(lines, marks)
    assert parts["compiling, first step"] == 3  # an epoch takes 2 of the 5 seconds
    assert [seconds_until(epoch, parts, 2) for epoch in (1, 2)] == [5, 7]
    with pytest.raises(RuntimeError, match=re.escape("exit 1")):
        parts_of([(1.0, "exit 1")], marks)
