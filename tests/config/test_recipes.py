"""The recipes: they say what the paper and its released commands say, and each of them trains."""

from __future__ import annotations

import json
import math
import pickle
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roadmap.config.catalogue import Catalogue
from roadmap.config.composition import composed
from roadmap.config.request import understood
from roadmap.config.settings import Settings
from roadmap.data.datasets import SOURCES
from roadmap.engine import fit
from roadmap.losses.named import NAMES
from tests.data import layouts

CATALOGUE = Catalogue()
RECIPES = list(CATALOGUE.options("recipe"))
DOCUMENT = (Path(__file__).parents[2] / "docs/recipes.md").read_text(encoding="utf-8")
PAPER = [name for name in RECIPES if re.search("resnet50|deit", name)]

# The released commands: optimiser, rate, rate of the projection, weight decay, milestones, epochs, batch, picture,
# dimensions, pooling, LayerNorm. iNaturalist's DeiT has none; its epochs and batch are the paper's.
RELEASED: dict[str, tuple[Any, ...]] = {
    "cub_resnet50": ("adam", 1e-6, None, 4e-4, [], 200, 128, 256, 512, "max", True),
    "cub_deit": ("adamw", 1e-6, None, 5e-4, [], 150, 128, 224, None, "auto", False),
    "sop_resnet50": ("adam", 1e-5, 2e-5, 1e-4, [30, 70], 100, 128, 256, 512, "avg", False),
    "sop_deit": ("adamw", 1e-5, None, 5e-4, [25, 50], 75, 128, 224, None, "auto", False),
    "inaturalist_resnet50": ("adam", 1e-5, 2e-5, 4e-4, [30, 70], 90, 384, 224, 512, "avg", False),
    "inaturalist_deit": ("adamw", 1e-5, None, 5e-4, [30, 70], 90, 384, 224, None, "auto", False),
}
# The paper's own words on sections 4.1 and B, where they differ from the released commands.
IN_WORDS: dict[str, tuple[Any, ...]] = {
    "cub_resnet50_b64": ("adam", 1e-6, None, 4e-4, [], 200, 64, 224, 512, "avg", False),
    "cub_deit_b128": ("adamw", 1e-6, None, 5e-4, [], 100, 128, 224, None, "auto", False),
    "sop_resnet50_b64": ("adam", 1e-5, 2e-5, 1e-4, [30, 70], 100, 64, 224, 512, "avg", False),
    "sop_deit_b128": ("adamw", 1e-5, None, 5e-4, [25, 50], 75, 128, 224, None, "auto", False),
    "inaturalist_resnet50_b64": ("adam", 1e-5, 2e-5, 4e-4, [30, 70], 90, 64, 224, 512, "avg", False),
    "inaturalist_deit_b128": ("adamw", 1e-5, None, 5e-4, [30, 70], 90, 128, 224, None, "auto", False),
}

