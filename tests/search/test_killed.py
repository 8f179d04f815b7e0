"""Killed for real while it adds, removes and indexes, it opens afterwards and holds exactly what was committed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from roadmap.encoder import Encoder
from roadmap.search import Index, installed

from .cases import made, new_index
from .test_indexing import write_picture

# Of each engine; fifty is the number to run by hand: ROADMAP_KILLS=50.
KILLS = int(os.environ.get("ROADMAP_KILLS", "3"))
# Seconds in which the kill comes: a Milvus file starts a server, flushes and builds, each of which is to be hit too.
MOMENTS = {"exact": 0.4, "faiss": 0.4, "milvus": 4.0}
# Step n adds 40 pictures and, in another step, removes some; it says what it begins and what is done.
WRITER = """
import os, sys
from roadmap.search import Index
from tests.search.cases import made

def say(*words):  # in one call to the system: a line is there whole or not at all
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())

folder, first = sys.argv[1], int(sys.argv[2])
with Index.open(folder, write=True) as index:
    for n in range(first, 100_000):
        say("begin add", n)
        index.add(made(40, seed=n, first=40 * n), {"year": [n] * 40})
        say("done add", n)
        if n % 7 == 3:
            index.build()
        say("begin remove", n)
        index.remove([f"p{40 * n + i}.jpg" for i in range(0, 40, 5)])
        say("done remove", n)
"""
# The command itself, killed some seconds after it begins one of its writes, by a thread of its own: another process
# that watches its files may not come to the processor before all is written.
COMMAND = """
import os, runpy, signal, sys, threading, time
from roadmap.search.storage import Storage

write, left, seconds = Storage.add, int(sys.argv[1]), float(sys.argv[2])

def kill():
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)

def add(*arguments, **named):
    global left
    left -= 1
    if left == 0:
        threading.Thread(target=kill).start()
    return write(*arguments, **named)

Storage.add = add
sys.argv = ["roadmap", *sys.argv[3:]]
runpy.run_module("roadmap", run_name="__main__", alter_sys=True)
"""


def after(step: tuple[str, int], held: set[str]) -> set[str]:
    what, n = step
    if what == "add":
        return held | {f"p{40 * n + i}.jpg" for i in range(40)}
    return held - {f"p{40 * n + i}.jpg" for i in range(0, 40, 5)}


def started(*arguments: object) -> subprocess.Popen[str]:
    """Python at work in another process."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )


def killed_run(folder: Path, first: int, lines: int, seconds: float) -> list[tuple[str, str, int]]:
    """What a writer said before it was killed, some seconds after so many lines."""
    writer = started("-c", WRITER, folder, first)
    assert writer.stdout is not None
    begun = "".join(writer.stdout.readline() for _ in range(lines))
    time.sleep(seconds)
    writer.send_signal(signal.SIGKILL)
    said = begun + writer.stdout.read()
    assert writer.wait() == -signal.SIGKILL, said
    steps = [line.split() for line in said.splitlines() if line.startswith(("begin ", "done "))]
    return [(state, what, int(n)) for state, what, n in steps]


@pytest.mark.parametrize("engine", ["exact", "faiss", pytest.param("milvus", marks=pytest.mark.slow)])
def test_killed_while_adding_and_removing(engine: str, tmp_path: Path) -> None:
    if not installed(engine):
        pytest.skip(f"the engine {engine!r} is not installed")
    random.seed(0)
    folder = tmp_path / "i"
    new_index(folder, engine).close()
    held: set[str] = set()
    first, steps = 0, 0
    for _ in range(KILLS):
        # once, something was done, however slow the machine is
        said = killed_run(folder, first, 1 if steps else 2, random.uniform(0.0, MOMENTS[engine]))
        done = [(what, n) for begun, what, n in said if begun == "done"]
        for step in done:
            held = after(step, held)
        begun = [(what, n) for begun, what, n in said if begun == "begin"]
        open_step = begun[-1] if len(begun) > len(done) else None
        with Index.open(folder, write=True) as index:
            found = set(index.ids())
            allowed = [held] + ([after(open_step, held)] if open_step else [])
            assert found in allowed
            held = found
            check_content(index, held)
        steps += len(done)
        first = 1 + max((n for _, n in begun), default=first)
    assert steps > 0


