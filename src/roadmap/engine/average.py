"""A moving average of the weights: steadier than the weights themselves, and free at evaluation."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class WeightAverage(nn.Module):
    """avg <- decay * avg + (1 - decay) * weights after every step, with a shorter memory in the first steps.

    Statistics such as BatchNorm's are copied, not averaged.

    Args:
        model: whose weights are averaged; it is copied.
        decay: of the average; the first steps use (1 + step) / (10 + step) where that is smaller, so that the
            starting weights are forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        if not 0 < decay < 1:
            raise ValueError(f"optim.ema must lie strictly between 0 and 1, got {decay}")
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """After step `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages: list[Tensor] = list(self.model.parameters())
        weights: list[Tensor] = list(model.parameters())
        torch._foreach_lerp_(averages, weights, 1 - decay)
        for kept, current in zip(self.model.buffers(), model.buffers(), strict=True):
            kept.copy_(current)