# Rows of the paper's tables as they are printed: CUB, SOP, iNaturalist; R@1 & mAP@R each.
TABLES = {
    ("Table 1", "resnet50_b64"): """
        fastap & 58.9 & 22.9 & 78.2 & 51.3 & 53.5 & 19.6
        softbinap & 61.2 & 24.0 & 80.1 & 53.5 & 56.6 & 20.1
        blackboxap & 62.6 & 23.9 & 80.0 & 53.1 & 52.3 & 15.2
        smoothap & 62.1 & 23.9 & 80.9 & 54.6 & 59.8 & 20.7
        roadmap & 64.2 & 25.3 & 82.0 & 56.5 & 64.5 & 25.1""",
    ("Table 3", "resnet50_b64"): """
        supap & 62.9 & 24.6 & 81.4 & 55.3 & 61.2 & 21.3
        roadmap & 64.2 & 25.3 & 82.0 & 56.5 & 64.5 & 25.1""",
    ("Table 5", "resnet50_b128"): """
        fastap & 61.28+-0.37 & 24.11+-0.16 & 78.97+-0.05 & 52.23+-0.09 & 57.23+-0.05 & 22.17+-0.05
        softbinap & 61.70+-0.10 & 24.29+-0.16 & 80.30+-0.21 & 53.69+-0.27 & 60.88+-0.06 & 23.22+-0.05
        blackboxap & 61.96+-0.28 & 23.83+-0.14 & 80.97+-0.07 & 54.49+-0.15 & 59.53+-0.12 & 19.62+-0.02
        smoothap & 62.45+-0.48 & 24.32+-0.1 & 81.13+-0.05 & 54.74+-0.16 & 64.48+-0.05 & 24.33+-0.07
        roadmap & 64.05+-0.51 & 25.27+-0.12 & 82.20+-0.09 & 56.64+-0.09 & 68.15+-0.10 & 27.01+-0.10""",
    ("Table 5", "deit_b128"): """
        fastap & 73.42+-0.22 & 31.96+-0.06 & 82.92+-0.07 & 59.06+-0.03 & 62.18+-0.07 & 25.48+-0.10
        softbinap & 74.84+-0.11 & 33.57+-0.08 & 84.09+-0.05 & 60.53+-0.07 & 65.97+-0.13 & 27.57+-0.09
        blackboxap & 75.45+-0.22 & 33.97+-0.10 & 84.07+-0.09 & 60.20+-0.05 & 70.29+-0.10 & 29.44+-0.06
        smoothap & 76.02+-0.14 & 34.69+-0.08 & 84.28+-0.06 & 60.49+-0.17 & 69.80+-0.08 & 29.56+-0.04
        roadmap & 77.14+-0.12 & 36.30+-0.08 & 85.44+-0.06 & 62.73+-0.06 & 72.81+-0.11 & 31.31+-0.10""",
    ("Table 6", "resnet50_b32"): """
        smoothap & 61.84 & 23.76 & 79.96 & 53.21 & 53.25 & 16.4
        supap & 62.58 & 24.12 & 80.51 & 53.85 & 55.01 & 17.13
        roadmap & 63.69 & 24.97 & 80.74 & 54.68 & 56.43 & 20.43""",
    ("Table 6", "resnet50_b128"): """
        smoothap & 62.81 & 24.44 & 81.19 & 54.96 & 64.53 & 24.26
        supap & 63.18 & 24.9 & 81.72 & 55.65 & 65.79 & 24.77
        roadmap & 64.18 & 25.38 & 82.18 & 56.64 & 68.28 & 27.13""",
    ("Table 6", "resnet50_b224"): """
        smoothap & 62.93 & 24.69 & 81.2 & 54.73 & 66.62 & 26.08
        supap & 64.08 & 25.13 & 81.88 & 55.75 & 67.43 & 26.32
        roadmap & 64.65 & 25.51 & 82.3 & 56.55 & 69.28 & 27.74""",
    ("Table 6", "resnet50_b384"): """
        smoothap & 63.69 & 24.89 & 81.45 & 55.1 & 67.39 & 26.77
        supap & 64.64 & 25.27 & 81.94 & 55.78 & 68.37 & 27.24
        roadmap & 64.69 & 25.36 & 82.31 & 56.47 & 69.19 & 27.85""",
    ("Table 7", "deit_b128"): """
        smoothap & 76.2 & 34.7 & 84.16 & 60.18 & 69.83 & 29.49
        supap & 76.33 & 34.91 & 84.74 & 61.29 & 71.12 & 30.5
        roadmap & 77.09 & 35.76 & 85.44 & 62.57 & 72.82 & 31.36""",
    ("Table 7", "deit_b224"): """
        smoothap & 76.38 & 35.33 & 84.3 & 60.49 & 70.55 & 30.25
        supap & 76.47 & 35.67 & 84.77 & 61.38 & 71.9 & 31.31
        roadmap & 77.14 & 36.18 & 85.56 & 62.75 & 73.64 & 31.82""",
    ("Table 7", "deit_b384"): """
        smoothap & 76.72 & 35.86 & 84.66 & 61.26 & 71.09 & 30.89
        supap & 77.13 & 36.17 & 85.01 & 61.76 & 72.55 & 31.89
        roadmap & 77.38 & 36.23 & 85.35 & 62.29 & 73.64 & 32.12""",
}
# Of Table 4, R@k, what its authors trained themselves.
STATE_OF_THE_ART = {
    "sop_resnet50": {"softbinap": "80.6 91.3 96.1", "roadmap": "83.1 92.7 96.3"},
    "cub_resnet50": {"softbinap": "61.2 73.14 83.0 89.5", "roadmap": "68.5 78.7 86.6 91.9"},
    "inaturalist_resnet50": {"softbinap": "64.2 77.1 82.7 91.7", "roadmap": "69.1 83.1 91.3 93.9"},
    "sop_deit": {"contrastive_irt": "84.2 93.7 97.3", "roadmap": "86.0 94.4 97.6"},
    "cub_deit": {"contrastive_irt": "76.6 85.0 91.1 94.3", "roadmap": "77.4 85.5 91.4 95.0"},
    "inaturalist_deit": {"roadmap": "73.6 86.2 93.1 95.2"},
    "sfm120k_deit": {"contrastive_irt": "34.5 15.8  65.8 42.0", "roadmap": "38.9 20.7  67.5 42.3"},
}
DATASETS = ("cub", "sop", "inaturalist")


