"""From a name to an `Encoder`, and to the pictures of its run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from roadmap.config.settings import DataSettings, HardwareSettings, ModelSettings, SettingError
from roadmap.data import READERS, CentreCrop, Records, dataset
from roadmap.data.pictures.policy import SIDE, needed_side
from roadmap.encoder.encoder import BATCH, Encoder, batch_of, centre_crop
from roadmap.encoder.onnx_model import OnnxModel
from roadmap.hardware import device_of, in_layout
from roadmap.locations import check_root, checkpoint_of, run_around
from roadmap.models import Retriever, load_checkpoint, retriever
from roadmap.models.backbones import SMALL_CNN, model_card, trial_features
from roadmap.runs import Run

IMAGE, SMALL_IMAGE = 224, 32
CPU = torch.device("cpu")  # ONNX Runtime takes pictures from there, wherever it computes


@dataclass(frozen=True)
class Wanted:
    """What was asked for beside the name; None where nothing was. As in `Encoder.open`."""

    device: str = "auto"
    precision: str | None = None
    image: int | None = None
    resize: int | None = None
    weights: str | None = None
    pooling: str | None = None
    dim: int | None = None
    batch: int | None = None
    flip: bool = False

    def again(self, what: str) -> dict[str, Any]:
        """What `Encoder.open` needs to give the same vectors again, in another folder and on another device."""
        asked = dataclasses.asdict(self)
        del asked["device"], asked["precision"], asked["batch"]
        if self.weights is not None and Path(self.weights).is_file():
            asked["weights"] = str(Path(self.weights).resolve())
        return {"what": what, **{name: value for name, value in asked.items() if value}}


def encoder_named(what: str | Path, wanted: Wanted) -> Encoder:
    checkpoint = checkpoint_of(what)
    if checkpoint is None:
        found = _of_timm(str(what), wanted)
    else:
        found = (_of_onnx if checkpoint.suffix == ".onnx" else _of_checkpoint)(checkpoint, wanted)
    name = str(what) if checkpoint is None else str(Path(what).expanduser().resolve())
    return dataclasses.replace(found, flip=wanted.flip, opened=wanted.again(name))


def _of_onnx(path: Path, wanted: Wanted) -> Encoder:
    fixed = ("weights", "pooling", "dim", "image", "resize")
    if given := [name for name in fixed if getattr(wanted, name) is not None]:
        field = f"{'data' if given[0] in ('image', 'resize') else 'model'}.{given[0]}"
        raise SettingError(field, f"{field} is fixed in {path}: leave it out")
    device = _device(wanted.device, "cpu")
    model = OnnxModel(path, device.type == "cuda")
    facts = model.facts
    if wanted.precision not in (None, "auto", facts.precision):
        raise SettingError(
            "hardware.precision",
            f"hardware.precision={wanted.precision}: {path} is of precision {facts.precision}; leave it out",
        )
    crop = CentreCrop(facts.image, facts.resize, facts.mean, facts.std, squeeze=facts.squeeze)
    batch = wanted.batch or BATCH
    weights = f"{path} ({facts.precision})"
    hardware = HardwareSettings(precision="32")
    return Encoder(model, crop, hardware, CPU, facts.name, batch, facts.side, weights=weights, checkpoint=path)


def _of_checkpoint(path: Path, wanted: Wanted) -> Encoder:
    if given := [name for name in ("weights", "pooling", "dim") if getattr(wanted, name) is not None]:
        fields = ", ".join(f"model.{name}" for name in given)
        raise SettingError(
            f"model.{given[0]}",
            f"{fields} {'is' if len(given) == 1 else 'are'} for timm models; {path} brings its own: leave "
            f"{'it' if len(given) == 1 else 'them'} out",
        )
    folder = run_around(path)
    run = None if folder is None else Run.open(folder)
    settings = None if run is None else run.settings()
    hardware = HardwareSettings() if settings is None else settings.hardware
    device = _device(wanted.device, hardware.device)  # before the weights are read: it may not be there
    model, about = load_checkpoint(path)
    data = None if settings is None else settings.data
    own, crop = (_crop(model, data, about, asked) for asked in (Wanted(), wanted))
    side = about.get("side", needed_side(SIDE, own.resize)) if data is None else data.side
    own_batch = BATCH if settings is None else batch_of(settings)
    if wanted.precision is not None:
        hardware = dataclasses.replace(hardware, precision=wanted.precision)
    return Encoder(
        in_layout(model.to(device), hardware),
        crop,
        hardware,
        device,
        name=path.stem if folder is None else folder.name,
        batch=wanted.batch or own_batch,
        side=needed_side(side, crop.resize) if crop.resize > own.resize else side,
        workers=None if data is None else data.workers,
        weights=f"{path}{f' (epoch {epoch})' if (epoch := about.get('epoch')) is not None else ''}",
        checkpoint=path,
        about=about,
        run=run,
    )


def _of_timm(name: str, wanted: Wanted) -> Encoder:
    if name != SMALL_CNN:
        try:
            model_card(name)
        except ValueError as error:
            raise SettingError("model.name", f"there is no run folder or checkpoint {name}, and {error}") from error
    hardware = HardwareSettings(precision=wanted.precision or "auto")
    device = _device(wanted.device, "auto")
    weights = wanted.weights or ("random" if name == SMALL_CNN else "hub")
    image = wanted.image or (SMALL_IMAGE if name == SMALL_CNN else IMAGE)
    settings = ModelSettings(name, weights, wanted.pooling or "auto", dim=wanted.dim)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # what is random in it is the same in every call
        model = retriever(settings, image).eval()
    crop = CentreCrop(image, wanted.resize or _usual_resize(name, image), model.mean, model.std)
    return Encoder(
        in_layout(model.to(device), hardware),
        crop,
        hardware,
        device,
        name=name,
        batch=wanted.batch or BATCH,
        side=needed_side(SIDE, crop.resize),
        weights=f"weights {weights}",
    )


def _device(wanted: str, own: str) -> torch.device:
    """As asked; else the run's own, where it is here: its vectors are then the same to the bit."""
    if wanted != "auto":
        return device_of(wanted)
    with suppress(SettingError):
        return device_of(own)
    return device_of("auto")


