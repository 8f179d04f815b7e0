"""Whole-batch crops against torchvision: pixel for pixel for given boxes, and in distribution for drawn ones."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as tv

from roadmap.data.batches.crops import CentreCrop, RandomCrop, Windows
from roadmap.data.batches.resampling import (
    batched_crops,
    cpu_crop,
    network_input,
    resized_crops,
    resized_picture,
)

SIZES = [(60, 80), (91, 60), (33, 33), (20, 150), (7, 5)]


def pictures(seed=0):
    """Pictures of different sizes, flat as in a pack, and where each starts."""
    random = np.random.default_rng(seed)
    images = [random.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in SIZES]
    heights, widths = np.asarray(SIZES).T
    sizes = heights * widths * 3
    return images, np.concatenate([i.ravel() for i in images]), np.cumsum(sizes) - sizes, heights, widths


def levels(images: torch.Tensor, crop) -> torch.Tensor:
    """Undoes the normalisation, to 0..255."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (crop.mean, crop.std))
    return (images.cpu() * std + mean) * 255


def torchvision_crop(image, windows: Windows, place: int, size: int) -> torch.Tensor:
    top, height = windows.rows[place, :2].tolist()
    left, width = windows.columns[place, :2].tolist()
    chw = torch.from_numpy(image).permute(2, 0, 1).float()
    cut = tv.resized_crop(chw, top, left, height, width, [size, size], antialias=True)
    return tv.horizontal_flip(cut) if windows.flip[place] else cut


CROPPERS = {"matrices": batched_crops, "kernel": resized_crops}


def compared(crop: RandomCrop | CentreCrop, position: int, device: str, cropper: str) -> float:
    images, flat, starts, heights, widths = pictures(position)
    if isinstance(crop, CentreCrop):
        windows = crop.windows(heights, widths)
        theirs = torch.stack([torchvision_centre(im, crop) for im in images])
    else:
        windows = crop.windows(heights, widths, crop.draws(len(images), 3, position))
        theirs = torch.stack([torchvision_crop(im, windows, i, crop.size) for i, im in enumerate(images)])
    images_out = CROPPERS[cropper](torch.from_numpy(flat).to(device), starts, widths, windows, crop)
    assert images_out.shape == theirs.shape
    return float((levels(images_out, crop).cpu() - theirs).abs().max())


def torchvision_centre(image, crop: CentreCrop) -> torch.Tensor:
    chw = torch.from_numpy(image).permute(2, 0, 1).float()
    resized = [crop.resize, crop.resize] if crop.squeeze else [crop.resize]
    return tv.center_crop(tv.resize(chw, resized, antialias=True), [crop.size, crop.size])


SQUEEZED = [CentreCrop(20, 20, squeeze=True), CentreCrop(37, 64, squeeze=True), RandomCrop(37, squeeze=True)]


@pytest.mark.parametrize(
    "crop", [*map(RandomCrop, (1, 16, 37, 64)), CentreCrop(20, 20), CentreCrop(37, 64), *SQUEEZED], ids=str
)
@pytest.mark.parametrize("position", range(4))
def test_given_boxes_are_resampled_as_torchvision_does(crop, position):
    assert compared(crop, position, "cpu", "matrices") < 0.01  # of 255 levels


@pytest.mark.gpu
@pytest.mark.parametrize("cropper", CROPPERS)
@pytest.mark.parametrize("crop", [*map(RandomCrop, (1, 16, 64, 224)), CentreCrop(224, 256), *SQUEEZED], ids=str)
@pytest.mark.parametrize("position", range(4))
def test_on_the_gpu_as_torchvision_does(crop, position, cropper):
    assert compared(crop, position, "cuda", cropper) < 0.01


