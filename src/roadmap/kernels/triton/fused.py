"""One loss from embeddings: which kernels run, and whether they are launched one by one or played from a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from roadmap.kernels.calls import LossCall
from roadmap.kernels.paths import is_small
from roadmap.kernels.rules import TERMS, LossRule
from roadmap.kernels.triton import small, stored, stored_backward, tiles_backward, tiles_forward
from roadmap.kernels.triton.launch import Arena, Program, new_buffer, program_of, shared_memory
from roadmap.kernels.triton.small import small_state
from roadmap.kernels.triton.stored import positive_lists, stored_state
from roadmap.kernels.triton.tiles import PositivePairs, positive_pairs, tile_state

_programs: dict[Any, tuple[Program, Program]] = {}


@dataclass(frozen=True)
class Note:
    """Between forward and backward, beside the tensors."""

    program: Program
    pairs: PositivePairs | None
    rule: LossRule
    as_terms: bool
    moving: int | None = None


def forward(call: LossCall, needs: tuple[bool, bool]) -> tuple[Tensor, Note, tuple[Tensor | None, ...]]:
    """The loss or its terms; a note; and the tensors that the backward reads, for autograd to keep and to free.

    The last of these is the buffer with all that the kernels left.
    """
    call = _tidy(call)
    device = call.queries.device
    out = torch.empty((TERMS,) if call.as_terms else (), device=device, dtype=torch.float32)
    pairs = None if is_small(*call.shape) else positive_lists(call) if call.keeps_scores else positive_pairs(call)
    given = _given(call, pairs)
    programs = _programs_of(call, needs, pairs, given)
    program, tape = programs[0], programs[0].tape
    if tape is not None:
        buffer = new_buffer(tape.workspace, device)
        tape.play([0 if t is None else t.data_ptr() for t in (*given, out, buffer)], device.index or 0)
        return out, Note(programs[1], pairs, call.rule, call.as_terms, call.moving), (*given, buffer)
    if program.size is None:
        program.size = buffer_size(call, pairs, any(needs))
    buffer = new_buffer(program.size, device)
    with program.run(device, (*given, out), buffer) as arena:
        if pairs is None:
            small.forward(small_state(arena, call, any(needs)), out, call)
        elif pairs.are_lists:
            stored.forward(stored_state(arena, call, pairs), out, call, pairs, any(needs))
        else:
            tiles_forward.forward(tile_state(arena, call, pairs), out, call, pairs, any(needs))
    return out, Note(programs[1], pairs, call.rule, call.as_terms, call.moving), (*given, buffer)


def backward(
    note: Note, kept: Sequence[Tensor | None], upstream: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients at queries and gallery, where needed; in the in-batch call both roles meet in the queries."""
    program, pairs = note.program, note.pairs
    upstream = upstream.float().contiguous()
    if upstream.data_ptr() & 15:
        upstream = upstream.clone()  # a record takes aligned tensors for granted
    grad_queries, grad_gallery = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if x is not None and need else None
        for x, need in zip(kept[:2], needs, strict=True)
    )
    whole = grad_gallery
    if grad_gallery is not None and note.moving is not None and pairs is not None and pairs.are_lists:
        whole = grad_gallery.zero_()
        grad_gallery = whole[: note.moving]
    if program.tape is not None:
        workspace = new_buffer(program.tape.workspace, upstream.device)
        tensors = (*kept, upstream, grad_queries, grad_gallery, workspace)
        program.tape.play([0 if t is None else t.data_ptr() for t in tensors], upstream.device.index or 0)
        return grad_queries, whole
    if shared_memory((*kept, upstream)) != shared_memory(kept):
        upstream = upstream.clone()  # else the record would take it for a part of another tensor
    tensors = (*kept, upstream, grad_queries, grad_gallery)
    call = _call_over(note, kept)
    state = Arena(upstream.device, kept[-1])
    with program.run(upstream.device, tensors, None) as arena:
        if pairs is None:
            small.backward(arena, small_state(state, call, True), call, upstream, grad_queries, grad_gallery)
        elif pairs.are_lists:
            kept_scores = stored_state(state, call, pairs)
            stored_backward.backward(arena, kept_scores, call, pairs, upstream, grad_queries, grad_gallery)
        else:
            tiled = tile_state(state, call, pairs)
            tiles_backward.backward(arena, tiled, call, pairs, upstream, grad_queries, grad_gallery)
    return grad_queries, whole


def backward_of_buffer(
    call: LossCall, buffer: Tensor, upstream: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The backward where only the buffer was kept; where it is empty, the forward runs again."""
    if not len(buffer):
        _, note, kept = forward(call, needs)
        return backward(note, kept, upstream, needs)
    call = _tidy(call)
    kept = (*_given(call, None), buffer)
    program = _programs_of(call, needs, None, _given(call, None))[1]
    return backward(Note(program, None, call.rule, call.as_terms), kept, upstream, needs)


def buffer_size(call: LossCall, pairs: PositivePairs | None, keep: bool) -> int:
    """Bytes that the kernels of a forward write."""
    arena = Arena(torch.device("meta"))
    if pairs is None:
        small_state(arena, call, keep)
    elif pairs.are_lists:
        stored_state(arena, call, pairs)
    else:
        tile_state(arena, call, pairs)
    return arena.used


def _tidy(call: LossCall) -> LossCall:
    """Labels and places as the kernels read them."""
    labels, others, own = call.query_labels, call.gallery_labels, call.own
    if all(t is None or (t.dtype == torch.int64 and t.is_contiguous()) for t in (labels, others, own)):
        return call
    return replace(
        call,
        query_labels=labels.long().contiguous(),
        gallery_labels=others.long().contiguous(),
        own=None if own is None else own.long().contiguous(),
    )


def _given(call: LossCall, pairs: PositivePairs | None) -> tuple[Tensor | None, ...]:
    runs = () if pairs is None else pairs.tensors
    return call.queries, call.gallery, call.query_labels, call.gallery_labels, call.own, *runs


def _call_over(note: Note, kept: Sequence[Tensor | None]) -> LossCall:
    """The call again, from the tensors that autograd kept."""
    queries, gallery, query_labels, gallery_labels, own = kept[:5]
    assert queries is not None
    assert query_labels is not None
    assert gallery_labels is not None
    return LossCall(queries, gallery, query_labels, gallery_labels, own, note.rule, note.as_terms)


def _programs_of(
    call: LossCall, needs: tuple[bool, bool], pairs: PositivePairs | None, tensors: Sequence[Tensor | None]
) -> tuple[Program, Program]:
    """The records of calls like this one, forward and backward."""
    counts = None if pairs is None else (pairs.total, pairs.largest, pairs.are_lists)
    key = (call.rule, call.as_terms, call.moving, needs, call.queries.device, counts)
    programs: tuple[Program, Program] = program_of(_programs, key, tensors, lambda: (Program(), Program()))
    return programs
