"""Two passes in chunks beside one pass: the same value, the same gradients, and nothing else changed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from roadmap.losses import ROADMAP, BlackBoxAP, Calibration, FastAP, SmoothAP, SoftBinAP, SupAP, TwoPass
from roadmap.losses.two_pass import chunked_embeddings

LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 2, 3, 4, 4])


def pictures(count: int = len(LABELS)) -> Tensor:
    return torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class DropPath(nn.Module):
    """Stochastic depth: a branch that is left out for some pictures."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(len(x), 1, dtype=x.dtype) > 0.4 if self.training else 1
        return x + kept * self.inner(x)


class Averaged(nn.Module):
    """A layer whose output depends on a buffer that every forward pass moves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class Scaled(nn.Module):
    """A layer whose graph holds a buffer that nothing moves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2.0, width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "plain": nn.Tanh,
    "layer norm": lambda: nn.LayerNorm(8),
    "dropout": lambda: nn.Dropout(0.4),
    "drop path": lambda: DropPath(nn.Linear(8, 8)),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "moving buffer": lambda: Averaged(8),
    "still buffer": lambda: Scaled(8),
}
WHOLE = ("plain", "layer norm")  # whose pictures do not see one another, and which draw nothing


def model(middle: str = "plain") -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), MIDDLES[middle](), nn.GELU(), nn.Linear(8, 5)).double()


def one_pass(loss: Any, net: nn.Module, images: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """What two passes stand for: one, in chunks, with every graph in memory."""
    return loss(torch.cat([net(part) for part in images.split(chunk)]), labels)


def gradients(*modules: nn.Module) -> list[Tensor | None]:
    return [weight.grad for module in modules for weight in module.parameters()]


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-10) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("middle", list(MIDDLES))
@pytest.mark.parametrize("chunk", [1, 3, 10, 100])
def test_value_gradient_statistics_and_random_state_are_those_of_one_pass(middle: str, chunk: int) -> None:
    if middle == "batch norm" and chunk in (1, 3):  # which leaves a chunk of one picture, without a variance
        chunk += 4
    theirs, ours = model(middle), model(middle)
    torch.manual_seed(3)
    wanted = one_pass(ROADMAP(), theirs, pictures(), LABELS, chunk)
    wanted.backward()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    value = TwoPass(ROADMAP(), ours, chunk)(pictures(), LABELS)
    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
    torch.manual_seed(99)  # whatever happens between the passes
    between = torch.get_rng_state()
    value.backward()
    assert torch.equal(torch.get_rng_state(), between)
    assert_same(gradients(ours), gradients(theirs))
    assert max(float(g.abs().max()) for g in gradients(ours) if g is not None) > 1e-3
    assert_same(list(ours.buffers()), list(theirs.buffers()), 1e-14)
    third = model(middle)
    torch.manual_seed(3)
    TwoPass(ROADMAP(), third, chunk)(pictures(), LABELS)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("middle", WHOLE)
def test_without_batch_statistics_it_is_the_batch_as_a_whole(middle: str) -> None:
    theirs, ours = model(middle), model(middle)
    ROADMAP()(theirs(pictures()), LABELS).backward()
    TwoPass(ROADMAP(), ours, 3)(pictures(), LABELS).backward()
    assert_same(gradients(ours), gradients(theirs))


def test_batch_norm_in_evaluation_mode_is_the_batch_as_a_whole() -> None:
    theirs, ours = model("batch norm").eval(), model("batch norm").eval()
    before = [buffer.clone() for buffer in ours.buffers()]
    ROADMAP()(theirs(pictures()), LABELS).backward()
    TwoPass(ROADMAP(), ours, 3)(pictures(), LABELS).backward()
    assert_same(gradients(ours), gradients(theirs))
    assert_same(list(ours.buffers()), before, 0)


