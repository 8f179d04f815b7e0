"""Search: an index of vectors with metadata, the engines it runs on, and filters.

    from roadmap.search import Index

`Index` is the whole of it: `create`, `open`, `add`, `remove`, `search`, `rank_of`, `sync`, `build`, `facts`.
`index_pictures` fills one from a folder, `encoder_of` gives its model back, `refined_search` finds better answers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from roadmap.search.engines import ENGINES, installed
from roadmap.search.index import Index
from roadmap.search.manifest import Manifest
from roadmap.search.metadata import Described
from roadmap.search.results import Rank, Results
from roadmap.search.rows import FileFacts
from roadmap.search.syncing import Changes
from roadmap.search.vectors import DamagedEngineError, DamagedError

if TYPE_CHECKING:
    from roadmap.search.answers import refined_search as refined_search
    from roadmap.search.compacting import compact as compact
    from roadmap.search.drawing import draw_results as draw_results
    from roadmap.search.filter_text import filter_of_texts as filter_of_texts
    from roadmap.search.gathering import Pictures as Pictures
    from roadmap.search.gathering import pictures_of as pictures_of
    from roadmap.search.indexing import Indexed as Indexed
    from roadmap.search.indexing import encoder_of as encoder_of
    from roadmap.search.indexing import index_pictures as index_pictures

# These need models and pictures, and are imported when first used: an index of vectors needs neither.
_HOME_OF = {
    "refined_search": "answers",
    "compact": "compacting",
    "draw_results": "drawing",
    "filter_of_texts": "filter_text",
    "Pictures": "gathering",
    "pictures_of": "gathering",
    "Indexed": "indexing",
    "encoder_of": "indexing",
    "index_pictures": "indexing",
}

__all__ = [
    "ENGINES",
    "Changes",
    "DamagedEngineError",
    "DamagedError",
    "Described",
    "FileFacts",
    "Index",
    "Indexed",
    "Manifest",
    "Pictures",
    "Rank",
    "Results",
    "compact",
    "draw_results",
    "encoder_of",
    "filter_of_texts",
    "index_pictures",
    "installed",
    "pictures_of",
    "refined_search",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
