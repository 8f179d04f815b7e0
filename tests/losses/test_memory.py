"""Cross-batch memory, against a list of what was seen and literal loops over it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from roadmap.losses import (
    HAPPIER,
    ROADMAP,
    BlackBoxAP,
    Calibration,
    ClusteredLoss,
    FastAP,
    GradedNDCG,
    HierarchicalAP,
    HordeContrastive,
    Matryoshka,
    Memory,
    RecallAtK,
    SmoothAP,
    SoftBinAP,
    SupAP,
    SupNDCG,
    SupRank,
    TripletSCT,
)
from roadmap.losses.metric_learning import MetricLearning

from . import literal
from .cases import drawn
from .test_own import LOSSES, masks, transcription

Item = tuple[Tensor, int, int]  # direction, label, picture


class Listed:
    """The memory as its words say: a list, the oldest first."""

    def __init__(self, size: int, repeats: bool = True) -> None:
        self.size, self.repeats = size, repeats
        self.items: list[Item] = []

    def without(self, ids: list[int]) -> list[Item]:
        return self.items if self.repeats else [item for item in self.items if item[2] not in ids]

    def store(self, x: Tensor, labels: list[int], ids: list[int]) -> None:
        for vector, label, picture in zip(x, labels, ids, strict=True):
            if not self.repeats:
                self.items = [item for item in self.items if item[2] != picture]
            self.items.append((vector, label, picture))
        self.items = self.items[-self.size :]


def stored(memory: Memory) -> list[Item]:
    """What a memory holds, the oldest first."""
    held = memory.state_dict()
    slots = [slot for slot in held["ring.order"].tolist() if slot >= 0]
    return [(held["ring.vectors"][s], int(held["ring.labels"][s]), int(held["ring.ids"][s])) for s in slots]


def assert_same(found: list[Item], expected: list[Item]) -> None:
    assert [item[1:] for item in found] == [item[1:] for item in expected]
    for (mine, *_), (theirs, *_) in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


def batches(sizes: list[int], seed: int = 0, pictures: int = 9) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Vectors in float64, labels and pictures; a picture has one label, and may come twice in a batch."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for k, size in enumerate(sizes):
        ids = torch.randint(pictures, (size,), generator=generator)
        found.append((drawn(size, 3, seed + k), ids % 3, ids))
    return found


def literal_step(name: str, x: Tensor, labels: Tensor, items: list[Item]) -> tuple[float, Tensor]:
    """The loss of a batch against itself and `items`, by loops, and its gradient at the batch."""
    gallery = [*x.tolist(), *(v.tolist() for v, _, _ in items)]
    item_labels = [*labels.tolist(), *(label for _, label, _ in items)]
    loop, include_self = transcription(name)
    P, N = masks(labels.tolist(), item_labels, list(range(len(x))), include_self)
    value, ds = loop(literal.cosines(x.tolist(), gallery), P, N)
    dq, dg = (torch.tensor(d, dtype=torch.float64) for d in literal.gradient_of_cosines(ds, x.tolist(), gallery))
    return value, dq + dg[: len(x)]


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("name", [n for n in LOSSES if not n.startswith("ROADMAP")])
def test_batches_and_memory_follow_the_literal_loop(name: str, repeats: bool) -> None:
    memory, listed = Memory(LOSSES[name], 7, repeats=repeats), Listed(7, repeats)
    for x, labels, ids in batches([4, 4, 4, 3, 9, 4]):  # 9 are more than it holds
        leaf = x.clone().requires_grad_()
        value = memory(leaf, labels, ids=ids)
        value.backward()
        expected, gradient = literal_step(name, x, labels, listed.without(ids.tolist()))
        assert value.item() == pytest.approx(expected, abs=1e-11)
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-8, atol=1e-9)
        listed.store(x, labels.tolist(), ids.tolist())
        assert_same(stored(memory), listed.items)


@given(
    size=st.integers(1, 12),
    sizes=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    repeats=st.booleans(),
    seed=st.integers(0, 1000),
    looked=st.booleans(),
)
def test_it_holds_the_last_items_in_their_order(
    size: int, sizes: list[int], repeats: bool, seed: int, looked: bool
) -> None:
    memory, listed = Memory(Calibration(), size, repeats=repeats), Listed(size, repeats)
    for x, labels, ids in batches(sizes, seed):
        memory(x, labels, ids=ids)
        listed.store(x, labels.tolist(), ids.tolist())
        if looked:  # a look changes nothing
            assert_same(stored(memory), listed.items)
    assert_same(stored(memory), listed.items)
    assert len(memory) == len(listed.items)


OURS: list[nn.Module] = [ROADMAP(), SupAP(include_self=False), SmoothAP(), FastAP(), SoftBinAP(), BlackBoxAP()]
OURS += [SupNDCG(), RecallAtK(), SupRank(3, 3, measure="ndcg").double(), TripletSCT(), HordeContrastive()]
OURS += [HierarchicalAP(), GradedNDCG(), Matryoshka(SupAP(), [2, 3])]


@pytest.mark.parametrize("loss", OURS, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_rank_loss_makes_one_comparison(loss: nn.Module, dtype: torch.dtype) -> None:
    """A gallery put together anew each time is the simplest version."""
    memory, listed = Memory(loss, 8), Listed(8)
    assert memory.form == "joined"
    for x, labels, ids in batches([5, 5, 5, 5], 3):
        leaf, plain = (x.to(dtype, copy=True).requires_grad_() for _ in range(2))
        value = memory(leaf, labels, ids=ids)
        value.backward()
        gallery = torch.cat([plain, *(vector[None] for vector, _, _ in listed.items)])
        item_labels = torch.cat([labels, torch.tensor([label for _, label, _ in listed.items], dtype=torch.int64)])
        expected = loss(plain, labels, ref_emb=gallery, ref_labels=item_labels, own=torch.arange(len(x)))
        expected.backward()
        near = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(value, expected, **near)
        torch.testing.assert_close(leaf.grad, plain.grad, **near)
        listed.store(x.to(dtype), labels.tolist(), ids.tolist())


CLUSTERED: list[tuple[nn.Module, nn.Module]] = [
    (SupRank(3, 3, lam=0.3), SupAP()),
    (SupRank(3, 3, lam=0.3, measure="ndcg", include_self=False), SupNDCG(include_self=False)),
    (ClusteredLoss(ROADMAP(), 3, 3, lam=0.3), ROADMAP()),
    (HAPPIER(3, 3, lam=0.3), HierarchicalAP()),
]


@pytest.mark.parametrize(("loss", "ranks"), CLUSTERED, ids=lambda loss: type(loss).__name__)
def test_class_vectors_draw_the_batch_once_in_the_added_form(loss: nn.Module, ranks: nn.Module) -> None:
    """They know nothing of the memory: what is added is the rank loss alone, with its share."""
    loss = copy.deepcopy(loss).double()
    for held in (loss, Matryoshka(lambda d: loss, [3])):
        memory, listed = Memory(held, 8, form="added", weight=0.5), Listed(8)
        for x, labels, ids in batches([5, 5, 5], 3):
            leaf, plain = (x.clone().requires_grad_() for _ in range(2))
            value = memory(leaf, labels, ids=ids)
            value.backward()
            expected = loss(plain, labels)
            if listed.items:
                gallery = torch.stack([vector for vector, _, _ in listed.items])
                known = torch.tensor([label for _, label, _ in listed.items])
                expected = expected + 0.5 * 0.7 * ranks(plain, labels, None, gallery, known)
            expected.backward()
            assert value.item() == pytest.approx(expected.item(), abs=1e-11)
            torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-9, atol=1e-10)
            listed.store(x, labels.tolist(), ids.tolist())


@pytest.mark.parametrize("form", ["joined", "added"])
def test_a_later_batch_may_have_labels_of_a_narrower_type(form: Any) -> None:
    """Classes 0 and 256 are not one where the batch is of bytes."""
    values = []
    for dtype in (torch.int64, torch.uint8):
        memory = Memory(SupAP(), 8, form=form)
        memory(drawn(4, 3, 0), torch.tensor([0, 256, 0, 256]))
        values.append(memory(drawn(3, 3, 1), torch.tensor([0, 0, 1]).to(dtype)).item())
        values.append(memory.eval()(drawn(3, 3, 2), torch.tensor([0, 0, 1]).to(dtype)).item())
    assert values[:2] == values[2:]


def test_the_warm_up_is_the_batch_alone_and_stores_nothing() -> None:
    memory, loss = Memory(ROADMAP(), 16, warmup=2), ROADMAP()
    (first, second, third, fourth) = batches([4, 4, 4, 4])
    for x, labels, _ in (first, second, third):
        assert memory(x, labels).item() == pytest.approx(loss(x, labels).item(), abs=1e-15)
    assert len(memory) == 4
    assert memory(*fourth[:2]).item() != pytest.approx(loss(*fourth[:2]).item(), abs=1e-6)


def test_evaluation_compares_and_changes_nothing() -> None:
    memory = Memory(SupAP(), 16, warmup=1, repeats=False)
    (a, b, c) = batches([4, 5, 4], 2)
    memory(a[0], a[1], ids=a[2])
    memory.eval()
    assert memory(b[0], b[1], ids=b[2]).item() == SupAP()(b[0], b[1]).item()  # nothing stored yet
    memory.train()
    memory(a[0], a[1], ids=a[2])
    before = memory.state_dict()
    memory.eval()
    x = c[0].requires_grad_()
    value = memory(x, c[1], ids=c[2])
    value.backward()
    for name, held in memory.state_dict().items():
        assert torch.equal(held, before[name]), name
    memory.train()
    y = c[0].detach().requires_grad_()
    same = memory(y, c[1], ids=c[2])
    same.backward()
    assert value.item() == pytest.approx(same.item(), abs=1e-12)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_losses_may_wait_for_their_backward(repeats: bool, together: bool) -> None:
    """Of several calls before one backward, none sees what a later one wrote."""
    fed = batches([4, 4, 4, 4], 5)
    one, other = (Memory(ROADMAP(), 9, repeats=repeats) for _ in range(2))
    at_once, later = [], []
    for x, labels, ids in fed:
        leaf = x.clone().requires_grad_()
        one(leaf, labels, ids=ids).backward()
        at_once.append(leaf.grad)
    leaves = [x.clone().requires_grad_() for x, _, _ in fed]
    values = [other(leaf, labels, ids=ids) for leaf, (_, labels, ids) in zip(leaves, fed, strict=True)]
    if together:
        torch.stack(values).sum().backward()
    else:
        for value in reversed(values):
            value.backward()
    later = [leaf.grad for leaf in leaves]
    for mine, expected in zip(later, at_once, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def test_the_buffer_is_not_copied_from_step_to_step() -> None:
    memory = Memory(ROADMAP(), 50)
    places = set()
    for x, labels, ids in batches([6] * 12):
        memory(x.requires_grad_(), labels, ids=ids).backward()
        places.add(memory.ring.vectors.data_ptr())
    dropped = memory(x.clone().requires_grad_(), labels)  # a loss that nobody goes back from holds nothing
    del dropped
    memory(x.clone().requires_grad_(), labels)
    places.add(memory.ring.vectors.data_ptr())
    assert len(places) == 1


def test_the_kernels_are_told_that_the_memory_moves_nothing() -> None:
    memory = Memory(ROADMAP(), 50)
    for x, labels, _ in batches([6, 4]):
        gallery, _ = memory.ring.lay(x.requires_grad_(), labels)
        assert gallery.grad_fn is not None
        assert gallery.grad_fn.moving_rows == len(x)  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("repeats", [True, False])
def test_a_memory_on_a_gpu_is_that_of_the_cpu(repeats: bool) -> None:
    here, there = (Memory(ROADMAP(), 300, repeats=repeats) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    for size in (64, 64, 32, 64, 64, 64, 64):
        x, ids = torch.randn(size, 32, generator=generator), torch.randint(200, (size,), generator=generator)
        one, other = x.clone().requires_grad_(), x.cuda().requires_grad_()
        expected = here(one, ids % 9, ids=ids)
        value = there(other, (ids % 9).cuda(), ids=ids.cuda())
        expected.backward(), value.backward()
        torch.testing.assert_close(value.cpu(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-2, atol=1e-5)
    assert len(here) == len(there)


@pytest.mark.parametrize("repeats", [True, False])
def test_a_state_goes_on_to_the_bit(repeats: bool) -> None:
    """Saved in the middle of the ring, after a batch larger than the others, and loaded into a new memory."""
    fed = batches([4, 7, 4, 4, 4, 4, 4], 7)
    whole = Memory(ROADMAP(), 10, warmup=1, repeats=repeats)
    values = []
    state: dict[str, Any] = {}
    for k, (x, labels, ids) in enumerate(fed):
        if k == 4:
            state = copy.deepcopy(whole.state_dict())
        values.append(whole(x, labels, ids=ids).item())
    half = Memory(ROADMAP(), 10, warmup=1, repeats=repeats)
    half.load_state_dict(state)
    for (x, labels, ids), expected in zip(fed[4:], values[4:], strict=True):
        assert half(x, labels, ids=ids).item() == expected
    for name, held in half.state_dict().items():
        assert torch.equal(held, whole.state_dict()[name]), name
    clone = pickle.loads(pickle.dumps(half))
    x, labels, ids = fed[0]
    assert clone(x, labels, ids=ids).item() == half(x, labels, ids=ids).item()


def test_a_state_of_another_memory_is_refused() -> None:
    (x, labels, _), (y, other, _) = batches([4, 4])
    memory = Memory(ROADMAP(), 10)
    memory(x, labels)
    state = memory.state_dict()
    with pytest.raises(RuntimeError, match="a memory of 10 items was saved, this one holds 8"):
        Memory(ROADMAP(), 8).load_state_dict(state)
    wider = Memory(ROADMAP(), 10)
    wider(torch.cat([y, y], 1), other)
    with pytest.raises(RuntimeError, match="3 dimensions were saved, this memory holds 6"):
        wider.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"ring.order\""):
        Memory(ROADMAP(), 10).load_state_dict({k: v for k, v in state.items() if k != "ring.order"})
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"ring.more\""):
        Memory(ROADMAP(), 10).load_state_dict(state | {"ring.more": x})
    fresh = Memory(ROADMAP(), 10)  # saved before the first batch
    fresh.load_state_dict(Memory(ROADMAP(), 10).state_dict())
    assert fresh(x, labels).item() == ROADMAP()(x, labels).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_kept_in_float32(dtype: torch.dtype) -> None:
    memory = Memory(ROADMAP(), 10)
    for x, labels, _ in batches([4, 4]):
        leaf = x.to(dtype).requires_grad_()
        value = memory(leaf, labels)
        value.backward()
        assert value.dtype == torch.float32
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype
    held = stored(memory)
    assert held[0][0].dtype == torch.float32
    assert torch.equal(held[0][0], batches([4, 4])[0][0][0].to(dtype).float())


X, Y = torch.randn(3, 2), torch.tensor([0, 1, 1])
BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no ids": (
        {},
        ValueError,
        r"repeats=False needs the ids of the pictures: call loss\(emb",
    ),
    "few ids": ({"ids": Y[:2]}, ValueError, "ids has 2 entries but embeddings has 3 rows"),
    "floats": (
        {"ids": X[:, 0]},
        TypeError,
        r"ids must be a 1-D torch.Tensor of integers, .* got torch.float32",
    ),
    "a list": ({"ids": [1, 2, 3]}, TypeError, "ids must be a 1-D torch.Tensor of integers, one per picture, got list"),
    "gallery": ({"ids": Y, "ref_emb": X, "ref_labels": Y}, ValueError, "a loss with a memory takes neither"),
    "pairs": ({"ids": Y, "indices_tuple": (Y, Y, Y)}, ValueError, "its gallery is the batch and the memory"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_calls_that_cannot_be(name: str) -> None:
    options, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        Memory(ROADMAP(), 4, repeats=False)(X, Y, **options)


def test_arguments_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="size must be >= 1, got 0"):
        Memory(ROADMAP(), 0)
    with pytest.raises(ValueError, match="form must be 'auto', 'joined' or 'added', got 'xbm'"):
        Memory(ROADMAP(), 4, form="xbm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="MetricLearning cannot tell a query from its own place in a gallery"):
        Memory(MetricLearning(nn.Identity()), 4, form="joined")
    with pytest.raises(ValueError, match="the loss has a memory already"):
        Memory(Memory(ROADMAP(), 4), 4)
    memory = Memory(ROADMAP(), 4)
    memory(X, Y)
    with pytest.raises(ValueError, match="embeddings have 4 dimensions but the memory holds vectors of 2"):
        memory(torch.randn(3, 4), Y)
    with pytest.raises(ValueError, match=r"embeddings\[1\] is a zero vector"):
        memory(X * torch.tensor([[1.0], [0.0], [1.0]]), Y)
    assert len(memory) == 3  # what was refused is not stored
