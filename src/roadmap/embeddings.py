"""Pictures -> Embeddings: vectors with their labels and names, in memory and on disk.

What is loaded cannot run code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor, nn

from roadmap.atomic import whole_file
from roadmap.data import Batches, picture_key

# What the three parts are called in files from elsewhere; ours come first.
NAMES = {
    "vectors": ("vectors", "embeddings", "features"),
    "labels": ("labels", "targets", "classes"),
    "ids": ("ids", "names", "paths"),
}


@dataclass(frozen=True)
class Embeddings:
    """N vectors of D dimensions, an integer label for each and, optionally, a distinct name for each.

    Args:
        vectors: (N, D), any float type.
        labels: (N,) int64.
        ids: N distinct strings, such as file names; they tell which gallery item is the query itself.
    """

    vectors: Tensor
    labels: Tensor
    ids: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.vectors.ndim != 2 or not self.vectors.is_floating_point():
            raise ValueError(
                f"vectors must be floating point of shape (N, D), got {self.vectors.dtype} {tuple(self.vectors.shape)}"
            )
        if self.labels.shape != (len(self.vectors),) or self.labels.dtype != torch.int64:
            raise ValueError(
                f"labels must be int64 of shape ({len(self.vectors)},), "
                f"got {self.labels.dtype} {tuple(self.labels.shape)}"
            )
        if self.ids is not None and (len(self.ids) != len(self.vectors) or len(set(self.ids)) != len(self.ids)):
            raise ValueError(
                f"ids must be {len(self.vectors)} distinct names, got {len(self.ids)}, {len(set(self.ids))} distinct"
            )

    def __len__(self) -> int:
        return len(self.vectors)

    def to(self, device: torch.device | str) -> Embeddings:
        return Embeddings(self.vectors.to(device), self.labels.to(device), self.ids)

    def save(self, path: str | Path) -> None:
        """Write a .npz or .safetensors file, whole or not at all."""
        path = Path(path)
        _SUFFIXES[_suffix(path)][1](self, path)

    @classmethod
    def load(cls, path: str | Path) -> Embeddings:
        """Read a .npz or .safetensors file, ours or one that names its parts as in `NAMES`.

        Labels may be integers or, in a .npz file, strings, which are numbered in alphabetical order.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist or is not a file")
        return _SUFFIXES[_suffix(path)][0](path)


# Not inference mode: a model may keep what it computes here, such as a table of positions, and be trained afterwards.
@torch.no_grad()
def embedded(
    model: nn.Module, batches: Batches, autocast: torch.dtype | None = None, progress: bool | None = None
) -> Embeddings:
    """The embeddings of all pictures that `batches` delivers, float32, on the device that it delivers to.

    The model is put into evaluation mode, and all its parts back into the mode they were in. Pictures that `batches`
    skips are left out; `batches.skipped` names them.

    Args:
        model: images (B, 3, S, S) -> (B, D).
        batches: from `roadmap.data.evaluation_batches`.
        autocast: float16 or bfloat16 for the model's arithmetic; None for float32.
        progress: show a bar; None: where a person watches and it takes long.
    """
    from tqdm import tqdm

    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    bar = tqdm(
        total=len(batches.records),
        desc="embedding",
        unit=" pictures",
        disable=None if progress is None else not progress,
        leave=False,
        delay=2.0,
    )
    vectors, places = [], []
    try:
        for images, _, indices in batches:
            if len(indices) == 0:  # none of its pictures could be decoded
                continue
            with torch.autocast(images.device.type, dtype=autocast, enabled=autocast is not None):
                vectors.append(model(images).float())
            places.append(indices)
            bar.update(len(indices))
    finally:
        bar.close()
        model.train(modes[0][1])  # the model itself comes first
        for part, training in modes:
            part.training = training
    if not vectors:
        raise ValueError(f"{batches.records.name}: there is no picture to embed")
    place = torch.cat(places)
    records, rows = batches.records, place.tolist()
    names = tuple(picture_key(records, i) for i in rows)
    labels = torch.from_numpy(records.labels)[place.cpu()]
    # a list that names a picture twice has no distinct names to offer
    return Embeddings(torch.cat(vectors), labels.to(place.device), names if len(set(names)) == len(names) else None)