def test_the_cpu_path_is_within_a_level_of_the_batched_one():
    crop = RandomCrop(24)
    images, flat, starts, heights, widths = pictures()
    windows = crop.windows(heights, widths, crop.draws(len(images), 0, 0))
    batched = levels(resized_crops(torch.from_numpy(flat), starts, widths, windows, crop), crop)
    single = torch.stack([cpu_crop(image, windows, i, 24) for i, image in enumerate(images)])
    assert single.dtype == torch.uint8
    assert (batched - single.float()).abs().max() < 1.01


def test_the_precision_of_a_model_does_not_reach_the_crops():
    """Chunks of a batch are cut while it embeds, under its autocast."""
    crop = RandomCrop(24)
    images, flat, starts, heights, widths = pictures()
    windows = crop.windows(heights, widths, crop.draws(len(images), 0, 0))
    given = torch.from_numpy(flat), starts, widths, windows, crop
    with torch.autocast("cpu", torch.bfloat16):
        found = batched_crops(*given)
    assert torch.equal(found, batched_crops(*given))


@pytest.mark.parametrize("squeeze", [False, True])
@pytest.mark.parametrize(("size", "resize"), [(24, 32), (32, 32), (20, 23)])
def test_centre_crops_are_resize_then_centercrop(size, resize, squeeze):
    """Squeezed: SOP's released code, which resizes to a square and loses the aspect."""
    crop = CentreCrop(size, resize, squeeze=squeeze)
    resized = [resize, resize] if squeeze else [resize]
    images, flat, starts, heights, widths = pictures()
    windows = crop.windows(heights, widths)
    batched = levels(resized_crops(torch.from_numpy(flat), starts, widths, windows, crop), crop)
    for i, image in enumerate(images):
        chw = torch.from_numpy(image).permute(2, 0, 1)
        theirs = tv.center_crop(tv.resize(chw.float(), resized, antialias=True), [size, size])
        assert (batched[i] - theirs).abs().max() < 0.01
        theirs = tv.center_crop(tv.resize(chw, resized, antialias=True), [size, size])
        assert torch.equal(cpu_crop(image, windows, i, size), theirs)


def test_a_batch_in_chunks_is_the_same_batch(monkeypatch):
    crop = RandomCrop(16)
    _, flat, starts, heights, widths = pictures()
    windows = crop.windows(heights, widths, crop.draws(5, 0, 0))
    whole = resized_crops(torch.from_numpy(flat), starts, widths, windows, crop)
    monkeypatch.setattr("roadmap.data.batches.resampling._CHUNK_BYTES", 1)
    parts = resized_crops(torch.from_numpy(flat), starts, widths, windows, crop)
    torch.testing.assert_close(whole, parts, atol=1e-5, rtol=0)


def test_nothing_outside_the_box_is_seen():
    """Antialiasing must not smear in what surrounds the crop."""
    image = np.full((40, 40, 3), 255, np.uint8)
    image[10:30, 5:25] = 50
    box = np.asarray([[10, 20, 7, 0]]), np.asarray([[5, 20, 7, 0]])
    windows = Windows(*box, np.asarray([False]))
    crop = RandomCrop(7)
    flat = torch.from_numpy(image.ravel())
    out = levels(resized_crops(flat, np.zeros(1, int), np.asarray([40]), windows, crop), crop)
    torch.testing.assert_close(out, torch.full((1, 3, 7, 7), 50.0), atol=1e-3, rtol=0)


def test_normalisation_by_hand():
    crop = CentreCrop(2, 2, mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 1.0))
    out = network_input(torch.full((1, 3, 2, 2), 255, dtype=torch.uint8), crop)
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([1.0, 3.0, 1.0]))
    assert out.dtype == torch.float32


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**6))
def test_windows_lie_inside_the_picture_and_obey_scale_and_ratio(height, width, position):
    crop = RandomCrop()
    heights, widths = np.full(8, height), np.full(8, width)
    windows = crop.windows(heights, widths, crop.draws(8, 1, position))
    top, tall, resized, offset = windows.rows.T
    left, wide, _, _ = windows.columns.T
    assert (resized == 224).all()
    assert (offset == 0).all()
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (tall >= 1).all()
    assert (wide >= 1).all()
    assert (top + tall <= height).all()
    assert (left + wide <= width).all()
    if min(height, width) > 100:  # where rounding to whole pixels is small
        assert (wide / tall > 0.73).all()
        assert (wide / tall < 1.37).all()


