"""Weights into a backbone: at random, from a file, or from the hub; all of them or an error that says which are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from roadmap.config.settings import ModelSettings
from roadmap.models.backbones import SMALL_CNN, backbone_of, timm_library
from roadmap.models.hub import hub_file
from roadmap.models.weight_files import WeightsError, tensors_in

# Classifiers are not part of a backbone; timm also says what a model's own is called.
CLASSIFIERS = ("head", "head_dist", "fc", "classifier", "head.fc")
SHOWN = 4


def load_weights(backbone: nn.Module, settings: ModelSettings, image: int) -> None:
    """Fill the backbone with the weights that the settings name; "random" leaves it as it is."""
    if settings.weights == "random":
        return
    if settings.weights == "hub":
        file = hub_file(_distilled_twin(settings.name) if settings.drop_distillation else settings.name)
    else:
        file = Path(settings.weights)
    fill_backbone(backbone, _without_distillation(tensors_in(file), backbone, settings, file), settings, image, file)


def fill_backbone(
    backbone: nn.Module, tensors: dict[str, Tensor], settings: ModelSettings, image: int, file: Path
) -> None:
    """Fill the backbone with tensors from a file, all of it; positions are resampled to the size of the pictures."""
    wanted = backbone.state_dict()
    if _misfits(tensors, wanted, backbone) and settings.name != SMALL_CNN:
        tensors = _conversion(tensors, backbone, settings, image)
    problems = _misfits(tensors, wanted, backbone)
    if problems:
        raise WeightsError(f"{file} does not fit {settings.name}: {problems}")
    backbone.load_state_dict({name: value for name, value in tensors.items() if name in wanted})


def _without_distillation(
    tensors: dict[str, Tensor], backbone: nn.Module, settings: ModelSettings, file: Path
) -> dict[str, Tensor]:
    """The weights without a distillation token if that is to be dropped; a wrong pair of file and model is refused."""
    distilled_file, distilled_model = "dist_token" in tensors, hasattr(backbone, "dist_token")
    if settings.drop_distillation and distilled_model:
        raise WeightsError(
            f"model.drop_distillation loads a distilled transformer's weights into the plain one, but {settings.name} "
            f"is distilled itself; set model.name={settings.name.replace('_distilled', '')}, or leave the option out"
        )
    if settings.drop_distillation and not distilled_file:
        raise WeightsError(f"{file} has no distillation token to drop; set model.drop_distillation=false")
    if distilled_file and not distilled_model and not settings.drop_distillation:
        raise WeightsError(
            f"{file} holds a distilled transformer, {settings.name} is a plain one. Either keep the distillation token "
            f"and use it as it was trained: model.name={_distilled_twin(settings.name)}; or drop it, as the released "
            "code of the paper did: model.drop_distillation=true"
        )
    if not settings.drop_distillation:
        return tensors
    # The class token has the first position, the distillation token the second.
    positions = tensors["pos_embed"]
    rest = {name: value for name, value in tensors.items() if name.split(".")[0] not in ("dist_token", "head_dist")}
    return {**rest, "pos_embed": torch.cat([positions[:, :1], positions[:, 2:]], dim=1)}


def _distilled_twin(name: str) -> str:
    """deit_small_patch16_224 -> deit_small_distilled_patch16_224."""
    architecture = name.split(".")[0]
    twin = architecture.replace("_patch", "_distilled_patch", 1)
    if twin == architecture or not timm_library().is_model(twin):
        raise WeightsError(
            f"timm has no distilled twin of {name}; model.drop_distillation is for plain DeiT models, such as "
            "deit_small_patch16_224"
        )
    return twin


def _conversion(
    tensors: dict[str, Tensor], backbone: nn.Module, settings: ModelSettings, image: int
) -> dict[str, Tensor]:
    """The weights as timm adapts them: positions resampled to the size of the pictures, foreign names translated.

    timm's conversion is different for each family and not to be had apart from building a model, so a second one is
    built, with a classifier if the file has one, because some conversions recognise the file by it.
    """
    classifier = next((f"{name}.weight" for name in _classifiers(backbone) if f"{name}.weight" in tensors), None)
    classes = len(tensors[classifier]) if classifier else 0
    known = {"state_dict": tensors, "num_classes": classes, "label_offset": 0}

    def rebuilt(seed: int) -> Mapping[str, Tensor]:
        torch.manual_seed(seed)
        plain = dataclasses.replace(settings, drop_path=0.0)
        return backbone_of(
            plain, image, pretrained=True, num_classes=classes, pretrained_cfg_overlay=dict(known)
        ).state_dict()

    wanted = backbone.state_dict()
    with torch.random.fork_rng(devices=[]):
        try:
            found = rebuilt(0)
            # timm lets some families load in part. What was not loaded is random, and differs from seed to seed.
            again = found if wanted.keys() <= tensors.keys() else rebuilt(1)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError):
            return tensors  # it fits no better than before, and `_misfits` says how
    return {name: value for name, value in found.items() if name in wanted and torch.equal(value, again[name])}


def _classifiers(backbone: nn.Module) -> list[str]:
    own = getattr(backbone, "pretrained_cfg", {}).get("classifier") or ()
    return [*([own] if isinstance(own, str) else own), *CLASSIFIERS]


def _misfits(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], backbone: nn.Module) -> str:
    """What keeps the tensors from filling the backbone, in words; empty if nothing does."""
    heads = {f"{name}.{part}" for name in _classifiers(backbone) for part in ("weight", "bias")}
    # Counters that torchvision's older files lack; torch makes up for them.
    missing = [name for name in wanted if name not in tensors and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in tensors if name not in wanted and name not in heads]
    reshaped = [name for name in wanted if name in tensors and tensors[name].shape != wanted[name].shape]
    if not (missing or unexpected or reshaped):
        return ""
    shapes = [f"{name} {tuple(tensors[name].shape)} for {tuple(wanted[name].shape)}" for name in reshaped]
    counts = [
        f"{len(names)} {what} ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if names
    ]
    reason = _reason(missing, unexpected, reshaped, wanted)
    return f"{len(wanted)} tensors are wanted, and there are {'; '.join(counts)}. {reason}"


def _reason(missing: list[str], unexpected: list[str], reshaped: list[str], wanted: Mapping[str, Tensor]) -> str:
    if len(missing) > len(wanted) / 2:
        reason = "The file is of another architecture"
    elif "dist_token" in missing:
        reason = "The file is of a plain transformer and the model is distilled"
    elif len(reshaped) > len(wanted) / 2:
        reason = "The file is of a narrower or wider model of the same family"
    elif missing:
        reason = "The file is of a shallower model, or not whole"
    elif unexpected:
        reason = "The file is of a deeper model, or of one with parts that this one lacks"
    else:
        reason = "The file is of a variant that differs in these"
    return f"{reason}: does model.name say what the file was made for?"
