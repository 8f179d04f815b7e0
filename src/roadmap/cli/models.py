"""MODEL on the command line: a run folder, a checkpoint, or the name of a timm model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from roadmap.cli.options import MODEL, Asked
from roadmap.config.settings import ModelSettings
from roadmap.models import Retriever, load_checkpoint, retriever
from roadmap.models.backbones import SMALL_CNN, model_card, trial_features
from roadmap.models.weight_files import PICKLES
from roadmap.runs import Run

IMAGE, SMALL_IMAGE = 224, 32


@dataclass(frozen=True, eq=False)
class Named:
    """The model that was named.

    Attributes:
        model: on the CPU, in evaluation mode.
        name: for titles.
        weights: where they came from, in words.
        image: side of the pictures that it is to see.
        resize: their shorter side before the centre is cut out.
        checkpoint: its file, if any.
        about: what the checkpoint says about it.
        run: that it came from, if any.
    """

    model: Retriever
    name: str
    weights: str
    image: int
    resize: int
    checkpoint: Path | None = None
    about: dict[str, Any] | None = None
    run: Run | None = None

    @property
    def architecture(self) -> str:
        return self.model.settings.name


def named_model(asked: Asked) -> Named:
    """The model that was asked for, with its weights."""
    path = Path(asked.model).expanduser()
    if path.is_dir():
        return _of_run(path, asked)
    if path.is_file():
        return _of_checkpoint(path, asked)
    if path.suffix in (".safetensors", *PICKLES) or len(path.parts) > 1:
        raise FileNotFoundError(f"there is no run folder or checkpoint {path}. MODEL is {MODEL}")
    return _of_timm(asked)


def _of_run(folder: Path, asked: Asked) -> Named:
    inside = sorted(config.parent for config in folder.glob("*/config.yaml"))
    if inside and not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} is not a run but holds {len(inside)}; name one of them, such as {inside[0]}")
    run = Run.open(folder)
    if not run.best.is_file():
        advice = f"go on with the run: roadmap train resume={folder}" if run.last.is_file() else "train again"
        raise FileNotFoundError(
            f"{folder} has no checkpoint yet: {run.best} is written once an epoch was evaluated; wait for it, "
            f"or {advice}"
        )
    return _of_checkpoint(run.best, asked)


def _of_checkpoint(path: Path, asked: Asked) -> Named:
    if path.suffix in PICKLES:
        raise ValueError(
            f"{path} is no checkpoint of a model, which ends in .safetensors. The last.pt of a run is its state: name "
            f"the run folder. Weights of a backbone need its name: NAME --weights {path}"
        )
    given = [f"--{name}" for name in ("weights", "pooling", "dim") if getattr(asked, name) is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} for timm models; {path} brings its own: leave "
            f"{'it' if len(given) == 1 else 'them'} out"
        )
    model, about = load_checkpoint(path)
    image = model.image if asked.image is None else _other_size(model, asked.image)
    resize = about.get("resize", _usual_resize(model.settings.name, model.image)) * image // model.image
    run = _run_around(path)
    epoch = f" (epoch {about['epoch']})" if "epoch" in about else ""
    return Named(
        model,
        path.stem if run is None else run.folder.resolve().name,
        f"{path}{epoch}",
        image,
        asked.resize or resize,
        path,
        about,
        run,
    )


def _of_timm(asked: Asked) -> Named:
    name = asked.model
    if name != SMALL_CNN:
        try:
            model_card(name)
        except ValueError as error:
            raise ValueError(f"there is no run folder or checkpoint {name}, and {error}") from error
    weights = asked.weights or ("random" if name == SMALL_CNN else "hub")
    image = asked.image or (SMALL_IMAGE if name == SMALL_CNN else IMAGE)
    settings = ModelSettings(name, weights, asked.pooling or "auto", dim=asked.dim)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # what is random in it is the same in every call
        model = retriever(settings, image).eval()
    return Named(model, name, f"weights {weights}", image, asked.resize or _usual_resize(name, image))


def _usual_resize(name: str, image: int) -> int:
    """Pretrained networks see the middle of a picture, 224 of 256; small pictures are better seen whole."""
    return image if name == SMALL_CNN else image * 8 // 7


def _other_size(model: Retriever, image: int) -> int:
    """Convolutional networks see pictures of another size than they were trained with; most transformers do not."""
    if image != model.image:
        try:
            trial_features(model.backbone, model.settings.name, image)
        except ValueError as error:
            raise ValueError(
                f"--image {image}: this {model.settings.name} takes pictures of {model.image} pixels; leave --image out"
            ) from error
    return image


def _run_around(checkpoint: Path) -> Run | None:
    with suppress(FileNotFoundError):
        run = Run.open(checkpoint.resolve().parent.parent)
        if run.best == checkpoint.resolve():
            return run
    return None