def drawn_by_torchvision(height: int, width: int, count: int) -> np.ndarray:
    image = torch.empty(3, height, width)
    draws = [RandomResizedCrop.get_params(image, [0.16, 1.0], [3 / 4, 4 / 3]) for _ in range(count)]
    return np.asarray(draws, dtype=np.float64)


def drawn_by_us(height: int, width: int, count: int) -> np.ndarray:
    crop = RandomCrop()
    windows = crop.windows(np.full(count, height), np.full(count, width), crop.draws(count, 0, 0))
    return np.stack([windows.rows[:, 0], windows.columns[:, 0], windows.rows[:, 1], windows.columns[:, 1]], 1) * 1.0


def kolmogorov(a: np.ndarray, b: np.ndarray) -> float:
    """Largest gap between two empirical distributions."""
    points = np.concatenate([a, b])
    below = [np.searchsorted(np.sort(drawn), points, "right") / len(drawn) for drawn in (a, b)]
    return float(np.abs(below[0] - below[1]).max())


@pytest.mark.parametrize(("height", "width"), [(256, 341), (256, 256), (500, 256), (64, 400), (9, 10)])
def test_the_distribution_is_torchvisions(height, width):
    """Top, left, height, width, area and ratio; 64 x 400 takes the fallback more often than not; in
    9 x 10 a single pixel is seen."""
    count = 4_000
    theirs, ours = drawn_by_torchvision(height, width, count), drawn_by_us(height, width, count)
    views = [lambda d, i=i: d[:, i] for i in range(4)]
    views += [lambda d: d[:, 2] * d[:, 3], lambda d: d[:, 3] / d[:, 2], lambda d: d[:, 0] + d[:, 2] / 2]
    limit = 2.2 * math.sqrt(2 / count)  # a false alarm in about 10,000 for each
    for view in views:
        assert kolmogorov(view(theirs), view(ours)) < limit


@pytest.mark.parametrize(("height", "width"), [(500, 100), (60, 400), (256, 256)])
def test_squeezed_crops_are_distributed_as_in_a_square(height, width):
    """Resize((256, 256)) then RandomResizedCrop: which part of the picture is seen, in shares of its sides."""
    count = 4_000
    theirs = drawn_by_torchvision(256, 256, count) / 256
    crop = RandomCrop(squeeze=True)
    windows = crop.windows(np.full(count, height), np.full(count, width), crop.draws(count, 0, 0))
    rows, columns = windows.rows / height, windows.columns / width
    ours = np.stack([rows[:, 0], columns[:, 0], rows[:, 1], columns[:, 1]], 1)
    limit = 2.2 * math.sqrt(2 / count) + 1 / 60  # whole pixels of our picture and of their square
    for view in (lambda d: d[:, 2], lambda d: d[:, 3], lambda d: d[:, 0] + d[:, 2] / 2, lambda d: d[:, 2] * d[:, 3]):
        assert kolmogorov(view(theirs), view(ours)) < limit
    plain = dataclasses.replace(crop, squeeze=False)
    boxes = plain.windows(np.full(count, height), np.full(count, width), crop.draws(count, 0, 0))
    assert (kolmogorov(boxes.rows[:, 1] / height, rows[:, 1]) > 0.2) == (height != width)  # it makes a difference


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**6))
def test_squeezed_windows_lie_inside_the_picture(height, width, position):
    crop = RandomCrop(squeeze=True)
    windows = crop.windows(np.full(8, height), np.full(8, width), crop.draws(8, 1, position))
    for axis, length in ((windows.rows, height), (windows.columns, width)):
        assert (axis[:, 0] >= 0).all()
        assert (axis[:, 1] >= 1).all()
        assert (axis[:, 0] + axis[:, 1] <= length).all()


