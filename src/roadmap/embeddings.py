"""Embeddings: vectors with their labels, names and origin, in memory and on disk.

What is loaded cannot run code.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roadmap.atomic import NPZ_DAMAGE, whole_file
from roadmap.data import UNLABELLED, Tags, Tree
from roadmap.data.tags import named_tags, tags_in

# What the parts are called in files from elsewhere; ours come first.
NAMES = {
    "vectors": ("vectors", "embeddings", "features"),
    "labels": ("labels", "targets", "classes"),
    "ids": ("ids", "names", "paths"),
    "class_names": ("class_names",),
    "about": ("about",),
    "tree": ("tree",),
    "tree_names": ("tree_names",),
    "tags": ("tags",),
    "tag_names": ("tag_names",),
}
NEEDED = ("vectors", "labels")


@dataclass(frozen=True, eq=False)
class Embeddings:
    """N vectors of D dimensions, what each is of, and where they come from.

    Attributes:
        vectors: (N, D), any float type.
        labels: (N,) int64; where there are class names, -1 is a picture without a label.
        ids: N distinct strings, such as file names below a folder; they tell which gallery item is the query itself.
        class_names: class_names[i] names label i; () where labels are mere numbers.
        about: plain JSON values: "model" (its digest), "name", "crop", "precision", "dataset", "root" (the folder that
            ids are relative to), "skipped" (picture -> why it could not be embedded).
        tree: where they stand in a tree of labels, whose finest level is `labels`; None where there is none.
        tags: the tags of each, any number; None where there are none.
    """

    vectors: Tensor
    labels: Tensor
    ids: tuple[str, ...] | None = None
    class_names: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    tree: Tree | None = None
    tags: Tags | None = None

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
        if self.tree is not None and not np.array_equal(self.tree.paths[:, -1], self.labels.cpu().numpy()):
            raise ValueError("the finest level of the tree must be the labels, one path for each vector")
        if self.tags is not None and len(self.tags) != len(self):
            raise ValueError(f"there are tags of {len(self.tags)} pictures, but {len(self)} vectors")
        self._check_classes()

    def _check_classes(self) -> None:
        if not self.class_names or not len(self):
            return
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < UNLABELLED or high >= len(self.class_names):
            raise ValueError(
                f"labels must lie in 0..{len(self.class_names) - 1} (or {UNLABELLED} for none), one for each of the "
                f"{len(self.class_names)} class names, got {low}..{high}"
            )

    def __len__(self) -> int:
        return len(self.vectors)

    def to(self, device: torch.device | str) -> Embeddings:
        return dataclasses.replace(self, vectors=self.vectors.to(device), labels=self.labels.to(device))

    def select(self, rows: Tensor) -> Embeddings:
        """Those of some rows (int64), in that order."""
        ids = None if self.ids is None else tuple(self.ids[i] for i in rows.tolist())
        at = rows.cpu().numpy()
        tree = None if self.tree is None else self.tree.select(at)
        tags = None if self.tags is None else self.tags.select(at)
        vectors, labels = self.vectors[rows], self.labels[rows]
        return dataclasses.replace(self, vectors=vectors, labels=labels, ids=ids, tree=tree, tags=tags)

    def save(self, path: str | Path) -> None:
        """Write a .npz or .safetensors file, whole or not at all."""
        path = Path(path)
        _SUFFIXES[_suffix(path)][1](self, path)

    @classmethod
    def load(cls, path: str | Path) -> Embeddings:
        """Read a .npz or .safetensors file, ours or one that names its parts as in `NAMES`.

        Labels may be integers or, in a .npz file, strings: these become the class names, in alphabetical order.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist or is not a file")
        read = _SUFFIXES[_suffix(path)][0]
        try:
            return read(path)
        except ValueError as error:
            if str(path) in str(error):
                raise
            raise ValueError(f"{path}: {error}") from error  # of two files, such as queries and gallery, which


