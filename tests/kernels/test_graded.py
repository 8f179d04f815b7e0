"""The operator of graded measures: what torch asks of one, and who may call through it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from roadmap.kernels.graded import GradedRule, PullRule
from roadmap.kernels.graded_calls import _flat, _rule_of
from roadmap.kernels.rules import RankRule
from roadmap.losses import GradedNDCG, HierarchicalAP

RANKS = RankRule("supap", 0.1, 10.0, 0.3, 0.5, 1.4)
RULES = [
    GradedRule("h_ap", RANKS, PullRule(2.0, 0.5, 1.0)),
    GradedRule("ndcg", RANKS, exponential=True),
    GradedRule("h_ap"),
]


def table() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(3, 6, dtype=torch.float64, generator=generator)
    return scores.requires_grad_(), torch.randint(-1, 4, (3, 6), generator=generator).double()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_rule_is_the_same_after_the_operator_had_it(rule: GradedRule) -> None:
    assert _rule_of(*_flat(rule)) == rule


@pytest.mark.parametrize("rule", RULES[:2], ids=str)
def test_the_operators_keep_their_promises(rule: GradedRule) -> None:
    """Schema, fake tensors, autograd, tracing with any shape: as torch checks them."""
    scores, grades = table()
    torch.library.opcheck(torch.ops.roadmap.graded_from_scores.default, (scores, grades, *_flat(rule), True))
    slope = torch.ones(3, 6, dtype=torch.float64)
    backward = torch.ops.roadmap.graded_from_scores_backward.default
    torch.library.opcheck(backward, (torch.ones(3, dtype=torch.float64), slope, scores.detach()))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("loss", [HierarchicalAP(pull=True), GradedNDCG()], ids=["h_ap", "ndcg"])
def test_a_whole_loss_is_compiled_into_one_graph_and_transformed(loss: nn.Module) -> None:
    x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = torch.stack([torch.arange(8) // 4, torch.arange(8) // 2], 1)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, labels), leaf)
    torch.compiler.reset()
    called = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(called(leaf, labels), leaf)[0], expected)
    found = torch.vmap(torch.func.grad(lambda e: loss(e, labels)))(torch.stack([x, x + 1]))
    torch.testing.assert_close(found[0], expected)
