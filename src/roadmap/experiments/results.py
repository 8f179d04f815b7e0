"""What came of runs, kept small: a line of JSON for each, and the values of every query, for statistics to be redone.

RECIPE.jsonl   a run a line: its settings, means, epochs, time, machine
RECIPE.npz     query by query R@1 and mAP@R of the same runs, and the classes of the queries

A run has two epochs: the one that it chose ("chosen"), and the last, where that was kept beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roadmap.atomic import NPZ_DAMAGE, whole_file
from roadmap.evaluation import Evaluation
from roadmap.runs import Run
from roadmap.runs.comparison import flat

CHOSEN, LAST = "chosen", "last"
PER_QUERY = ("R@1", "mAP@R")  # kept of every query
LAST_EPOCH = "last_epoch"  # below evaluations/: beside an epoch that was chosen on the test set
LAST_GAP = "last epoch"  # in gap.json
FACTS = ("started", "python", "packages", "gpus", "commit")  # of the machine
ROUNDING = 1e-5  # of a mean of values that were kept in single precision, and then some
PATHS = ("data.root", "data.test_sets", "out", "run")  # of the machine, not of the run


@dataclass(frozen=True, eq=False)
class Measurement:
    """One model on one test set.

    Attributes:
        epoch: that it is of; 0 where that is not known.
        metrics: name -> mean over the queries.
        per_query: "R@1", "mAP@R" -> (M,), NaN for a query without positives; {} where they were not kept.
        labels: (M,) classes of the queries, by which they are not independent.
        pictures: what tells this test set from others: a digest of queries, gallery, classes and how ties count.
    """

    epoch: int
    metrics: Mapping[str, float]
    per_query: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    labels: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    pictures: str = ""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of one run.

    Attributes:
        name: of the run.
        settings: all of them, flat: "loss.name", "data.batch_size"; without the folders of the machine.
        by: how its epoch was chosen: "last", "held_out", "test".
        training: what tells its training pictures from others.
        tests: test set -> "chosen" and, where it was kept, "last".
        about: training seconds, epochs, the machine; what a result file has beside.
    """

    name: str
    settings: Mapping[str, Any]
    by: str
    training: str
    tests: Mapping[str, Mapping[str, Measurement]]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    def test(self, name: str, epoch: str = CHOSEN) -> Measurement:
        """On a test set; the last epoch is the chosen one where no other was chosen."""
        found = self.tests[name]
        if epoch == LAST and LAST not in found and self.by == LAST:
            return found[CHOSEN]
        if epoch not in found:
            raise ValueError(
                f"{self.name} kept no {epoch} epoch of {name}: its epoch was chosen by {self.by}. Runs with "
                "select=last or select=test have one"
            )
        return found[epoch]


def outcome_of(folder: str | Path) -> Outcome:
    """What came of a finished run.

    Raises:
        ValueError: it is not finished.
    """
    run = Run.open(Path(folder))
    summary, settings = run.summary(), flat(run.settings().as_dict())
    if not summary:
        raise ValueError(f"{run.folder} is not finished; go on with it: roadmap train resume={run.folder}")
    tests: dict[str, dict[str, Measurement]] = {}
    for name, metrics in summary["after"].items():
        path = run.evaluation_file(name)
        tests[name] = {CHOSEN: _measurement(path, summary.get("best epoch") or 0, metrics)}
        beside = path.parent / LAST_EPOCH / path.name
        if beside.is_file():
            tests[name][LAST] = _measurement(beside, summary["epochs"], {})
    environment = run.read_json("environment.json")
    about = {name: summary.get(name) for name in ("before", "epochs", "steps", "training seconds", "skipped pictures")}
    about |= {name: environment.get(name) for name in FACTS}
    if measured := run.read_json("gap.json"):
        kept = {CHOSEN: measured, LAST: measured.get(LAST_GAP)}  # older files have no last epoch
        about |= {"DG_AP": {epoch: one["DG_AP"] for epoch, one in kept.items() if one}, "gap": measured}
    by = str(summary.get("chosen by", settings["select.by"]))
    return Outcome(run.folder.name, _without_paths(settings), by, _training(run, settings), tests, about)


def _measurement(path: Path, epoch: int, metrics: Mapping[str, float]) -> Measurement:
    """From the file of an evaluation; the means alone where there is none, as in runs of an older version."""
    if not path.is_file():
        return Measurement(epoch, metrics)
    found = Evaluation.load(path)
    values = {name: found.per_query[name].double().numpy() for name in PER_QUERY if name in found.per_query}
    told = json.dumps([found.ids, found.gallery_ids, found.class_names, _protocol(found)])
    digest = hashlib.sha256(told.encode())
    digest.update(found.labels.numpy().tobytes() + found.gallery_labels.numpy().tobytes())
    return Measurement(epoch, found.metrics, values, found.labels.numpy(), digest.hexdigest()[:16])


def _protocol(found: Evaluation) -> object:
    return found.facts.get("ties", found.facts.get("settings", {}).get("ties"))


def _training(run: Run, settings: Mapping[str, Any]) -> str:
    """What tells the training pictures from others: the dataset, and the split where the program drew one."""
    told = [str(settings[name]) for name in ("data.name", "data.train_on_val")]
    drawn = [path.read_bytes() for path in sorted(run.folder.glob("pictures.csv*"))]
    return "".join(told) + "".join(hashlib.sha256(content).hexdigest()[:16] for content in drawn)


def _without_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in settings.items() if not name.startswith(PATHS)}
    kept["model.weights"] = Path(str(kept["model.weights"])).name
    return kept


# --- files of results


