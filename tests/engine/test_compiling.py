"""Which networks are compiled, how, and that it changes nothing but the time."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roadmap.config.settings import HardwareSettings, ModelSettings
from roadmap.engine import compiling, fit, resume
from roadmap.engine.compiling import Recorded, compiling_of, repeated_blocks, runnable_model
from roadmap.models import Retriever, retriever

from .worlds import Killed, assert_same_run, kill_at, last, lines, tiny

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def small_vit(**more: Any) -> Retriever:
    torch.manual_seed(0)
    return retriever(ModelSettings("vit_tiny_patch16_224", "random", **more), 32)


def test_the_blocks_of_a_transformer_and_of_a_resnet() -> None:
    assert [type(block).__name__ for block in repeated_blocks(small_vit())] == ["Block"] * 12
    with torch.device("meta"):
        import timm

        blocks = repeated_blocks(timm.create_model("resnet50"))
    assert [type(block).__name__ for block in blocks] == ["Bottleneck"] * 16
    assert repeated_blocks(retriever(ModelSettings(), 16)) == []  # plain lists of layers are no blocks
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


@pytest.mark.parametrize(
    ("mode", "device", "steps", "wanted"),
    [
        ("auto", CPU, 10**6, "no"),
        ("auto", CUDA, 599, "no"),
        ("auto", CUDA, 600, "blocks"),
        ("no", CUDA, 10**6, "no"),
        ("default", CPU, 1, "default"),
        ("blocks", CPU, 1, "blocks"),
    ],
)
def test_what_auto_means(mode: str, device: torch.device, steps: int, wanted: str) -> None:
    found = compiling_of(small_vit(), HardwareSettings(compile=mode), device, steps)
    assert found.mode == wanted
    assert bool(found.why) == (mode == "auto" and device == CUDA)


def test_other_kinds_of_blocks_take_longer_to_pay() -> None:
    with torch.device("meta"):
        import timm

        resnet = timm.create_model("resnet50")
    settings = HardwareSettings()
    before, after = (compiling_of(resnet, settings, CUDA, steps) for steps in (1999, 2000))
    assert (before.mode, after.mode) == ("no", "blocks")
    assert before.why == "not compiled: with 8 kinds of block it pays from 2,000 steps on, and these are 1,999"
    assert after.why == "compiled and recorded: 8 kinds of block, 2,000 steps"


def test_blocks_that_drop_more_and_more_are_kinds_of_their_own() -> None:
    """Stochastic depth grows from block to block, and the compiler takes its numbers for constants."""
    asked = [compiling_of(small_vit(drop_path=rate), HardwareSettings(), CUDA, 2799) for rate in (0.0, 0.2)]
    assert [found.mode for found in asked] == ["blocks", "no"]
    assert asked[1].why == "not compiled: with 12 kinds of block it pays from 2,800 steps on, and these are 2,799"


@pytest.mark.parametrize(("rate", "kinds"), [(0.0, 1), (0.2, 12)])
def test_kinds_of_blocks_are_as_many_as_are_compiled(monkeypatch: pytest.MonkeyPatch, rate: float, kinds: int) -> None:
    compiled: list[None] = []
    real = nn.Module.compile

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled.append(None)
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: real(self, backend=count, **options))
    torch.compiler.reset()
    model = small_vit(drop_path=rate)
    runnable_model(model, "blocks").train()(torch.randn(2, 3, 32, 32))
    assert len({compiling._kind(block) for block in repeated_blocks(model)}) == len(compiled) == kinds


def test_blocks_that_learn_in_part_are_a_kind_of_their_own() -> None:
    def kinds(**options: Any) -> int:
        return len({compiling._kind(block) for block in repeated_blocks(small_vit(**options))})

    assert [kinds(learns="biases"), kinds(freeze_layers=1), kinds(freeze_layers=4)] == [1, 1, 2]


def test_a_network_without_blocks_is_not_compiled_by_itself() -> None:
    assert compiling_of(retriever(ModelSettings(), 16), HardwareSettings(), CUDA, 10**6).mode == "no"


def test_a_mode_of_torch_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(torch, "compile", lambda model, mode: asked.append(mode) or model)
    model = nn.Linear(1, 1)
    for mode in ("no", "default", "reduce-overhead"):
        assert runnable_model(model, mode) is model
    assert asked == [None, "reduce-overhead"]


def test_compiled_blocks_share_the_weights_and_leave_the_network_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are the network's own; what evaluates stays as it was."""
    compiled: list[nn.Module] = []
    real = nn.Module.compile

    def compile_simply(self: nn.Module, **options: Any) -> None:
        assert options == {"dynamic": False}
        compiled.append(self)
        real(self, backend="aot_eager", **options)

    monkeypatch.setattr(nn.Module, "compile", compile_simply)
    model = small_vit()
    runnable = runnable_model(model, "blocks", recorded=2)
    assert len(compiled) == 12
    assert not {id(part) for part in compiled} & {id(part) for part in model.modules()}
    assert all(a is b for a, b in zip(model.parameters(), runnable.parameters(), strict=True))
    images = torch.randn(2, 3, 32, 32)
    pull, gradients = torch.randn(2, 192), []
    for network in (model, runnable):
        vectors = network.train()(images)
        vectors.backward(pull)
        gradients.append([vectors.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    assert all(block._compiled_call_impl is None for block in repeated_blocks(model))


def test_batch_statistics_are_shared_too() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    twin = compiling._twin(model)
    twin.train()(torch.randn(4, 3, 8, 8))
    assert torch.equal(model[1].running_mean, twin[1].running_mean)
    assert model[1].running_mean.any()


def test_what_is_compiled_is_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    runnable_model(small_vit(), "blocks")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    runnable_model(small_vit(), "blocks")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"


def test_a_whole_batch_is_recorded_even_where_the_first_lacks_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does of which some cannot be decoded: else no other batch of the run would be played back."""
    shapes: list[int] = []
    played: list[int] = []

    def record(model: nn.Module, arguments: tuple[Tensor], **_: Any) -> nn.Module:
        shapes.append(len(arguments[0]))
        real = model.forward

        def play(images: Tensor) -> Tensor:
            played.append(len(images))
            vectors: Tensor = real(images)
            return vectors

        model.forward = play  # type: ignore[method-assign]
        return model

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", record)
    net = nn.Linear(4, 3)
    recorded = Recorded(net, 8)
    for items in (5, 5, 8, 5, 8):
        x = torch.randn(items, 4)
        assert torch.equal(recorded(x), net(x))
    assert (shapes, played) == ([8], [8, 8])
    recorded.forget()
    recorded(torch.randn(5, 4))
    recorded(torch.randn(8, 4))
    assert (shapes, played) == ([8, 8], [8, 8, 8])


@pytest.mark.parametrize("autocast", [False, True])
def test_autocast_does_not_reach_what_is_recorded_of_the_pass_backwards(
    monkeypatch: pytest.MonkeyPatch, autocast: bool
) -> None:
    """In a step that is not recorded it ends before the loss: the gradients of float32 layers are float32."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.projection = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            features = self.backbone(x).float()
            with torch.autocast("cpu", enabled=False):
                vectors: Tensor = self.projection(features)
            return vectors

    torch.manual_seed(0)
    net, x, pull = Net(), torch.randn(16, 8), torch.randn(16, 4)
    weights = list(net.parameters())

    def record(model: nn.Module, arguments: tuple[Tensor], **_: Any) -> nn.Module:
        recorded.append(torch.autograd.grad(model(*arguments), weights, pull))  # as torch does, in one go
        return model

    recorded: list[tuple[Tensor, ...]] = []
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", record)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        vectors = net(x)
        played = Recorded(net, 16)(x)
    assert torch.equal(played, vectors)
    expected = torch.autograd.grad(vectors, weights, pull)
    assert all(torch.equal(one, other) for one, other in zip(recorded[0], expected, strict=True))


def test_the_end_of_a_recording_that_failed_is_of_this_thread_alone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mode that is torch's own, threads that ask for pinned memory at that moment get an error."""
    modes: list[str] = []

    @contextmanager
    def graph(_: object, capture_error_mode: str = "global") -> Iterator[None]:
        modes.append(capture_error_mode)
        yield

    def record(*_: Any, **__: Any) -> None:
        raise RuntimeError("it waits for the GPU")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", record)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    net, x = nn.Linear(4, 3), torch.randn(8, 4)
    with pytest.warns(UserWarning, match=r"cannot be recorded \(it waits for the GPU\)"):
        found = Recorded(net, 8)(x)
    assert torch.equal(found, net(x))
    assert modes == ["thread_local"]


# --- on a GPU

VIT: dict[str, Any] = {"hardware__device": "cuda", "model__name": "vit_tiny_patch16_224", "model__pooling": "auto"}


def vit_run(pictures: Path, run: Path, **more: Any) -> Any:
    # stochastic depth draws random numbers on the GPU, which a recording must not draw from
    changed = VIT | {"model__drop_path": 0.2, "optim__name": "sgd", "optim__lr": 1e-3} | more
    return tiny(pictures, run, **changed)


@pytest.mark.gpu
def test_a_recorded_run_is_resumed_to_the_bit(pictures: Path, tmp_path: Path) -> None:
    whole = fit(vit_run(pictures, tmp_path / "whole", hardware__compile="blocks"), quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, 6)
        with pytest.raises(Killed):
            fit(vit_run(pictures, tmp_path / "cut", hardware__compile="blocks"), quiet=True)
    assert_same_run(whole, resume(tmp_path / "cut", quiet=True))


@pytest.mark.gpu
def test_a_recorded_run_learns_what_a_plain_one_does(pictures: Path, tmp_path: Path) -> None:
    exact = {"hardware__precision": "32", "model__drop_path": 0.0}
    plain = fit(vit_run(pictures, tmp_path / "plain", hardware__compile="no", **exact), quiet=True)
    fast = fit(vit_run(pictures, tmp_path / "fast", hardware__compile="blocks", **exact), quiet=True)
    one, other = ([line["loss"] for line in lines(run) if line["kind"] == "step"] for run in (plain, fast))
    assert other == pytest.approx(one, abs=1e-3)
    for name, value in last(plain)["stateful"]["model"].items():
        torch.testing.assert_close(last(fast)["stateful"]["model"][name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_recording_draws_nothing_and_counts_nothing() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.dropout(self.norm(x))
            return found

    torch.manual_seed(1)
    net = Net().cuda()
    x = torch.randn(8, 4, device="cuda")
    plain = Net().cuda()
    torch.cuda.manual_seed(5)
    expected = [plain(x) for _ in range(2)]
    torch.cuda.manual_seed(5)
    recorded = Recorded(net, 8)
    found = [recorded(x) for _ in range(2)]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one == 0, other == 0)  # the same are dropped
    assert net.norm.num_batches_tracked == 2
    torch.testing.assert_close(net.norm.running_mean, plain.norm.running_mean)


@pytest.mark.gpu
def test_gradients_of_float32_layers_are_recorded_in_float32() -> None:
    torch.manual_seed(0)
    model = retriever(ModelSettings("resnet18", "random", dim=32, freeze_batch_norm=True), 64).cuda()
    x, pull, found = torch.randn(8, 3, 64, 64, device="cuda"), torch.randn(8, 32, device="cuda"), []
    for network in (model, Recorded(model, 8)):
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            vectors = network.train()(x)
        vectors.backward(pull)
        found.append(model.projection.weight.grad.clone())
        model.zero_grad()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4 * float(found[0].abs().max()))


@pytest.mark.gpu
def test_other_shapes_and_evaluation_go_the_ordinary_way() -> None:
    net = nn.Linear(4, 3).cuda()
    recorded = Recorded(net, 8)
    for items in (5, 8, 8, 5):
        x = torch.randn(items, 4, device="cuda")
        torch.testing.assert_close(recorded(x), net(x))
        net.zero_grad()
        recorded(x).sum().backward()
        expected = torch.autograd.grad(net(x).sum(), net.weight)[0]
        torch.testing.assert_close(net.weight.grad, expected)
    recorded.eval()
    torch.testing.assert_close(recorded(x), net(x))


@pytest.mark.gpu
def test_what_cannot_be_recorded_is_said_and_trained_all_the_same() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert float(x.sum()) != 0  # waits for the GPU, which no recording can
            return super().forward(x)

    net = Looks(4, 3).cuda()
    x = torch.randn(8, 4, device="cuda")
    with pytest.warns(UserWarning, match="this network's pass cannot be recorded"):
        found = Recorded(net, 8)(x)
    torch.testing.assert_close(found, net(x))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.randn(8, device="cuda").isfinite().all()  # what failed has not taken random numbers with it


@pytest.mark.gpu
def test_threads_that_prepare_batches_do_not_disturb_a_recording() -> None:
    """They ask for pinned memory and wait for copies at any moment, as those of a pack that is streamed do."""
    model = retriever(ModelSettings(name="resnet18", weights="random"), 64).to("cuda")
    failures: list[BaseException] = []
    ended = threading.Event()

    def prepare() -> None:
        stream, size = torch.cuda.Stream(), 1 << 16
        try:
            while not ended.is_set():
                size = 1 << 16 if size > 1 << 24 else size + 4096  # another size: memory is asked for, not used again
                with torch.cuda.stream(stream):
                    torch.empty(size, dtype=torch.uint8, pin_memory=True).to("cuda", non_blocking=True)
                    event = torch.cuda.Event()
                    event.record(stream)
                event.synchronize()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="this network's pass cannot be recorded")
            for _ in range(5):
                recorded = Recorded(model, 8).train()
                recorded(torch.randn(8, 3, 64, 64, device="cuda")).sum().backward()
                assert recorded._played is not None
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert failures == []
