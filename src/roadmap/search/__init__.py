"""Search: an index of vectors with metadata, the engines it runs on, and filters.

    from roadmap.search import Index

`Index` is the whole of it: `create`, `open`, `add`, `remove`, `search`, `rank_of`, `sync`, `build`, `facts`.
"""

from __future__ import annotations

from roadmap.search.engines import ENGINES, installed
from roadmap.search.index import Index
from roadmap.search.manifest import Manifest
from roadmap.search.metadata import Described
from roadmap.search.results import Rank, Results
from roadmap.search.rows import FileFacts
from roadmap.search.syncing import Changes
from roadmap.search.vectors import DamagedError

__all__ = [
    "ENGINES",
    "Changes",
    "DamagedError",
    "Described",
    "FileFacts",
    "Index",
    "Manifest",
    "Rank",
    "Results",
    "installed",
]
