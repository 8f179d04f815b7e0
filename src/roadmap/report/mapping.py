"""A test set laid out in two dimensions: near one another what a model takes for alike."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from roadmap.data.records import Floats, Ints

MOST, OF_A_CLASS = 1500, 20  # pictures on a map, and of each class
PERPLEXITY = 30.0  # neighbours that t-SNE keeps near
FEWEST = 8  # points that t-SNE has something to do for


def sample(labels: Ints, most: int = MOST, of_a_class: int = OF_A_CLASS) -> Ints:
    """Places of the pictures on the map, ascending: whole classes as far as may be, of evenly spaced classes.

    Pictures without a class count as one class.
    """
    if len(labels) <= most:
        return np.arange(len(labels))
    classes, counts = np.unique(labels, return_counts=True)
    room = max(1, most // int(min(of_a_class, max(counts))))
    chosen = set(classes[_spaced(len(classes), room)].tolist())
    taken = [np.flatnonzero(labels == label) for label in sorted(chosen)]
    places = np.concatenate([some[_spaced(len(some), of_a_class)] for some in taken])[:most]
    return np.sort(places)


def _spaced(length: int, count: int) -> Ints:
    """At most `count` of 0..length-1, evenly spaced."""
    count = min(count, length)
    return (np.arange(count) * 2 + 1) * length // (2 * max(count, 1))


def flat_map(vectors: NDArray[np.floating[Any]]) -> tuple[Floats, str]:
    """(N, 2) within [-1, 1], the same for the same vectors (N, D); and how it was made, in words.

    t-SNE of scikit-learn, where that is installed; else the two directions in which the vectors differ most.
    """
    wide = np.asarray(vectors, dtype=np.float64)
    flat, how = _principal(wide), "the two directions in which the vectors differ most (PCA)"
    if len(wide) >= FEWEST:
        try:
            from sklearn.manifold import TSNE
        except ImportError:
            how += "; with scikit-learn installed it would be t-SNE, which keeps neighbours together"
        else:
            perplexity = min(PERPLEXITY, (len(wide) - 1) / 3)
            spread = max(float(flat[:, 0].std()), 1e-12)
            made = TSNE(2, perplexity=perplexity, init=flat / spread * 1e-4, random_state=0, n_jobs=1)
            flat, how = np.asarray(made.fit_transform(wide.astype(np.float32)), dtype=np.float64), "t-SNE"
    return _within(flat), how


def turned(flat: Floats, like: Floats) -> Floats:
    """A map turned and mirrored so that its points lie as near to those of another as may be; distances stay."""
    centred = flat - flat.mean(0)
    left, _, right = np.linalg.svd(centred.T @ (like - like.mean(0)))
    return _within(centred @ (left @ right))


def _within(flat: Floats) -> Floats:
    """As large as may be: the middle of what it reaches over at 0, the farthest point at 1."""
    centred: Floats = flat - (flat.max(0) + flat.min(0)) / 2
    return centred / max(float(np.abs(centred).max()), 1e-12)


def _principal(vectors: Floats) -> Floats:
    """(N, 2) along the two widest directions; the larger end of each is positive, so that the signs are settled."""
    centred = vectors - vectors.mean(0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    flat = centred @ directions[:2].T
    flat = np.pad(flat, ((0, 0), (0, 2 - flat.shape[1])))
    signs = np.where(np.take_along_axis(flat, np.abs(flat).argmax(0)[None], 0) < 0, -1.0, 1.0)
    found: Floats = flat * signs
    return found
