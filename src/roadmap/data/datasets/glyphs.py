"""Glyphs: a retrieval dataset that needs no download, drawn from the free fonts that come with matplotlib.

A class is a character, its pictures are the 12 DejaVu faces (sans, mono and serif; upright and slanted; regular
and bold), its category is its script, and the test set holds characters never seen in training: the shape of
Stanford Online Products, thousands of classes of about a dozen pictures in a dozen categories.

Characters that no one could tell apart (Latin A, Greek Alpha, Cyrillic A) are one class, the one with the lowest
code point: no picture of the dataset occurs under two labels. Drawn in seconds, kept as a pack.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from roadmap.atomic import sole_writer
from roadmap.data.datasets.sources import GLYPH_SIZE
from roadmap.data.pictures.contents import PackError
from roadmap.data.pictures.images import Pixels
from roadmap.data.pictures.packing import pack_of
from roadmap.data.pictures.packs import Pack, cache_folder
from roadmap.data.randomness import permutation
from roadmap.data.records import Ints, Records, numbers_of
from roadmap.data.trees import tree_over_classes

FACES = tuple(
    f"DejaVu{family}{style}"
    for family, slanted in (("Sans", "Oblique"), ("SansMono", "Oblique"), ("Serif", "Italic"))
    for style in ("", "-Bold", f"-{slanted}", f"-Bold{slanted}")
)
FEWEST_FACES = 8  # of 12 that must have the character
FEWEST_PICTURES = 6  # that must differ: Braille and box drawing look alike in every face and fall out here
SCRIPTS = ("LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN", "LAO")
RECORDS = "records.json"
NAME = "glyphs"


def glyph_records(root: Path | None = None, size: int = GLYPH_SIZE) -> Records:
    """The Records of Glyphs, drawn into `root` the first time; the pictures are in the pack `root` itself holds.

    Args:
        root: folder for the pack; None for the user's cache.
        size: side of the square pictures in pixels, at least 16.
    """
    if size < 16:
        raise ValueError(f"glyphs of {size} pixels cannot be told apart; the size must be at least 16")
    folder = Path(root) if root is not None else cache_folder() / f"glyphs-{size}"
    if (kept := _earlier_records(folder, size)) is not None:
        return kept
    drawn = list(_distinct(size))
    records = _records(folder, drawn)
    pack_of((_colours(pixels) for _, _, pixels in drawn), records, size, folder)
    with sole_writer(folder):  # another one that draws removes what writers left, and would take this for such
        records.save(folder / RECORDS)
    return records


def _earlier_records(folder: Path, size: int) -> Records | None:
    """What was drawn before. None where nothing was, or not all of it: a full disk, a kill, another size."""
    try:
        pack, records = Pack.open(folder), Records.load(folder / RECORDS)
    except (PackError, FileNotFoundError, ValueError):
        return None
    whole = pack.drawn and pack.side == size and pack.keys == records.paths and records.name == NAME
    return _with_tree(dataclasses.replace(records, root=folder)) if whole else None


def export(records: Records, folder: Path) -> None:
    """Writes a drawn dataset as PNG files in a folder per split, script and character."""
    pack = Pack.open(records.root).of(records)
    splits = records.splits if records.splits is not None else np.full(len(records), "train")
    for i, path in enumerate(records.paths):
        target = Path(folder) / str(splits[i]) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pack.picture(i)).save(target)


def script(character: str) -> str:
    """The category of a character: its script, or what kind of sign it is."""
    name, kind = unicodedata.name(character, ""), unicodedata.category(character)
    first = name.split(" ")[0] if name else ""
    if first in SCRIPTS:
        return first.lower()
    if "ARROW" in name or "HARPOON" in name:
        return "arrow"
    kinds = {"M": "mark", "P": "punctuation", "N": "number"}
    if kind[0] in kinds:
        return kinds[kind[0]]
    return {"Sm": "mathematics", "Sk": "modifier", "Lm": "modifier"}.get(kind, "symbol")


def _records(folder: Path, drawn: list[tuple[int, str, Pixels]]) -> Records:
    characters = [chr(code) for code, _, _ in drawn]
    scripts = [script(character) for character in characters]
    names = [f"{where}/U+{ord(c):04X}" for where, c in zip(scripts, characters, strict=True)]
    labels, class_names = numbers_of(names)
    categories, category_names = numbers_of(scripts)
    paths = tuple(f"{name}/{face}.png" for name, (_, face, _) in zip(names, drawn, strict=True))
    _, firsts = np.unique(labels, return_index=True)
    splits = np.where(np.isin(labels, _half(categories[firsts])), "test", "train")
    return _with_tree(Records(NAME, folder, paths, labels, class_names, categories, category_names, splits=splits))


def _with_tree(records: Records) -> Records:
    """Script over character. Those who drew Glyphs before there were trees have it too."""
    scripts = [name.partition("/")[0] for name in records.class_names]
    tree = tree_over_classes({"script": scripts}, records.labels, records.class_names, "character")
    return dataclasses.replace(records, tree=tree)


def _half(categories: Ints) -> Ints:
    """The classes of the test set: every other one of each script, in a fixed draw. No others will be added."""
    order = permutation(len(categories), 0, len(categories))
    order = order[np.argsort(categories[order], kind="stable")]
    half: Ints = order[1::2]
    return half


def _distinct(size: int) -> Iterator[tuple[int, str, Pixels]]:
    """(code point, face, (size, size) ink) of every class, by code point, no picture under two labels."""
    taken: set[bytes] = set()
    faces = {face: _font(face, round(size * 0.62)) for face in FACES}
    codes = {face: _characters(face) for face in FACES}
    for code in sorted(set().union(*codes.values())):
        having = [face for face in FACES if code in codes[face]]
        if len(having) < FEWEST_FACES or unicodedata.category(chr(code))[0] in "CZ":
            continue
        pictures: dict[bytes, tuple[str, Pixels]] = {}
        for face in having:
            ink = _ink(chr(code), faces[face], size)
            if ink is not None:
                pictures.setdefault(ink.tobytes(), (face, ink))
        # a look-alike of an earlier character in any face would make its label a coin toss
        if len(pictures) >= FEWEST_PICTURES and taken.isdisjoint(pictures):
            taken.update(pictures)
            yield from ((code, face, ink) for face, ink in pictures.values())


def _ink(character: str, font: ImageFont.FreeTypeFont, size: int) -> Pixels | None:
    """(size, size) ink, 255 where there is most; None if it is blank or does not fit."""
    anchor = (size / 2, round(size * 0.72))
    left, top, right, bottom = font.getbbox(character, anchor="ms")
    shifted = (left + anchor[0], top + anchor[1], right + anchor[0], bottom + anchor[1])
    if left >= right or min(shifted) < 0 or max(shifted) > size:
        return None
    image = Image.new("L", (size, size))
    ImageDraw.Draw(image).text(anchor, character, fill=255, font=font, anchor="ms")
    ink = np.asarray(image)
    return ink if ink.any() else None


def _colours(ink: Pixels) -> Pixels:
    return np.repeat(255 - ink[:, :, None], 3, axis=2)


def _face_file(face: str) -> Path:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("glyphs are drawn with matplotlib's fonts: pip install 'roadmap-retrieval[data]'") from error
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"


def _font(face: str, pixels: int) -> ImageFont.FreeTypeFont:
    # the basic layout: the other one depends on a library that may be missing
    return ImageFont.truetype(str(_face_file(face)), pixels, layout_engine=ImageFont.Layout.BASIC)


def _characters(face: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(str(_face_file(face))).get_charmap())
