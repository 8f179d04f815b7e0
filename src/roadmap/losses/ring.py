"""Items of past batches, kept so that the present one and they lie in a row: a gallery that is never put together.

The vectors are one buffer, the batch at its front and the memory behind, and so are the labels, which may be numbers,
paths in a tree or sets:

    | unused | batch, as it came | memory, as it came | free |

A batch is written once, at the front. It becomes part of the memory when the next one comes, for until then a graph may
need it where it is. Which slot holds which picture, and which is the oldest, the host knows: nobody waits for a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from roadmap.losses.arguments import label_kind

Ints = NDArray[np.int64]
NOBODY = -1
_SAVED = ("vectors", "labels", "ids", "order", "counts")


class Ring(nn.Module):
    """The last `size` items.

    Attributes:
        calls: how often a loss asked for it; the loss counts.
        ids: by slot, the picture in it.
        order: the slots in use, the oldest first; they are the slots 0 to len(order) - 1.
    """

    vectors: Tensor
    labels: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.front, self.calls = size, 0, 0
        self.register_buffer("vectors", torch.zeros(size, 0), persistent=False)  # (front + size, D)
        self.register_buffer("labels", torch.zeros(size, dtype=torch.int64), persistent=False)
        self.ids: Ints = np.full(size, NOBODY, dtype=np.int64)
        self.order: Ints = np.zeros(0, dtype=np.int64)
        self._waiting: tuple[Ints, Ints] | None = None  # of the batch at the front that is not stored yet: ids, places
        self._graph: weakref.ref[Any] | None = None  # of the comparison that reads the buffer

    def __len__(self) -> int:
        """Items in memory; those of a batch that waits count when they are stored."""
        return len(self.order)

    def lay(self, batch: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Writes a batch at the front. Vectors (B + len, D) and labels of the batch and the memory, in this order; the
        gradient at the batch's rows goes to `batch`."""
        self.settle()
        self._make_room(batch, labels)
        first, end = self.front - len(batch), self.front + len(self)
        self.vectors[first : self.front] = batch.detach()
        self.labels[first : self.front] = labels
        token = _Token()
        self._graph = weakref.ref(token)
        gallery: Tensor = _Gallery.apply(batch, self.vectors[first:end], token)  # type: ignore[no-untyped-call]
        return gallery, self.labels[first:end].to(labels.dtype, copy=True)

    def keep(self, ids: Ints, rows: Ints) -> None:
        """These rows of the batch that was laid last, of pictures `ids`, are stored when the next batch comes."""
        self._waiting = ids[rows][-self.size :], (self.front - len(ids) + rows)[-self.size :]

    def settle(self) -> None:
        """Stores the batch that waits, in place of the oldest items where there is no room."""
        if self._waiting is None:
            return
        (ids, rows), self._waiting = self._waiting, None
        self._own_buffer()
        evicted = max(0, len(self) + len(ids) - self.size)
        slots = np.concatenate([self.order[:evicted], np.arange(len(self), len(self) + len(ids) - evicted)])
        self.order = np.concatenate([self.order[evicted:], slots])
        self.ids[slots] = ids
        self._copy_rows(rows, slots + self.front)

    def leave_out(self, ids: Ints) -> None:
        """Forgets every copy of these pictures."""
        self.settle()
        stays = ~np.isin(self.ids[self.order], ids)
        left, self.order = self.order[~stays], self.order[stays]
        if not len(left):
            return
        self._own_buffer()
        # the slots in use stay the first ones: those at the end move into the gaps
        used = len(self.order)
        gaps, ends = np.sort(left[left < used]), np.sort(self.order[self.order >= used])
        to = np.arange(self.size)
        to[ends] = gaps
        self.order = to[self.order]
        self.ids[gaps] = self.ids[ends]
        self._copy_rows(ends + self.front, gaps + self.front)

    def without(self, ids: Ints) -> tuple[Tensor, Tensor]:
        """A copy of the vectors and labels of all pictures but these."""
        self.settle()
        places = self._on_device(self.front + self.order[~np.isin(self.ids[self.order], ids)])
        return self.vectors[places], self.labels[places]

    def _copy_rows(self, source: Ints, target: Ints) -> None:
        """Rows of the buffer to others, of which none is read. A ring that just turns copies one run of rows, or two
        where it wraps: numbers of rows would first have to go to the GPU."""
        breaks = 1 + np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1))
        if len(breaks) > 1:
            to, of = self._on_device(target), self._on_device(source)
            self.vectors.index_copy_(0, to, self.vectors[of])
            self.labels.index_copy_(0, to, self.labels[of])
            return
        for first, end in zip((0, *breaks), (*breaks, len(source)), strict=True):
            if end > first:
                of, to = source[first], target[first]
                self.vectors[to : to + end - first] = self.vectors[of : of + end - first]
                self.labels[to : to + end - first] = self.labels[of : of + end - first]

    def _on_device(self, places: Ints) -> Tensor:
        return torch.from_numpy(places).to(self.vectors.device, non_blocking=True)

    def _own_buffer(self) -> None:
        """What a graph that has not gone backward still reads is left to it."""
        if self._graph is not None and self._graph() is not None:
            self.vectors = self.vectors.clone()
        self._graph = None

    def check_labels(self, labels: Tensor) -> None:
        """Refuses labels of another kind than those in memory."""
        if (len(self) or self._waiting is not None) and label_kind(labels) != label_kind(self.labels):
            raise ValueError(
                f"labels are {label_kind(labels)} but the memory holds {label_kind(self.labels)}; begin a new one"
            )

    def _make_room(self, batch: Tensor, batch_labels: Tensor) -> None:
        """A buffer for so many rows of this length, type and place, and for labels of this kind."""
        self.check_labels(batch_labels)
        D = batch.shape[1]
        if self.vectors.shape[1] not in (0, D):
            raise ValueError(f"embeddings have {D} dimensions but the memory holds vectors of {self.vectors.shape[1]}")
        front = max(self.front, len(batch))
        dtype = torch.promote_types(torch.float32, torch.promote_types(batch.dtype, self.vectors.dtype))
        asked = (front, D, dtype, batch.device, label_kind(batch_labels))
        held = (self.front, self.vectors.shape[1], self.vectors.dtype, self.vectors.device, label_kind(self.labels))
        if asked == held:
            self._own_buffer()
            return
        vectors = torch.zeros(front + self.size, D, dtype=dtype, device=batch.device)
        kind = torch.bool if batch_labels.dtype == torch.bool else torch.int64
        labels = torch.zeros(front + self.size, *batch_labels.shape[1:], dtype=kind, device=batch.device)
        if self.vectors.shape[1]:
            vectors[front:] = self.vectors[self.front :]
            if label_kind(labels) == label_kind(self.labels):  # of another kind only where nothing is stored
                labels[front:] = self.labels[self.front :]
        self.vectors, self.labels, self.front = vectors, labels, front

    def _behind_front(self, rows: Tensor) -> Tensor:
        room = rows.new_zeros(self.front + self.size, *rows.shape[1:], device=self.vectors.device)
        room[self.front :] = rows
        return room

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_graph": None}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.settle()
        order = np.full(self.size, NOBODY, dtype=np.int64)
        order[: len(self)] = self.order
        host = self.ids, order, np.array([self.calls, self.front])
        held = self.vectors[self.front :], self.labels[self.front :], *(torch.from_numpy(x) for x in host)
        for name, value in zip(_SAVED, held, strict=True):
            destination[prefix + name] = value.detach().clone().to(self.vectors.device)

    def _load_from_state_dict(
        self, state: Mapping[str, Any], prefix: str, _: Any, strict: bool, missing: list[str], *rest: list[str]
    ) -> None:
        unexpected, errors = rest
        missing += [prefix + name for name in _SAVED if prefix + name not in state]
        unexpected += [key for key in state if key.startswith(prefix) and key[len(prefix) :] not in _SAVED and strict]
        if missing:
            return
        vectors, labels, ids, order, counts = (state[prefix + name] for name in _SAVED)
        if len(vectors) != self.size:
            errors.append(f"{prefix}vectors: a memory of {len(vectors)} items was saved, this one holds {self.size}")
            return
        if 0 not in (D := self.vectors.shape[1], vectors.shape[1]) and vectors.shape[1] != D:
            errors.append(f"{prefix}vectors: {vectors.shape[1]} dimensions were saved, this memory holds {D}")
            return
        self._waiting = self._graph = None
        self.calls, self.front = counts.tolist()
        self.vectors, self.labels = (self._behind_front(some) for some in (vectors, labels))
        self.ids = ids.cpu().numpy().copy()
        self.order = order.cpu().numpy()[: int((order >= 0).sum())].copy()


class _Token:
    """Lives as long as a graph that reads the buffer, or until that went backward."""


class _Gallery(torch.autograd.Function):
    """The buffer, as a function of the batch at its front. It is not copied."""

    @staticmethod
    def forward(ctx: Any, batch: Tensor, laid: Tensor, token: _Token) -> Tensor:
        ctx.token, ctx.dtype = token, batch.dtype
        ctx.moving_rows = len(batch)  # read by the kernels: nobody asks for the gradient of the memory
        return laid.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        ctx.token = None
        return upstream[: ctx.moving_rows].to(ctx.dtype), None, None
