"""Writes docs/recipes.md from the recipes, their settings and the published numbers: python docs/make_recipes.py"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from roadmap.config.composition import settings_from
from roadmap.config.options import options, parts_of
from roadmap.config.settings import Settings
from roadmap.data.datasets import SOURCES
from roadmap.experiments.published import Number, numbers_of

PAGE = Path(__file__).with_name("recipes.md")
RATES = {224: 3000, 256: 2300, 448: 1000}  # pictures a second on one H200, by their size
CPU_RATES = {84: 45}  # likewise on one core of a CPU
SECTIONS = {
    "cub": "CUB-200-2011",
    "sop": "Stanford Online Products",
    "inaturalist": "iNaturalist 2018",
    "sfm120k": "SfM-120k, tested on revisited Oxford and Paris",
    "folder": "Your own pictures",
    "glyphs": "Glyphs",
}

BEGINNING = """\
<!-- Written by docs/make_recipes.py; change that, or the recipes, and run it again. -->
# Recipes

A recipe is a whole training run in one name: pictures, model, loss, optimiser, batch, epochs. There are recipes for
the runs of the paper's tables, for the baselines of its Table 4 in their authors' settings, named by the method, and
modern counterparts.

```sh
roadmap train recipe=cub_resnet50 data.root=CUB_200_2011
roadmap train recipe=cub_resnet50 data.root=CUB_200_2011 data.batch_size=64 loss=supap seed=3
roadmap train -m recipe=cub_vits data.root=CUB_200_2011 loss=smoothap,supap,roadmap seed=0,1,2
roadmap train --dry-run recipe=glyphs
```

The last one shows what would be chosen, with time and disk, and stops. `roadmap train --help recipe=NAME` prints a
recipe with its commands and the published numbers of every loss.

## How they work
`src/roadmap/config/groups/recipe/NAME.yaml` opens with its commands, the tables it belongs to, and where paper and
released command differ. Then it chooses among the groups and adds a few values. The numbers themselves are in
`src/roadmap/experiments/published.csv`.

- **What you type counts more than the recipe**, whatever the order. `loss=supap` takes all options of SupAP,
  `optim=sgd` all of that optimiser: recipes write no value of a loss, a model or an optimiser, they only choose one.
  Values of `data` that a recipe writes (picture, batch) stay when you type `data=folder`; change them by name.
- **A row of a table is a recipe, a batch size and a loss.** `recipe=sop_deit data.batch_size=224 loss=smoothap` is
  SmoothAP in Table 7.
- **A sweep** (`-m`) makes a run for every combination, each in a folder of its own below `runs/sweep_DATE`, after all
  values have been checked, and ends with a table. `hydra/launcher=joblib` or `submitit_slurm`, once installed, run
  them in parallel or on a cluster.
- **Weights** come from timm's hub; without a network give a file: `model.weights=FILE.safetensors`. Weights of the
  first published ResNet-50 (He et al. 2015) need `model=resnet50_v1`, which strides where it did.
- **A baseline in its authors' setting** is a recipe by its name (`mic`, `proxy_nca_pp`, `xbm`), for the dataset that it
  is best known on; the command for another is in its file. What its authors had and it has not is said there. For the
  loss alone in the paper's own setting write `recipe=cub_resnet50_table4 loss=NAME`.
- **Landmarks** are tested on other sets: `data.test_sets.roxford5k=FOLDER data.test_sets.rparis6k=FOLDER`.
- **Yours:** `FOLDER/recipe/mine.yaml`, beginning with `# @package _global_`, is `roadmap train --config-dir FOLDER
  recipe=mine`. `defaults: [cub_vits, _self_]` goes on from another recipe.

## What is not as in the paper or its released code
- The released code keeps the best epoch on the test set; the paper does not say so. Here the last one counts;
  `select=test` does as the released code, and says so.
- The calibration averages violating pairs, as the released code does; Eq. (7) as printed is `loss.average=all`. lam,
  tau, rho, alpha, beta are the paper's. The released constants of Eq. (4) are options: `loss.offset=1.44`, on
  iNaturalist `loss.start=0 loss.offset=1.0`. Fig. 13a has `loss.delta=0.05` for every tau.
- The two parts of the loss weigh 0.5 and 0.5 as in Eq. (2), 1 and 1 in the released code. Under Adam a factor on the
  loss changes nothing but the share of the weight decay: the same decay counts twice as much here.
- DeiT-S uses class and distillation token as they were trained; `model=deit_small_released` drops the latter, as was
  done.
- SOP's pictures are squeezed to squares before they are cut, and those of the landmark tests, as in the released
  code; `data.squeeze=no` keeps their aspect.
- bf16 where the paper has fp16 (`hardware=fp16`); seed 0 where the released commands have 333.
- CUB with DeiT-S: "about 100 epochs" in the paper, `epochs=150` in the released command.
- Weight decay is not in the paper; it is the released commands'. So is the number of batches per pair of categories
  on SOP, 10, here for every batch size.

