"""The nearest known name to one that is not known: for errors that say what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name that is spelt most like `name`, or None where none comes near."""
    found = difflib.get_close_matches(str(name), list(known), 1, likeness)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that names something unknown: ", did you mean 'x'?", or a full stop."""
    found = nearest(name, known)
    return "." if found is None else f", did you mean {found!r}?"
