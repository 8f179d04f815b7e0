"""Runs that may be compared, in groups that differ in nothing but their seed; what cannot be compared is refused."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from roadmap.config.settings import SettingError
from roadmap.experiments.results import CHOSEN, LAST, Measurement, Outcome
from roadmap.names import did_you_mean

# What may differ without making another group: where it ran, and how fast.
NEUTRAL = ("seed", "recipe", "hardware", "checkpoint_minutes", "data.workers", "data.pack", "data.on_error")
CHOICES = {
    "last": "the last epoch",
    "held_out": "the best epoch on held-out classes",
    "test": "the best epoch on the test set",
}
SHOWN = ("R@1", "mAP@R")  # unless others are asked for
LOOKS = {"select.metric": "by another metric", "select.every": "looked for more often in one"}
Groups = Mapping[str, Mapping[int, Outcome]]


def common_test(outcomes: Sequence[Outcome], test: str | None) -> str:
    """The test set that all have."""
    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome.tests))
    shared = [name for name in names if all(name in outcome.tests for outcome in outcomes)]
    if test is not None and test not in shared:
        owned = f"only {_some(run.name for run in outcomes if test in run.tests)} have it" if test in names else ""
        there = f"the runs have {', '.join(names)}"
        raise SettingError("test", f"test={test} must be a test set of every run, {owned or there}")
    if test is not None or len(shared) == 1:
        return test or shared[0]
    if not shared:
        told = "; ".join(f"{name}: {_some(run.name for run in outcomes if name in run.tests)}" for name in names)
        raise ValueError(f"the runs were not tested on the same pictures ({told}); compare those that were")
    raise SettingError("test", f"the runs have several test sets; choose one: test=NAME, of {', '.join(shared)}")


def _some(names: Iterable[str]) -> str:
    """The first of them, and how many more."""
    first, *more = names
    return f"{first} and {len(more)} more" if more else first


def check_comparable(outcomes: Sequence[Outcome], test: str, epoch: str) -> None:
    """Refuses what is not comparable, and says which run differs in what."""
    if epoch not in (CHOSEN, LAST):
        raise SettingError("epoch", f"epoch={epoch} must be {CHOSEN} or {LAST}")
    first = outcomes[0]
    for other in outcomes[1:]:
        one, two = first.test(test, epoch), other.test(test, epoch)
        counted = [found.metrics.get("queries") for found in (one, two)]
        if (one.pictures and two.pictures and one.pictures != two.pictures) or (
            None not in counted and counted[0] != counted[1]
        ):
            raise ValueError(
                f"{first.name} and {other.name} were tested on other pictures, or by another protocol (queries, "
                f"gallery, classes, how ties count), though both call it {test}: their numbers are of different things"
            )
        for metric in one.per_query.keys() & two.per_query.keys():
            if not np.array_equal(np.isnan(one.per_query[metric]), np.isnan(two.per_query[metric])):
                raise ValueError(
                    f"{first.name} and {other.name} have {metric} of other queries of {test}: their means are not of "
                    "the same things"
                )
        if epoch == CHOSEN:
            _check_choice(first, other)
        if first.training != other.training:
            raise ValueError(
                f"{first.name} and {other.name} were trained on other pictures ({first.settings['data.name']} and "
                f"{other.settings['data.name']}, as they were divided): no loss can be judged by that"
            )


def _check_choice(first: Outcome, other: Outcome) -> None:
    """Refuses epochs that were not chosen alike."""
    if first.by != other.by:
        raise SettingError(
            "epoch",
            f"{first.name} has {CHOICES[first.by]}, {other.name} {CHOICES[other.by]}: one choice flatters more "
            "than the other. Compare runs with the same select, or their last epochs: epoch=last",
        )
    for name, words in LOOKS.items() if first.by != LAST else ():
        one, two = (run.settings.get(name) for run in (first, other))
        if one != two:
            raise SettingError(
                "epoch",
                f"{first.name} and {other.name} have {CHOICES[first.by]}, but {words} ({name}={one} and {name}={two}): "
                "one choice flatters more than the other. Compare runs with the same select, or their last epochs: "
                "epoch=last",
            )


def common_metrics(outcomes: Sequence[Outcome], test: str, epoch: str, metrics: Sequence[str] | None) -> list[str]:
    """Those that were asked for, or of the usual ones those that all runs have: numbers of which more is better."""
    there = [(run.name, run.test(test, epoch).metrics) for run in outcomes]
    found = list(dict.fromkeys(name for name in metrics or () if name))
    if metrics is None:
        found = [name for name in SHOWN if all(name in known for _, known in there)]
    if less := [name for name in found if re.search(r"loss$|^queries|^skipped", name)]:
        raise ValueError(f"more of {less[0]} is not better, but the group with most counts as the best; leave it out")
    if not found:
        told = ", ".join(there[0][1])
        raise SettingError("metrics", f"metrics=NAMES: by what are the runs to be compared? They have {told}")
    for run, known in there:
        for name in found:
            if name not in known:
                like = did_you_mean(name, known)
                raise ValueError(
                    f"{run} has no metric {name}{like} It has {', '.join(known)}; compare by what every run has"
                )
            if not math.isfinite(known[name]):
                raise ValueError(
                    f"{name} of {run} is {known[name]}: it diverged, or no query of {test} has anything to find. To "
                    "leave it out silently would flatter its group; compare the others, and say so"
                )
    return found


def without_copies(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Of a file of results, in which tables may have one run under several names: the first of those with the same
    settings, the same seed and the same answer to every query. Where answers differ both stay, to be refused."""
    first: dict[str, Outcome] = {}
    found = []
    for run in outcomes:
        alike = first.setdefault(repr((run.seed, sorted(_told(run.settings).items()))), run)
        if alike is run or not _same_answers(alike, run):
            found.append(run)
    return found


