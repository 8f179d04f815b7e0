"""Kernels run on the device of their tensors, whichever is the current one, and reach all of their memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import roadmap.kernels as kernels
from roadmap.data.batches import resampling
from roadmap.data.batches.crops import CentreCrop
from roadmap.kernels import clusters, counts, eager, implementations, paths, trees
from roadmap.kernels.rules import CalibrationRule, LossRule, RankRule
from roadmap.losses import HierarchicalAP

from .interpreting import INTERPRETED, check_under_the_interpreter, starts_the_interpreter, take_path

pytest.importorskip("triton")
RULE = LossRule(RankRule("supap", 0.01, 100.0, 0.05), CalibrationRule(0.9, 0.6, "violating"))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels launched; each launch must lie within `on_device_of`. Nothing runs."""
    from triton.runtime.jit import JITFunction

    from roadmap.kernels.triton import launch

    names: list[str] = []
    inside = [0]

    @contextmanager
    def watched(x: Tensor) -> Iterator[None]:
        inside[0] += 1
        yield
        inside[0] -= 1

    def run(self: Any, *_: Any, **__: Any) -> None:
        assert inside[0], f"{self.__name__} is launched on the current device, which may be another than its tensors'"
        names.append(self.__name__)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launch, "_DIRECT", False)
    monkeypatch.setattr(paths, "_INTERPRETING", True)  # sends tensors of the CPU to the kernels
    for module in (implementations, counts, trees, clusters, eager, resampling):
        monkeypatch.setattr(module, "on_device_of", watched)
    return names


@pytest.mark.skipif(INTERPRETED, reason="there kernels are other objects")
@pytest.mark.parametrize("path", ["small", "tiles", "stored"])
def test_losses_are_launched_on_the_device_of_their_tensors(
    path: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_path(monkeypatch, path)
    x, labels = torch.randn(20, 8, requires_grad=True), torch.arange(20) // 4
    kernels.fused_loss(x, labels, None, labels, None, RULE).backward()  # type: ignore[no-untyped-call]
    kernels.cosine_scores(x, None).sum().backward()
    HierarchicalAP()(x, torch.stack([labels // 2, labels], 1)).backward()
    clusters.cluster_loss(x, torch.randn(5, 8), labels, 0.05).backward()  # type: ignore[no-untyped-call]
    masks = labels[:, None] == labels
    kernels.ap_from_scores(torch.randn(20, 20), masks, ~masks, RULE.ranks)  # type: ignore[arg-type]
    assert {"_embedding_rows", "_scores", "_count_relevant", "_cluster_rows", "_rank_rows"} <= set(launches)


@pytest.mark.skipif(INTERPRETED, reason="there kernels are other objects")
def test_metrics_and_crops_are_launched_on_the_device_of_their_tensors(launches: list[str]) -> None:
    q, gallery, columns = torch.randn(3, 8), torch.randn(5, 8), torch.zeros(3, 2, dtype=torch.int64)
    counts.counts_at_least(q, gallery, counts.pair_scores(q, gallery, columns, "triton"), "triton")
    crop = CentreCrop(9, 12)
    windows = crop.windows(np.array([23]), np.array([31]))
    resampling.resized_crops(torch.zeros(3 * 23 * 31, dtype=torch.uint8), np.array([0]), np.array([31]), windows, crop)
    assert launches == ["_pair_scores", "_counts", "_crops"]


@pytest.mark.skipif(INTERPRETED, reason="there kernels are other objects")
def test_metrics_and_crops_are_float32_under_another_default_type(launches: list[str]) -> None:
    q, numbers = torch.randn(3, 8), torch.zeros(2, 11, dtype=torch.int64)
    torch.set_default_dtype(torch.float64)
    try:
        with counts.on_device_of(q):
            from roadmap.kernels.triton import crops

            scores = counts.pair_scores(q, q, torch.zeros(3, 2, dtype=torch.int64), "triton")
            pictures = crops.crops(torch.zeros(12, dtype=torch.uint8), numbers, 9, (0.0, 0.1, 0.2), (1.0, 1.1, 1.2))
    finally:
        torch.set_default_dtype(torch.float32)
    assert launches == ["_pair_scores", "_crops"]
    assert scores.dtype == pictures.dtype == torch.float32


def test_vectors_on_two_devices_are_left_to_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which says what is wrong, where a kernel would read an address that its device cannot."""
    monkeypatch.setattr(paths, "runs_on_triton", lambda x: True)
    here, there = torch.ones(3, 4), torch.ones(3, 4, device="meta")
    assert paths.both_run_on_triton(here, None)
    assert paths.both_run_on_triton(here, here)
    assert not paths.both_run_on_triton(here, there)


@pytest.mark.skipif(not INTERPRETED, reason="runs under Triton's interpreter")
def test_triton_products_of_a_gallery_of_many_numbers() -> None:
    """One query against so many vectors that the last lie beyond 2^31 numbers; of the memory little is ever touched."""
    from roadmap.kernels.triton.small import _unit_gradient

    dims, items = 1 << 26, 34
    try:
        vectors = torch.from_numpy(np.zeros(48 * dims, dtype=np.float16))  # whole tiles
    except MemoryError:
        pytest.skip("no room for the addresses")
    vectors[(items - 1) * dims :][:64] = 2.0
    weights, out = torch.zeros(1, items), torch.zeros(1, 16)
    weights[0, -1] = 1.0
    _unit_gradient[(1, 1)](
        weights, vectors, vectors, out, 1, items, items, 1, PADDED=dims, BOTH=False, BM=16, BN=16, BK=16
    )
    assert torch.equal(out, torch.full((1, 16), 4.0 / 4096))


@starts_the_interpreter
def test_addresses_under_the_interpreter() -> None:
    check_under_the_interpreter(__file__, "triton")
