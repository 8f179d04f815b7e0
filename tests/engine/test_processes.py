"""Several processes train one run: the same numbers as one, one writer, and the end of one is the end of all."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roadmap.config.settings import Settings
from roadmap.data import Records, dataset
from roadmap.embeddings import Embeddings
from roadmap.encoder import Encoder
from roadmap.engine import NonFiniteError, Stopped, fit, fit_or_resume, launching, resume, splits, training
from roadmap.engine.arithmetic import Arithmetic
from roadmap.engine.job import Job
from roadmap.engine.launching import ProcessError
from roadmap.engine.step import Parts, _draw_apart
from roadmap.engine.stopping import Signals
from roadmap.evaluation import Evaluation
from roadmap.models import Retriever, retriever
from roadmap.ranks import Ranks
from roadmap.runs import Run

from ..waiting import PATIENCE, wait_until
from .test_resume import assert_same_run
from .together import ranks_here, together
from .worlds import assert_equal, best_weights, last, lines, summary, tiny, write_classes

SMOOTH: dict[str, Any] = {"optim__name": "sgd", "optim__lr": 1e-2, "data__batch_size": 12, "data__per_class": 3}


def settings(pictures: Path, run: Path, **changed: Any) -> Settings:
    """Sharing 12 pictures, without the jumps of Adam's first steps, which turn roundings into steps of their own."""
    return tiny(pictures, run, **(SMOOTH | {"data__batches": 3, "epochs": 2, "optim__ema": 0.5} | changed))


