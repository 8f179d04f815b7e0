"""What a network makes of a batch of pictures, before and after it is pooled: the value that auxiliary modules see."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Features(NamedTuple):
    """What a network makes of a batch of B pictures. One of `map` and `tokens` is there, the other is None.

    Attributes:
        embedding: (B, D), the vectors that the loss sees; of length 1, unless `model.normalise` is false.
        map: (B, C, H, W) cells of a convolutional network before they are pooled.
        tokens: (B, T, C) patch tokens of a transformer, without class and register tokens.
        pictures: (B,) which of the training pictures they are, counted from 0; None outside of a run.
    """

    embedding: Tensor
    map: Tensor | None = None
    tokens: Tensor | None = None
    pictures: Tensor | None = None

    @property
    def cells(self) -> Tensor:
        """(B, T, C): the cells of the map, row by row, or the tokens."""
        if self.map is not None:
            return self.map.flatten(2).transpose(1, 2)
        if self.tokens is None:
            raise ValueError("these features have neither a map nor tokens: only the backbone knows how to pool them")
        return self.tokens
