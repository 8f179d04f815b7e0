"""Names as people see them: the nearest known one to one that is not known, and where a long one may be broken; and one
of a file, for which several floors look."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

CHECKPOINT = Path("checkpoints") / "best.safetensors"  # the chosen weights of a run, inside its folder


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name that is spelt most like `name`, or None where none comes near."""
    found = difflib.get_close_matches(str(name), list(known), 1, likeness)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that names something unknown: ", did you mean 'x'?", or a full stop."""
    found = nearest(name, known)
    return "." if found is None else f", did you mean {found!r}?"


def did_you_mean_setting(key: str, known: Iterable[str]) -> str:
    """The same for dotted names, such as optim.lr: by the last part if that is unique, else by spelling."""
    names = list(dict.fromkeys(known))
    tail = key.rpartition(".")[2]
    tails = {name.rpartition(".")[2]: name for name in reversed(names)}
    same = [name for name in names if name.rpartition(".")[2] == tail]
    found = same[0] if len(same) == 1 else nearest(key, names) or tails.get(nearest(tail, tails, 0.75) or "")
    return f", did you mean {found!r}?" if found else "."


def breakable(name: str) -> str:
    """A name as HTML, whole; where it is long it may be broken after a separator."""
    return re.sub(r"([/_.,-]|&amp;)(?=.)", r"\1<wbr>", escape(name))


def is_text(name: str) -> bool:
    """Whether a name is text: that of a file may hold any bytes, and those that are not UTF-8 are no letters."""
    return printable(name) == name


def printable(name: str) -> str:
    """A name as text, bytes that are not UTF-8 written out."""
    return name.encode("utf-8", "backslashreplace").decode()
