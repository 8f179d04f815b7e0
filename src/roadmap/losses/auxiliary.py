"""Auxiliary modules by name, for configurations: what a method minimises beside its loss, with weights of its own.

Each is an `nn.Module` called as `module(features, labels)`, with the `Features` of a batch before they are pooled. In
`roadmap train` they are `auxiliary=NAME`; docs/training.md says how to bring one's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from roadmap.losses.high_order import HORDE
from roadmap.losses.mic import MIC
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
    made_by = auxiliary_constructor(name)
    parameters = inspect.signature(made_by).parameters
    for option in options:
        if option not in parameters:
            raise ValueError(
                f"the auxiliary module {name} has no option {option!r}{did_you_mean(option, parameters)} "
                f"It takes: {', '.join(parameters)}"
            )
    missing = [needed for needed in needed_options(name) if options.get(needed) is None]
    if missing:
        told = " and ".join(f"{option} ({FILLED_IN.get(option, 'it has no default')})" for option in missing)
        raise ValueError(f"the auxiliary module {name} needs {told}")
    return made_by(**options)


def auxiliary_constructor(name: str) -> Callable[..., nn.Module]:
    """What makes the auxiliary module called `name`."""
    if name not in AUXILIARIES:
        known = (NONE, *AUXILIARIES)
        raise ValueError(f"unknown auxiliary module {name!r}{did_you_mean(name, known)} Known: {', '.join(known)}")
    return AUXILIARIES[name]


def needed_options(name: str) -> tuple[str, ...]:
    """The options without a default."""
    parameters = inspect.signature(auxiliary_constructor(name)).parameters
    return tuple(n for n, p in parameters.items() if p.default is inspect.Parameter.empty)