def _loaded_npz(path: Path) -> Embeddings:
    try:
        content = np.load(path, allow_pickle=False)
    except (OSError, ValueError, BadZipFile) as error:
        raise ValueError(f"{path} could not be read as .npz: {error}") from error
    if not isinstance(content, np.lib.npyio.NpzFile):
        raise ValueError(f"{path} holds a single array; save vectors and labels together with numpy.savez")
    with content:
        names = {part: _named(part, content.files, path) for part in NAMES}
        try:
            arrays = {part: content[name] for part, name in names.items() if name is not None}
        except ValueError as error:
            raise ValueError(f"{path} holds Python objects, which could run code; save plain arrays instead") from error
    ids = arrays.get("ids")
    return Embeddings(
        torch.from_numpy(arrays["vectors"]),
        _integers(arrays["labels"], path),
        None if ids is None else tuple(map(str, ids.tolist())),
    )


def _loaded_safetensors(path: Path) -> Embeddings:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as content:
            found: dict[str, Tensor] = {
                part: content.get_tensor(name)
                for part in ("vectors", "labels")
                if (name := _named(part, content.keys(), path)) is not None
            }
            ids = (content.metadata() or {}).get("ids")
    except SafetensorError as error:
        raise ValueError(f"{path} could not be read as .safetensors: {error}") from error
    return Embeddings(
        found["vectors"], _integers(found["labels"].numpy(), path), None if ids is None else tuple(json.loads(ids))
    )


def _save_npz(embeddings: Embeddings, path: Path) -> None:
    vectors = embeddings.vectors.detach().cpu()
    if vectors.dtype == torch.bfloat16:  # numpy has none; float32 holds it exactly
        vectors = vectors.float()
    parts = {"vectors": vectors.numpy(), "labels": embeddings.labels.cpu().numpy()}
    if embeddings.ids is not None:
        parts["ids"] = np.array(embeddings.ids, dtype=str)
    with whole_file(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, **parts)


def _save_safetensors(embeddings: Embeddings, path: Path) -> None:
    from safetensors.torch import save_file

    parts = {"vectors": embeddings.vectors.detach().cpu().contiguous(), "labels": embeddings.labels.cpu().contiguous()}
    metadata = None if embeddings.ids is None else {"ids": json.dumps(embeddings.ids)}
    with whole_file(path) as temporary:
        save_file(parts, temporary, metadata=metadata)


_SUFFIXES: dict[str, tuple[Callable[[Path], Embeddings], Callable[[Embeddings, Path], None]]] = {
    ".npz": (_loaded_npz, _save_npz),
    ".safetensors": (_loaded_safetensors, _save_safetensors),
}


def _suffix(path: Path) -> str:
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"{path} must end in {' or '.join(_SUFFIXES)}, got {path.suffix or 'no ending'!r}")
    return path.suffix


def _named(part: str, found: Iterable[str], path: Path) -> str | None:
    found = list(found)
    for name in NAMES[part]:
        if name in found:
            return name
    if part == "ids":
        return None
    raise ValueError(
        f"{path} has no {part}: expected one of {', '.join(NAMES[part])}, found {', '.join(found) or 'nothing'}"
    )


def _integers(labels: np.ndarray[Any, np.dtype[Any]], path: Path) -> Tensor:
    if labels.dtype.kind in "US":
        labels = np.unique(labels, return_inverse=True)[1].reshape(-1)
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{path}: labels must be integers or strings, got {labels.dtype}; convert them first")
    if labels.dtype == np.uint64 and labels.size and labels.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{path}: labels must be below 2^63, got {labels.max()}")
    return torch.from_numpy(labels.astype(np.int64))
