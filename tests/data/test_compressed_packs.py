"""Compressed packs: files that are small enough come back to the bit, others near; damage is named, never shown."""

from __future__ import annotations

import dataclasses
import io
import pickle
import zlib
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from roadmap.data.batches.crops import CentreCrop, RandomCrop
from roadmap.data.batches.decoding import Decoded
from roadmap.data.batches.delivery import Order, Resident, Streamed, Threaded
from roadmap.data.batches.loading import training_batches
from roadmap.data.batches.samplers import MPerClass
from roadmap.data.pictures.compression import compressed_picture
from roadmap.data.pictures.contents import CHECKSUM, HEIGHT, LENGTH, OFFSET, PackError
from roadmap.data.pictures.images import PictureError, small_picture
from roadmap.data.pictures.packing import pack
from roadmap.data.pictures.packs import Pack
from roadmap.data.pictures.policy import fresh_pack, pack_for
from roadmap.data.records import Records

from .forging import forged_index

CPU = torch.device("cpu")
SIDE = 48
SMALL = ("small.jpg", "small.webp", "small.png", "turned.jpg", "grey.jpg", "see through.png", "cmyk.jpg")
AGAIN = ("large.jpg", "boxed.jpg", "noise.png", "picture.bmp")


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth, as photographs are; noise would not compress."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(9).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("roadmap.data.pictures.packing.SHARD", 5)
    root = tmp_path / "pictures"
    root.mkdir()
    turned = Image.Exif()
    turned[0x0112] = 6
    for name in ("large.jpg", "boxed.jpg"):
        photograph(120, 90).save(root / name)
    photograph(60, 40, 1).save(root / "small.jpg", quality=80)
    photograph(60, 40, 2).save(root / "small.webp", quality=80)
    photograph(64, 48, 3).quantize(8).save(root / "small.png")
    photograph(70, 40, 4).save(root / "turned.jpg", exif=turned)
    photograph(70, 40, 5).convert("L").save(root / "grey.jpg")
    see_through = photograph(48, 48, 6).quantize(4).convert("RGBA")
    see_through.putalpha(Image.new("L", (48, 48), 99))
    see_through.save(root / "see through.png")
    photograph(70, 40, 7).convert("CMYK").save(root / "cmyk.jpg")
    noise(48, 40).save(root / "noise.png")  # as a file it is no smaller than its pixels
    photograph(48, 40).save(root / "picture.bmp")
    names = SMALL + AGAIN
    boxes = np.full((len(names), 4), np.nan)
    boxes[names.index("boxed.jpg")] = [10, 5, 50, 45]
    classes = np.arange(len(names)) // 2
    return dataclasses.replace(Records("kinds", root, names, classes), boxes=boxes, crop=True)


def compressed(records, **more) -> Pack:
    return pack(records, SIDE, workers=0, progress=False, compressed=True, **more)


def plain(records, i: int) -> np.ndarray:
    return np.asarray(small_picture(records.path(i), records.box(i), SIDE))


def test_small_files_come_back_to_the_bit_and_others_near(records):
    made = compressed(records)
    for i, name in enumerate(records.paths):
        found, expected = made.picture(i), plain(records, i)
        assert found.shape == expected.shape == (made.heights[i], made.widths[i], 3)
        if name in SMALL:
            np.testing.assert_array_equal(found, expected)
        else:
            error = np.abs(found.astype(int) - expected).mean()
            assert 0 < error < (4.0 if name == "noise.png" else 1.5)
    assert made.again == len(AGAIN)
    assert made.lossy == "4 pictures encoded again as JPEG of quality 95"
    assert made.origin == f"compressed pack of side {SIDE} ({made.lossy}), {made.folder}"


def test_what_is_encoded_again_is_the_picture_of_a_pack_as_jpeg(records):
    """Literally: the pixels of the other pack, through Pillow's encoder and decoder once."""
    made, decoded = compressed(records), pack(records, SIDE, workers=0, progress=False)
    for name in AGAIN:
        i = records.paths.index(name)
        file = io.BytesIO()
        Image.fromarray(decoded.picture(i)).save(file, "JPEG", quality=95, subsampling=0)
        np.testing.assert_array_equal(made.picture(i), np.asarray(Image.open(file)))


@settings(max_examples=30, deadline=None)
@given(
    width=st.integers(1, 90),
    height=st.integers(1, 90),
    seed=st.integers(0, 99),
    kind=st.sampled_from(["jpg", "png", "webp"]),
    side=st.integers(1, 100),
)
def test_any_picture_keeps_its_shape_and_its_pixels_where_nothing_is_done_to_it(
    width, height, seed, kind, side, tmp_path_factory
):
    path = tmp_path_factory.mktemp("any") / f"picture.{kind}"
    photograph(width, height, seed).save(path)
    raw, size, again = compressed_picture(path, None, side)
    expected = np.asarray(small_picture(path, None, side))
    found = np.asarray(Image.open(io.BytesIO(raw)).convert("RGB"))
    assert found.shape[:2] == size == expected.shape[:2]
    if not again:
        assert raw == path.read_bytes()
        np.testing.assert_array_equal(found, expected)
    assert again or min(width, height) <= side


