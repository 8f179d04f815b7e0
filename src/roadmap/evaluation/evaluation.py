"""`Evaluation`: what was measured, query by query, in memory and on disk. What is loaded cannot run code."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roadmap.atomic import NPZ_DAMAGE, whole_file
from roadmap.data import UNLABELLED

FORMAT, VERSION = "roadmap-evaluation", 1
PER_QUERY = "per_query "  # stands before the names of these arrays in a file


@dataclass(frozen=True, eq=False)
class Evaluation:
    """M queries and what was found for each, in a gallery of N items, which may be the queries themselves.

    Attributes:
        metrics: name -> mean over the queries, or count.
        per_query: name -> (M,) float64, NaN for a query without positives.
        labels: (M,) int64 of the queries, -1 for none; `class_names` names them.
        positives: (M,) int64, how many items there were to find.
        ids: M names of the queries; None where they have none.
        class_names: of queries and gallery.
        neighbours: (M, K) int64, the nearest gallery items, by the scores that the metrics rank by; the query itself is
            not among them, and -1 stands where there are fewer than K. Of equal scores, where these count against
            the query, items of other classes come first.
        scores: (M, K), their cosines with the query.
        gallery_labels: (N,) int64.
        gallery_ids: N names; None where they have none.
        facts: model, data and settings, as plain JSON values.
    """

    metrics: dict[str, float]
    per_query: dict[str, Tensor]
    labels: Tensor
    positives: Tensor
    ids: tuple[str, ...] | None
    class_names: tuple[str, ...]
    neighbours: Tensor
    scores: Tensor
    gallery_labels: Tensor
    gallery_ids: tuple[str, ...] | None
    facts: dict[str, Any]

    def class_name(self, label: int) -> str:
        """What a label is called; its number where classes have no names."""
        if not self.class_names:
            return str(label)
        return "unlabelled" if label == UNLABELLED else self.class_names[label]

    @property
    def title(self) -> str:
        """What was measured, in a line."""
        return str(self.facts["title"])

    def write_json(self, path: str | Path) -> None:
        """Writes facts and metrics, whole or not at all; a mean over no query is null."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            Path(temporary).write_text(json.dumps(_finite({**self.facts, "metrics": self.metrics}), indent=2) + "\n")

    def save(self, path: str | Path) -> None:
        """Writes everything into a .npz file, whole or not at all."""
        path = Path(path)
        if path.suffix != ".npz":
            raise ValueError(f"{path} must end in .npz, got {path.suffix or 'no ending'!r}")
        text = {
            "format": FORMAT,
            "version": VERSION,
            "metrics": self.metrics,
            "ids": self.ids,
            "class_names": self.class_names,
            "gallery_ids": "the same" if self.gallery_ids is self.ids else self.gallery_ids,
            "facts": self.facts,
        }
        arrays = {name: getattr(self, name).cpu().numpy() for name in ARRAYS}
        arrays |= {f"{PER_QUERY}{name}": values.cpu().numpy() for name, values in self.per_query.items()}
        arrays["text"] = np.frombuffer(json.dumps(text).encode("ascii"), dtype=np.uint8)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Evaluation:
        """Reads what `save` wrote."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist or is not a file")
        try:
            with np.load(path, allow_pickle=False) as content:
                arrays = {name: torch.from_numpy(content[name]) for name in content.files}
            text = json.loads(arrays.pop("text").numpy().tobytes())
            if text["format"] != FORMAT or text["version"] > VERSION:
                raise ValueError(f"format {text['format']!r} {text['version']}, this version reads up to {VERSION}")
        except (*NPZ_DAMAGE, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no evaluation that could be read: {error}") from error
        ids = None if text["ids"] is None else tuple(text["ids"])
        others = ids if text["gallery_ids"] == "the same" else text["gallery_ids"]
        return cls(
            metrics=text["metrics"],
            per_query={name.removeprefix(PER_QUERY): v for name, v in arrays.items() if name.startswith(PER_QUERY)},
            ids=ids,
            class_names=tuple(text["class_names"]),
            gallery_ids=None if others is None else tuple(others),
            facts=text["facts"],
            **{name: arrays[name] for name in ARRAYS},
        )


ARRAYS = ("labels", "positives", "neighbours", "scores", "gallery_labels")


def _finite(value: Any) -> Any:
    """As JSON can hold it: it has neither NaN nor infinity."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
