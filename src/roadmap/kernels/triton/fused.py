"""One loss from embeddings: which kernels run, and whether they are launched one by one or played from a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roadmap.kernels.rules import LossRule
from roadmap.kernels.triton import products, small, tiles
from roadmap.kernels.triton.launch import Program, signature_of

MOST_PROGRAMS = 64  # records kept; a loop has one or two, a sweep over shapes must not gather them for ever
_programs: dict[Any, tuple[Program, Program]] = {}


@dataclass(frozen=True)
class FusedState:
    """Between forward and backward, beside the tensors: what the kernels left (None where it was played)."""

    program: Program
    kept: Any
    is_small: bool


def forward(
    queries: Tensor,
    query_labels: Tensor,
    gallery: Tensor | None,
    gallery_labels: Tensor,
    rule: LossRule,
    needs: tuple[bool, bool],
    is_small: bool,
) -> tuple[Tensor, FusedState, tuple[Tensor | None, ...]]:
    """The loss; its state; and the tensors that the backward reads, for autograd to keep and to free."""
    query_labels, gallery_labels = query_labels.long().contiguous(), gallery_labels.long().contiguous()
    loss = torch.empty((), device=queries.device)
    pairs = None if is_small else tiles.sorted_pairs(query_labels, None if gallery is None else gallery_labels)
    runs = () if pairs is None else (pairs.query_order, pairs.gallery_order, pairs.start, pairs.end, pairs.offset)
    tensors = (queries, gallery, query_labels, gallery_labels, loss, *runs)
    without_loss = (
        queries,
        gallery,
        query_labels,
        gallery_labels,
        None,
        *runs,
    )  # kept with it, it would never be freed
    signatures = tuple(signature_of(t) for t in tensors)
    counts = None if pairs is None else (pairs.total, pairs.largest)
    key = (rule, needs, is_small, queries.device, counts, signatures)
    programs = _programs.pop(key, None) or (Program(), Program())
    _programs[key] = programs  # the last used stands last
    if len(_programs) > MOST_PROGRAMS:
        _programs.pop(next(iter(_programs)), None)
    tape = programs[0].tape
    if tape is not None and (programs[1].tape is not None or not any(needs)):
        workspace = torch.empty(tape.workspace, device=queries.device, dtype=torch.uint8)
        tape.play([0 if t is None else t.data_ptr() for t in (*tensors, workspace)], queries.device.index or 0)
        return loss, FusedState(programs[1], None, is_small), (*without_loss, workspace)
    with programs[0].run(queries.device, tensors) as arena:
        if pairs is None:
            kept: Any = small.forward(arena, loss, queries, query_labels, gallery, gallery_labels, rule, any(needs))
        else:
            kept = tiles.forward(arena, loss, queries, gallery, pairs, rule, any(needs))
    return loss, FusedState(programs[1], kept, is_small), (*without_loss, arena.buffer)


def backward(
    state: FusedState, kept: tuple[Tensor | None, ...], upstream: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients at queries and gallery, where needed; in the in-batch call both roles meet in the queries."""
    program = state.program
    upstream = upstream.float()
    if upstream.data_ptr() & 15:
        upstream = upstream.clone()  # a record takes aligned tensors for granted
    grad_queries, grad_gallery = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if x is not None and need else None
        for x, need in zip(kept[:2], needs, strict=True)
    )
    tensors = (*kept, upstream, grad_queries, grad_gallery)
    if state.kept is None:
        assert program.tape is not None
        workspace = torch.empty(program.tape.workspace, device=upstream.device, dtype=torch.uint8)
        everything = (*tensors, workspace)
        program.tape.play([0 if t is None else t.data_ptr() for t in everything], upstream.device.index or 0)
        return grad_queries, grad_gallery
    with program.run(upstream.device, tensors) as arena:
        module = small if state.is_small else products
        module.backward(arena, state.kept, upstream, grad_queries, grad_gallery)
    return grad_queries, grad_gallery
