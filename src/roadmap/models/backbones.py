"""Backbones: any that timm knows, or the built-in small one; here without trained weights."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from roadmap.colours import IMAGENET_MEAN, IMAGENET_STD
from roadmap.config.settings import ModelSettings, SettingError
from roadmap.models.pooling import MAP, MAP_CHANNELS_LAST, Layout
from roadmap.models.small import SmallCNN
from roadmap.names import did_you_mean

SMALL_CNN, SMALL_CNNS_SIZE = "small_cnn", 32
Triple = tuple[float, float, float]


def timm_library() -> ModuleType:
    """timm, imported when it is needed: small_cnn does without it."""
    try:
        import timm
    except ImportError as error:
        raise ImportError(
            f"every backbone but {SMALL_CNN} comes from timm: pip install 'roadmap-retrieval[train]'"
        ) from error
    return timm


def backbone_of(settings: ModelSettings, image: int, **more: Any) -> nn.Module:
    """The backbone without a classifier, at random, for square pictures of a size.

    Args:
        settings: its name, with or without the tag of its weights, its stochastic depth and strides.
        image: side of the pictures; position embeddings are made for it.
        more: passed on to timm.
    """
    name, drop_path = settings.name, settings.drop_path
    if name == SMALL_CNN:
        if drop_path:
            raise SettingError("model.drop_path", f"{SMALL_CNN} has no stochastic depth; set model.drop_path=0")
        _check_no_strides(settings)
        return SmallCNN()
    arguments = {"num_classes": 0, **more}
    if model_card(name).fixed_input_size:
        arguments["img_size"] = image
    if drop_path:
        arguments["drop_path_rate"] = drop_path
    try:
        backbone: nn.Module = timm_library().create_model(name, **arguments)
    except TypeError as error:
        if "drop_path_rate" not in str(error):
            raise
        raise SettingError("model.drop_path", f"{name} has no stochastic depth; set model.drop_path=0") from error
    except (AssertionError, RuntimeError) as error:
        if "img_size" not in arguments:
            raise
        raise _wrong_size(name, image, error) from error
    _check_patches(backbone, name, image)
    if settings.stride_first:
        _stride_first(backbone, settings)
    return backbone


def is_transformer(backbone: nn.Module) -> bool:
    """Whether it mixes its cells by attention; attention that only pools them does not count."""
    kinds = {type(module).__name__ for module in backbone.modules()}
    return any("Attention" in kind and "Pool" not in kind for kind in kinds)


def outline(name: str, image: int) -> tuple[nn.Module, int]:
    """The backbone without memory for its weights, and the size of pictures nearest to `image` that it takes.

    That is a multiple of its patches, or, where it takes no other, the size that its weights were made for.
    """
    settings, own = ModelSettings(name), size_of(name)
    with torch.device("meta"):
        backbone = backbone_of(settings, own)
        patches = getattr(backbone, "patch_embed", None)
        side = int(getattr(patches, "patch_size", (1,))[0])
        size = max(1, round(image / side)) * side
        try:
            backbone = backbone_of(settings, size)
            trial_features(backbone, name, size)
        except SettingError:
            return backbone_of(settings, own), own
    return backbone, size


def size_of(name: str) -> int:
    """The size of pictures that a model was made for."""
    return SMALL_CNNS_SIZE if name == SMALL_CNN else int(model_card(name).input_size[-1])


def _check_no_strides(settings: ModelSettings) -> None:
    if settings.stride_first:
        raise SettingError(
            "model.stride_first",
            f"model.stride_first is for ResNets with bottlenecks, such as resnet50; {settings.name} has none",
        )


def _stride_first(backbone: nn.Module, settings: ModelSettings) -> None:
    """Moves the stride of each stage from its 3 x 3 convolution to the 1 x 1 before it: ResNet as first published."""
    from timm.models.resnet import Bottleneck

    blocks = [module for module in backbone.modules() if isinstance(module, Bottleneck)]
    moved = [block for block in blocks if block.conv1.stride == (1, 1) and block.conv2.stride == (2, 2)]
    if not moved:
        _check_no_strides(settings)
    for block in moved:
        block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride


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
    card: dict[str, Any] = getattr(backbone, "pretrained_cfg", {})
    mean, std = card.get("mean", IMAGENET_MEAN), card.get("std", IMAGENET_STD)
    (r, g, b), (sr, sg, sb) = mean, std
    return (r, g, b), (sr, sg, sb)


def model_card(name: str) -> Any:
    """What timm knows about a model and its published weights; an unknown name is an error that offers the nearest."""
    timm = timm_library()
    if not timm.is_model(name):
        near = did_you_mean(name, [SMALL_CNN, *timm.list_models()])
        raise SettingError(
            "model.name",
            f"model.name must be {SMALL_CNN} or one of timm's {len(timm.list_models())} models, got {name!r}{near} "
            "`timm.list_models()` names them all",
        )
    try:
        return timm.models.get_pretrained_cfg(name) or timm.models.PretrainedCfg()
    except RuntimeError as error:
        known = ", ".join(timm.list_pretrained(name.split(".")[0])) or "none"
        said = f"timm knows no weights {name!r}; of this model it knows: {known}"
        raise SettingError("model.name", said) from error


def _check_patches(backbone: nn.Module, name: str, image: int) -> None:
    """Patches that do not fill the picture would silently leave its right and lower edge out."""
    patches = getattr(backbone, "patch_embed", None)
    if not isinstance(patches, timm_library().layers.PatchEmbed):  # others overlap, or check themselves
        return
    side = int(patches.patch_size[0])
    if image % side and not patches.dynamic_img_pad:
        below = image - image % side
        allowed = [str(size) for size in (below, below + side) if size > 0]
        raise SettingError(
            "data.image",
            f"{name} cuts pictures into patches of {side} pixels, which do not fill {image}; "
            f"set data.image to a multiple, such as {' or '.join(allowed)}",
        )


def _wrong_size(name: str, image: int, error: Exception) -> SettingError:
    own = size_of(name)
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return SettingError(
        "data.image",
        f"{name} does not take pictures of {image} pixels ({reason}); it was made for {own}: set data.image={own}",
    )
