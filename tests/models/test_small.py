"""The small network: what goes in and out of it, that no stroke is lost, and that every part of it learns."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from roadmap.models.small import SmallCNN


@pytest.mark.parametrize(("side", "cells"), [(8, 1), (28, 3), (32, 4), (33, 4), (64, 8)])
def test_the_map_is_an_eighth_of_the_picture(side: int, cells: int) -> None:
    network = SmallCNN()
    assert network(torch.randn(2, 3, side, side)).shape == (2, network.channels, cells, cells)
    assert network.channels == 256


def test_widths_are_those_of_the_four_blocks() -> None:
    network = SmallCNN((4, 6, 8, 10))
    assert network.channels == 10
    convolutions = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    assert [c.out_channels for c in convolutions] == [4, 6, 8, 10]
    assert len(network.blocks) == 4
    assert network(torch.randn(1, 3, 32, 32)).shape == (1, 10, 4, 4)


def test_every_parameter_learns() -> None:
    network = SmallCNN((4, 6, 8, 10))
    (network(torch.randn(4, 3, 32, 32)) * torch.randn(4, 10, 4, 4)).sum().backward()
    silent = [name for name, p in network.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert silent == []


def test_a_stroke_of_one_pixel_changes_the_features_where_it_lies() -> None:
    """Thin strokes tell glyphs apart: striding at once must not lose any."""
    network = SmallCNN().eval()
    blank = torch.zeros(1, 3, 32, 32)
    before = network(blank)
    for place in range(32):
        stroke = blank.clone()
        stroke[:, :, 16, place] = 1
        change = (network(stroke) - before).abs().amax(dim=(0, 1))
        assert change.max() > 1e-3
        assert (change > 0)[:, place // 8].any()


def test_variance_is_kept_by_the_initial_weights() -> None:
    """In training mode BatchNorm hides it; without it, features neither vanish nor explode."""
    torch.manual_seed(0)
    network = SmallCNN().eval()
    deviation = network(torch.randn(8, 3, 32, 32)).std().item()
    assert 0.1 < deviation < 10


def test_channels_last_gives_the_same() -> None:
    torch.manual_seed(0)
    network, images = SmallCNN().eval(), torch.randn(2, 3, 32, 32)
    plain = network(images)
    last = network.to(memory_format=torch.channels_last)(images.contiguous(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(plain, last, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 1, 32, 32), (2, 3, 32, 7)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"S of 8 pixels or more, got {shape}")):
        SmallCNN((2, 2, 2, 2))(torch.zeros(shape))


@pytest.mark.parametrize("widths", [(32, 64), (1, 2, 3, 0)])
def test_other_widths_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"four positive numbers of channels, got {widths}")):
        SmallCNN(widths)


def test_shapes_are_seen_and_not_only_pixels() -> None:
    """A mirrored glyph is another one: kernels of one pixel would give the same features in mirrored order."""
    network, images = SmallCNN().eval(), torch.rand(2, 3, 32, 32)
    mirrored = network(images.flip(3)).flip(3)
    assert (mirrored - network(images)).abs().mean() > 0.05 * network(images).abs().mean()
