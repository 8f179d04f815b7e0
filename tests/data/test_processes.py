"""Worker processes: light, whole answers, errors that arrive, and none left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from roadmap.data.pictures.processes import answers

SOURCE = Path(__file__).parents[2] / "src"
PID = "__import__('os').getpid()"


def test_every_task_is_answered_with_its_own_result():
    tasks = [f"{i} * {i}" for i in range(40)]
    found = dict(answers(eval, tasks, 3))
    assert found == {task: i * i for i, task in enumerate(tasks)}


@pytest.mark.parametrize("workers", [0, 1])
def test_few_workers_are_this_process(workers):
    assert [pid for _, pid in answers(eval, [PID, PID], workers)] == [os.getpid()] * 2


def test_work_is_done_elsewhere_and_without_torch():
    assert "torch" in sys.modules
    module = "roadmap.data.pictures.packing"
    asked = f"(__import__('{module}'), __import__('os').getpid(), 'torch' in __import__('sys').modules)[1:]"
    found = [answer for _, answer in answers(eval, [asked] * 4, 2)]
    assert os.getpid() not in [pid for pid, _ in found]
    assert [torch for _, torch in found] == [False] * 4


@pytest.mark.parametrize("printing", ["print('x' * 9999)", "__import__('os').write(1, b'x' * 9999)"])
def test_what_is_printed_does_not_disturb_the_answers(printing):
    assert [answer for _, answer in answers(eval, [f"({printing}, 7)[1]"] * 3, 2)] == [7] * 3


def test_errors_arrive():
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        list(answers(eval, ["1", "1 / 0"], 2))
    local = "(_ for _ in ()).throw(type('Local', (Exception,), {})('its words'))"
    with pytest.raises(RuntimeError, match=r"Local\('its words'\)"):
        list(answers(eval, ["1", local], 2))


def test_a_process_that_dies_is_an_error():
    with pytest.raises(RuntimeError, match="a worker process died with exit code 3"):
        list(answers(eval, ["__import__('os')._exit(3)"] * 2, 2))


def test_no_process_is_left_when_the_rest_is_not_wanted():
    pids = set()
    found = answers(eval, [f"(__import__('time').sleep(0.01), {PID})[1]"] * 50, 2)
    for _, pid in found:
        pids.add(pid)
        if len(pids) == 2:
            break
    found.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


UNGUARDED = """
import sys
from pathlib import Path
with open("imported", "a") as file:
    file.write("once ")
from roadmap.data import dataset
from roadmap.data.pictures import packing
packing.SHARD = 2
print(len(packing.pack(dataset("folder", "pictures"), 20, Path("out"), workers=2, progress=False)))
"""


def test_a_program_is_not_run_again_in_its_workers(tmp_path):
    for label in "ab":
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (30, 30)).save(tmp_path / "pictures" / label / f"{i}.png")
    (tmp_path / "program.py").write_text(UNGUARDED)
    run = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "6\n"
    assert (tmp_path / "imported").read_text() == "once "
