"""The parts of a report that say what was measured, on what, by what and where: table, settings, code, hardware."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from roadmap.engine.results import duration
from roadmap.experiments import compare
from roadmap.names import breakable
from roadmap.report.material import Material, doubts
from roadmap.report.sections import table

SHOWN = re.compile(r"R@\d+|R-precision|mAP@R|mAP|.* trapezoidal mAP|.* mP@10")
OF_THE_FOLDER = ("out", "run")  # settings that always differ and say nothing


def results(runs: Sequence[Material]) -> str:
    """The metrics of every run, before and after training; of several runs also how they compare, with p-values."""
    names = [name for name in runs[0].evaluation.metrics if SHOWN.fullmatch(name)]
    lines: list[tuple[str, Mapping[str, Any]]] = []
    for run in runs:
        first = run.summary.get("before", {}).get(run.test)
        if first is not None and not any(first == other for _, other in lines):
            same = all(run.summary.get("before", {}).get(run.test) == first for run in runs)
            lines.append(("before training" if same else f"{run.name} before training", first))
    lines += [(run.name, run.evaluation.metrics) for run in runs]
    rows = [[escape(title), *(_percent(values.get(name)) for name in names)] for title, values in lines]
    return table(["%", *map(escape, names)], rows) + (_standings(runs) if len(runs) > 1 else "") + _ends(runs)


def _standings(runs: Sequence[Material]) -> str:
    """What `roadmap compare` says of the runs; or why it does not compare them."""
    try:
        sheet = compare([run.run.folder for run in runs], runs[0].test).sheet
    except ValueError as error:
        return f'<p class="about">No p-values: {escape(str(error))}.</p>\n'
    told = [[f"<b>{escape(cell.text)}</b>" if cell.bold else escape(cell.text) for cell in line] for line in sheet.rows]
    # a column for each group: the sheet has many columns, and a page of a phone or of paper is narrow
    head, *rows = [[name, *cells] for name, *cells in zip(map(escape, sheet.names), *told, strict=True)]
    remarks = "".join(f"<li>{escape(note)}</li>" for note in sheet.notes)
    heading = f"<h3>Compared: {escape(sheet.title)}</h3>\n"
    return f'{heading}{table(head, rows)}<ul class="about">{remarks}</ul>\n'


def _percent(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{100 * value:.2f}"


def _ends(runs: Sequence[Material]) -> str:
    """How each run came to its model."""
    rows = []
    for run in runs:
        summary, seconds = run.summary, run.summary.get("training seconds")
        took = "-" if seconds is None else duration(seconds)
        chosen = {"held_out": "validation pictures", "last": "none, the last", "test": "the test set: flattering"}
        epoch = f"{summary.get('best epoch', '-')} of {summary.get('epochs', '-')}"
        by = chosen.get(str(summary.get("chosen by")), "-")
        rows.append([escape(run.name), escape(str(run.settings.loss["name"])), epoch, escape(by), took])
    return table(["run", "loss", "epoch kept", "chosen by", "training"], rows, "words")


def notes(runs: Sequence[Material]) -> str:
    """What is missing, and what does not agree, of every run; nothing where all is there."""
    found = [(run.name, said) for run in runs for said in (*run.missing, *doubts(run))]
    if not found:
        return ""
    items = "".join(f"<li><b>{escape(name)}</b>: {escape(said)}</li>" for name, said in found)
    return f'<section id="missing" class="note"><h2>What is missing</h2>\n<ul>{items}</ul></section>\n'


def settings(runs: Sequence[Material]) -> str:
    """What differs first, then all of it, folded."""
    flat = [flattened(run.settings.as_dict()) for run in runs]
    names = list(dict.fromkeys(name for values in flat for name in values if name not in OF_THE_FOLDER))
    rows = {name: [values.get(name, "-") for values in flat] for name in names}
    head = ["setting", *(escape(run.name) for run in runs)]
    differing = [name for name, values in rows.items() if any(value != values[0] for value in values)]

    def lines(some: Sequence[str]) -> list[list[str]]:
        return [[escape(name), *(breakable(_plain(value)) for value in rows[name])] for name in some]

    parts = ""
    if len(runs) > 1:
        said = table(head, lines(differing), "words") if differing else "<p>Nothing differs but the folder.</p>\n"
        parts = f"<h3>In what the runs differ</h3>\n{said}"
    whole = table(head, lines(names), "words")
    return f"{parts}<details><summary>All {len(names)} settings</summary>\n{whole}</details>\n"


def pictures(runs: Sequence[Material]) -> str:
    """What was tested on, and how it was read."""
    columns = [_facts_of_pictures(run) for run in runs]
    rows = [[name, *(breakable(_plain(column[name])) for column in columns)] for name in columns[0]]
    said = list(dict.fromkeys(note for run in runs for note in run.evaluation.facts.get("data", {}).get("notes", ())))
    remarks = "".join(f"<li>{escape(note)}</li>" for note in said)
    head = ["", *(escape(run.name) for run in runs)]
    return table(head, rows, "words") + (f"<ul>{remarks}</ul>\n" if remarks else "")


def _facts_of_pictures(run: Material) -> dict[str, Any]:
    data, how = run.evaluation.facts.get("data", {}), run.evaluation.facts.get("settings", {})
    image, resize, gallery = how.get("image"), how.get("resize"), data.get("gallery")
    return {
        "queries": f"{len(run.evaluation.labels):,}",
        "they search": "one another" if gallery is None else f"a gallery of {gallery:,}",
        "classes": f"{data.get('classes', 0):,}",
        "pixels that the model sees": f"{image}, whole" if image == resize else f"{image}, from the middle of {resize}",
        "read from": data.get("read"),
        "not decoded": f"{len(data.get('skipped', {})):,}",
        "folder": data.get("root"),
    }


def code(runs: Sequence[Material]) -> str:
    """Commit, command and packages of every run."""
    rows = []
    for name in ("commit", "command", "started", "python"):
        rows.append([name, *(breakable(_plain(run.environment.get(name))) for run in runs)])
    packages = dict.fromkeys(name for run in runs for name in run.environment.get("packages", {}))
    for name in packages:
        values = (run.environment.get("packages", {}).get(name) for run in runs)
        rows.append([escape(name), *(breakable(_plain(value)) for value in values)])
    return table(["", *(escape(run.name) for run in runs)], rows, "words")


def hardware(runs: Sequence[Material]) -> str:
    """Where each run was made, and how it computed."""
    rows = []
    for title, of in (
        ("system", "system"),
        ("GPUs", "gpus"),
        ("CUDA of torch", "cuda"),
        ("CPU threads", "cpu_threads"),
    ):
        rows.append([title, *(breakable(_plain(run.environment.get(of))) for run in runs)])
    for title in ("device", "precision", "batch"):
        of_test = [run.evaluation.facts.get("settings", {}).get(title) for run in runs]
        rows.append([f"{title} of the test", *(breakable(_plain(value)) for value in of_test)])
    return table(["", *(escape(run.name) for run in runs)], rows, "words")


def flattened(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping) and value
        flat |= flattened(value, f"{above}{name}.") if inner else {f"{above}{name}": value}
    return flat


def _plain(value: Any) -> str:
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return str(value)
