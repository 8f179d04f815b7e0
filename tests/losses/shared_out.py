"""Batches shared out over real processes: what each brings, what it found, and what one process finds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roadmap.kernels import both_run_on_triton
from roadmap.losses import (
    ROADMAP,
    BlackBoxAP,
    Calibration,
    ClusteredLoss,
    Distributed,
    FastAP,
    HordeContrastive,
    Matryoshka,
    Memory,
    RecallAtK,
    SmoothAP,
    SoftBinAP,
    SphericalConstraint,
    SupAP,
    SupNDCG,
    SupRank,
    TripletSCT,
)

CLASSES, DIMENSIONS = 4, 5
LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3, 2, 0, 1, 1])  # 3 is alone
GALLERY_LABELS = torch.tensor([2, 0, 1, 1, 0, 2, 2])

LOSSES: dict[str, Callable[[], nn.Module]] = {
    "roadmap": ROADMAP,
    "roadmap, printed, without self": lambda: ROADMAP(lam=0.3, average="all", include_self=False),
    "supap": SupAP,
    "supap without self": lambda: SupAP(include_self=False),
    "smoothap": SmoothAP,
    "calibration": Calibration,
    "calibration, printed": lambda: Calibration(average="all"),
    "fastap": FastAP,
    "softbinap": SoftBinAP,
    "blackboxap": BlackBoxAP,
    "blackboxap, random": lambda: BlackBoxAP(perturbation="random"),
    "triplet_sct": TripletSCT,
    "contrastive_horde": HordeContrastive,
    "sec": lambda: SphericalConstraint(ROADMAP(), momentum=0.5),
    "matryoshka": lambda: Matryoshka(ROADMAP(include_self=False), [2, 5, 3], [0.5, 1, 2]),
    "matryoshka of fastap": lambda: Matryoshka(FastAP(), [2, 5]),
    "matryoshka of recall at k, mixed": lambda: Matryoshka(RecallAtK(mix=True), [2, 5]),
    "recall at k": RecallAtK,
    "recall at k, mixed": lambda: RecallAtK(mix=True),
    "supndcg": SupNDCG,
    "clustered": lambda: ClusteredLoss(ROADMAP(include_self=False), CLASSES, DIMENSIONS, lam=0.3),
    "suprank": lambda: SupRank(CLASSES, DIMENSIONS, lam=0.3, measure="recall", include_self=False),
}
PROXIES = "matryoshka of proxies"
WITHOUT_GALLERY = ("cross_entropy", "normalised_softmax", "proxy_gml", "proxy_nca", "proxy_nca_pp", PROXIES)
try:
    from roadmap.losses.pml import RECIPES, PMLLoss

    for _name, _make in RECIPES.items():
        LOSSES[_name] = (lambda make=_make: make(CLASSES, DIMENSIONS)) if _name in WITHOUT_GALLERY else _make
    LOSSES[PROXIES] = lambda: Matryoshka(lambda d: RECIPES["proxy_nca"](CLASSES, d), [2, 5])
    LOSSES["roadmap for the library"] = lambda: PMLLoss(ROADMAP())
except ImportError:
    pass


@dataclass(frozen=True)
class Case:
    """A loss over LABELS, cut into parts of these sizes; with a gallery, over GALLERY_LABELS, cut likewise."""

    loss: str
    sizes: tuple[int, ...]
    gallery: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float64
    gradients: str = "mean"
    pairs: bool = False
    unmoved: bool = False  # an empty part that no model made: it asks for no gradient
    labels: Tensor = field(default=LABELS, compare=False, repr=False)
    about: str = ""
    device: str = "cpu"

    def __str__(self) -> str:
        shape = "+".join(map(str, self.sizes))
        against = "" if self.gallery is None else " against " + "+".join(map(str, self.gallery))
        mined = ", pairs" if self.pairs else ""
        return f"{self.loss}, {shape}{against}, {str(self.dtype)[6:]}, {self.gradients}{mined}{self.about}"

    @property
    def made(self) -> nn.Module:
        torch.manual_seed(5)
        return LOSSES[self.loss]().to(self.dtype)


def vectors(items: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(items, DIMENSIONS, generator=generator, dtype=torch.float64) + 0.8).to(dtype)


def pieces(x: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    return list(x.split(list(sizes)))


def pairs_in(first: int, end: int) -> tuple[Tensor, ...]:
    """Triplets among the items of one part, as a miner would find them there: numbered within the part."""
    labels = LABELS[first:end]
    found = [
        (a, p, n)
        for a in range(len(labels))
        for p in range(len(labels))
        for n in range(len(labels))
        if a != p and labels[a] == labels[p] and labels[a] != labels[n]
    ]
    return tuple(torch.tensor(found, dtype=torch.int64).reshape(-1, 3).T)


def cases(processes: int) -> list[Case]:
    two = processes == 2
    even, uneven, empty = ((5, 6), (3, 8), (11, 0)) if two else ((4, 4, 3), (1, 8, 2), (6, 0, 5))
    parted = (3, 4) if two else (5, 0, 2)
    found = []
    for loss in LOSSES:
        found += [Case(loss, even), Case(loss, uneven, gradients="sum"), Case(loss, empty, unmoved=True)]
        found += [Case(loss, uneven, dtype=torch.float32)]
        if loss not in WITHOUT_GALLERY:
            found += [Case(loss, uneven, parted), Case(loss, empty, parted, gradients="sum", unmoved=True)]
    mined = ("roadmap", "supap without self", "contrastive_xbm", "fastap")
    found += [Case(loss, uneven, pairs=True) for loss in mined if loss in LOSSES]
    # one process has no positive for its query; then no query has one at all
    alone = torch.tensor([3, 0, 1, 0, 2, 1, 0, 2, 0, 1, 1])
    lonely = (1, 10) if two else (1, 5, 5)
    without = {"labels": alone, "about": ", one without a positive"}
    found += [Case(loss, lonely, **without) for loss in ("roadmap", "supap without self", "smoothap")]
    without = {"labels": torch.arange(11), "about": ", none has a positive"}
    return found + [Case(loss, uneven, **without) for loss in ("roadmap", "supap without self", "fastap")]


@dataclass
class Found:
    """A value, and the gradients at the batch, the gallery and the loss's own weights."""

    value: Tensor
    batch: Tensor
    gallery: Tensor | None
    weights: list[Tensor]