def holds_vectors(path: str | Path) -> bool:
    """Whether a file is one of vectors, and not the checkpoint of a model, which ends in .safetensors too.

    Raises:
        ValueError: it cannot be read.
    """
    path = Path(path)
    if path.suffix != ".safetensors" or not path.is_file():
        return path.suffix == ".npz"
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as content:
            return not set(NAMES["vectors"]).isdisjoint(content.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} could not be read as .safetensors: {error}") from error


def _load_npz(path: Path) -> Embeddings:
    try:
        content = np.load(path, allow_pickle=False)
    except NPZ_DAMAGE as error:
        raise ValueError(f"{path} could not be read as .npz: {error}") from error
    if not isinstance(content, np.lib.npyio.NpzFile):
        raise ValueError(f"{path} holds a single array; save vectors and labels together with numpy.savez")
    with content:
        names = {part: _name_in(content.files, part, path) for part in NAMES}
        try:
            arrays = {part: content[name] for part, name in names.items() if name is not None}
        except NPZ_DAMAGE as error:
            if "allow_pickle" in str(error):
                why = "holds Python objects, which could run code; save plain arrays instead"
                raise ValueError(f"{path} {why}") from error
            raise ValueError(f"{path} could not be read as .npz, is it whole? ({error})") from error
    labels, class_names = _label_numbers(arrays["labels"], path)
    return Embeddings(
        torch.from_numpy(arrays["vectors"]),
        labels,
        None if "ids" not in arrays else _strings(arrays["ids"]),
        class_names or _strings(arrays.get("class_names", np.array([], dtype=str))),
        _description(str(arrays["about"]) if "about" in arrays else None),
        _tree(arrays.get("tree"), str(arrays["tree_names"]) if "tree_names" in arrays else None, path),
        _tags(arrays.get("tags"), _strings(arrays.get("tag_names", np.array([], dtype=str))), path),
    )


def _load_safetensors(path: Path) -> Embeddings:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as content:
            found: dict[str, Tensor] = {
                part: content.get_tensor(name)
                for part in (*NEEDED, "tree", "tags")
                if (name := _name_in(content.keys(), part, path)) is not None
            }
            texts = content.metadata() or {}
        ids, class_names = (json.loads(texts.get(name, "null")) for name in ("ids", "class_names"))
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} could not be read as .safetensors: {error}") from error
    labels, _ = _label_numbers(found["labels"].numpy(), path)
    return Embeddings(
        found["vectors"],
        labels,
        None if ids is None else tuple(ids),
        tuple(class_names or ()),
        _description(texts.get("about")),
        _tree(found["tree"].numpy() if "tree" in found else None, texts.get("tree_names"), path),
        _tags(found["tags"].numpy() if "tags" in found else None, json.loads(texts.get("tag_names", "[]")), path),
    )


def _save_npz(embeddings: Embeddings, path: Path) -> None:
    vectors = embeddings.vectors.detach().cpu()
    if vectors.dtype == torch.bfloat16:  # numpy has none; float32 holds it exactly
        vectors = vectors.float()
    parts = {"vectors": vectors.numpy(), "labels": embeddings.labels.cpu().numpy()}
    if embeddings.ids is not None:
        parts["ids"] = np.array(embeddings.ids, dtype=str)
    if embeddings.class_names:
        parts["class_names"] = np.array(embeddings.class_names, dtype=str)
    if embeddings.about:
        parts["about"] = np.array(json.dumps(dict(embeddings.about)), dtype=str)
    if embeddings.tree is not None:
        parts["tree"] = embeddings.tree.paths
        parts["tree_names"] = np.array(_tree_names(embeddings.tree), dtype=str)
    if embeddings.tags is not None:
        parts["tags"] = embeddings.tags.marks
        parts["tag_names"] = np.array(embeddings.tags.names, dtype=str)
    with whole_file(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, **parts)


