"""HORDE: the local features of a picture compared by their high-order moments too (Jacob et al., ICCV 2019)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_count, check_flag, check_number
from roadmap.losses.metric_learning import check_module
from roadmap.losses.named import named_loss, required_options


class LocalFeatures(Protocol):
    """What a model knows of a batch before it pools: `cells`, (B, T, C), of a map row by row, or tokens."""

    @property
    def cells(self) -> Tensor: ...


class HORDE(nn.Module):
    """The regulariser: weight x the sum over the orders 2 to K of a loss of that order's embeddings.

    An auxiliary module: called with a model's features and the labels, it gives a scalar to add to the loss of the
    embeddings themselves, which is order 1. It has weights of its own, and is not needed once the model is trained. It
    compares the pictures it is shown: with several processes, show each the features of all.

    Args:
        channels: C, of the local features.
        loss: of each order's embeddings, a loss or its name; the authors' by default. A loss with weights or a memory
            is copied, so that each order has its own.
        options: of a loss that is given by its name.
        orders: K, the highest.
        dim: of the sketches.
        embedding_size: dimensions of each order's embeddings, where the sketches are trained.
        weight: of the sum.
        trained: whether the sketches are learned; see `HighOrderMoments`.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> features = SimpleNamespace(cells=torch.randn(8, 16, 32, requires_grad=True))
    >>> HORDE(channels=32, dim=64, embedding_size=16)(features, torch.arange(8) // 2).backward()
    """

    def __init__(
        self,
        channels: int,
        loss: nn.Module | str = "contrastive_horde",
        options: Mapping[str, Any] | None = None,
        orders: int = 5,
        dim: int = 8192,
        embedding_size: int = 512,
        weight: float = 1.0,
        trained: bool = True,
    ) -> None:
        super().__init__()
        width = embedding_size if trained else dim
        one = _loss(loss, options, width)
        check_number("weight", weight, at_least=0)
        self.moments = HighOrderMoments(channels, orders, dim, embedding_size, trained)
        remembers = bool(one.state_dict())
        self.losses = nn.ModuleList(copy.deepcopy(one) if remembers else one for _ in range(2, orders + 1))
        self.weight = weight

    def extra_repr(self) -> str:
        return f"weight={self.weight}"

    def loss_parameters(self) -> list[nn.Parameter]:
        """The weights of the losses (proxies), which move at another rate than those of the sketches."""
        return list(self.losses.parameters())

    def forward(self, features: LocalFeatures, labels: Tensor) -> Tensor:
        found = self.moments(features.cells)
        values = [loss(x, labels) for loss, x in zip(self.losses, found, strict=True)]
        return self.weight * torch.stack(values).sum()


def _loss(loss: nn.Module | str, options: Mapping[str, Any] | None, width: int) -> nn.Module:
    """The loss of vectors of `width` dimensions."""
    if isinstance(loss, str):
        filled = {"embedding_size": width} if "embedding_size" in required_options(loss) else {}
        return named_loss(loss, **(filled | dict(options or {})))
    check_module("loss", loss)
    if options is not None:
        raise ValueError("options are for a loss that is given by its name; this one is made already")
    asked = getattr(loss, "embedding_size", None)
    if asked not in (None, width):
        raise ValueError(f"the loss was made with embedding_size={asked}, but each order gives {width} dimensions")
    return loss


class HighOrderMoments(nn.Module):
    """Local features x_1 ... x_T of each picture -> unit vectors that stand for their moments of orders 2 to K.

    The moment of order k is the mean of the k-fold outer product of x with itself, C^k numbers. Its sketch is the mean
    of (W_1 x) * (W_2 x) * ... * (W_k x), a product number by number, with `dim` rows in each W. For random signs in W
    the scalar product of two sketches, over `dim`, is on average that of the moments (Kar and Karnick, 2012). Order k
    goes on from the product of order k - 1 (the paper's cascade): K matrices for all.

    Args:
        channels: C.
        orders: K, at least 2.
        dim: of the sketches.
        embedding_size: dimensions of the vectors, by one more matrix for each order.
        trained: True: all these matrices are learned, from a Glorot start. False: W are random signs for good, and the
            vectors are the sketches themselves, `dim` numbers.
    """

    def __init__(
        self, channels: int, orders: int = 5, dim: int = 8192, embedding_size: int = 512, trained: bool = True
    ) -> None:
        super().__init__()
        for name, count in (("channels", channels), ("dim", dim), ("embedding_size", embedding_size)):
            check_count(name, count, at_least=1)
        check_count("orders", orders, at_least=2)
        check_flag("trained", trained)
        self.channels, self.orders, self.trained = channels, orders, trained
        if trained:
            self.projections = nn.ParameterList(_glorot(channels, dim) for _ in range(orders))
            self.heads = nn.ParameterList(_glorot(dim, embedding_size) for _ in range(2, orders + 1))
        else:
            self.register_buffer("signs", torch.randint(2, (orders, channels, dim)).mul(2).sub(1).float())

    def extra_repr(self) -> str:
        return f"channels={self.channels}, orders={self.orders}, trained={self.trained}"

    def forward(self, features: Tensor) -> list[Tensor]:
        """(B, C, H, W) or (B, T, C) -> orders - 1 tensors (B, D), in float32 or better; the products with W alone are
        in half precision under autocast."""
        local = self._scaled(_positions(features, self.channels))
        found, product = list[Tensor](), self._projected(local, 0)
        for order in range(1, self.orders):
            product = product * self._projected(local, order)
            with torch.autocast(features.device.type, enabled=False):
                sketch = product.mean(1)
                vectors = sketch @ self.heads[order - 1].to(sketch.dtype) if self.trained else sketch
                found.append(F.normalize(vectors, dim=1, eps=torch.finfo(vectors.dtype).tiny))
        return found

    def _projected(self, local: Tensor, number: int) -> Tensor:
        weights = self.projections[number] if self.trained else self.signs[number]  # type: ignore[index]
        return at_least_float32(local @ weights.to(local.dtype))

    @staticmethod
    def _scaled(local: Tensor) -> Tensor:
        """The features of each picture over their largest: the fifth power of small numbers vanishes, and that of large
        ones overflows. A factor does not change the direction of any moment, nor its gradient."""
        if local.numel() == 0:
            return local
        largest = local.detach().abs().amax((1, 2), keepdim=True)
        return local / largest.masked_fill(largest == 0, 1)


def _glorot(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(rows, columns)))


def _positions(features: Tensor, channels: int) -> Tensor:
    """(B, T, C), in float32 or better."""
    if not isinstance(features, Tensor) or not features.is_floating_point() or features.ndim not in (3, 4):
        came = f"{features.dtype}, {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"features must be a float tensor (B, C, H, W) or tokens (B, T, C), got {came}")
    local = features.flatten(2).transpose(1, 2) if features.ndim == 4 else features
    if local.shape[2] != channels:
        raise ValueError(f"features of shape {tuple(features.shape)} have {local.shape[2]} channels, not {channels}")
    if local.shape[1] == 0:
        raise ValueError(f"features of shape {tuple(features.shape)} have no positions; they must come before pooling")
    return at_least_float32(local)
