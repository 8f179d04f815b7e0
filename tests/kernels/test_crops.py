"""The kernel that crops a batch, against the matrix products that say the same; on a GPU: tests/data."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

SIZES = [(23, 31), (40, 17), (16, 16)]


def test_crops_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_crops"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "compared 6 batches" in done.stdout


def _interpreted() -> None:
    from roadmap.data.batches.crops import CentreCrop, RandomCrop
    from roadmap.data.batches.resampling import batched_crops, resized_crops

    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in SIZES]
    flat = torch.from_numpy(np.concatenate([image.reshape(-1) for image in images]))
    heights, widths = np.asarray(SIZES).T
    starts = np.cumsum([0, *(image.size for image in images[:-1])])
    crops = (RandomCrop(12), RandomCrop(37, scale=(0.05, 0.2)), CentreCrop(9, 12), CentreCrop(65, 67))
    crops += (CentreCrop(9, 12, squeeze=True), RandomCrop(12, squeeze=True))
    for number, crop in enumerate(crops):
        if isinstance(crop, CentreCrop):
            windows = crop.windows(heights, widths)
        else:
            windows = crop.windows(heights, widths, crop.draws(len(images), 1, number))
            assert windows.flip.any()
            assert not windows.flip.all()
        fast = resized_crops(flat, starts, widths, windows, crop)
        slow = batched_crops(flat, starts, widths, windows, crop)
        assert fast.shape == slow.shape == (3, 3, crop.size, crop.size)
        assert (fast - slow).abs().max() < 1e-4  # of a standard deviation, 0.006 of a level
    assert len(resized_crops(flat, starts[:0], widths[:0], windows[:0], crop)) == 0
    print(f"compared {len(crops)} batches")


if __name__ == "__main__":
    _interpreted()
