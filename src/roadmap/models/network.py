"""The model: pictures -> backbone -> pooling -> LayerNorm -> projection -> unit vectors."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from roadmap.config.settings import ModelSettings, SettingError
from roadmap.features import Features
from roadmap.models.backbones import backbone_of, features, layout, normalisation, trial_features
from roadmap.models.depths import layer_depths
from roadmap.models.learning import check_learning, layers_below, learning_names, parts_of
from roadmap.models.pooling import Layout, Pooling
from roadmap.models.small import SmallCNN


def untrained_retriever(settings: ModelSettings, image: int) -> Retriever:
    """The same model at random, whatever weights the settings name: to be filled from a checkpoint."""
    return Retriever(backbone_of(settings, image), settings, image)


class Retriever(nn.Module):
    """Images (B, 3, S, S), normalised by `mean` and `std` -> unit vectors (B, dim), float32 under autocast too.

    In training they are as long as they come where the settings say `normalise=False`. What `trunk` made of images
    earlier, (B, width), takes their place: a frozen backbone need not see a picture twice.

    What comes after the backbone is float32: losses tell scores apart that bfloat16 rounds together.

    Attributes:
        settings: what it was made by.
        image: side of the pictures it was made for.
        mean, std: per channel, what the backbone expects pictures to be normalised by.
        dim: dimensions of the vectors.
        width: of what comes before LayerNorm and projection.
        channels: of the features before they are pooled; None where only the backbone knows how they are laid out.
    """

    def __init__(self, backbone: nn.Module, settings: ModelSettings, image: int) -> None:
        super().__init__()
        self.settings, self.image = settings, image
        self.mean, self.std = normalisation(backbone)
        trial = trial_features(backbone, settings.name, image)
        self._layout = layout(backbone, trial)
        self.channels = self._layout.channels(trial)
        self.backbone = backbone
        self._below = layers_below(backbone, settings)
        self.pooling = _pooling(backbone, settings, self._layout)
        with torch.no_grad():
            self.width: int = self.eval()._pooled(trial).shape[-1]
        self.layer_norm = nn.LayerNorm(self.width, elementwise_affine=False) if settings.layer_norm else nn.Identity()
        self.projection = nn.Identity() if settings.dim is None else nn.Linear(self.width, settings.dim)
        self.dim: int = settings.dim or self.width
        self._hold_still()
        self.train()

    def forward(self, images: Tensor, whole: bool = False) -> Tensor | Features:
        """The vectors; `whole`: with the features that they were pooled from."""
        if images.ndim == 2 and images.shape[1] == self.width and not whole:
            return self._head(images)
        found = self._features(images)
        with torch.autocast(images.device.type, enabled=False):
            vectors = self._head(self._pooled(found))
        return self._layout.features(vectors, found) if whole else vectors

    def trunk(self, images: Tensor) -> Tensor:
        """(B, width), float32: what the backbone makes of images, pooled."""
        found = self._features(images)
        with torch.autocast(images.device.type, enabled=False):
            return self._pooled(found)

    def _features(self, images: Tensor) -> Any:
        """What the backbone makes of images, float32."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be of shape (B, 3, S, S), got {tuple(images.shape)}")
        found = features(self.backbone, images)
        return found.float() if isinstance(found, Tensor) else [part.float() for part in found]

    def _head(self, pooled: Tensor) -> Tensor:
        """(B, width) -> (B, dim)."""
        with torch.autocast(pooled.device.type, enabled=False):
            vectors: Tensor = self.projection(self.layer_norm(pooled))
            return F.normalize(vectors, dim=1) if self.settings.normalise or not self.training else vectors

    def _hold_still(self) -> None:
        """What does not learn has no gradient."""
        check_learning(self.settings, self.width)
        if self.settings.freeze_backbone:
            learn = {name for name, _ in self.projection.named_parameters("projection")}
        else:
            inside = learning_names(self.backbone, self.settings, self._below)
            head = {name for name, _ in self.named_parameters() if not name.startswith("backbone.")}
            learn = head | {f"backbone.{name}" for name in inside}
        for name, parameter in self.named_parameters():
            if name not in learn:  # some backbones come with position embeddings that never learn
                parameter.requires_grad_(False)

    def train(self, mode: bool = True) -> Retriever:
        """Training or evaluation mode; what is frozen does in both what it does in evaluation: BatchNorm uses the
        statistics it came with, nothing is dropped."""
        super().train(mode)
        if self.settings.freeze_backbone:
            self.backbone.eval()
        for module in parts_of(self.backbone, self._below):
            module.eval()
        if self.settings.freeze_batch_norm:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def head_parameters(self) -> list[nn.Parameter]:
        """What is learned from nothing: the projection and GeM's exponent."""
        return [parameter for name, parameter in self.named_parameters() if not name.startswith("backbone.")]

    def layer_depths(self) -> dict[str, int]:
        """Parameter name -> layer: 0 for the stem of the backbone, the largest for the head (`head_parameters`)."""
        inside = layer_depths(self.backbone)
        head = max(inside.values(), default=-1) + 1
        return {name: inside.get(name.removeprefix("backbone."), head) for name, _ in self.named_parameters()}

    @property
    def layers(self) -> int:
        """The number of layers that `layer_depths` tells apart."""
        return max(self.layer_depths().values()) + 1

    def undecayed(self) -> set[str]:
        """The names of parameters that weight decay usually spares: biases, scales, tokens and position embeddings."""
        spared: set[str] = getattr(self.backbone, "no_weight_decay", set)()
        return {
            name
            for name, parameter in self.named_parameters()
            if parameter.ndim < 2 or name.removeprefix("backbone.") in spared
        }

    def _pooled(self, found: Any) -> Tensor:
        """Features -> (B, C)."""
        if self.pooling is None:  # as the backbone was trained
            return self.backbone.forward_head(found, pre_logits=True)  # type: ignore[operator, no-any-return]
        vectors: Tensor = self.pooling(found)
        if isinstance(self.backbone, SmallCNN):
            return vectors
        # What some backbones do after their pooling (ConvNeXt and averaging ViTs: a LayerNorm) belongs to them.
        parts = vectors.chunk(2, dim=1) if self.pooling.kind == "both" else (vectors,)
        cells = map(self._layout.single_cell, parts)
        return torch.cat([self.backbone.forward_head(cell, pre_logits=True) for cell in cells], dim=1)  # type: ignore[operator]


