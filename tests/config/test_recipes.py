"""The recipes: they say what the paper and its released commands say, and each of them trains."""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
import shlex
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from roadmap.config.command import command_of
from roadmap.config.composition import settings_from
from roadmap.config.options import FOLDER, options, parts_of
from roadmap.config.settings import Settings
from roadmap.data.datasets import SOURCES
from roadmap.engine import fit
from roadmap.engine.auto import unresolved
from roadmap.engine.splits import records_of
from roadmap.experiments.published import lines_of, numbers, numbers_of
from roadmap.losses.named import NAMES
from tests.data import layouts

RECIPES = list(options("recipe"))
DOCS = Path(__file__).parents[2] / "docs"
# In their authors' settings.
BASELINES = ("cross_entropy", "horde", "irt", "mic", "normalised_softmax", "proxy_gml", "proxy_nca_pp", "sec")
BASELINES += ("triplet_sct", "xbm")
PAPER = [name for name in RECIPES if re.search("(resnet50|deit)(_table4)?$", name)]

# The released commands: optimiser, rate, rate of the projection, weight decay, milestones, epochs, batch, picture,
# dimensions, pooling, LayerNorm. iNaturalist's DeiT has none; its epochs and batch are the paper's.
RELEASED: dict[str, tuple[Any, ...]] = {
    "cub_resnet50_table4": ("adam", 1e-6, None, 4e-4, [], 200, 128, 256, 512, "max", True),
    "cub_deit epochs=150": ("adamw", 1e-6, None, 5e-4, [], 150, 128, 224, None, "auto", False),
    "sop_resnet50_table4": ("adam", 1e-5, 2e-5, 1e-4, [30, 70], 100, 128, 256, 512, "avg", False),
    "sop_deit": ("adamw", 1e-5, None, 5e-4, [25, 50], 75, 128, 224, None, "auto", False),
    "inaturalist_resnet50": ("adam", 1e-5, 2e-5, 4e-4, [30, 70], 90, 384, 224, 512, "avg", False),
    "inaturalist_deit": ("adamw", 1e-5, None, 5e-4, [30, 70], 90, 384, 224, None, "auto", False),
}
# The paper's own words on sections 4.1 and B, where they differ from the released commands.
IN_WORDS: dict[str, tuple[Any, ...]] = {
    "cub_resnet50 data.batch_size=64": ("adam", 1e-6, None, 4e-4, [], 200, 64, 224, 512, "avg", False),
    "cub_deit": ("adamw", 1e-6, None, 5e-4, [], 100, 128, 224, None, "auto", False),
    "sop_resnet50 data.batch_size=64": ("adam", 1e-5, 2e-5, 1e-4, [30, 70], 100, 64, 224, 512, "avg", False),
    "inaturalist_resnet50 data.batch_size=64": ("adam", 1e-5, 2e-5, 4e-4, [30, 70], 90, 64, 224, 512, "avg", False),
    "inaturalist_deit data.batch_size=128": ("adamw", 1e-5, None, 5e-4, [30, 70], 90, 128, 224, None, "auto", False),
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
        smoothap & 62.1 & 23.9 & 80.9 & 54.6 & 59.7 & 20.7
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
    "sop_resnet50_table4": {"softbinap": "80.6 91.3 96.1", "roadmap": "83.1 92.7 96.3"},
    "cub_resnet50_table4": {"softbinap": "61.2 73.14 83.0 89.5", "roadmap": "68.5 78.7 86.6 91.9"},
    "inaturalist_resnet50": {"softbinap": "64.2 77.1 82.7 91.7", "roadmap": "69.1 83.1 91.3 93.9"},
    "sop_deit": {"contrastive_irt": "84.2 93.7 97.3", "roadmap": "86.0 94.4 97.6"},
    "cub_deit": {"contrastive_irt": "76.6 85.0 91.1 94.3", "roadmap": "77.4 85.5 91.4 95.0"},
    "inaturalist_deit": {"roadmap": "73.6 86.2 93.1 95.2"},
    "sfm120k_deit": {"contrastive_irt": "34.5 15.8  65.8 42.0", "roadmap": "38.9 20.7  67.5 42.3"},
}
DATASETS = ("cub", "sop", "inaturalist")


