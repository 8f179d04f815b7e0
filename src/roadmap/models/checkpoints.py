"""Checkpoints: a model and everything that is needed to use it, in one .safetensors file that cannot run code."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roadmap.atomic import whole_file
from roadmap.config.settings import ModelSettings, keyword_arguments
from roadmap.models.network import Retriever, untrained_retriever
from roadmap.models.weight_files import WeightsError

FORMAT, VERSION = "roadmap-retriever", 1


def weights_digest(state: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """A hash of weights by name, and of plain settings that decide what comes of them."""
    found = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(state.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def save_checkpoint(path: str | Path, model: Retriever, about: dict[str, Any]) -> None:
    """Write the model into one self-contained .safetensors file, whole or not at all.

    Args:
        path: of the file; an older one is replaced.
        model: with its settings, picture size and normalisation.
        about: whatever else should travel with it (how pictures are cropped, scores, the run), of plain JSON values.
    """
    from safetensors.torch import save_file

    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} must end in .safetensors, got {path.suffix or 'no ending'!r}")
    content = {
        "settings": dataclasses.asdict(model.settings),
        "image": model.image,
        "mean": model.mean,
        "std": model.std,
        "about": about,
    }
    try:
        header = {"format": FORMAT, "version": str(VERSION), "retriever": json.dumps(content)}
    except (TypeError, ValueError) as error:
        raise TypeError(f"about must be of plain JSON values: {error}") from error
    # Copies: the format refuses tensors that share memory, and memory formats other than the plain one.
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    with whole_file(path) as temporary:
        save_file(tensors, temporary, metadata=header)


def load_checkpoint(path: str | Path) -> tuple[Retriever, dict[str, Any]]:
    """The model that `save_checkpoint` wrote, on the CPU and in evaluation mode, and what was said about it.

    Needs neither the hub nor the file that training started from, and leaves the state of random numbers alone.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    settings, content, tensors = checkpoint_parts(path)
    image, mean, std, about = (content[name] for name in ("image", "mean", "std", "about"))
    with torch.random.fork_rng(devices=[]):
        model = untrained_retriever(settings, image)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise WeightsError(
            f"{path}: its weights do not fit {settings.name} as it is built here, perhaps by another version of timm: "
            f"{error}"
        ) from error
    model.mean, model.std = tuple(mean), tuple(std)
    return model.eval(), about


def checkpoint_parts(path: Path) -> tuple[ModelSettings, dict[str, Any], dict[str, Tensor]]:
    """What a checkpoint file was made by, all else that it says of itself, and its tensors; other files are refused."""
    content, tensors = _parts(path)
    try:
        settings = ModelSettings(**keyword_arguments(ModelSettings, content["settings"], "model."))
        return settings, {name: content[name] for name in ("image", "mean", "std", "about")}, tensors
    except (LookupError, TypeError, ValueError) as error:
        raise WeightsError(f"{path}: the description of the model could not be read: {error}") from error


def _parts(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            _check_header(header, path)
            return json.loads(header["retriever"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} could not be read as a checkpoint, is it whole? ({error})") from error
    except (KeyError, json.JSONDecodeError) as error:
        raise WeightsError(f"{path} has a damaged description: {error}") from error


def _check_header(header: dict[str, str], path: Path) -> None:
    if header.get("format") != FORMAT:
        raise WeightsError(
            f"{path} holds weights but is no checkpoint of a trained retrieval model; weights of a backbone go into "
            f"model.weights={path}"
        )
    version = header.get("version", "")
    if not version.isdigit() or int(version) > VERSION:
        raise WeightsError(
            f"{path} was written by a newer version of roadmap (format {version or 'unknown'}, this one reads up to "
            f"{VERSION}); install that version"
        )
