"""A pack is a matter of time and disk: the pixels that reach the model are the same to the bit without one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

from roadmap.data.batches.crops import CentreCrop, RandomCrop
from roadmap.data.batches.decoding import Decoded
from roadmap.data.batches.delivery import Order, Resident, Streamed, Threaded
from roadmap.data.batches.loading import evaluation_batches, training_batches
from roadmap.data.batches.samplers import MPerClass
from roadmap.data.pictures.packing import pack
from roadmap.data.records import Records

CPU = torch.device("cpu")
SIDE = 32
CROPS = [CentreCrop(20, 24), CentreCrop(32, 32), CentreCrop(40, 48), RandomCrop(20), RandomCrop(48)]
CROPS += [CentreCrop(20, 24, squeeze=True), RandomCrop(20, squeeze=True)]


def noise(width: int, height: int, seed: int) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def written(root) -> dict[str, Image.Image]:
    """Pictures of every shape and kind, by their file's name."""
    turned = Image.Exif()
    turned[0x0112] = 6
    pictures = {
        "large.png": noise(100, 80, 0),
        "tall.png": noise(61, 93, 1),
        "small.png": noise(20, 17, 2),
        "tiny.png": noise(3, 2, 3),
        "of the side.png": noise(SIDE, SIDE, 4),
        "a pixel more.png": noise(33, 40, 5),
        "wide strip.png": noise(1500, 4, 6),
        "tall strip.png": noise(40, 900, 7),
        "grey.png": noise(70, 50, 8).convert("L"),
        "palette.png": noise(70, 50, 9).quantize(16),
        "see through.png": noise(70, 50, 10).convert("RGBA"),
        "sixteen bits.png": Image.fromarray(np.arange(60 * 50, dtype=np.uint16).reshape(60, 50) * 20),
        "photograph.jpg": noise(300, 200, 11),
        "cmyk.jpg": noise(70, 50, 12).convert("CMYK"),
        "turned.jpg": noise(90, 50, 13),
        "boxed.png": noise(120, 100, 14),
    }
    root.mkdir(parents=True)
    for name, image in pictures.items():
        image.save(root / name, **({"exif": turned} if name == "turned.jpg" else {}))
    return pictures


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds") / "pictures"
    names = tuple(written(root))
    boxes = np.full((len(names), 4), np.nan)
    boxes[names.index("boxed.png")] = [10, 5, 95, 70]
    return dataclasses.replace(
        Records("kinds", root, names, np.arange(len(names)) // 2, tuple("abcdefgh")), boxes=boxes, crop=True
    )


@pytest.fixture(scope="module")
def packed(records, tmp_path_factory):
    return pack(records, SIDE, tmp_path_factory.mktemp("pack"), workers=0, progress=False)


def orders(records, crop):
    draws = crop.draws(len(records), 7, 0) if isinstance(crop, RandomCrop) else None
    return [Order(0, np.arange(len(records))[::-1].copy(), draws), Order(1, np.asarray([3, 3, 0]), _rows(draws, 3))]


def _rows(draws, count):
    return None if draws is None else draws[:count]


def delivered(source, records, crop):
    return list(source(iter(orders(records, crop))))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("crop", CROPS, ids=str)
def test_on_the_cpu(crop, workers, records, packed):
    from_files = delivered(Decoded(records, crop, CPU, workers, SIDE), records, crop)
    from_pack = delivered(Threaded(packed, crop, threads=2), records, crop)
    for ours, theirs in zip(from_files, from_pack, strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert ours.indices.tolist() == theirs.indices.tolist()


@pytest.mark.parametrize("way", [Resident, Streamed])
@pytest.mark.parametrize("crop", CROPS, ids=str)
def test_where_the_device_resamples(crop, way, records, packed):
    """On a GPU crops are not rounded to levels before they are normalised; neither may they be without a pack."""
    from_files = delivered(Decoded(records, crop, CPU, 0, SIDE, on_device=True), records, crop)
    from_pack = delivered(way(packed, crop, CPU), records, crop)
    for ours, theirs in zip(from_files, from_pack, strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert (ours.images[0] * 255 % 1 != 0).any()


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["resident", "streamed"])
@pytest.mark.parametrize("crop", CROPS, ids=str)
def test_on_a_gpu(crop, place, records, packed):
    for pictures in (None, packed):
        if isinstance(crop, CentreCrop):
            batches = evaluation_batches(records, crop, 5, pictures, "cuda", workers=2, place=place, side=SIDE)
        else:
            sampler = MPerClass(records.labels, 8, 2)
            batches = training_batches(records, sampler, crop, pictures, "cuda", workers=2, place=place, side=SIDE)
        images = torch.cat([batch.images for batch in batches])
        if pictures is None:
            from_files = images
    assert torch.equal(from_files, images)


@pytest.mark.parametrize("workers", [0, 2])
def test_whole_batches_as_users_ask_for_them(workers, records, packed):
    found = {}
    for name, pictures in (("files", None), ("pack", packed)):
        sampler = MPerClass(records.labels, 8, 2)
        training = training_batches(records, sampler, RandomCrop(24), pictures, workers=workers, side=SIDE)
        testing = evaluation_batches(records, CentreCrop(24, 28), 5, pictures, workers=workers, side=SIDE)
        found[name] = [*training, *testing]
    assert len(found["files"]) == 2 + 4
    for ours, theirs in zip(found["files"], found["pack"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_side_makes_a_difference(records):
    """So the tests above would see it if files were not resized first."""
    small, large = (
        torch.cat([b.images for b in evaluation_batches(records, CentreCrop(20, 24), workers=0, side=side)])
        for side in (SIDE, 2 * SIDE)
    )
    changed = [name for name, a, b in zip(records.paths, small, large, strict=True) if not torch.equal(a, b)]
    assert "large.png" in changed
    assert "small.png" not in changed


def test_unless_told_pictures_are_as_large_as_the_crop_needs(records, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "roadmap.data.batches.loading.Decoded", lambda records, crop, device, workers, side: asked.append(side)
    )
    for crop in (CentreCrop(224, 256), CentreCrop(448, 512)):
        evaluation_batches(records, crop)
    training_batches(records, MPerClass(records.labels, 8, 2), RandomCrop(448))
    evaluation_batches(records, CentreCrop(448, 512), side=300)
    assert asked == [256, 512, 448, 300]


def test_a_pack_of_another_side_is_refused(records, packed):
    with pytest.raises(ValueError, match="the pack is of side 32, but pictures of side 256 are wanted"):
        evaluation_batches(records, CentreCrop(20, 24), pictures=packed, side=256)


def test_a_thin_strip_is_not_resized_whole(tmp_path):
    """2 x 20,000 pixels resized to 256 x 2,560,000 would be 2 GiB. What the output does not see is not computed."""
    import tracemalloc

    noise(20_000, 2, 0).save(tmp_path / "strip.png")
    strip = Records("strip", tmp_path, ("strip.png",), np.zeros(1, np.int64))
    torch_peak = torch.profiler.profile(profile_memory=True, acc_events=True)
    tracemalloc.start()
    with torch_peak:
        (batch,) = evaluation_batches(strip, CentreCrop(224, 256), workers=0)
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()
    largest = max(event.cpu_memory_usage for event in torch_peak.events())
    assert largest < 2**26
    # the middle of the strip, enlarged 128 times, is hardly more than two columns of pixels
    middle = np.asarray(Image.open(tmp_path / "strip.png"))[:, 9_999:10_001]
    levels = batch.images[0, :, 112, 112] * torch.tensor((0.229, 0.224, 0.225)) + torch.tensor((0.485, 0.456, 0.406))
    assert middle.min() - 1 <= float(255 * levels.min()) <= float(255 * levels.max()) <= middle.max() + 1


def test_a_long_picture_is_resampled_as_torchvision_would(records, monkeypatch):
    from roadmap.data.batches import resampling

    image = np.asarray(noise(700, 9, 3))
    windows = CentreCrop(20, 24).windows(np.asarray([9]), np.asarray([700]))
    monkeypatch.setattr(resampling, "_LONG", 10**9)
    theirs = resampling.cpu_crop(image, windows, 0, 20)
    monkeypatch.setattr(resampling, "_LONG", 1)
    ours = resampling.cpu_crop(image, windows, 0, 20)
    assert ours.dtype == theirs.dtype == torch.uint8
    assert (ours.int() - theirs.int()).abs().max() <= 1
