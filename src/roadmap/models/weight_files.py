"""Reading files of weights. Nothing that is read can run code."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roadmap.config.settings import SettingError

PICKLES = (".pth", ".pt", ".bin")
# Training programs keep the weights among other things, an average of them under its own name, which is the better one.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
# What wrappers put before the names: parallel training, torch.compile, and models that have a backbone as a part.
PREFIXES = ("module.", "_orig_mod.", "backbone.")


class WeightsError(SettingError):
    """Weights that cannot be had, read, or fitted into the model; the message says what to do.

    Attributes:
        field: "model.weights".
        address: where they could be fetched from, if that is what failed.
        reason: what failed, without what to do about it.
    """

    def __init__(self, message: str, address: str | None = None, reason: str | None = None) -> None:
        super().__init__("model.weights", message)
        self.address, self.reason = address, reason or message


def check_there(path: Path) -> None:
    """The file of weights exists."""
    if not path.is_file():
        raise WeightsError(
            f'model.weights must be "random", "hub" or an existing file, or the folder of a run, got {path}; '
            f"there is no such file{'' if path.parent.is_dir() else f', nor the folder {path.parent}'}"
        )


def tensors_in(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pth, .pt or .bin file by name, in float32; unwrapped, without prefixes.

    A file with a "backbone." gives that and leaves the rest, which is somebody's head; so does a checkpoint of ours.
    """
    check_there(path)
    if path.suffix == ".safetensors":
        content = _safetensors(path)
    elif path.suffix in PICKLES:
        content = _state_dict(_pickle(path), path)
    else:
        raise WeightsError(
            f"{path} must end in .safetensors, {', '.join(PICKLES)}, got {path.suffix or 'no ending'!r}; "
            "rename it if it is one of these"
        )
    if not content:
        raise WeightsError(f"{path} holds no tensors")
    tensors = _without_prefixes(content).items()
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors}


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} could not be read as .safetensors, is it whole? ({error})") from error


def _pickle(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        objects = re.search(r"GLOBAL (\S+)", str(error))
        if objects is None:
            raise WeightsError(f"{path} could not be read, is it whole? ({_first_line(error)})") from error
        raise WeightsError(
            f"{path} holds Python objects beside tensors ({objects[1]}), and loading those could run code; nothing of "
            "it was loaded. If you trust where it comes from, keep its tensors alone: "
            "`torch.save(torch.load(FILE, weights_only=False)['state_dict'], 'weights.pth')`, with 'model' or nothing "
            "where it has no 'state_dict'"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{path} could not be read, is it whole? ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    while isinstance(content, Mapping):
        wrapper = next((name for name in WRAPPERS if isinstance(content.get(name), Mapping)), None)
        if wrapper is None:
            break
        content = content[wrapper]
    if not isinstance(content, Mapping):
        raise WeightsError(f"{path} must hold tensors by name, a state dict; it holds a {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise WeightsError(
                f"{path} must hold tensors by name, or hold such a dict under {', '.join(WRAPPERS)}; "
                f"under {name!r} it has a {type(value).__name__}"
            )
    return dict(content)


def _without_prefixes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in PREFIXES:
        inside = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        if inside and (prefix == "backbone." or len(inside) == len(tensors)):
            tensors = inside
    return tensors
