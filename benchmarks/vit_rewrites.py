"""A ViT written otherwise, with the same weights and the same mathematics: trials of a faster step for `bench_step.py`.

`patches`, `scales` and `flex` give the same numbers up to rounding. `stream` rounds what passes between blocks to
bfloat16, and `halves` the weights that are multiplied with: they change what is learned in the last digits, and need
trainings to show that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from roadmap.models import Retriever


class PatchProduct(nn.Module):
    """A convolution whose stride is its kernel, as the product it is: (B, C, H, W) -> (B, D, H/p, W/p)."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        if convolution.stride != convolution.kernel_size or convolution.padding != (0, 0) or convolution.groups != 1:
            raise ValueError(f"patches overlap, or there is padding or groups: {convolution}")
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, x: Tensor) -> Tensor:
        (count, channels, height, width), (p, q) = x.shape, self.weight.shape[2:]
        rows, columns = height // p, width // q
        patches = x.reshape(count, channels, rows, p, columns, q).permute(0, 2, 4, 1, 3, 5)
        tokens = F.linear(patches.reshape(count, rows * columns, -1), self.weight.flatten(1), self.bias)
        return tokens.transpose(1, 2).unflatten(2, (rows, columns))


class ScaledLinear(nn.Module):
    """A linear layer with the LayerScale behind it in its weights: gamma (W x + b) = (gamma W) x + gamma b."""

    def __init__(self, linear: nn.Linear, gamma: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias, self.gamma = linear.weight, linear.bias, gamma

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.gamma[:, None], self.bias * self.gamma)


class FlexAttention(nn.Module):
    """timm's attention by torch's FlexAttention, in tiles of 64: with 257 tokens tiles of 128 waste half of the work.

    On a CPU it has no gradient.
    """

    TILES: ClassVar = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_M1": 64, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 64}

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = attention.qkv, attention.proj, attention.num_heads

    def forward(self, x: Tensor, **options: object) -> Tensor:
        if any(options.values()):
            raise ValueError(f"attention without masks, got {options}")
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        tiles = self.TILES if x.device.type == "cuda" else None
        found: Tensor = flex_attention(q, k, v, kernel_options=tiles)  # type: ignore[assignment]
        vectors: Tensor = self.proj(found.transpose(1, 2).flatten(2))
        return vectors


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)


def write_patches(model: Retriever) -> None:
    embed = model.backbone.patch_embed
    embed.proj = PatchProduct(embed.proj)


def write_scales(model: Retriever) -> None:
    for block in model.backbone.blocks:
        block.attn.proj, block.ls1 = ScaledLinear(block.attn.proj, block.ls1.gamma), nn.Identity()
        block.mlp.fc2, block.ls2 = ScaledLinear(block.mlp.fc2, block.ls2.gamma), nn.Identity()


def write_flex(model: Retriever) -> None:
    for block in model.backbone.blocks:
        block.attn = FlexAttention(block.attn)


def write_stream(model: Retriever) -> None:
    model.backbone.norm_pre = nn.Sequential(model.backbone.norm_pre, Rounded())


REWRITES: dict[str, Callable[[Retriever], None]] = {
    "patches": write_patches,
    "scales": write_scales,
    "flex": write_flex,
    "stream": write_stream,
}
HALVES = "halves"  # of the step, not of the network: `Masters`
NAMES = (*REWRITES, HALVES)


def rewrite(model: Retriever, names: Iterable[str]) -> None:
    """Writes a ViT of timm otherwise, in place. Its parameters stay the same objects."""
    for name in names:
        if name != HALVES:
            REWRITES[name](model)


class Masters:
    """float32 weights that an optimiser moves, beside bfloat16 ones of matrices that the network multiplies with."""

    def __init__(self, model: nn.Module) -> None:
        self.halves = [weight for weight in model.parameters() if weight.ndim > 1]
        self.floats = [weight.detach().clone() for weight in self.halves]
        self.others = [weight for weight in model.parameters() if weight.ndim <= 1]
        for weight in self.halves:
            weight.data = weight.data.to(torch.bfloat16)

    @property
    def weights(self) -> list[Tensor]:
        """For the optimiser."""
        return [*self.floats, *self.others]

    def take_gradients(self) -> None:
        for half, whole in zip(self.halves, self.floats, strict=True):
            whole.grad = None if half.grad is None else half.grad.float()
            half.grad = None

    def give_weights(self) -> None:
        torch._foreach_copy_([half.data for half in self.halves], self.floats)
