"""`Encoder`: a model and how pictures go through it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import nn

from roadmap.config.settings import DataSettings, HardwareSettings, Settings
from roadmap.data import UNLABELLED, CentreCrop, Pack, Records, VectorPack, evaluation_batches
from roadmap.data.pictures.policy import SIDE
from roadmap.data.pictures.shards import OnError
from roadmap.embeddings import Embeddings
from roadmap.encoder.onnx_model import OnnxModel
from roadmap.encoder.trunk import known_vectors
from roadmap.encoder.vectors import embeddings_of, image_batches, vectors_of
from roadmap.hardware import autocast_of, precision_of, repeatable, workers_of
from roadmap.models import Retriever
from roadmap.models.checkpoints import weights_digest
from roadmap.ranks import ALONE, Ranks
from roadmap.runs import Run

BATCH = 256  # pictures that go through a model at once, where no run says otherwise
LEAST_BATCH = 64  # a run that trains on small batches is evaluated in larger ones
FROZEN_BATCH = 128  # of a frozen backbone: what is kept of it serves runs of every batch size, to the bit
# What of a model's settings decides the vectors of pictures, beside its weights.
DECIDING = ("name", "pooling", "layer_norm", "dim", "stride_first")

Pictures: TypeAlias = Records | Sequence[str | Path] | Sequence[Image.Image]


def batch_of(settings: Settings) -> int:
    """How many pictures go through the model of a run at once, when it is evaluated: it can decide their last bits."""
    return FROZEN_BATCH if settings.model.freeze_backbone else max(LEAST_BATCH, settings.data.batch_size)


def centre_crop(data: DataSettings, model: Retriever) -> CentreCrop:
    """How the pictures of a run are cut when they are not trained on."""
    return CentreCrop(data.image, max(data.image, data.resize), model.mean, model.std, squeeze=data.squeeze != "no")


@dataclass(eq=False)
class Encoder:
    """A model and how pictures go through it.

    Attributes:
        model: on `device`, in the memory layout of `hardware`.
        crop: how pictures are cut for it.
        hardware: precision, layout and threads.
        device: where it computes.
        name: for titles.
        batch: pictures that go through it at once; with another number the last bits may differ.
        side: shorter side that larger pictures are shrunk to before they are cut, as packs keep them.
        workers: processes that decode files; None for one per core.
        weights: where the weights came from, in words.
        checkpoint: its file, if any.
        about: what the checkpoint says about the model.
        run: that it came from, if any.
        flip: a picture's vector is the mean of its own and its mirror image's.
        opened: what `Encoder.open` was asked for, so that it can be opened again: "what" and options.
        ranks: the processes that share the pictures of `embed`; each of them gets all vectors.
    """

    model: Retriever | OnnxModel
    crop: CentreCrop
    hardware: HardwareSettings
    device: torch.device
    name: str = "model"
    batch: int = BATCH
    side: int = SIDE
    workers: int | None = None
    weights: str = ""
    checkpoint: Path | None = None
    about: dict[str, Any] = field(default_factory=dict)
    run: Run | None = None
    flip: bool = False
    opened: dict[str, Any] = field(default_factory=dict)
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        self._digest: tuple[object, str] = (None, "")

    @classmethod
    def of(cls, model: Retriever, settings: Settings, device: torch.device, ranks: Ranks = ALONE) -> Encoder:
        """The one of a training run, with its crop, precision and batch size; the model is on the device already."""
        return cls(
            model,
            centre_crop(settings.data, model),
            settings.hardware,
            device,
            name=settings.model.name,
            batch=batch_of(settings),
            side=settings.data.side,
            workers=workers_of(settings.data, ranks),
            ranks=ranks,
        )

    @classmethod
    def open(
        cls,
        what: str | Path,
        *,
        device: str = "auto",
        precision: str | None = None,
        image: int | None = None,
        resize: int | None = None,
        weights: str | None = None,
        pooling: str | None = None,
        dim: int | None = None,
        batch: int | None = None,
        flip: bool = False,
    ) -> Encoder:
        """The encoder of a run folder (its best epoch), a checkpoint, or a timm model.

        A run brings its own crop, precision, layout and batch size; what is given here takes their place.

        Args:
            what: runs/NAME, FILE.safetensors, small_cnn, or the name of any timm model.
            device: "cpu", "cuda", "cuda:1", "mps"; "auto": that of the run where it is here, else a GPU, else the CPU.
            precision: "32", "bf16", "fp16"; "auto" is bf16 on a GPU, fp16 on one that is too old for it, 32 elsewhere.
                None: the run's own, or "auto".
            image: side of the square that the model sees. None: the checkpoint's own, or 224.
            resize: shorter side before the centre is cut out. None: the checkpoint's own, or 8/7 of `image`.
            weights: of a timm model: "hub" (the default), "random", or a file.
            pooling: of a timm model; None for what it was trained with.
            dim: of a timm model: adds a projection at random to so many dimensions.
            batch: pictures that go through the model at once. None: as in the run, or 256.
            flip: average each picture's vector with its mirror image's; takes twice as long.
        """
        from roadmap.encoder.opening import Wanted, encoder_named

        return encoder_named(what, Wanted(device, precision, image, resize, weights, pooling, dim, batch, flip))

    @property
    def data(self) -> str | None:
        """The kind of dataset that its run was trained on, such as "folder", if it comes from a run."""
        return None if self.run is None else self.run.settings().data.name

    @property
    def on_error(self) -> OnError:
        """What becomes of a picture that cannot be decoded: as in its run, if it comes from one; else "raise"."""
        return "skip" if self.run is not None and self.run.settings().data.on_error == "skip" else "raise"

    @property
    def precision(self) -> str:
        """ "32", "bf16" or "fp16"; of an ONNX file also "int8"."""
        if isinstance(self.model, OnnxModel):
            return self.model.facts.precision
        return precision_of(self.hardware, self.device)

    @property
    def digest(self) -> str:
        """What tells this model from any other: a hash of its weights and of the settings that decide its vectors."""
        if isinstance(self.model, OnnxModel):
            return self.model.facts.digest
        state = self.model.state_dict()
        key = tuple((tensor.data_ptr(), tensor._version) for tensor in state.values())  # new whenever weights change
        if self._digest[0] != key:
            settings = {name: getattr(self.model.settings, name) for name in DECIDING}
            settings |= {"image": self.model.image, "mean": self.model.mean, "std": self.model.std}
            self._digest = key, weights_digest(state, settings)
        return self._digest[1]

    def embed(
        self,
        pictures: Pictures,
        *,
        pack: Pack | VectorPack | None = None,
        on_error: OnError | None = None,
        progress: bool | None = None,
    ) -> Embeddings:
        """The vectors of pictures, of length 1, in float32, on the device.

        Args:
            pictures: Records, or a list of paths or of Pillow images, which have no labels (-1).
            pack: that the pictures of Records are in, decoded, or what the backbone made of them; None decodes their
                files. What is known of a frozen backbone takes its place, with the same bits.
            on_error: a picture that cannot be decoded: "raise", or "skip" it; `about["skipped"]` then says why. None:
                of Records as in the run that the model comes from; else "raise".
            progress: show a bar; None: where a person watches and it takes long.
        """
        if not isinstance(pictures, Records):
            if isinstance(pictures, (str, Path)):  # else its letters would be taken for paths
                raise TypeError(f"pictures are given as a list, also of one: embed([{str(pictures)!r}])")
            images = [one for one in pictures if isinstance(one, Image.Image)]
            if images and len(images) == len(pictures):
                return self._embed_images(images, progress)
            pictures, on_error = records_of_paths(pictures), on_error or "raise"  # who names a picture wants its vector
        on_error = on_error or self.on_error
        if not isinstance(pack, VectorPack):
            pack = known_vectors(self, pictures, pack, on_error) or pack
        found = self.embeddings_by(self.model, pictures, pack, on_error, progress, self.flip)
        origin = {"dataset": pictures.name, "root": str(pictures.root.resolve()), **found.about}
        return dataclasses.replace(found, about=self.description() | origin)

    def embeddings_by(
        self,
        model: nn.Module,
        records: Records,
        pack: Pack | VectorPack | None,
        on_error: OnError,
        progress: bool | None,
        flip: bool = False,
    ) -> Embeddings:
        """What a model, or a part of one, makes of pictures that are read, cut and shared out as for this encoder.

        Of their origin, `about` holds what was "skipped" alone.
        """
        batches = evaluation_batches(
            records,
            self.crop,
            self.batch,
            None if pack is None else pack.of(records),
            self.device,
            0 if len(records) <= self.batch else self.workers,  # one batch is not worth starting processes for
            on_error,
            side=self.side,
            ranks=self.ranks,
        )
        with repeatable(self.hardware):
            autocast = autocast_of(self.hardware, self.device)
            found = embeddings_of(model, batches, autocast, progress, flip, self.ranks)
        skipped = {name: why for part in self.ranks.from_all(batches.skipped) for name, why in part.items()}
        return dataclasses.replace(found, about={"skipped": skipped})

    def _embed_images(self, images: Sequence[Image.Image], progress: bool | None) -> Embeddings:
        batches = image_batches(images, self.crop, self.side, self.batch, self.device)
        with repeatable(self.hardware):
            autocast = autocast_of(self.hardware, self.device)
            found = vectors_of(self.model, batches, len(images), autocast, progress, self.flip)
        assert found is not None
        labels = torch.full((len(images),), UNLABELLED, dtype=torch.int64, device=self.device)
        return Embeddings(found[0], labels, about=self.description())

    def description(self) -> dict[str, Any]:
        """What travels with its vectors: enough to tell whether others fit them."""
        crop: dict[str, Any] = {"image": self.crop.size, "resize": self.crop.resize, "side": self.side}
        return {
            "model": self.digest,
            "name": self.name,
            "crop": {**crop, "flip": True} if self.flip else crop,
            "precision": self.precision,
        }

    def records(self, data: str | None = None, root: str | Path | None = None) -> Records:
        """The pictures of a dataset; by default those of the run that the model comes from, divided as the run did.

        Args:
            data: a dataset of `roadmap.data`, such as "folder"; None for the run's.
            root: where it lies; None for where the run found it.
        """
        from roadmap.encoder.opening import records_for

        return records_for(self, data, root)


def records_of_paths(paths: Sequence[object]) -> Records:
    """Pictures without labels; their names are relative to the working folder, or absolute."""
    if wrong := [one for one in paths if not isinstance(one, (str, Path))]:
        raise TypeError(
            f"pictures must be Records, paths, or Pillow images, all of one kind; got {type(wrong[0]).__name__} "
            "among them"
        )
    names = tuple(Path(str(path)).as_posix() for path in paths)
    return Records("pictures", Path.cwd(), names, np.full(len(names), UNLABELLED))
