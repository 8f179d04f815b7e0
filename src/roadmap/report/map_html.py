"""The map of a report: every picture once, in a sheet of small ones, and where each model puts it."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from roadmap.data.records import Ints
from roadmap.report.mapping import OF_A_CLASS, turned
from roadmap.report.material import Material
from roadmap.report.retrievals import Side

CELL = 44  # side of a small picture on the sheet
SCALE = 10_000  # places are whole numbers up to it


def map_data(runs: Sequence[Material], side: Side) -> dict[str, Any] | None:
    """What the script of the page draws: places, classes, files and the sheet; None where no map is known.

    All maps show the same pictures, and are turned to lie as the first does.
    """
    found = [
        (f"{run.name}{', before training' if which == 'before' else ''}", run.measures[which])
        for which in ("after", "before")
        for run in runs
        if which in run.measures
    ]
    if not found:
        return None
    places, first = found[0][1].places, found[0][1].flat
    maps = []
    for name, measures in found:
        flat = first if measures.flat is first else turned(measures.flat, first)
        maps.append({"name": name, "how": measures.how, "at": np.rint(flat * SCALE).astype(int).ravel().tolist()})
    labels = side.labels[places]
    names = {int(label): side.class_name(int(row)) for label, row in zip(labels.tolist(), places.tolist(), strict=True)}
    order = sorted(names, key=lambda label: (names[label].casefold(), label))
    sheet, columns = sprite_sheet(side, places)
    return {
        "maps": maps,
        "classes": [names[label] for label in order],
        "class": [order.index(label) for label in labels.tolist()],
        "files": [side.file(row) for row in places.tolist()],
        "sheet": sheet,
        "columns": columns,
        "cell": CELL,
        "scale": SCALE,
    }


def sprite_sheet(side: Side, places: Ints) -> tuple[str, int]:
    """The pictures cut to squares, side by side in one JPEG as a data address; and how many stand in a line."""
    columns = max(1, math.ceil(math.sqrt(len(places))))
    lines = math.ceil(len(places) / columns)
    sheet = Image.new("RGB", (columns * CELL, lines * CELL), (128, 128, 128))
    for number, row in enumerate(places.tolist()):
        tile = ImageOps.fit(Image.fromarray(side.pixels(row)), (CELL, CELL), Image.Resampling.LANCZOS)
        sheet.paste(tile, (number % columns * CELL, number // columns * CELL))
    buffer = io.BytesIO()
    sheet.save(buffer, "JPEG", quality=78, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}", columns


def map_section(data: dict[str, Any], everything: int, searched: str) -> str:
    """The place of the map on the page, its controls, and its data for the script."""
    count = len(data["files"])
    shown = (
        f"All {count:,} {searched}."
        if count == everything
        else f"{count:,} of {everything:,} {searched}: up to {OF_A_CLASS} of each of {len(data['classes']):,} classes."
    )
    hows = " ".join(dict.fromkeys(f"The map is made by {one['how']}." for one in data["maps"]))
    maps = "".join(f'<option value="{i}">{escape(one["name"])}</option>' for i, one in enumerate(data["maps"]))
    names = "".join(f'<option value="{i}">{escape(name)}</option>' for i, name in enumerate(data["classes"]))
    content = json.dumps(data, ensure_ascii=True)
    for letter in "<>&":  # names are others' text: none of it may end the script
        content = content.replace(letter, f"\\u{ord(letter):04x}")
    return f"""<p class="about">{escape(shown)} What the model takes for alike lies together. {escape(hows)} Distances
between far groups mean little. Colours tell classes apart, but there are more classes than colours.</p>
<div class="controls">
<label>model <select id="map-model">{maps}</select></label>
<label>class <select id="map-class"><option value="-1">all</option>{names}</select></label>
<span class="buttons"><button type="button" id="map-in" aria-label="zoom in">+</button>
<button type="button" id="map-out" aria-label="zoom out">−</button>
<button type="button" id="map-whole">whole</button></span>
</div>
<div id="map-box"><canvas tabindex="0" role="application" aria-label="Map of the test set. Arrows move, plus and minus
zoom, 0 shows the whole. Pictures appear when there is room for them."></canvas>
<div id="map-label" role="status"></div></div>
<p class="about hint">Drag to move, turn the wheel or pinch to zoom; with the keyboard: arrows, + and −, 0 for the
whole. Rest on a point, or touch it, to see its picture; click it to mark its class.</p>
<noscript><p>The map needs a browser that runs scripts. Everything else on this page does not.</p></noscript>
<script type="application/json" id="map-data">{content}</script>
"""
