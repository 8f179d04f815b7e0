"""Published weights: where they are, whether they are here already, and how to bring them when nothing answers."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from roadmap.models.backbones import SMALL_CNN, model_card
from roadmap.models.weight_files import WeightsError

PATIENCE = 5.0  # seconds


def hub_file(name: str) -> Path:
    """The file of a timm model's published weights: from the cache if it is there, else downloaded."""
    file = _published_file(name, fetch=True)
    assert file is not None
    return file


def check_hub(name: str) -> None:
    """The published weights are in the cache, or their server answers; nothing is downloaded."""
    _published_file(name, fetch=False)


def _published_file(name: str, fetch: bool) -> Path | None:
    if name == SMALL_CNN:
        raise WeightsError(f"{SMALL_CNN} is built in and has no published weights; set model.weights=random or a file")
    about = model_card(name)
    if about.hf_hub_id:
        return _from_hugging_face(name, about, fetch)
    if about.url:
        return _from_address(name, about.url, fetch)
    raise WeightsError(f"no weights of {name} are published; set model.weights=random or a file")


def _from_hugging_face(name: str, about: Any, fetch: bool) -> Path | None:
    import huggingface_hub as hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repository, _, revision = about.hf_hub_id.partition("@")
    place: dict[str, Any] = {"repo_id": repository, "revision": revision or None}
    names = [about.hf_hub_filename] if about.hf_hub_filename else ["model.safetensors", "pytorch_model.bin"]
    for file in names:
        if isinstance(kept := hub.try_to_load_from_cache(filename=file, **place), str):
            return Path(kept)
    address = f"{hub.constants.ENDPOINT}/{repository}/resolve/{revision or 'main'}/{names[0]}"
    if hub.constants.HF_HUB_OFFLINE:
        raise _unreachable(name, address, "HF_HUB_OFFLINE is set and the file is not in the cache")
    _check_answer(name, address)
    if not fetch:
        return None
    for file in names:
        try:
            return Path(hub.hf_hub_download(filename=file, **place))
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError):  # not "there is none" but "nobody answered"
                raise _unreachable(name, address, str(error)) from error
        except Exception as error:  # whatever went wrong on the way, the advice is the same
            raise _unreachable(name, address, str(error)) from error
    raise _unreachable(name, address, f"{repository} has none of {', '.join(names)}")


def _from_address(name: str, address: str, fetch: bool) -> Path | None:
    import torch.hub

    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(address).path).name
    if not file.is_file():
        _check_answer(name, address)
        if not fetch:
            return None
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(address, str(file))
        except OSError as error:
            raise _unreachable(name, address, str(error)) from error
    return file


def _check_answer(name: str, address: str) -> None:
    """Find out at once that there is no network, where downloaders try again for a minute. A proxy knows better."""
    if getproxies():
        return
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname, parts.port or 443), timeout=PATIENCE).close()
    except OSError as error:
        raise _unreachable(name, address, f"{parts.hostname} does not answer: {error}") from error


def _unreachable(name: str, address: str, reason: str) -> WeightsError:
    failed = f"the weights of {name} could not be fetched ({reason})"
    return WeightsError(
        f"{failed}. To bring them: on a machine with network download {address}, copy the file here, and set "
        "model.weights=FILE; or start at random with model.weights=random",
        address,
        failed,
    )
