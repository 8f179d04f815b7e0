"""BatchNorm over the batch of several processes: each normalises its part by the statistics of the whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def share_statistics(model: nn.Module) -> nn.Module:
    """The model with every BatchNorm in it taking the mean and variance over all processes; weights stay the same."""
    for name, module in model.named_children():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            setattr(model, name, _shared(module))
        else:
            share_statistics(module)
    return model


def _shared(norm: _BatchNorm) -> SharedBatchNorm:
    shared = SharedBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    shared._parameters, shared._buffers = norm._parameters, norm._buffers
    # timm has one that drops and activates in the same breath
    shared.drop, shared.act = (getattr(norm, part, None) or nn.Identity() for part in ("drop", "act"))
    shared.training = norm.training
    return shared


class SharedBatchNorm(nn.SyncBatchNorm):
    """torch's on a GPU; on a CPU, where torch has none, the same written out."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        alone = not (self.training and dist.is_initialized() and dist.get_world_size() > 1)
        if alone or x.is_cuda:
            normal = super().forward(x)
        elif torch.compiler.is_compiling():  # torch's compiler would lose the gradient of what processes add up
            normal = torch.compiler.disable(self._normalised)(x)  # type: ignore[no-untyped-call]
        else:
            normal = self._normalised(x)
        return self.act(self.drop(normal))  # type: ignore[no-any-return]

    def _normalised(self, x: Tensor) -> Tensor:
        over, shape = [0, *range(2, x.ndim)], (1, -1, *[1] * (x.ndim - 2))
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        count = wide.new_tensor([wide.numel() / wide.shape[1]])
        sums = _Total.apply(torch.cat([wide.sum(over), count]))  # type: ignore[no-untyped-call]
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = wide - mean.view(shape)
        variance = _Total.apply(centred.square().sum(over)) / count  # type: ignore[no-untyped-call]
        self._remember(mean.detach(), variance.detach() * count / (count - 1))
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        found: Tensor = normal.to(x.dtype)
        return found

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _Total(torch.autograd.Function):
    """The sum over all processes; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        total = upstream.contiguous().clone()
        dist.all_reduce(total)
        return total
