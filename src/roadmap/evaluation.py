"""Embeddings -> protocol -> {name: value}."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from roadmap.data import Records
from roadmap.embeddings import Embeddings
from roadmap.metrics import GroundTruth, retrieval_metrics, revisited_metrics_of_vectors
from roadmap.metrics.counted import Ties

# The k of Recall@k that are reported for each dataset; others take those of CUB.
KS = {
    "cub": (1, 2, 4, 8),
    "sop": (1, 10, 100, 1000),
    "inaturalist": (1, 4, 16, 32),
    "inshop": (1, 10, 20, 30),
}


def recall_ks(dataset: str) -> tuple[int, ...]:
    """The k of Recall@k that the literature reports for a dataset."""
    return KS.get(dataset, KS["cub"])


# What is measured too, but is no merit: epochs are not chosen by it.
NO_MERIT = ("AP loss", "queries", "queries_without_positives")


def merits(records: Records, ks: Sequence[int] | None = None) -> tuple[str, ...]:
    """The names of what `dataset_evaluation` will measure and of which more is better; nothing is embedded for it."""
    two = Embeddings(torch.eye(2), torch.zeros(2, dtype=torch.int64))
    if records.ground_truth:
        none, first = torch.zeros(0, dtype=torch.int64).numpy(), torch.zeros(1, dtype=torch.int64).numpy()
        names = list(revisited_evaluation(two, two, GroundTruth((first,) * 2, (none,) * 2, (none,) * 2)))
    else:
        names = list(retrieval_evaluation(two, None, recall_ks(records.name) if ks is None else ks, progress=False))
    return tuple(name for name in names if not name.endswith(NO_MERIT))


def dataset_evaluation(
    records: Records, embed: Callable[[Records], Embeddings], ks: Sequence[int] | None = None
) -> dict[str, float]:
    """The protocol of a dataset: test among themselves, queries against a gallery, or the revisited landmarks.

    Args:
        records: with a split "test", or "query" and "gallery".
        embed: gives the embeddings of any of its parts.
        ks: of Recall@k; None for the dataset's own.
    """
    queries, gallery = records.evaluation()
    ks = recall_ks(records.name) if ks is None else ks
    if gallery is None:
        return retrieval_evaluation(embed(queries), None, ks, progress=False)
    found, searched = embed(queries), embed(gallery)
    if not records.ground_truth:
        return retrieval_evaluation(found, searched, ks, progress=False)
    if len(found) != len(queries) or len(searched) != len(gallery):
        raise ValueError(f"{records.name}: the revisited protocol needs every picture, but some could not be decoded")
    easy, hard, junk = (tuple(truth[kind] for truth in records.ground_truth) for kind in ("easy", "hard", "junk"))
    return revisited_evaluation(found, searched, GroundTruth(easy, hard, junk))


def retrieval_evaluation(
    queries: Embeddings,
    gallery: Embeddings | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
    ties: Ties = "pessimistic",
    memory: int = 512 << 20,
    progress: bool | None = None,
) -> dict[str, float]:
    """`retrieval_metrics` of saved embeddings: among themselves, or against a gallery.

    A query whose id is in the gallery does not find itself; without ids on both sides nothing is left out.
    """
    options = {"ks": ks, "ties": ties, "memory": memory, "progress": progress}
    if gallery is None:
        return retrieval_metrics(queries.vectors, queries.labels, **options)  # type: ignore[call-overload, no-any-return]
    return retrieval_metrics(  # type: ignore[call-overload, no-any-return]
        queries.vectors,
        queries.labels,
        gallery.vectors,
        gallery.labels,
        query_index=query_index(queries, gallery),
        **options,
    )


def query_index(queries: Embeddings, gallery: Embeddings) -> Tensor | None:
    """Where each query stands in the gallery, by id; -1: not there; None: one of the two has no ids."""
    if queries.ids is None or gallery.ids is None:
        return None
    place = {name: j for j, name in enumerate(gallery.ids)}
    return torch.tensor([place.get(name, -1) for name in queries.ids])


def revisited_evaluation(queries: Embeddings, database: Embeddings, truth: GroundTruth) -> dict[str, float]:
    """Easy, Medium and Hard in one flat dict, such as "medium trapezoidal mAP".

    Where both sides have ids and the ground truth has names, rows are put into its order by name; else they must
    stand in it already.
    """
    q = _in_order(queries, truth.queries, "queries")
    d = _in_order(database, truth.images, "database")
    settings = revisited_metrics_of_vectors(q.vectors, d.vectors, truth)
    return {f"{setting} {name}": value for setting, values in settings.items() for name, value in values.items()}


def _in_order(embeddings: Embeddings, names: Sequence[str], what: str) -> Embeddings:
    if embeddings.ids is None or not names:
        return embeddings
    place = {name: i for i, name in enumerate(embeddings.ids)}
    missing = [name for name in names if name not in place]
    if missing:
        raise ValueError(
            f"the {what} embeddings lack {len(missing)} images of the ground truth, the first {missing[0]!r}; "
            "their ids must be the names of its image list"
        )
    order = torch.tensor([place[name] for name in names])
    return Embeddings(embeddings.vectors[order], embeddings.labels[order], tuple(names))
