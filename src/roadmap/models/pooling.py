"""Pooling: the cells of a feature map, or the patch tokens of a transformer, to one vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roadmap.features import Features


@dataclass(frozen=True)
class Layout:
    """How a backbone's features are laid out.

    Attributes:
        cells: the dimensions that are pooled over; () where only the backbone knows how to pool.
        prefix: tokens before the patch tokens: class, distillation and register tokens.
        class_token: whether the first of them is a class token.
    """

    cells: tuple[int, ...]
    prefix: int = 0
    class_token: bool = False

    @property
    def poolings(self) -> tuple[str, ...]:
        """The poolings that make sense here."""
        return (
            "auto",
            *(("avg", "max", "gem") if self.cells else ()),
            *(("token", "both") if self.class_token else ()),
        )

    def patches(self, features: Tensor) -> Tensor:
        """The features without prefix tokens."""
        return features[:, self.prefix :] if self.prefix else features

    def channels(self, features: Any) -> int | None:
        """How many numbers each cell has; None where only the backbone knows what a cell is."""
        if not self.cells:
            return None
        count: int = features.shape[1 if self.cells == (2, 3) else -1]
        return count

    def features(self, vectors: Tensor, found: Any) -> Features:
        """The vectors with the features that they were pooled from, where those have cells."""
        if len(self.cells) == 2:
            return Features(vectors, map=found if self.cells == (2, 3) else found.permute(0, 3, 1, 2))
        return Features(vectors, tokens=self.patches(found)) if self.cells else Features(vectors)

    def single_cell(self, vectors: Tensor) -> Tensor:
        """(B, C) in the layout of the features, with a single cell; prefix tokens, if any, are equal to it.

        Whatever a backbone's head pools by, it leaves these as they are, and then does what follows its pooling.
        """
        if len(self.cells) == 2:
            return vectors[:, :, None, None] if self.cells == (2, 3) else vectors[:, None, None, :]
        return vectors[:, None, :].expand(-1, self.prefix + 1, -1)


MAP, MAP_CHANNELS_LAST = Layout((2, 3)), Layout((1, 2))


class Pooling(nn.Module):
    """Features in a layout -> (B, C).

    Args:
        kind: "avg", "max", "gem", "token", or "both": the class token and the mean of the patches, side by side.
        layout: of the features.
    """

    def __init__(self, kind: str, layout: Layout) -> None:
        super().__init__()
        self.kind, self.layout = kind, layout
        # Radenović et al. 2018 start at 3 and learn it with the rest.
        self.exponent = nn.Parameter(torch.tensor(3.0)) if kind == "gem" else None

    def forward(self, features: Tensor) -> Tensor:
        if self.kind == "token":
            return features[:, 0]
        patches, cells = self.layout.patches(features), self.layout.cells
        if self.kind == "both":
            return torch.cat([features[:, 0], patches.mean(cells)], dim=1)
        if self.kind == "avg":
            return patches.mean(cells)
        if self.kind == "max":
            return patches.amax(cells)
        assert self.exponent is not None
        return generalised_mean(patches, self.exponent, cells)

    def extra_repr(self) -> str:
        return self.kind


def generalised_mean(features: Tensor, exponent: Tensor, cells: tuple[int, ...], eps: float = 1e-6) -> Tensor:
    """GeM: (mean x^p)^(1/p) over the cells; values below eps count as eps.

    Computed relative to the largest cell of each channel, which changes neither value nor gradient: x^p itself leaves
    float32 for a channel that is dead (1e-6) or large as soon as p is learned upwards.
    """
    features = features.clamp(min=eps)
    largest = features.amax(cells, keepdim=True).detach()
    mean: Tensor = (features / largest).pow(exponent).mean(cells, keepdim=True).pow(1 / exponent)
    found = largest * mean
    for cell in sorted(cells, reverse=True):  # one by one: the ONNX exporter knows no other way
        found = found.squeeze(cell)
    return found
