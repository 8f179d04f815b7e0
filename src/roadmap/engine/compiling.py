"""Training that does not wait for the host: a network's blocks compiled once each, its pass recorded as a CUDA graph.

A whole network takes torch's compiler a minute, a short run's worth. Networks are made of blocks that repeat: one block
of a ViT compiled serves all twelve, in seconds. The host would still launch some hundreds of kernels a step, so the
pass through the network, forwards and backwards, is recorded once and played back.
"""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roadmap.config.settings import HardwareSettings
from roadmap.data.pictures.packs import cache_folder
from roadmap.losses.surroundings import Surroundings

# Measured on an H200: one kind of block compiles in 9 s, most of it the compiler's own start, and a step of 128
# pictures is then 15 ms shorter.
PAYS, PAYS_EACH = 600, 200  # steps for one kind of block, and for each other kind
COMPILER = "torch._inductor.compile_fx"  # takes seconds to import
KINDS = 64  # of blocks that the compiler keeps apart; it stops at 8 unless told otherwise


@dataclass(frozen=True)
class Compiling:
    """How a run's network is compiled.

    Attributes:
        mode: "no", "blocks", or a mode of torch.compile for the whole of it.
        why: it was chosen so; empty where a person chose.
    """

    mode: str
    why: str = ""


def compiling_of(model: nn.Module, settings: HardwareSettings, device: torch.device, steps: int) -> Compiling:
    """What "auto" comes to: on a GPU, the blocks that a network repeats, where the run is long enough to pay for it."""
    if settings.compile != "auto":
        return Compiling(settings.compile)
    kinds = len({_kind(block) for block in repeated_blocks(model)})
    if device.type != "cuda" or not kinds:
        return Compiling("no")
    pays = PAYS + PAYS_EACH * (kinds - 1)
    count = f"{kinds} kind{'' if kinds == 1 else 's'} of block"
    if steps < pays:
        return Compiling("no", f"not compiled: with {count} it pays from {pays:,} steps on, and these are {steps:,}")
    return Compiling("blocks", f"compiled and recorded: {count}, {steps:,} steps")


def may_compile(settings: HardwareSettings, device: torch.device, steps: int) -> bool:
    """Whether a run of so many steps may be compiled, as far as it can be told without its network."""
    return settings.compile not in ("auto", "no") or (
        settings.compile == "auto" and device.type == "cuda" and steps >= PAYS
    )


