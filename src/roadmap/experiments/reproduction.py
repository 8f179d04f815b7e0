"""Runs a table or a figure: what the pictures and weights at hand permit, what it will cost, and the runs themselves.

Every run has a folder of its own, named by its settings: tables share the runs they have in common, and what was
stopped is gone on with. What came of each is kept in small files (`roadmap.experiments.results`).
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roadmap.atomic import whole_file
from roadmap.config.composition import check_data, check_loss, settings_from
from roadmap.config.settings import ModelSettings, Settings
from roadmap.config.settings_checks import AUTO
from roadmap.data.datasets import DRAWN
from roadmap.engine import Plan, fit, plan, resume
from roadmap.engine.results import duration
from roadmap.experiments.definitions import Experiment, Row
from roadmap.experiments.gap import GAP_FILE, save_gap
from roadmap.experiments.results import load_outcomes, outcome_of, save_outcomes
from roadmap.models.hub import check_hub

# As the released code: the best epoch on the test set, looked for every 5 epochs; the last one is kept beside it.
CHOICE = ("select=test", "select.every=5")
# What a person can do something about; anything else is a fault of ours.
EXPECTED = (ValueError, TypeError, OSError, ImportError, RuntimeError, ArithmeticError)
# Settings that say where and how fast, and change no meaning.
OF_THE_MACHINE = ("hardware", "data.root", "data.workers", "data.pack", "checkpoint_minutes")
REASONS = "not_run.json"  # among the results: row -> why it was not run
SHOWN = 3  # rows of one reason that are named
Say = Callable[[str], None]


@dataclass(frozen=True)
class Means:
    """What is at hand.

    Attributes:
        roots: dataset -> where it lies; others are looked for as folders of ROADMAP_DATA.
        settings: given to every run beside those of its row, such as model=resnet50_v1 model.weights=FILE.
        out: the folder of the run folders.
        results: the folder of the files of results.
        missing: what the results hold is not run again, even where its run folder is gone.
        known: what was found of settings by now, which tables have in common.
    """

    roots: Mapping[str, str | Path] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    out: Path = Path("runs/reproduce")
    results: Path = Path("experiments/results")
    missing: bool = False
    known: dict[tuple[str, ...], Plan | str] = field(default_factory=dict, repr=False, compare=False)

    def root(self, dataset: str) -> Path | None:
        if dataset in self.roots:
            return Path(self.roots[dataset]).expanduser()
        beside = Path(os.environ.get("ROADMAP_DATA", "")) / dataset
        return beside if "ROADMAP_DATA" in os.environ and beside.is_dir() else None

    @property
    def told(self) -> tuple[str, ...]:
        """The settings that another machine would need too, in one order; of a file only its name."""
        needed = (text for text in self.settings if not text.startswith(OF_THE_MACHINE))
        return tuple(sorted(re.sub(r"=.*/", "=", text) for text in needed))

    def folder(self, row: Row, seed: int) -> Path:
        """Of a run: the same settings have the same folder."""
        other = f",{hashlib.sha256(' '.join(self.told).encode()).hexdigest()[:6]}" if self.told else ""
        return self.out / re.sub(r"[^\w.,=-]", "_", f"{row.key},seed={seed}{other}")

    def done(self, row: Row, seed: int, kept: Collection[str]) -> bool:
        """Whether nothing is left to do for a run: its folder is whole, or its name is among those kept."""
        folder = self.folder(row, seed)
        return _finished(folder) or folder.name in kept

    def kept_runs(self, rows: Iterable[Row], gap: bool) -> set[str]:
        """The runs that the results hold, with all that is asked of them; none where that does not spare them."""
        files = {self.results / f"{row.recipe}.jsonl" for row in rows} if self.missing else ()
        return {one.name for file in files for one in load_outcomes(file) if "DG_AP" in one.about or not gap}


@dataclass(frozen=True)
class Prospect:
    """What would come of a row: how long it would take, or why it cannot be run."""

    row: Row
    left: tuple[int, ...]  # the seeds that are not done yet
    seconds: float = 0.0  # of all that are left
    why_not: str = ""
    seeds: int = 1  # that were asked for


def settings_of(row: Row, seed: int, means: Means) -> Settings:
    """Of one run of a row.

    Raises:
        ValueError: what is not at hand, or not understood.
    """
    settings = settings_from([*row.overrides, *CHOICE, *means.settings, f"seed={seed}"])
    settings.run = str(means.folder(row, seed))
    if settings.data.name != DRAWN and settings.data.root is None:
        if (found := means.root(settings.data.name)) is None:
            raise ValueError(_not_at_hand(settings.data.name))
        settings.data.root = str(found)
    if settings.data.name == "sfm120k":
        tests = {number.dataset: means.root(number.dataset) for number in row.numbers}
        if missing := [name for name, root in tests.items() if root is None]:
            raise ValueError(_not_at_hand(missing[0]))
        settings.data.test_sets = {name: str(root) for name, root in tests.items()}
    check_data(settings)
    check_loss(settings)
    _check_weights(settings.model)
    return settings


def _check_weights(model: ModelSettings) -> None:
    if model.weights == "hub":
        check_hub(model.name)
    elif model.weights not in ("random", AUTO) and not Path(model.weights).expanduser().is_file():
        raise ValueError(f"the weights {model.weights} are not at hand: --set model.weights=FILE")


def _not_at_hand(dataset: str) -> str:
    return f"the pictures of {dataset} are not at hand: --root {dataset}=FOLDER"


def prospects(experiment: Experiment, seeds: int, means: Means) -> list[Prospect]:
    """For every row: what is left to do, or why it cannot be done. Nothing is written."""
    found, kept = [], means.kept_runs(experiment.rows, experiment.derived == "gap")
    for row in experiment.rows:
        left = tuple(seed for seed in range(seeds) if not means.done(row, seed, kept))
        if row.why_not or not left:
            found.append(Prospect(row, left, why_not=row.why_not, seeds=seeds))
            continue
        # losses take about the same time: the recipe's own is tried for all of them
        base = tuple(text for text in row.overrides if not text.startswith(("loss", "memory")))
        if base not in means.known:
            means.known[base] = _plan(dataclasses.replace(row, overrides=base), means)
        other = means.known[base]
        why = other if isinstance(other, str) else _refusal(row, means)
        seconds = 0.0 if isinstance(other, str) else other.seconds * len(left)
        found.append(Prospect(row, left, seconds, why, seeds))
    return found


def _plan(row: Row, means: Means) -> Plan | str:
    try:
        return plan(settings_of(row, 0, means))
    except EXPECTED as error:
        return _short(error)


def _refusal(row: Row, means: Means) -> str:
    try:
        settings_of(row, 0, means)
    except EXPECTED as error:
        return _short(error)
    return ""


def _short(error: Exception) -> str:
    """The first sentence of what is wrong."""
    return re.split(r"(?<=\w)[.;:]? *\n|(?<=\w)\. ", str(error))[0][:200]


def run_rows(found: Sequence[Prospect], means: Means, say: Say = print, gap: bool = False) -> None:
    """Trains what is left, a seed of every row before the next seed, and keeps what comes of each run at once.

    A row that fails is told and left; a signal stops everything, and the same call goes on from there.

    Args:
        found: by `prospects`.
        means: what is at hand.
        say: what is told goes there.
        gap: measure the decomposability gap of each run too.
    """
    can = [prospect for prospect in found if not prospect.why_not]
    failed: dict[str, str] = {}
    note(found, means)
    for prospect in can:
        done = [seed for seed in range(prospect.seeds) if _finished(means.folder(prospect.row, seed))]
        _keep(prospect.row, done, means, gap)
    for seed in _seeds(can):
        for prospect in can:
            row = prospect.row
            if seed not in prospect.left or _finished(means.folder(row, seed)) or row.key in failed:
                continue
            try:
                say(f"{row.key}, seed {seed}  ->  {_train(row, seed, means)}")
                _keep(row, [seed], means, gap)
            except EXPECTED as error:
                failed[row.key] = _short(error)
                say(f"{row.key}, seed {seed}: {failed[row.key]}")
    _tell_reasons(means.results, failed, [p.row.key for p in can if p.row.key not in failed])


def note(found: Sequence[Prospect], means: Means) -> None:
    """Keeps among the results why rows were not run: what is missing, or nothing but time."""
    told = {}
    for prospect in found:
        if prospect.why_not:
            told[prospect.row.key or prospect.row.name] = prospect.why_not
        elif len(prospect.left) == prospect.seeds:
            told[prospect.row.key] = "can be run with what is at hand, and has not been"
    _tell_reasons(means.results, told, [])


def _seeds(found: Iterable[Prospect]) -> list[int]:
    return sorted({seed for prospect in found for seed in prospect.left} | {0})


def _finished(folder: Path) -> bool:
    return (folder / "summary.json").is_file()


def _train(row: Row, seed: int, means: Means) -> str:
    """One run, begun or gone on with; its test metrics in words."""
    import torch

    # else what was compiled for the model of one run would be guarded against that of the next, again and again
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    folder = means.folder(row, seed)
    if (folder / "config.yaml").is_file():
        resume(folder, quiet=True)
    else:
        fit(settings_of(row, seed, means), quiet=True)
    tests = outcome_of(folder).tests
    told = [
        f"{name} {epoch} epoch {one.epoch}: R@1 {100 * one.metrics.get('R@1', float('nan')):.2f}, "
        f"mAP@R {100 * one.metrics.get('mAP@R', float('nan')):.2f}"
        for name, epochs in tests.items()
        for epoch, one in epochs.items()
    ]
    return "; ".join(told)


def _keep(row: Row, seeds: Iterable[int], means: Means, gap: bool) -> None:
    outcomes = []
    for seed in seeds:
        if gap and not (means.folder(row, seed) / GAP_FILE).is_file():
            save_gap(means.folder(row, seed))
        outcome = outcome_of(means.folder(row, seed))
        about = {**outcome.about, "key": row.key, "with": list(means.told)}
        outcomes.append(dataclasses.replace(outcome, about=about))
    if outcomes:
        save_outcomes(means.results, row.recipe, outcomes)


def _tell_reasons(folder: Path, failed: Mapping[str, str], ran: Iterable[str]) -> None:
    kept = {key: why for key, why in reasons(folder).items() if key not in set(ran)}
    # without what only this machine or this moment explains
    kept |= {key: re.sub(r": --.*| below \S+|; run: .*| \(.*|(?<=weights )\S*/", "", w) for key, w in failed.items()}
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / REASONS) as temporary:
        Path(temporary).write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def reasons(folder: Path) -> dict[str, str]:
    """Row -> why it was not run, as it was found when it was last tried."""
    path = Path(folder) / REASONS
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def prospect_lines(found: Sequence[Prospect]) -> list[str]:
    """What can be run, what it costs, and what cannot and why, in words."""
    can = [prospect for prospect in found if not prospect.why_not]
    left = sum(len(prospect.left) for prospect in can)
    lines = [f"can be run   {len(can)} of {len(found)} rows, {left} runs left"]
    if left:
        seconds = sum(prospect.seconds for prospect in can)
        lines[0] += (
            f", about {duration(seconds)} of training (an estimate; evaluations and what comes before are not counted)"
        )
    missing: dict[str, list[str]] = {}
    for prospect in found:
        if prospect.why_not:
            missing.setdefault(prospect.why_not, []).append(f"{prospect.row.name} on {prospect.row.dataset}")
    for why, rows in missing.items():
        more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
        lines.append(f"cannot       {', '.join(rows[:SHOWN])}{more}: {why}")
    if swaps := sorted({prospect.row.stand_in for prospect in can if prospect.row.stand_in}):
        lines += [f"in place     {swap}" for swap in swaps]
    return lines
