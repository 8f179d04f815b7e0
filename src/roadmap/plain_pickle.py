"""Reading published pickles without running what they say.

A pickle is a program. The ground truth of the revisited landmarks and the lists of SfM-120k are published as
pickles that hold only lists, dicts, strings, numbers and numpy arrays; this reader knows the few callables that
numpy arrays need and refuses every other name.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def _latin1(text: str, encoding: str) -> bytes:
    """The one use numpy arrays pickled with protocol 2 make of `_codecs.encode`."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"refused: _codecs.encode with encoding {encoding!r}")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """Protocols below 3 have no word for b"" and call `bytes` for it, as for the buffer of an empty array."""
    return b""


def _hollow_array(subtype: type, shape: tuple[int, ...], kind: bytes) -> NDArray[Any]:
    """An empty array, which the pickle then fills through `ndarray.__setstate__`."""
    empty: NDArray[Any] = np.ndarray((0,), np.int8)
    return empty


def _scalar(dtype: np.dtype[Any], raw: bytes = b"") -> Any:
    if dtype.hasobject:
        raise pickle.UnpicklingError("refused: a numpy scalar that holds a Python object")
    return np.frombuffer(raw, dtype)[0]


def _array(buffer: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any) -> NDArray[Any]:
    values: NDArray[Any] = np.frombuffer(buffer, dtype).reshape(shape, order=order)
    return values


# What pickled arrays ask for, under numpy's old and new module names, answered with functions of our own.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
    ("__builtin__", "bytes"): _no_bytes,
}
for _core in ("numpy.core", "numpy._core"):
    _ALLOWED[f"{_core}.multiarray", "_reconstruct"] = _hollow_array
    _ALLOWED[f"{_core}.multiarray", "scalar"] = _scalar
    _ALLOWED[f"{_core}.numeric", "_frombuffer"] = _array


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise pickle.UnpicklingError(
            f"refused: the pickle asks for {module}.{name}; only lists, dicts, strings, numbers and numpy arrays "
            "are read, because anything else could run code"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"refused: the pickle has a persistent reference {pid!r}")


def plain_pickle(path: str | Path) -> Any:
    """The lists, dicts, strings, numbers and numpy arrays of a pickle.

    Raises:
        ValueError: naming the file, when it holds anything else or is damaged.
    """
    try:
        # latin1: pickles written by Python 2 hold byte strings, among them the buffers of arrays
        value = _PlainUnpickler(io.BytesIO(Path(path).read_bytes()), encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a plain pickle: {error}") from error
    _check_plain(value, Path(path))
    return value


def _check_plain(value: Any, path: Path) -> None:
    """An array of Python objects could carry anything; nothing published needs one."""
    if isinstance(value, dict):
        for part in value.values():
            _check_plain(part, path)
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            _check_plain(part, path)
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        raise ValueError(f"{path} is not a plain pickle: refused an array of Python objects")
