"""A run's folder: what was asked for, where it ran, what happened, and the weights.

config.yaml              the settings, complete; `roadmap train` can be given them again
environment.json         Python, packages, device, commit
pictures.csv             which pictures train, choose the epoch and test, where the program drew that
metrics.jsonl            a line per logged step and per evaluation
tensorboard/             the same numbers, for TensorBoard
checkpoints/last.pt      everything needed to go on (`TrainState`); previous.pt is the one before it
checkpoints/best.safetensors   the chosen weights, self-contained: embed, evaluate, search
evaluations/             what was measured on each test set
summary.json             the results, before and after
report/                  what `roadmap report` computed beside that, if it was asked
.lock                    which process writes here, if one does
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from roadmap.atomic import remove_leftovers, whole_file
from roadmap.config.settings import Settings
from roadmap.data import Records
from roadmap.locations import check_run
from roadmap.names import CHECKPOINT
from roadmap.runs.board import Board
from roadmap.runs.division import FILES, save_division, stored_division
from roadmap.runs.lock import hold
from roadmap.runs.machine import environment

LAST, PREVIOUS = "last.pt", "previous.pt"  # states, in checkpoints/
PARTS = ("checkpoints", "evaluations")


class Run:
    """One run's folder. Everything in it is plain text or weights: nothing that is loaded can run code.

    Of several processes that train together one writes; to the others `writes=False` it is only a name.
    """

    def __init__(self, folder: Path, writes: bool = True) -> None:
        self.folder, self.writes = Path(folder), writes
        self._lock: IO[str] | None = None
        self._log: Any = None
        self.board = Board(self.folder / "tensorboard")

    @classmethod
    def create(cls, settings: Settings, when: time.struct_time | None = None) -> Run:
        """A new folder with the settings and the environment in it, held by this process until `close`.

        A run of which nothing came, because it failed or was killed before its first step, gives its folder up.
        """
        if settings.run is None:
            folder = _new_folder(Path(settings.out) / _name(settings, when))
        else:
            folder = Path(settings.run)
            folder.mkdir(parents=True, exist_ok=True)
        run = cls(folder)
        run.lock()
        if (folder / "config.yaml").exists() and not run._gave_up():
            run.close()
            raise FileExistsError(
                f"{folder} already holds a run; give another run=FOLDER, or go on with it: "
                f"roadmap train resume={folder}"
            )
        for name in PARTS:
            (folder / name).mkdir(exist_ok=True)
        run._write("environment.json", json.dumps(environment(), indent=2) + "\n")
        run.save_settings(settings)  # last: a folder with settings is a run
        return run

    @classmethod
    def open(cls, folder: Path) -> Run:
        """A folder that `create` made."""
        folder = Path(folder)
        check_run(folder)
        return cls(folder)

    def lock(self) -> None:
        """Keeps other processes from writing here, until `close`; refuses where one does.

        What a process that was killed left half written is removed.
        """
        if self._lock is None and self.writes:
            self._lock = hold(self.folder)
            for folder in (self.folder, *(self.folder / name for name in PARTS)):
                if folder.is_dir():
                    remove_leftovers(folder)

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints" / LAST

    def evaluation_file(self, test: str) -> Path:
        """Where what was measured on a test set is kept."""
        return self.folder / "evaluations" / f"{_plain_name(test)}.npz"

    def has_state(self) -> bool:
        """Whether something was saved to go on from; what a kill left half written is nothing."""
        return any((self.folder / "checkpoints" / name).is_file() for name in (LAST, PREVIOUS))

    @property
    def best(self) -> Path:
        return self.folder / CHECKPOINT

    def save_settings(self, settings: Settings) -> None:
        self._write("config.yaml", _yaml(settings))

    def settings(self) -> Settings:
        """What the run was started with."""
        import yaml

        path = self.folder / "config.yaml"
        try:
            values = yaml.safe_load(path.read_text())
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not YAML: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold the settings of a run, got {type(values).__name__}")
        return Settings.from_dict(values)

    def save_division(self, records: Records) -> None:
        """Stores which pictures train, choose the epoch and test; for splits that the program drew."""
        if self.writes:
            save_division(self.folder, records)

    def division(self, records: Records) -> tuple[Records, list[str]]:
        """The pictures exactly as the run divided them, and what is missing or new since, a sentence each.

        New ones are left out. Where the run stored nothing, its pictures came with their splits: as they are, and [].
        """
        return stored_division(self.folder, records)

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """A line in metrics.jsonl, and its numbers in TensorBoard."""
        if not self.writes:
            return
        if self._log is None:
            self._log = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")
        line = {"kind": kind, "step": step, **{name: _plain(value) for name, value in values.items()}}
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()
        where = kind if "split" not in values else f"{kind} {values['split']}"
        self.board.add(where, step, values)

    def history(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl; a line that a killed run left unfinished is not one."""
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):
                yield json.loads(line)

    def forget_after(self, step: int, judged: int | None = None) -> None:
        """Drops what a resumed run will do again, before anything is logged anew.

        Args:
            step: the last that was done.
            judged: the last after which the model was judged; None: `step`.
        """
        if not self.writes:
            return
        self.board = Board(self.folder / "tensorboard", step + 1)
        done = {"evaluation": step if judged is None else judged}
        kept = [
            json.dumps(line) for line in self.history() if line.get("step", 0) <= done.get(line.get("kind", ""), step)
        ]
        self._write("metrics.jsonl", "".join(f"{line}\n" for line in kept))

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """A JSON file beside the others, whole or not at all. NaN becomes null."""
        self._write(name, json.dumps(_plain(values), indent=2) + "\n")

    def remove(self, name: str) -> None:
        """Takes away what is no longer true, if it is there."""
        if self.writes:
            (self.folder / name).unlink(missing_ok=True)

    def summary(self) -> dict[str, Any]:
        """What `write_json("summary.json", ...)` wrote; empty while the run is not finished."""
        return self.read_json("summary.json")

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file that `write_json` wrote; empty where there is none.

        Raises:
            ValueError: it is damaged, as where a folder was copied in part.
        """
        path = self.folder / name
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}. Was the folder copied whole?") from error

    def close(self) -> None:
        # every line was written when it was logged, or its error was raised then: a full disk is not told twice
        with suppress(OSError):
            if self._log is not None:
                self._log.close()
        with suppress(OSError):
            self.board.close()
        self._log = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _gave_up(self) -> bool:
        """Takes away what a run left of which nothing came; False, and nothing is touched, where there is more."""
        folder = self.folder
        ours = (folder / "environment.json").is_file() and all((folder / name).is_dir() for name in PARTS)
        results = [name for part in PARTS for name in (folder / part).glob("*")]
        results += [folder / name for name in ("summary.json", "stopped.json") if (folder / name).exists()]
        if not ours or results or any(line.get("kind") != "before" for line in self.history()):
            return False
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        for name in ("config.yaml", "metrics.jsonl", *FILES):
            (folder / name).unlink(missing_ok=True)
        return True

    def _write(self, name: str, text: str) -> None:
        if not self.writes:
            return
        with whole_file(self.folder / name) as temporary:
            Path(temporary).write_text(text, encoding="utf-8")


def _name(settings: Settings, when: time.struct_time | None) -> str:
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S", when or time.localtime())
    what = settings.recipe or f"{settings.data.name}_{settings.model.name}"
    return _plain_name(f"{stamp}_{what}_{settings.loss['name']}_seed{settings.seed}")


def _plain_name(name: str) -> str:
    """As a file can be called anywhere."""
    return re.sub(r"[^\w.=-]", "_", name)


def _new_folder(folder: Path) -> Path:
    """The folder, made now, or one with a number after it: runs may start within the same second."""
    candidate, number = folder, 2
    while True:
        with suppress(FileExistsError):
            candidate.mkdir(parents=True)
            return candidate
        candidate, number = folder.with_name(f"{folder.name}_{number}"), number + 1


def _yaml(settings: Settings) -> str:
    import yaml

    return str(yaml.safe_dump(settings.as_dict(), sort_keys=False, default_flow_style=False))


def _plain(value: Any) -> Any:
    """As JSON can hold it: NaN and infinities are null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
