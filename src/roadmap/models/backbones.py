"""Backbones: any that timm knows, or the built-in small one; here without trained weights."""

from __future__ import annotations

import difflib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from roadmap.colours import IMAGENET_MEAN, IMAGENET_STD
from roadmap.models.pooling import MAP, MAP_CHANNELS_LAST, Layout
from roadmap.models.small import SmallCNN

SMALL = "small_cnn"
Triple = tuple[float, float, float]


def timm_library() -> ModuleType:
    """timm, imported when it is needed: small_cnn does without it."""
    try:
        import timm
    except ImportError as error:
        raise ImportError(f"every backbone but {SMALL} comes from timm: pip install 'roadmap[train]'") from error
    return timm


def built_backbone(name: str, image: int, drop_path: float = 0.0, **more: Any) -> nn.Module:
    """The backbone without a classifier, at random, for square pictures of a size.

    Args:
        name: "small_cnn" or a name that timm knows, with or without the tag of its weights.
        image: side of the pictures; position embeddings are made for it.
        drop_path: stochastic depth.
        more: passed on to timm.
    """
    if not 0 <= drop_path < 1:
        raise ValueError(f"model.drop_path must be at least 0 and below 1, got {drop_path}")
    if name == SMALL:
        if drop_path:
            raise ValueError(f"{SMALL} has no stochastic depth; set model.drop_path=0")
        return SmallCNN()
    timm = timm_library()
    arguments = {"num_classes": 0, **more}
    if described(name).fixed_input_size:
        arguments["img_size"] = image
    if drop_path:
        arguments["drop_path_rate"] = drop_path
    try:
        backbone: nn.Module = timm.create_model(name, **arguments)
    except TypeError as error:
        if "drop_path_rate" not in str(error):
            raise
        raise ValueError(f"{name} has no stochastic depth; set model.drop_path=0") from error
    except (AssertionError, RuntimeError) as error:
        if "img_size" not in arguments:
            raise
        raise _wrong_size(name, image, error) from error
    _check_patches(backbone, name, image)
    return backbone


def features(backbone: nn.Module, images: Tensor) -> Any:
    """What the backbone makes of the images before any pooling; a few of timm's give a list."""
    if isinstance(backbone, SmallCNN):
        return backbone(images)
    return backbone.forward_features(images)  # type: ignore[operator]


@torch.no_grad()
def trial_features(backbone: nn.Module, name: str, image: int) -> Any:
    """The features of a blank picture: their shape tells the layout, and whether the backbone takes this size."""
    was_training = backbone.training
    try:
        return features(backbone.eval(), torch.zeros(1, 3, image, image))
    except (AssertionError, RuntimeError, ValueError, IndexError) as error:
        raise _wrong_size(name, image, error) from error
    finally:
        backbone.train(was_training)


def layout(backbone: nn.Module, found: Any) -> Layout:
    """Where the cells and tokens lie in the features that the backbone gave."""
    if isinstance(backbone, SmallCNN):
        return MAP
    if not isinstance(found, Tensor):
        return Layout(())
    channels = backbone.num_features
    if found.ndim == 4:
        last = getattr(backbone, "output_fmt", None) == "NHWC" or found.shape[1] != channels
        return MAP_CHANNELS_LAST if last else MAP
    if found.ndim != 3 or found.shape[2] != channels:
        return Layout(())
    class_token = getattr(backbone, "cls_token", None) is not None
    prefix = getattr(backbone, "num_prefix_tokens", None)
    prefix = int(class_token) if prefix is None else int(prefix)
    # Some transformers hand on their class token alone.
    return Layout((1,) if found.shape[1] > prefix else (), prefix, class_token)


def normalisation(backbone: nn.Module) -> tuple[Triple, Triple]:
    """Mean and standard deviation by which the backbone expects pictures to be normalised."""
    described: dict[str, Any] = getattr(backbone, "pretrained_cfg", {})
    mean, std = described.get("mean", IMAGENET_MEAN), described.get("std", IMAGENET_STD)
    (r, g, b), (sr, sg, sb) = mean, std
    return (r, g, b), (sr, sg, sb)


def described(name: str) -> Any:
    """What timm knows about a model and its published weights; an unknown name is an error that offers the nearest."""
    timm = timm_library()
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, [SMALL, *timm.list_models()], 3)
        raise ValueError(
            f"model.name must be {SMALL} or one of timm's {len(timm.list_models())} models, got {name!r}"
            f"{'; did you mean ' + ' or '.join(near) + '?' if near else ''} `timm.list_models()` names them all"
        )
    try:
        return timm.models.get_pretrained_cfg(name) or timm.models.PretrainedCfg()
    except RuntimeError as error:
        known = ", ".join(timm.list_pretrained(name.split(".")[0])) or "none"
        raise ValueError(f"timm knows no weights {name!r}; of this model it knows: {known}") from error


def _check_patches(backbone: nn.Module, name: str, image: int) -> None:
    """Patches that do not fill the picture would silently leave its right and lower edge out."""
    patches = getattr(backbone, "patch_embed", None)
    if not isinstance(patches, timm_library().layers.PatchEmbed):  # others overlap, or check themselves
        return
    side = int(patches.patch_size[0])
    if image % side and not patches.dynamic_img_pad:
        below = image - image % side
        allowed = [str(size) for size in (below, below + side) if size > 0]
        raise ValueError(
            f"{name} cuts pictures into patches of {side} pixels, which do not fill {image}; "
            f"set data.image to a multiple, such as {' or '.join(allowed)}"
        )


def _wrong_size(name: str, image: int, error: Exception) -> ValueError:
    own = described(name).input_size[-1] if name != SMALL else 32
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return ValueError(
        f"{name} does not take pictures of {image} pixels ({reason}); it was made for {own}: set data.image={own}"
    )
