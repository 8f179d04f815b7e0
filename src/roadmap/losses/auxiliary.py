"""Auxiliary modules by name, for configurations: what a method minimises beside its loss, with weights of its own.

Each is an `nn.Module` called as `module(features, labels)`, with the `Features` of a batch before they are pooled. In
`roadmap train` they are `auxiliary=NAME`; docs/training.md says how to bring one's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from roadmap.losses.high_order import HORDE
from roadmap.losses.mic import MIC
from roadmap.losses.named import module_of, without_default
from roadmap.names import did_you_mean

NONE = "none"
AUXILIARIES: dict[str, Callable[..., nn.Module]] = {"horde": HORDE, "mic": MIC}
# What only the training run knows.
FILLED_IN = {
    "num_classes": "the number of training classes",
    "embedding_size": "the dimensions of the embeddings",
    "channels": "those of the features before they are pooled",
    "pictures": "the number of training pictures",
}


def named_auxiliary(name: str, **options: Any) -> nn.Module:
    """The auxiliary module called `name`, made with what its constructor takes.

    Raises:
        ValueError: an unknown name or option, with the nearest known one; or an option that is needed and missing.
    """
    return module_of(f"auxiliary module {name}", auxiliary_constructor(name), options, FILLED_IN)


def auxiliary_constructor(name: str) -> Callable[..., nn.Module]:
    """What makes the auxiliary module called `name`."""
    if name not in AUXILIARIES:
        known = (NONE, *AUXILIARIES)
        raise ValueError(f"unknown auxiliary module {name!r}{did_you_mean(name, known)} Known: {', '.join(known)}")
    return AUXILIARIES[name]


def needed_options(name: str) -> tuple[str, ...]:
    """The options without a default."""
    return without_default(auxiliary_constructor(name))
