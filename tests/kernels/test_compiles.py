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
from roadmap.losses import ROADMAP, GradedNDCG, HierarchicalAP
from roadmap.losses.comparison import Comparison

from .compiling import Kernel, compiled_not_launched
from .interpreting import take_path
from .tree_cases import KINDS

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


@pytest.mark.parametrize("gallery", [False, True], ids=["batch", "gallery"])
@pytest.mark.parametrize("path", ["tiles", "stored"])
def test_a_gpu_with_less_shared_memory_gets_fewer_stages(
    path: str, gallery: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """99 KiB, as GPUs of compute capability 8.6, 8.9 and 12.0 have for a block."""
    take_path(monkeypatch, path)
    monkeypatch.setattr(paths, "_INTERPRETING", True)
    x, labels = torch.randn(256, 512, requires_grad=True), torch.arange(256) // 4
    others = (torch.randn(512, 512), torch.arange(512) // 8) if gallery else (None, labels)
    with compiled_not_launched(monkeypatch, 89, 99 * 1024) as compiled:
        kernels.fused_loss(x, labels, *others, None, RULES["ROADMAP"]).backward()  # type: ignore[no-untyped-call]
    names = {kernel.name for kernel in compiled}
    assert {"_embedding_rows"} | ({"_product"} if gallery or path == "stored" else {"_symmetric_product"}) <= names


def test_a_kernel_that_fits_no_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    take_path(monkeypatch, "tiles")
    monkeypatch.setattr(paths, "_INTERPRETING", True)
    with compiled_not_launched(monkeypatch, 89, 1024), pytest.raises(OutOfResources, match="shared memory"):
        kernels.fused_loss(
            torch.randn(256, 64), torch.arange(256) // 4, None, torch.arange(256) // 4, None, RULES["ROADMAP"]
        )


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
    assert "cp.async" in ptx  # vectors are fetched ahead, 16 bytes at a time


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


def with_largest(monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    """Nothing is counted where nothing runs; the most positives of one query say which kernels are taken."""
    from roadmap.kernels.triton import stored, tiles

    for module in (tiles, stored):
        monkeypatch.setattr(module, "rounded_counts", lambda total, _: (4096, largest))


def constants(compiled: list[Kernel], name: str, constant: str) -> set[Any]:
    """The values of one constant that a kernel was compiled with."""
    return {kernel.constants[constant] for kernel in compiled if kernel.name == name}


@pytest.mark.parametrize("largest", [8, 16, 64])
@pytest.mark.parametrize("rule", ["ROADMAP", "SmoothAP"])
def test_batches_of_several_blocks_compile(rule: str, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    take_path(monkeypatch, "tiles")
    monkeypatch.setattr(paths, "_INTERPRETING", True)
    with_largest(monkeypatch, largest)
    x, labels = torch.randn(600, 256, requires_grad=True), torch.arange(600)
    with compiled_not_launched(monkeypatch) as compiled:
        from roadmap.kernels.triton import symmetric, symmetric_backward

        monkeypatch.setattr(symmetric, "SLOTS", 2)
        monkeypatch.setattr(symmetric_backward, "SIDE", 3)
        monkeypatch.setattr(symmetric_backward, "BAND", 2)
        for full in (1, 1 << 20):  # products of whole tiles, and of parts of them
            monkeypatch.setattr(symmetric_backward, "FULL", full)
            kernels.fused_loss(x, labels, None, labels, None, RULES[rule]).backward()  # type: ignore[no-untyped-call]
    for name in ("_rank_tile_both_ways", "_gradient_tile_both_ways", "_symmetric_product"):
        assert constants(compiled, name, "DIAGONAL") == {False, True}
    assert constants(compiled, "_symmetric_product", "BM") == {64, 128}
    assert constants(compiled, "_rows_from_ranks", "KS") == {largest}


@pytest.mark.parametrize("largest", [8, 16, 64])
@pytest.mark.parametrize("path", ["tiles", "stored"])
def test_long_galleries_compile(path: str, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in parts, and lists whose parts are counted one by one."""
    take_path(monkeypatch, path)
    monkeypatch.setattr(paths, "_INTERPRETING", True)
    with_largest(monkeypatch, largest)
    x, labels = torch.randn(100, 192, requires_grad=True), torch.arange(100)
    ref, ref_labels = torch.randn(3000, 192, requires_grad=True), torch.arange(3000)
    with compiled_not_launched(monkeypatch) as compiled:
        for rule in (RULES["ROADMAP"], RULES["SmoothAP"]):
            kernels.fused_loss(x, labels, ref, ref_labels, None, rule).backward()  # type: ignore[no-untyped-call]
    assert constants(compiled, "_product", "SPLIT") == {False, True}
    assert "_add_splits" in {kernel.name for kernel in compiled}
    if path == "stored":
        assert constants(compiled, "_list_offsets", "PARTS") == {4}
        assert constants(compiled, "_stored_ranks", "KS") == {min(16, largest)}
    else:
        assert constants(compiled, "_rank_tiles", "KS") == {min(16, largest)}


@pytest.mark.parametrize("rule", [*RULES, *MEASURES])
def test_rows_of_several_blocks_compile(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_path(monkeypatch, "small")
    monkeypatch.setattr(paths, "_INTERPRETING", True)
    x, labels = torch.randn(300, 64, requires_grad=True), torch.arange(300)
    ref, ref_labels = torch.randn(5000, 64), torch.arange(5000)
    with compiled_not_launched(monkeypatch) as compiled:
        chosen = (RULES | MEASURES)[rule]
        kernels.fused_loss(x, labels, ref, ref_labels, None, chosen).backward()  # type: ignore[no-untyped-call]
        kernels.fused_loss(x.detach(), labels, ref, ref_labels, None, chosen)
        if chosen.ranks is not None:
            from roadmap.kernels.triton import rows

            mask = torch.zeros(3, 5000, dtype=torch.bool)
            for with_slope in (True, False):
                rows.ap_and_slope(torch.zeros(3, 5000), mask, mask, chosen.ranks, with_slope)
    assert constants(compiled, "_rank_rows", "ONE") == {False}
    assert constants(compiled, "_scores", "BM") == {128}


@pytest.mark.parametrize("kind", KINDS)
def test_graded_losses_of_every_kind_compile(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_INTERPRETING", True)
    loss = KINDS[kind].loss
    x, labels = torch.randn(200, 64, requires_grad=True), torch.stack([torch.arange(200) // n for n in (80, 20, 4)], 1)
    others = {"ref_emb": torch.randn(2500, 64), "ref_labels": labels.repeat(13, 1)[:2500]}
    with compiled_not_launched(monkeypatch) as compiled:
        from roadmap.kernels.triton import trees

        counted = trees.relevant_items
        for largest in (4, 64):
            monkeypatch.setattr(
                trees, "relevant_items", lambda call, most=largest: replace(counted(call), largest=most)
            )
            loss(x, labels, **others).backward()
            loss.terms(Comparison.of(x, labels, graded=True)).sums.sum().backward()  # type: ignore[operator]
    assert constants(compiled, "graded_rows", "KS") == {4, 32}
    assert constants(compiled, "_list_offsets", "PARTS") == {1, 4}
    assert constants(compiled, "_reduce", "AS_TERMS") == {False, True}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_vectors_of_any_type_and_place_compile(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more dimensions than a program takes at a time, and beginning where nothing is a multiple of 16."""
    monkeypatch.setattr(paths, "_INTERPRETING", True)
    labels = torch.arange(30) // 4
    with compiled_not_launched(monkeypatch) as compiled:
        for dims in (2048, 70):
            whole = torch.randn(30, dims + 1).to(dtype)
            for x in (whole[:, 1:].requires_grad_(), whole[:, :-1].requires_grad_()):
                kernels.fused_loss(x, labels, None, labels, None, RULES["ROADMAP"]).backward()  # type: ignore[no-untyped-call]
    assert constants(compiled, "unit_rows", "PADDED") == {2048, 128}


def test_numbers_that_are_whole_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option may be given as 1 where 1.0 is meant, and of a number that is 1 Triton makes a constant."""
    monkeypatch.setattr(paths, "_INTERPRETING", True)
    x, labels = torch.randn(30, 64, requires_grad=True), torch.stack([torch.arange(30) // n for n in (8, 2)], 1)
    with compiled_not_launched(monkeypatch) as compiled:
        for path in ("small", "tiles", "stored"):
            take_path(monkeypatch, path)
            for rho, start, alpha, beta in ((1, 0, 1, 0), (2, 1, 0, -1), (3, 2, 1, -1)):
                loss = ROADMAP(tau=1, rho=rho, delta=start, start=start, alpha=alpha, beta=beta)
                loss(x, labels[:, 1]).backward()
        HierarchicalAP(tau=1, rho=1, pull=True, beta=1, gamma=0, leak=0)(x, labels).backward()
        HierarchicalAP(tau=1, rho=2, pull=True, beta=2, gamma=1, leak=1)(x, labels).backward()
        cluster_loss(x, x, labels[:, 1], 1).backward()  # type: ignore[no-untyped-call]
    assert {"_rank_rows", "_rank_tile_both_ways", "_stored_ranks", "graded_rows"} <= {k.name for k in compiled}
