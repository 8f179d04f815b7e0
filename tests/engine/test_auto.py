"""What "auto" comes to: chosen by the pictures, the model and the hardware; what a person gave stays; all is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from roadmap.config.composition import settings_from
from roadmap.config.settings import DataSettings, HardwareSettings, MemorySettings, Settings
from roadmap.data import Records, dataset
from roadmap.engine import fit
from roadmap.engine.auto import cautions, resolve, unresolved
from roadmap.engine.forecast import plan
from roadmap.engine.splits import division_of, sampler_of, splits_of
from roadmap.models import hub as weights_hub
from roadmap.models.network import untrained_retriever
from roadmap.runs import Run

from .worlds import summary, tiny, write_classes


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that answers; which weights were asked for."""
    asked: list[str] = []
    monkeypatch.setattr("roadmap.engine.auto.hub_file", asked.append)
    return asked


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str) -> Path:
        raise weights_hub._unreachable(name, f"somewhere.org/{name}", "nobody answers")

    monkeypatch.setattr("roadmap.engine.auto.hub_file", unreachable)


PATHS = 100


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A folder with one picture of a size, which all pictures of a dataset can point to, by paths of their own."""
    root = tmp_path_factory.mktemp("sized")

    def folder(side: int) -> Path:
        if not (root / str(side)).is_dir():
            (root / str(side)).mkdir()
            Image.fromarray(np.zeros((side, side + 7, 3), np.uint8)).save(root / str(side) / "x.png")
            for number in range(PATHS):
                (root / str(side) / str(number)).symlink_to(".")
        return root / str(side)

    return folder


def records(folder: Path, sizes: list[int]) -> Records:
    """So many pictures of each class, all of them the same file: only its size is looked at."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    names = tuple(f"class {i}" for i in range(len(sizes)))
    paths = (f"{i // PATHS}/{i % PATHS}/x.png" for i in range(len(labels)))
    return Records("mine", folder, tuple(paths), labels, names)


def settings(**changed: Any) -> Settings:
    """Pictures of one's own on a CPU, all else left to the program, less what is changed."""
    made = Settings(data=DataSettings(name="folder", root="x"), hardware=HardwareSettings(device="cpu")).as_dict()
    for name, value in changed.items():
        part, _, field = name.rpartition("__")
        (made[part] if part else made)[field] = value
    return Settings.from_dict(made)


def chosen(given: Settings, whole: Records) -> tuple[Settings, Records, list[str]]:
    """As `fit` does it: divided, then chosen."""
    divided, drawn = division_of(whole)
    found, reasons = resolve(given, divided)
    assert unresolved(found) == []
    return found, divided, [*drawn, *reasons]


def trains(found: Settings, divided: Records) -> None:
    """What was chosen fits together: splits and batches can be made of it."""
    splits = splits_of(divided, found.data, found.select)
    batches = sampler_of(splits.train, found.data, 0).epoch_batches(0)
    assert batches.shape[1] == found.data.batch_size
    assert 0 <= batches.min() <= batches.max() < len(splits.train)
    assert splits.tests


