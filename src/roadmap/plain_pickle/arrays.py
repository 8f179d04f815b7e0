"""Arrays of a pickle: text and bytes first, numpy's only once everything about them is known to be harmless."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_BYTES = 128 << 20  # of a file, and of what it says to encode and to copy; the lists of SfM-120k take about 10 MB
MAX_VALUES = 10_000_000  # instructions of a file, items of an array
KIND = re.compile(r"b1|[iu][1248]|f[248]|c8|c16|[US](0|[1-9][0-9]{0,5})")
LAST_CHARACTER = 0x10FFFF


class RefusedError(ValueError):
    """Something that a plain pickle does not hold."""


class Kind:
    """A dtype that is being read: the kind of its items and their byte order, as text."""

    def __init__(self, kind: Any) -> None:
        text = kind.decode("latin1") if isinstance(kind, bytes) else kind
        if isinstance(text, str) and text.startswith("O"):
            raise RefusedError("refused an array of Python objects")
        if not isinstance(text, str) or not KIND.fullmatch(text):
            raise RefusedError(f"refused an array of kind {brief(kind)}; only numbers and text are read")
        self.text, self.order = text, "="

    def build(self, state: Any) -> None:
        """Takes the byte order of a dtype's state. Its sizes and flags are not believed: the kind says them."""
        if not isinstance(state, tuple) or len(state) < 5 or state[1] not in ("<", ">", "|", "="):
            raise RefusedError(f"refused a dtype with the state {brief(state)}")
        if any(part is not None for part in state[2:5]):
            raise RefusedError("refused an array of compound items")
        self.order = state[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.order + self.text)


class Hollow:
    """An array that the file has announced; `values` once it is filled."""

    values: NDArray[Any] | None = None


class Buffers:
    """Makes arrays and bytes. One text could be encoded again and again, so what is made is counted."""

    def __init__(self) -> None:
        self.made = 0

    def bytes_of(self, raw: Any) -> bytes:
        if not isinstance(raw, (bytes, bytearray, str)):
            raise RefusedError(f"refused {brief(raw)} as the bytes of an array")
        self.made += len(raw)
        if self.made > MAX_BYTES:
            raise RefusedError(f"refused: its arrays take more than the {MAX_BYTES:,} bytes allowed")
        return raw.encode("latin1") if isinstance(raw, str) else bytes(raw)  # as str: what Python 2 called bytes

    def array(self, raw: Any, kind: Kind, shape: tuple[Any, ...], order: Any = "C") -> NDArray[Any]:
        """An array in memory of its own, in this machine's byte order. It takes all of the bytes, no more, no fewer."""
        if len(shape) > 16 or any(type(side) is not int or side < 0 for side in shape):
            raise RefusedError(f"refused an array of shape {brief(shape)}")
        if math.prod(max(side, 1) for side in shape) > MAX_VALUES:
            raise RefusedError(f"refused an array of shape {brief(shape)}: more than {MAX_VALUES:,} items")
        dtype, buffer = kind.dtype, self.bytes_of(raw)
        if len(buffer) != (needed := math.prod(shape) * dtype.itemsize):
            raise RefusedError(
                f"an array of {kind.text} and shape {brief(shape)} takes {needed} bytes, not {len(buffer)}"
            )
        if dtype.itemsize == 0 and shape:  # numpy would give each item a byte that the file has not
            raise RefusedError(f"refused an array of kind {kind.text}")
        if kind.text == "b1" and buffer.strip(b"\0\1"):
            raise RefusedError("refused truth values other than 0 and 1")
        values: NDArray[Any] = np.zeros(shape, dtype.newbyteorder("="), order)
        if not buffer:
            return values
        if kind.text[0] == "U" and (np.frombuffer(buffer, kind.order.replace("|", "=") + "u4") > LAST_CHARACTER).any():
            raise RefusedError("refused text of characters that do not exist")
        values[...] = np.frombuffer(buffer, dtype).reshape(shape, order=order)
        return values

    def transpose(self, raw: Any, kind: Kind, shape: tuple[Any, ...], axes: tuple[Any, ...]) -> NDArray[Any]:
        """An array whose sides are written in another order than they are meant."""
        if len(axes) != len(shape) or any(type(a) is not int for a in axes) or sorted(axes) != list(range(len(axes))):
            raise RefusedError(f"refused an array with the axes {brief(axes)}")
        values: NDArray[Any] = self.array(raw, kind, shape).transpose(axes)
        return values


def brief(value: Any) -> str:
    """A few words for a value of a file: never all of it, which might be without end."""
    if isinstance(value, (str, bytes)):
        return repr(value[:40])
    if value is None or isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, tuple) and len(value) <= 16 and all(type(part) is int for part in value):
        return str(value)
    return f"a {type(value).__name__}"
