"""A loss that compares a batch with the batches before it (cross-batch memory; Wang et al., CVPR 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_count, check_embeddings, check_flag, check_labels, check_number, plain
from roadmap.losses.distributed import Distributed, Items, against_memory, takes_own, takes_paths
from roadmap.losses.metric_learning import check_module
from roadmap.losses.processes import Processes
from roadmap.losses.ring import NOBODY, Ints, Ring
from roadmap.losses.uncompiled import uncompiled

Form = Literal["auto", "joined", "added"]


class Memory(nn.Module):
    """A loss of a batch against itself and the last `size` items before it, called as the loss itself is.

    The memory holds vectors as they came, without a gradient; a batch joins it when the next one comes. So an item of
    the batch is met once, with its gradient. In evaluation mode (`memory.eval()`) nothing is stored or counted.

    Args:
        loss: a loss that takes a gallery: any but those with class weights. With several processes write
            `Memory(Distributed(loss), size)`: each then holds the same memory, of the items of all.
        size: items in memory.
        warmup: calls during which the batch is compared with itself alone and nothing is stored: embeddings still
            change fast.
        repeats: whether older copies of a picture may stay when it comes again. False leaves them out of the comparison
            and of the memory, which then holds each picture once; calls must bring `ids`.
        form: "joined": one comparison of the batch with batch and memory, each query ranking both together. "added":
            loss of the batch + weight x loss of the batch against the memory, as in XBM. "auto": joined where the loss
            can tell a query from its own place in the gallery (ours), added elsewhere (pytorch-metric-learning's).
        weight: of the memory in the added form.

    The whole of it is in `state_dict`: what is stored, in which order, and how many calls there were.

    >>> import torch
    >>> from roadmap.losses import ROADMAP
    >>> loss = Memory(ROADMAP(), size=32)
    >>> for _ in range(3):
    ...     loss(torch.randn(8, 16, requires_grad=True), torch.arange(8) // 2).backward()
    >>> len(loss)
    24
    """

    goes_outside = True  # of Distributed

    def __init__(
        self,
        loss: nn.Module,
        size: int,
        warmup: int = 0,
        repeats: bool = True,
        form: Form = "auto",
        weight: float = 1.0,
    ) -> None:
        super().__init__()
        check_module("loss", loss)
        if isinstance(loss, Memory):
            raise ValueError("the loss has a memory already; pass the loss inside it")
        inner = loss.loss if isinstance(loss, Distributed) else loss
        takes_gallery = hasattr(inner, "terms") or takes_own(inner)
        if getattr(inner, "embedding_size", None) is not None and not takes_gallery:
            raise ValueError(
                "this loss compares embeddings with its own class weights and not with other pictures: a memory is no "
                "use to it"
            )
        check_count("size", size, at_least=1)
        check_count("warmup", warmup, at_least=0)
        check_flag("repeats", repeats)
        check_number("weight", weight, at_least=0)
        if form not in get_args(Form):
            raise ValueError(f"form must be 'auto', 'joined' or 'added', got {form!r}")
        self.loss = loss
        self.size, self.warmup, self.repeats, self.weight = size, warmup, repeats, float(weight)
        self.form: Form = _form(self.inner, form)
        self.ring = Ring(size)

    def extra_repr(self) -> str:
        said = f"size={self.size}, warmup={self.warmup}, repeats={self.repeats}, form={self.form!r}"
        return said + f", weight={self.weight}"

    def __len__(self) -> int:
        """Items in memory, those of the last batch included."""
        self.ring.settle()
        return len(self.ring)

    @property
    def inner(self) -> nn.Module:
        """The loss itself."""
        return self.loss.loss if isinstance(self.loss, Distributed) else self.loss

    # The memory grows and turns: shapes and places change from call to call.
    @uncompiled
    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """As the loss's own call; `ids` are (B,) integers that name the pictures, on any device (where they are on a
        GPU and `repeats` is False, the host waits for them)."""
        if indices_tuple is not None or ref_emb is not None or ref_labels is not None:
            raise ValueError(
                "a loss with a memory takes neither indices_tuple nor ref_emb: its gallery is the batch and the memory"
            )
        batch, pictures, processes = self._batch(embeddings, labels, ids)
        used = self.ring.calls >= self.warmup
        value = self._of_both(batch, pictures, processes) if used else self._value(batch, processes)
        if self.training:
            self.ring.calls += 1
            if used:
                self.ring.keep(pictures, np.arange(len(pictures)) if self.repeats else _last_of_each(pictures))
        return value

    def _batch(self, x: Tensor, labels: Tensor, ids: Tensor | None) -> tuple[Items, Ints, Processes | None]:
        """The batch, of all processes; the pictures in it; the processes, where there are several."""
        processes = self.loss.processes if isinstance(self.loss, Distributed) else None
        if processes is None:
            check_embeddings("embeddings", x)
            check_labels("labels", labels, "embeddings", x, takes_paths(self.inner))
            self._check_ids(x, ids)
            wide = at_least_float32(x)
            pictures = np.full(len(x), NOBODY) if ids is None else ids.detach().cpu().numpy().astype(np.int64)
            known = plain(labels)  # those in memory may not fit into a narrower type
            return Items(wide, known, wide, known, 0), pictures, None
        assert isinstance(self.loss, Distributed)
        batch, everyone = self.loss.collected(processes, x, labels, ids, lambda: self._check_ids(x, ids))
        return batch, np.full(len(batch.all), NOBODY) if everyone is None else everyone.cpu().numpy(), processes

    def _check_ids(self, x: Tensor, ids: Tensor | None) -> None:
        if ids is None:
            if not self.repeats:
                raise ValueError("repeats=False needs the ids of the pictures: call loss(embeddings, labels, ids=...)")
            return
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool or ids.ndim != 1:
            came = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"ids must be a 1-D torch.Tensor of integers, one per picture, got {came}")
        if len(ids) != len(x):
            raise ValueError(f"ids has {len(ids)} entries but embeddings has {len(x)} rows")

    def _of_both(self, batch: Items, pictures: Ints, processes: Processes | None) -> Tensor:
        """The loss of the batch against batch and memory."""
        self.ring.check_labels(batch.labels)
        absent = pictures[:0] if self.repeats else pictures
        if self.training and not self.repeats:
            self.ring.leave_out(pictures)
        if self.form == "joined":
            if self.training:
                return self._value(batch, processes, *self.ring.lay(batch.all, batch.labels), joined=True)
            vectors, labels = self.ring.without(absent)
            if not len(vectors):
                return self._value(batch, processes)
            gallery = torch.cat([batch.all, vectors.to(batch.all)]), torch.cat([batch.labels, labels.to(batch.labels)])
            return self._value(batch, processes, *gallery, joined=True)
        vectors, labels = self.ring.without(absent)
        if self.training:
            self.ring.lay(batch.all.detach(), batch.labels)
        value = self._value(batch, processes)
        if not len(vectors):
            return value
        return value + self.weight * self._value(batch, processes, vectors.to(batch.all), labels.to(batch.labels))

    def _value(
        self,
        batch: Items,
        processes: Processes | None,
        vectors: Tensor | None = None,
        labels: Tensor | None = None,
        joined: bool = False,
    ) -> Tensor:
        """The loss of the batch against a gallery, None for itself; joined: it stands at the gallery's front."""
        distributed = self.loss
        if processes is not None and isinstance(distributed, Distributed):
            if distributed.by_rows:
                if vectors is None:
                    vectors, labels, joined = batch.all, batch.labels, True
                own = batch.places if joined else None
                return distributed.value(
                    processes, distributed.comparison(batch.own, batch.own_labels, None, vectors, labels, own)
                )
            with processes.same_draws(batch.all.device):
                return distributed.share(processes, self._inner_value(batch, vectors, labels, joined))
        return self._inner_value(batch, vectors, labels, joined)

    def _inner_value(self, batch: Items, vectors: Tensor | None, labels: Tensor | None, joined: bool) -> Tensor:
        """By the loss itself, of the whole batch."""
        places = {"own": torch.arange(len(batch.all), device=batch.all.device)} if joined else {}
        # what a loss adds for the batch alone is in the loss of the batch already
        loss = self.inner if vectors is None or joined else against_memory(self.inner)
        value: Tensor = loss(batch.all, batch.labels, None, vectors, labels, **places)
        return value


def _form(loss: nn.Module, asked: Form) -> Form:
    places = takes_own(loss)
    if asked == "joined" and not places:
        raise ValueError(
            f"{type(loss).__name__} cannot tell a query from its own place in a gallery, so it takes no joined form; "
            "use form='added', as in XBM"
        )
    return ("joined" if places else "added") if asked == "auto" else asked


def _last_of_each(pictures: Ints) -> Ints:
    """Rows of the pictures, without those that come again further on."""
    _, from_the_end = np.unique(pictures[::-1], return_index=True)
    return np.sort(len(pictures) - 1 - from_the_end)