def test_what_is_rarely_meant_is_warned_of(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = tiny(pictures, tmp_path / "run")
    assert cautions(usual) == []
    alike = tiny(pictures, tmp_path / "run", data__batch_size=4, data__per_class=4)
    (said,) = cautions(alike)
    assert said.startswith("WARNING: each batch of 4 pictures is of one class, so that none is compared with another")
    assert cautions(dataclasses.replace(alike, memory=MemorySettings(size=8))) == []
    sec = dataclasses.replace(usual, loss={"name": "sec", "of": "smoothap"})
    (said,) = cautions(sec)
    assert said.endswith("which model.normalise=true makes 1; give model.normalise=false")
    assert cautions(dataclasses.replace(sec, model=dataclasses.replace(sec.model, normalise=False))) == []
    fit(alike)
    assert "WARNING: each batch of 4 pictures is of one class" in capsys.readouterr().out
    assert "WARNING: each batch of 4 pictures is of one class" in str(plan(alike))


def test_where_nothing_is_left_open_nothing_is_looked_at(sized: Callable[[int], Path], hub: list[str]) -> None:
    found, divided, _ = chosen(settings(), records(sized(300), [5] * 30))
    hub.clear()
    nowhere = dataclasses.replace(divided, root=Path("/nowhere"))
    assert resolve(found, nowhere) == (found, [])
    assert hub == []
    again = Settings.from_dict(found.as_dict())  # as it is stored with the run
    assert resolve(again, nowhere) == (found, [])


def test_named_datasets_are_chosen_for_too(sized: Callable[[int], Path]) -> None:
    whole = dataclasses.replace(records(sized(300), [5] * 30), splits=np.full(150, "train"))
    found, _ = resolve(settings(data__name="cub", data__image=224, data__resize=512), whole)
    assert (found.model.name, found.data.image, found.data.side) == ("efficientnet_lite0", 224, 512)
    assert found.optim.lr == 1e-4


def test_glyphs_take_what_their_recipe_says() -> None:
    whole = dataclasses.replace(records(Path("/nowhere"), [12] * 40), splits=np.full(480, "train"))
    found, _ = resolve(settings_from([]), whole)
    assert found == dataclasses.replace(settings_from(["recipe=glyphs"]), recipe=None)


def test_many_classes(sized: Callable[[int], Path], hub: list[str]) -> None:
    whole = records(sized(300), [12] * 100)
    given = settings()
    found, divided, reasons = chosen(given, whole)
    train, test = (set(divided.split(name).labels.tolist()) for name in ("train", "test"))
    assert (len(train), len(test)) == (80, 20)
    assert not train & test
    assert hub == ["efficientnet_lite0"]
    assert (found.model.name, found.model.weights) == ("efficientnet_lite0", "hub")
    assert (found.data.image, found.data.resize, found.optim.lr) == (160, 182, 1e-4)
    assert (found.data.batch_size, found.data.per_class, found.data.batches) == (128, 4, 10)
    assert found.select.by == "held_out"
    assert found.epochs == 60  # 200,000 / 960 is more than enough
    assert reasons == [
        "test set: 20 of 100 classes, held out whole, so that it shows how new classes fare",
        "model.name=efficientnet_lite0 model.weights=hub model.layer_norm=False: pretrained and light, for a CPU",
        "optim.lr=0.0001: a convolutional network, to fine-tune",
        "data.image=160 data.resize=182 data.scale=[0.16, 1.0] data.side=256: sizes that suit efficientnet_lite0",
        "epochs=60: 960 training pictures",
        "data.per_class=4 data.batch_size=128: 80 training classes of 12 pictures (median)",
        "data.batches=10: so that an epoch is more than a few steps",
    ]
    assert given == settings()  # what came is not changed
    trains(found, divided)


def test_many_pictures_need_fewer_epochs(sized: Callable[[int], Path]) -> None:
    found, divided, _ = chosen(settings(), records(sized(300), [500] * 100))
    assert found.epochs == 5  # 200,000 / 40,000
    assert found.data.batches is None
    trains(found, divided)


def test_a_gpu_takes_a_vision_transformer(
    sized: Callable[[int], Path], hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found, _, _ = chosen(settings(hardware__device="auto"), records(sized(300), [12] * 30))
    assert hub == [found.model.name] == ["vit_small_patch14_dinov2"]
    assert (found.data.image, found.data.resize, found.optim.lr) == (224, 256, 1e-5)


def test_few_classes_give_pictures_to_the_test(sized: Callable[[int], Path]) -> None:
    whole = records(sized(300), [20, 20, 20, 10, 5, 4, 3])
    found, divided, reasons = chosen(settings(), whole)
    test = [int((divided.split("test").labels == label).sum()) for label in range(7)]
    assert test == [4, 4, 4, 2, 2, 2, 0]
    assert len(divided.split("train")) == 82 - 18
    assert found.select.by == "last"
    assert reasons[0].startswith("test set: a fifth of the pictures of each of the 7 classes, at least 2 (")
    assert "select.by=last: 7 training classes are too few to hold some out for choosing the epoch" in reasons
    assert (found.data.batch_size, found.data.per_class) == (28, 4)
    trains(found, divided)


def test_few_pictures_a_class(sized: Callable[[int], Path]) -> None:
    found, divided, _ = chosen(settings(), records(sized(300), [2] * 40))
    assert found.data.per_class == 2
    assert found.data.batch_size == 2 * 29  # 32 training classes less 3 held out
    trains(found, divided)


def test_classes_with_one_picture_are_not_counted_on(sized: Callable[[int], Path]) -> None:
    """19 classes that can train are too few to hold some out, though there are 49 folders."""
    found, divided, _ = chosen(settings(), records(sized(300), [8] * 19 + [1] * 30))
    assert found.select.by == "last"
    trains(found, divided)
    found, divided, reasons = chosen(settings(), records(sized(300), [8] * 40 + [1] * 60))
    assert reasons[0].startswith("test set: 8 of 40 classes")
    assert not len(divided.split("test").singletons())
    trains(found, divided)


FEW, MANY = (2, 3, 4, 5, 6, 19), (20, 21, 24, 26, 30, 50, 200)
SHAPES = [(c, p) for c in FEW for p in (4, 5, 30)] + [(c, p) for c in MANY for p in (2, 3, 4, 30)]


@pytest.mark.parametrize(("classes", "pictures"), SHAPES)
def test_whatever_is_chosen_fits_together(classes: int, pictures: int, sized: Callable[[int], Path]) -> None:
    found, divided, _ = chosen(settings(), records(sized(40), [pictures] * classes))
    trains(found, divided)


def test_too_few_to_test_on(sized: Callable[[int], Path]) -> None:
    with pytest.raises(
        ValueError, match="every one of its 5 classes has fewer than 4 pictures, too few to test on; add"
    ):
        chosen(settings(), records(sized(300), [3] * 5))


def test_one_class(sized: Callable[[int], Path]) -> None:
    with pytest.raises(ValueError, match="holds 1 class; retrieval needs at least 2, each in a folder"):
        chosen(settings(), records(sized(300), [30]))


def test_no_class_with_two_pictures(sized: Callable[[int], Path]) -> None:
    with pytest.raises(ValueError, match="every one of its 50 classes has fewer than 4 pictures, too few to test on"):
        chosen(settings(), records(sized(300), [1] * 50))
    alone = records(sized(300), [1] * 50)
    alone = dataclasses.replace(alone, splits=np.full(50, "train"))
    with pytest.raises(
        ValueError, match="mine: no training class has two or more pictures; a picture is compared with"
    ):
        chosen(settings(), alone)


@pytest.mark.parametrize(("side", "image"), [(24, 32), (48, 32), (49, 64), (112, 64)])
def test_small_pictures_take_the_small_network(
    side: int, image: int, sized: Callable[[int], Path], hub: list[str]
) -> None:
    found, divided, reasons = chosen(settings(), records(sized(side), [12] * 30))
    assert (found.model.name, found.model.weights) == ("small_cnn", "random")
    assert (found.data.image, found.data.resize, found.data.side) == (image, image, image)
    assert hub == []
    assert any(f"half of the pictures have a shorter side of {side} pixels or less" in reason for reason in reasons)
    trains(found, divided)


def test_without_a_hub_a_small_network_learns_and_it_warns(sized: Callable[[int], Path], no_hub: None) -> None:
    whole = records(sized(300), [12] * 30)
    found, divided, _ = chosen(settings(), whole)
    assert (found.model.name, found.model.weights, found.data.image) == ("small_cnn", "random", 96)
    warning = resolve(settings(), divided)[1][0]  # comes first
    assert warning.startswith("WARNING: no pretrained network can be had here, so a small one learns from scratch and")
    assert (
        "less: the weights of efficientnet_lite0 could not be fetched (nobody answers). For a pretrained one, "
        in warning
    )
    assert warning.count("somewhere.org") == 1  # what to do is said once
    assert "\n    curl -L -o efficientnet_lite0.safetensors somewhere.org/efficientnet_lite0\n" in warning
    assert warning.endswith(
        "\n    roadmap train data=folder data.root=x model.name=efficientnet_lite0 "
        "model.weights=efficientnet_lite0.safetensors"
    )
    trains(found, divided)


RATES = {
    "vit_small_patch14_dinov2": 1e-5,
    "vit_small_patch16_224": 1e-5,
    "deit_small_distilled_patch16_224": 1e-5,
    "swin_tiny_patch4_window7_224": 1e-5,
    "efficientnet_lite0": 1e-4,
    "resnet50": 1e-4,
    "convnext_tiny": 1e-4,
}


@pytest.mark.parametrize("name", RATES)
def test_the_rate_follows_the_model_and_not_the_machine(
    name: str, sized: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = records(sized(300), [12] * 30)
    on_cpu, _, _ = chosen(settings(model__name=name), whole)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    on_gpu, _, _ = chosen(settings(model__name=name, hardware__device="auto"), whole)
    assert on_cpu.optim == on_gpu.optim
    assert on_cpu.optim.lr == RATES[name]
    assert on_cpu.model == on_gpu.model


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("vit_small_patch14_dinov2", 154),
        ("vit_small_patch16_224", 160),
        ("efficientnet_lite0", 160),
        ("resnet50", 160),
        ("efficientformer_l1", 224),  # takes no other size
    ],
)
def test_pictures_fit_the_patches_of_the_model(name: str, image: int, sized: Callable[[int], Path]) -> None:
    found, _, _ = chosen(settings(model__name=name), records(sized(300), [12] * 30))
    assert (found.data.image, found.data.resize) == (image, image * 8 // 7)
    untrained_retriever(found.model, found.data.image)  # refuses what it cannot take


def test_from_scratch_pictures_fit_the_patches_too(sized: Callable[[int], Path]) -> None:
    given = settings(model__name="vit_small_patch14_dinov2", model__weights="random")
    found, _, _ = chosen(given, records(sized(40), [12] * 30))
    assert found.data.image == 28
    assert found.optim.lr == 1e-3


def test_what_was_given_stays(sized: Callable[[int], Path], hub: list[str]) -> None:
    given = {
        "model__name": "resnet18",
        "model__weights": "mine.pth",
        "data__image": 128,
        "epochs": 7,
        "optim__lr": 0.5,
        "data__batch_size": 12,
        "data__per_class": 3,
        "data__batches": 2,
        "select__by": "last",
    }
    found, _, reasons = chosen(settings(**given), records(sized(300), [12] * 30))
    for name, value in given.items():
        part, _, field = name.rpartition("__")
        assert getattr(getattr(found, part) if part else found, field) == value, name
    assert not any(f"{name.replace('__', '.')}=" in reason for name in given for reason in reasons)
    assert hub == []  # the weights are there, nothing is downloaded


def test_a_model_by_name_alone_gets_its_published_weights(sized: Callable[[int], Path], no_hub: None) -> None:
    """If they cannot be had, that is an error of its own, not a reason to take another model."""
    found, _, _ = chosen(settings(model__name="resnet18"), records(sized(300), [12] * 30))
    assert (found.model.name, found.model.weights, found.data.image) == ("resnet18", "hub", 160)


@pytest.mark.parametrize(
    "given",
    [
        {"model__name": "small_cnn"},
        {"model__weights": "random"},
        {"model__name": "resnet18", "model__weights": "random"},
    ],
)
def test_what_starts_at_random_is_trained_from_scratch(
    given: dict[str, str], sized: Callable[[int], Path], hub: list[str]
) -> None:
    found, divided, reasons = chosen(settings(**given), records(sized(300), [12] * 30))
    name = given.get("model__name", "small_cnn")
    assert (found.model.name, found.model.weights) == (name, "random")
    assert found.model.layer_norm == (name == "small_cnn")
    rate = 1e-2 if name == "small_cnn" else 1e-3
    assert (found.data.image, found.optim.lr, found.optim.schedule) == (96, rate, "cosine")
    assert hub == []
    assert any("from scratch" in reason for reason in reasons)
    trains(found, divided)


@pytest.mark.parametrize("classes", [6, 30])
@pytest.mark.parametrize("per_class", [3, 5, 8])
def test_a_given_number_of_pictures_per_class_decides_the_batch(
    classes: int, per_class: int, sized: Callable[[int], Path]
) -> None:
    found, divided, _ = chosen(settings(data__per_class=per_class), records(sized(40), [12] * classes))
    assert found.data.per_class == per_class
    assert found.data.batch_size <= 128
    assert found.data.batch_size % per_class == 0
    trains(found, divided)


@pytest.mark.parametrize("classes", [4, 6, 12])
def test_holding_out_on_demand_leaves_batches_to_make(classes: int, sized: Callable[[int], Path]) -> None:
    found, divided, _ = chosen(settings(select__by="held_out"), records(sized(40), [12] * classes))
    assert found.select.by == "held_out"
    trains(found, divided)


def test_splits_of_its_own_are_kept(tmp_path: Path) -> None:
    for name, classes in (("train", range(4)), ("val", range(4, 6)), ("test", range(6, 8))):
        write_classes(tmp_path / "own" / name, classes)
    whole = dataset("folder", tmp_path / "own")
    found, divided, reasons = chosen(settings(), whole)
    assert divided is whole
    assert not any("test set" in reason for reason in reasons)
    assert found.select.by == "held_out"  # there is a split to choose on
    assert found.data.batch_size == 16
    trains(found, divided)


def test_only_a_test_set(tmp_path: Path) -> None:
    write_classes(tmp_path / "own" / "test", range(4))
    with pytest.raises(ValueError, match=r"own has no training pictures: its splits are \['test'\]"):
        fit(settings(data__root=str(tmp_path / "own")))


def test_the_draw_is_always_the_same(sized: Callable[[int], Path]) -> None:
    for sizes in ([12] * 30, [12] * 5):
        one, other = (chosen(settings(), records(sized(40), sizes))[1].splits for _ in range(2))
        assert (one == other).all()


def test_nothing_can_be_opened(tmp_path: Path) -> None:
    write_classes(tmp_path / "own", range(5))
    for path in (tmp_path / "own").rglob("*.png"):
        path.write_bytes(b"no picture")
    with pytest.raises(
        ValueError, match="none of 30 pictures below .* could be opened; run: roadmap data check folder"
    ):
        chosen(settings(), dataset("folder", tmp_path / "own"))


@pytest.mark.parametrize(("classes", "each"), [(6, 8), (24, 5)])
def test_a_folder_just_works(
    classes: int,
    each: int,
    tmp_path: Path,
    no_hub: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a folder to a model with nothing but its name; two epochs are enough to see it run."""
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    write_classes(tmp_path / "own", range(classes), each)
    asked = Settings(
        data=DataSettings(name="folder", root=str(tmp_path / "own")),
        hardware=HardwareSettings(device="cpu", threads=1),
        out=str(tmp_path / "runs"),
        epochs=1,
    )
    folder = fit(asked)
    assert unresolved(Run.open(folder).settings()) == []  # what was chosen is stored: nothing chooses again
    assert folder.parent == tmp_path / "runs"
    assert folder.name.endswith("_folder_small_cnn_roadmap_seed0")
    found = summary(folder)
    assert found["steps"] == 10
    assert found["after"]["own"]["queries"] == (6 * 2 if classes == 6 else 3 * 5)  # as the lots of 24 names fall
    assert found["chosen by"] == ("last" if classes == 6 else "held_out")
    said = capsys.readouterr().out
    assert "  - test set: " in said
    assert "  - data.image=32 data.resize=32 data.scale=[0.5, 1.0] data.side=32: sizes that suit small_cnn" in said


def test_the_warning_is_the_first_thing_said(
    tmp_path: Path, no_hub: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    write_classes(tmp_path / "own", range(6), side=130)
    asked = settings(data__root=str(tmp_path / "own"), epochs=1, data__batches=1)
    fit(dataclasses.replace(asked, out=str(tmp_path / "runs")))
    said = capsys.readouterr().out
    assert said.startswith("WARNING: no pretrained network can be had here")
    assert said.count("WARNING") == 1
    assert f"roadmap train data=folder data.root={tmp_path / 'own'} model.name=efficientnet_lite0 " in said
