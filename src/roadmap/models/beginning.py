"""The model that a run begins with: at random, with the weights of a backbone, or as another run left it."""

from __future__ import annotations

from pathlib import Path

from roadmap.config.settings import ModelSettings
from roadmap.config.settings_checks import as_typed
from roadmap.models.backbones import backbone_of
from roadmap.models.checkpoints import checkpoint_parts
from roadmap.models.network import Retriever, untrained_retriever
from roadmap.models.weight_files import WeightsError, check_there
from roadmap.models.weights import fill_backbone, load_weights
from roadmap.names import CHECKPOINT

NO_PATHS = ("auto", "random", "hub")
# What of a model's settings its weights are for.
SHAPING = ("name", "pooling", "layer_norm", "dim", "stride_first")


def retriever(settings: ModelSettings, image: int = 224) -> Retriever:
    """A model with the weights that its settings name, for square pictures of a size.

    The paper's models: ResNet-50, `ModelSettings("resnet50", weights, dim=512, freeze_batch_norm=True)`, for CUB with
    `pooling="max", layer_norm=True`; distilled DeiT-S, `ModelSettings("deit_small_distilled_patch16_224", weights)`;
    DeiT-S as the released code had it, the plain architecture with the distilled one's weights,
    `ModelSettings("deit_small_patch16_224", weights, drop_distillation=True)`.

    Args:
        settings: backbone, weights, pooling and head. Weights of a file fill the backbone, those of a run's folder the
            head too.
        image: side of the pictures. Position embeddings of transformers are resampled to it.
    """
    if (file := checkpoint_before(settings.weights)) is not None:
        return _as_left(file, settings, image)
    backbone = backbone_of(settings, image)
    load_weights(backbone, settings, image)
    return Retriever(backbone, settings, image)


def checkpoint_before(weights: str) -> Path | None:
    """The checkpoint of the run that another begins with; None where `weights` are not those of a run.

    Raises:
        WeightsError: a folder that has none.
    """
    folder = Path(weights).expanduser()
    if weights in NO_PATHS or not folder.is_dir():
        return None
    if not (file := folder / CHECKPOINT).is_file():
        raise WeightsError(
            f"model.weights={weights} must be a file of weights, or the folder of a run that has saved some, but there "
            f"is no {file}"
        )
    return file


def left_by(weights: str) -> tuple[ModelSettings, int] | None:
    """Of the model that another run left: its settings, and the side of its pictures; None where there is none."""
    if (file := checkpoint_before(weights)) is None:
        return None
    settings, content, _ = checkpoint_parts(file)
    return settings, int(content["image"])


def check_weights(settings: ModelSettings) -> None:
    """What the settings name is there; a run's weights are of such a model. Nothing is downloaded."""
    if (file := checkpoint_before(settings.weights)) is not None:
        _check_alike(file, checkpoint_parts(file)[0], settings)
    elif settings.weights not in NO_PATHS:
        check_there(Path(settings.weights).expanduser())


def _as_left(file: Path, settings: ModelSettings, image: int) -> Retriever:
    """Backbone and head as the run that wrote the checkpoint left them."""
    theirs, _, tensors = checkpoint_parts(file)
    _check_alike(file, theirs, settings)
    model = untrained_retriever(settings, image)
    prefix = "backbone."
    backbone = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    fill_backbone(model.backbone, backbone, settings, image, file)
    filled = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(prefix)}
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)} | filled)
    return model


def _check_alike(file: Path, theirs: ModelSettings, ours: ModelSettings) -> None:
    for name in SHAPING:
        there, here = getattr(theirs, name), getattr(ours, name)
        if there != here:
            run = file.parents[len(CHECKPOINT.parts) - 1]
            raise WeightsError(
                f"model.weights={run} stands for all weights of that run, whose model.{name} is {as_typed(there)} "
                f"and not {as_typed(here)}: give model.{name}={as_typed(there)}, or begin with its backbone alone: "
                f"model.weights={file}"
            )
