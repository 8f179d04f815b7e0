"""A run's folder: what was asked for, where it ran, what happened, and the weights.

config.yaml              the settings, complete; `roadmap train` can be given them again
environment.json         Python, packages, device, commit
metrics.jsonl            a line per logged step and per evaluation
tensorboard/             the same numbers, for TensorBoard
checkpoints/last.pt      everything needed to go on (`TrainState`)
checkpoints/best.safetensors   the chosen weights, self-contained: embed, evaluate, search
summary.json             the results, before and after
"""

from __future__ import annotations

import json
import math
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from roadmap.atomic import whole_file
from roadmap.config.settings import Settings

PACKAGES = (
    "roadmap-retrieval",
    "torch",
    "torchvision",
    "timm",
    "triton",
    "lightning-fabric",
    "hydra-core",
    "numpy",
    "pillow",
)


class Run:
    """One run's folder. Everything in it is plain text or weights: nothing that is loaded can run code."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._log: Any = None
        self._board: Any = None
        self._forgotten: int | None = None  # the step from which on TensorBoard is to hide what was there before

    @classmethod
    def create(cls, settings: Settings, when: time.struct_time | None = None) -> Run:
        """A new folder with the settings and the environment in it."""
        folder = Path(settings.run) if settings.run is not None else _made(Path(settings.out) / _name(settings, when))
        if (folder / "config.yaml").exists():
            raise FileExistsError(
                f"{folder} already holds a run; give another run=FOLDER, or go on with it: "
                f"roadmap train resume={folder}"
            )
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        run = cls(folder)
        run._write("config.yaml", _yaml(settings))
        run._write("environment.json", json.dumps(environment(), indent=2) + "\n")
        return run

    @classmethod
    def open(cls, folder: Path) -> Run:
        """A folder that `create` made."""
        folder = Path(folder)
        if not (folder / "config.yaml").is_file():
            raise FileNotFoundError(f"{folder} is not a run: it has no config.yaml")
        return cls(folder)

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints" / "last.pt"

    @property
    def best(self) -> Path:
        return self.folder / "checkpoints" / "best.safetensors"

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

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """A line in metrics.jsonl, and its numbers in TensorBoard."""
        if self._log is None:
            self._log = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")
        line = {"kind": kind, "step": step, **{name: _plain(value) for name, value in values.items()}}
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()
        board = self._tensorboard()
        if board is not None:
            where = kind if "split" not in values else f"{kind} {values['split']}"
            for name, value in values.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "epoch":
                    board.add_scalar(f"{where}/{name}", value, step)

    def _tensorboard(self) -> Any:
        if self._board is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:  # optional: metrics.jsonl has everything
                self._board = False
            else:
                self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self._forgotten)
        return self._board or None

    def history(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl; a line that a killed run left unfinished is not one."""
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):
                yield json.loads(line)

    def forget_after(self, step: int) -> None:
        """Drops what was logged after `step`, which a resumed run will do again; before anything is logged anew."""
        self._forgotten = step + 1
        kept = [json.dumps(line) for line in self.history() if line.get("step", 0) <= step]
        self._write("metrics.jsonl", "".join(f"{line}\n" for line in kept))

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """A JSON file beside the others, whole or not at all. NaN becomes null."""
        self._write(name, json.dumps(_plain(values), indent=2) + "\n")

    def remove(self, name: str) -> None:
        """Takes away what is no longer true, if it is there."""
        (self.folder / name).unlink(missing_ok=True)

    def summary(self) -> dict[str, Any]:
        """What `write_json("summary.json", ...)` wrote; empty while the run is not finished."""
        path = self.folder / "summary.json"
        return dict(json.loads(path.read_text())) if path.is_file() else {}

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._board:
            self._board.close()
        self._board = None

    def _write(self, name: str, text: str) -> None:
        with whole_file(self.folder / name) as temporary:
            Path(temporary).write_text(text, encoding="utf-8")


def environment() -> dict[str, Any]:
    """Python, packages, device and commit: what the numbers of a run may depend on beside its settings."""
    packages = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": packages,
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "cpu_threads": torch.get_num_threads(),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Of the source this runs from, with "+" if it was changed since; None where it is in no repository."""
    source = Path(__file__)
    try:
        _git(
            source, "ls-files", "--error-unmatch", source.name
        )  # an environment inside another repository is not in it
        head, changed = _git(source, "rev-parse", "--short", "HEAD"), _git(source, "status", "--porcelain", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}{'+' if changed else ''}"


def _git(source: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=source.parent, capture_output=True, text=True, timeout=10, check=True
    ).stdout.strip()


def _name(settings: Settings, when: time.struct_time | None) -> str:
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S", when or time.localtime())
    what = settings.recipe or f"{settings.data.name}_{settings.model.name}"
    return re.sub(r"[^\w.=-]", "_", f"{stamp}_{what}_{settings.loss['name']}_seed{settings.seed}")


def _made(folder: Path) -> Path:
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
