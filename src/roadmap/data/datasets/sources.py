"""Where each dataset is obtained, which folder is expected, and what its authors counted."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Publication:
    """What a person needs to get a dataset, and what `data check` compares with.

    Attributes:
        title: the full name.
        obtained: where its authors publish it.
        layout: the files below ROOT, as the original archives unpack.
        published: split -> (pictures, classes); classes 0 where the split has no labels.
        folders: names of the archive's own top folder, so that ROOT may be its parent.
    """

    title: str
    obtained: str
    layout: str
    published: dict[str, tuple[int, int]] = field(default_factory=dict)
    folders: tuple[str, ...] = ()


_REVISITED = (
    "pictures from www.robots.ox.ac.uk/~vgg/data/{vgg}, ground truth from "
    "cmp.felk.cvut.cz/revisitop (data/datasets/{name}/gnd_{name}.pkl)"
)

SOURCES: dict[str, Publication] = {
    "cub": Publication(
        "Caltech-UCSD Birds-200-2011",
        "data.caltech.edu/records/65de6-vp158 (CUB_200_2011.tgz, 1.1 GB)",
        "images.txt, image_class_labels.txt, images/ (classes.txt and bounding_boxes.txt are used when there)",
        {"train": (5_864, 100), "test": (5_924, 100)},
        ("CUB_200_2011",),
    ),
    "sop": Publication(
        "Stanford Online Products",
        "cvgl.stanford.edu/projects/lifted_struct (Stanford_Online_Products.zip, 2.9 GB)",
        "Ebay_train.txt, Ebay_test.txt, bicycle_final/ ... toaster_final/",
        {"train": (59_551, 11_318), "test": (60_502, 11_316)},
        ("Stanford_Online_Products",),
    ),
    "inaturalist": Publication(
        "iNaturalist 2018",
        "github.com/visipedia/inat_comp, 2018 (train_val2018.tar.gz, 120 GB; train2018.json, val2018.json); the "
        "retrieval split comes with SmoothAP, github.com/Andrew-Brown1/Smooth_AP (Inat_dataset_splits/)",
        "train_val2018/, and Inat_dataset_splits/Inaturalist_{train,test}_set1.txt or train2018.json + val2018.json",
        {"train": (325_846, 5_690), "test": (136_093, 2_452)},
        ("iNaturalist", "Inaturalist", "inaturalist"),
    ),
    "inshop": Publication(
        "DeepFashion In-Shop Clothes Retrieval",
        "mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html (by agreement)",
        "Eval/list_eval_partition.txt, Img/img/ (Anno/list_bbox_inshop.txt is used when there)",
        {"train": (25_882, 3_997), "query": (14_218, 3_985), "gallery": (12_612, 3_985)},
        ("In-shop Clothes Retrieval Benchmark", "In-shop_Clothes_Retrieval_Benchmark", "DeepFashion_InShop"),
    ),
    "cars": Publication(
        "Stanford Cars (Cars196)",
        "ai.stanford.edu/~jkrause/cars/car_dataset.html (car_ims.tgz and cars_annos.mat, or the devkit)",
        "cars_annos.mat + car_ims/, or devkit/cars_train_annos.mat, cars_test_annos_withlabels.mat + cars_train/, "
        "cars_test/; reading .mat files needs scipy",
        {"train": (8_054, 98), "test": (8_131, 98)},
        ("cars196", "stanford_cars"),
    ),
    "sfm120k": Publication(
        "retrieval-SfM-120k",
        "cmp.felk.cvut.cz/cnnimageretrieval (data/train/ims/ims.tar.gz, data/train/dbs/retrieval-SfM-120k.pkl)",
        "retrieval-SfM-120k.pkl, ims/ with hashed folders: cid[-2:]/cid[-4:-2]/cid[-6:-4]/cid",
        {"train": (91_642, 551), "val": (6_403, 162)},
        ("retrieval-SfM-120k", "retrieval-SfM"),
    ),
    "roxford5k": Publication(
        "Revisited Oxford",
        _REVISITED.format(vgg="oxbuildings", name="roxford5k"),
        "gnd_roxford5k.pkl, jpg/",
        {"query": (70, 0), "gallery": (4_993, 0)},
        ("roxford5k",),
    ),
    "rparis6k": Publication(
        "Revisited Paris",
        _REVISITED.format(vgg="parisbuildings", name="rparis6k"),
        "gnd_rparis6k.pkl, jpg/",
        {"query": (70, 0), "gallery": (6_322, 0)},
        ("rparis6k",),
    ),
}

OWN = {
    "folder": "a folder with a folder of pictures per class: ROOT/CLASS/picture.jpg",
    "table": "a .csv or .parquet file with the columns path and label, one picture a line",
}
GLYPH_SIZE = 32  # side of the drawn pictures in pixels


def explanation(name: str) -> str:
    """Where the dataset is obtained and which folder is expected, as a sentence or two."""
    if name in OWN:
        return f"ROOT is {OWN[name]}."
    source = SOURCES[name]
    return f"{source.title} is obtained from {source.obtained}. Expected below ROOT: {source.layout}."


def home(name: str, root: Path, *markers: str) -> Path:
    """The folder with one of the `markers`: ROOT, or the archive's own top folder inside it.

    Raises:
        FileNotFoundError: saying where the dataset is obtained and which folder is expected.
    """
    folders = [Path(root), *(Path(root) / inner for inner in SOURCES[name].folders)]
    for folder in folders:
        if any(present(folder / marker) for marker in markers):
            return folder
    raise FileNotFoundError(f"no {' or '.join(markers)} in {root}. {explanation(name)}")


def present(path: Path) -> Path | None:
    """The file, or its gzipped form, if either is there."""
    return next((p for p in (path, path.with_name(path.name + ".gz")) if p.is_file()), None)


def rows(path: Path, columns: int, header: int = 0) -> list[list[str]]:
    """The lines of a list, cut into `columns` at white space; the last column keeps its spaces.

    Raises:
        ValueError: naming the file and the line that has fewer columns.
    """
    found = present(path)
    if found is None:
        raise FileNotFoundError(f"{path} is missing")
    raw = found.read_bytes()
    text = (gzip.decompress(raw) if found.suffix == ".gz" else raw).decode("utf-8")
    cut = []
    for number, line in enumerate(text.splitlines()[header:], start=header + 1):
        if not line.strip():
            continue
        parts = line.split(None, columns - 1)
        if len(parts) != columns:
            raise ValueError(f"{found}, line {number}: expected {columns} columns, got {line!r}")
        cut.append([part.strip() for part in parts])
    return cut


def ranks(ids: Sequence[int]) -> dict[int, int]:
    """Id -> its place among the sorted distinct ids."""
    return {value: place for place, value in enumerate(sorted(set(ids)))}
