"""What each process brings to a batch that several share, in integers, and what all must have alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Part:
    """What a process brings, in integers: a type is its place in `DTYPES`, a length -1 where there is no tensor."""

    broken: int = 0
    rows: int = 0
    width: int = 0
    dtype: int = 0
    moves: int = 0
    gallery_rows: int = -1
    gallery_width: int = -1
    gallery_dtype: int = 0
    gallery_moves: int = 0
    pairs: int = -1
    more_pairs: int = -1
    tensors: int = 0
    follows: int = 0
    by_rows: int = 0
    averages: int = 0
    named: int = 0
    columns: int = 0
    sets: int = 0

    @classmethod
    def of(
        cls,
        x: Tensor,
        labels: Tensor,
        gallery: Tensor | None,
        pairs: Sequence[Tensor] | None,
        ids: Tensor | None,
        by_rows: bool,
        averages: bool,
    ) -> Part:
        follows = torch.is_grad_enabled()
        said = {"rows": x.shape[0], "width": x.shape[1], "dtype": DTYPES.index(x.dtype)}
        said["moves"] = int(follows and x.requires_grad)
        if gallery is not None:
            said |= {"gallery_rows": gallery.shape[0], "gallery_width": gallery.shape[1]}
            said |= {
                "gallery_dtype": DTYPES.index(gallery.dtype),
                "gallery_moves": int(follows and gallery.requires_grad),
            }
        if pairs is not None:
            said |= {"tensors": len(pairs), "pairs": len(pairs[0]), "more_pairs": len(pairs[2])}
        said |= {"follows": int(follows), "by_rows": int(by_rows), "averages": int(averages)}
        said |= {"named": int(ids is not None), "sets": int(labels.dtype == torch.bool)}
        said |= {"columns": 0 if labels.ndim == 1 else labels.shape[1]}
        return cls(**said)

    @property
    def of_gallery(self) -> Part:
        """The gallery, as if it were the batch."""
        return Part(
            rows=self.gallery_rows, width=self.gallery_width, dtype=self.gallery_dtype, moves=self.gallery_moves
        )


_MUST_AGREE = {
    "width": "embeddings of {} dimensions; all must come from the same model",
    "gallery_width": "a gallery of {} dimensions (-1: none); all must pass one, from the same model, or none",
    "tensors": "an indices_tuple of {} tensors (0: none); all must pass one of the same kind, or none",
    "follows": "gradients recorded: {} (1: yes, 0: within torch.no_grad()); those who go backward would wait",
    "by_rows": "a loss that splits by rows: {} (1: yes); all must have the same loss",
    "named": "ids of its pictures: {} (1: yes); all must bring them, or none",
    "columns": "labels of {} columns (0: one number for each item); all must have the same",
    "sets": "sets of labels: {} (1: bool, 0: integers); all must have the same",
    "averages": "gradients='mean': {} (1: yes); all must have the same",
}


def check_parts(parts: Sequence[Part]) -> None:
    broken = [rank for rank, part in enumerate(parts) if part.broken]
    if broken:
        raise RuntimeError(f"process {broken[0]} could not bring its part of the batch; its own message says why")
    for name, words in _MUST_AGREE.items():
        values = [getattr(part, name) for part in parts]
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ValueError(f"process 0 brings {words.format(values[0])}. Process {rank} brings {value}")


def moving(x: Tensor, parts: Sequence[Part]) -> Tensor:
    """`x`, with a gradient where any part has one: all go backward, or those who do would wait for ever."""
    return x if x.requires_grad or not any(part.moves for part in parts) else x.detach().requires_grad_()


def widest(codes: Sequence[int]) -> torch.dtype:
    found = DTYPES[codes[0]]
    for code in codes:
        found = torch.promote_types(found, DTYPES[code])
    return found
