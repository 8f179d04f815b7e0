"""The kernels as registered operators: compiled whole, captured, transformed; and not loaded before they are used."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roadmap.kernels import chunks
from roadmap.kernels.rules import CalibrationRule, LossRule, Measure, RankRule, ranks_of, rule_of
from roadmap.losses import (
    ROADMAP,
    BlackBoxAP,
    Calibration,
    FastAP,
    RecallAtK,
    SmoothAP,
    SoftBinAP,
    SupAP,
    SupNDCG,
    SupRank,
)

from .interpreting import take_path

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3, 2, 0])
GALLERY_LABELS = torch.tensor([2, 0, 4, 1, 1, 0, 0])
FUSED: dict[str, nn.Module] = {
    "ROADMAP": ROADMAP(),
    "SupAP": SupAP(include_self=False),
    "SmoothAP": SmoothAP(),
    "Calibration": Calibration(),
    "Calibration all": Calibration(average="all"),
    "SupNDCG": SupNDCG(),
    "RecallAtK": RecallAtK(),
    "SupRank": SupRank(4, 6, measure="recall"),
}
LOSSES = FUSED | {"FastAP": FastAP(), "SoftBinAP": SoftBinAP(), "BlackBoxAP": BlackBoxAP()}


def vectors(items: int = 9, seed: int = 0, device: str = "cpu") -> Tensor:
    x = torch.randn(items, 6, generator=torch.Generator().manual_seed(seed)) + 0.5
    return x.to(device).requires_grad_()


def gallery(device: str = "cpu") -> dict[str, Tensor]:
    return {"ref_emb": vectors(7, 1, device), "ref_labels": GALLERY_LABELS.to(device)}


def test_importing_the_losses_loads_no_compiler() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import roadmap.losses, roadmap.metrics; "
        "print([m for m in ('torch._dynamo', 'torch._inductor', 'triton', 'sympy') if m in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("with_gallery", [False, True], ids=["batch", "gallery"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_whole_loss_compiles_to_one_graph(name: str, with_gallery: bool) -> None:
    torch.compiler.reset()
    loss, results = LOSSES[name], []
    for compiled in (False, True):
        x, others = vectors(), gallery() if with_gallery else {}
        call = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
        value = call(x, LABELS, **others)
        value.backward()
        results.append((value.detach(), x.grad, others["ref_emb"].grad if with_gallery else None))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


RULE = LossRule(RankRule("supap", 0.01, 100.0, 0.05), CalibrationRule(0.9, 0.6, "violating"), 0.5, 0.5)
RECALL = Measure("recall", (1.0, 4.0), (0.1, 1 / 3), True)


def test_rules_come_back_from_what_operators_take() -> None:
    ranks = RankRule("supap", 0.01, 100.0, 0.05, 0.5, 1.44, RECALL)
    assert ranks_of(*ranks.flat, *RECALL.flat) == ranks
    rule = LossRule(ranks, None, 0.3, 0.7, False)
    assert rule_of(rule.flat) == rule
    calibrated = rule_of(RULE.flat)
    assert calibrated.calibration == RULE.calibration
    assert calibrated.ranks is not None
    assert calibrated.ranks.measure_or_ap.kind == "ap"
    assert rule_of(LossRule(None, RULE.calibration).flat).ranks is None


def arguments(name: str, own: Tensor | None) -> tuple[Any, ...]:
    x = vectors()
    compared = x, vectors(7, 1), LABELS, GALLERY_LABELS, own
    scores = (x @ x.T).detach().requires_grad_()
    same = LABELS[:, None] == LABELS
    return {
        "rank_loss": (*compared, *RULE.flat, True, True),
        "rank_loss_backward": (
            torch.ones(6), torch.empty(0, dtype=torch.uint8), *compared, *RULE.flat, True, True, True
        ),
        "ap_from_scores": (scores, same, ~same, *RankRule("smoothap", 0.1).flat, *RECALL.flat, True),
        "ap_from_scores_backward": (torch.ones(9), torch.ones(9, 9), scores.detach()),
        "cosine_scores": (x, None if own is None else vectors(7, 1)),
        "cosine_scores_backward": (torch.ones(9, 7), x.detach(), vectors(7, 1).detach(), True, False),
    }[name]  # fmt: skip


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed again"])
@pytest.mark.parametrize("place", [None, torch.tensor([1, 3, 5, 0, -1, 6, -1, -1, -1])], ids=["nowhere", "own"])
@pytest.mark.parametrize(
    "name", ["rank_loss", "ap_from_scores", "ap_from_scores_backward", "cosine_scores", "cosine_scores_backward"]
)
def test_operators_keep_their_promises(
    name: str, place: Tensor | None, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schema, fake tensors, autograd, tracing with any shape: as torch checks them."""
    if not kept:
        monkeypatch.setattr(chunks, "CHUNK_SCORES", 1)
    torch.library.opcheck(getattr(torch.ops.roadmap, name).default, arguments(name, place))


