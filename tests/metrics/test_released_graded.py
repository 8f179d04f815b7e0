"""Metrics by a tree of labels: what the code released with HAPPIER gave for every query of one set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from roadmap.metrics import graded_metrics

RELEASED: dict[str, Any] = json.loads((Path(__file__).parent / "released_graded.json").read_text(encoding="utf-8"))
LEVELS = [f"level {number} {name}" for number in (1, 2, 3) for name in ("R@1", "mAP@R")]
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    *((name, name, {}) for name in ("H-AP", "ASI", "NDCG", *LEVELS)),
    ("H-AP, alpha 2", "H-AP", {"alpha": 2.0}),
    ("H-AP, weights", "H-AP", {"weights": (0.5, 0.25, 0.25)}),
]


@pytest.mark.parametrize(("told", "name", "options"), CALLS, ids=[call[0] for call in CALLS])
def test_graded_metrics_are_the_released_ones(told: str, name: str, options: dict[str, Any]) -> None:
    vectors = torch.tensor(RELEASED["vectors"], dtype=torch.float64)
    _, found = graded_metrics(vectors, torch.tensor(RELEASED["paths"]), per_query=True, **options)
    torch.testing.assert_close(found[name], torch.tensor(RELEASED[told], dtype=torch.float64), rtol=0, atol=2e-7)
