"""The exact engine's two passes: groups, tiles, blocks, ties, and the certificate that nothing better was left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from roadmap.search.engines import exact
from roadmap.search.engines.exact import Gallery, Snapshot, exact_among
from roadmap.search.vectors import DamagedError, VectorFile

DIM = 24


def unit(count: int, seed: int = 0, levels: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, DIM))
    rows = np.round(rows * levels) / levels if levels else rows
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def check(scores: np.ndarray, slots: np.ndarray, rows: np.ndarray, queries: np.ndarray, allowed: np.ndarray) -> None:
    """Every answer is right, and none that is better by more than rounding was left out."""
    truth = queries.astype(np.float64) @ rows.astype(np.float64).T
    truth[:, ~allowed] = -np.inf
    k = slots.shape[1]
    found = min(k, int(allowed.sum()))
    assert (slots[:, found:] == -1).all()
    assert (scores[:, found:] == -np.inf).all()
    for row in range(len(queries)):
        mine = slots[row, :found]
        assert len(set(mine.tolist())) == found
        assert np.allclose(scores[row, :found], truth[row, mine], atol=1e-6)
        assert np.allclose(scores[row, :found], np.sort(truth[row])[::-1][:found], atol=1e-6)


@pytest.fixture(params=["cpu", "cpu in groups", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The processor as it searches, and as it would if it searched as a GPU does."""
    if request.param == "cpu in groups":
        monkeypatch.setattr(exact, "GROUPED", {"cpu", "cuda"})
    return torch.device(request.param.split()[0])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("k", [1, 10, 65, 600])
def test_the_best_are_found(count: int, k: int, half: bool, device: torch.device) -> None:
    rows, queries = unit(count), unit(7, seed=1)
    kept = torch.from_numpy(rows).to(device)
    snapshot = Snapshot(0, (kept.half() if half else kept,), np.ones(count, np.bool_), device)
    stored = snapshot.blocks[0].float().cpu().numpy()
    check(*snapshot.search(queries, k), stored, queries, snapshot.live)


@pytest.mark.parametrize("wide", [2.0**-18, 0.3, 3.0])
def test_tiles_blocks_removals_and_masks(wide: float, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, uneven blocks, and errors so large that more groups must be taken."""
    monkeypatch.setitem(exact.AT_ONCE, device.type, 1 << 9)
    monkeypatch.setitem(exact.GATHERED, device.type, 1 << 12)
    monkeypatch.setitem(exact.ERROR, device.type, wide)
    rows, queries = unit(3000, levels=2), unit(20, seed=1)
    blocks = tuple(torch.split(torch.from_numpy(rows).to(device), [1700, 1, 299, 1000]))
    live = np.random.default_rng(2).random(3000) < 0.9
    snapshot = Snapshot(0, blocks, live, device)
    check(*snapshot.search(queries, 10), rows, queries, live)
    mask = np.random.default_rng(3).random(3000) < 0.01
    check(*snapshot.search(queries, 40, mask), rows, queries, live & mask)


def test_the_first_pass_may_be_wrong_within_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores rounded as coarsely as the error allows mix up groups; the certificate sees it and takes more."""
    coarse = 2.0**-4
    monkeypatch.setattr(exact, "GROUPED", {"cpu"})
    monkeypatch.setitem(exact.ERROR, "cpu", coarse)
    plain = exact._group_max
    monkeypatch.setattr(exact, "_group_max", lambda s, size: plain((s / (2 * coarse)).round() * (2 * coarse), size))
    rows, queries = unit(30_000), unit(10, seed=1)
    snapshot = Snapshot(0, (torch.from_numpy(rows),), np.ones(30_000, np.bool_), torch.device("cpu"))
    check(*snapshot.search(queries, 10), rows, queries, snapshot.live)
    monkeypatch.setitem(exact.ERROR, "cpu", -1.0)  # without it, right ones are missed
    with pytest.raises(AssertionError):
        check(*snapshot.search(queries, 10), rows, queries, snapshot.live)


def test_equal_scores_come_in_the_order_of_slots(device: torch.device) -> None:
    rows = np.repeat(unit(1), 500, axis=0)
    snapshot = Snapshot(0, (torch.from_numpy(rows).to(device),), np.ones(500, np.bool_), device)
    for k in (1, 5, 17, 300):
        assert snapshot.search(rows[:1], k)[1].tolist() == [list(range(k))]


@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_a_gallery_grows_from_a_row_on(storage: str, tmp_path: Path, device: torch.device) -> None:
    rows, queries = unit(400), unit(5, seed=1)
    VectorFile.create(tmp_path / "v")
    file = VectorFile(tmp_path / "v", DIM, storage)
    gallery = Gallery(file, device, start=50)
    for start, stop in ((0, 100), (100, 110), (110, 111), (111, 400)):
        file.append(start, rows[start:stop])
        gallery.grow(stop)
        allowed = np.arange(stop) >= 50
        check(*gallery.search(queries, 9), file.tile(0, stop).astype(np.float32), queries, allowed)
    gallery.remove(np.array([3, 60, 61, 399]))
    allowed[[60, 61, 399]] = False
    check(*gallery.search(queries, 9), file.tile(0, 400).astype(np.float32), queries, allowed)
    few = np.flatnonzero(allowed)[::7]
    chosen = np.isin(np.arange(400), few)
    check(*exact_among(file, queries, 9, few), file.tile(0, 400).astype(np.float32), queries, chosen)
    assert np.array_equal(file.rows(few), file.tile(0, 400)[few].astype(np.float32))
    with pytest.raises(DamagedError, match="v is damaged: 400 rows, 401 expected"):
        file.tile(0, 401)
