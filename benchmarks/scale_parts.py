"""What bench_scale.py measures: models that train on random pictures, losses with a memory, and shares of a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from roadmap.losses import ROADMAP, Memory
from roadmap.losses.ring import NOBODY

DIMENSIONS = 512
EACH = 57  # pictures of a class in the memory; iNaturalist has as many
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """What is measured; the defaults are for a GPU."""

    vit: str = "vit_small_patch16_224"
    resnet: str = "resnet50"
    image: int = 224
    chunk: int = 128
    batches: tuple[int, ...] = (128, 512, 2048, 8192, 32_768)
    many: int = 64  # chunks in the batch that the bar is for
    one_pass: int = 8192
    queries: tuple[int, ...] = (128, 384)
    memories: tuple[int, ...] = (0, 1_000, 10_000, 60_000, 200_000, 1_000_000)
    peer: int = 200_000
    modes: tuple[str, ...] = ("eager", "compiled")
    resnet_batches: tuple[int, ...] = (64, 128)
    resnet_memory: int = 60_000
    rounds: int = 5
    steps: int = 20
    rows: tuple[int, ...] = (128, 1024, 8192)
    processes: tuple[int, ...] = (1, 8, 32, 128, 512, 2048, 8192)
    pairs: int = 8192 * 1_048_576

    @classmethod
    def small(cls) -> Sizes:
        """Whether it runs."""
        return cls(
            vit="test_vit", resnet="test_resnet", image=32, chunk=8, batches=(8, 24), many=3, one_pass=8, queries=(8,),
            memories=(0, 100), peer=100, modes=("eager",), resnet_batches=(8,), resnet_memory=100, rounds=2, steps=2,
            rows=(8, 16), processes=(1, 4), pairs=1 << 20,
        )  # fmt: skip


class Trainer:
    """A network of timm with random weights and a head of 512, its optimiser, and pictures for it."""

    def __init__(self, name: str, image: int, device: str, compiled: bool = False, channels_last: bool = False) -> None:
        import timm

        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.image, self.device, self.layout = image, device, layout
        size = {"img_size": image} if "vit" in name else {}
        plain = timm.create_model(name, num_classes=DIMENSIONS, **size).to(device, memory_format=layout)
        self.optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-5, fused=device == "cuda")
        self.model: nn.Module = torch.compile(plain, dynamic=False) if compiled else plain  # type: ignore[assignment]

    def pictures(self, count: int, key: int) -> Tensor:
        """Random ones, the same for the same key, as crops come: normalised float32 from bytes."""
        generator = torch.Generator(self.device).manual_seed(key)
        shape = (count, 3, self.image, self.image)
        levels = torch.randint(256, shape, dtype=torch.uint8, device=self.device, generator=generator)
        return levels.to(torch.float32, memory_format=self.layout).div_(128).sub_(1)

    def step(self, loss: Call) -> None:
        """Under autocast as far as the model goes; losses choose their own precision."""
        with torch.autocast(self.device, torch.bfloat16):
            value = loss()
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def memory_step(self, batch: int, size: int) -> Callable[[], None]:
        """A step whose batch is compared with itself and with `size` earlier vectors; 0 for itself alone."""
        labels = itertools.cycle(batch_labels(batch, size, self.device))
        images, compare = self.pictures(batch, 0), recalled(size, batch, self.device)
        return lambda: self.step(lambda: compare(self.model(images), next(labels)))


def batch_labels(batch: int, size: int, device: str) -> list[Tensor]:
    """Four of a class, batch after batch through the classes of a memory: batches join it, and its classes keep their
    sizes only if all of them come."""
    classes = max(batch // 4, size // EACH + 1)
    first = torch.arange(batch, device=device) // 4
    return [(first + number * batch // 4) % classes for number in range(max(1, min(64, 4 * classes // batch)))]


def embeddings(labels: Tensor, seed: int = 0) -> Tensor:
    """Half-trained vectors: members of a class score about 0.4 on each other, others about 0."""
    generator = torch.Generator(labels.device).manual_seed(seed)
    count, device = len(labels), labels.device
    centres = torch.randn(int(labels.max()) + 1, DIMENSIONS, generator=generator.manual_seed(0), device=device)
    noise = torch.randn(count, DIMENSIONS, generator=generator.manual_seed(1 + seed), device=device)
    return centres[labels] + 1.2 * noise


def remembered(size: int, device: str) -> tuple[Tensor, Tensor]:
    """What a full memory holds: vectors and labels, `EACH` of a class."""
    labels = torch.arange(size, device=device) // EACH
    return embeddings(labels, seed=1), labels


def recalled(size: int, batch: int, device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """ROADMAP over a batch and a memory that is full of `size` earlier vectors, `EACH` of a class; 0 for none."""
    if size == 0:
        return ROADMAP()
    memory = Memory(ROADMAP(), size).to(device)
    vectors, labels = remembered(size, device)
    # as calls would do it, without what they cost
    for some, names in zip(vectors.split(batch), labels.split(batch), strict=True):
        memory.ring.lay(some, names)
        memory.ring.keep(np.full(len(some), NOBODY), np.arange(len(some)))
    assert len(memory) == size
    return memory


def memory_step(queries: int, size: int, device: str) -> Callable[[], None]:
    """Forwards and backwards, from vectors that lie there."""
    return _calls(recalled(size, queries, device), queries, size, device)


def peer_step(queries: int, size: int, device: str) -> Callable[[], None] | None:
    """The contrastive loss with pytorch-metric-learning's memory, full; it has none for rank losses."""
    if size < queries:
        return None
    try:
        from pytorch_metric_learning.losses import ContrastiveLoss, CrossBatchMemory
    except ImportError:
        return None
    memory = CrossBatchMemory(ContrastiveLoss(), DIMENSIONS, memory_size=size).to(device)
    memory.embedding_memory, memory.label_memory = remembered(size, device)
    memory.has_been_filled = True
    return _calls(memory, queries, size, device)


def _calls(loss: Callable[[Tensor, Tensor], Tensor], queries: int, size: int, device: str) -> Callable[[], None]:
    batches = [(embeddings(labels).requires_grad_(), labels) for labels in batch_labels(queries, size, device)]
    turn = itertools.cycle(batches)

    def call() -> None:
        vectors, labels = next(turn)
        vectors.grad = None
        loss(vectors, labels).backward()  # type: ignore[no-untyped-call]

    return call


def shares(moved: int, compute_ms: float, wires: dict[str, float]) -> dict[str, float]:
    """Milliseconds that `moved` bytes take on each wire (GB/s), and what share of the computing that is."""
    found = {}
    for wire, rate in wires.items():
        taken = moved / (rate * 1e6)
        found |= {f"{wire}_ms": round(taken, 4), f"{wire}_share": round(taken / compute_ms, 5)}
    return found
