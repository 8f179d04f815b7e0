"""Which pictures train, which choose, which test; what is left out and said; where they are read from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from roadmap.config.settings import DataSettings, SelectSettings
from roadmap.data import UNLABELLED, Records
from roadmap.data.pictures.images import PictureError
from roadmap.engine import fit
from roadmap.engine.faults import RunError
from roadmap.engine.pictures import Pictures
from roadmap.engine.splits import Splits, division_of, records_of, sampler_of, splits_of
from roadmap.models import retriever

from .worlds import job, last, summary, tiny, write_classes


def records(sizes: dict[int, int], split: str = "train", **more: object) -> Records:
    """Of the named split, so many pictures of each label; with four test pictures of two other classes."""
    labels = [label for label, count in sizes.items() for _ in range(count)]
    top = max(labels) + 1
    every = [*labels, top, top, top + 1, top + 1]
    splits = [split] * len(labels) + ["test"] * 4
    paths = tuple(f"{i}.png" for i in range(len(every)))
    names = tuple(f"class {i}" for i in range(top + 2))
    return Records("mine", Path("/none"), paths, np.asarray(every), names, splits=np.asarray(splits), **more)  # type: ignore[arg-type]


def split(of: Records, by: str = "held_out", fraction: float = 0.25) -> Splits:
    return splits_of(of, DataSettings(name="folder", root="x"), SelectSettings(by=by, fraction=fraction))


def paths(of: Records | None) -> set[str]:
    assert of is not None
    return set(of.paths)


def class_of(path: str, of: Records) -> int:
    return int(of.labels[of.paths.index(path)])


def test_no_class_is_in_two_of_the_three() -> None:
    whole = records(dict.fromkeys(range(8), 3))
    splits = split(whole)
    parts = [{class_of(p, whole) for p in paths(part)} for part in (splits.train, splits.val, whole.split("test"))]
    assert [len(classes) for classes in parts] == [4, 4, 2]  # as the lots of the names fall
    assert len(set.union(*parts)) == 10
    assert len(splits.train) + len(splits.val or ()) == 24  # nothing is lost
    (test,) = splits.tests
    assert test.split("test").paths == whole.split("test").paths
    assert splits.everything.split("val").paths == splits.val.paths  # type: ignore[union-attr]
    assert splits.everything.paths == whole.paths
    assert splits.val is not None
    assert splits.val.split_names() == ("test",)  # ready for the evaluation of a test set


def test_the_draw_of_held_out_classes_does_not_depend_on_the_seed_of_the_run() -> None:
    whole = records(dict.fromkeys(range(40), 2))
    assert paths(split(whole).val) == paths(split(whole).val)
    assert len({class_of(p, whole) for p in paths(split(whole, fraction=0.1).val)}) == 3  # about a tenth


@pytest.mark.parametrize("by", ["last", "test"])
def test_nothing_is_held_out_where_nothing_is_chosen_on_it(by: str) -> None:
    splits = split(records(dict.fromkeys(range(4), 2)), by)
    assert splits.val is None
    assert len(splits.train) == 8


def test_a_validation_split_of_its_own_is_used() -> None:
    whole = records(dict.fromkeys(range(6), 2))
    own = whole.splits.copy()  # type: ignore[union-attr]
    own[:4] = "val"
    whole = dataclasses.replace(whole, splits=own)
    assert paths(split(whole).val) == {"0.png", "1.png", "2.png", "3.png"}
    assert len(split(whole).train) == 8


def test_labels_are_numbered_without_gaps_and_names_follow() -> None:
    train = split(records({3: 2, 11: 3, 40: 2, 7: 2}), "last").train
    assert train.labels.tolist() == [0, 0, 2, 2, 2, 3, 3, 1, 1]
    assert train.class_names == ("class 3", "class 7", "class 11", "class 40")


def test_classes_with_one_picture_are_left_out_and_it_is_said() -> None:
    splits = split(records({0: 1, 1: 2, 2: 1, 3: 2}), "last")
    assert paths(splits.train) == {"1.png", "2.png", "4.png", "5.png"}
    assert splits.notes == ("2 training classes with a single picture are left out",)
    assert split(records({0: 2, 1: 2}), "last").notes == ()


def test_unlabelled_pictures_neither_train_nor_choose() -> None:
    whole = records(dict.fromkeys(range(8), 3))
    labels = whole.labels.copy()
    labels[:9] = UNLABELLED
    whole = dataclasses.replace(whole, labels=labels)
    for fraction in np.linspace(0.1, 0.6, 6):
        splits = split(whole, fraction=fraction)
        unlabelled = {f"{i}.png" for i in range(9)}
        assert not unlabelled & (paths(splits.train) | paths(splits.val))


def test_what_chooses_has_two_pictures_a_class() -> None:
    """A held-out class with a single picture has nothing to find: it must not be what the epoch is chosen on."""
    whole = records({label: 1 if label % 4 else 3 for label in range(40)})
    splits = split(whole, fraction=0.2)
    assert splits.val is not None
    assert len(np.unique(splits.val.labels)) == 2  # a fifth of the 10 classes that have pictures to spare
    assert not len(splits.val.singletons())
    assert "30 training classes with a single picture are left out" in splits.notes


def test_too_few_classes() -> None:
    with pytest.raises(
        ValueError, match="mine has 1 training class with two or more pictures; learning to compare needs"
    ):
        split(records({0: 5, 1: 1}), "last")
    with pytest.raises(ValueError, match="mine has 0 training classes with two or more"):
        split(records({0: 1}), "last")
    with pytest.raises(ValueError, match="mine has 3 training classes, too few to hold some out .* use select.by=last"):
        split(records({0: 2, 1: 2, 2: 2}))
    assert len(np.unique(split(records(dict.fromkeys(range(4), 2)), fraction=0.01).val.labels)) == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_what_is_held_out_leaves_classes_to_learn(fraction: float) -> None:
    splits = split(records(dict.fromkeys(range(4), 2)), fraction=fraction)
    assert splits.val is not None
    assert [len(np.unique(part.labels)) for part in (splits.train, splits.val)] == [2, 2]


def test_a_class_that_is_added_moves_no_other() -> None:
    """Neither in a test set that is drawn nor among the classes that choose the epoch."""
    for sizes in ([4] * 40, [8] * 6):
        names = [f"class {i}" for i in range(len(sizes))]
        few, more = (division_of(undivided(classes, sizes[0]))[0] for classes in (names, ["a new one", *names, "zz"]))
        for part in ("train", "test"):
            assert set(few.split(part).paths) <= set(more.split(part).paths)
        if len(sizes) == 40:
            one, other = (split(found, fraction=0.1) for found in (few, more))
            assert paths(one.val) <= paths(other.val)
            assert paths(one.train) <= paths(other.train)


def undivided(classes: list[str], each: int) -> Records:
    """Pictures without splits, in the order in which a folder would be read."""
    ordered = sorted(classes)
    names = tuple(f"{name}/{i}.png" for name in ordered for i in range(each))
    return Records("mine", Path("/none"), names, np.repeat(np.arange(len(ordered)), each), tuple(ordered))


def test_choosing_on_a_test_set_needs_one() -> None:
    whole = records(dict.fromkeys(range(4), 2))
    train = whole.split("train")
    with pytest.raises(ValueError, match="select.by=test: mine has no test pictures; give data.test_sets, or use"):
        split(train, "test")
    assert split(train, "last").tests == ()


def test_no_training_pictures() -> None:
    with pytest.raises(
        ValueError, match=r"mine has no training pictures: its splits are \['query', 'test'\]|\['test', 'query'\]"
    ):
        split(records({0: 2, 1: 2}, split="query"))
    bare = dataclasses.replace(records({0: 2, 1: 2}), splits=None)
    with pytest.raises(ValueError, match="mine has no training pictures: its splits are not given"):
        split(bare)


def test_an_empty_or_missing_dataset(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no pictures below .*; expected ROOT/CLASS/picture.jpg"):
        records_of(DataSettings(name="folder", root=str(tmp_path)))
    with pytest.raises(ValueError, match="data.root is missing: give data.root=FOLDER. .*CUB"):
        records_of(DataSettings(name="cub"))
    with pytest.raises(ValueError, match="unknown dataset 'cubs', did you mean 'cub'?"):
        records_of(DataSettings(name="cubs", root=str(tmp_path)))


def test_glyphs_need_no_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("roadmap.data.datasets.glyphs.glyph_records", lambda root: ("drawn", root))
    assert records_of(DataSettings(name="glyphs")) == ("drawn", None)


def test_other_test_sets_take_the_place_of_its_own(pictures: Path, tmp_path: Path) -> None:
    other = write_classes(tmp_path / "other" / "test", range(3)).parent
    data = DataSettings(name="folder", root=str(pictures), test_sets={"folder": str(other)})
    (test,) = splits_of(records_of(data), data, SelectSettings()).tests
    assert test.root == other


def test_a_test_set_without_splits_is_all_test(pictures: Path, tmp_path: Path) -> None:
    other = write_classes(tmp_path / "other", range(3))
    data = DataSettings(name="folder", root=str(pictures), test_sets={"folder": str(other)})
    (test,) = splits_of(records_of(data), data, SelectSettings()).tests
    assert len(test.evaluation()[0]) == 18


def test_samplers() -> None:
    train = split(records(dict.fromkeys(range(8), 4)), "last").train
    data = DataSettings(name="folder", root="x", batch_size=8, per_class=2, batches=None)
    assert sampler_of(train, data, 0).batches == 4
    assert sampler_of(train, dataclasses.replace(data, batches=7), 0).batches == 7
    one, other = (sampler_of(train, data, seed).epoch_batches(0).tolist() for seed in (0, 1))
    assert one != other
    with pytest.raises(ValueError, match=r"data.batch_size=9 must be a multiple of data.per_class \(2\)"):
        sampler_of(train, dataclasses.replace(data, batch_size=9), 0)
    with pytest.raises(
        ValueError, match="needs 9 classes, there are 8; use a smaller batch or more pictures per class"
    ):
        sampler_of(train, dataclasses.replace(data, batch_size=18), 0)


def test_pairs_of_categories() -> None:
    categories = np.asarray([0] * 16 + [1] * 16 + [0] * 4)
    train = split(records(dict.fromkeys(range(8), 4), categories=categories), "last").train
    data = DataSettings(sampler="category_pairs", batch_size=8, per_class=2, batches_per_pair=3)
    sampler = sampler_of(train, data, 0)
    assert sampler.batches == 3
    assert all(set(train.categories[batch[:4]]) == {0} for batch in sampler.epoch_batches(0))  # type: ignore[index]
    with pytest.raises(ValueError, match=r"data.batch_size=10 must be a multiple of 2 x data.per_class \(4\): half a"):
        sampler_of(train, dataclasses.replace(data, batch_size=10), 0)
    without = split(records(dict.fromkeys(range(8), 4)), "last").train
    with pytest.raises(ValueError, match="mine has no categories; use data.sampler=m_per_class"):
        sampler_of(without, data, 0)


# ---------------------------------------------------------------- where they are read from


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset and a cache that no other test has seen."""
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    write_classes(tmp_path / "own" / "train", range(6))
    return write_classes(tmp_path / "own" / "test", range(6, 8)).parent


