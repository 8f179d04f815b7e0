"""How deep each parameter lies, for learning rates that differ from layer to layer."""

from __future__ import annotations

from torch import nn


def layer_depths(backbone: nn.Module) -> dict[str, int]:
    """Parameter name -> layer, 0 for the stem, counting without gaps: by timm's own grouping where it has one."""
    if hasattr(backbone, "group_matcher"):
        from timm.models import group_parameters

        matcher = backbone.group_matcher(coarse=False)  # type: ignore[operator]
        groups: dict[str, int] = group_parameters(backbone, matcher, reverse=True)
        return {name: groups[name] for name, _ in backbone.named_parameters()}
    return _depths_by_order(backbone)


def _depths_by_order(backbone: nn.Module) -> dict[str, int]:
    """A layer for each part of the backbone, and for each part of those that are a plain sequence."""
    sequences = {name for name, child in backbone.named_children() if isinstance(child, (nn.Sequential, nn.ModuleList))}
    order: dict[str, int] = {}
    depths = {}
    for name, _ in backbone.named_parameters():
        first, *rest = name.split(".")
        layer = f"{first}.{rest[0]}" if first in sequences else first
        depths[name] = order.setdefault(layer, len(order))
    return depths
