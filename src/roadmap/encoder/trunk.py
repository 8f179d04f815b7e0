"""What a frozen backbone makes of pictures: computed once, and kept for every later run and evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from roadmap.data import Pack, Records, VectorPack, picture_key
from roadmap.data.pictures.contents import SOURCE_MTIME, SOURCE_SIZE, index_name
from roadmap.data.pictures.packs import source_stamp
from roadmap.data.pictures.shards import OnError
from roadmap.data.pictures.vectors import NONE
from roadmap.embeddings import Embeddings
from roadmap.encoder.vector_files import home, keep_vectors, kept_vectors
from roadmap.models import Retriever
from roadmap.models.checkpoints import weights_digest

if TYPE_CHECKING:
    from roadmap.encoder.encoder import Encoder

# What of a model's settings decides what its backbone gives, beside the weights.
DECIDING = ("name", "pooling", "stride_first")


class Trunk(nn.Module):
    """A network up to where its projection begins."""

    def __init__(self, model: Retriever) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.trunk(images)


def vector_pack(
    encoder: Encoder,
    parts: Iterable[Records],
    pack: Pack | None = None,
    on_error: OnError = "raise",
    progress: bool | None = None,
) -> VectorPack:
    """What the backbone makes of pictures, cut as for evaluation and in the batches of an evaluation, so that the
    projection of them has the bits that the whole network gives.

    Args:
        encoder: of a run, with its frozen model.
        parts: pictures of one dataset that are embedded together: a split, queries, a gallery.
        pack: that the pictures of all parts are in, decoded; None decodes their files.
        on_error: a picture that cannot be decoded: "raise", or "skip".
        progress: show a bar; None: where a person watches and it takes long.
    """
    return _joined_pack([_vectors(encoder, _distinct(records), pack, on_error, progress) for records in parts])


def known_vectors(encoder: Encoder, records: Records, pack: Pack | None, on_error: OnError) -> VectorPack | None:
    """What was kept of these pictures; None where nothing was, or the backbone is not frozen."""
    if encoder.flip or not isinstance(encoder.model, Retriever) or not encoder.model.settings.freeze_backbone:
        return None
    pictures = _distinct(records)
    known = _kept_vectors(encoder, pictures, _digest(encoder, pictures, pack), on_error)
    return None if known is None else _joined_pack([known])


def _joined_pack(found: Sequence[Embeddings]) -> VectorPack:
    rows: dict[str, int] = {}
    failures: dict[str, str] = {}
    first = 0
    for part in found:
        assert part.ids is not None
        rows |= {key: first + i for i, key in enumerate(part.ids)}
        failures |= part.about["skipped"]
        first += len(part)
    keys = (*rows, *failures)
    places = np.asarray([rows.get(key, NONE) for key in keys], dtype=np.int64)
    vectors = np.concatenate([part.vectors.cpu().numpy() for part in found])
    return VectorPack(keys, places, vectors, failures, f"vectors of the frozen backbone, {home()}")


def _distinct(records: Records) -> Records:
    """Every picture once, where a list names some of them again."""
    first = {picture_key(records, i): i for i in reversed(range(len(records)))}
    return records if len(first) == len(records) else records.select(sorted(first.values()))


def _kept_vectors(encoder: Encoder, records: Records, digest: str, on_error: OnError) -> Embeddings | None:
    """From their file; None for all processes where one of them does not see it, as on another machine."""
    assert isinstance(encoder.model, Retriever)
    keys = [picture_key(records, i) for i in range(len(records))]
    found = kept_vectors(digest, keys, encoder.model.width, on_error)
    return None if encoder.ranks.largest(int(found is None))() else found


def _vectors(
    encoder: Encoder, records: Records, pack: Pack | None, on_error: OnError, progress: bool | None
) -> Embeddings:
    """From their file, or computed and written there."""
    digest = _digest(encoder, records, pack)
    known = _kept_vectors(encoder, records, digest, on_error)
    if known is not None:
        return known
    assert isinstance(encoder.model, Retriever)
    whole = encoder.embeddings_by(Trunk(encoder.model), records, pack, on_error, progress)
    found = Embeddings(whole.vectors, whole.labels, whole.ids, about=whole.about)
    if encoder.ranks.first:
        keep_vectors(found, digest)
    return found


def _digest(encoder: Encoder, records: Records, pack: Pack | None) -> str:
    """Of all that decides the vectors: the weights, the pixels, and how they go through the model."""
    model, crop = encoder.model, encoder.crop
    assert isinstance(model, Retriever)
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("projection.")}
    decided: dict[str, Any] = {name: getattr(model.settings, name) for name in DECIDING}
    decided |= {"crop": [crop.size, crop.resize, crop.squeeze, crop.mean, crop.std], "side": encoder.side}
    decided |= {"precision": encoder.precision, "device": encoder.device.type, "batch": encoder.batch}
    decided["pictures"] = records.fingerprint()
    if pack is None:
        decided["sources"] = [source_stamp(records.path(i)) for i in range(len(records))]
    elif pack.drawn:  # pictures that have no files of their own
        decided["sources"] = [source_stamp(pack.folder / "pack.json")]
    else:  # the files that it was made of: they may have changed since
        index = pack.of(records).index
        decided["sources"] = index[:, [SOURCE_SIZE, SOURCE_MTIME]].tolist()
        if pack.lossy:
            decided["lossy"] = index_name(index)  # the checksums of its pictures are in it
    return weights_digest(weights, decided)
