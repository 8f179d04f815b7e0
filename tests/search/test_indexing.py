"""A folder into an index and again after changes, by Python and by the commands; and what is refused, in words."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from roadmap.cli.app import app
from roadmap.encoder import Encoder
from roadmap.refinement import Refinement
from roadmap.search import Index, draw_results, encoder_of, filter_of_texts, index_pictures, pictures_of, refined_search
from roadmap.search.gathering import kind_of

LEVEL = {"owl": 40, "tit": 110, "jay": 190}
TABLE = "path,year,place,seen,code\n" + "\n".join(
    f"{name}/{i}.png,{2000 + i},{'Ulm' if i % 2 else ''},{'true' if i < 2 else 'false'},00{i}"
    for name in LEVEL
    for i in range(4)
)


def write_picture(path: Path, level: int, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 50, (40, 50, 3))
    Image.fromarray((level + noise).astype(np.uint8)).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for n, (name, level) in enumerate(LEVEL.items()):
        for i in range(4):
            write_picture(tmp_path / "P" / name / f"{i}.png", level, 10 * n + i)
    (tmp_path / "about.csv").write_text(TABLE)
    return tmp_path


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.open("small_cnn", device="cpu")


def called(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_only_what_changed_is_embedded_and_the_rest_is_described(root: Path, encoder: Encoder) -> None:
    done = index_pictures(encoder, root / "P", root / "I", table=root / "about.csv", engine="exact", at_once=5)
    assert len(done.changes.new) == done.facts["vectors"] == 12
    write_picture(root / "P/owl/1.png", 250, 99)
    write_picture(root / "P/jay/new.png", 190, 98)
    (root / "P/tit/2.png").unlink()
    os.utime(root / "P/tit/0.png", (1, 1))
    (root / "P/tit/bad.png").write_text("no picture")
    (root / "about.csv").write_text(TABLE.replace("owl/0.png,2000,", "owl/0.png,1999,Bonn"))
    seen: list[int] = []
    hook = encoder.model.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    done = index_pictures(encoder, root / "P", root / "I", table=root / "about.csv")
    hook.remove()
    changes = done.changes
    assert (changes.new, changes.changed) == (("jay/new.png", "tit/bad.png"), ("owl/1.png",))
    assert (changes.deleted, list(changes.touched)) == (("tit/2.png",), ["tit/0.png"])
    assert sum(seen) == 2
    assert (done.described, list(done.skipped)) == (1, ["tit/bad.png"])
    with Index.open(root / "I") as index:
        assert sorted(index.ids()) == sorted(
            path.relative_to(root / "P").as_posix() for path in (root / "P").rglob("*.png") if path.name != "bad.png"
        )
        row = index.search(index.vectors_of(["owl/0.png"]), 1).metadata[0][0]
        assert row == {
            "id": "owl/0.png", "label": "owl", "year": 1999, "place": "Bonn", "seen": True, "code": "000"
        }  # fmt: skip
        ours = encoder.embed([root / "P/owl/1.png"]).vectors.numpy()
        assert np.allclose(index.vectors_of(["owl/1.png"]), ours, atol=1e-6)
    again = index_pictures(encoder, root / "P", root / "I", table=root / "about.csv")
    assert not again.changes
    assert (again.described, list(again.skipped)) == (0, ["tit/bad.png"])


def test_an_engine_is_built_anew_where_every_picture_has_changed(root: Path, encoder: Encoder) -> None:
    pytest.importorskip("faiss")
    index_pictures(encoder, root / "P", root / "I", engine="faiss")
    for i, path in enumerate(sorted((root / "P").rglob("*.png"))):
        write_picture(path, 20 + 10 * i, 100 + i)
    done = index_pictures(encoder, root / "P", root / "I")
    assert (len(done.changes.changed), done.facts["engine"]["built"], done.facts["engine"]["unbuilt"]) == (12, 12, 0)


def test_a_folder_of_nothing_but_damage(root: Path, encoder: Encoder) -> None:
    (root / "Q/a").mkdir(parents=True)
    (root / "Q/a/1.png").write_text("x")
    done = index_pictures(encoder, root / "Q", root / "I", engine="exact")
    assert done.facts["vectors"] == 0
    assert done.skipped == {"a/1.png": "not a picture that Pillow can read"}


def test_links_and_paths_that_leave_the_folder_are_left_out(root: Path, encoder: Encoder) -> None:
    write_picture(root / "secret.png", 9, 9)
    (root / "P/owl/link.png").symlink_to(root / "secret.png")
    (root / "P/elsewhere").symlink_to(root / "Q")
    write_picture(root / "Q/x.png", 9, 8)
    found = pictures_of(root / "P")
    assert len(found.ids) == 12
    assert "2 pictures are left out, which lie outside" in found.notes[-1]
    (root / "P/t.csv").write_text("path,label\n../secret.png,owl\nowl/0.png,owl\n")
    assert pictures_of(root / "P/t.csv").ids == ("owl/0.png",)


def test_pictures_under_names_that_are_no_utf_8_are_left_out_and_named(root: Path, encoder: Encoder) -> None:
    strange = os.fsdecode(b"caf\xe9.png")
    try:
        write_picture(root / "P" / "owl" / strange, 40, 7)
    except OSError:
        pytest.skip("this disk knows no such names")
    done = index_pictures(encoder, root / "P", root / "I", engine="exact")
    assert done.notes == (
        r"1 picture is left out, which lies under a name that is not UTF-8 (rename it): owl/caf\udce9.png",
    )
    assert (done.facts["vectors"], dict(done.skipped)) == (12, {})


def test_pictures_without_folders_of_classes(root: Path) -> None:
    write_picture(root / "P/alone.png", 9, 9)
    found = pictures_of(root / "P")
    assert found.metadata["label"][found.ids.index("alone.png")] is None
    assert found.metadata["label"][found.ids.index("jay/3.png")] == "jay"
    with pytest.raises(FileNotFoundError, match="is not a folder of pictures"):
        pictures_of(root / "absent")
    with pytest.raises(ValueError, match="about.csv names none of the pictures below"):
        pictures_of(root / "P/owl", root / "about.csv")


def test_a_table_with_boxes(root: Path, encoder: Encoder) -> None:
    (root / "P/t.csv").write_text('path,label,box,n\nowl/0.png,owl,"0 0 20 20",1\nowl/0.png,left,"5 5 30 30",\n')
    index_pictures(encoder, root / "P/t.csv", root / "I", engine="exact")
    with Index.open(root / "I") as index:
        assert index.manifest.columns == {"id": "text", "label": "text", "path": "text", "n": "integer"}
        assert index.ids() == ["owl/0.png#0,0,20,20", "owl/0.png#5,5,30,30"]
        image = Image.open(root / "P/owl/0.png")
        found = index.search(encoder.embed([image.crop((5, 5, 30, 30))]), 1)
        assert found.ids == [["owl/0.png#5,5,30,30"]]
        draw_results(root / "f.png", index, image, found)
        draw_results(root / "f.html", index, image, found, "an_owl.png in I")
        page = (root / "f.html").read_text(encoding="utf-8")
        assert "<b>query</b> <br>" in page  # its name is in the title
        assert "<small>owl/<wbr>0.<wbr>png#5,<wbr>5,<wbr>30,<wbr>30</small>" in page  # not broken within a word
        assert "<h1>an_<wbr>owl.<wbr>png in I</h1>" in page


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["1", "-20", "", " 3 "], "integer"),
        (["1", "2.5", "1e3"], "real"),
        (["True", "false"], "boolean"),
        (["007", "12"], "text"),
        (["1_000", "2_5"], "text"),  # Python would read a number
        (["1234567890123456789", "2"], "text"),  # as a real number it would lose its last digits
        (["1.5", "12345678901234567890"], "text"),
        (["", None], "text"),
    ],
)
def test_the_kind_of_a_column_loses_nothing(cells: list[str | None], kind: str) -> None:
    assert kind_of(cells) == kind


def test_another_model_crop_precision_or_folder_is_refused(root: Path, encoder: Encoder) -> None:
    index_pictures(encoder, root / "P", root / "I", engine="exact")
    words = {
        "the vectors of this model were made with another crop than the index": Encoder.open("small_cnn", resize=48),
        "the vectors of this model were made with another model": Encoder.open("small_cnn", dim=7),
        "the vectors of this model were made with another precision": Encoder.open("small_cnn", precision="bf16"),
        'another crop than the index: {"flip": true': Encoder.open("small_cnn", flip=True),
        "another model and crop than the index": Encoder.open("small_cnn", image=48),
    }
    for said, other in words.items():
        with pytest.raises(ValueError, match=said):
            index_pictures(other, root / "P", root / "I")
    with pytest.raises(ValueError, match="is an index of the pictures in .*P, not in .*owl"):
        index_pictures(encoder, root / "P/owl", root / "I")
    result = called("index", "small_cnn", root / "P", "-o", root / "I", "--resize", 48, "--device", "cpu")
    assert result.exit_code == 1
    assert "error: the vectors of this model were made with another crop than the index" in result.stderr
    result = called("search", root / "I", root / "P/owl/0.png", "--model", "test_vit")
    assert result.exit_code == 1


def test_its_model_is_opened_again_with_what_it_was_opened_with(root: Path) -> None:
    torch.manual_seed(5)
    torch.save(Encoder.open("test_resnet", weights="random", image=32).model.backbone.state_dict(), root / "w.pth")
    made = Encoder.open("test_resnet", weights=str(root / "w.pth"), image=32, resize=40, flip=True, device="cpu")
    index_pictures(made, root / "P", root / "I", engine="exact")
    with Index.open(root / "I") as index:
        again = encoder_of(index)
        assert again.description() == made.description()
        assert index.search(again.embed([root / "P/jay/1.png"]), 1).ids == [["jay/1.png"]]
        (root / "w.pth").unlink()
        with pytest.raises(FileNotFoundError, match="was made by a model that cannot be opened any more"):
            encoder_of(index)


def test_the_commands(root: Path) -> None:
    arguments = ("index", "small_cnn", root / "P", "-o", root / "I", "--table", root / "about.csv", "--device", "cpu")
    result = called(*arguments, "--engine", "faiss", "--option", "kind=flat")
    assert result.exit_code == 0, result.output
    assert "columns    year (integer), place (text), seen (boolean), code (text)" in result.output
    assert "done       12 new" in result.output
    assert "engine     faiss: kind flat, recall@10 1.0" in result.output
    assert "done       12 the same" in called(*arguments).output
    result = called(*arguments, "--engine", "exact")
    assert "engine     exact: kind exact" in result.output
    query = root / "P/tit/3.png"
    result = called("search", root / "I", query, "--top", 3, "--filter", "label=tit,jay", "--filter", "year>2001")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert len(lines) == 3
    assert lines[0].split()[1:4] == ["1.0000", "tit", "tit/3.png"]
    assert all(line.split()[2] in ("tit", "jay") for line in lines)
    for name in ("f.html", "f.png"):
        more = ("--rerank", 5, "--expand", 3, "--whiten", "own:4", "--augment", 2, "--box", "1,2,30,20")
        result = called("search", root / "I", query, "-o", root / name, *more)
        assert result.exit_code == 0, result.output
        assert "refined    vectors whitened, every vector of the gallery augmented by its 2 nearest" in result.output
    page = (root / "f.html").read_text()
    assert page.count("data:image/png") == 11
    assert 'alt="tit/3.png"' in page
    assert Image.open(root / "f.png").size[0] > 900
    result = called("search", root / "I", query, "--filter", "year>3000")
    assert result.output == "nothing was found: no picture passes the filter\n"


@pytest.mark.parametrize("suffix", [".faiss", ".json"])
def test_a_damaged_engine_is_told_and_made_again_by_the_same_command(root: Path, suffix: str) -> None:
    pytest.importorskip("faiss")
    arguments = ("index", "small_cnn", root / "P", "-o", root / "I", "--device", "cpu")
    assert called(*arguments, "--engine", "faiss", "--option", "kind=flat").exit_code == 0
    (path,) = (root / "I" / "engine").glob(f"*{suffix}")
    path.write_bytes(path.read_bytes()[:-1])
    result = called("search", root / "I", root / "P/tit/3.png")
    assert result.exit_code == 1
    assert f"{path.name} is damaged" in result.output
    assert "`roadmap index` makes it again" in result.output
    result = called(*arguments)
    assert "done       12 the same" in result.output
    assert "engine     faiss: kind flat, recall@10 1.0" in result.output
    assert "tit/3.png" in called("search", root / "I", root / "P/tit/3.png", "--top", 1).output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["search", "absent", "q.png"], "absent holds no index; make one: roadmap index MODEL PICTURES -o absent"),
        (["search", "I", "q.png"], "q.png is not a picture that exists"),
        (["search", "I", "P/owl/0.png", "--box", "1,2,3"], "--box must be X,Y,W,H in pixels"),
        (["search", "I", "P/owl/0.png", "--box", "1,2,0,3"], "--box must have a width and a height above 0"),
        (["search", "I", "P/owl/0.png", "--box", "900,900,9,9"], "of 50 x 40. Choose another --box or picture"),
        (["search", "I", "about.csv"], "not a picture that Pillow can read. Search by another picture"),
        (["search", "I", "P/owl/0.png", "-o", "f.gif"], "--out f.gif must end in one of .html"),
        (["search", "I", "P/owl/0.png", "--whiten", "all"], "--whiten must be own, own:DIM or a file, got 'all'"),
        (["search", "I", "P/owl/0.png", "--rerank", "-1"], "--rerank must be 0 or more, got -1"),
        (["search", "I", "P/owl/0.png", "--filter", "yaer=1"], "there is no column 'yaer' among id, label"),
        (["index", "small_cnn", "absent", "-o", "J"], "absent is not a folder or a table that exists"),
        (["index", "small_cnn", "P", "-o", "J", "--option", "x"], "--option must be NAME=VALUE"),
        (["index", "small_cnn", "P", "-o", "J", "--engine", "fais"], "did you mean 'faiss'"),
        (["export", "small_cnn", "-o", "m.bin", "--data", "glyphs"], "--out m.bin must end in .onnx"),
    ],
)
def test_mistakes_are_told(
    root: Path, encoder: Encoder, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    index_pictures(encoder, "P", "I", engine="exact")
    result = called(*arguments)
    assert result.exit_code == 1
    assert said in result.stderr


def test_a_file_that_may_not_be_read_is_told(root: Path, encoder: Encoder) -> None:
    found = pictures_of(root / "P")
    (root / "P/owl/0.png").unlink()  # after the folder was listed
    done = index_pictures(encoder, found, root / "I", engine="exact")
    assert (dict(done.skipped), done.facts["vectors"]) == ({"owl/0.png": "No such file or directory"}, 11)


def test_a_name_does_not_steer_the_terminal(root: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    write_picture(root / "P" / "owl" / "\x1b]0;mine\x07\x9b31m.png", 40, 7)
    index_pictures(encoder, "P", "I", engine="exact")
    result = called("search", "I", "P/owl/0.png", "--top", 13)
    assert "owl/\\x1b]0;mine\\x07\\x9b31m.png" in result.stdout
    assert not {"\x1b", "\x07", "\x9b"} & set(result.stdout)
    missing = called("search", "I", "P/owl/\x1b[31m.png")
    assert "\\x1b[31m.png is not a picture that exists" in missing.stderr


def test_refined_search_is_what_evaluation_measures(root: Path, encoder: Encoder) -> None:
    """With a pool of everything: the same vectors, the same order."""
    index_pictures(encoder, root / "P", root / "I", engine="exact")
    refinement = Refinement("own:5", augment=2, expand=3)
    write_picture(root / "q.png", 100, 77)
    query = encoder.embed([root / "q.png"])
    with Index.open(root / "I") as index:
        gallery = torch.from_numpy(index.vectors_of(index.ids()))
        asked, held = refinement.vectors(query.vectors, gallery)
        right = [index.ids()[i] for i in (asked @ held.T)[0].argsort(descending=True).tolist()]
        found = refined_search(index, query, 12, refinement)
        assert found.ids[0] == right
        part = refined_search(index, query, 4, refinement, offset=3)
        assert (part.ids[0], part.scores[0]) == (right[3:7], found.scores[0][3:7])
        deeper = refined_search(index, query, 3, Refinement(expand=1), offset=4, pool=1)  # than its pool
        assert len(deeper.ids[0]) == 3
        plain = refined_search(index, query, 5)
        assert plain == index.search(query, 5)
        ranked = refined_search(index, query, 12, Refinement(rerank=6))
        assert sorted(ranked.ids[0][:6]) == sorted(index.search(query, 6).ids[0])
        assert ranked.scores[0] == sorted(ranked.scores[0], reverse=True)


def test_filters_as_typed() -> None:
    kinds = {"id": "text", "label": "text", "year": "integer", "size": "real", "seen": "boolean"}
    assert filter_of_texts([], kinds) == {}
    assert filter_of_texts(["label = owl"], kinds) == {"label": {"==": "owl"}}
    assert filter_of_texts(["year>=2020", "size<1.5"], kinds) == {"and": [{"year": {">=": 2020}}, {"size": {"<": 1.5}}]}
    assert filter_of_texts(["label=a,b"], kinds) == {"label": {"in": ["a", "b"]}}
    assert filter_of_texts(["label!=a,b"], kinds) == {"not": {"label": {"in": ["a", "b"]}}}
    assert filter_of_texts(['label="a,b"'], kinds) == {"label": {"==": "a,b"}}
    assert filter_of_texts(["year="], kinds) == {"year": {"==": None}}
    assert filter_of_texts(["seen=True"], kinds) == {"seen": {"==": True}}
    assert filter_of_texts(['{"or": []}'], kinds) == {"or": []}
    for text, said in {
        "label": "a filter is COLUMN=VALUE",
        "year=x": "column 'year' needs a whole number, got 'x'",
        "lable=x": "there is no column 'lable' among id, label, year, size, seen, did you mean 'label'",
        "{x": "is no JSON",
    }.items():
        with pytest.raises(ValueError, match=said):
            filter_of_texts([text], kinds)
