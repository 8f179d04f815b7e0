"""What of a model learns, and what stays as it came."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from roadmap.config.settings import ModelSettings, SettingError
from roadmap.models.depths import layer_depths


def check_learning(settings: ModelSettings, width: int) -> None:
    """What is asked for does not contradict itself, and something learns; `width`: of what the projection is given."""
    if not settings.freeze_backbone:
        return
    if settings.dim is None:
        raise SettingError(
            "model.dim",
            "model.freeze_backbone=true trains the projection alone, and there is none: give its dimensions, such "
            f"as model.dim={min(512, width)}, or set model.freeze_backbone=false",
        )
    for name, value, alone in (
        ("learns", settings.learns, "all"),
        ("freeze_layers", settings.freeze_layers, 0),
    ):
        if value != alone:
            raise SettingError(
                f"model.{name}",
                f"model.{name}={value} is about the backbone, of which nothing learns with model.freeze_backbone=true; "
                "leave out one of them",
            )


def layers_below(backbone: nn.Module, settings: ModelSettings) -> frozenset[str]:
    """The names of the parameters in the layers that stay as they came."""
    if not settings.freeze_layers:
        return frozenset()
    depths = layer_depths(backbone)
    layers = 1 + max(depths.values())
    if settings.freeze_layers >= layers:
        raise SettingError(
            "model.freeze_layers",
            f"model.freeze_layers={settings.freeze_layers}: {settings.name} has {layers} layers, the stem among them; "
            f"give at most {layers - 1}, or train the projection alone with model.freeze_backbone=true",
        )
    return frozenset(name for name, depth in depths.items() if depth < settings.freeze_layers)


def learning_names(backbone: nn.Module, settings: ModelSettings, below: Collection[str]) -> set[str]:
    """The names of the parameters of a backbone that learn, those in the layers `below` left out."""
    names = {name for name, _ in backbone.named_parameters() if name not in below}
    if settings.learns == "all":
        return names
    biases = {name for name, parameter in backbone.named_parameters() if name in names and _is_bias(name, parameter)}
    if not biases:
        where = " above the layers that stay" if settings.freeze_layers else ""
        raise SettingError(
            "model.learns",
            f"model.learns=biases: {settings.name} has no biases{where}; set model.learns=all, or train the projection "
            "alone with model.freeze_backbone=true",
        )
    return biases


def _is_bias(name: str, parameter: nn.Parameter) -> bool:
    """A number for each channel that is added to it. Some transformers of timm have q_bias and v_bias; tables of
    biases by position are no such numbers."""
    return parameter.ndim == 1 and name.rpartition(".")[2].endswith("bias")


def parts_of(backbone: nn.Module, names: Collection[str]) -> Iterator[nn.Module]:
    """The modules that hold parameters of these names alone, with all inside them."""
    held = {id(parameter) for name, parameter in backbone.named_parameters() if name in names}
    for module in backbone.modules() if held else ():
        own = list(module.parameters())
        if own and all(id(parameter) in held for parameter in own):
            yield module
