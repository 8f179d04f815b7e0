"""Where the pictures of a run are read from and how they are cut: random crops to train on, centres to judge by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roadmap.config.settings import DataSettings, Settings
from roadmap.data import (
    Batches,
    CategoryPairs,
    MPerClass,
    Pack,
    RandomCrop,
    Records,
    VectorPack,
    evaluation_batches,
    pack_for,
    training_batches,
)
from roadmap.data.pictures.shards import OnError
from roadmap.encoder import Encoder, centre_crop
from roadmap.encoder.trunk import vector_pack
from roadmap.encoder.vectors import vectors_of, vectors_of_all
from roadmap.engine.splits import Splits
from roadmap.evaluation import Evaluation, evaluate, measured_on
from roadmap.evaluation.protocol import records_to_search
from roadmap.features import Features
from roadmap.hardware import autocast_of, repeatable, workers_of
from roadmap.models import Retriever
from roadmap.ranks import ALONE, Ranks


def on_error_of(data: DataSettings) -> OnError:
    """What the settings say about a picture that cannot be decoded, in the type that the data functions take."""
    return "skip" if data.on_error == "skip" else "raise"


class Pictures:
    """Delivers the crops of a run: random ones for training, central ones for evaluation.

    Args:
        settings: of the run.
        model: whose mean and standard deviation normalise the pictures.
        device: where they are delivered.
        quiet: show no bars.
        ranks: the processes that share them.
        levels: measure by the tree of labels too.

    Attributes:
        skipped: path -> reason, of pictures that could not be decoded, in training and evaluation.
    """

    def __init__(
        self,
        settings: Settings,
        model: Retriever,
        device: torch.device,
        quiet: bool = False,
        ranks: Ranks = ALONE,
        levels: bool = False,
    ) -> None:
        # told to later evaluations by the checkpoint
        self.measured = ({"levels": True} if levels else {}) | ({"dims": settings.dims} if settings.dims else {})
        self.settings, self.device, self.quiet, self.ranks = settings, device, quiet, ranks
        data = settings.data
        low, high = data.scale
        narrow, wide = data.ratio
        self.random = RandomCrop(
            data.image, (low, high), (narrow, wide), data.flip, model.mean, model.std, squeeze=data.squeeze == "all"
        )
        self.centre = centre_crop(data, model)
        self.skipped: dict[str, str] = {}
        self._packs: dict[tuple[str, Path], Pack | None] = {}  # tables can lie side by side in one folder
        self._vectors: dict[tuple[str, Path], VectorPack] = {}

    def state_dict(self) -> dict[str, Any]:
        """The pictures that were skipped: a resumed run may not meet all of them again; and what is lossy in what the
        others are read from."""
        return {"skipped": dict(self.skipped), "lossy": self._lossy()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        then, now = state_dict.get("lossy", []), self._lossy()  # older runs knew of no compressed packs
        if _ways(then) != _ways(now):
            raise ValueError(
                f"the run began with {_pixels(then)}, and now there are {_pixels(now)}: it would go on with other "
                f"pixels. data.pack={'compressed' if then else 'yes or data.pack=no'} reads them as they were, from "
                "the pack that was made then"
            )
        self.skipped.update(state_dict["skipped"])

    @property
    def channels_last(self) -> bool:
        """Whether what is delivered has channels that the hardware is to have last."""
        return self.settings.hardware.channels_last and not self.settings.model.freeze_backbone

    def open_pack(self, everything: Records) -> str:
        """Opens the pack of a dataset, or makes it, before its splits are asked for; says what will be read."""
        data = self.settings.data
        with self.ranks.turns():  # one makes it
            self._packs[everything.name, everything.root], said = pack_for(
                everything, data.side, data.pack, on_error=on_error_of(data), progress=False if self.quiet else None
            )
        return said

    def _lossy(self) -> list[str]:
        return sorted({pack.lossy for pack in self._packs.values() if pack is not None and pack.lossy})

    def _pack(self, records: Records) -> Pack | None:
        whole = self._packs.get((records.name, records.root))
        return None if whole is None else whole.of(records)

    def _input(self, records: Records) -> Pack | VectorPack | None:
        """What the model is trained on: their vectors, where its backbone is frozen, else their pack."""
        vectors = self._vectors.get((records.name, records.root))
        return self._pack(records) if vectors is None else vectors.of(records)

    def keep_vectors(self, model: Retriever, splits: Splits) -> str:
        """Of a model whose backbone is frozen: what it makes of every picture is computed, or found in the cache, and
        read in the place of pictures from then on; says so."""
        searched = [records_to_search(part).evaluation() for part in (splits.val, *splits.tests) if part is not None]
        parts = [splits.train, *(part for pair in searched for part in pair if part is not None)]
        for where in {(part.name, part.root): None for part in parts}:
            self._vectors[where] = vector_pack(
                Encoder.of(model, self.settings, self.device, self.ranks),
                [part for part in parts if (part.name, part.root) == where],
                self._packs.get(where),
                on_error_of(self.settings.data),
                False if self.quiet else None,
            )
        count = sum(len(vectors) for vectors in self._vectors.values())
        return (
            f"the backbone is frozen: each of {count:,} pictures went through it once, cut as for evaluation; "
            "there are no random crops"
        )

    def training(self, train: Records, sampler: MPerClass | CategoryPairs) -> Batches:
        data = self.settings.data
        batches = training_batches(
            train,
            sampler,
            self.random,
            self._input(train),
            self.device,
            self.settings.seed,
            workers_of(data, self.ranks),
            on_error_of(data),
            side=data.side,
            chunk=data.parts,
        )
        batches.skipped = self.skipped  # one list for the whole run
        return batches

    def share_skipped(self) -> None:
        """What one process could not decode of its parts of the batches, all of them know."""
        for part in self.ranks.from_all(self.skipped):
            self.skipped.update(part)

    def evaluation(self, model: Retriever, records: Records, nearest: int = 0) -> Evaluation:
        """By the protocol of the dataset, as `roadmap evaluate` does it later, to the bit.

        Args:
            model: with the weights to judge.
            records: with test pictures, or queries and a gallery.
            nearest: how many neighbours of each query are kept.
        """
        where = records.name, records.root
        found = evaluate(
            Encoder.of(model, self.settings, self.device, self.ranks),
            records,
            pack=self._vectors.get(where, self._packs.get(where)),
            on_error=on_error_of(self.settings.data),
            nearest=nearest,
            progress=False if self.quiet else None,
            **measured_on(records, self.measured),
        )
        self.skipped.update(found.facts["data"]["skipped"])
        return found

    def vectors(self, model: Retriever, records: Records, of: Callable[[Features], Tensor]) -> tuple[Tensor, Tensor]:
        """(n, K), what `of` makes of the features of each picture, cut as for evaluation, and (n,) which pictures they
        are: all but those that cannot be decoded, on every process."""
        encoder = Encoder.of(model, self.settings, self.device, self.ranks)
        batches = evaluation_batches(
            records,
            encoder.crop,
            encoder.batch,
            self._pack(records),
            self.device,
            encoder.workers,
            on_error_of(self.settings.data),
            side=encoder.side,
            ranks=self.ranks,
        )
        with repeatable(self.settings.hardware):
            autocast = autocast_of(self.settings.hardware, self.device)
            part = vectors_of(_Described(model, of), batches, len(records), autocast, False if self.quiet else None)
        found = vectors_of_all(part, model, self.ranks)
        self.skipped.update(batches.skipped)
        if found is None:
            raise ValueError(f"{records.name}: none of the {len(records)} training pictures could be decoded")
        return found

    def centres(self, records: Records) -> Tensor:
        """(N, 3, S, S) in 0..1: pictures as they are evaluated, to look at; what cannot be decoded is left out."""
        batches = evaluation_batches(
            records,
            self.centre,
            len(records),
            self._pack(records),
            self.device,
            0,
            "skip",
            side=self.settings.data.side,
        )
        images = torch.cat([batch.images for batch in batches])
        mean, std = (images.new_tensor(values)[:, None, None] for values in (self.centre.mean, self.centre.std))
        return images * std + mean


def _ways(lossy: list[str]) -> list[str]:
    """How pictures were encoded again, whatever their number: a pack may have come to hold others too."""
    return sorted(said.partition(" pictures ")[2] for said in lossy)


def _pixels(lossy: list[str]) -> str:
    return f"a compressed pack ({', '.join(lossy)})" if lossy else "the pixels of the files"


class _Described(nn.Module):
    """A network that gives what `of` makes of its features, instead of its vectors."""

    def __init__(self, model: Retriever, of: Callable[[Features], Tensor]) -> None:
        super().__init__()
        self.model, self.of = model, of

    def forward(self, images: Tensor) -> Tensor:
        return self.of(self.model(images, whole=True))
