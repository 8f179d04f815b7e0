"""Every kernel compiles for a Hopper GPU, with or without one at hand."""

from __future__ import annotations

import pytest
import torch

import roadmap.kernels as kernels
from roadmap.kernels.counts import counts_at_least, pair_scores
from roadmap.kernels.rules import CalibrationRule, LossRule, RankRule

from .compiling import compiled_not_launched

SUPAP = RankRule("supap", 0.01, 100.0, 0.05)
RULES = {
    "ROADMAP": LossRule(SUPAP, CalibrationRule(0.9, 0.6, "violating"), 0.5, 0.5),
    "SmoothAP": LossRule(RankRule("smoothap", 0.01), None, include_self=False),
    "Calibration": LossRule(None, CalibrationRule(0.9, 0.6, "all")),
}


@pytest.mark.parametrize("gallery", [False, True])
@pytest.mark.parametrize("path", ["small", "tiles"])
@pytest.mark.parametrize("rule", RULES)
def test_losses_from_embeddings_compile(rule: str, path: str, gallery: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SMALL", 1 << 30 if path == "small" else 0)
    x, labels = torch.randn(300, 512, requires_grad=True), torch.arange(300) // 20
    ref, ref_labels = (torch.randn(700, 512), torch.arange(700) // 30) if gallery else (None, labels)
    with compiled_not_launched(monkeypatch) as compiled:
        kernels.loss_from_embeddings(x, labels, ref, ref_labels, RULES[rule]).backward()  # type: ignore[no-untyped-call]
    names = [kernel.name for kernel in compiled]
    assert "_rank_rows" in names if path == "small" else {"_rank_tiles", "_product"} <= set(names)


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
