"""What was published, as data; every table and figure as something to run; statistics to compare runs by.

compare(["runs/sweep_..."])             runs side by side, with p-values
experiment("table3", dataset="glyphs")  rows, each a training run, beside their published numbers
gap_of(embeddings, BatchChoice())       the decomposability gap (Eq. 6)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roadmap.experiments.definitions import Experiment, experiment
    from roadmap.experiments.gap import BatchChoice, Gap, gap_of
    from roadmap.experiments.standings import Standings, compare

__all__ = ["BatchChoice", "Experiment", "Gap", "Standings", "compare", "experiment", "gap_of"]
_HOMES = {"Experiment": "definitions", "experiment": "definitions", "Standings": "standings", "compare": "standings"}


def __getattr__(name: str) -> Any:
    # published numbers are read by `roadmap train --help`, which does not wait for torch
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'gap')}"), name)
