"""The curves and pictures of a run for TensorBoard, where that is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# No curves: what never changes, and what another curve shows already (P@1 is R@1, the AP loss is 1 - mAP).
NO_CURVE, NO_ENDING = ("epoch", "P@1"), ("AP loss", "queries", "queries_without_positives")
RATE = "lr"  # a curve only where it changes


class Board:
    """Writes to a folder when there is something to write; without TensorBoard, nothing.

    Args:
        folder: of the curves.
        first: the first step that is written again, what was there from it on is hidden; None: nothing was there.
    """

    def __init__(self, folder: Path, first: int | None = None) -> None:
        self.folder, self.first = folder, first
        self._writer: Any = None
        self._rates: dict[str, float] = {}

    def add(self, group: str, step: int, values: Mapping[str, Any]) -> None:
        """The numbers among the values, each a point of its curve."""
        for name, value in values.items():
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                continue
            if name in NO_CURVE or name.endswith(NO_ENDING):
                continue
            tag = f"{group}/{name}"
            if name == RATE and self._rates.get(tag) == value:
                continue
            if name == RATE:
                self._rates[tag] = float(value)
            if (writer := self._open()) is not None:
                writer.add_scalar(tag, value, step)

    def add_picture(self, name: str, step: int, pixels: NDArray[np.uint8]) -> None:
        """Pixels (H, W, 3)."""
        if (writer := self._open()) is not None:
            writer.add_image(name, pixels, step, dataformats="HWC")

    def is_there(self) -> bool:
        """Whether anything would be written."""
        return self._open() is not None

    def _open(self) -> Any:
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:  # optional: metrics.jsonl has every number
                self._writer = False
            else:
                self._writer = SummaryWriter(str(self.folder), purge_step=self.first)
        return self._writer or None

    def close(self) -> None:
        if self._writer:
            self._writer.close()
        self._writer = None
