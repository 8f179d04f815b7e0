"""The page of retrievals shows what a literal search finds, chosen by rule, escaped, and without reaching out."""

from __future__ import annotations

import base64
import dataclasses
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from roadmap.data import UNLABELLED, Records, picture_key
from roadmap.data.pictures.images import Pixels
from roadmap.embeddings import Embeddings
from roadmap.evaluation import Evaluation, evaluate
from roadmap.report import Album, retrieval_page
from roadmap.report.retrievals import grouped, turns
from roadmap.report.retrievals_html import data_uri

CLASSES, ITEMS = 12, 6
NASTY = ('a/<script>alert("1")</script>', '"><img src=x onerror=alert(1)>', "R&amp;D <b>", *"defghijkl")
VOID = {"img", "meta", "br", "wbr"}


@dataclass
class Strip:
    model: str
    head: str
    items: list[tuple[str, int, str]] = field(default_factory=list)  # class, record, what a screen reader says


@dataclass
class Shown:
    group: str
    query: int
    caption: str
    strips: list[Strip] = field(default_factory=list)


class Page(HTMLParser):
    """What the page shows, each picture known by the record written into its first pixel."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.group = ""
        self.shown: list[Shown] = []
        self.cells: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        if tag == "img":
            self._picture(given)
        if tag not in VOID:
            self.open.append((tag, given))

    def _picture(self, given: dict[str, str | None]) -> None:
        source, alt = given["src"], given["alt"]
        assert source is not None
        assert alt is not None
        self.sources.append(source)
        record = int(decoded(source)[0, 0, 0])
        parent, of_parent = self.open[-1]
        if parent == "figure":
            self.shown.append(Shown(self.group, record, alt))
        else:
            assert parent == "li"
            self.shown[-1].strips[-1].items.append((str(of_parent["class"]), record, alt))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self.open]
        self.text += data
        if tags[-1:] == ["h2"]:
            self.group = data
        if tags[-1:] == ["h3"]:
            self.shown[-1].strips.append(Strip(data.strip(), ""))
        if tags[-2:] == ["h3", "span"]:
            self.shown[-1].strips[-1].head = data
        if len(tags) > 1 and tags[-2] == "td":
            self.cells.append((tags[-1], data))


def decoded(source: str) -> Pixels:
    found = re.fullmatch(r"data:image/(?:png|jpeg);base64,([A-Za-z0-9+/=]+)", source)
    assert found, source[:60]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(found[1]))).convert("RGB"))


def numbered_picture(index: int) -> Pixels:
    return np.full((16, 16, 3), index, dtype=np.uint8)


def records(labels: list[int] | np.ndarray[tuple[int], np.dtype[np.int64]], name: str = "toys") -> Records:
    return Records(name, Path(), tuple(f"{name}/{i}.png" for i in range(len(labels))), np.asarray(labels), NASTY)


def embeddings(of: Records, seed: int, spread: float, ids: bool = True) -> Embeddings:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.from_numpy(of.labels)
    centres = torch.randn(CLASSES, 8, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    noise = torch.randn(len(of), 8, generator=generator, dtype=torch.float64)
    names = tuple(picture_key(of, i) for i in range(len(of)))
    return Embeddings(centres[labels.clamp(min=0)] + spread * noise, labels, names if ids else None)


@dataclass
class Shop:
    """Vectors of several models, their evaluations, and the pictures."""

    models: dict[str, Embeddings]
    records: Records
    pixels: Callable[[int], Pixels] | None = numbered_picture

    @property
    def found(self) -> dict[str, Evaluation]:
        return {name: evaluate(vectors) for name, vectors in self.models.items()}


@pytest.fixture
def toys() -> Shop:
    """Uneven classes, the last with a single picture."""
    labels = np.repeat(np.arange(CLASSES), ITEMS)[: CLASSES * ITEMS - ITEMS + 1]
    of = records(labels)
    return Shop({"rough <i>": embeddings(of, 0, 1.5), "fine": embeddings(of, 1, 0.8)}, of)


def written(path: Path, shop: Shop, **options: Any) -> Page:
    retrieval_page(path / "page.html", "Toys & <more>", shop.found, Album(shop.records, shop.pixels), **options)
    return Page((path / "page.html").read_text(encoding="utf-8"))


def literal_ranking(queries: Embeddings, gallery: Embeddings, query: int, own: int | None) -> list[int]:
    """All gallery items but the query itself, by a loop over cosines."""
    q = queries.vectors[query].double().numpy()
    scores = []
    for j, g in enumerate(gallery.vectors.double().numpy()):
        if j != own:
            scores.append((-float(q @ g / np.linalg.norm(q) / np.linalg.norm(g)), j))
    return [j for _, j in sorted(scores)]


def literal_ap_at_r(ranking: list[int], relevant: set[int]) -> float:
    hits, total = 0, 0.0
    for place, item in enumerate(ranking[: len(relevant)], start=1):
        if item in relevant:
            hits += 1
            total += hits / place
    return total / len(relevant)


def test_it_shows_what_a_literal_search_finds(toys: Shop, tmp_path: Path) -> None:
    page = written(tmp_path, toys, rows=9, nearest=7)
    labels = toys.records.labels
    assert len(page.shown) == 9
    marks = []
    for shown in page.shown:
        relevant = set(np.flatnonzero(labels == labels[shown.query]).tolist()) - {shown.query}
        assert [strip.model for strip in shown.strips] == ["rough <i>", "fine"]
        for strip in shown.strips:
            ranking = literal_ranking(toys.models[strip.model], toys.models[strip.model], shown.query, shown.query)
            assert [record for _, record, _ in strip.items] == ranking[:7]
            kinds = ["right" if j in relevant else "wrong" for j in ranking[:7]]
            beyond = [" beyond" if place >= len(relevant) else "" for place in range(7)]
            assert [kind for kind, _, _ in strip.items] == [a + b for a, b in zip(kinds, beyond, strict=True)]
            ap = literal_ap_at_r(ranking, relevant)
            assert strip.head.startswith(f"AP@R {100 * ap:.1f} · {kinds[: len(relevant)].count('right')} of")
            marks += kinds
    assert min(marks.count("right"), marks.count("wrong")) > 10
    assert page.text.count("✓") == marks.count("right") + 1  # one more in the legend
    assert page.text.count("✗") == marks.count("wrong") + 1


def test_frames_are_said_and_signed_and_not_only_coloured(toys: Shop, tmp_path: Path) -> None:
    page = written(tmp_path, toys, rows=4)
    labels = toys.records.labels
    for shown in page.shown:
        for place, (_, record, said) in enumerate(shown.strips[0].items, start=1):
            same = labels[record] == labels[shown.query]
            assert said.startswith(
                f"{place}: {'same class' if same else 'another class'}, {NASTY[labels[record]]}, score "
            )
            assert said.endswith(f", toys/{record}.png")


def test_groups_follow_the_ap_of_the_judge(toys: Shop, tmp_path: Path) -> None:
    for judge in ("fine", "rough <i>"):
        page = written(tmp_path, toys, rows=8, ranked_by=judge)
        model, labels = toys.models[judge], toys.records.labels
        precisions = toys.found[judge].per_query["mAP@R"].numpy()
        (candidates,) = turns(labels, precisions, 8, 512)
        ap = {}
        for query in candidates:
            relevant = set(np.flatnonzero(labels == labels[query]).tolist()) - {query}
            if relevant:
                ap[query] = literal_ap_at_r(literal_ranking(model, model, query, query), relevant)
        ordered = sorted(ap.values(), reverse=True)
        aps = [ap[shown.query] for shown in page.shown]
        assert aps == sorted(aps, reverse=True)
        assert [shown.group for shown in page.shown] == ["The best"] * 2 + ["In between"] * 4 + ["The worst"] * 2
        assert aps[:2] == ordered[:2]
        assert aps[-2:] == ordered[-2:]
        assert judge in page.text


def test_the_last_model_judges_unless_another_is_named(toys: Shop, tmp_path: Path) -> None:
    options: tuple[dict[str, Any], ...] = ({}, {"ranked_by": "fine"}, {"ranked_by": "rough <i>"})
    default, fine, rough = ([shown.query for shown in written(tmp_path, toys, rows=5, **o).shown] for o in options)
    assert default == fine
    assert default != rough


def test_a_query_never_finds_itself_but_finds_its_duplicate(tmp_path: Path) -> None:
    of = records(np.repeat(np.arange(6), 4))
    plain = embeddings(of, 0, 1.0)
    vectors = plain.vectors.clone()
    vectors[1::2] = vectors[::2]  # every picture twice, so that the own score of 1 is met twice
    page = written(tmp_path, Shop({"twins": Embeddings(vectors, plain.labels, plain.ids)}, of))
    assert len(page.shown) == 24
    for shown in page.shown:
        found = [record for _, record, _ in shown.strips[0].items]
        assert shown.query not in found
        assert found[0] == shown.query ^ 1


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_gallery_of_its_own(with_ids: bool, tmp_path: Path) -> None:
    """With ids a query that is in the gallery is left out of its answers; without, nothing is."""
    whole = records(np.repeat(np.arange(8), 5))
    chosen = np.arange(0, 40, 3)
    of = whole.select(chosen)
    everything = embeddings(whole, 3, 1.0, with_ids)
    ids = everything.ids
    asked = Embeddings(
        everything.vectors[chosen], everything.labels[chosen], None if ids is None else tuple(ids[i] for i in chosen)
    )
    pictures = Album(of, lambda i: numbered_picture(100 + i)), Album(whole, numbered_picture)
    retrieval_page(tmp_path / "page.html", "x", {"m": evaluate(asked, everything)}, *pictures, rows=6, nearest=9)
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert len(page.shown) == 6
    for shown in page.shown:
        query = int(chosen[shown.query - 100])
        found = [record for _, record, _ in shown.strips[0].items]
        ranking = literal_ranking(everything, everything, query, query if with_ids else None)
        assert found == ranking[:9]
        assert (query in found) is not with_ids


def test_names_are_escaped(toys: Shop, tmp_path: Path) -> None:
    page = written(tmp_path, toys)
    assert "script" not in page.tags
    assert len(page.sources) == len(page.shown) * 21  # no picture but ours: the query, and 10 from each of two models
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Toys &amp; &lt;more&gt;" in text
    assert "onerror=alert(1)>" not in text
    assert "rough &lt;i&gt;" in text
    said = [shown.caption.removesuffix(f", toys/{shown.query}.png") for shown in page.shown]
    assert {f"query of class {name}" for name in NASTY[:3]} <= set(said)


def test_it_reaches_for_nothing(toys: Shop, tmp_path: Path) -> None:
    page = written(tmp_path, toys)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert not re.search(r"https?:|url\(|@import", text)
    assert all(source.startswith("data:image/") for source in page.sources)
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport"' in text


def test_the_same_input_gives_the_same_bytes(toys: Shop, tmp_path: Path) -> None:
    written(tmp_path, toys)
    first = (tmp_path / "page.html").read_bytes()
    written(tmp_path, toys)
    assert (tmp_path / "page.html").read_bytes() == first


def test_the_table_has_the_metrics_in_percent_and_the_best_in_bold(toys: Shop, tmp_path: Path) -> None:
    measured = {name: found.metrics for name, found in toys.found.items()}
    computed, given = written(tmp_path, toys), written(tmp_path, toys, metrics=measured)
    names = ("R@1", "R@2", "R@4", "R@8", "mAP@R", "mAP")
    expected = []
    for values in measured.values():
        for name in names:
            best = round(100 * values[name], 1) == max(round(100 * other[name], 1) for other in measured.values())
            expected.append(("b" if best else "span", f"{100 * values[name]:.1f}"))
    assert computed.cells == given.cells == expected
    assert {kind for kind, _ in expected} == {"b", "span"}
    one = Shop({"fine": toys.models["fine"]}, toys.records)
    assert {kind for kind, _ in written(tmp_path, one).cells} == {"span"}  # alone, nothing is best


def test_pictures_that_could_not_be_embedded_are_not_mistaken_for_others(tmp_path: Path) -> None:
    of = records(np.repeat(np.arange(8), 5))
    kept = torch.tensor([i for i in range(40) if i % 7])
    whole = embeddings(of, 0, 1.0)
    assert whole.ids is not None
    some = Embeddings(whole.vectors[kept], whole.labels[kept], tuple(whole.ids[i] for i in kept))
    page = written(tmp_path, Shop({"m": some}, of), rows=8)
    for shown in page.shown:
        row = kept.tolist().index(shown.query)
        ranking = literal_ranking(some, some, row, row)
        assert [record for _, record, _ in shown.strips[0].items] == kept[ranking[:10]].tolist()


def test_files_are_read_where_no_pixels_are_given(tmp_path: Path) -> None:
    of = records(np.repeat(np.arange(3), 3))
    (tmp_path / "toys").mkdir()
    for i, path in enumerate(of.paths):
        Image.fromarray(numbered_picture(10 + i)).save(tmp_path / path)
    there = Records(of.name, tmp_path, of.paths, of.labels, of.class_names)
    page = written(tmp_path, Shop({"m": embeddings(there, 0, 1.0)}, there, None))
    assert sorted(shown.query for shown in page.shown) == list(range(10, 19))


def test_every_class_takes_its_turn() -> None:
    labels, ap = np.repeat(np.arange(100), 10), np.linspace(0, 1, 1000)
    (one,) = turns(labels, ap, 24, 512)
    assert labels[one].tolist() == list(range(100))
    (some,) = turns(labels, ap, 24, 50)
    assert np.unique(np.diff(labels[some])).tolist() == [2]  # evenly spaced classes
    few = np.repeat(np.arange(3), 10)
    several = turns(few, ap[:30], 8, 512)
    assert [sorted(few[turn].tolist()) for turn in several] == [[0, 1, 2]] * 3
    assert len({int(query) for turn in several for query in turn}) == 9
    few[:10] = UNLABELLED
    gone = ap[:30].copy()
    gone[10:15] = np.nan  # nothing to find
    left = np.concatenate(turns(few, gone, 24, 512))
    assert sorted(left.tolist()) == list(range(15, 30))


def test_no_class_comes_again_before_all_have_come() -> None:
    """Even where the best and the worst are all of a few classes."""
    labels = np.repeat(np.arange(9), [40, 40, 40, 3, 3, 3, 3, 3, 1])
    ap = np.random.default_rng(0).random(len(labels)) * 0.2 + 0.4
    ap[:40], ap[40:80] = 1.0, 0.0
    for rows in (5, 9, 14, 24):
        shown = np.concatenate(grouped(turns(labels, ap, rows, 512), ap, rows))
        counts = np.bincount(labels[shown], minlength=9)
        assert len(shown) == len(set(shown.tolist())) == rows
        sizes = np.bincount(labels)
        for least in range(9):  # who is shown less often has no more to show
            assert counts.max() - counts[least] <= 1 or counts[least] == sizes[least]


def test_groups_are_spread_over_the_ap() -> None:
    ap = np.linspace(0, 1, 100)[::-1].copy()
    best, between, worst = (group.tolist() for group in grouped([np.arange(100)], ap, 24))
    assert best == list(range(6))
    assert worst == list(range(94, 100))
    assert len(between) == 12
    assert set(np.diff(between).tolist()) <= {7, 8}
    assert [len(group) for group in grouped([np.arange(3)], ap, 24)] == [1, 1, 1]
    assert [group.tolist() for group in grouped([np.arange(100)], np.ones(100), 4)] == [[0], [25, 74], [99]]


def test_names_and_files_are_shown_whole(tmp_path: Path) -> None:
    names = ("animals/birds/001.Black_footed_Albatross_with_a_name_that_does_not_end", "b", "c")
    paths = tuple(f"deep/below/a picture & more {i}.png" for i in range(9))
    of = Records("toys", Path(), paths, np.repeat(np.arange(3), 3), names)
    page = written(tmp_path, Shop({"m": embeddings(of, 0, 1.0)}, of))
    shown = "".join(page.text.split("\n"))
    assert names[0] in shown
    for i in range(9):
        assert f"a picture & more {i}.png" in shown
    assert "deep/below" not in shown  # where the mouse rests
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("deep/below/a picture &amp; more 3.png") > 1
    assert "ellipsis" not in text


def test_names_that_are_no_utf_8_are_shown_with_their_bytes_written_out(tmp_path: Path) -> None:
    paths = tuple(os.fsdecode(b"caf\xe9 %d.png" % i) for i in range(9))
    of = Records("toys", Path(), paths, np.repeat(np.arange(3), 3), (os.fsdecode(b"cr\xe8me"), "b", "c"))
    written(tmp_path, Shop({"m": embeddings(of, 0, 1.0)}, of))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert r"caf\udce9 3.png" in text
    assert r"cr\udce8me" in text


def test_the_order_is_that_of_the_evaluation(tmp_path: Path) -> None:
    """Copies: a plain product tells them apart by where they stand, and would show a right one before a wrong one."""
    of = records(np.arange(90) % 3)
    vectors = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).repeat(18, 1)
    plain = Embeddings(vectors, torch.from_numpy(of.labels))
    page = written(tmp_path, Shop({"copies": plain}, of), nearest=10)
    for shown in page.shown:
        (strip,) = shown.strips
        kinds = [kind.split()[0] for kind, _, _ in strip.items]
        assert kinds == ["wrong"] * 10  # of 17 copies 12 are of other classes; they count before the 5
        assert "· 0 of the first 10 right" in strip.head


def test_large_pictures_become_small_squares_and_tiny_ones_stay() -> None:
    large = np.zeros((200, 400, 3), dtype=np.uint8)
    large[:, 100:300] = 255
    shown = decoded(data_uri(large))
    assert shown.shape == (128, 128, 3)
    assert shown.min() > 230  # the middle, which is white
    assert data_uri(large).startswith("data:image/jpeg")
    tiny = np.random.default_rng(0).integers(0, 256, (64, 40, 3), dtype=np.uint8)
    assert (decoded(data_uri(tiny)) == tiny).all()


def test_an_interrupted_page_leaves_the_old_one(toys: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.html").write_text("old")

    def half_written(path: Path, text: str, encoding: str) -> int:
        path.write_bytes(text.encode(encoding)[:100])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", half_written)
    with pytest.raises(OSError, match="the disk is full"):
        written(tmp_path, toys)
    assert (tmp_path / "page.html").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


OTHER = records(np.repeat(np.arange(CLASSES), 2))


def page_of(vectors: dict[str, Embeddings], of: Records, gallery: Records | None = None, **options: Any) -> None:
    found = {name: evaluate(some) for name, some in vectors.items()}
    retrieval_page(Path("never written"), "x", found, of, gallery, **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: page_of({}, OTHER), "at least one model, got none"),
        (
            lambda: page_of({"a": embeddings(OTHER, 0, 1), "b": embeddings(OTHER, 0, 1, ids=False)}, OTHER),
            "'a' and 'b' differ in labels or ids; evaluate both with the same records",
        ),
        (
            lambda: page_of({"a": embeddings(OTHER, 0, 1)}, OTHER.select(np.arange(5))),
            "19 embeddings are of no picture of toys: 'toys/5.png'",
        ),
        (
            lambda: page_of({"a": embeddings(OTHER, 0, 1, ids=False)}, OTHER.select(np.arange(5))),
            "24 embeddings without ids cannot be matched to 5 records",
        ),
        (
            lambda: page_of({"a": embeddings(OTHER, 0, 1)}, records(OTHER.labels[::-1].copy())),
            "the labels of the embeddings are not those of the records of toys",
        ),
        (
            lambda: retrieval_page(Path("x"), "x", {"a": evaluate(embeddings(OTHER, 0, 1), nearest=0)}, OTHER),
            "the evaluation of 'a' kept no neighbours; evaluate with nearest=10",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(make: Callable[[], None], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()
    assert not Path("never written").exists()


def test_bad_requests_are_named(toys: Shop, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("must be one of the models ['rough <i>', 'fine'], got 'finest'")):
        written(tmp_path, toys, ranked_by="finest")
    some = embeddings(toys.records.select(np.arange(9)), 0, 1)
    searched = evaluate(dataclasses.replace(some, ids=None), dataclasses.replace(toys.models["fine"], ids=None))
    with pytest.raises(ValueError, match="the queries were searched in a gallery: give its pictures too"):
        retrieval_page(tmp_path / "x.html", "x", {"m": searched}, toys.records.select(np.arange(9)))
    with pytest.raises(ValueError, match="rows, nearest and sample must be at least 1, got 0, 10 and 512"):
        written(tmp_path, toys, rows=0)
    lonely = records(np.arange(CLASSES))
    with pytest.raises(ValueError, match="none of the 12 queries looked at has another picture of its class to find"):
        written(tmp_path, Shop({"m": embeddings(lonely, 0, 1)}, lonely))
