"""The contract goes on: what a loss may be given, of any type, length, layout and number, and still be itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .test_contract import CONTRACTS, DIMENSIONS, EVERY_LOSS, GALLERY_LABELS, LABELS, called, made, vectors

WITH_GALLERY = pytest.mark.parametrize("name", [name for name, c in CONTRACTS.items() if not c.no_gallery])
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
PAIRS = [
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.bfloat16),
]


def moved(name: str, x: Tensor, labels: Tensor = LABELS, **gallery: Tensor) -> list[Tensor]:
    """The value, and the gradient at whatever asks for one."""
    value = called(made(name), x, labels, **gallery)
    value.backward()
    leaves = [leaf for leaf in (x, *gallery.values()) if leaf.requires_grad]
    assert all(leaf.grad is not None and leaf.grad.dtype == leaf.dtype for leaf in leaves)
    return [value.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def check_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    """Rounding apart."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@EVERY_LOSS
def test_labels_are_integers_of_any_type(name: str) -> None:
    expected = moved(name, vectors(9, 0))
    for dtype in INTEGERS:
        found = moved(name, vectors(9, 0), LABELS.to(dtype))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), dtype


@WITH_GALLERY
def test_labels_of_the_gallery_may_be_of_another_type(name: str) -> None:
    plain = called(made(name), vectors(9, 0), LABELS, ref_emb=vectors(7, 1), ref_labels=GALLERY_LABELS)
    for here, there in ((torch.int64, torch.int32), (torch.uint8, torch.int64), (torch.int16, torch.uint32)):
        others = {"ref_emb": vectors(7, 1), "ref_labels": GALLERY_LABELS.to(there)}
        assert called(made(name), vectors(9, 0), LABELS.to(here), **others).item() == plain.item()


@EVERY_LOSS
def test_layout_in_memory_does_not_matter(name: str) -> None:
    across = vectors(9, 0).detach().T.contiguous().T.requires_grad_()
    spaced = torch.stack([LABELS, -LABELS], dim=1).flatten()[::2]
    assert not across.is_contiguous()
    assert not spaced.is_contiguous()
    check_alike(moved(name, across, spaced), moved(name, vectors(9, 0)))


@EVERY_LOSS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_widened_without_autocast_too(name: str, dtype: torch.dtype) -> None:
    half = vectors(9, 0, dtype).detach().requires_grad_()
    wide = half.detach().float().requires_grad_()
    found, expected = moved(name, half), moved(name, wide)
    assert found[0].dtype == torch.float32
    assert found[0].item() == expected[0].item()
    torch.testing.assert_close(found[1], expected[1].to(dtype), rtol=2e-2, atol=1e-3)


@WITH_GALLERY
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_a_gallery_of_another_type_meets_the_queries_in_the_wider_one(
    name: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    here, there = dtypes
    wider = torch.promote_types(torch.promote_types(here, there), torch.float32)
    x, gallery = (vectors(9, 0, here).detach(), vectors(7, 1, there).detach())
    found, expected = (
        moved(name, q.requires_grad_(), ref_emb=g.requires_grad_(), ref_labels=GALLERY_LABELS)
        for q, g in ((x.clone(), gallery.clone()), (x.to(wider, copy=True), gallery.to(wider, copy=True)))
    )
    assert found[0].dtype == expected[0].dtype == wider
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)


@WITH_GALLERY
@pytest.mark.parametrize("still", ["queries", "gallery"])
def test_one_side_may_stand_still(name: str, still: str) -> None:
    """The other has the gradient that it has when both move."""
    x, gallery = vectors(9, 0), vectors(7, 1)
    both = moved(name, vectors(9, 0), ref_emb=vectors(7, 1), ref_labels=GALLERY_LABELS)
    (x if still == "queries" else gallery).requires_grad_(False)
    found = moved(name, x, ref_emb=gallery, ref_labels=GALLERY_LABELS)
    check_alike(found, [both[0], both[2 if still == "queries" else 1]])


@EVERY_LOSS
@pytest.mark.parametrize("rows", [[0] * 9, [0, 0, 1, 1, 2, 2, 3, 3, 0]], ids=["all one picture", "pairs of copies"])
def test_copies_have_finite_gradients(name: str, rows: list[int]) -> None:
    for labels in (LABELS, torch.zeros_like(LABELS), torch.arange(9) % 5):
        x = vectors(9, 0).detach()[rows].requires_grad_()
        assert all(part.isfinite().all() for part in moved(name, x, labels))


@WITH_GALLERY
def test_a_side_may_be_empty(name: str) -> None:
    nothing, nobody = torch.zeros(0, DIMENSIONS), LABELS[:0]
    alone = moved(name, nothing.clone().requires_grad_(), nobody, ref_emb=vectors(7, 1), ref_labels=GALLERY_LABELS)
    among_none = moved(name, vectors(9, 0), ref_emb=nothing.clone().requires_grad_(), ref_labels=nobody)
    assert alone[0].item() == 0
    assert all(not part.any() for part in alone[1:])
    assert all(part.isfinite().all() for part in among_none)


@EVERY_LOSS
def test_what_has_no_direction_or_no_label_is_refused(name: str) -> None:
    broken = vectors(9, 0).detach()
    broken[4, 2] = torch.nan
    with pytest.raises(ValueError, match=r"embeddings\[4\] holds NaN or infinity"):
        called(made(name), broken, LABELS)
    with pytest.raises(ValueError, match="labels is on meta but embeddings is on cpu"):
        called(made(name), vectors(9, 0), LABELS.to("meta"))
    with pytest.raises(TypeError, match="labels must hold integers"):
        called(made(name), vectors(9, 0), LABELS.float())