def published() -> list[tuple[str, str, str, str, str, int]]:
    """(recipe, table, loss, "R@1 / mAP@R", dataset, batch size), for every number of the tables above."""
    found = []
    for (table, setting), rows in TABLES.items():
        backbone, _, batch = setting.partition("_b")
        for row in rows.strip().splitlines():
            loss, *values = (cell.strip() for cell in row.split("&"))
            for place, dataset in enumerate(DATASETS):
                value = " / ".join(values[2 * place : 2 * place + 2])
                found.append((f"{dataset}_{backbone}", table.removeprefix("Table "), loss, value, dataset, int(batch)))
    return found


@cache
def settings_of(recipe: str) -> Settings:
    """Of "NAME key=value ..."."""
    return settings_from(f"recipe={recipe}".split())


def written(recipe: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The values that a recipe writes, and the option of each group that it chooses."""
    values = OmegaConf.to_container(OmegaConf.load(FOLDER / "recipe" / f"{recipe}.yaml"))
    assert isinstance(values, dict)
    chosen = {str(k).removeprefix("override /"): v for entry in values.pop("defaults") for k, v in entry.items()}
    return {str(name): value for name, value in values.items()}, chosen


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_leaves_the_choice_of_groups_to_the_command_line(recipe: str) -> None:
    """Values that a recipe writes count more than those of an option chosen on the command line, so it writes only
    what is no matter of model, loss or optimiser."""
    values, chosen = written(recipe)
    assert set(values) <= {"recipe", "epochs", "data", "select", "hardware"}
    assert set(chosen) >= {"data", "model", "loss", "optim", "select"}
    assert (chosen["loss"] == "roadmap") == (recipe not in BASELINES)
    assert values["recipe"] == recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_leaves_nothing_to_chance(recipe: str) -> None:
    # as large as the pictures are cut; as many as there are
    assert set(unresolved(settings_of(recipe))) <= {"data.side", "memory.size"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_batch_size_is_a_setting(recipe: str) -> None:
    assert re.search(r"_b\d+$", recipe) is None
    expected = settings_of(recipe).as_dict()
    expected["data"]["batch_size"] = 32
    assert settings_of(f"{recipe} data.batch_size=32").as_dict() == expected


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
    assert settings.loss == settings_from(["loss=roadmap"]).loss
    assert data.squeeze == ("all" if data.name == "sop" else "no")


def test_landmarks_are_trained_as_released(miniatures: dict[str, dict[str, Any]]) -> None:
    settings = settings_of("sfm120k_deit")
    optim, data = settings.optim, settings.data
    assert (optim.name, optim.lr, optim.weight_decay, optim.schedule) == ("adamw", 1e-5, 5e-4, "constant")
    assert (data.image, data.resize, data.squeeze, settings.select.by) == (224, 224, "test", "last")
    here = settings_of(f"sfm120k_deit data.root={miniatures['sfm120k']['root']}").data
    assert records_of(here).split_names() == ("train",)  # every cluster
    apart = settings_of(f"sfm120k_deit data.root={here.root} data.train_on_val=false").data
    assert records_of(apart).split_names() == ("train", "val")
    assert len(records_of(apart)) == len(records_of(here).split("train"))


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


def test_every_number_of_the_data_file_is_named_by_a_recipe() -> None:
    named = {number for recipe in RECIPES for number in numbers_of(parts_of("recipe", recipe)[0])}
    unnamed = {number.table for number in set(numbers()) - named}
    assert unnamed == {"10", "fig5"}  # the decomposability gap and an increase, which no training run alone gives
    assert set(PAPER) - {r for r in RECIPES if numbers_of(parts_of("recipe", r)[0])} == {"sfm120k_resnet50"}


def test_the_data_file_is_whole() -> None:
    found = numbers()
    assert len(found) == len(set(found)) == 509
    figures = {"fig4a", "fig4b", "fig4c", "fig5", "fig13a", "fig13b"}
    assert {number.table for number in found} == {*map(str, range(1, 11)), *figures, "yardstick", "authors"}
    for number in found:
        assert 0 < float(number.value) < 100
        assert number.spread == "" or 0 < float(number.spread) < 1
        assert number.dataset in SOURCES
        assert number.source
        assert re.match(r"resnet50|deit|vits", number.backbone)


@pytest.mark.parametrize(("recipe", "table", "loss", "value", "dataset", "batch"), published())
def test_the_published_numbers_are_as_printed(
    recipe: str, table: str, loss: str, value: str, dataset: str, batch: int
) -> None:
    found = {
        n.metric: n
        for n in numbers_of(parts_of("recipe", recipe)[0])
        if (n.table, n.row) == (table, loss) and n.batch_size == batch
    }
    assert " / ".join(found[metric].text.replace(" ± ", "+-") for metric in ("R@1", "mAP@R")) == value
    assert {number.dataset for number in found.values()} == {dataset}
    line = f"Table {table}, batch {batch}: {loss}  R@1 {found['R@1'].text}, mAP@R {found['mAP@R'].text}"
    assert any(shown.startswith(line) for shown in lines_of(parts_of("recipe", recipe)[0]))


@pytest.mark.parametrize("recipe", STATE_OF_THE_ART)
def test_the_state_of_the_art_is_as_printed(recipe: str) -> None:
    for loss, value in STATE_OF_THE_ART[recipe].items():
        table = "9" if recipe == "sfm120k_deit" else "4"
        found = [n.text for n in numbers_of(parts_of("recipe", recipe)[0]) if (n.table, n.row) == (table, loss)]
        assert found == value.split()


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_opens_with_its_commands(recipe: str) -> None:
    comment, _ = parts_of("recipe", recipe)
    commands = [line.strip() for line in comment if line.startswith("    roadmap train ")]
    assert commands
    for command in commands:
        arguments = shlex.split(command.replace("loss=LOSS", "loss=fastap"))[2:]
        assert f"recipe={recipe}" in arguments
        for overrides in command_of(arguments).covering():
            settings_from(overrides)  # raises where a setting or an option does not exist
    assert any(line.startswith("Published: ") for line in comment)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_recipes", DOCS / "make_recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_document_is_what_the_recipes_say() -> None:
    assert (DOCS / "recipes.md").read_text(encoding="utf-8") == generator().page(), "run: python docs/make_recipes.py"


def test_the_document_lists_every_recipe_and_its_commands_are_understood() -> None:
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `recipe=(\w+)((?: data.batch_size=\d+)?)` \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    assert {name for name, *_ in rows} == set(RECIPES)
    for name, batch, image, epochs in rows:
        settings = settings_of(f"{name}{batch}")
        assert (settings.data.image, settings.epochs) == (int(image), int(epochs))
    commands = re.findall(r"^roadmap train (.*)$", page, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        for overrides in command_of(shlex.split(command)).covering():
            settings_from(overrides)


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


BATCHES = ("cub_resnet50 data.batch_size=64", "sop_resnet50 data.batch_size=224", "cub_deit data.batch_size=384")


def tiny(recipe: str, where: dict[str, Any]) -> Settings:
    """The recipe with a small network, small batches, two steps, and pictures that are here."""
    values = settings_of(recipe).as_dict() | {"epochs": 1}
    for part, changes in TINY.items():
        values[part] |= changes
    small = {"mic": {"clusters": 2}, "horde": {"dim": 16, "embedding_size": 8}}
    values["auxiliary"] |= small.get(values["auxiliary"]["name"], {})
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
@pytest.mark.parametrize("recipe", [*RECIPES, *BATCHES])
def test_it_trains_two_steps_on_miniature_data(
    recipe: str, miniatures: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    data = written(recipe.split()[0])[1]["data"]
    summary = trained(tiny(recipe, miniatures[data]), tmp_path)
    pairs = settings_of(recipe).data.sampler == "category_pairs"
    assert summary["steps"] == (3 if pairs else 2)  # three pairs of categories
    assert set(summary["after"]) == ({"roxford5k", "rparis6k"} if data == "sfm120k" else {data})
    for metrics in summary["after"].values():
        assert metrics
        assert all(value is None or value >= 0 for value in metrics.values())


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("loss", NAMES)
def test_every_loss_trains_in_a_recipe(loss: str, miniatures: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    settings = tiny("cub_resnet50", miniatures["cub"])
    settings.loss = settings_from([f"loss={loss}"]).loss
    assert trained(settings, tmp_path)["steps"] == 2