def test_a_run_says_what_it_reads(own: Path) -> None:
    """Whether a pack is made, used or left alone is decided, and tested, with the packs."""
    model = retriever(tiny(Path("x"), Path("y")).model, 16)
    for choice, said in (("yes", "read from a pack of side 20"), ("no", "decoded each time, resized to 20")):
        made = Pictures(tiny(own, Path("y"), data__pack=choice), model, torch.device("cpu"), quiet=True)
        assert said in made.open_pack(records_of(made.settings.data))


def test_the_same_crops_with_and_without_a_pack(own: Path, tmp_path: Path) -> None:
    """A pack of the pictures' own size holds the same pixels; a run on it differs by rounding alone."""
    found = []
    for choice in ("no", "yes"):
        made = job(tiny(own, tmp_path / choice, data__pack=choice))
        sampler = sampler_of(made.splits.train, made.settings.data, 0)
        found.append(list(made.pictures.training(made.splits.train, sampler)))
        made.run.close()
    assert len(found[0]) == len(found[1]) == 2
    for decoded, packed in zip(*found, strict=True):
        assert torch.equal(decoded.indices, packed.indices)
        assert torch.equal(decoded.labels, packed.labels)
        torch.testing.assert_close(decoded.images, packed.images, rtol=0, atol=1e-5)