def found_by(loss: nn.Module, batch: Tensor, labels: Tensor, gallery: Any, pairs: Any, rank: int = 0) -> Found:
    torch.manual_seed(1 + rank)  # for what is drawn: the first process's draws count
    items = () if gallery is None else gallery
    value = loss(batch, labels, pairs, *items)
    value.backward()
    nothing = torch.zeros_like(batch)
    at_gallery = None if gallery is None else items[0].grad
    weights = [torch.zeros_like(w) if w.grad is None else w.grad for w in loss.parameters()]
    return Found(value.detach(), nothing if batch.grad is None else batch.grad, at_gallery, weights)


def alone(case: Case) -> Found:
    """What one process finds on the whole batch."""
    batch = vectors(11, 0, case.dtype).to(case.device).requires_grad_()
    gallery = None
    if case.gallery:
        gallery = vectors(7, 1, case.dtype).to(case.device).requires_grad_(), GALLERY_LABELS.to(case.device)
    pairs = None
    if case.pairs:
        edges = [0, *torch.tensor(case.sizes).cumsum(0).tolist()]
        found = [[some + first for some in pairs_in(first, end)] for first, end in pairwise(edges)]
        pairs = tuple(torch.cat(some) for some in zip(*found, strict=True))
    return found_by(case.made.to(case.device), batch, case.labels.to(case.device), gallery, pairs)