@pytest.mark.parametrize("kind", ["gif", "mpo"])
def test_a_small_file_of_a_kind_that_packs_do_not_hold_is_encoded_again(kind, tmp_path):
    """An MPO is what some phones write under the name of a JPEG: two pictures in one file."""
    first, second = (photograph(60, 40, seed).quantize(8).convert("RGB") for seed in range(2))
    first.save(tmp_path / f"a.{kind}", save_all=True, append_images=[second])
    one = Records("kinds", tmp_path, (f"a.{kind}",), [0])
    assert one.path(0).stat().st_size * 2 <= 60 * 40 * 3
    made = compressed(one, folder=tmp_path / "pack")
    assert made.again == 1
    assert np.abs(made.picture(0).astype(int) - plain(one, 0)).mean() < 4


@pytest.mark.parametrize(("width", "lossy"), [(65_500, True), (65_501, False)])
def test_a_strip_longer_than_jpeg_knows_is_kept_to_the_bit(width, lossy, tmp_path):
    noise(width, 2).save(tmp_path / "strip.png")
    made = compressed(Records("strips", tmp_path, ("strip.png",), [0]), folder=tmp_path / "pack")
    assert (made.picture(0).shape, bool(made.lossy)) == ((2, width, 3), lossy)
    assert np.array_equal(made.picture(0), np.asarray(noise(width, 2))) is not lossy


@pytest.mark.parametrize("kind", [False, True])
def test_every_file_is_read_once(kind, records, monkeypatch):
    """So that what is kept is what was decoded, and a slow disk is asked once."""
    opened: Counter[str] = Counter()
    plain_open = open

    def counted(file, *arguments, **more):
        opened[str(file)] += 1
        return plain_open(file, *arguments, **more)

    monkeypatch.setattr("builtins.open", counted)
    monkeypatch.setattr("io.open", counted)
    pack(records, SIDE, workers=0, progress=False, compressed=kind)
    assert {opened[str(records.path(i))] for i in range(len(records))} == {1}


@pytest.mark.parametrize("content", [None, b"", b"no picture", b"\xff\xd8\xff\xe0 cut", "a folder"])
def test_what_cannot_be_packed_is_said_in_the_same_words(content, tmp_path):
    path = tmp_path / "bad.jpg"
    if content == "a folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(PictureError) as decoded:
        small_picture(path, None, SIDE)
    with pytest.raises(PictureError) as kept:
        compressed_picture(path, None, SIDE)
    assert str(kept.value) == str(decoded.value)
    assert kept.value.path == str(path)


def test_processes_write_the_same_bytes_as_one(records, tmp_path):
    alone = compressed(records, folder=tmp_path / "one")
    many = pack(records, SIDE, tmp_path / "many", 2, progress=False, compressed=True)
    np.testing.assert_array_equal(alone.index, many.index)
    for a, b in zip(alone.shards, many.shards, strict=True):
        np.testing.assert_array_equal(a, b)


def test_it_lies_beside_the_decoded_one_and_is_found_by_name(records):
    assert compressed(records).folder != pack(records, SIDE, workers=0, progress=False).folder
    assert fresh_pack(records, SIDE).quality is None
    found, sentence = pack_for(records.select([3, 0]), SIDE, "compressed", make=False)
    assert found.keys == ("turned.jpg", "small.jpg")
    np.testing.assert_array_equal(found.picture(0), plain(records, 3))
    assert "4 pictures encoded again as JPEG of quality 95" in sentence


def flip(made: Pack, i: int, place: float = 0.9) -> None:
    """A bit of picture i, late in it: a decoder would not mind."""
    path = sorted(made.folder.glob("pixels-*.jpg"))[made.index[i, 0]]
    raw = bytearray(path.read_bytes())
    raw[int(made.index[i, OFFSET] + place * made.index[i, LENGTH])] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize("place", [0.0, 0.5, 0.9, 0.999])
def test_a_flipped_bit_is_seen_when_the_picture_is_read_and_named(place, records):
    before = compressed(records)
    content = {path.name: path.read_bytes() for path in before.folder.glob("pixels-*")}
    flip(before, 7, place)
    made = Pack.open(before.folder)
    with pytest.raises(
        PackError, match=r"large.jpg is damaged in the pack .* \(its bytes are not what was written\); "
    ):
        made.picture(7)
    for i in set(range(len(records))) - {7}:
        made.picture(i)
    again = compressed(records)  # makes that part again
    assert {path.name: path.read_bytes() for path in again.folder.glob("pixels-*")} == content
    again.picture(7)


def test_damage_stops_a_run_by_the_name_of_the_picture_in_every_way_of_reading(records):
    made = compressed(records)
    flip(made, 7)
    made = Pack.open(made.folder)
    order = [Order(0, np.asarray([6, 7]), None)]
    crop = CentreCrop(20, 24)
    decoded = [Decoded(records, crop, CPU, workers, SIDE, pack=made) for workers in (0, 1)]
    for source in (Threaded(made, crop), Streamed(made, crop, CPU), *decoded):
        with pytest.raises(PackError, match=r"large.jpg is damaged"):
            list(source(iter(order)))
    with pytest.raises(PackError, match=r"large.jpg is damaged"):
        Resident(made, crop, CPU)


