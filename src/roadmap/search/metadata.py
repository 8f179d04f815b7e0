"""What comes into an index, checked: columns, ids, labels and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from roadmap.names import did_you_mean
from roadmap.search.filters import JOINTS, KINDS, checked_value

# Always there: the id of a row, and the name of its class (None for a picture without one).
BUILT_IN = {"id": "text", "label": "text"}
UNLABELLED = -1


class Described(Protocol):
    """What `roadmap.embeddings.Embeddings` is: vectors that say what they are of and where they come from."""

    @property
    def vectors(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def ids(self) -> tuple[str, ...] | None: ...
    @property
    def class_names(self) -> tuple[str, ...]: ...
    @property
    def about(self) -> Mapping[str, Any]: ...


def checked_columns(columns: Mapping[str, str]) -> dict[str, str]:
    """All columns of an index, the built-in ones first. Raises ValueError where a name or kind is not allowed."""
    for name, kind in columns.items():
        if not isinstance(name, str) or not name.strip() or name in JOINTS:
            raise ValueError(f"a column cannot be called {name!r}; {', '.join(JOINTS)} and empty names are taken")
        if kind not in KINDS:
            raise ValueError(f"column {name!r}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if name in BUILT_IN and kind != BUILT_IN[name]:
            raise ValueError(f"column {name!r} is always there and holds {BUILT_IN[name]}, not {kind}")
    return {**BUILT_IN, **columns}


def checked_metadata(
    embeddings: Described, metadata: Mapping[str, Sequence[Any]], columns: Mapping[str, str]
) -> dict[str, list[Any]]:
    """Every column's values for these embeddings, as the index keeps them; missing columns are all None.

    Raises:
        ValueError: no ids, an unknown column, another number of values, or a value of another kind; says which.
    """
    count = len(embeddings.vectors)
    if embeddings.ids is None:
        raise ValueError("an index needs an id for each vector; these embeddings have none")
    if "id" in metadata:
        raise ValueError("ids come from the embeddings, not from the metadata")
    for name, values in metadata.items():
        if name not in columns:
            raise ValueError(
                f"the index has no column {name!r}, only {', '.join(columns)}{did_you_mean(name, columns)} "
                "Columns are chosen when it is made."
            )
        if isinstance(values, str) or len(values) != count:
            raise ValueError(f"column {name!r} must have {count} values, one for each vector, got {len(values)}")
    given = {"label": _labels(embeddings), **metadata, "id": list(embeddings.ids)}
    found = {
        name: [checked_value(value, kind, name) for value in given.get(name, [None] * count)]
        for name, kind in columns.items()
    }
    if any(not name for name in found["id"]):
        raise ValueError("an id is empty; every vector needs one")
    if len(set(found["id"])) != count:
        raise ValueError(f"ids must be distinct: {count} vectors, {len(set(found['id']))} distinct ids")
    return found


def _labels(embeddings: Described) -> list[str | None]:
    """Names of the classes; the number as text where classes have no names."""
    names = embeddings.class_names
    numbers = embeddings.labels.tolist()
    if names:
        return [None if number == UNLABELLED else names[number] for number in numbers]
    return [str(number) for number in numbers]
