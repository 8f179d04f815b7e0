"""The parts of a report that are numbers: curves, the table, scores, ranks and classes, as HTML."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np

from roadmap.data.records import Floats
from roadmap.evaluation import Evaluation
from roadmap.names import breakable
from roadmap.report.charts import Line, line_chart, score_chart
from roadmap.report.material import JUDGED_BY, Material
from roadmap.report.scores import ScoreCounts, edges, thresholds

CURVES = (JUDGED_BY, "R@1")  # of the validation pictures
WORST, BEST = 30, 15  # classes that are always seen; the others unfold
FOLDED = 1000  # classes that unfold, at most
STEPS = ((20_000, 1), (5_000, 2), (0, 4))  # pairs from which on a bar is so many bins wide
ON_PAPER = 100  # of them that are printed; more stay folded


def card(title: str, inside: str, about: str = "") -> str:
    """A chart or table with a heading."""
    words = f'<p class="about">{about}</p>\n' if about else ""
    return f'<div class="card">\n<h3>{escape(title)}</h3>\n{words}{inside}</div>\n'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Cells are HTML; the first of each row names it."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "\n".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    return (
        f'<div class="wide"><table class="{kind}">\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>'
        "</div>\n"
    )


def curves(runs: Sequence[Material]) -> str:
    """What happened during training: the loss, and what was measured on the validation pictures."""
    found = []
    losses = [_curve(run, "step", "loss", number) for number, run in enumerate(runs)]
    if any(line.xs for line in losses):
        kinds = {run.settings.loss["name"] for run in runs}
        about = "" if len(kinds) == 1 else "Different losses have different scales: compare shapes, not heights."
        found.append(card("Loss of the batches", line_chart(losses, "step", "loss"), about))
    for metric in CURVES:
        lines = [_curve(run, "evaluation", metric, number) for number, run in enumerate(runs)]
        if any(line.xs for line in lines):
            split = _split(runs)
            title = f"{metric} of {'the test set' if split == 'test' else f'the {split} pictures'}"
            found.append(card(title, line_chart(lines, "epoch", f"{metric}, %")))
    return f'<div class="grid">\n{"".join(found)}</div>\n' if found else "<p>The runs have no log.</p>\n"


def _split(runs: Sequence[Material]) -> str:
    return next(
        (str(line.get("split", "validation")) for run in runs for line in run.history if line["kind"] == "evaluation"),
        "validation",
    )


def _curve(run: Material, kind: str, name: str, colour: int) -> Line:
    along, scale = ("step", 1) if kind == "step" else ("epoch", 100)
    lines = [line for line in run.history if line["kind"] == kind and isinstance(line.get(name), float)]
    seen = {line[along]: scale * line[name] for line in lines}  # of two lines with one number the later counts
    return Line(run.name, list(seen), list(seen.values()), colour)


def scores(runs: Sequence[Material]) -> str:
    """How the scores of pairs are spread, before and after training."""
    known = [run for run in runs if run.measures]
    if not known:
        return "<p>Not known: see what is missing, above.</p>\n"
    span = _span([measures.counts for run in known for measures in run.measures.values()])
    return "".join(_scores_of(run, span) for run in known)


def _span(counts: Sequence[ScoreCounts]) -> tuple[float, float]:
    """What of the scores is worth showing: all but a thousandth of the lowest pairs, and the thresholds."""
    bounds, low = edges(), 1.0
    for one in counts:
        for values in (one.positives, one.negatives):
            if total := int(values.sum()):
                low = min(low, float(bounds[int(np.searchsorted(values.cumsum(), total / 1000))]))
        low = min(low, one.beta - 0.05)
    return math.floor(low * 10) / 10, 1.0


def _shares(counts: ScoreCounts) -> tuple[Floats, list[Floats]]:
    """Edges, and the shares of positives and of negatives between them; wider steps where there are few pairs."""
    both = counts.positives, counts.negatives
    fewest = min(int(values.sum()) for values in both)
    wide = next((step for least, step in STEPS if fewest >= least), STEPS[-1][1])
    return edges()[::wide], [values.reshape(-1, wide).sum(1) / max(int(values.sum()), 1) for values in both]


def _scores_of(run: Material, span: tuple[float, float]) -> str:
    alpha, beta, own = thresholds(run.settings.loss)
    charts = ""
    for which, words in (("before", "before training"), ("after", "after training")):
        if which not in run.measures:
            charts += card(f"{run.name}, {words}", "<p>Not known: see what is missing, above.</p>\n")
            continue
        counts = run.measures[which].counts
        bins, pairs = _shares(counts)
        shares = counts.shares()
        below, above = _percent(shares["below"]), _percent(shares["above"])
        said = f"scores of positive and negative pairs, {run.name} {words}"
        chart = score_chart(bins, pairs[0], pairs[1], alpha, beta, span, said)
        about = (
            f'<span class="positive">Positive pairs</span> below α: <b>{below} %</b> of '
            f'{int(counts.positives.sum()):,}. <span class="negative">Negative pairs</span> above β: <b>{above} %</b> '
            f"of {int(counts.negatives.sum()):,}."
        )
        charts += card(f"{run.name}, {words}", chart, about)
    whose = (
        f"α = {alpha:g} and β = {beta:g} are those of its loss."
        if own
        else f"Its loss, {escape(str(run.settings.loss['name']))}, has no thresholds: α = {alpha:g} and β = {beta:g} "
        "are ROADMAP's, to compare with."
    )
    return f'<div class="grid two">\n{charts}</div>\n<p class="about">{whose}</p>\n'


def ranks(runs: Sequence[Material]) -> str:
    """Precision among the first k answers, for every k."""
    lines, possible = [], None
    for number, run in enumerate(runs):
        for which, words in (("after", ""), ("before", " before training")):
            if which in run.measures:
                found = run.measures[which].precisions
                possible = found[1]
                ks = range(1, found.shape[1] + 1)
                lines.append(Line(f"{run.name}{words}", list(ks), (100 * found[0]).tolist(), number, which == "before"))
    if possible is None:
        return "<p>Not known: see what is missing, above.</p>\n"
    lines = _without_copies(lines)
    lines.append(Line("the best possible", list(range(1, len(possible) + 1)), (100 * possible).tolist(), 7, True))
    named = [k for k in (1, 2, 5, 10, 20, 50, 100) if k <= len(possible)]
    rows = [[escape(line.name), *(f"{line.ys[k - 1]:.1f}" for k in named)] for line in lines]
    about = "No query can find more of its class than there are, so the best possible falls where classes are small."
    chart = card("Mean precision among the first k answers", line_chart(lines, "k", "precision, %", floor=0.0), about)
    numbers = card("The same in numbers, %", table(["k", *map(str, named)], rows))
    return f'<div class="grid two">\n{chart}{numbers}</div>\n'


def _without_copies(lines: Sequence[Line]) -> list[Line]:
    """Runs that began with the same model share one line."""
    kept: list[Line] = []
    for line in lines:
        same = next((old for old in kept if old.dashed and line.dashed and old.ys == line.ys), None)
        if same is None:
            kept.append(line)
        else:
            kept[kept.index(same)] = Line("before training", same.xs, same.ys, 6, True)
    return kept


def classes(runs: Sequence[Material]) -> str:
    """From the worst to the best, by the first run."""
    first = runs[0].evaluation
    values = [class_means(run.evaluation) for run in runs]
    order = sorted(values[0], key=lambda label: (values[0][label], label))
    if not order:
        return "<p>No class has two pictures.</p>\n"
    lines = [
        Line(run.name, list(range(1, len(order) + 1)), sorted(100 * means[label] for label in order), number)
        for number, (run, means) in enumerate(zip(runs, values, strict=True))
    ]
    sizes, mistaken = Counter(first.labels.tolist()), confusions(first)
    rows = [list(_class_row(first, label, values, sizes, mistaken)) for label in order]
    head = ["class", "queries", *(f"AP@R, % · {escape(run.name)}" for run in runs)]
    head += ["second less first"] if len(runs) == 2 else []
    head += [f"wrong first answers of {escape(runs[0].name)} are most often"]
    chart = card(
        "Mean AP@R of each class, from the worst to the best",
        line_chart(lines, "class, in the order of each run", "mean AP@R, %", floor=0.0),
    )
    return chart + _unfolding(head, rows)


def _unfolding(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if len(rows) <= WORST + BEST:
        return table(head, rows, "classes")
    middle = rows[WORST:-BEST]
    left = "" if len(middle) <= FOLDED else f" (the first {FOLDED:,} of them)"
    kind = "long" if len(middle) > ON_PAPER else ""
    folded = table(head, middle[:FOLDED], "classes")
    return (
        f"<h3>The worst {WORST}</h3>\n{table(head, rows[:WORST], 'classes')}"
        f'<details class="{kind}"><summary>{len(middle):,} classes in between{left}</summary>\n{folded}</details>\n'
        f"<h3>The best {BEST}</h3>\n{table(head, rows[-BEST:], 'classes')}"
    )


def _class_row(
    first: Evaluation,
    label: int,
    values: Sequence[Mapping[int, float]],
    sizes: Mapping[int, int],
    mistaken: Mapping[int, tuple[int, int]],
) -> Iterator[str]:
    yield breakable(first.class_name(label))
    yield f"{sizes[label]:,}"
    for means in values:
        share = means.get(label, math.nan)
        yield f'<span class="bar" style="--share:{share:.4f}"></span><span class="value">{_percent(share)}</span>'
    if len(values) == 2:
        change = 100 * (values[1].get(label, math.nan) - values[0][label])
        yield f'<span class="{"up" if change > 0 else "down" if change < 0 else ""}">{change:+.2f}</span>'
    other = mistaken.get(label)
    yield "" if other is None else f"{breakable(first.class_name(other[0]))} ({other[1]:,})"


def class_means(evaluation: Evaluation) -> dict[int, float]:
    """Label -> mean AP@R of its queries, of those that have something to find."""
    labels, precisions = evaluation.labels.numpy(), evaluation.per_query[JUDGED_BY].numpy()
    judged = ~np.isnan(precisions) & (labels >= 0)
    known, member = np.unique(labels[judged], return_inverse=True)
    means = np.bincount(member, precisions[judged]) / np.maximum(np.bincount(member), 1)
    return dict(zip(known.tolist(), means.tolist(), strict=True))


def confusions(evaluation: Evaluation) -> dict[int, tuple[int, int]]:
    """Label -> the other class that is most often its queries' first answer, and how often."""
    if not evaluation.neighbours.shape[1]:
        return {}
    nearest = evaluation.neighbours[:, 0]
    found = evaluation.gallery_labels[nearest.clamp(min=0)]
    wrong = ((nearest >= 0) & (found != evaluation.labels) & (found >= 0)).numpy()
    pairs = Counter(zip(evaluation.labels.numpy()[wrong].tolist(), found.numpy()[wrong].tolist(), strict=True))
    best: dict[int, tuple[int, int]] = {}
    for (label, other), count in pairs.items():
        if label not in best or (-count, other) < (-best[label][1], best[label][0]):
            best[label] = other, count
    return best


def _percent(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{100 * value:.2f}"