@pytest.mark.parametrize(("column", "value"), [(LENGTH, 10**9), (LENGTH, -1), (OFFSET, 10**12), (OFFSET, -5)])
def test_no_picture_reaches_outside_its_file(column, value, records):
    folder = compressed(records).folder
    forged_index(folder, lambda index: index.__setitem__((2, column), value))
    with pytest.raises(PackError, match="picture 2 reaches outside its file"):
        Pack.open(folder)


def test_another_size_than_the_index_says_is_refused(records):
    folder = compressed(records).folder
    forged_index(folder, lambda index: index.__setitem__((2, HEIGHT), 47))
    with pytest.raises(PackError, match=r"small.png is damaged .* \(64 x 48 pixels instead of 64 x 47\)"):
        Pack.open(folder).picture(2)


def test_what_is_no_picture_is_refused_though_its_checksum_is_right(records):
    made = compressed(records)
    _, offset, length = made.index[2, [0, OFFSET, LENGTH]].tolist()
    path = sorted(made.folder.glob("pixels-*.jpg"))[0]
    raw = bytearray(path.read_bytes())
    raw[offset : offset + length] = pickle.dumps(print).ljust(length, b"x")
    path.write_bytes(raw)
    found = zlib.crc32(bytes(raw[offset : offset + length]))
    forged_index(made.folder, lambda index: index.__setitem__((2, CHECKSUM), found))
    with pytest.raises(PackError, match=r"small.png is damaged .* \(not a picture that Pillow can read\)"):
        Pack.open(made.folder).picture(2)


def test_pictures_that_cannot_be_decoded_are_left_out(records):
    records.path(1).write_bytes(b"x")
    with pytest.raises(PictureError, match=r"small.webp"):
        compressed(records)
    made = compressed(records, on_error="skip")
    assert set(made.failures) == {"small.webp"}
    np.testing.assert_array_equal(made.picture(2), plain(records, 2))
    for source in (Decoded(records, CentreCrop(20, 24), CPU, 0, SIDE, pack=made), Threaded(made, CentreCrop(20, 24))):
        (found,) = source(iter([Order(0, np.arange(3), None)]))
        assert found.indices.tolist() == [0, 2]
        assert found.skipped == {1: "not a picture that Pillow can read"}


@pytest.mark.parametrize("crop", [CentreCrop(20, 24), CentreCrop(40, 48), RandomCrop(20), RandomCrop(64)], ids=str)
def test_every_way_of_reading_gives_the_same_crops_to_the_bit(crop, records):
    made = compressed(records)
    draws = crop.draws(len(records), 7, 0) if isinstance(crop, RandomCrop) else None

    def images(source):
        (found,) = source(iter([Order(0, np.arange(len(records))[::-1].copy(), draws)]))
        return found.images

    expected = images(Threaded(made, crop))
    for workers in (0, 2):
        assert torch.equal(images(Decoded(records, crop, CPU, workers, SIDE, pack=made)), expected)
    resampled = images(Streamed(made, crop, CPU))  # by the device
    assert torch.equal(images(Resident(made, crop, CPU)), resampled)
    assert torch.equal(images(Decoded(records, crop, CPU, 0, SIDE, on_device=True, pack=made)), resampled)


def test_what_is_read_ahead_lies_within_the_files(tmp_path):
    """Compressed bytes end long before the pixels would."""
    names = tuple(f"{i}.jpg" for i in range(40))
    for i, name in enumerate(names):
        photograph(300, 200, i).save(tmp_path / name)
    many = Records("many", tmp_path, names, np.arange(40) // 4)
    for packed in (True, False):
        made = pack(many, 200, tmp_path / str(packed), workers=0, progress=False, compressed=packed)
        assert made.shards[0].size > 10 * 4096
        (found,) = Streamed(made, CentreCrop(20, 24), CPU)(iter([Order(0, np.arange(40)[::-1].copy(), None)]))
        assert len(found.images) == 40


def test_a_loop_over_small_files_is_that_over_the_files(records):
    some = records.select(range(len(SMALL)))
    sampler = [MPerClass(some.labels, 6, per_class=2) for _ in range(2)]
    crop = RandomCrop(20)
    from_files = training_batches(some, sampler[0], crop, None, CPU, workers=0, side=SIDE)
    from_pack = training_batches(some, sampler[1], crop, compressed(some), CPU, workers=0, side=SIDE)
    for ours, theirs in zip(from_files, from_pack, strict=True):
        assert torch.equal(ours.images, theirs.images)


def test_another_process_opens_it_itself(records):
    made = compressed(records).of(records.select([7, 2]))
    sent = pickle.dumps(made)
    assert len(sent) < 1000  # none of its pictures
    there = pickle.loads(sent)
    assert there.keys == made.keys
    for i in range(2):
        np.testing.assert_array_equal(there.picture(i), made.picture(i))
