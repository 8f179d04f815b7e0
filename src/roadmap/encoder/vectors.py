"""Batches of pictures through a model -> Embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize

from roadmap.data import UNLABELLED, Batch, Batches, CentreCrop, picture_key
from roadmap.data.batches.resampling import cpu_crop, write_network_input
from roadmap.data.pictures.images import thumbnail, upright_rgb
from roadmap.embeddings import Embeddings
from roadmap.progress import bar
from roadmap.ranks import ALONE, Ranks


def embeddings_of(
    model: nn.Module,
    batches: Batches,
    autocast: torch.dtype | None = None,
    progress: bool | None = None,
    flip: bool = False,
    ranks: Ranks = ALONE,
) -> Embeddings:
    """The embeddings of all pictures that `batches` delivers, float32, on the device that it delivers to.

    Pictures that `batches` skips are left out; `batches.skipped` names them.

    Args:
        model: images (B, 3, S, S) -> (B, D). It is left in the mode that it was in.
        batches: from `roadmap.data.evaluation_batches`.
        autocast: float16 or bfloat16 for the model's arithmetic; None for float32.
        progress: show a bar; None: where a person watches and it takes long.
        flip: the mean of each picture's vector and its mirror image's, of length 1 again.
        ranks: the processes of which each has some of the batches; every one of them gets all embeddings.
    """
    records = batches.records
    found = vectors_of_all(vectors_of(model, batches, len(records), autocast, progress, flip), model, ranks)
    if found is None:
        raise ValueError(f"{records.name}: there is no picture to embed")
    vectors, place = found
    names = tuple(picture_key(records, i) for i in place.tolist())
    labels = torch.from_numpy(records.labels)[place.cpu()]
    # a list that names a picture twice has no distinct names to offer
    distinct = names if len(set(names)) == len(names) else None
    tree = None if records.tree is None else records.tree.select(place.cpu().numpy())
    tags = None if records.tags is None else records.tags.select(place.cpu().numpy())
    return Embeddings(vectors, labels.to(place.device), distinct, records.class_names, tree=tree, tags=tags)


def vectors_of_all(found: tuple[Tensor, Tensor] | None, model: nn.Module, ranks: Ranks) -> tuple[Tensor, Tensor] | None:
    """The vectors and places of all processes, in the order of the pictures."""
    if ranks.world == 1:
        return found
    widths = [width for width in ranks.from_all(None if found is None else found[0].shape[1]) if width is not None]
    if not widths:
        return None
    if found is None:
        none = torch.zeros(0, widths[0], device=next(model.parameters()).device)
        found = none, none.new_zeros(0, dtype=torch.int64)
    return ranks.rows_of_all(found[0]), ranks.rows_of_all(found[1])


# Not inference mode: a model may keep what it computes here, such as a table of positions, and be trained afterwards.
@torch.no_grad()
def vectors_of(
    model: nn.Module,
    batches: Iterable[Batch],
    total: int,
    autocast: torch.dtype | None,
    progress: bool | None,
    flip: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """(N, D) vectors and the (N,) indices of their pictures; None where no picture came."""
    vectors, places = [], []
    with _evaluation_mode(model), bar(total, "embedding", show=progress, delay=2.0, leave=False) as shown:
        for images, _, indices in batches:
            if len(indices) == 0:  # none of its pictures could be decoded
                continue
            with torch.autocast(images.device.type, dtype=autocast, enabled=autocast is not None):
                found = model(images).float()
                if flip:
                    found = normalize(found + model(images.flip(3)).float(), dim=1)
            vectors.append(found)
            places.append(indices)
            shown.update(len(indices))
    return (torch.cat(vectors), torch.cat(places)) if vectors else None


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model is in evaluation mode, and then all its parts are in the mode they were in."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])  # the model itself comes first
        for part, training in modes:
            part.training = training


def image_batches(
    images: Sequence[Image.Image], crop: CentreCrop, side: int, size: int, device: torch.device
) -> Iterator[Batch]:
    """Pictures that are open already, cut as those of files are."""
    for first in range(0, len(images), size):
        some = images[first : first + size]
        levels = torch.stack([_centre(image, crop, side) for image in some])
        network_input = np.empty(tuple(levels.shape), dtype=np.float32)
        write_network_input(levels.numpy(), crop, network_input)
        indices = torch.arange(first, first + len(some), device=device)
        yield Batch(torch.from_numpy(network_input).to(device), torch.full_like(indices, UNLABELLED), indices)


def _centre(image: Image.Image, crop: CentreCrop, side: int) -> Tensor:
    """(3, S, S) uint8."""
    pixels = np.asarray(thumbnail(upright_rgb(image), side))
    windows = crop.windows(np.asarray([pixels.shape[0]]), np.asarray([pixels.shape[1]]))
    return cpu_crop(pixels, windows, 0, crop.size).contiguous()
