"""Every kernel compiles for a Hopper GPU, with or without one at hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import roadmap.kernels as kernels
from roadmap.kernels import paths
from roadmap.kernels.clusters import cluster_loss
from roadmap.kernels.counts import counts_at_least, pair_scores
from roadmap.kernels.rules import NDCG, CalibrationRule, LossRule, Measure, RankRule
from roadmap.losses import GradedNDCG, HierarchicalAP

from .compiling import compiled_not_launched
from .interpreting import take_path

SUPAP = RankRule("supap", 0.01, 100.0, 0.05)
RULES = {
    "ROADMAP": LossRule(SUPAP, CalibrationRule(0.9, 0.6, "violating"), 0.5, 0.5),
    "SmoothAP": LossRule(RankRule("smoothap", 0.01), None, include_self=False),
    "Calibration": LossRule(None, CalibrationRule(0.9, 0.6, "all")),
}
RECALL = Measure("recall", (1.0, 2.0, 16.0), (1.0, 0.5, 16.0), True)
MEASURES = {
    "NDCG": LossRule(RankRule("supap", 0.01, 100.0, 0.05, measure=NDCG), None, include_self=False),
    "smooth NDCG": LossRule(RankRule("smoothap", 0.01, measure=NDCG), None),
    "recall": LossRule(RankRule("smoothap", 0.01, measure=RECALL), None, include_self=False),
}


@pytest.mark.parametrize("gallery", ["batch", "gallery", "gallery with places"])
@pytest.mark.parametrize("path", ["small", "tiles", "stored"])
@pytest.mark.parametrize("rule", RULES)
def test_losses_from_embeddings_compile(rule: str, path: str, gallery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_path(monkeypatch, path)
    monkeypatch.setattr(paths, "_INTERPRETING", True)  # which sends tensors of the CPU to the kernels
    x, labels = torch.randn(300, 512, requires_grad=True), torch.arange(300) // 20
    ref, ref_labels = (None, labels) if gallery == "batch" else (torch.randn(700, 512), torch.arange(700) // 30)
    own = torch.arange(300) - 1 if gallery == "gallery with places" else None
    function = kernels.fused_loss if own is None else kernels.loss_terms  # both, without every combination
    with compiled_not_launched(monkeypatch) as compiled:
        function(x, labels, ref, ref_labels, own, RULES[rule]).sum().backward()  # type: ignore[no-untyped-call]
    names = {kernel.name for kernel in compiled}
    expected = {
        "small": {"_rank_rows"},
        "tiles": {"_rank_tiles", "_score_gradient_tiles", "_product"},
        "tiles, batch": {"_rank_tile_both_ways", "_gradient_tile_both_ways", "_symmetric_product"},
        "stored": {"_stored_ranks", "_negative_gradients", "_positive_gradients", "_product"},
    }
    assert expected["tiles, batch" if (path, gallery) == ("tiles", "batch") else path] <= names
    assert ("_factors_of_terms" in names) is (own is not None)


@pytest.mark.parametrize("path", ["small", "tiles", "stored"])
@pytest.mark.parametrize("rule", MEASURES)
def test_other_measures_compile(rule: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_path(monkeypatch, path)
    monkeypatch.setattr(paths, "_INTERPRETING", True)
    x, labels = torch.randn(300, 64, requires_grad=True), torch.arange(300) // 20
    with compiled_not_launched(monkeypatch) as compiled:
        kernels.fused_loss(x, labels, None, labels, None, MEASURES[rule]).backward()  # type: ignore[no-untyped-call]
    names = [kernel.name for kernel in compiled]
    assert ("_rank_rows" if path == "small" else "_rows_from_ranks") in names
    assert ("_among_positives" in names) is (path != "small" and rule != "NDCG")  # H⁺ is a step there


@pytest.mark.parametrize("gallery", [False, True], ids=["batch", "gallery with places"])
@pytest.mark.parametrize("loss", [HierarchicalAP(pull=True), GradedNDCG(include_self=False)], ids=["h_ap", "ndcg"])
def test_label_trees_compile(loss: torch.nn.Module, gallery: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_INTERPRETING", True)
    x, labels = torch.randn(300, 512, requires_grad=True), torch.stack([torch.arange(300) // n for n in (80, 20, 4)], 1)
    others: dict[str, Any] = {}
    if gallery:
        others = {"ref_emb": torch.cat([x.detach(), x.detach()]), "ref_labels": torch.cat([labels, labels])}
        others["own"] = torch.arange(300)
    with compiled_not_launched(monkeypatch) as compiled:
        from roadmap.kernels.triton import trees

        counted = trees.relevant_items  # nothing is counted here, and the largest list says how many meet at a time
        monkeypatch.setattr(trees, "relevant_items", lambda call: replace(counted(call), largest=64))
        loss(x, labels, **others).backward()
    names = {kernel.name for kernel in compiled}
    lists = {"_count_relevant", "_list_offsets", "_move_relevant"}
    assert lists | {"_stored_ranks", "graded_rows", "among_grades", "_negative_gradients", "_product"} <= names


@pytest.mark.parametrize("path", ["small", "tiles", "stored"])
def test_one_of_everything_compiles(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query, one item, one dimension, one class: of a number that is 1 Triton makes a constant."""
    take_path(monkeypatch, path)
    monkeypatch.setattr(paths, "_INTERPRETING", True)
    x, other = (torch.randn(1, 1, requires_grad=True) for _ in range(2))
    label = torch.zeros(1, dtype=torch.int64)
    with compiled_not_launched(monkeypatch) as compiled:
        for rule in (RULES["ROADMAP"], RULES["SmoothAP"]):
            for gallery in (None, other):
                kernels.fused_loss(x, label, gallery, label, None, rule).backward()  # type: ignore[no-untyped-call]
        for loss in (HierarchicalAP(pull=True), GradedNDCG()):
            for gallery in (None, other):
                others = {} if gallery is None else {"ref_emb": gallery, "ref_labels": label[:, None]}
                loss(x, label[:, None], **others).backward()
        cluster_loss(x, other, label, 0.05).backward()  # type: ignore[no-untyped-call]
        kernels.cosine_scores(x, other).sum().backward()
    assert {"graded_rows", "_cluster_rows", "_embedding_rows"} <= {kernel.name for kernel in compiled}