def published() -> list[tuple[str, str, str, str]]:
    """(recipe, loss, "R@1 / mAP@R", table), for every number of the tables above."""
    found = []
    for (table, setting), rows in TABLES.items():
        for row in rows.strip().splitlines():
            loss, *numbers = (cell.strip() for cell in row.split("&"))
            for place, dataset in enumerate(DATASETS):
                value = " / ".join(numbers[2 * place : 2 * place + 2])
                found.append((f"{dataset}_{setting}", loss, value, table))
    return found


def text_of(recipe: str) -> str:
    return (CATALOGUE.folders[0] / "recipe" / f"{recipe}.yaml").read_text(encoding="utf-8")


@cache
def settings_of(recipe: str) -> Settings:
    return composed([f"recipe={recipe}"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_leaves_the_choice_of_groups_to_the_command_line(recipe: str) -> None:
    """Values that a recipe writes count more than those of an option chosen on the command line, so it writes only
    what is no matter of model, loss or optimiser."""
    written = CATALOGUE.values("recipe", recipe)
    assert set(written) <= {"recipe", "epochs", "data", "select", "hardware"}
    assert set(CATALOGUE.choices(recipe)) >= {"data", "model", "loss", "optim", "select"}
    assert CATALOGUE.choices(recipe)["loss"] == "roadmap"
    assert written["recipe"] == recipe


@pytest.mark.parametrize("recipe", [*RELEASED, *IN_WORDS])
def test_values_are_those_of_the_paper(recipe: str) -> None:
    settings = settings_of(recipe)
    optim, data, model = settings.optim, settings.data, settings.model
    assert (
        optim.name,
        optim.lr,
        optim.head_lr,
        optim.weight_decay,
        optim.milestones,
        settings.epochs,
        data.batch_size,
        data.image,
        model.dim,
        model.pooling,
        model.layer_norm,
    ) == {**RELEASED, **IN_WORDS}[recipe]
    assert (optim.schedule, optim.gamma) == ("multistep" if optim.milestones else "constant", 0.3)
    assert (optim.warmup, data.per_class, data.resize) == (0, 4, data.image + 32)
    assert (data.scale, data.flip) == ([0.16, 1.0], 0.5)
    assert data.ratio == pytest.approx([3 / 4, 4 / 3])
    assert (data.sampler == "category_pairs") == (data.name == "sop")
    assert data.batches_per_pair == 10
    assert model.freeze_batch_norm == ("resnet50" in model.name)
    assert settings.select.by == "last"
    assert settings.loss == composed(["loss=roadmap"]).loss


@pytest.mark.parametrize("recipe", [name for name in RECIPES if re.search(r"_b\d+$", name)])
def test_only_the_batch_differs_between_batch_sizes(recipe: str) -> None:
    base = re.sub(r"_b\d+$", "_b64" if "resnet50" in recipe else "_b128", recipe)
    expected = settings_of(base).as_dict() | {"recipe": recipe}
    expected["data"]["batch_size"] = int(recipe.rpartition("_b")[2])
    assert settings_of(recipe).as_dict() == expected


def test_the_yardstick_is_what_it_was() -> None:
    settings = settings_of("cub_vits")
    assert (settings.model.name, settings.model.pooling, settings.model.dim) == (
        "vit_small_patch14_dinov2",
        "token",
        None,
    )
    assert (settings.optim.name, settings.optim.lr, settings.optim.weight_decay) == ("adamw", 3e-6, 4e-4)
    assert (settings.optim.schedule, settings.epochs, settings.select.by) == ("constant", 20, "last")
    assert (settings.data.batch_size, settings.data.per_class, settings.data.image) == (128, 4, 224)
    assert (settings.data.scale, settings.data.flip, settings.data.resize) == ([0.16, 1.0], 0.5, 256)


def test_there_is_a_recipe_for_every_row() -> None:
    rows = {recipe for recipe, *_ in published()} | set(STATE_OF_THE_ART)
    assert rows <= set(RECIPES)
    assert set(PAPER) - rows == {"sfm120k_resnet50"}


@pytest.mark.parametrize(("recipe", "loss", "value", "table"), published())
def test_the_published_numbers_are_in_the_recipe(recipe: str, loss: str, value: str, table: str) -> None:
    number = table.removeprefix("Table ")
    assert re.search(rf"^#   loss={loss} +{re.escape(value)} +Tables? .*\b{number}\b", text_of(recipe), re.MULTILINE)


@pytest.mark.parametrize("recipe", STATE_OF_THE_ART)
def test_the_state_of_the_art_is_in_the_recipe(recipe: str) -> None:
    for loss, value in STATE_OF_THE_ART[recipe].items():
        assert re.search(rf"^#   loss={loss} +{re.escape(value)}( |$)", text_of(recipe), re.MULTILINE)


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_opens_with_its_commands(recipe: str) -> None:
    text = text_of(recipe)
    commands = re.findall(r"^#     (roadmap train .*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        _, _, *arguments = shlex.split(command.replace("loss=LOSS", "loss=fastap"))
        assert f"recipe={recipe}" in arguments
        understood(arguments)  # raises where a setting or an option does not exist
    compared = set(re.findall(r"^#   loss=(\w+)", text, re.MULTILINE))
    swept = set(re.findall(r"loss=([\w,]+)", commands[-1])[-1].split(",")) if " -m " in commands[-1] else compared
    assert compared in (swept, set())  # what is compared with is what the last command runs
    assert compared <= set(NAMES)
    assert re.search(r"^# (Published|The yardstick)", text, re.MULTILINE)
    assert (recipe in PAPER) <= ("Not run yet" in text)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ("glyphs", "folder_vits")])
def test_the_time_is_reckoned_from_its_settings(recipe: str) -> None:
    if re.search(r"^# Time: .*, measured", text_of(recipe), re.MULTILINE):
        return
    found = re.search(
        r"^# Time: about ([\d.]+) (h|min) on one H200 "
        r"\((\d+) epochs x ([\d,]+) pictures at ([\d,]+) a second: an estimate\)",
        text_of(recipe),
        re.MULTILINE,
    )
    assert found is not None
    time, unit, epochs, pictures, rate = found.groups()
    settings = settings_of(recipe)
    in_epoch = SOURCES[settings.data.name].published["train"][0]
    if settings.data.sampler == "category_pairs":
        in_epoch = math.comb(12, 2) * settings.data.batches_per_pair * settings.data.batch_size
    assert (int(epochs), int(pictures.replace(",", ""))) == (settings.epochs, in_epoch)
    hours = settings.epochs * in_epoch / int(rate.replace(",", "")) / 3600
    expected, digits = (60 * hours, 1) if unit == "min" else (hours, 2 if hours < 1 else 1)
    assert float(time) == round(expected, digits)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_document_lists_it(recipe: str) -> None:
    (row,) = re.findall(rf"^\| `{recipe}` \|.*\|$", DOCUMENT, re.MULTILINE)
    settings = settings_of(recipe)
    assert f"| {settings.data.batch_size} | {settings.data.image} | {settings.epochs} |" in row
    time = re.search(r"^# Time: about ([\d.]+ (?:h|min)) on one H200", text_of(recipe), re.MULTILINE)
    assert time is None or row.endswith(f"| {time.group(1)} |")
    best = [value for name, loss, value, _ in published() if (name, loss) == (recipe, "roadmap")]
    assert all(value.replace("+-", " ± ") in row for value in best[:1])
    if recipe in STATE_OF_THE_ART:
        assert STATE_OF_THE_ART[recipe]["roadmap"].split()[0] in row


def test_the_commands_of_the_document_are_understood() -> None:
    commands = re.findall(r"^roadmap train (.*)$", DOCUMENT, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        understood(shlex.split(command))


def test_the_document_lists_nothing_else() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", DOCUMENT, re.MULTILINE)
    assert set(listed) == set(RECIPES)


@pytest.fixture(scope="module")
def miniatures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Dataset -> the settings that say where a miniature of it lies, in its original layout."""
    home = tmp_path_factory.mktemp("miniatures")
    tests = {name: str(layouts.revisited_layout(home, name)) for name in ("roxford5k", "rparis6k")}
    return {
        "cub": {"root": str(layouts.cub_layout(home))},
        "sop": {"root": str(layouts.sop_layout(home)), "batches_per_pair": 1},
        "inaturalist": {"root": str(layouts.inaturalist_layout(home / "inat", lists=True))},
        "sfm120k": {"root": str(landmarks_layout(home / "sfm120k")), "test_sets": tests},
        "folder": {"root": str(layouts.folder_layout(home / "folder"))},
        # drawing and testing on all characters takes long, and is done elsewhere
        "glyphs": {"name": "folder", "root": str(layouts.folder_layout(home / "glyphs"))},
    }


def landmarks_layout(root: Path) -> Path:
    """SfM-120k with enough clusters of two pictures to train on: four, and two for validation."""
    lists = {}
    for split, clusters in (("train", 4), ("val", 2)):
        ids = [f"{split[0]}{number:09x}" for number in range(2 * clusters)]
        lists[split] = {"cids": ids, "cluster": np.arange(2 * clusters) // 2, "qidxs": [0], "pidxs": [1]}
        for number, cid in enumerate(ids):
            layouts.write_picture_as_jpeg(root / "ims" / cid[-2:] / cid[-4:-2] / cid[-6:-4] / cid, number)
    (root / "retrieval-SfM-120k.pkl").write_bytes(pickle.dumps(lists, protocol=2))
    return root


TINY: dict[str, dict[str, Any]] = {
    "model": {"name": "small_cnn", "weights": "random", "pooling": "avg"},
    "data": {"image": 16, "resize": 18, "side": 18, "batch_size": 4, "per_class": 2, "batches": 2, "workers": 1},
    "hardware": {"device": "cpu"},
}


def tiny(recipe: str, where: dict[str, Any]) -> Settings:
    """The recipe with a small network, small batches, two steps, and pictures that are here."""
    values = settings_of(recipe).as_dict() | {"epochs": 1}
    for part, changes in TINY.items():
        values[part] |= changes
    values["data"] |= where
    return Settings.from_dict(values)


def trained(settings: Settings, out: Path) -> dict[str, Any]:
    """The summary of a run."""
    settings.out = str(out)
    folder = fit(settings, quiet=True)
    return dict(json.loads((folder / "summary.json").read_text()))


@pytest.fixture
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_two_steps_on_miniature_data(
    recipe: str, miniatures: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    data = CATALOGUE.choices(recipe)["data"]
    summary = trained(tiny(recipe, miniatures[data]), tmp_path)
    assert summary["steps"] == (3 if data == "sop" else 2)  # three pairs of categories
    assert set(summary["after"]) == ({"roxford5k", "rparis6k"} if data == "sfm120k" else {data})
    for metrics in summary["after"].values():
        assert metrics
        assert all(value is None or value >= 0 for value in metrics.values())


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("loss", NAMES)
def test_every_loss_trains_in_a_recipe(loss: str, miniatures: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    settings = tiny("cub_resnet50", miniatures["cub"])
    settings.loss = CATALOGUE.values("loss", loss)
    assert trained(settings, tmp_path)["steps"] == 2