@pytest.mark.parametrize("loss", [SupAP, SmoothAP, FastAP, SoftBinAP, Calibration, BlackBoxAP])
def test_every_loss(loss: type[nn.Module]) -> None:
    theirs, ours = model(), model()
    wanted = loss()(theirs(pictures()), LABELS)
    wanted.backward()
    value = TwoPass(loss(), ours, 4)(pictures(), LABELS)
    value.backward()
    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
    assert_same(gradients(ours), gradients(theirs))


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 12), chunk=st.integers(1, 14), classes=st.integers(1, 5), seed=st.integers(0, 99))
def test_any_batch_in_any_chunks(count: int, chunk: int, classes: int, seed: int) -> None:
    images = torch.randn(count, 48, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    labels = torch.arange(count) % classes
    theirs, ours = model(), model()
    wanted = ROADMAP()(theirs(images), labels)
    wanted.backward()
    value = TwoPass(ROADMAP(), ours, chunk)(images, labels)
    value.backward()
    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
    assert_same(gradients(ours), gradients(theirs))


class Proxies(nn.Module):
    """A loss with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.proxies = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))

    def forward(self, embeddings: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
        return scale * nn.functional.cross_entropy(embeddings @ self.proxies.T, labels)


def test_weights_of_the_loss_get_theirs_and_more_arguments_reach_it() -> None:
    theirs, ours, proxies, others = model(), model(), Proxies(), Proxies()
    proxies(theirs(pictures()), LABELS, scale=3.0).backward()
    both = TwoPass(others, ours, 4)
    both(pictures(), LABELS, scale=3.0).backward()
    assert_same(gradients(ours, others), gradients(theirs, proxies))
    assert {name.split(".")[0] for name, _ in both.named_parameters()} == {"loss", "model"}


def test_a_frozen_model_still_trains_the_loss() -> None:
    ours, proxies = model().requires_grad_(False), Proxies()
    TwoPass(proxies, ours, 4)(pictures(), LABELS).backward()
    assert proxies.proxies.grad is not None
    assert gradients(ours) == [None] * 4


@pytest.mark.parametrize("middle", ["batch norm", "still buffer"])
def test_it_is_an_ordinary_scalar(middle: str) -> None:
    """Scaled, summed with another loss whose graph of the same model waits, and accumulated over two batches."""

    def total(net: nn.Module, call: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        values = []
        for images in (pictures(), 2 * pictures()):
            other = net(images[:2]).square().mean()
            value = 1024.0 * call(images, LABELS) + other
            value.backward()
            values.append(value.detach())
        return values

    theirs, ours = model(middle), model(middle)
    wanted = total(theirs, lambda images, labels: one_pass(ROADMAP(), theirs, images, labels, 5))
    assert_same(total(ours, TwoPass(ROADMAP(), ours, 5)), wanted, 1e-9)
    assert_same(gradients(ours), gradients(theirs), 1e-9)
    assert_same(list(ours.buffers()), list(theirs.buffers()), 1e-13)


def test_a_gradient_scaler_goes_with_it() -> None:
    steps = []
    for two in (False, True):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        value = (
            TwoPass(ROADMAP(), net, 3)(pictures(), LABELS) if two else one_pass(ROADMAP(), net, pictures(), LABELS, 3)
        )
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        steps.append([weight.detach().clone() for weight in net.parameters()])
    assert_same(steps[1], steps[0])


def test_autograd_grad_and_hooks_see_the_gradient_of_the_batch_once() -> None:
    theirs, ours = model(), model()
    seen: list[Tensor] = []
    ours[1].weight.register_hook(seen.append)
    ours[1].bias.register_hook(lambda gradient: 2 * gradient)
    theirs[1].bias.register_hook(lambda gradient: 2 * gradient)
    wanted = torch.autograd.grad(ROADMAP()(theirs(pictures()), LABELS), list(theirs.parameters()))
    found = torch.autograd.grad(TwoPass(ROADMAP(), ours, 3)(pictures(), LABELS), list(ours.parameters()))
    assert_same(found, wanted)
    assert gradients(ours) == [None] * 4
    TwoPass(ROADMAP(), ours, 3)(pictures(), LABELS).backward()
    assert_same(seen, [wanted[0], wanted[0]])  # of either call


def test_a_second_derivative_is_refused() -> None:
    ours = model()
    value = TwoPass(ROADMAP(), ours, 3)(pictures(), LABELS)
    (gradient, *_) = torch.autograd.grad(value, list(ours.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_weights_that_are_not_used_or_frozen_stay_without_a_gradient() -> None:
    ours = model()
    ours.extra = nn.Linear(2, 2)
    ours.forward = lambda x: ours[4](ours[3](ours[1](ours[0](x))))  # type: ignore[method-assign]
    ours[1].bias.requires_grad_(False)
    TwoPass(ROADMAP(), ours, 3)(pictures(), LABELS).backward()
    assert [g is None for g in gradients(ours)] == [False, True, False, False, True, True]


@pytest.mark.parametrize("inside", [False, True])
def test_both_passes_have_the_autocast_of_the_call(inside: bool) -> None:
    """Also where backward() is called inside the region, whose kept casts know no graph."""
    seen: list[torch.dtype] = []
    results = []
    for two in (False, True):
        net = model("layer norm").float()
        net[1].register_forward_hook(lambda _, __, out: seen.append(out.dtype))
        images = pictures().float()
        with torch.autocast("cpu", torch.bfloat16):
            value = TwoPass(ROADMAP(), net, 4)(images, LABELS) if two else ROADMAP()(net(images), LABELS)
            if inside:
                value.backward()
        if not inside:
            value.backward()
        results.append((value.detach(), gradients(net)))
    assert set(seen) == {torch.bfloat16}
    assert len(seen) == 1 + 3 + 3
    torch.testing.assert_close(results[1][0], results[0][0])
    for a, b in zip(results[1][1], results[0][1], strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * float(b.abs().max()))


@pytest.mark.parametrize("chunk", [len(LABELS), 4])
def test_the_second_pass_goes_backwards_outside_autocast(chunk: int) -> None:
    """As one pass does: what a model computes in float32 has a gradient in float32."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.projection = nn.Linear(48, 32), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            features = self.backbone(x.flatten(1)).float()
            with torch.autocast("cpu", enabled=False):
                vectors: Tensor = self.projection(features)
            return vectors

    torch.manual_seed(0)
    net, images, found = Net(), pictures().float(), []
    for two in (False, True):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            value = TwoPass(ROADMAP(), net, chunk)(images, LABELS) if two else ROADMAP()(net(images), LABELS)
        found.append(torch.autograd.grad(value, list(net.projection.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5 * float(one.abs().max()))


def test_gradients_of_half_weights_are_added_in_float32() -> None:
    """Each chunk adds 2**-9 to 1: bfloat16 would lose every one of them."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return x.bfloat16() * self.weight

    net = Constant()
    images = torch.full((65, 1), 2.0**-9)
    images[0] = 1.0
    TwoPass(lambda vectors, labels: vectors.float().sum(), net, 1)(images, LABELS).backward()
    assert net.weight.grad.item() == 1.125


class Source:
    """Gives chunks by and by, and counts how often, and how many pictures are alive at once."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self.reads, self.most = sizes, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.reads += 1
        alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        for part in pictures().split(self.sizes):
            part = part.clone()
            alive.add(part)
            self.most = max(self.most, sum(len(one) for one in alive))
            yield part
            del part


def test_a_batch_that_comes_in_chunks_is_never_whole() -> None:
    theirs, ours, source = model("dropout"), model("dropout"), Source((2, 1, 3, 0, 2, 2))
    torch.manual_seed(5)
    ROADMAP()(torch.cat([theirs(part) for part in pictures().split([2, 1, 2, 1, 2, 2])]), LABELS).backward()
    torch.manual_seed(5)
    TwoPass(ROADMAP(), ours, 2)(source, LABELS).backward()
    assert_same(gradients(ours), gradients(theirs))
    assert source.reads == 2
    assert source.most <= 5  # a chunk in the model, and the next, just made


def test_chunks_may_come_from_a_function_a_list_or_a_loader_that_shuffles() -> None:
    theirs, ours = model(), model()
    ROADMAP()(theirs(pictures()), LABELS).backward()
    for way in (lambda: iter(pictures().split(4)), pictures().split(4), lambda: pictures()):
        ours.zero_grad()
        TwoPass(ROADMAP(), ours, 3)(way, LABELS).backward()
        assert_same(gradients(ours), gradients(theirs))
    loader = DataLoader(TensorDataset(pictures()), batch_size=3, shuffle=True)
    torch.manual_seed(8)
    order = [rows for (rows,) in DataLoader(TensorDataset(torch.arange(10)), batch_size=3, shuffle=True)]
    assert torch.cat(order).tolist() != list(range(10))
    labels = LABELS[torch.cat(order)]
    torch.manual_seed(8)
    ours.zero_grad()
    TwoPass(ROADMAP(), ours, 3)(lambda: (images for (images,) in loader), labels).backward()
    assert_same(gradients(ours), gradients(theirs))


def test_without_a_gradient_there_is_one_pass() -> None:
    source, net = Source((5, 5)), model("dropout").eval()
    with torch.no_grad():
        value = TwoPass(ROADMAP(), net, 3)(source, LABELS)
    assert source.reads == 1
    assert not value.requires_grad
    assert value == pytest.approx(ROADMAP()(net(pictures()), LABELS).item())


def test_an_empty_batch_gives_a_zero_that_backpropagates() -> None:
    for images in (pictures()[:0], [pictures()[:0], pictures()[:0]]):
        ours = model()
        value = TwoPass(ROADMAP(), ours, 3)(images, LABELS[:0])
        value.backward()
        assert value == 0
        assert all(not g.any() for g in gradients(ours))


def test_evaluation_mode_between_the_passes_changes_nothing() -> None:
    theirs, ours = model("dropout"), model("dropout")
    torch.manual_seed(6)
    one_pass(ROADMAP(), theirs, pictures(), LABELS, 3).backward()
    torch.manual_seed(6)
    value = TwoPass(ROADMAP(), ours, 3)(pictures(), LABELS)
    ours.eval()
    value.backward()
    assert not any(module.training for module in ours.modules())
    assert_same(gradients(ours), gradients(theirs))


def test_nothing_stays_in_memory_when_the_value_goes() -> None:
    ours, images = model(), pictures()
    gc.disable()
    try:
        value = TwoPass(ROADMAP(), ours, 3)(images, LABELS)
        there = weakref.ref(images)
        del images, value
        assert there() is None
    finally:
        gc.enable()


def test_what_cannot_be_is_refused_in_words() -> None:
    net, loss = model(), ROADMAP()
    for chunk, error, words in (
        (0, ValueError, "chunk must be >= 1, got 0"),
        (-3, ValueError, "chunk must be >= 1, got -3"),
        (2.0, TypeError, "chunk must be an int, got float 2.0"),
        (True, TypeError, "chunk must be an int, got bool True"),
    ):
        with pytest.raises(error, match=words):
            TwoPass(loss, net, chunk)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got function"):
        TwoPass(loss, lambda x: x, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"loss must be called as loss\(embeddings, labels\), got str"):
        TwoPass("roadmap", net, 2)  # type: ignore[arg-type]
    for images, error, words in (
        ((part for part in pictures().split(2)), TypeError, "generator, which can be read once"),
        ([(pictures(), LABELS)], TypeError, r"got a tuple; of a loader that gives pairs take the pictures"),
        (torch.tensor(1.0), TypeError, "got a tensor without rows"),
        ([], ValueError, r"holds no chunk at all; an empty batch is a tensor with no rows"),
        (pictures().requires_grad_(), ValueError, r"pictures require a gradient, .* detach\(\) them"),
        (pictures()[:4], ValueError, "labels has 10 entries but embeddings has 4 rows"),
        (pictures() * torch.nan, ValueError, r"embeddings\[0\] holds NaN or infinity \(10 of 10"),
    ):
        with pytest.raises(error, match=words):
            TwoPass(loss, net, 3)(images, LABELS)
    with pytest.raises(ValueError, match=r"one vector per picture, \(3, D\), got shape \(3, 3, 4, 4\)"):
        TwoPass(loss, nn.Identity(), 3)(pictures(), LABELS)


def test_a_second_pass_that_would_be_another_is_refused() -> None:
    net = model()
    value = TwoPass(ROADMAP(), net, 3)(pictures(), LABELS)
    with torch.no_grad():
        net[1].weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"call backward\(\) before optimizer.step\(\)"):
        value.backward()
    times = iter([pictures(), pictures().flip(0)])
    value = TwoPass(ROADMAP(), net, 3)(lambda: next(times), LABELS)
    with pytest.raises(RuntimeError, match=r"other embeddings in the second pass .* differ by \d+% of their length"):
        value.backward()
    times = iter([pictures(), pictures()[:5], pictures(), pictures()[:3]])
    for words in ("chunk 1 held 3 pictures in the first pass, and 2 pictures in", "chunk 1 .* and nothing in the sec"):
        value = TwoPass(ROADMAP(), net, 3)(lambda: next(times), LABELS)
        with pytest.raises(RuntimeError, match=words):
            value.backward()


def test_where_looking_would_wait_another_second_pass_gives_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roadmap.losses.two_pass.values_are_free_to_read", lambda _: False)
    net, times = model(), iter([pictures(), pictures().flip(0)])
    TwoPass(ROADMAP(), net, 3)(lambda: next(times), LABELS).backward()
    assert all(g is not None and g.isnan().all() for g in gradients(net))
    net.zero_grad()
    TwoPass(ROADMAP(), net, 3)(pictures(), LABELS).backward()
    assert all(g is not None and g.isfinite().all() for g in gradients(net))


def test_a_compiled_model_and_a_copy() -> None:
    theirs, ours = model(), model()
    ROADMAP()(theirs(pictures()), LABELS).backward()
    TwoPass(ROADMAP(), torch.compile(ours, backend="aot_eager"), 5)(pictures(), LABELS).backward()  # type: ignore[arg-type]
    assert_same(gradients(ours), gradients(theirs))
    two = TwoPass(ROADMAP(), ours, 5)
    assert repr(two).startswith("TwoPass(\n  chunk=5")
    copied = copy.deepcopy(two)
    copied.zero_grad()
    copied(pictures(), LABELS).backward()
    assert_same(gradients(copied), gradients(theirs))


def test_a_model_may_give_every_chunk_in_the_same_memory() -> None:
    """As one does that torch.compile records as CUDA graphs (mode="reduce-overhead"), where no graph is kept."""

    class Recorded(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.memory = inner, torch.empty(len(LABELS), 5, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x)
            return found if torch.is_grad_enabled() else self.memory[: len(x)].copy_(found)

    net = model("layer norm")
    expected, found = ROADMAP()(net(pictures()), LABELS), TwoPass(ROADMAP(), Recorded(net), 4)(pictures(), LABELS)
    assert torch.equal(found, expected)
    weights = list(net.parameters())
    for one, other in zip(*(torch.autograd.grad(value, weights) for value in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


def test_a_failed_second_pass_leaves_the_model_as_it_was() -> None:
    net = model("moving buffer")
    times = iter([pictures(), pictures()[:5]])
    value = TwoPass(ROADMAP(), net, 3)(lambda: next(times), LABELS)
    mean, random = net[2].mean.clone(), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="chunk 1"):
        value.backward()
    assert torch.equal(net[2].mean, mean)
    assert torch.equal(torch.get_rng_state(), random)


def test_the_embeddings_alone() -> None:
    net = model()
    found = chunked_embeddings(net, pictures(), 4)
    assert torch.equal(found.detach(), torch.cat([net(part) for part in pictures().split(4)]).detach())
    assert found.requires_grad