@pytest.mark.parametrize(("dims", "dimensions"), [(50, 16), (64, 16), (65, 64), (512, 64)])
def test_an_accumulator_takes_few_of_few_dimensions(
    dims: int, dimensions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three products of 16 dimensions each between one fresh accumulator and the next."""
    with compiled_not_launched(monkeypatch) as compiled:
        from roadmap.kernels.triton import small

        small.cosine_scores(torch.randn(300, dims), None)
    (ptx,) = (kernel.ptx for kernel in compiled if kernel.name == "_scores")
    assert ptx.count("wgmma.mma_async") == 3 * dimensions // 16


def test_from_scores_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    with compiled_not_launched(monkeypatch) as compiled:
        from roadmap.kernels.triton import rows

        mask = torch.zeros(3, 5000, dtype=torch.bool)
        rows.ap_and_slope(torch.zeros(3, 5000), mask, mask, SUPAP, True)
    assert [kernel.name for kernel in compiled] == ["_rank_rows"]


def test_counts_compile_to_products_on_the_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    q, gallery, columns = torch.randn(3, 100), torch.randn(5, 100), torch.zeros(3, 2, dtype=torch.int64)
    with compiled_not_launched(monkeypatch) as compiled:
        counts_at_least(q, gallery, pair_scores(q, gallery, columns, "triton"), "triton")
    assert [kernel.name for kernel in compiled] == ["_pair_scores", "_counts"]
    assert all("tf32" in kernel.ptx for kernel in compiled)


def test_crops_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from roadmap.kernels.triton import crops

    with compiled_not_launched(monkeypatch) as compiled:
        numbers = torch.zeros(2, crops.NUMBERS, dtype=torch.int64)
        crops.crops(torch.zeros(12, dtype=torch.uint8), numbers, 224, (0.0, 0.1, 0.2), (1.0, 1.1, 1.2))
    assert [kernel.name for kernel in compiled] == ["_crops"]