def together(case: Case, rank: int, group: dist.ProcessGroup | None) -> Found:
    """What a process finds with its part."""
    batch = pieces(vectors(11, 0, case.dtype).to(case.device), case.sizes)[rank].clone()
    labels, gallery_labels = (some.to(case.device) for some in (case.labels, GALLERY_LABELS))
    batch.requires_grad_(not (case.unmoved and len(batch) == 0))
    gallery = pairs = None
    if case.gallery:
        part = pieces(vectors(7, 1, case.dtype).to(case.device), case.gallery)[rank].clone()
        gallery = part.requires_grad_(not (case.unmoved and len(part) == 0)), gallery_labels.split(case.gallery)[rank]
    if case.pairs:
        first = sum(case.sizes[:rank])
        pairs = pairs_in(first, first + len(batch))
    loss = Distributed(case.made.to(case.device), gradients=case.gradients, group=group)
    return found_by(loss, batch, labels.split(case.sizes)[rank], gallery, pairs, rank)


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refusals(rank: int) -> dict[str, str]:
    """What each process says of what cannot be; none waits for another, for the calls after these go well."""
    x, labels = vectors(4, rank, torch.float32), torch.tensor([0, 0, 1, 1])
    loss, first = Distributed(ROADMAP()), rank == 0
    triplets = (torch.tensor([0]), torch.tensor([1]), torch.tensor([2]))
    fast = Distributed(BlackBoxAP() if first else ROADMAP())
    found = {
        "dimensions": refusal(lambda: loss(x[:, :3] if first else x, labels)),
        "labels": refusal(lambda: loss(x, labels[:3] if rank == 1 else labels)),
        "zero vector": refusal(lambda: loss(x * 0 if rank == 1 else x, labels)),
        "gallery": refusal(lambda: loss(x, labels, None, *((None, None) if first else (x, labels)))),
        "pairs": refusal(lambda: loss(x, labels, triplets if first else None)),
        "losses": refusal(lambda: fast(x, labels)),
    }
    memory = Memory(loss, 8, repeats=False)
    found["ids"] = refusal(lambda: memory(x, labels, ids=None if rank == 1 else labels))
    with torch.no_grad() if first else nullcontext():
        found["gradients"] = refusal(lambda: loss(x, labels))
    return found


def under_ddp(rank: int, gradients: str = "mean") -> dict[str, list[Tensor]]:
    """Gradients of a model, and of a loss with proxies, after DistributedDataParallel averaged them, with autocast and
    without."""
    found = {}
    for name in ("roadmap", "fastap", "proxy_nca"):
        if name not in LOSSES:
            continue
        for autocast in (False, True):
            pictures, labels = vectors(11, 3, torch.float32).split((1, 8, 2))[rank], LABELS.split((1, 8, 2))[rank]
            model, loss = model_and_loss(name)
            shared = nn.parallel.DistributedDataParallel(model)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                value = Distributed(loss)(shared(pictures), labels)
            value.backward()
            found[f"{name}, autocast {autocast}"] = [value.detach(), *gradients_of(model), *gradients_of(loss)]
    return found