def test_pictures_are_cut_as_the_settings_say() -> None:
    model = retriever(tiny(Path("x"), Path("y")).model, 16)
    settings = tiny(Path("x"), Path("y"), data__resize=18, data__flip=0.25, data__ratio=[0.5, 2.0])
    made = Pictures(settings, model, torch.device("cpu"))
    assert (made.random.size, made.random.scale, made.random.ratio, made.random.flip) == (
        16,
        (0.5, 1.0),
        (0.5, 2.0),
        0.25,
    )
    assert (made.centre.size, made.centre.resize) == (16, 18)
    for crop in (made.random, made.centre):
        assert (crop.mean, crop.std) == (model.mean, model.std)
    small = tiny(Path("x"), Path("y"), data__resize=8)
    assert Pictures(small, model, torch.device("cpu")).centre.resize == 16  # never smaller than what is cut out


def test_two_datasets_in_one_folder_have_packs_of_their_own(own: Path, tmp_path: Path) -> None:
    """Two tables side by side: same root, other pictures."""
    every = sorted(p.relative_to(own).as_posix() for p in own.rglob("*.png"))
    for name, part in (("train", "train"), ("test", "test")):
        rows = [f"{p},{Path(p).parent.name},{part}" for p in every if p.startswith(part)]
        (own / f"{name}.csv").write_text("\n".join(["path,label,split", *rows]))
    settings = tiny(
        own / "train.csv", tmp_path / "run", data__name="table", data__test_sets={"table": str(own / "test.csv")}
    )
    settings.epochs = 1
    folder = fit(settings, quiet=True)
    assert summary(folder)["after"]["test"]["queries"] == 12