def check_content(index: Index, held: set[str]) -> None:
    """Every picture that is there can be found by its vector, with its metadata, and nothing else can."""
    if not held:
        return
    names = sorted(held)
    for n in {int(name[1:-4]) // 40 for name in random.sample(names, min(8, len(names)))}:
        vectors = made(40, seed=n, first=40 * n)
        results = index.search(vectors.vectors, 1)
        for name, ids, scores, rows in zip(
            vectors.ids or (), results.ids, results.scores, results.metadata, strict=True
        ):
            assert (ids == [name] and scores[0] > 0.9999) == (name in held)
            assert name not in held or rows[0]["year"] == n
    assert len(index) == len(held) == len(index.engine)
    stored = index.vectors_of(names)
    assert np.allclose(np.linalg.norm(stored, axis=1), 1, atol=1e-5)


def test_what_an_interrupted_write_left_is_written_over(tmp_path: Path) -> None:
    with new_index(tmp_path / "i") as index:
        index.add(made(10))
    with open(tmp_path / "i" / "vectors.bin", "ab") as file:
        file.write(b"half a row of a write that was not committed")
    with Index.open(tmp_path / "i", write=True) as index:
        assert index.search(made(10).vectors[3], 1).ids == [["p3.jpg"]]
        index.add(made(10, seed=1, first=10))
        assert index.search(made(10, seed=1).vectors[4], 1).ids == [["p14.jpg"]]
    with Index.open(tmp_path / "i") as index:
        assert len(index) == 20


@pytest.mark.parametrize("engine", ["exact", pytest.param("milvus", marks=pytest.mark.slow)])
def test_indexing_that_is_killed_goes_on_where_it_was(engine: str, tmp_path: Path) -> None:
    if not installed(engine):
        pytest.skip(f"the engine {engine!r} is not installed")
    random.seed(0)
    folder, pictures, kills = tmp_path / "i", tmp_path / "P", 0
    command = ["index", "small_cnn", pictures, "-o", folder, "--device", "cpu", "--engine", engine]
    for turn in range(2 * KILLS):
        for n in range(20):  # the first of them were there before, and change
            write_picture(pictures / "owl" / f"{12 * turn + n}.png", 70 + turn % 50, 100 * turn + n)
        if turn:
            (pictures / "owl" / f"{12 * turn - 1}.png").unlink()
        write, seconds = random.randint(1, 8), random.uniform(0.0, 0.01)  # of 20 writes
        running = started("-c", COMMAND, write, seconds, *command, "--step", 1)
        said, _ = running.communicate()
        assert running.returncode in (0, -signal.SIGKILL), said
        kills += running.returncode == -signal.SIGKILL
        if (folder / "index.json").is_file():
            check_indexed(folder, pictures, whole=False)
        if kills >= max(1, KILLS // 3):
            break
    assert kills
    last = started("-m", "roadmap", *command)
    said, _ = last.communicate()
    assert last.returncode == 0, said
    check_indexed(folder, pictures, whole=True)


def check_indexed(folder: Path, pictures: Path, whole: bool) -> None:
    """No row is of a half-written picture: each that has not changed since has the vector of its file."""
    paths = {str(path.relative_to(pictures)): path for path in sorted(pictures.rglob("*.png"))}
    with Index.open(folder, write=True) as index:
        ids = index.ids()
        assert len(ids) == len(index.engine) == len(set(ids))
        fresh = [name for name in ids if name in paths and name in index.changes({name: paths[name]}).same]
        if whole:
            assert sorted(ids) == sorted(paths) == sorted(fresh)
        elif not fresh:
            return
        vectors = Encoder.open("small_cnn", device="cpu").embed([paths[name] for name in fresh]).vectors
        assert np.allclose(index.vectors_of(fresh), vectors, atol=1e-5)
        assert min(scores[0] for scores in index.search(vectors, 1).scores) > 0.9999