def test_the_backward_operator_keeps_its_promises() -> None:
    tests = ("test_schema", "test_faketensor")
    args = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments("rank_loss_backward", None))
    found = torch.library.opcheck(torch.ops.roadmap.rank_loss_backward.default, args, test_utils=tests)
    assert set(found) == set(tests)


@pytest.mark.parametrize("name", LOSSES)
def test_functional_transforms(name: str) -> None:
    if name == "BlackBoxAP":
        pytest.skip("it has an autograd function of its own")
    loss, x = LOSSES[name], vectors()
    (expected,) = torch.autograd.grad(loss(x, LABELS), x)
    x = x.detach()
    torch.testing.assert_close(torch.func.grad(lambda e: loss(e, LABELS))(x), expected)
    two = torch.stack([x, x + 1])
    torch.testing.assert_close(torch.vmap(lambda e: loss(e, LABELS))(two)[0], loss(x, LABELS))
    torch.testing.assert_close(torch.vmap(torch.func.grad(lambda e: loss(e, LABELS)))(two)[0], expected)


@pytest.mark.parametrize("name", FUSED)
def test_functional_transforms_over_queries_and_gallery(name: str) -> None:
    loss, x, others = LOSSES[name], vectors(), gallery()
    value = loss(x, LABELS, **others)
    expected = torch.autograd.grad(value, (x, others["ref_emb"]))
    found = torch.func.grad(
        lambda q, g: loss(q, LABELS, ref_emb=g, ref_labels=GALLERY_LABELS), argnums=(0, 1)
    )(x.detach(), others["ref_emb"].detach())  # fmt: skip
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", FUSED)
def test_a_second_functional_derivative_is_refused_in_words(name: str) -> None:
    first = torch.func.grad(lambda e: LOSSES[name](e, LABELS))
    with pytest.raises(RuntimeError, match="no second derivative.*plain_average_precision"):
        torch.func.grad(lambda e: first(e).square().sum())(vectors().detach())


def test_a_loss_over_scores_can_be_differentiated_twice() -> None:
    """On the CPU a loss that uses the scores alone has all its derivatives."""
    x = vectors().detach().double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda e: FastAP(bins=7)(e, LABELS), x, atol=1e-4)


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("size", ["small", "tiles", "stored"])
@pytest.mark.parametrize("name", FUSED)
def test_a_gpu_compiles_to_one_graph(name: str, size: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_path(monkeypatch, size)
    torch.compiler.reset()
    loss, results = copy.deepcopy(LOSSES[name]).cuda(), []
    for compiled in (False, True):
        x, others = vectors(device="cuda"), gallery("cuda")
        call = torch.compile(loss, backend=backend, fullgraph=True) if compiled else loss
        value = call(x, LABELS.cuda(), **others)
        value.backward()
        results.append((value.detach(), x.grad, others["ref_emb"].grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
def test_a_cuda_graph_captures_forward_and_backward(name: str) -> None:
    loss, labels = copy.deepcopy(LOSSES[name]).cuda(), LABELS.cuda()
    x = vectors(device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiled, measured and recorded before the capture
        for _ in range(4):
            x.grad = None
            loss(x, labels).backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    x.grad = None
    with torch.cuda.graph(graph):
        value = loss(x, labels)
        value.backward()
    other = vectors(seed=5, device="cuda")
    with torch.no_grad():
        x.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    expected = loss(other, labels)
    expected.backward()
    assert x.grad is not None
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(x.grad, other.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["tiles", "stored"])
def test_a_capture_that_would_read_back_is_refused_in_words(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_path(monkeypatch, size)
    x, labels = vectors(device="cuda"), LABELS.cuda()
    ROADMAP()(x, labels)
    with (
        pytest.raises(RuntimeError, match="9 x 9 scores cannot be captured in a CUDA graph.*leave the loss out"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        ROADMAP()(x, labels)
