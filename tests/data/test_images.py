"""Decoding every kind of file people have, and every kind of damage."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import types
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps

from roadmap.data.pictures.images import PictureError, picture, picture_size, reads_heif, thumbnail


def gradient(height=12, width=20) -> np.ndarray:
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 20, columns * 12, rows * 0 + 100], axis=2).astype(np.uint8)


def test_rgb_comes_back_as_it_is(tmp_path):
    Image.fromarray(gradient()).save(tmp_path / "a.png")
    np.testing.assert_array_equal(picture(tmp_path / "a.png"), gradient())


def test_content_decides_and_not_the_name(tmp_path):
    Image.fromarray(gradient()).save(tmp_path / "a.webp", lossless=True)
    (tmp_path / "a.webp").rename(tmp_path / "a.jpg")
    np.testing.assert_array_equal(picture(tmp_path / "a.jpg"), gradient())


@pytest.mark.parametrize("kind", ["png", "tiff", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation, kind, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(gradient())
    image.save(tmp_path / f"a.{kind}", exif=exif, lossless=True)
    # by the definition of the tag: which way the stored rows and columns must be turned
    pixels = gradient()
    upright = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1),
        7: pixels[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(pixels),
    }[orientation]
    np.testing.assert_array_equal(picture(tmp_path / f"a.{kind}"), upright)


@pytest.mark.parametrize(
    "odd", [(0x0128, 5, 1, b"\0\0\0\0"), (0x0128, 9, 1, b"\xfb\xff\xff\xff"), (0x0100, 2, 4, b"abc\0")]
)
def test_an_odd_tag_beside_the_orientation_keeps_no_picture_out(odd, tmp_path):
    """A resolution that is no number, say: Pillow reads such metadata and cannot write it again."""
    tags = [(0x0112, 3, 1, b"\6\0\0\0"), odd]
    entries = b"".join(struct.pack("<HHI4s", *tag) for tag in tags)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    Image.fromarray(gradient()).save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(picture(tmp_path / "a.png"), np.rot90(gradient(), -1))


@pytest.mark.parametrize("mode", ["L", "1"])
def test_grey_becomes_three_equal_channels(mode, tmp_path):
    grey = Image.fromarray(gradient()).convert(mode)
    grey.save(tmp_path / "a.png")
    pixels = picture(tmp_path / "a.png")
    expected = np.asarray(grey.convert("L"))
    assert all((pixels[:, :, c] == expected).all() for c in range(3))


def test_cmyk_is_converted(tmp_path):
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.jpg", quality=100)
    assert np.abs(picture(tmp_path / "a.jpg").reshape(-1, 3).mean(0) - [255, 0, 0]).max() < 3


def test_palettes(tmp_path):
    image = Image.fromarray(np.repeat([[0, 1, 2, 1]], 3, axis=0).astype(np.uint8), mode="P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.save(tmp_path / "plain.png")
    assert picture(tmp_path / "plain.png")[0].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255], [0, 255, 0]]
    image.save(tmp_path / "see_through.png", transparency=1)
    assert picture(tmp_path / "see_through.png")[0, 1].tolist() == [255, 255, 255]
    assert picture(tmp_path / "see_through.png")[0, 2].tolist() == [0, 0, 255]


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_shows_white(mode, tmp_path):
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[0, :, 3] = [255, 0]
    pixels[1, :, 3] = [128, 128]
    Image.fromarray(pixels, "RGBA").convert(mode).save(tmp_path / "a.png")
    decoded = picture(tmp_path / "a.png")
    assert decoded[0].tolist() == [[0, 0, 0], [255, 255, 255]]
    assert abs(int(decoded[1, 0, 0]) - 127) <= 1


def test_a_transparent_colour_of_an_rgb_file_shows_white(tmp_path):
    image = Image.new("RGB", (2, 1), (10, 20, 30))
    image.putpixel((1, 0), (0, 0, 0))
    image.save(tmp_path / "a.png", transparency=(10, 20, 30))
    assert picture(tmp_path / "a.png").tolist() == [[[255, 255, 255], [0, 0, 0]]]


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path):
    values = np.asarray([[0, 257, 1000, 32768, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    assert picture(tmp_path / "a.png")[0, :, 0].tolist() == [0, 1, 4, 128, 255]
    Image.fromarray(values).save(tmp_path / "a.tif")
    assert picture(tmp_path / "a.tif")[0, :, 0].tolist() == [0, 1, 4, 128, 255]


def test_a_transparent_level_of_16_bits_shows_white(tmp_path):
    values = np.asarray([[0, 1000, 1001, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png", transparency=1000)
    assert picture(tmp_path / "a.png")[0, :, 0].tolist() == [0, 255, 4, 255]


def test_an_animation_is_its_first_frame(tmp_path):
    red, blue = Image.new("RGB", (6, 4), "red"), Image.new("RGB", (6, 4), "blue")
    red.save(tmp_path / "a.gif", save_all=True, append_images=[blue])
    assert picture(tmp_path / "a.gif").reshape(-1, 3).mean(0).tolist() == [255, 0, 0]
    red.save(tmp_path / "a.webp", save_all=True, append_images=[blue], lossless=True)
    assert picture(tmp_path / "a.webp").reshape(-1, 3).mean(0).tolist() == [255, 0, 0]


def test_floating_point_is_refused(tmp_path):
    Image.fromarray(np.ones((2, 2), np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(PictureError, match=r"a.tif: floating-point pixels have no agreed range"):
        picture(tmp_path / "a.tif")


def test_boxes_are_rounded_clipped_and_in_upright_pixels(tmp_path):
    Image.fromarray(gradient()).save(tmp_path / "a.png")
    np.testing.assert_array_equal(picture(tmp_path / "a.png", (2.4, -5.0, 7.6, 4.0)), gradient()[0:4, 2:8])
    with pytest.raises(PictureError, match="lies outside the picture of 20 x 12"):
        picture(tmp_path / "a.png", (30, 0, 40, 5))
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(gradient()).save(tmp_path / "turned.png", exif=exif)
    turned = np.rot90(gradient(), -1)
    np.testing.assert_array_equal(picture(tmp_path / "turned.png", (1, 2, 6, 15)), turned[2:15, 1:6])


def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9])
def test_truncated_files_are_named(kind, kept, tmp_path):
    raw = encoded(kind)
    path = tmp_path / f"cut.{kind.lower()}"
    path.write_bytes(raw[: int(len(raw) * kept)])
    with pytest.raises(PictureError, match=r"cut\.\w+: (truncated or corrupt|not a picture)") as caught:
        picture(path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "the file is empty"), (b"hello", "not a picture that Pillow can read"), (None, "the file is missing")],
)
def test_what_is_no_picture_at_all(content, reason, tmp_path):
    path = tmp_path / "x.jpg"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PictureError, match=reason):
        picture(path)


KINDS = ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF", "DDS", "JPEG2000", "PPM", "BMP", "ICO", "TGA"]


@given(st.binary(max_size=64), st.integers(0, 400), st.sampled_from(KINDS))
def test_random_damage_is_a_picture_or_a_picture_error(noise, where, kind):
    raw = bytearray(encoded(kind))
    raw[where : where + len(noise)] = noise
    try:
        pixels = picture(io.BytesIO(bytes(raw)))
    except PictureError:
        return
    assert pixels.ndim == 3
    assert pixels.dtype == np.uint8


def test_what_avif_raises_names_the_picture(tmp_path):
    raw = encoded("AVIF")
    (tmp_path / "a.avif").write_bytes(raw.replace(b"iloc", b"xloc"))
    with pytest.raises(RuntimeError):
        Image.open(tmp_path / "a.avif").load()
    with pytest.raises(PictureError, match=r"a.avif: truncated or corrupt \(Failed to decode image"):
        picture(tmp_path / "a.avif")


def test_what_dds_raises_names_the_picture(tmp_path):
    raw = bytearray(encoded("DDS"))
    raw[80:84] = bytes(4)  # the flags of its pixel format
    (tmp_path / "a.dds").write_bytes(raw)
    with pytest.raises(NotImplementedError):
        Image.open(tmp_path / "a.dds").load()
    with pytest.raises(PictureError, match=r"a.dds: truncated or corrupt \(Unknown pixel format"):
        picture(tmp_path / "a.dds")


@pytest.mark.parametrize("error", [ZeroDivisionError(), AssertionError("why"), AttributeError("x"), RecursionError()])
def test_whatever_a_decoder_raises_names_the_picture(error, tmp_path, monkeypatch):
    Image.fromarray(gradient()).save(tmp_path / "a.png")
    monkeypatch.setattr(Image.Image, "getexif", failing(error))
    with pytest.raises(PictureError, match=rf"a.png: truncated or corrupt \({str(error) or type(error).__name__}\)"):
        picture(tmp_path / "a.png")


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), SystemExit()])
def test_what_is_not_about_the_picture_goes_through(error, tmp_path, monkeypatch):
    Image.fromarray(gradient()).save(tmp_path / "a.png")
    monkeypatch.setattr(Image.Image, "getexif", failing(error))
    with pytest.raises(type(error)):
        picture(tmp_path / "a.png")


def failing(error: BaseException):
    def fail(*_):
        raise error

    return fail


def test_sizes_are_read_from_headers(tmp_path):
    (tmp_path / "huge.png").write_bytes(bomb(5_000, 4_000))  # has no pixels at all
    assert picture_size(tmp_path / "huge.png") == (5_000, 4_000)
    (tmp_path / "a.avif").write_bytes(encoded("AVIF").replace(b"iloc", b"xloc"))
    for name in ("a.avif", "gone.png"):
        with pytest.raises(PictureError, match=name):
            picture_size(tmp_path / name)


def test_a_folder_is_no_picture(tmp_path):
    with pytest.raises(PictureError, match=r"cannot be read \(Is a directory\)"):
        picture(tmp_path)


HEIC = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic" + bytes(40)


@pytest.fixture
def heif_installed(monkeypatch):
    """Puts a module in the place of pillow-heif, or nothing; forgets what was found before and afterwards."""

    def install(module):
        monkeypatch.setitem(sys.modules, "pillow_heif", module)
        reads_heif.cache_clear()

    yield install
    reads_heif.cache_clear()


def test_heic_says_what_is_missing(tmp_path, heif_installed):
    heif_installed(None)
    (tmp_path / "a.jpg").write_bytes(HEIC)
    with pytest.raises(PictureError, match=r"a.jpg: a HEIC picture: pip install pillow-heif"):
        picture(tmp_path / "a.jpg")


def test_heic_is_read_where_its_companion_is_installed(tmp_path, heif_installed, monkeypatch):
    registered = []
    pillows = Image.open

    def opened(file, formats=None):
        return pillows(io.BytesIO(encoded("PNG")) if registered else file)

    monkeypatch.setattr(Image, "open", opened)
    heif_installed(types.SimpleNamespace(register_heif_opener=lambda: registered.append(True)))
    (tmp_path / "a.jpg").write_bytes(HEIC)
    assert picture(tmp_path / "a.jpg").shape == (40, 40, 3)
    assert registered == [True]


def test_open_files_are_read_too():
    assert picture(io.BytesIO(encoded("PNG"))).shape == (40, 40, 3)
    with pytest.raises(PictureError, match="the given picture: the file is empty"):
        picture(io.BytesIO(b""))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few dozen bytes that claims any size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [12_000, 30_000, 100_000])
def test_decompression_bombs_are_refused_before_decoding(side, tmp_path):
    (tmp_path / "bomb.png").write_bytes(bomb(side, side))
    with pytest.raises(PictureError, match=r"bomb.png: (\d+ x \d+ pixels, more than|refused as a decompression bomb)"):
        picture(tmp_path / "bomb.png")


def test_the_limit_can_be_chosen(tmp_path):
    Image.fromarray(gradient()).save(tmp_path / "a.png")
    with pytest.raises(PictureError, match="20 x 12 pixels, more than the 239 allowed"):
        picture(tmp_path / "a.png", max_pixels=239)
    assert picture(tmp_path / "a.png", max_pixels=240).shape == (12, 20, 3)


def test_truncation_cannot_be_hidden_by_a_global_setting(tmp_path, monkeypatch):
    Image.fromarray(gradient()).save(tmp_path / "a.png")
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(PictureError, match="damage would go unseen"):
        picture(tmp_path / "a.png")


def test_the_error_crosses_processes():
    error = pickle.loads(pickle.dumps(PictureError("a.jpg", "why")))
    assert (error.path, error.reason, str(error)) == ("a.jpg", "why", "a.jpg: why")


@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 60))
def test_shrinking_gives_torchvisions_size_and_never_enlarges(height, width, side):
    from torchvision.transforms import functional as tv

    image = Image.new("RGB", (width, height))
    small = thumbnail(image, side)
    assert small.size == (image.size if min(image.size) <= side else tv.resize(image, side).size)


def test_shrinking_is_torchvisions_resize():
    from torchvision.transforms import functional as tv

    image = ImageOps.mirror(Image.fromarray(np.random.default_rng(1).integers(0, 256, (60, 90, 3), dtype=np.uint8)))
    np.testing.assert_array_equal(np.asarray(thumbnail(image, 31)), np.asarray(tv.resize(image, 31)))
