"""What the interpreter does not show by itself, since it runs one program of a launch after the other in memory that is
often still zero: programs that meet in memory, and workspaces that are read before they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import roadmap.kernels as kernels
from roadmap.kernels import paths
from roadmap.kernels.clusters import cluster_loss
from roadmap.losses import ROADMAP, GradedNDCG, HierarchicalAP, SmoothAP

from .interpreting import INTERPRETED, check_under_the_interpreter, starts_the_interpreter, take_path

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs under Triton's interpreter")


class Watch:
    """Which places each program of a launch reads and writes. `met` names the kernels whose programs met: at a place
    that one of them writes, and another too, or reads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from triton.runtime import interpreter

        self.met: set[str] = set()
        self.launches = 0
        self._touched: list[tuple[np.ndarray[Any, Any], int, bool]] = []
        self._programs: dict[tuple[int, ...], int] = {}
        self._builder = interpreter.interpreter_builder
        kind, executor = type(self._builder), interpreter.GridExecutor
        load, store, call = kind.create_masked_load, kind.create_masked_store, executor.__call__

        def watched_load(builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
            self._note(ptrs, mask, stores=False)
            return load(builder, ptrs, mask, *rest)

        def watched_store(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._note(ptrs, mask, stores=True)
            return store(builder, ptrs, value, mask, *rest)

        def watched_call(launched: Any, *args: Any, **named: Any) -> Any:
            self._touched.clear()
            self._programs.clear()
            call(launched, *args, **named)
            self._judge(launched.fn.__name__)

        patch.setattr(kind, "create_masked_load", watched_load)
        patch.setattr(kind, "create_masked_store", watched_store)
        patch.setattr(executor, "__call__", watched_call)

    def _note(self, ptrs: Any, mask: Any, *, stores: bool) -> None:
        program = self._programs.setdefault(tuple(self._builder.grid_idx), len(self._programs))
        places = np.asarray(ptrs.data)[np.broadcast_to(mask.data, np.shape(ptrs.data)).astype(bool)]
        self._touched.append((np.unique(places), program, stores))

    def _judge(self, name: str) -> None:
        self.launches += 1
        places = np.concatenate([at for at, _, _ in self._touched])
        programs = np.concatenate([np.full(at.size, program) for at, program, _ in self._touched])
        stores = np.concatenate([np.full(at.size, stored) for at, _, stored in self._touched])
        order = np.argsort(places, kind="stable")
        _, begins = np.unique(places[order], return_index=True)
        first, last = (each.reduceat(programs[order], begins) for each in (np.minimum, np.maximum))
        if ((first != last) & np.logical_or.reduceat(stores[order], begins)).any():
            self.met.add(name)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Memory that nobody has written holds NaN, and -1 where numbers are whole."""
    pytest.importorskip("triton")
    from roadmap.kernels.triton import clusters, fused, launch, trees

    empty, new_buffer = launch.Arena.empty, launch.new_buffer

    def filled(x: Tensor) -> Tensor:
        return (
            x if x.is_meta else x.fill_(255 if x.dtype == torch.uint8 else torch.nan if x.is_floating_point() else -1)
        )

    def of_arena(arena: launch.Arena, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        found = empty(arena, *shape, dtype=dtype)
        return filled(found) if arena.buffer is None else found

    monkeypatch.setattr(launch.Arena, "empty", of_arena)
    for module in (launch, fused, trees, clusters):
        monkeypatch.setattr(module, "new_buffer", lambda size, device: filled(new_buffer(size, device)))
    return Watch(monkeypatch)


def check(watch: Watch, loss: Callable[..., Tensor], *sides: Tensor) -> None:
    """No two programs met, and value and gradients are those of float64."""
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [side.to(dtype, copy=True).requires_grad_() for side in sides]
        value = loss(*leaves)
        found.append([value.detach().double(), *(g.double() for g in torch.autograd.grad(value, leaves))])
    assert watch.launches
    assert not watch.met
    for mine, truth in zip(*found, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-4, atol=1e-4 * float(truth.abs().max()))


@interpreted
@pytest.mark.parametrize("path", ["small", "tiles", "stored"])
@pytest.mark.parametrize("loss", [ROADMAP(), SmoothAP(tau=0.1, include_self=False)], ids=["ROADMAP", "SmoothAP"])
def test_triton_programs_of_a_loss_do_not_meet(
    loss: torch.nn.Module, path: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roadmap.kernels.triton import symmetric, symmetric_backward

    take_path(monkeypatch, path)
    monkeypatch.setattr(symmetric, "SLOTS", 2)
    monkeypatch.setattr(symmetric_backward, "SIDE", 2)
    monkeypatch.setattr(symmetric_backward, "BAND", 1)
    x, g = torch.randn(41, 19) + 0.5, torch.randn(50, 19) + 0.5
    labels, others = torch.arange(41) % 7, torch.arange(50) % 9
    check(watch, lambda e: loss(e, labels), x)
    check(watch, lambda e, r: loss(e, labels, ref_emb=r, ref_labels=others), x, g)


@interpreted
@pytest.mark.parametrize("loss", [HierarchicalAP(pull=True), GradedNDCG(include_self=False)], ids=["h_ap", "ndcg"])
def test_triton_programs_of_label_trees_do_not_meet(
    loss: torch.nn.Module, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roadmap.kernels.triton import trees

    monkeypatch.setattr(trees, "SMALLEST_BLOCK", 1)
    monkeypatch.setattr(trees, "LARGEST_BLOCK", 1)
    labels = torch.stack([torch.arange(37) % n for n in (3, 6, 12)], 1)
    check(watch, lambda e: loss(e, labels), torch.randn(37, 19) + 0.5)


@interpreted
def test_triton_programs_of_proxies_and_scores_do_not_meet(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    from roadmap.kernels.triton import split_gradients, trees
    from roadmap.losses.clusters import cluster_terms

    monkeypatch.setattr(paths, "SMALL", 0)
    for module, name in ((trees, "SMALLEST_BLOCK"), (trees, "LARGEST_BLOCK"), (split_gradients, "BLOCK_SCORES")):
        monkeypatch.setattr(module, name, 1)
    x, proxies, labels = torch.randn(37, 19), torch.randn(40, 19), torch.arange(37) % 5
    weights = torch.randn(37, 40)

    def proxy_loss(e: Tensor, p: Tensor) -> Tensor:
        if e.dtype == torch.float32:
            return cluster_loss(e, p, labels, 0.1)
        return cluster_terms(kernels.cosine_scores(e, p), labels, 0.1).means[0]

    check(watch, proxy_loss, x, proxies)
    check(watch, lambda e, p: (kernels.cosine_scores(e, p) * weights).sum(), x, proxies)


@starts_the_interpreter
def test_races_under_the_interpreter() -> None:
    check_under_the_interpreter(__file__, "triton")