def runnable_model(model: nn.Module, mode: str, recorded: int | None = None) -> nn.Module:
    """The network to train with: it shares its weights with the one that came, which stays as it is for evaluations.

    Args:
        model: on its device.
        mode: of `Compiling`.
        recorded: play the pass of batches of so many pictures through compiled blocks back as a CUDA graph; nothing but
            the vectors is asked for. None: no pass.
    """
    if mode == "no":
        return model
    _keep_what_is_compiled()
    if mode != "blocks":
        return torch.compile(model, mode=None if mode == "default" else mode)  # type: ignore[return-value]
    twin = _twin(model)
    import torch._dynamo as dynamo

    dynamo.config.recompile_limit = max(KINDS, dynamo.config.recompile_limit)
    for block in repeated_blocks(twin):
        block.compile(dynamic=False)
    on_gpu = next(model.parameters()).device.type == "cuda"
    return Recorded(twin, recorded) if recorded is not None and on_gpu else twin


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a network is a chain of: the outermost lists of two or more parts of one class."""
    return list(_blocks(model))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        parts = list(child.children())
        chain = isinstance(child, (nn.Sequential, nn.ModuleList)) and len({type(part) for part in parts}) == 1
        if chain and len(parts) > 1 and any(parts[0].children()) and not isinstance(parts[0], nn.Sequential):
            yield from parts
        else:
            yield from _blocks(child)


def _kind(block: nn.Module) -> tuple[object, ...]:
    """What tells blocks apart that are compiled apart: their class, the shapes and strides in them, which of their
    weights learn, and how much of them stochastic depth drops, which is more from block to block."""
    numbers = tuple((getattr(part, "stride", None), getattr(part, "drop_prob", None)) for part in block.modules())
    return type(block), numbers, tuple((tuple(w.shape), w.requires_grad) for w in block.parameters())


def _twin(model: nn.Module) -> nn.Module:
    """Other modules around the same weights and buffers."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _keep_what_is_compiled() -> None:
    """In the user's cache, so that the next run finds it, also after the machine was started anew."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))


class Recorded(nn.Module):
    """A network whose pass in training, forwards and backwards, is recorded at the first whole batch and then played
    back.

    Batches of another shape, evaluation, and a network that cannot be recorded go the ordinary way. A batch from which
    pictures were left out is never what is recorded, wherever a run begins or goes on.

    Args:
        model: on a GPU. Its weights must stay where they are in memory, as optimisers leave them.
        batch: pictures in a whole batch.
    """

    def __init__(self, model: nn.Module, batch: int) -> None:
        super().__init__()
        self.model, self.batch = model, batch
        self._played: nn.Module | None = None
        self._shape: tuple[object, ...] | None = None

    def forward(self, images: Tensor, **options: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()) or options:
            return self.model(images, **options)
        shape = tuple(images.shape), images.dtype, images.stride()
        if self._shape is None and len(images) == self.batch:
            self._record(images, shape)
        if self._played is None or shape != self._shape:
            return self.model(images)
        # the recording writes its vectors to one place; what holds on to them must not see them change
        return self._played(images).clone()

    def forget(self) -> None:
        """Lets go of the recording and its memory; the next whole batch records anew."""
        self._played, self._shape = None, None

    def _record(self, images: Tensor, shape: tuple[object, ...]) -> None:
        self._shape = shape
        if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
            # recorded on a stream of its own, on purpose
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        surroundings = Surroundings(self.model)
        stream = torch.cuda.current_stream() if images.is_cuda else None
        try:
            # autocast is for the pass forwards alone, as in a step that is not recorded: around the one backwards too,
            # it would compute the gradients of float32 layers in bfloat16
            with surroundings.again(), torch.autocast(images.device.type, enabled=False), _this_thread_alone():
                played = torch.cuda.make_graphed_callables(
                    _Pass(self.model, surroundings), (images.clone(),), allow_unused_input=True
                )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first = str(error).strip().split("\n")[0]
            if stream is not None:  # torch stays on the stream that it recorded on
                torch.cuda.set_stream(stream)
            with _this_thread_alone():
                _end_of_recording(images)
            warnings.warn(f"this network's pass cannot be recorded ({first}); it goes on without", stacklevel=2)
            return
        assert isinstance(played, _Pass)
        self._played = played


@contextmanager
def _this_thread_alone() -> Iterator[None]:
    """Of what CUDA forbids while a graph is recorded, it looks at the calls of this thread alone.

    The threads that prepare batches ask for pinned memory meanwhile and wait for copies. They have nothing to do with
    what is recorded, but would end it, and get the error themselves. `make_graphed_callables` has no argument for it.
    """
    graph = torch.cuda.graph
    torch.cuda.graph = functools.partial(graph, capture_error_mode="thread_local")  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.cuda.graph = graph  # type: ignore[misc]


def _end_of_recording(images: Tensor) -> None:
    """After one that failed: torch's random numbers on the GPU still think that they are recorded, and the next that is
    drawn would be an error. A recording that ends well tells them."""
    graph, nothing = torch.cuda.CUDAGraph(), torch.zeros(1, device=images.device)
    with torch.cuda.graph(graph):
        nothing += 1


class _Pass(nn.Module):
    """What is recorded; recording replaces its `forward`, and leaves the network's own alone."""

    def __init__(self, model: nn.Module, surroundings: Surroundings) -> None:
        super().__init__()
        self.model, self.surroundings = model, surroundings

    def forward(self, images: Tensor) -> Tensor:
        with self.surroundings.autocast():
            vectors: Tensor = self.model(images)
        return vectors