def _pooling(backbone: nn.Module, settings: ModelSettings, where: Layout) -> Pooling | None:
    """Our pooling, or None for the backbone's own.

    A backbone's own is its classifier's input: the average for most convolutional networks, the class token or the
    average of the patches for transformers, attention for a few. Distilled DeiT has two classifiers, on the class and
    on the distillation token, whose outputs are averaged (Touvron et al., "Training data-efficient image transformers
    & distillation through attention", 2021, section 4): its own is the mean of the two tokens.
    """
    kind = settings.pooling
    if isinstance(backbone, SmallCNN) and kind == "auto":
        kind = "avg"
    if kind == "auto":
        return None
    if kind not in where.poolings:
        why = "has no class token" if kind in ("token", "both") else "gives features that only it knows how to pool"
        raise SettingError(
            "model.pooling",
            f"model.pooling={kind} is not possible: {settings.name} {why}; allowed: {', '.join(where.poolings)}",
        )
    _drop_attention_pooling(backbone, settings)
    return Pooling(kind, where)


def _drop_attention_pooling(backbone: nn.Module, settings: ModelSettings) -> None:
    """Attention pooling is not the same after another pooling, so it goes, where timm can take it away."""

    def pools_by_attention() -> bool:
        return any("AttentionPool" in type(module).__name__ for module in backbone.modules())

    if pools_by_attention():
        with suppress(AssertionError, TypeError):
            backbone.reset_classifier(0, "avg")  # type: ignore[operator]
        if pools_by_attention():
            raise SettingError(
                "model.pooling",
                f"model.pooling={settings.pooling} is not possible: {settings.name} pools by attention, which cannot "
                "be taken out of it; set model.pooling=auto",
            )
