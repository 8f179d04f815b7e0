"""Records of launches, played: under the interpreter a record launches its kernels once more, over memory at the
addresses that it names, as a GPU would. Two calls that differ in what a record leaves out of its account would show."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from roadmap.losses import ROADMAP, HierarchicalAP
from roadmap.losses.clusters import Clusters
from roadmap.losses.comparison import Comparison

from .interpreting import INTERPRETED, check_under_the_interpreter, starts_the_interpreter, take_path

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs under Triton's interpreter")


def at_address(address: int, dtype: torch.dtype) -> Tensor:
    """What lies there, as a tensor of one number: kernels ask for no more."""
    memory = (ctypes.c_char * dtype.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


class Compiled:
    """Stands for a compiled kernel: of the tensors that it was launched with it knows the types, and that their
    addresses are multiples of 16."""

    function = packed_metadata = None

    def __init__(self, kernel: Any, args: tuple[Any, ...], counts: dict[str, int]) -> None:
        self.kernel, self.counts = kernel, counts
        self.types = [x.dtype if isinstance(x, Tensor) else None for x in args]
        self.aligned = [isinstance(x, Tensor) and x.numel() > 0 and x.data_ptr() % 16 == 0 for x in args]

    def run(self, x: int, y: int, z: int, stream: Any, function: Any, packed: Any, *rest: Any) -> None:
        args = list(rest[3:])
        for n, dtype in enumerate(self.types):
            if dtype is not None:
                assert args[n] > 1 << 16, "a place in a tensor that this call does not have"
                assert not (self.aligned[n] and args[n] % 16)
                args[n] = at_address(args[n], dtype)
        self.counts["played"] += 1
        self.counts["launched"] -= 1
        self.kernel[x, y, z](*args)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many kernels were played from records, and how many launched otherwise. Memory without a value is NaN."""
    pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpretedFunction

    from roadmap.kernels.triton import clusters, fused, launch, trees

    found = {"played": 0, "launched": 0}
    run, new_buffer = InterpretedFunction.run, launch.new_buffer

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Compiled:
        run(self, *args, grid=grid, warmup=warmup, **named)
        found["launched"] += 1
        return Compiled(self, args, found)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    monkeypatch.setattr(launch, "_DIRECT", True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
    for module in (launch, fused, trees, clusters):
        monkeypatch.setattr(module, "new_buffer", lambda size, device: new_buffer(size, device).fill_(255))
    return found


M, N, D = 5, 7, 3
LABELS = torch.arange(N) % 3
DRAW = 100  # seeds from here on are those of the second draw
Call = Callable[[torch.dtype, torch.Generator], list[Tensor]]


def drawn(rows: int, dtype: torch.dtype, g: torch.Generator, needed: bool = True) -> tuple[Tensor, Tensor]:
    """Vectors, and labels of which there are as many of each kind at every draw."""
    x = (torch.randn(rows, D, generator=g) + 0.5).to(dtype)
    return x.requires_grad_(needed), LABELS[:rows][torch.randperm(rows, generator=g)]


def result(g: torch.Generator, value: Tensor, *leaves: Tensor) -> list[Tensor]:
    """The value, and the gradients at those that have one. What arrives is another number at every draw: where the
    launches are recorded it lies within the first of them, where they are played at no multiple of 16."""
    near, askew = torch.rand(2, generator=g).to(value.dtype)
    upstream = (near, leaves[0].detach()[0, 0], askew)[g.initial_seed() // DRAW]
    grads = torch.autograd.grad(value, [x for x in leaves if x.requires_grad], upstream)
    return [value.detach().double(), *(grad.double() for grad in grads)]


def calls_of(loss: Any, paths: bool = False) -> dict[str, Call]:
    """Calls of nearly the same shapes, each of which differs from another in one thing."""

    def named(labels: Tensor) -> Tensor:
        return torch.stack([labels // 2, labels], 1) if paths else labels

    def batch(dtype: torch.dtype, g: torch.Generator) -> list[Tensor]:
        x, labels = drawn(N, dtype, g)
        return result(g, loss(x, named(labels)), x)

    def terms(dtype: torch.dtype, g: torch.Generator) -> list[Tensor]:
        x, labels = drawn(N, dtype, g)
        found = loss.terms(Comparison.of(x, named(labels), graded=paths))
        return [found.counts.double(), *result(g, loss.value(found), x)]

    def gallery(dtype: torch.dtype, g: torch.Generator, needs: tuple[bool, bool] = (True, True)) -> list[Tensor]:
        (x, labels), (y, others) = (drawn(rows, dtype, g, need) for rows, need in zip((M, N), needs, strict=True))
        return result(g, loss(x, named(labels), ref_emb=y, ref_labels=named(others)), x, y)

    def large_class(dtype: torch.dtype, g: torch.Generator) -> list[Tensor]:
        (x, _), (y, _) = drawn(M, dtype, g), drawn(N, dtype, g)
        labels, others = torch.zeros(M, dtype=torch.int64), (torch.arange(N) == N - 1).long()
        return result(g, loss(x, named(labels), ref_emb=y, ref_labels=named(others)), x, y)

    def column(dtype: torch.dtype, g: torch.Generator, first: int) -> list[Tensor]:
        """As many vectors, of as many numbers, from a table that is one wider."""
        x, labels = drawn(N, dtype, g, False)
        table = torch.zeros(N, D + 1, dtype=dtype)
        table[:, first : first + D] = x
        x = table[:, first : first + D].requires_grad_()
        return result(g, loss(x, named(labels)), x)

    def square(dtype: torch.dtype, g: torch.Generator, itself: bool) -> list[Tensor]:
        (x, labels), (y, others) = drawn(N, dtype, g), drawn(N, dtype, g, False)
        if itself:
            y, others = x, labels
        return result(g, loss(x, named(labels), ref_emb=y, ref_labels=named(others)), x)

    def placed(dtype: torch.dtype, g: torch.Generator) -> list[Tensor]:
        x, labels = drawn(N, dtype, g)
        first = int(torch.randint(0, N - M, (), generator=g))
        rows = slice(first, first + M)
        others = {"ref_emb": x, "ref_labels": named(labels), "own": torch.arange(first, first + M)}
        return result(g, loss(x[rows], named(labels[rows]), **others), x)

    def front(dtype: torch.dtype, g: torch.Generator) -> list[Tensor]:
        (x, labels), (y, others) = drawn(M, dtype, g), drawn(N, dtype, g)
        items = Front.apply(y)  # type: ignore[no-untyped-call]
        value = loss(x, named(labels), ref_emb=items, ref_labels=named(others))
        found = result(g, value, x, y)
        return [*found[:2], found[2][:2]]

    return {
        "batch": batch,
        "terms": terms,
        "gallery": gallery,
        "gallery of one large class": large_class,
        "queries move": partial(gallery, needs=(True, False)),
        "items move": partial(gallery, needs=(False, True)),
        "the first items move": front,
        "against itself": partial(square, itself=True),
        "against as many": partial(square, itself=False),
        "rows of a batch": placed,
        "columns of a table": partial(column, first=0),
        "other columns of a table": partial(column, first=1),
    }


class Front(torch.autograd.Function):
    """A gallery of which only the first rows hand a gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.moving_rows = 2
        return x.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream


def check(counts: dict[str, int], calls: dict[str, Call]) -> None:
    """Each call three times among the others, every time with other numbers: measured, recorded, played."""
    for draw in range(3):
        before = counts["launched"]
        for n, (name, call) in enumerate(calls.items()):
            mine, truth = (
                call(dtype, torch.Generator().manual_seed(DRAW * draw + n)) for dtype in (torch.float32, torch.float64)
            )
            for one, other in zip(mine, truth, strict=True):
                error, largest = float((one - other).abs().max()), float(other.abs().max())
                assert error <= 1e-4 * largest + 1e-6, f"{name}, draw {draw}: error {error:.1e} of {largest:.1e}"
    assert counts["played"]
    assert counts["launched"] == before


@interpreted
@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("small", ("batch", "terms", "columns of a table", "other columns of a table")),
        ("small", ("gallery", "queries move", "items move", "against itself", "against as many")),
        ("tiles", ("batch", "gallery", "gallery of one large class", "rows of a batch")),
        ("stored", ("gallery", "the first items move")),
    ],
    ids=str,
)
def test_triton_records_of_losses(
    path: str, names: tuple[str, ...], counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_path(monkeypatch, path)
    calls = calls_of(ROADMAP())
    check(counts, {name: calls[name] for name in names})


@interpreted
def test_triton_records_of_label_trees(counts: dict[str, int]) -> None:
    calls = calls_of(HierarchicalAP(include_self=False), paths=True)
    names = "batch", "terms", "queries move", "gallery", "the first items move", "against itself"
    with_itself = calls_of(HierarchicalAP(), paths=True)["batch"]
    check(counts, {name: calls[name] for name in names} | {"with itself": with_itself})


@interpreted
def test_triton_records_of_proxies(counts: dict[str, int]) -> None:
    def call(
        dtype: torch.dtype, g: torch.Generator, temperature: float = 0.2, needs: tuple[bool, bool] = (True, True),
        by_terms: bool = False,
    ) -> list[Tensor]:  # fmt: skip
        x, labels = drawn(N, dtype, g, needs[0])
        clusters = Clusters(3, D, temperature).to(dtype).requires_grad_(needs[1])
        with torch.no_grad():
            clusters.proxies.copy_(drawn(3, dtype, g)[0])
        c = Comparison.of(x, labels)
        return result(g, clusters.terms(c).sums[0] if by_terms else clusters.loss(c), x, clusters.proxies)

    calls: dict[str, Call] = {
        "mean": call,
        "terms": partial(call, by_terms=True),
        "cold": partial(call, temperature=0.05),
        "queries move": partial(call, needs=(True, False)),
        "proxies move": partial(call, needs=(False, True)),
    }
    check(counts, calls)


@starts_the_interpreter
def test_records_under_the_interpreter() -> None:
    check_under_the_interpreter(__file__, "triton")