def _crop(model: Retriever, data: DataSettings | None, about: Mapping[str, Any], wanted: Wanted) -> CentreCrop:
    """The run's own crop, or the checkpoint's; in proportion where another size is asked for."""
    if data is not None:
        own = centre_crop(data, model)
    else:
        resize = about.get("resize") or _usual_resize(model.settings.name, model.image)
        own = CentreCrop(model.image, resize, model.mean, model.std, squeeze=about.get("squeeze", False))
    image = own.size if wanted.image is None else _other_size(model, wanted.image)
    return dataclasses.replace(own, size=image, resize=wanted.resize or own.resize * image // own.size)


def _usual_resize(name: str, image: int) -> int:
    """Pretrained networks see the middle of a picture, 224 of 256; small pictures are better seen whole."""
    return image if name == SMALL_CNN else image * 8 // 7


def _other_size(model: Retriever, image: int) -> int:
    """Convolutional networks see pictures of another size than they were trained with; most transformers do not."""
    if image != model.image:
        try:
            trial_features(model.backbone, model.settings.name, image)
        except ValueError as error:
            raise SettingError(
                "data.image",
                f"data.image={image}: this {model.settings.name} takes pictures of {model.image} pixels; leave "
                "data.image out",
            ) from error
    return image


def records_for(encoder: Encoder, data: str | None, root: str | Path | None) -> Records:
    """See `Encoder.records`."""
    run = encoder.run
    if run is None:
        if data is None:
            raise SettingError(
                "data.name", f"data.name is missing: which pictures? One of {', '.join(READERS)}; folder for your own"
            )
        return _read(data, root)
    own = run.settings().data
    if data is None and own.test_sets:
        offers = " or ".join(f"data.name={name} data.root={where}" for name, where in own.test_sets.items())
        raise SettingError(
            "data.name", f"{encoder.name} was tested on other pictures than it was trained on; say which: {offers}"
        )
    if root is None and data in (None, own.name):
        root = _own_root(run, own)
    records = _read(data or own.name, root)
    # a root alone says that the pictures of the run have moved there
    if data is not None and not _same_pictures(own, data, root):
        return records
    division, notes = run.division(records)
    if division is not records:
        sizes = ", ".join(f"{split} {len(division.split(split)):,}" for split in division.split_names())
        notes = [f"divided as in the run: {sizes}", *notes]
    return dataclasses.replace(division, notes=(*division.notes, *notes))


def _read(name: str, root: str | Path | None) -> Records:
    check_root(name, root)
    return dataset(name, root)


def _own_root(run: Run, own: DataSettings) -> Path | None:
    """Where the run found its pictures."""
    if own.root is None:
        return None
    if not Path(own.root).is_absolute():  # an older version kept it as it was typed
        raise SettingError(
            "data.root",
            f"{run.folder} found its pictures in {own.root}, relative to a folder that it did not note: give "
            f"data.root=PATH, the whole path of {own.root}",
        )
    return Path(own.root)


def _same_pictures(own: DataSettings, name: str, root: str | Path | None) -> bool:
    if own.name != name or (own.root is None) != (root is None):
        return False
    return own.root is None or root is None or Path(own.root).resolve() == Path(root).resolve()
