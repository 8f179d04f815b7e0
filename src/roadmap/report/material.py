"""What a report is made of: runs that were tested on the same pictures, and what can be known of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from roadmap.config.settings import Settings
from roadmap.data import Pack, Records
from roadmap.evaluation import Evaluation
from roadmap.report.measures import Measures
from roadmap.report.retrievals import Album, Side
from roadmap.runs import Run

JUDGED_BY = "mAP@R"
AGREE = 5e-3  # metrics of the same model that differ by more, embedded again, are worth a word


@dataclass(eq=False)
class Material:
    """A run, and what a report knows of it.

    Attributes:
        name: of the run, distinct among those of the report.
        test: the test set that the report is about.
        evaluation: of the chosen epoch on it, as the run saved it.
        history: the lines of its log.
        environment: where it was made.
        before: the evaluation of the model before training, where it could be made again.
        measures: "before" and "after", where pictures could be embedded.
        records: of the test set, where they could be read, and the `pack` that their pixels come from.
        missing: what the report lacks, and why, a sentence each.
    """

    name: str
    run: Run
    settings: Settings
    summary: dict[str, Any]
    test: str
    evaluation: Evaluation
    history: list[dict[str, Any]]
    environment: dict[str, Any]
    before: Evaluation | None = None
    measures: dict[str, Measures] = field(default_factory=dict)
    records: Records | None = None
    pack: Pack | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def has_classes(self) -> bool:
        """Whether answers are of the query's class or of another; landmarks are easy, hard or junk."""
        return JUDGED_BY in self.evaluation.per_query


def materials(folders: Sequence[str | Path], test: str | None = None) -> list[Material]:
    """The runs in these folders, read; nothing is embedded.

    Args:
        folders: of runs that were tested on the same pictures.
        test: the test set that the report is about; None for the first of the first run.

    Raises:
        ValueError: runs that cannot be compared, and why.
        FileNotFoundError: a run that has no evaluation.
    """
    if not folders:
        raise ValueError("a report needs at least one run, got none")
    runs = [Run.open(Path(folder)) for folder in folders]
    chosen = test or _tests(runs[0])[0]
    found = [_material(run, name, chosen) for run, name in zip(runs, _names(runs), strict=True)]
    for other in found[1:]:
        _check_same(found[0], other)
    return found


def _names(runs: Sequence[Run]) -> list[str]:
    """The folders' names; with as much of their paths before them as tells them apart."""
    paths = [run.folder.resolve() for run in runs]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"{twice} is named twice; name each run once")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return list(map(str, paths))


def _tests(run: Run) -> list[str]:
    """The test sets that a run has an evaluation of."""
    named = [name for name in run.summary().get("after", {}) if run.evaluation_file(name).is_file()]
    found = named or sorted(path.stem for path in (run.folder / "evaluations").glob("*.npz"))
    if not found:
        raise FileNotFoundError(
            f"{run.folder} has no evaluation of a test set: it is not finished, or has no test pictures. Go on "
            f"with it: roadmap train resume={run.folder}"
        )
    return found


def _material(run: Run, name: str, test: str) -> Material:
    if test not in (there := _tests(run)):
        raise ValueError(
            f"{run.folder} has no evaluation of {test!r}, it has {', '.join(there)}; a report is about one test set "
            "that all its runs have: write one for each, or choose a test set that is in all"
        )
    environment = run.read_json("environment.json")
    evaluation = Evaluation.load(run.evaluation_file(test))
    return Material(name, run, run.settings(), run.summary(), test, evaluation, list(run.history()), environment)


def _check_same(first: Material, other: Material) -> None:
    """Both were tested on the same pictures, in the same classes, by the same protocol."""
    one, two = first.evaluation, other.evaluation
    why = ""
    if one.ids != two.ids or one.gallery_ids != two.gallery_ids:
        both = [set(ids or ()) | set(gallery or ()) for ids, gallery in ((e.ids, e.gallery_ids) for e in (one, two))]
        gone, new = (f"{len(some):,}" for some in (both[0] - both[1], both[1] - both[0]))
        why = f"{gone} pictures are only in the first and {new} only in the second"
        why = why if both[0] != both[1] else "the pictures are in another order"
    elif not (torch.equal(one.labels, two.labels) and torch.equal(one.gallery_labels, two.gallery_labels)):
        why = "the same pictures have other classes"
    elif _ties(one) != _ties(two):
        why = f"equal scores count otherwise: {_ties(one)} and {_ties(two)}"
    if why:
        raise ValueError(
            f"{first.run.folder} and {other.run.folder} were not tested alike on {first.test}: {why}. A report "
            "compares runs of the same test set; write one for each, or evaluate both on the same pictures"
        )


def _ties(evaluation: Evaluation) -> str:
    facts = evaluation.facts
    return str(facts.get("settings", facts).get("ties", "pessimistic"))


def doubts(material: Material) -> list[str]:
    """Where what was embedded again does not agree with what the run wrote down, a sentence each."""
    found = []
    after, before = material.measures.get("after"), material.before
    noted = material.evaluation.metrics.get("R@1")
    if after is not None and noted is not None and abs(after.precisions[0, 0] - noted) > AGREE:
        found.append(
            f"embedded again, R@1 is {100 * after.precisions[0, 0]:.2f}, in the run {100 * noted:.2f}: precision by "
            "rank, scores and map are of other hardware or precision"
        )
    first = material.summary.get("before", {}).get(material.test, {}).get(JUDGED_BY)
    if before is not None and first is not None and abs(before.metrics[JUDGED_BY] - first) > AGREE:
        found.append(
            f"the model before training gives {JUDGED_BY} {100 * before.metrics[JUDGED_BY]:.2f} here, in the run "
            f"{100 * first:.2f}: its weights are not the same any more"
        )
    return found


def sides_of(run: Material) -> tuple[Side, Side] | None:
    """The queries and the gallery of a run's evaluation with their pictures; None where these are not known."""
    if run.records is None:
        return None
    queries, gallery = run.records.evaluation()
    first = run.evaluation
    try:
        asked = Side(Album(queries, run.pack), first.ids, first.labels.numpy())
        if gallery is None:
            return asked, asked
        return asked, Side(Album(gallery, run.pack), first.gallery_ids, first.gallery_labels.numpy())
    except ValueError as error:
        run.missing.append(f"the pictures cannot be shown: {error}")
        run.records = None
        return None