def save_outcomes(folder: Path, name: str, outcomes: Iterable[Outcome]) -> None:
    """Adds runs to NAME.jsonl and NAME.npz, in place of runs of the same name; both files whole or not at all."""
    together = {outcome.name: outcome for outcome in (*load_outcomes(folder / f"{name}.jsonl"), *outcomes)}
    lines, arrays = [], {}
    for outcome in together.values():
        tests: dict[str, dict[str, Any]] = {}
        for test, epochs in outcome.tests.items():
            for epoch, tested in epochs.items():
                told = {"epoch": tested.epoch, "metrics": _plain(tested.metrics), "pictures": tested.pictures}
                tests.setdefault(test, {})[epoch] = told
                arrays[f"labels {tested.pictures}"] = tested.labels
                for metric, values in tested.per_query.items():
                    if epoch == LAST and _same(epochs.get(CHOSEN), tested, metric):
                        continue  # kept once
                    kept = np.float32 if metric != "R@1" else np.float16  # 0, 1 and NaN
                    arrays[f"{outcome.name} {test} {epoch} {metric}"] = values.astype(kept)
        about = dict(outcome.about)
        told = {"name": outcome.name, "by": outcome.by, "training": outcome.training, "tests": tests, **about}
        lines.append(json.dumps(_plain({**told, "settings": dict(outcome.settings)})) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / f"{name}.npz") as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    with whole_file(folder / f"{name}.jsonl") as temporary:
        Path(temporary).write_text("".join(lines), encoding="utf-8")


def _same(chosen: Measurement | None, last: Measurement, metric: str) -> bool:
    """Whether the last epoch was the chosen one, with the same values."""
    if chosen is None or chosen.epoch != last.epoch or metric not in chosen.per_query:
        return False
    return np.array_equal(chosen.per_query[metric], last.per_query[metric], equal_nan=True)


def load_outcomes(path: Path) -> list[Outcome]:
    """The runs of a file that `save_outcomes` wrote; none where there is no such file."""
    if not path.is_file():
        return []
    arrays = _arrays(path.with_suffix(".npz"))
    found = []
    for place, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(_outcome(json.loads(line), arrays))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"line {place} of {path} is no result that could be read: {error!r}. Was the file copied whole?"
            ) from error
    _check_together(path, found)
    return found


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The values of the queries; none where the file is not there."""
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}
    except NPZ_DAMAGE as error:
        raise ValueError(
            f"{path} holds no values of queries that could be read: {error}. Was the file copied whole?"
        ) from error


def _check_together(path: Path, outcomes: Iterable[Outcome]) -> None:
    """The values of the queries are those whose means stand in the lines: the two files are written one by one."""
    for run in outcomes:
        for test, epochs in run.tests.items():
            for epoch, one in epochs.items():
                for metric, values in one.per_query.items():
                    mean = float(np.nanmean(values)) if not np.isnan(values).all() else np.nan
                    if abs(mean - (told := one.metrics.get(metric, np.nan))) > ROUNDING:
                        raise ValueError(
                            f"{path.name} and {path.with_suffix('.npz').name} are not of the same runs: {metric} of "
                            f"{run.name} ({test}, {epoch} epoch) is {told:.5f} in one and {mean:.5f} in the other. "
                            "Take both from the same place"
                        )


def _outcome(line: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Outcome:
    tests = {}
    for test, epochs in line.pop("tests").items():
        tests[test] = {
            epoch: Measurement(
                told["epoch"],
                {name: np.nan if value is None else value for name, value in told["metrics"].items()},
                _per_query(f"{line['name']} {test}", epoch, epochs, arrays),
                arrays.get(f"labels {told['pictures']}", np.zeros(0, np.int64)),
                told["pictures"],
            )
            for epoch, told in epochs.items()
        }
    named = {part: line.pop(part) for part in ("name", "settings", "by", "training")}
    return Outcome(**named, tests=tests, about=line)


def _per_query(
    of: str, epoch: str, epochs: Mapping[str, Mapping[str, Any]], arrays: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[np.float64]]:
    """What was kept of the queries; of a last epoch that was the chosen one, once for both."""
    once = epoch == LAST and CHOSEN in epochs and epochs[CHOSEN]["epoch"] == epochs[LAST]["epoch"]
    found = {}
    for metric in PER_QUERY:
        for place in (epoch, CHOSEN) if once else (epoch,):
            if (where := f"{of} {place} {metric}") in arrays:
                found[metric] = arrays[where].astype(np.float64)
                break
    return found


def all_outcomes(folder: Path) -> list[Outcome]:
    """Of every file of results in a folder."""
    return [outcome for path in sorted(Path(folder).glob("*.jsonl")) for outcome in load_outcomes(path)]


def outcomes_of(what: Sequence[str | Path]) -> list[Outcome]:
    """What came of runs: run folders, folders of runs (those in it that are finished), or files of results."""
    found: list[Outcome] = []
    for path in map(Path, what):
        if path.suffix == ".jsonl":
            if not path.is_file():
                raise FileNotFoundError(f"there is no file of results {path}")
            found += load_outcomes(path)
        elif path.is_dir() and not (path / "config.yaml").is_file() and (inside := sorted(path.glob("*/summary.json"))):
            found += [outcome_of(summary.parent) for summary in inside]
        else:
            found.append(outcome_of(path))
    return found


def unfinished_runs(what: Sequence[str | Path]) -> list[str]:
    """The runs in folders of runs that `outcomes_of` leaves out."""
    return [
        config.parent.name
        for path in map(Path, what)
        if path.is_dir() and not (path / "config.yaml").is_file()
        for config in sorted(path.glob("*/config.yaml"))
        if not (config.parent / "summary.json").is_file()
    ]


def _plain(value: Any) -> Any:
    """As JSON can hold it: NaN is null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
