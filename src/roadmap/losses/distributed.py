"""A loss over the batch of several processes: each brings a part, and gets the value and the gradient of the whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roadmap.losses.comparison import Comparison
from roadmap.losses.metric_learning import check_module
from roadmap.losses.part import Part, check_parts, moving, widest
from roadmap.losses.processes import Gather, Processes, Total, processes_of
from roadmap.losses.terms import Terms
from roadmap.losses.uncompiled import uncompiled

Gradients = Literal["mean", "sum"]


class Distributed(nn.Module):
    """A loss over a batch that is shared out over processes, called as the loss itself is.

    Each process brings its part: the parts may be uneven, and one may be empty. The value is that of the whole batch,
    on every process. A loss that is sums over queries (`terms`: SupAP, ROADMAP and others) computes the rows of
    the process's own queries alone, against the items of all; any other sees the whole batch on every process.
    What such a loss draws at random is drawn alike. Every process must call it, and go backward, in the same steps.
    Without a process group, or with one process, it is the plain loss.

    Args:
        loss: a loss such as `roadmap.losses.ROADMAP()` or one of `roadmap.losses.pml`.
        gradients: what is done with the gradients of the processes afterwards. "mean": they are averaged, which is what
            `DistributedDataParallel` does. "sum": they are added. Either way what comes out is the gradient of one
            process with the whole batch, for the weights of a model and for those of the loss (proxies). With "mean"
            the weights of the loss have that gradient on every process before anything is averaged, so they need not
            be wrapped.
        group: the processes; None for all.

    Called with a gallery, each process brings its part of that too. `indices_tuple` counts in the process's own part.

    >>> import torch
    >>> from roadmap.losses import ROADMAP
    >>> loss = Distributed(ROADMAP())
    >>> loss(torch.randn(8, 16, requires_grad=True), torch.arange(8) // 2).backward()
    """

    def __init__(self, loss: nn.Module, gradients: Gradients = "mean", group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        check_module("loss", loss)
        if isinstance(loss, Distributed):
            raise ValueError("the loss is Distributed already; pass the loss inside it")
        if getattr(loss, "goes_outside", False):
            raise ValueError(
                f"a {type(loss).__name__} must know all processes; write {type(loss).__name__}(Distributed(loss), ...)"
            )
        if gradients not in get_args(Gradients):
            raise ValueError(f"gradients must be 'mean' or 'sum', got {gradients!r}")
        self.loss = loss
        self.gradients: Gradients = gradients
        self.group = group

    def extra_repr(self) -> str:
        return f"gradients={self.gradients!r}"

    @property
    def processes(self) -> Processes | None:
        """Those that share the batch; None where there is but this one."""
        return processes_of(self.group)

    @property
    def by_rows(self) -> bool:
        """Whether each process computes the rows of its own queries alone. A loss with weights does not: each process
        then has their whole gradient. Nor does one that says `whole_batch`: it makes something of any two queries."""
        whole = getattr(self.loss, "whole_batch", False)
        return hasattr(self.loss, "terms") and not whole and next(self.loss.parameters(), None) is None

    # Processes wait for each other here, and shapes hang on what the others bring: no compiler follows.
    @uncompiled
    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        processes = self.processes
        if processes is None:
            value: Tensor = self.loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
            return value
        parts = self._agreed(processes, embeddings, labels, indices_tuple, ref_emb, ref_labels)
        gallery = None
        if ref_emb is not None and ref_labels is not None:
            gallery = self.items_of_all(processes, [part.of_gallery for part in parts], ref_emb, ref_labels)
        if self.by_rows and gallery is not None:  # the queries of others are not needed
            pairs = _moved(indices_tuple, 0, gallery.first)
            queries = moving(embeddings, parts)
            return self.value(processes, self.comparison(queries, labels, pairs, gallery.all, gallery.labels))
        batch = self.items_of_all(processes, parts, embeddings, labels)
        if self.by_rows:
            pairs = _moved(indices_tuple, 0, batch.first)
            return self.value(
                processes, self.comparison(batch.own, labels, pairs, batch.all, batch.labels, batch.places)
            )
        return self._of_whole(processes, parts, batch, gallery, indices_tuple)

    def _of_whole(
        self,
        processes: Processes,
        parts: Sequence[Part],
        batch: Items,
        gallery: Items | None,
        pairs: Sequence[Tensor] | None,
    ) -> Tensor:
        """For a loss that does not split by rows."""
        moved = _moved(pairs, batch.first, (gallery or batch).first)
        everyone = _gathered_pairs(processes, parts, moved, batch.all.device)
        found = (None, None) if gallery is None else (gallery.all, gallery.labels)
        with processes.same_draws(batch.all.device):
            return self.share(processes, self.loss(batch.all, batch.labels, everyone, *found))

    def items_of_all(self, processes: Processes, parts: Sequence[Part], x: Tensor, labels: Tensor) -> Items:
        """The items of all processes; gradients at them go back to their owners."""
        sizes = [part.rows for part in parts]
        wide = moving(x.to(widest([part.dtype for part in parts])), parts)
        add, factor = (True, 1.0) if self.by_rows else (False, float(processes.count))
        own, everyone = Gather.apply(wide, processes, sizes, add, factor)  # type: ignore[no-untyped-call]
        plain = labels if labels.dtype == torch.bool else labels.long()
        return Items(own, labels, everyone, processes.rows(plain, sizes), sum(sizes[: processes.rank]))

    def comparison(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
        own: Tensor | None = None,
    ) -> Comparison:
        """As the loss itself would make it: it says whether labels may be paths or sets."""
        graded = takes_paths(self.loss)
        return Comparison.of(embeddings, labels, indices_tuple, ref_emb, ref_labels, own, graded=graded)

    def collected(
        self, processes: Processes, x: Tensor, labels: Tensor, ids: Tensor | None, check: Callable[[], None]
    ) -> tuple[Items, Tensor | None]:
        """The batch of all processes and the ids of its pictures; what `check` raises on one is told to all."""
        parts = self._agreed(processes, x, labels, None, None, None, ids, check)
        batch = self.items_of_all(processes, parts, x, labels)
        if ids is None:
            return batch, None
        return batch, processes.rows(ids.to(x.device).long(), [part.rows for part in parts])

    def value(self, processes: Processes, c: Comparison) -> Tensor:
        """The loss of all, from the rows of this process's queries."""
        terms: Terms = self.loss.terms(c)  # type: ignore[operator]
        factor = processes.count if self.gradients == "mean" else 1
        sums, counts = Total.apply(terms.sums, terms.counts, processes, float(factor))  # type: ignore[no-untyped-call]
        found: Tensor = self.loss.value(Terms(sums, counts))  # type: ignore[operator]
        return found

    def share(self, processes: Processes, value: Tensor) -> Tensor:
        """The loss of all, which this process has whole, with the gradient that is its part in the mean or the sum."""
        if self.gradients == "mean":
            return value
        return value.detach() + (value - value.detach()) / processes.count

    def _agreed(
        self,
        processes: Processes,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
        ids: Tensor | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> list[Part]:
        """What each process brings, checked on all alike."""
        wrong: Exception | None = None
        try:
            self.comparison(embeddings, labels, indices_tuple, ref_emb, ref_labels)
            check()
            part = Part.of(embeddings, labels, ref_emb, indices_tuple, ids, self.by_rows, self.gradients == "mean")
        except Exception as error:  # told to the others, who would wait, and raised again
            wrong, part = error, Part(broken=1)
        device = embeddings.device if isinstance(embeddings, Tensor) else torch.device("cpu")
        parts = [Part(*said) for said in processes.agreed(astuple(part), device)]
        if wrong is not None:
            raise wrong
        check_parts(parts)
        return parts


@dataclass(frozen=True)
class Items:
    """Items of several processes: this one's, `own`, and those of all; own[0] is all[first]."""

    own: Tensor
    own_labels: Tensor
    all: Tensor
    labels: Tensor
    first: int

    @property
    def places(self) -> Tensor:
        """Where this process's items stand among all."""
        return torch.arange(self.first, self.first + len(self.own), device=self.own.device)


def takes_own(loss: nn.Module) -> bool:
    """Whether it can tell a query from its own place in a gallery."""
    return bool(getattr(loss, "takes_own", "own" in inspect.signature(loss.forward).parameters))


def takes_paths(loss: nn.Module) -> bool:
    """Whether labels may be paths in a tree or sets of labels."""
    return bool(getattr(loss, "takes_paths", False))


def against_memory(loss: nn.Module) -> nn.Module:
    """What a memory compares with earlier batches: the loss without what it adds for the batch alone."""
    found: nn.Module = getattr(loss, "against_memory", loss)
    return found


def _moved(pairs: Sequence[Tensor] | None, rows: int, columns: int) -> list[Tensor] | None:
    """Indices that count from `rows` and `columns` on."""
    if pairs is None:
        return None
    anchors = (0,) if len(pairs) == 3 else (0, 2)
    return [some + (rows if k in anchors else columns) for k, some in enumerate(pairs)]


def _gathered_pairs(
    processes: Processes, parts: Sequence[Part], pairs: Sequence[Tensor] | None, device: torch.device
) -> tuple[Tensor, ...] | None:
    if pairs is None:
        return None
    sizes = [part.pairs for part in parts], [part.more_pairs for part in parts]
    return tuple(processes.rows(some.to(device).long(), sizes[k // 2]) for k, some in enumerate(pairs))
