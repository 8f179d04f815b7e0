"""Datasets, samplers and pictures.

Names are imported when first used: worker processes that only decode need not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roadmap.data.augment import CentreCrop as CentreCrop
    from roadmap.data.augment import RandomCrop as RandomCrop
    from roadmap.data.augment import resized_crops as resized_crops
    from roadmap.data.checking import Report as Report
    from roadmap.data.checking import checked as checked
    from roadmap.data.datasets import READERS as READERS
    from roadmap.data.datasets import SOURCES as SOURCES
    from roadmap.data.datasets import dataset as dataset
    from roadmap.data.images import PictureError as PictureError
    from roadmap.data.images import picture as picture
    from roadmap.data.loading import Batch as Batch
    from roadmap.data.loading import Batches as Batches
    from roadmap.data.loading import evaluation_batches as evaluation_batches
    from roadmap.data.loading import pack_or_offer as pack_or_offer
    from roadmap.data.loading import training_batches as training_batches
    from roadmap.data.packing import pack as pack
    from roadmap.data.packs import Pack as Pack
    from roadmap.data.packs import PackError as PackError
    from roadmap.data.packs import fresh_pack as fresh_pack
    from roadmap.data.packs import pack_folder as pack_folder
    from roadmap.data.packs import picture_key as picture_key
    from roadmap.data.records import UNLABELLED as UNLABELLED
    from roadmap.data.records import Records as Records
    from roadmap.data.samplers import CategoryPairs as CategoryPairs
    from roadmap.data.samplers import MPerClass as MPerClass

_HOMES = {
    "augment": ("CentreCrop", "RandomCrop", "resized_crops"),
    "checking": ("Report", "checked"),
    "datasets": ("READERS", "SOURCES", "dataset"),
    "images": ("PictureError", "picture"),
    "loading": ("Batch", "Batches", "evaluation_batches", "pack_or_offer", "training_batches"),
    "packing": ("pack",),
    "packs": ("Pack", "PackError", "fresh_pack", "pack_folder", "picture_key"),
    "records": ("UNLABELLED", "Records"),
    "samplers": ("CategoryPairs", "MPerClass"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
