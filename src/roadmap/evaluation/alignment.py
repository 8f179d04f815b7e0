"""Two sets of embeddings side by side: do their labels and names mean the same?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from os.path import normpath
from pathlib import PurePath

import torch
from torch import Tensor

from roadmap.config.settings import SettingError
from roadmap.data import UNLABELLED, Tags, Tree
from roadmap.data.tags import merged_tags
from roadmap.data.trees import WHO_HAS_ONE, merged_trees
from roadmap.embeddings import Embeddings


def comparable_pair(queries: Embeddings, gallery: Embeddings) -> tuple[Embeddings, Embeddings]:
    """Both with the same numbers for the same classes, by name where they have names.

    Raises:
        ValueError: the labels, or the vectors themselves, cannot be compared.
    """
    _check_models(queries, gallery)
    if bool(queries.class_names) != bool(gallery.class_names):
        named, bare = ("queries", "gallery") if queries.class_names else ("gallery", "queries")
        raise ValueError(
            f"the labels of the {named} are classes with names, those of the {bare} are mere numbers, which may mean "
            "other classes; give both class names (strings as labels will do), or both none"
        )
    if queries.class_names == gallery.class_names:
        return queries, gallery
    for side, names in (("queries", queries.class_names), ("gallery", gallery.class_names)):
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two classes of the {side} are called {twice!r}, so that names cannot tell them apart")
    number = {name: i for i, name in enumerate(queries.class_names)}
    for name in gallery.class_names:
        number.setdefault(name, len(number))
    # the last place is for UNLABELLED, which is -1
    numbers = torch.tensor([*(number[name] for name in gallery.class_names), UNLABELLED])
    labels = numbers.to(gallery.labels.device)[gallery.labels]
    names = tuple(number)
    trees = [
        None if tree is None else tree.with_labels(of.cpu().numpy(), names)
        for tree, of in ((queries.tree, queries.labels), (gallery.tree, labels))
    ]
    return (
        dataclasses.replace(queries, class_names=names, tree=trees[0]),
        dataclasses.replace(gallery, labels=labels, class_names=names, tree=trees[1]),
    )


def aligned_trees(queries: Embeddings, gallery: Embeddings) -> tuple[Tree, Tree]:
    """The trees of both, with the same numbers for the same nodes.

    Raises:
        SettingError: one has none, or they are of other levels.
    """
    lacking = [side for side, of in (("queries", queries), ("gallery", gallery)) if of.tree is None]
    if queries.tree is None or gallery.tree is None:
        verbs = {"queries": "the queries have", "gallery": "the gallery has"}
        whose = "the pictures have" if len(lacking) == 2 else verbs[lacking[0]]
        raise SettingError(
            "levels",
            f"levels are those of a tree of labels, and {whose} none; {WHO_HAS_ONE}; a column tags would do as well",
        )
    try:
        return merged_trees(queries.tree, gallery.tree)
    except ValueError as error:
        raise SettingError("levels", f"levels of queries and gallery cannot be compared: {error}") from error


def aligned_tags(queries: Embeddings, gallery: Embeddings) -> tuple[Tags, Tags]:
    """The tags of both, which have some, with the same columns for the same tags."""
    assert queries.tags is not None
    assert gallery.tags is not None
    try:
        return merged_tags(queries.tags, gallery.tags)
    except ValueError as error:
        raise SettingError("levels", f"tags of queries and gallery cannot be compared: {error}") from error


def _check_models(queries: Embeddings, gallery: Embeddings) -> None:
    one, other = (side.about.get("model") for side in (queries, gallery))
    if None not in (one, other) and one != other:
        asked, held = (side.about.get("name", "a model") for side in (queries, gallery))
        raise ValueError(
            f"the queries were embedded by {asked} ({str(one)[:12]}) and the gallery by {held} ({str(other)[:12]}): "
            "vectors of different models cannot be compared; embed both with one"
        )


def differences(queries: Embeddings, gallery: Embeddings) -> list[str]:
    """In what both were made differently, a sentence each."""
    found = []
    for part in ("crop", "precision"):
        one, other = (side.about.get(part) for side in (queries, gallery))
        if None not in (one, other) and one != other:
            found.append(f"queries and gallery differ in {part}: {_words(one)} and {_words(other)}")
    return found


def _words(value: object) -> str:
    return " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def own_places(queries: Embeddings, gallery: Embeddings) -> tuple[Tensor, list[str]]:
    """(M,) where each query stands in the gallery, by id, -1 for nowhere; and what a person should hear about it.

    An id names a file below the root of its embeddings: the same id below different roots is another picture.

    Raises:
        ValueError: ids that match, of which nobody knows whether they mean the same picture.
    """
    nowhere = torch.full((len(queries),), -1)
    if queries.ids is None or gallery.ids is None:
        return nowhere, []
    roots = [side.about.get("root") for side in (queries, gallery)]
    shared = set(queries.ids) & set(gallery.ids)
    if (roots[0] is None) != (roots[1] is None):
        if not shared:
            return nowhere, []
        known, unknown = ("queries", "gallery") if roots[0] is not None else ("gallery", "queries")
        raise ValueError(
            f"{len(shared):,} ids are in both files, such as {min(shared)!r}; those of the {known} are below "
            f"{roots[0] or roots[1]}, but the {unknown} do not say below which folder, so that nobody knows whether "
            "they are the same pictures. Embed both again, or leave the ids out of one"
        )
    names = [_paths(side.ids or (), root) for side, root in zip((queries, gallery), roots, strict=True)]
    place = {name: j for j, name in enumerate(names[1])}
    found = torch.tensor([place.get(name, -1) for name in names[0]], dtype=torch.int64)
    notes = []
    if roots[0] != roots[1] and shared:
        notes.append(
            f"{len(shared):,} ids are in both, such as {min(shared)!r}, but below different folders ({roots[0]} and "
            f"{roots[1]}): they are taken for different pictures"
        )
    return found, notes


def _paths(ids: Sequence[str], root: str | None) -> list[str]:
    """Ids as whole paths; as they are, where no root is known."""
    return list(ids) if root is None else [normpath(PurePath(root, name)) for name in ids]


def classes_apart(embeddings: Embeddings, gallery: bool = False) -> Tensor:
    """Labels by which pictures without one are of no class, each alone, in a search on either side."""
    labels = embeddings.labels
    if not (embeddings.class_names or embeddings.about):  # somebody else's numbers, in which -1 may be a class
        return labels
    # below all others; odd in a gallery and even among queries, so that the two never meet
    alone = -2 - gallery - 2 * torch.arange(len(labels), device=labels.device)
    return torch.where(labels == UNLABELLED, alone, labels)