def model_and_loss(name: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(5)
    return nn.Linear(DIMENSIONS, DIMENSIONS), LOSSES[name]()


def gradients_of(module: nn.Module) -> list[Tensor]:
    return [w.grad for w in module.parameters() if w.grad is not None]


def compiled(rank: int) -> Found:
    """As `together`, inside a compiled function."""
    case = Case("roadmap", (1, 8, 2), dtype=torch.float32)
    batch, labels = (
        pieces(vectors(11, 0, case.dtype), case.sizes)[rank].clone().requires_grad_(),
        LABELS.split((1, 8, 2)),
    )
    loss = Distributed(ROADMAP())
    called = torch.compile(lambda x, y: loss(x * 1, y), backend="eager")
    value = called(batch, labels[rank])
    value.backward()
    return Found(value.detach(), batch.grad, None, [])


MEMORIES: dict[str, dict[str, Any]] = {
    "roadmap": {},
    "supap without self": {"warmup": 1, "repeats": False},
    "calibration": {"form": "added", "weight": 0.5},
    "fastap": {"repeats": False},
    "matryoshka": {"repeats": False},
    "recall at k": {},
    "recall at k, mixed": {},
    "clustered": {},
    "suprank": {"repeats": False},
    "contrastive_xbm": {"repeats": False},
    "triplet_distance_weighted": {"weight": 0.5},
}


STEPS = ((4, 4, 3), (1, 8, 2), (6, 0, 5), (4, 4, 3))


def remembered(
    name: str,
    rank: int | None,
    steps: Sequence[tuple[int, ...]] = STEPS,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> tuple[list[Found], dict[str, Tensor]]:
    """Batches with a memory, by one process (None) or by all: values, gradients, and the state at the end."""
    torch.manual_seed(5)  # for weights of the loss
    loss = LOSSES[name]().to(dtype)
    memory = Memory(loss if rank is None else Distributed(loss), 13, **MEMORIES[name])
    found = []
    for step, sizes in enumerate(steps):
        x, ids = vectors(11, step, dtype).to(device), ((torch.arange(11) * (step + 3)) % 17).to(device)
        labels = ids % 3
        if rank is not None:
            x, ids, labels = (some.split(sizes)[rank].clone() for some in (x, ids, labels))
            torch.manual_seed(10 * rank)
        if rank in (None, 0):
            torch.manual_seed(step)  # for what is drawn
        x.requires_grad_(len(x) > 0)
        value = memory(x, labels, ids=ids)
        value.backward()
        found.append(Found(value.detach(), torch.zeros_like(x) if x.grad is None else x.grad, None, []))
    return found, memory.state_dict()


def run(rank: int, processes: int, folder: str) -> None:
    """All of it, by one process; what it found lies in a file of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=processes)
    two = dist.new_group([0, 1])
    found: dict[str, Any] = {f"3: {case}": together(case, rank, None) for case in cases(3)}
    if rank < 2:
        found |= {f"2: {case}": together(case, rank, two) for case in cases(2)}
    else:
        found["outside"] = refusal(lambda: Distributed(ROADMAP(), group=two)(vectors(2, 0, torch.float32), LABELS[:2]))
    found |= {"refusals": refusals(rank), "ddp": under_ddp(rank), "compiled": compiled(rank)}
    found |= {f"memory: {name}": remembered(name, rank) for name in MEMORIES if name in LOSSES}
    if rank == 2:  # dies in the middle of the others' step
        torch.save(found, Path(folder) / f"{rank}.pt")
        os._exit(0)
    found["death"] = refusal(lambda: Distributed(ROADMAP())(vectors(4, rank, torch.float32), LABELS[:4]))
    torch.save(found, Path(folder) / f"{rank}.pt")
    os._exit(0)  # no farewell to a process that has gone


def kernel_cases(device: str) -> list[Case]:
    """What the kernels take: float32, on the device, or anywhere under their interpreter."""
    found = [Case("roadmap, printed, without self", (3, 8), (7, 0), torch.float32, "sum", unmoved=True)]
    if device != "cpu":  # the interpreter takes seconds for each
        names = "roadmap", "supap without self", "smoothap", "fastap", "blackboxap, random", "proxy_nca"
        found += [Case(loss, (3, 8), dtype=torch.float32) for loss in (*names, "contrastive_xbm")]
        found += [Case("roadmap", (11, 0), dtype=torch.float32, unmoved=True)]
    return [replace(case, device=device) for case in found]


def run_kernels(rank: int, processes: int, folder: str, device: str) -> None:
    """The cases above, by one process, and what it finds alone."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=processes)
    found = {
        str(case): (together(case, rank, None), alone(case) if rank == 0 else None) for case in kernel_cases(device)
    }
    steps = ((11, 0), (3, 8))
    one = remembered("roadmap", None, steps, torch.float32, device) if rank == 0 else None
    found["memory"] = remembered("roadmap", rank, steps, torch.float32, device), one
    torch.save((found, both_run_on_triton(vectors(2, 0, torch.float32).to(device), None)), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