def _save_safetensors(embeddings: Embeddings, path: Path) -> None:
    from safetensors.torch import save_file

    parts = {"vectors": embeddings.vectors.detach().cpu().contiguous(), "labels": embeddings.labels.cpu().contiguous()}
    texts: dict[str, Any] = {
        "ids": embeddings.ids,
        "class_names": embeddings.class_names or None,
        "about": dict(embeddings.about) or None,
    }
    metadata = {name: json.dumps(value) for name, value in texts.items() if value is not None}
    if embeddings.tree is not None:
        parts["tree"] = torch.from_numpy(embeddings.tree.paths)
        metadata["tree_names"] = _tree_names(embeddings.tree)
    if embeddings.tags is not None:
        parts["tags"] = torch.from_numpy(embeddings.tags.marks)
        metadata["tag_names"] = json.dumps(embeddings.tags.names)
    with whole_file(path) as temporary:
        save_file(parts, temporary, metadata=metadata or None)


_SUFFIXES: dict[str, tuple[Callable[[Path], Embeddings], Callable[[Embeddings, Path], None]]] = {
    ".npz": (_load_npz, _save_npz),
    ".safetensors": (_load_safetensors, _save_safetensors),
}


def _suffix(path: Path) -> str:
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"{path} must end in {' or '.join(_SUFFIXES)}, got {path.suffix or 'no ending'!r}")
    return path.suffix


def _name_in(found: Iterable[str], part: str, path: Path) -> str | None:
    """What a part is called in a file; None: it is not there, and need not be."""
    found = list(found)
    for name in NAMES[part]:
        if name in found:
            return name
    if part not in NEEDED:
        return None
    raise ValueError(
        f"{path} has no {part}: expected one of {', '.join(NAMES[part])}, found {', '.join(found) or 'nothing'}"
    )


def _strings(values: NDArray[Any]) -> tuple[str, ...]:
    """Names as they are meant: bytes are text, so that they match the same names written as text."""
    return tuple(
        value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
        for value in values.tolist()
    )


def _label_numbers(labels: NDArray[Any], path: Path) -> tuple[Tensor, tuple[str, ...]]:
    """Labels as integers; where they are strings, with the names that these number."""
    names: tuple[str, ...] = ()
    if labels.dtype.kind in "US":
        distinct, labels = np.unique(np.array(_strings(labels.reshape(-1)), dtype=str), return_inverse=True)
        names, labels = tuple(distinct.tolist()), labels.reshape(-1)
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{path}: labels must be integers or strings, got {labels.dtype}; convert them first")
    if labels.dtype == np.uint64 and labels.size and labels.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{path}: labels must be below 2^63, got {labels.max()}")
    return torch.from_numpy(labels.astype(np.int64)), names


def _tree_names(tree: Tree) -> str:
    return json.dumps({"levels": tree.levels, "nodes": tree.nodes})


def _tree(paths: NDArray[Any] | None, names: str | None, path: Path) -> Tree | None:
    """(N, L) integers from the coarsest level to the label; those of somebody else have no names."""
    if paths is None:
        return None
    if paths.ndim != 2 or paths.dtype.kind not in "iu":
        raise ValueError(f"{path}: tree must hold integers of shape (N, levels), got {paths.dtype} {paths.shape}")
    depth = paths.shape[1]
    known = {"levels": [f"level {i + 1}" for i in range(depth)], "nodes": [()] * depth} if names is None else None
    try:
        return Tree(paths, **(known or json.loads(str(names))))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: its tree cannot be read: {error}") from error


def _tags(marks: NDArray[Any] | None, names: Iterable[str], path: Path) -> Tags | None:
    """(N, C) bool, those of somebody else without names; or (N,) strings with ; | or , between the tags."""
    if marks is not None and marks.dtype.kind in "US" and marks.ndim == 1:
        return named_tags([tags_in(text) for text in _strings(marks)])
    try:
        return None if marks is None else Tags(marks, tuple(names))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _description(text: str | None) -> dict[str, Any]:
    """What a file says of its origin. What somebody else keeps under that name is not ours, and says nothing."""
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
