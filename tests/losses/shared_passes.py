"""What the processes of tests/losses/test_two_pass_processes.py do: two passes under DistributedDataParallel."""

# No postponed annotations: DistributedDataParallel looks at those of its hook.

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from roadmap.losses import ROADMAP, Distributed, Memory, TwoPass
from roadmap.losses.named import named_loss

STEPS = 3
COUNT = 12


@dataclass(frozen=True)
class Case:
    """How a batch of twelve is shared out, and by what it is judged."""

    sizes: tuple[int, int]
    chunk: int
    loss: str = "roadmap"
    memory: int = 0
    unused: bool = False


CASES = {
    "even": Case((6, 6), 4),
    "one chunk": Case((6, 6), 6),
    "uneven": Case((11, 1), 2),
    "empty": Case((12, 0), 5),
    "memory": Case((8, 4), 3, memory=20),
    "proxies": Case((7, 5), 3, loss="cross_entropy"),
    "unused weights": Case((6, 6), 4, unused=True),
}


class Net(nn.Module):
    def __init__(self, unused: bool, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
        if unused:
            self.extra = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    images = torch.randn(COUNT, 6, generator=drawn, dtype=torch.float64)
    return images, torch.arange(COUNT)[torch.randperm(COUNT, generator=drawn)] // 3


def loss_of(case: Case, shared: bool) -> nn.Module:
    torch.manual_seed(1)
    options = {"num_classes": 4, "embedding_size": 4} if case.loss == "cross_entropy" else {}
    inner = named_loss(case.loss, **options).double()
    loss = Distributed(inner) if shared else inner
    return Memory(loss, case.memory) if case.memory else loss


def trained(case: Case, rank: int | None) -> dict[str, Any]:
    """Values of the steps and weights after them: of one process in one pass, or of a rank in two."""
    net = Net(case.unused).double()
    loss = loss_of(case, rank is not None)
    weights = [*net.parameters(), *loss.parameters()]
    model: nn.Module = net
    exchanged = [0]
    if rank is not None:
        model = DistributedDataParallel(net)
        model.register_comm_hook(exchanged, counting)
    optimizer, values = torch.optim.SGD(weights, lr=0.5), []
    for step in range(STEPS):
        images, labels = batch(step)
        if rank is None:
            value = loss(model(images), labels)
        else:
            images, labels = images.split(case.sizes)[rank], labels.split(case.sizes)[rank]
            value = TwoPass(loss, model, case.chunk)(images, labels)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(value.detach())
    return {"values": values, "weights": [w.detach().clone() for w in weights], "exchanged": exchanged[0]}


def counting(seen: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own exchange, counted."""
    seen[0] += 1
    return dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future().then(
        lambda done: done.value()[0]
    )  # fmt: skip


def refusals() -> list[str]:
    """What is said of options that do not go with two passes."""
    said = []
    for option in ("find_unused_parameters", "static_graph"):
        try:
            TwoPass(ROADMAP(), DistributedDataParallel(Net(unused=False), **{option: True}), 3)
        except ValueError as error:
            said.append(str(error))
    return said


def statistics(rank: int) -> int:
    """Chunks that batch normalisation counted in two steps of two chunks."""
    net = Net(unused=False, norm=True).double()
    loss = TwoPass(Distributed(ROADMAP()), DistributedDataParallel(net), 3)
    for step in range(2):
        images, labels = batch(step)
        loss(images.split(6)[rank], labels.split(6)[rank]).backward()
    return int(net.middle.num_batches_tracked)


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", world_size=2, rank=rank)
    found: dict[str, Any] = {name: trained(case, rank) for name, case in CASES.items()}
    found |= {"statistics": statistics(rank), "refusals": refusals()}
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
