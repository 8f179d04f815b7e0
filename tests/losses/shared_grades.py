"""Batches with paths and sets, shared out over two real processes: what each finds, and what one finds alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roadmap.losses import HAPPIER, Distributed, GradedNDCG, HierarchicalAP, Memory

from .cases import drawn
from .graded_cases import paths, sets

PATHS, GALLERY_PATHS = paths(0, 4, 0, 1, 2, 6, 0, 5, 1), paths(1, 0, 2, 2, 4, 3)
SETS = sets("0", "01", "012", "34", "3", "", "024", "01", "4")
GALLERY_SETS = sets("0", "01", "12", "3", "", "4")
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "h_ap": HierarchicalAP,
    "h_ap, nested, without self": lambda: HierarchicalAP("nested", include_self=False, pull=True),
    "ndcg": GradedNDCG,
    "happier": lambda: HAPPIER(7, 3).double(),
}
STEPS = ((3, 6), (9, 0), (4, 5))


@dataclass(frozen=True)
class Case:
    """A loss over nine items, cut into parts; with a gallery of six, cut likewise."""

    loss: str
    sizes: tuple[int, int]
    gallery: tuple[int, int] | None = None
    labels: str = "paths"

    def __str__(self) -> str:
        against = "" if self.gallery is None else f" against {self.gallery[0]}+{self.gallery[1]}"
        return f"{self.loss}, {self.labels}, {self.sizes[0]}+{self.sizes[1]}{against}"

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Labels of the batch and of the gallery."""
        if self.labels == "plain":
            return PATHS[:, 2], GALLERY_PATHS[:, 2]
        return (PATHS, GALLERY_PATHS) if self.labels == "paths" else (SETS, GALLERY_SETS)

    @property
    def made(self) -> nn.Module:
        torch.manual_seed(5)
        return LOSSES[self.loss]()


CASES = [
    *(Case(loss, (3, 6)) for loss in LOSSES),
    *(Case(loss, (9, 0), (2, 4)) for loss in LOSSES),
    *(Case(loss, (3, 6), labels="sets") for loss in LOSSES if loss != "happier"),
    Case("h_ap", (3, 6), (6, 0), "sets"),
    Case("h_ap", (3, 6), labels="plain"),
]


def part(case: Case, rank: int | None) -> dict[str, Tensor]:
    """What a process brings, or, None, the whole."""
    labels, items = case.tables
    found = {"embeddings": drawn(9, 3, 0), "labels": labels}
    if rank is not None:
        found = {name: some.split(case.sizes)[rank] for name, some in found.items()}
    if case.gallery is not None:
        more = {"ref_emb": drawn(6, 3, 1), "ref_labels": items}
        found |= more if rank is None else {name: some.split(case.gallery)[rank] for name, some in more.items()}
    for name in ("embeddings", "ref_emb"):
        if name in found:
            found[name] = found[name].clone().requires_grad_()
    return found


def found_by(case: Case, rank: int | None) -> list[Tensor]:
    """The value, and the gradients at what was brought and at the loss's own weights."""
    brought, loss = part(case, rank), case.made
    value = (loss if rank is None else Distributed(loss))(**brought)
    value.backward()
    leaves = [brought[name] for name in ("embeddings", "ref_emb") if name in brought]
    return [value.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in (*leaves, *loss.parameters()))]


def remembered(loss: str, table: str, rank: int | None) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """Three batches with a memory of seven: values, gradients at the batch, and the state at the end."""
    torch.manual_seed(5)
    made = LOSSES[loss]()
    memory = Memory(made if rank is None else Distributed(made), 7)
    found = []
    for step, sizes in enumerate(STEPS):
        x, labels = drawn(9, 3, step), (PATHS if table == "paths" else SETS).roll(step, 0)
        if rank is not None:
            x, labels = x.split(sizes)[rank], labels.split(sizes)[rank]
        x = x.clone().requires_grad_()
        value = memory(x, labels)
        value.backward()
        found.append((value.detach(), torch.zeros_like(x) if x.grad is None else x.grad))
    return found, memory.ring.state_dict()


MEMORIES = (("h_ap", "paths"), ("ndcg", "sets"), ("happier", "paths"))


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def run(rank: int, folder: str) -> None:
    """All of it, by one process; what it found lies in a file of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    found: dict[str, Any] = {str(case): found_by(case, rank) for case in CASES}
    found |= {f"memory, {loss}, {table}": remembered(loss, table, rank) for loss, table in MEMORIES}
    x, loss = drawn(9, 3, 0), Distributed(HierarchicalAP())
    found["columns"] = refusal(lambda: loss(x, PATHS if rank == 0 else PATHS[:, 1:]))
    found["sets"] = refusal(lambda: loss(x, PATHS[:, :1] if rank == 0 else SETS[:, :1]))
    found["no tree"] = refusal(lambda: loss(x, torch.tensor([[rank, 0]] * 9)))
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
