"""Losses by name, for configurations: ours, and the recipes of `roadmap.losses.pml`, which is imported on demand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from roadmap.losses.binned_ap import FastAP, SoftBinAP
from roadmap.losses.blackbox_ap import BlackBoxAP
from roadmap.losses.clustered import ClusteredLoss
from roadmap.losses.decomposable import SupRank
from roadmap.losses.graded_ndcg import GradedNDCG
from roadmap.losses.happier import HAPPIER
from roadmap.losses.hierarchical_ap import HierarchicalAP
from roadmap.losses.horde_contrastive import HordeContrastive
from roadmap.losses.rank_ap import SmoothAP, SupAP
from roadmap.losses.rank_ndcg import SupNDCG
from roadmap.losses.rank_recall import RecallAtK
from roadmap.losses.roadmap import ROADMAP
from roadmap.losses.selective_triplets import TripletSCT
from roadmap.losses.spherical import SphericalConstraint
from roadmap.losses.thresholds import Calibration
from roadmap.names import did_you_mean


def sec(
    num_classes: int,
    embedding_size: int,
    of: str = "multi_similarity",
    weight: float = 1.0,
    momentum: float = 1.0,
    options: Mapping[str, Any] | None = None,
) -> SphericalConstraint:
    """`SphericalConstraint` around the loss called `of`, which is made with `options`, and with the number of classes
    and the dimensions if it asks for them."""
    return SphericalConstraint(_inner(of, num_classes, embedding_size, options), weight, momentum)


def clustered(
    num_classes: int,
    embedding_size: int,
    of: str = "roadmap",
    lam: float = 0.1,
    temperature: float = 0.05,
    options: Mapping[str, Any] | None = None,
) -> ClusteredLoss:
    """`ClusteredLoss` around the loss called `of`, which is made with `options`."""
    inner = _inner(of, num_classes, embedding_size, options)
    return ClusteredLoss(inner, num_classes, embedding_size, lam, temperature)


def _inner(of: str, num_classes: int, embedding_size: int, options: Mapping[str, Any] | None) -> nn.Module:
    """The loss that another goes around."""
    if of in AROUND:
        raise ValueError(f"of={of} wraps a loss itself; name the loss that it wraps")
    filled = {"num_classes": num_classes, "embedding_size": embedding_size}
    try:
        asked = {option: filled[option] for option in required_options(of)}
        return named_loss(of, **asked, **(options or {}))
    except (TypeError, ValueError) as error:
        raise type(error)(f"of={of}: {error}") from error


OWN: dict[str, Callable[..., nn.Module]] = {
    "roadmap": ROADMAP,
    "supap": SupAP,
    "smoothap": SmoothAP,
    "calibration": Calibration,
    "fastap": FastAP,
    "softbinap": SoftBinAP,
    "blackboxap": BlackBoxAP,
    "hierarchical_ap": HierarchicalAP,
    "happier": HAPPIER,
    "graded_ndcg": GradedNDCG,
    "triplet_sct": TripletSCT,
    "contrastive_horde": HordeContrastive,
    "recall_at_k": RecallAtK,
    "supndcg": SupNDCG,
    "suprank": SupRank,
}
# The keys of pml.RECIPES, written down so that naming them does not import pytorch-metric-learning.
BORROWED = (
    "contrastive_irt",
    "contrastive_xbm",
    "cross_entropy",
    "lifted_structure",
    "margin_distance_weighted",
    "multi_similarity",
    "normalised_softmax",
    "proxy_gml",
    "proxy_nca",
    "proxy_nca_pp",
    "triplet_distance_weighted",
    "triplet_semihard",
)
# Around another loss, which is an option.
AROUND: dict[str, Callable[..., nn.Module]] = {"sec": sec, "clustered": clustered}
NAMES = (*OWN, *BORROWED, *AROUND)
OF_LENGTHS = ("sec",)  # which say something of the length of vectors, and nothing of vectors of length 1
# What only the training run knows.
FILLED_IN = {"num_classes": "the number of training classes", "embedding_size": "the dimensions of the embeddings"}


def named_loss(name: str, **options: Any) -> nn.Module:
    """The loss called `name`, made with what its constructor takes.

    >>> named_loss("supap", tau=0.05).tau
    0.05

    Raises:
        ValueError: an unknown name or option, with the nearest known one; or an option that is needed and missing.
        ImportError: a loss of pytorch-metric-learning, where that is not installed.
    """
    return module_of(f"loss {name}", constructor(name), options, FILLED_IN)


def module_of(
    what: str, make: Callable[..., nn.Module], options: Mapping[str, Any], filled_in: Mapping[str, str]
) -> nn.Module:
    """What `make` makes of `options`. One that it does not know, or that it needs and lacks, is refused; `what` says
    what it would have been."""
    parameters = inspect.signature(make).parameters
    for option in options:
        if option not in parameters:
            raise ValueError(
                f"the {what} has no option {option!r}{did_you_mean(option, parameters)} "
                f"It takes: {', '.join(parameters)}"
            )
    missing = [needed for needed in without_default(make) if options.get(needed) is None]
    if missing:
        told = " and ".join(f"{option} ({filled_in.get(option, 'it has no default')})" for option in missing)
        raise ValueError(f"the {what} needs {told}")
    return make(**options)


def without_default(make: Callable[..., nn.Module]) -> tuple[str, ...]:
    """The options that `make` must be given."""
    return tuple(n for n, p in inspect.signature(make).parameters.items() if p.default is inspect.Parameter.empty)


def constructor(name: str) -> Callable[..., nn.Module]:
    """What makes the loss called `name`."""
    if name in OWN or name in AROUND:
        return (OWN | AROUND)[name]
    if name not in BORROWED:
        raise ValueError(f"unknown loss {name!r}{did_you_mean(name, NAMES)} Known: {', '.join(NAMES)}")
    from roadmap.losses.pml import RECIPES

    return RECIPES[name]


def required_options(name: str) -> tuple[str, ...]:
    """The options without a default: `num_classes` and `embedding_size` of a loss that has weights per class."""
    return without_default(constructor(name))