## All of them
Published numbers are ROADMAP's, or those of the method that a recipe is named by, R@1 / mAP@R unless a table prints
others. Times are estimates for one H200, epochs
times pictures at 3,000 a second (2,300 at 256 pixels, 1,000 at 448), evaluations not counted: the paper reports 30 to
60 minutes for CUB and 4 to 8 hours for SOP on a Quadro RTX 5000, 20 hours for iNaturalist on a V100.
"""

ENDING = """
## What was run
Every recipe is trained for two steps by `tests/config/test_recipes.py`, on miniature data in the original layout with
a small network. Weights of distilled DeiT-S were not at hand, nor the pictures of SOP, iNaturalist, SfM-120k and
Paris, so the recipes that need them have not been run in full.

- `cub_resnet50` at batch 128 with weights of the first published ResNet-50 (`model=resnet50_v1`), seed 0, the last
  epoch, 3 to 4 minutes each on one H200: ROADMAP R@1 64.99, mAP@R 24.45; SmoothAP 64.10 / 23.99. Published, means of
  five runs: 64.05 / 25.27 and 62.45 / 24.32, with the best epoch on the test set as the released code keeps it.
- `cub_vits`, ROADMAP, seed 0, one H200: R@1 81.21, mAP@R 43.50, under a minute. The yardstick is not published: a
  simple trainer with the released losses and these settings reached it over five seeds. Its weights, and those of
  this run, are DINOv2's after further training for another task.
- `cub_vits_best`, ROADMAP, seed 0: R@1 83.58, mAP@R 47.87 ([training.md](training.md) has what was tried).
- `glyphs`: R@1 94.5, mAP@R 78.4, one seed, 47 s on 2 cores; see the demonstration in [training.md](training.md).
"""


def page() -> str:
    """The whole of it."""
    recipes = {name: settings_from([f"recipe={name}"]) for name in options("recipe")}
    lines = [BEGINNING]
    for data, title in SECTIONS.items():
        lines += [
            f"### {title}",
            "",
            "| command | picture | epochs | published | estimated time |",
            "|---|---|---|---|---|",
        ]
        for name, settings in recipes.items():
            if settings.data.name == data:
                lines += _rows(name, settings)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n" + ENDING


def _rows(name: str, settings: Settings) -> Iterator[str]:
    """A row for each batch size that was published, that of the recipe first."""
    named = numbers_of(parts_of("recipe", name)[0])
    here = [number for number in named if number.dataset == settings.data.name] or named  # or of its test sets
    ours = [number for number in here if number.row == "roadmap"] or (here if _is_baseline(settings) else [])
    own = settings.data.batch_size
    for batch in (own, *sorted({number.batch_size for number in ours if number.batch_size} - {own})):
        several = len({number.batch_size for number in ours if number.batch_size}) > 1
        command = f"`recipe={name}{f' data.batch_size={batch}' if several and batch != own else ''}`"
        shown = [n for n in ours if n.batch_size == batch or (n.batch_size is None and batch == own)]
        image = settings.data.image
        time = _time(settings, int(batch)) if settings.data.name in SOURCES else "by size"
        yield f"| {command} | {image} | {settings.epochs} | {_published(shown) or '-'} | {time} |"


def _is_baseline(settings: Settings) -> bool:
    return bool(settings.loss["name"] != "roadmap")


def _published(shown: list[Number]) -> str:
    tables: dict[tuple[str, str], list[Number]] = {}
    for number in shown:
        tables.setdefault((number.table, number.backbone), []).append(number)
    told = []
    for (table, backbone), numbers in tables.items():
        where = f"Table {table}" if table.isdigit() else {"authors": "by its authors"}.get(table, table)
        wide = "".join(f" {rest}" for rest in backbone.split()[1:])
        plain = [number.metric for number in numbers] in (["R@1", "mAP@R"], ["R@1", "mAP@R", "minutes per epoch"])
        values = [n.text for n in numbers[:2]] if plain else [f"{_short(n)} {n.text}" for n in numbers]
        told.append(f"{where}{wide}: {(' / ' if plain else ', ').join(values)}")
    return "; ".join(told)


def _short(number: Number) -> str:
    named = {"roxford5k": "Oxford ", "rparis6k": "Paris "}.get(number.dataset, "")
    return f"{named}{number.metric.removesuffix(' trapezoidal mAP')}"


def _time(settings: Settings, batch: int) -> str:
    if settings.model.freeze_backbone:
        return "a minute on 2 cores, and the backbone's one look at the pictures"
    published, image = SOURCES[settings.data.name].published, settings.data.image
    if "train" not in published or image not in RATES | CPU_RATES:
        return "47 s on 2 cores"
    pictures = published["train"][0] + (published.get("val", (0,))[0] if settings.data.train_on_val else 0)
    if settings.data.batches is not None:
        pictures = settings.data.batches * batch
    if settings.data.sampler == "category_pairs":
        pictures = math.comb(12, 2) * settings.data.batches_per_pair * batch
    if image in CPU_RATES:
        return f"{settings.epochs * pictures / CPU_RATES[image] / 60:.0f} min on a core"
    hours = settings.epochs * pictures / RATES[image] / 3600
    return f"{60 * hours:.1f} min" if hours < 0.1 else f"{hours:.2g} h"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