def test_the_whole_of_a_squeezed_picture_is_the_whole_picture():
    crop = RandomCrop(scale=(1.0, 1.0), ratio=(1.0, 1.0), squeeze=True)
    windows = crop.windows(np.asarray([7, 300]), np.asarray([500, 20]), crop.draws(2, 0, 0))
    assert windows.rows[:, :2].tolist() == [[0, 7], [0, 300]]
    assert windows.columns[:, :2].tolist() == [[0, 500], [0, 20]]


def test_the_fallback_is_torchvisions():
    crop = RandomCrop(scale=(0.99, 1.0), ratio=(1.0, 1.0))  # never fits a long picture
    heights, widths = np.asarray([50, 200, 60]), np.asarray([200, 50, 60])
    windows = crop.windows(heights, widths, crop.draws(3, 0, 0))
    for i in range(2):
        image = torch.empty(3, heights[i], widths[i])
        top, left, tall, wide = RandomResizedCrop.get_params(image, [0.99, 1.0], [1.0, 1.0])
        assert windows.rows[i, :2].tolist() == [top, tall]
        assert windows.columns[i, :2].tolist() == [left, wide]


@pytest.mark.parametrize("ratio", [(0.1, 0.2), (5, 9)])
def test_of_a_strip_across_the_ratio_a_pixel_is_left(ratio):
    lengths = np.asarray([1, 1, 2, 50, 1]), np.asarray([1, 50, 1, 1, 2])
    crop = RandomCrop(16, scale=(0.9, 1.0), ratio=ratio)
    windows = crop.windows(*lengths, crop.draws(5, 0, 0))
    for axis, length in zip((windows.rows, windows.columns), lengths, strict=True):
        start, taken = axis[:, :2].T
        assert (taken >= 1).all()
        assert (start >= 0).all()
        assert (start + taken <= length).all()


def test_flips_come_as_often_as_asked():
    for flip in (0.0, 0.25, 1.0):
        crop = RandomCrop(flip=flip)
        windows = crop.windows(np.full(4000, 30), np.full(4000, 30), crop.draws(4000, 0, 0))
        assert abs(windows.flip.mean() - flip) < 0.03


def test_draws_depend_on_seed_and_position_alone():
    crop = RandomCrop()
    np.testing.assert_array_equal(crop.draws(4, 1, 2), crop.draws(4, 1, 2))
    assert len({crop.draws(1, seed, position)[0, 0] for seed in range(5) for position in range(5)}) == 25
    assert crop.draws(1, 333, 7)[0, :2].tolist() == [0.3985765166678914, 0.5994582471983622]  # on every machine


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RandomCrop(scale=(0, 1)), r"scale must satisfy 0 < low <= high <= 1, got \(0, 1\)"),
        (lambda: RandomCrop(ratio=(2, 1)), r"ratio must satisfy 0 < low <= high, got \(2, 1\)"),
        (lambda: RandomCrop(flip=2), r"flip in \[0, 1\], got 224 and 2"),
        (lambda: CentreCrop(256, 224), "resize must be at least size, got resize 224 and size 256"),
    ],
)
def test_what_is_refused_says_why(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("capability", [None, "DEFAULT"])
@pytest.mark.parametrize("sizes", [(40, 30, 24, 24), (7, 5, 64, 61), (256, 300, 256, 40), (1, 1, 3, 3)])
def test_a_picture_is_resized_to_the_bit_as_torchvision_does(sizes, capability, monkeypatch):
    """By bytes where the CPU has fast instructions for it, by floats elsewhere."""
    if capability is not None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    height, width, *wanted = sizes
    image = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8).permute(2, 0, 1)
    assert torch.equal(resized_picture(image, *wanted), tv.resize(image, wanted, antialias=True))