def _same_answers(one: Outcome, other: Outcome) -> bool:
    return one.tests.keys() == other.tests.keys() and all(
        one.tests[test].keys() == other.tests[test].keys()
        and all(_answers(one.tests[test][epoch]) == _answers(other.tests[test][epoch]) for epoch in one.tests[test])
        for test in one.tests
    )


def _answers(one: Measurement) -> tuple[object, ...]:
    told = tuple((name, values.tobytes()) for name, values in sorted(one.per_query.items()))
    return told or tuple(sorted(one.metrics.items()))


def runs_by_difference(outcomes: Sequence[Outcome]) -> dict[str, dict[int, Outcome]]:
    """The settings in which runs differ, in words -> seed -> run."""
    every = [_told(outcome.settings) for outcome in outcomes]
    names = list(dict.fromkeys(name for settings in every for name in settings))
    groups: dict[str, dict[int, Outcome]] = {}
    for outcome, settings in zip(outcomes, every, strict=True):
        # options of a loss are told where runs of that loss differ in them
        alike = [other for other in every if other["loss.name"] == settings["loss.name"]]
        differing = [
            name
            for name in names
            if any(o.get(name) != settings.get(name) for o in (alike if _of_loss(name) else every))
        ]
        told = [f"{'loss' if name == 'loss.name' else name}={settings.get(name)}" for name in differing]
        group = groups.setdefault(" ".join(told) or "all runs", {})
        if outcome.seed in group:
            raise ValueError(
                f"{group[outcome.seed].name} and {outcome.name} are the same run twice: same settings, seed "
                f"{outcome.seed}; leave one out"
            )
        group[outcome.seed] = outcome
    return {group: dict(sorted(runs.items())) for group, runs in groups.items()}


def _told(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if not name.startswith(NEUTRAL)}


def _of_loss(name: str) -> bool:
    return name.startswith("loss.") and name != "loss.name"


def copies(groups: Groups, test: str, epoch: str) -> list[str]:
    """Seeds of a group whose models answer every query alike, a sentence each.

    Raises:
        ValueError: they also began at the same second: one is a copy of the other, and no run of its own.
    """
    found = []
    for group, runs in groups.items():
        seen: dict[object, int] = {}
        for seed, run in runs.items():
            one = run.test(test, epoch)
            same = seen.setdefault(_answers(one), seed)
            if same == seed:
                continue
            other = runs[same]
            if run.about.get("started") and run.about.get("started") == other.about.get("started"):
                raise ValueError(
                    f"{other.name} and {run.name} are one run under two seeds: begun at the same second, the same "
                    "answer to every query; leave one out"
                )
            found.append(
                f"seeds {same} and {seed} of {group} have the same numbers: the seed changes nothing, or one is a "
                "copy; they count as two runs"
            )
    return found


def differences_of_origin(groups: Groups) -> list[str]:
    """Where runs differ in code, hardware or precision, which is no difference between groups: a sentence each."""
    told: dict[str, Callable[[Outcome], str]]
    told = {"code": _commit, "hardware": _machine, "torch": _torch, "precision": _precision}
    found = []
    for what, of in told.items():
        counts = {group: Counter(of(run) for run in runs.values()) for group, runs in groups.items()}
        if len({name for count in counts.values() for name in count}) < 2:
            continue
        each = "; ".join(f"{group}: {', '.join(sorted(count))}" for group, count in counts.items())
        found.append(f"the runs differ in {what}, which a difference may come from too ({each})")
    return found


def origin(outcomes: Sequence[Outcome]) -> str:
    """Where runs were made, in words: "of commits 0a8db0a (12), 21d0f3d (3), on CPU, with torch 2.11.0"."""
    told = []
    for before, of, several in (("of commit", _commit, "s"), ("on", _machine, ""), ("with torch", _torch, "")):
        counts = sorted(Counter(of(run) for run in outcomes).items())
        names = [f"{name} ({count})" if len(counts) > 1 else name for name, count in counts]
        told.append(f"{before}{several if len(counts) > 1 else ''} {', '.join(names)}")
    return ", ".join(told)


def _commit(run: Outcome) -> str:
    return str(run.about.get("commit") or "unknown")


def _machine(run: Outcome) -> str:
    return ", ".join(run.about.get("gpus") or ()) or "CPU"


def _torch(run: Outcome) -> str:
    return str((run.about.get("packages") or {}).get("torch", "unknown"))


def _precision(run: Outcome) -> str:
    told = str(run.settings.get("hardware.precision", "auto"))
    return "32" if told == "auto" and not run.about.get("gpus") else told  # as `roadmap.hardware.precision_of`
