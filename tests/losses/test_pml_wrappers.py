"""Our losses inside pytorch-metric-learning's own wrappers: the values and gradients of the direct call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("pytorch_metric_learning", reason="the extra `pml` is not installed")
from pytorch_metric_learning import losses, miners, reducers, regularizers
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

from roadmap.losses import ROADMAP, BlackBoxAP, Calibration, FastAP, SmoothAP, SoftBinAP, SupAP
from roadmap.losses.pml import PMLLoss, contrastive_xbm

from .cases import drawn

OURS: dict[str, Callable[[], nn.Module]] = {
    "ROADMAP": ROADMAP,
    "SupAP": SupAP,
    "Calibration": Calibration,
    "SmoothAP": SmoothAP,
    "FastAP": FastAP,
    "SoftBinAP": SoftBinAP,
    "BlackBoxAP": BlackBoxAP,
    "contrastive_xbm": contrastive_xbm,
}
EVERY_LOSS = pytest.mark.parametrize("name", OURS)
LABELS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3])


def with_gradient(loss: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    value = loss(leaf, *args, **kwargs)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def check_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert expected[1].any(), "a comparison of nothing with nothing"
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@EVERY_LOSS
def test_the_adapter_is_the_loss_it_holds(name: str) -> None:
    x, gallery = drawn(8, 3, 1), {"ref_emb": drawn(6, 3, 2), "ref_labels": torch.tensor([0, 1, 2, 3, 0, 1])}
    for arguments in ({}, gallery):
        check_same(
            with_gradient(PMLLoss(OURS[name]()), x, LABELS, **arguments),
            with_gradient(OURS[name](), x, LABELS, **arguments),
        )
    assert PMLLoss(OURS[name]())(x, LABELS).item() != PMLLoss(OURS[name]())(x, LABELS, **gallery).item()


def test_the_batch_given_as_a_gallery_is_a_gallery() -> None:
    """The library makes a gallery of the batch on its way to the loss; ours tells the two apart."""
    x, loss = drawn(8, 3, 1), SupAP(include_self=False)
    adapted = PMLLoss(loss)
    assert adapted(x, LABELS).item() == loss(x, LABELS).item()
    assert adapted(x, LABELS, ref_emb=x, ref_labels=LABELS).item() == loss(x, LABELS, None, x, LABELS).item()
    assert loss(x, LABELS).item() != loss(x, LABELS, None, x, LABELS).item()


@EVERY_LOSS
def test_cross_batch_memory(name: str) -> None:
    """Two batches: the second meets the first and itself in the memory, but no item itself."""
    first, second, loss = drawn(8, 3, 1), drawn(8, 3, 2), OURS[name]()
    memory = losses.CrossBatchMemory(PMLLoss(OURS[name]()), embedding_size=3, memory_size=40)
    memory(first, LABELS)
    found = with_gradient(memory, second, LABELS)
    stored, stored_labels = torch.cat([first, second]), torch.cat([LABELS, LABELS])
    same = LABELS[:, None] == stored_labels[None, :]
    itself = torch.arange(16)[None, :] == torch.arange(8)[:, None] + 8
    pairs = (*(same & ~itself).nonzero(as_tuple=True), *(~same).nonzero(as_tuple=True))
    expected = with_gradient(loss, second, LABELS, pairs, stored, stored_labels)
    assert torch.equal(memory.embedding_memory[:16], stored)
    check_same(found, expected)


def test_cross_batch_memory_without_the_query_is_a_smaller_gallery() -> None:
    """A batch alone in the memory is the in-batch call without the query."""
    x = drawn(8, 3, 1)
    memory = losses.CrossBatchMemory(PMLLoss(SupAP()), embedding_size=3, memory_size=40)
    value = memory(x, LABELS)
    assert value.item() == pytest.approx(SupAP(include_self=False)(x, LABELS).item(), abs=1e-12)


@EVERY_LOSS
def test_self_supervised(name: str) -> None:
    x, augmented, numbers = drawn(8, 3, 1), drawn(8, 3, 2), torch.arange(8)
    loss = OURS[name]()
    both = with_gradient(losses.SelfSupervisedLoss(PMLLoss(loss)), x, augmented)
    check_same(both, with_gradient(lambda a: loss(torch.cat([a, augmented]), numbers.repeat(2)), x))
    one_way = with_gradient(losses.SelfSupervisedLoss(PMLLoss(loss), symmetric=False), x, augmented)
    check_same(one_way, with_gradient(loss, x, numbers, ref_emb=augmented, ref_labels=numbers))


def test_multiple_losses_with_weights_and_miners() -> None:
    x, miner = drawn(8, 3, 1), miners.MultiSimilarityMiner()
    together = losses.MultipleLosses(
        [PMLLoss(SupAP()), PMLLoss(Calibration()), losses.TripletMarginLoss()],
        miners=[None, miner, None],
        weights=[0.5, 2.0, 1.0],
    )

    def apart(a: Tensor) -> Tensor:
        value: Tensor = 0.5 * SupAP()(a, LABELS) + 2 * Calibration()(a, LABELS, miner(a, LABELS))
        return value + losses.TripletMarginLoss()(a, LABELS)

    check_same(with_gradient(together, x, LABELS), with_gradient(apart, x))


def test_distributed_wrapper_in_one_process() -> None:
    with pytest.warns(UserWarning, match="non-distributed setting"):
        found = with_gradient(DistributedLossWrapper(PMLLoss(ROADMAP())), drawn(8, 3, 1), LABELS)
    check_same(found, with_gradient(ROADMAP(), drawn(8, 3, 1), LABELS))


def half_of_the_batch(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mine = slice(4 * rank, 4 * rank + 4)
    found = with_gradient(DistributedLossWrapper(PMLLoss(ROADMAP())), drawn(8, 3, 1)[mine], LABELS[mine])
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_distributed_wrapper_over_two_processes(tmp_path: Path) -> None:
    """Each process computes the loss of both batches, times two: averaged gradients are those of one process."""
    torch.multiprocessing.spawn(half_of_the_batch, (str(tmp_path),), nprocs=2)
    value, gradient = with_gradient(ROADMAP(), drawn(8, 3, 1), LABELS)
    for rank in range(2):
        found, own = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found.item() == pytest.approx(2 * value.item(), abs=1e-12)
        torch.testing.assert_close(own, 2 * gradient[4 * rank : 4 * rank + 4], rtol=1e-12, atol=1e-12)


def test_the_librarys_own_options_work() -> None:
    x = drawn(8, 3, 1)
    adapted = PMLLoss(SupAP(), embedding_regularizer=regularizers.LpRegularizer(), embedding_reg_weight=0.25)
    expected = SupAP()(x, LABELS).item() + 0.25 * x.norm(dim=1).mean().item()
    assert adapted(x, LABELS).item() == pytest.approx(expected)
    parts = PMLLoss(SupAP(), reducer=reducers.DoNothingReducer())(x, LABELS)
    assert parts["loss"]["losses"].item() == SupAP()(x, LABELS).item()


def test_parameters_copies_and_pickles() -> None:
    adapted = PMLLoss(ROADMAP())
    again = (pickle.loads(pickle.dumps(adapted)), copy.deepcopy(adapted))
    expected = adapted(drawn(8, 3, 1), LABELS).item()
    assert [other(drawn(8, 3, 1), LABELS).item() for other in again] == [expected] * 2
    assert not adapted.state_dict()


@pytest.mark.parametrize("wrapper", [lambda loss: losses.CrossBatchMemory(loss, 3), losses.SelfSupervisedLoss])
def test_what_the_library_refuses_it_still_refuses(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    assert wrapper(PMLLoss(ROADMAP())).supported_losses().count("PMLLoss") == 1  # type: ignore[operator]
    with pytest.raises(Exception, match="not supported for ROADMAP"):
        wrapper(ROADMAP())
    with pytest.raises(Exception, match="not supported for ArcFaceLoss"):
        wrapper(losses.ArcFaceLoss(4, 3))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            ROADMAP,
            r"loss must be an instance, got the class ROADMAP; use ROADMAP\(\.\.\.\)",
        ),
        ("roadmap", "loss must be an nn.Module, got str"),
    ],
)
def test_only_a_loss_is_adapted(loss: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        PMLLoss(loss)


def test_errors_are_those_of_the_loss() -> None:
    with pytest.raises(TypeError, match="labels must be a torch.Tensor of integers, got NoneType"):
        PMLLoss(ROADMAP())(drawn(8, 3, 1))
    with pytest.raises(ValueError, match="ref_emb was given without ref_labels"):
        PMLLoss(ROADMAP())(drawn(8, 3, 1), LABELS, ref_emb=drawn(8, 3, 1))