def damaged(root: Path) -> Path:
    """One picture of a training class and one of a test class are no pictures."""
    for path in (root / "train" / "c00" / "2.png", root / "test" / "c06" / "1.png"):
        path.write_bytes(b"no picture")
    return root


@pytest.mark.parametrize("choice", ["yes", "no"])
def test_broken_pictures_are_skipped_and_counted(own: Path, tmp_path: Path, choice: str) -> None:
    settings = tiny(
        damaged(own), tmp_path / "run", data__on_error="skip", data__pack=choice, data__batches=6, select__by="last"
    )
    settings.data.workers = 0 if choice == "no" else 1
    settings.epochs = 2
    folder = fit(settings, quiet=True)
    found = summary(folder)
    assert found["after"]["own"]["queries"] == 11
    assert found["skipped pictures"] == 2


@pytest.mark.parametrize("choice", ["yes", "no"])
def test_broken_pictures_stop_a_run_that_was_not_told_to_skip(own: Path, tmp_path: Path, choice: str) -> None:
    settings = tiny(damaged(own), tmp_path / "run", data__pack=choice)
    settings.data.workers = 0 if choice == "no" else 1
    with pytest.raises((PictureError, RunError), match=r"(c00/2|c06/1).png"):
        fit(settings, quiet=True)


def test_a_category_pairs_run(tmp_path: Path) -> None:
    for category in ("birds", "cars"):
        write_classes(tmp_path / "nested" / "train" / category, range(4))
    write_classes(tmp_path / "nested" / "test" / "birds", range(4, 6))
    settings = tiny(
        tmp_path / "nested",
        tmp_path / "run",
        data__sampler="category_pairs",
        data__batches_per_pair=2,
        select__by="last",
        epochs=2,
    )
    folder = fit(settings, quiet=True)
    assert last(folder)["step"] == 4


@pytest.mark.parametrize(
    ("squeeze", "random", "centre"), [("no", False, False), ("test", False, True), ("all", True, True)]
)
def test_which_pictures_are_squeezed(squeeze: str, random: bool, centre: bool) -> None:
    settings = tiny(Path("x"), Path("y"), data__squeeze=squeeze)
    pictures = Pictures(settings, retriever(settings.model, 16), torch.device("cpu"), quiet=True)
    assert (pictures.random.squeeze, pictures.centre.squeeze) == (random, centre)


def test_a_run_goes_on_with_the_pixels_that_it_began_with(own: Path, tmp_path: Path) -> None:
    """A compressed pack changes them: which of the two was read is kept with the run."""
    states = {}
    for choice in ("yes", "compressed"):
        made = job(tiny(own, tmp_path / choice, data__pack=choice, data__side=16)).pictures
        states[choice] = made.state_dict()
        made.load_state_dict(states[choice])
    lossless = job(tiny(own, tmp_path / "files", data__pack="no", data__side=16)).pictures
    lossless.load_state_dict(states["yes"])
    lossless.load_state_dict({"skipped": {}})  # of a run from before there were compressed packs
    with pytest.raises(
        ValueError, match=r"began with a compressed pack \(.* quality 95\), and now there are the pixels"
    ):
        lossless.load_state_dict(states["compressed"])
    with pytest.raises(ValueError, match=r"began with the pixels of the files, and now there are a compressed pack \("):
        made.load_state_dict(states["yes"])


def test_a_run_goes_on_where_its_compressed_pack_has_come_to_hold_other_pictures(own: Path, tmp_path: Path) -> None:
    compressed = {"data__pack": "compressed", "data__side": 8}
    state = job(tiny(own, tmp_path / "run", **compressed)).pictures.state_dict()
    write_classes(own / "test", range(40, 42))
    later = job(tiny(own, tmp_path / "other", **compressed)).pictures
    assert later.state_dict()["lossy"] != state["lossy"]  # as many more were encoded again
    later.load_state_dict(state)
