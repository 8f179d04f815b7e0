"""Datasets, samplers and pictures.

Names are imported when first used: worker processes that only decode need not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roadmap.data.batches.chunks import ChunkedBatch as ChunkedBatch
    from roadmap.data.batches.crops import CentreCrop as CentreCrop
    from roadmap.data.batches.crops import RandomCrop as RandomCrop
    from roadmap.data.batches.loading import Batch as Batch
    from roadmap.data.batches.loading import Batches as Batches
    from roadmap.data.batches.loading import evaluation_batches as evaluation_batches
    from roadmap.data.batches.loading import training_batches as training_batches
    from roadmap.data.batches.resampling import resized_crops as resized_crops
    from roadmap.data.batches.samplers import CategoryPairs as CategoryPairs
    from roadmap.data.batches.samplers import MPerClass as MPerClass
    from roadmap.data.checking import Report as Report
    from roadmap.data.checking import dataset_report as dataset_report
    from roadmap.data.datasets import READERS as READERS
    from roadmap.data.datasets import SOURCES as SOURCES
    from roadmap.data.datasets import dataset as dataset
    from roadmap.data.pictures.contents import PackError as PackError
    from roadmap.data.pictures.images import PictureError as PictureError
    from roadmap.data.pictures.images import picture as picture
    from roadmap.data.pictures.packing import pack as pack
    from roadmap.data.pictures.packs import Pack as Pack
    from roadmap.data.pictures.packs import pack_folder as pack_folder
    from roadmap.data.pictures.packs import picture_key as picture_key
    from roadmap.data.pictures.policy import drawn_pack as drawn_pack
    from roadmap.data.pictures.policy import fresh_pack as fresh_pack
    from roadmap.data.pictures.policy import needed_side as needed_side
    from roadmap.data.pictures.policy import pack_for as pack_for
    from roadmap.data.pictures.vectors import VectorPack as VectorPack
    from roadmap.data.records import UNLABELLED as UNLABELLED
    from roadmap.data.records import Records as Records
    from roadmap.data.tags import Tags as Tags
    from roadmap.data.trees import Tree as Tree

_HOMES = {
    "batches.chunks": ("ChunkedBatch",),
    "batches.crops": ("CentreCrop", "RandomCrop"),
    "batches.loading": ("Batch", "Batches", "evaluation_batches", "training_batches"),
    "batches.resampling": ("resized_crops",),
    "batches.samplers": ("CategoryPairs", "MPerClass"),
    "checking": ("Report", "dataset_report"),
    "datasets": ("READERS", "SOURCES", "dataset"),
    "pictures.contents": ("PackError",),
    "pictures.images": ("PictureError", "picture"),
    "pictures.packing": ("pack",),
    "pictures.packs": ("Pack", "pack_folder", "picture_key"),
    "pictures.policy": ("drawn_pack", "fresh_pack", "needed_side", "pack_for"),
    "pictures.vectors": ("VectorPack",),
    "records": ("UNLABELLED", "Records"),
    "tags": ("Tags",),
    "trees": ("Tree",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
