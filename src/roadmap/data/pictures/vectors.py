"""A pack of vectors: what a frozen backbone made of pictures, in the place of their pixels."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roadmap.data.pictures.contents import PackError
from roadmap.data.pictures.packs import picture_key
from roadmap.data.records import Ints, Records

NONE = -1  # the row of a picture that could not be decoded


@dataclass(frozen=True, eq=False)
class VectorPack:
    """What N pictures came to, found by path; training and evaluation read it as they read a `Pack` of pixels.

    Attributes:
        keys: of the pictures (`picture_key`).
        rows: (N,) which row of `vectors` is each picture's; `NONE` where there is none.
        vectors: (R, W) float32, shared by all selections.
        failures: key -> reason, of pictures that could not be decoded.
        origin: where they come from, in words.
    """

    keys: tuple[str, ...]
    rows: Ints
    vectors: NDArray[np.float32]
    failures: dict[str, str]
    origin: str

    def __len__(self) -> int:
        return len(self.keys)

    def usable(self, indices: Ints | slice = slice(None)) -> NDArray[np.bool_]:
        """Which pictures have a vector: of all, or of some."""
        return np.asarray(self.rows[indices] != NONE)

    def reason(self, index: int) -> str:
        """Why picture `index` has none."""
        return self.failures.get(self.keys[index], "not decoded when its vector was to be computed")

    def of(self, records: Records) -> VectorPack:
        """Those of `records`, a split or a selection: in their order.

        Raises:
            PackError: when pictures are not among them.
        """
        place = dict(zip(self.keys, self.rows.tolist(), strict=True))
        keys = tuple(picture_key(records, i) for i in range(len(records)))
        if missing := [key for key in keys if key not in place]:
            raise PackError(f"{len(missing)} of {len(keys)} pictures have no vector here, the first is {missing[0]}")
        return dataclasses.replace(self, keys=keys, rows=np.asarray([place[key] for key in keys], dtype=np.int64))
