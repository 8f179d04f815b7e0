"""Which engines there are, and what each may be told. Checked before anything is made or changed, so that no index is
left with an engine that cannot be opened."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from roadmap.names import did_you_mean

ENGINES = ("exact", "faiss", "milvus")
NEEDS = {"faiss": "faiss", "milvus": "pymilvus"}
KINDS = ("auto", "flat", "hnsw", "ivfpq")
DEVICES = ("auto", "cpu", "cuda")
Check = tuple[Callable[[Any], bool], str]  # whether a value can be, and which can


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _one_of(*allowed: str) -> Check:
    return lambda value: value in allowed, f"one of {', '.join(allowed)}"


TEXT: Check = (lambda value: isinstance(value, str) and value != "", "a text")
COUNT: Check = (lambda value: _number(value) and value == int(value) and value >= 1, "a whole number of at least 1")
SECONDS: Check = (lambda value: _number(value) and 0 < value < float("inf"), "a number of seconds above 0")
SHARE: Check = (lambda value: _number(value) and 0 < value <= 1, "a number above 0 and at most 1")
OPTIONS: Mapping[str, Mapping[str, Check]] = {
    "exact": {"device": _one_of(*DEVICES)},
    "faiss": {"kind": _one_of(*KINDS), "recall": SHARE},
    "milvus": {
        "uri": TEXT,
        "collection": TEXT,
        "timeout": SECONDS,
        **dict.fromkeys(("shards", "M", "efConstruction", "ef"), COUNT),
    },
}


def installed(name: str) -> bool:
    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None


def check_engine(name: str, options: Mapping[str, Any]) -> None:
    """There is such an engine here, and it can be told this.

    Raises:
        ValueError: no engine of this name, no such option, or a value that cannot be.
        ImportError: its library is not installed; says how to install it.
    """
    if name not in ENGINES:
        raise ValueError(f"engine must be auto, {', '.join(ENGINES)}, got {name!r}{did_you_mean(name, ENGINES)}")
    known = OPTIONS[name]
    for option, value in options.items():
        if option not in known:
            raise ValueError(
                f"{name} has no option {option!r}, only {', '.join(known)}{did_you_mean(option, known).rstrip('.')}"
            )
        fits, allowed = known[option]
        if not fits(value):
            raise ValueError(f"{name}: {option} must be {allowed}, got {value!r}")
    if not installed(name):
        raise ImportError(f"the engine {name!r} needs {NEEDS[name]}: pip install 'roadmap-retrieval[search]'")
