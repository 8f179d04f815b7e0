"""A small convolutional network for small pictures, such as the glyphs; two CPU cores train it in a minute."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

WIDTHS = (16, 64, 128, 256)
SMALLEST = 8  # side of a picture of which one cell is left


class SmallCNN(nn.Module):
    """Four blocks of convolution, BatchNorm and ReLU: images (B, 3, S, S) -> (B, channels, S/8, S/8).

    Max pooling halves the map in the first three blocks. In the last it does not: what pools over the whole map comes
    after this network. A convolution is pooled before it is normalised, which does as well and leaves a quarter of the
    work to all that follows. The first block is narrow, because most of the cost lies where the picture is still
    large, but it sees every pixel: a stride there instead saves no time and does worse on Glyphs, whose strokes are
    thin.

    Args:
        widths: channels after each block; the last is the number of dimensions where no projection follows.

    Attributes:
        channels: of the map that comes out.
        blocks: the four, from the first to the last.
    """

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        if len(widths) != 4 or min(widths) < 1:
            raise ValueError(f"widths must be four positive numbers of channels, got {tuple(widths)}")
        first, second, third, self.channels = widths
        self.blocks = nn.Sequential(
            _block(3, first, pooled=True),
            _block(first, second, pooled=True),
            _block(second, third, pooled=True),
            _block(third, self.channels, pooled=False),
        )

    def forward(self, images: Tensor) -> Tensor:
        if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[2:]) < SMALLEST:
            raise ValueError(
                f"images must be (B, 3, S, S) with S of {SMALLEST} pixels or more, got {tuple(images.shape)}"
            )
        features: Tensor = self.blocks(images)
        return features


def _block(below: int, width: int, pooled: bool) -> nn.Sequential:
    convolution = nn.Conv2d(below, width, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    pooling = [nn.MaxPool2d(2)] if pooled else []
    return nn.Sequential(convolution, *pooling, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
