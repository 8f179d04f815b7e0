"""Rank losses beyond AP: values and gradients that the authors' released code gave on one batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roadmap.losses import HAPPIER, GradedNDCG, HierarchicalAP, SupRank, recall_at_k
from roadmap.losses.comparison import Comparison
from roadmap.losses.mixing import mixed_table

from .test_released_baselines import EMBEDDINGS, LABELS, WEIGHTS, check_value

RELEASED: dict[str, Any] = json.loads((Path(__file__).parent / "released_ranks.json").read_text(encoding="utf-8"))
PATHS = torch.stack([LABELS // 3, LABELS], dim=1)
CONSTANTS = {"delta": 0.05, "offset": 1.44}
FLOAT32 = 1e-7  # where relevance, or the ranks of the best order, are float32 there
EVEN = torch.tensor(RELEASED["even"])


def leaf() -> Tensor:
    return EMBEDDINGS.clone().requires_grad_()


def check_with_proxies(
    name: str, loss: nn.Module, labels: Tensor, rows: Tensor | slice = slice(None), **near: float
) -> None:
    loss, x = loss.double(), leaf()
    proxies = loss.clusters.proxies
    proxies.data = WEIGHTS[:4].clone()
    value = near.pop("factor", 1.0) * loss(x[rows], labels[rows])
    check_value(RELEASED[name], value, [x, proxies], near.get("atol", 1e-13))


@pytest.mark.parametrize("pull", [False, True])
def test_happier_is_the_released_one(pull: bool) -> None:
    check_with_proxies(
        f"happier, with_hrank {pull}", HAPPIER(4, 3, lam=0.1, pull=pull, **CONSTANTS), PATHS, atol=FLOAT32
    )


def test_losses_of_a_tree_are_the_released_ones() -> None:
    for name, loss in (("hierarchical ap", HierarchicalAP), ("graded ndcg", GradedNDCG)):
        x = leaf()
        check_value(RELEASED[name], loss(**CONSTANTS)(x, PATHS), [x], FLOAT32)


def test_suprank_is_the_released_one() -> None:
    check_with_proxies("suprank, ap", SupRank(4, 3, **CONSTANTS), LABELS)
    check_with_proxies("suprank, ndcg", SupRank(4, 3, measure="ndcg", **CONSTANTS), LABELS, atol=FLOAT32)
    # whose two parts are added 1 + 1
    recall = SupRank(4, 3, lam=0.5, measure="recall", ks=(1, 2, 4), **CONSTANTS)
    check_with_proxies("suprank, recall", recall, LABELS, EVEN, factor=2.0)


@pytest.mark.parametrize(("temperatures", "mixup"), [([1, 1, 1], 0), ([1, 2, 4], 0), ([1, 2, 4], 1)])
def test_recall_is_the_released_one(temperatures: list[float], mixup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the query among the negatives of its own ranking, as it is there; with SiMix by its shares."""
    x = leaf()
    c = Comparison.of(x[EVEN], LABELS[EVEN])
    scores, positives, negatives, own = c.scores, c.positives(include_self=False), c.negatives, c.own
    if mixup:
        shares = torch.tensor(RELEASED["mixture"])[[0, 2, 1, 3, 5, 4]]  # our order is (0, 1), (0, 2), (1, 2)
        monkeypatch.setattr(torch, "rand", lambda *size, **options: shares)
        table = mixed_table(c)
        scores, positives, negatives, own = table.scores, table.positives(False), table.negatives, table.own
    negatives = negatives | (own[:, None] == torch.arange(scores.shape[1]))
    value = recall_at_k(scores, positives, negatives, (1, 2, 4), tau_k=temperatures, share="reachable")
    check_value(RELEASED[f"recall at k, temperatures {temperatures}, mixup {mixup}"], value, [x], 1e-13)