@pytest.fixture(scope="module")
def alone(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(settings(pictures, tmp_path_factory.mktemp("alone") / "run"), quiet=True)


@pytest.mark.parametrize("world", [2, 3])
def test_the_number_of_processes_does_not_matter(
    world: int, alone: Path, pictures: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Loss, gradient, weights, averaged weights and statistics up to rounding; metrics of equal weights exactly."""
    found = together(world, lambda: fit(settings(pictures, tmp_path / "run", data__pack="no")))
    assert found == [tmp_path / "run"] * world
    ours, theirs = lines(tmp_path / "run"), lines(alone)
    assert ours[0] == theirs[0]  # before training
    assert [line["kind"] for line in ours] == [line["kind"] for line in theirs]
    steps = [line["kind"] == "step" for line in ours]
    for name in ("loss", "gradient norm", "lr"):
        values = [[line[name] for line, is_step in zip(some, steps, strict=True) if is_step] for some in (ours, theirs)]
        assert values[0] == pytest.approx(values[1], rel=1e-4), name
    held = [last(folder)["stateful"] for folder in (tmp_path / "run", alone)]
    for part in ("model", "average", "kept"):
        torch.testing.assert_close(held[0][part], held[1][part], rtol=1e-3, atol=1e-5)
    printed = capfd.readouterr().out
    assert printed.count("epoch 2 of 2") == 1
    assert f"processes  {world} on this machine; of a batch of 12 each embeds {12 // world}" in printed


def test_only_the_first_writes(pictures: Path, tmp_path: Path) -> None:
    """The others are given a folder that cannot be."""

    def work() -> Path:
        run = tmp_path / "run" if ranks_here().first else Path("/proc/no/run")
        return fit(settings(pictures, run, epochs=1), quiet=True)

    together(2, work)
    assert (tmp_path / "run" / "summary.json").is_file()
    assert Evaluation.load(tmp_path / "run" / "evaluations" / "pictures.npz").neighbours.shape[1] == 10
    stored = Run.open(tmp_path / "run").settings().hardware
    assert (stored.devices, stored.nodes) == (2, 1)


def encoder(ranks: Ranks) -> Encoder:
    torch.manual_seed(0)
    model = retriever(tiny(Path(), Path()).model, 16)
    made = Encoder.of(model, tiny(Path(), Path(), data__workers=0), torch.device("cpu"), ranks)
    made.batch = 5
    return made


def embedded(records: Records, ranks: Ranks) -> tuple[Embeddings, Embeddings]:
    made = encoder(ranks)
    return made.embed(records, on_error="skip"), made.embed(records.select([3, 1]), on_error="skip")


def test_embeddings_are_those_of_one_process_to_the_bit(pictures: Path, tmp_path: Path) -> None:
    """24 pictures in batches of 5, of which one is damaged; and two pictures, so that some processes have none."""
    records = dataset("folder", pictures).split("test")
    (tmp_path / records.paths[13]).parent.mkdir(parents=True)
    for path in records.paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((pictures / path).read_bytes())
    (tmp_path / records.paths[13]).write_bytes(b"no picture")
    records = dataset("folder", tmp_path)
    wanted = embedded(records, Ranks())
    for found in together(3, lambda: embedded(records, ranks_here())):
        assert isinstance(found, tuple), found
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours.vectors, theirs.vectors)
            assert torch.equal(ours.labels, theirs.labels)
            assert (ours.ids, ours.about) == (theirs.ids, theirs.about)
    assert len(wanted[0]) == 23
    assert list(wanted[0].about["skipped"]) == [records.paths[13]]


def test_a_picture_without_a_vector_stops_all_and_is_named(pictures: Path, tmp_path: Path) -> None:
    """In the part of the second process."""
    real, seen = Retriever.forward, [0]

    def work() -> Path:
        def forward(self: Retriever, images: Tensor) -> Tensor:
            vectors = real(self, images)
            seen[0] += self.training
            if not self.training or seen[0] < 3 or ranks_here().first:
                return vectors
            mask = torch.ones_like(vectors)
            mask[2] = math.nan
            return vectors * mask

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Retriever, "forward", forward)
            return fit(settings(pictures, tmp_path / "run"), quiet=True)

    found = together(2, work)
    assert all(isinstance(error, NonFiniteError) for error in found), found
    assert str(found[0]) == str(found[1])
    assert "step 3: the loss is nan; the run stops. 1 of 12 pictures have an embedding that is zero" in str(found[0])
    stopped = json.loads((tmp_path / "run" / "stopped.json").read_text())
    assert len(stopped["pictures"]) == 12


OTHERS: dict[str, dict[str, list[range]]] = {
    "training": {"train": [range(8), range(20, 28)], "val": [range(30, 33)], "test": [range(8, 10)]},
    "validation": {"train": [range(8)], "val": [range(30, 33), range(31, 34)], "test": [range(8, 10)]},
    "test": {"train": [range(8)], "val": [range(30, 33)], "test": [range(8, 10), range(9, 11)]},
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_pictures_on_another_machine(what: str, tmp_path: Path) -> None:
    """They would be embedded in the place of those that the first has there."""
    for split, kinds in OTHERS[what].items():
        for machine in (0, 1):
            write_classes(tmp_path / str(machine) / split, kinds[min(machine, len(kinds) - 1)])

    def work() -> Path:
        return fit(settings(tmp_path / str(ranks_here().rank), tmp_path / "run"), quiet=True)

    classes = len(OTHERS[what][{"training": "train", "validation": "val"}.get(what, what)][0])
    size = f"{6 * classes} of {classes} classes"
    for error in together(2, work):
        assert isinstance(error, ValueError)
        assert str(error).startswith(f"process 1 finds other {what} pictures ({size}) than the first ({size}); every")


def test_other_pictures_to_test_on_where_a_run_goes_on(pictures: Path, tmp_path: Path) -> None:
    for machine in (0, 1):
        write_classes(tmp_path / str(machine) / "pictures", range(8 + machine, 11 + machine))
    asked = settings(pictures, tmp_path / "run", data__test_sets={"folder": str(tmp_path / "0" / "pictures")}, epochs=1)
    real = splits.dataset

    def work() -> Path:
        mine = tmp_path / str(ranks_here().rank) / "pictures"
        with pytest.MonkeyPatch.context() as patch:  # as if it lay there
            patch.setattr(splits, "dataset", lambda name, root: real(name, root if root == str(pictures) else mine))
            return resume(tmp_path / "run", epochs=2, quiet=True)

    fit(asked, quiet=True)
    for error in together(2, work):
        assert "process 1 finds other test pictures (18 of 3 classes) than the first (18 of 3 classes)" in str(error)


def test_pictures_that_any_process_could_not_decode_are_counted(pictures: Path, tmp_path: Path) -> None:
    """Each meets its part of the batches; what is saved, and told at the end, is of all."""
    root = Path(shutil.copytree(pictures, tmp_path / "pictures"))
    damaged = {f"train/c{label:02d}/{number}.png" for label in range(8) for number in range(2)}
    for name in damaged:
        (root / name).write_bytes(b"")
    asked = {"data__pack": "no", "data__workers": 0, "data__on_error": "skip", "select__by": "last", "epochs": 1}
    alone = fit(settings(root, tmp_path / "alone", data__batches=6, **asked), quiet=True)
    together(2, lambda: fit(settings(root, tmp_path / "run", data__batches=6, **asked), quiet=True))
    assert summary(alone)["skipped pictures"] == summary(tmp_path / "run")["skipped pictures"] == len(damaged)
    assert set(last(tmp_path / "run")["stateful"]["pictures"]["skipped"]) == damaged


def test_a_run_goes_on_where_only_the_first_machine_has_its_folder(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others learn from the first how it computes: here in bfloat16, with a single thread."""
    precisions: list[tuple[str, int]] = []
    real = training.job_of

    def watched(settings: Settings, arithmetic: Arithmetic, *more: Any) -> Job:
        precisions.append((arithmetic.precision, torch.get_num_threads()))
        return real(settings, arithmetic, *more)

    def work() -> tuple[Path, list[tuple[str, int]]]:
        torch.set_num_threads(2)
        folder = tmp_path / "run" if ranks_here().first else tmp_path / "nowhere"
        return resume(folder, epochs=2, quiet=True), precisions

    fit(settings(pictures, tmp_path / "run", epochs=1, hardware__precision="bf16"), quiet=True)
    monkeypatch.setattr(training, "job_of", watched)
    found = together(2, work)
    assert found == [(tmp_path / "run", [("bf16", 1)]), (tmp_path / "nowhere", [("bf16", 1)])]


def test_a_signal_to_one_of_them_stops_all_at_the_same_step(pictures: Path, tmp_path: Path) -> None:
    """Then they go on, in as many, to the bits of a run that was never stopped; and in other numbers."""

    def stop(rank: int, at: int) -> Callable[[], Any]:
        def work() -> Any:
            from roadmap.engine import loop

            real = loop.step

            def step(state: Any, *more: Any) -> Any:
                if ranks_here().rank == rank and state.step == at:
                    os.kill(os.getpid(), signal.SIGTERM)
                return real(state, *more)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loop, "step", step)
                try:
                    return fit_or_resume(settings(pictures, tmp_path / "run"), quiet=True)
                except Stopped as stopped:
                    return str(stopped), stopped.exit_code

        return work

    def on() -> Path:
        return fit_or_resume(settings(pictures, tmp_path / "run"), quiet=True)

    found = together(2, stop(1, 1))
    assert [code for _, code in found] == [143, 143]
    assert found[0][0].startswith("stopped and saved after step 3, in epoch 2 of 2. Go on: ")
    found = together(2, stop(0, 4))
    assert last(tmp_path / "run")["step"] in (5, 6)
    assert together(2, on) == [tmp_path / "run"] * 2
    together(2, lambda: fit(settings(pictures, tmp_path / "whole"), quiet=True))
    assert_equal(last(tmp_path / "run")["stateful"], last(tmp_path / "whole")["stateful"])
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert_equal(best_weights(tmp_path / "run"), best_weights(tmp_path / "whole"))
    assert together(3, on) == [tmp_path / "run"] * 3  # it has ended: as it is
    assert together(3, lambda: resume(tmp_path / "run", epochs=3, quiet=True)) == [tmp_path / "run"] * 3
    assert last(tmp_path / "run")["step"] == 9


def test_of_several_only_the_first_obeys_at_once() -> None:
    """The others would leave it waiting for them; and who is told twice is not impatient: all are told, and again."""
    with pytest.raises(Stopped), Signals(Ranks(1, 2)) as passive:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        with passive.later():
            os.kill(os.getpid(), signal.SIGTERM)
        assert (passive.number, passive.torn) == (signal.SIGTERM, False)
        with passive.later():
            passive.obey(signal.SIGTERM)
        pytest.fail("it went on")
    with pytest.raises(Stopped), Signals(Ranks(0, 2)) as first:  # noqa: PT012
        with first.later():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("it went on")
    assert not first.torn


def test_what_is_drawn_at_random_follows_from_step_and_process() -> None:
    def drawn(seed: int, step: int, rank: int, world: int = 2) -> float:
        parts = Parts(None, None, None, None, None, None, None, Ranks(rank, world), seed)  # type: ignore[arg-type]
        _draw_apart(step, parts)
        return float(torch.rand(()))

    every = {drawn(seed, step, rank) for seed in (0, 1) for step in (0, 1) for rank in (0, 1)}
    assert len(every) == 8
    assert drawn(0, 1, 1) == drawn(0, 1, 1)
    torch.manual_seed(3)
    assert drawn(0, 0, 0, 1) != drawn(0, 0, 0, 1)  # alone it is left as it is


def test_a_batch_that_cannot_be_shared(pictures: Path, tmp_path: Path) -> None:
    for error in together(2, lambda: fit(settings(pictures, tmp_path / "run", data__batch_size=9), quiet=True)):
        said = "data.batch_size=9: cannot be shared equally by 2 processes; give a multiple of 2"
        assert str(error) == f"{said}, or another hardware.devices"
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------ processes that the program starts itself


# What the second process of a run does in its first moment: before that step it will say who it is, and stand still
# until it is told to stop.
STANDING = """
import os, signal, time
from pathlib import Path
from roadmap.engine import loop
real, told = loop.step, []
def step(state, *more):
    if state.step == {at} and os.environ["RANK"] == "1":
        known = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *of: (told.append(of), known(*of)))
        Path({place!r}).write_text(str(os.getpid()))
        end = time.monotonic() + {patience}
        while not told and time.monotonic() < end:
            time.sleep(0.01)
    return real(state, *more)
loop.step = step
"""


@contextmanager
def standing(at: int, place: Path, action: Callable[[int], None]) -> Iterator[None]:
    """The second of the processes that are started stands still before a step; then something is done about it."""

    def watch() -> None:
        wait_until(lambda: place.is_file() and place.read_text() != "")
        action(int(place.read_text()))

    begin, work = launching.PROGRAM.split("\nwork()")
    with pytest.MonkeyPatch.context() as patch:
        stand = STANDING.format(at=at, place=str(place), patience=PATIENCE)
        patch.setattr(launching, "PROGRAM", begin + stand + "work()" + work)
        threading.Thread(target=watch, daemon=True).start()
        yield


def children() -> list[int]:
    """The processes that this one started and that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(") ")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes as Linux shows them")
def test_started_processes_are_stopped_killed_and_go_on(pictures: Path, tmp_path: Path) -> None:
    """By the program: a signal to it, kill -9 of one of them; nothing is left running, and the bits are the same."""
    folder, before = tmp_path / "run", children()
    kept = signal.signal(signal.SIGTERM, lambda *_: None)  # one that comes too late is not the end of the tests
    try:
        _stop_kill_go_on(pictures, tmp_path, folder, before)
    finally:
        signal.signal(signal.SIGTERM, kept)


def _stop_kill_go_on(pictures: Path, tmp_path: Path, folder: Path, before: list[int]) -> None:
    asked, other = (settings(pictures, run, checkpoint_minutes=60.0) for run in (folder, tmp_path / "whole"))
    together(2, lambda: fit(other, quiet=True))
    asked.hardware.devices = 2
    with (
        standing(1, tmp_path / "first", lambda _: os.kill(os.getpid(), signal.SIGTERM)),
        pytest.raises(Stopped, match=r"stopped and saved after step [23], in epoch") as stopped,
    ):
        fit(asked, quiet=True)
    assert (stopped.value.folder, stopped.value.exit_code) == (folder, 143)
    assert children() == before
    killed = r"process 1 of 2 was ended by signal 9 \(SIGKILL\), perhaps .* what was saved stays"
    with (
        standing(4, tmp_path / "second", lambda pid: os.kill(pid, signal.SIGKILL)),
        pytest.raises(ProcessError, match=killed),
    ):
        resume(folder, quiet=True)
    assert children() == before
    assert resume(folder, quiet=True) == folder
    assert_same_run(tmp_path / "whole", folder)


def test_an_error_in_a_started_process_is_raised_here(pictures: Path, tmp_path: Path) -> None:
    """With its words and its kind, once; what it was is told below it."""
    asked = settings(pictures, tmp_path / "run", hardware__devices=2, loss={"name": "roadmap", "tau": -1.0})
    with pytest.raises(ValueError, match="tau must be") as error:
        fit(asked, quiet=True)
    assert "Traceback" in str(error.value.__cause__)
