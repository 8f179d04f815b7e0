"""Published weights: taken from the cache, or a message that says at once how to bring them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from safetensors.torch import save_file

from roadmap.config.settings import ModelSettings
from roadmap.models import WeightsError, retriever
from roadmap.models.hub import hub_file


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """An empty cache, no proxy, and nobody who answers; who was asked."""
    asked: list[Any] = []

    def refuse(address: Any, *_: Any, **__: Any) -> None:
        asked.append(address)
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr("roadmap.models.hub.getproxies", dict)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))
    return asked


def test_a_hub_that_does_not_answer_is_told_with_the_way_out(no_network: list[Any]) -> None:
    with pytest.raises(WeightsError) as caught:
        retriever(ModelSettings("test_resnet", weights="hub"), 32)
    assert len(no_network) == 1  # asked once; the libraries would ask again and again
    message = str(caught.value)
    assert "the weights of test_resnet could not be fetched" in message
    assert "huggingface.co does not answer: Name or service not known" in message
    assert "https://huggingface.co/timm/test_resnet.r160_in1k/resolve/main/model.safetensors" in message
    assert "model.weights=FILE" in message
    assert "model.weights=random" in message


@pytest.mark.usefixtures("no_network")
def test_a_tag_chooses_the_weights() -> None:
    with pytest.raises(WeightsError, match="/timm/resnet50.tv_in1k/resolve"):
        hub_file("resnet50.tv_in1k")


@pytest.mark.usefixtures("no_network")
def test_the_released_variant_asks_for_the_distilled_weights() -> None:
    settings = ModelSettings("deit_tiny_patch16_224", weights="hub", drop_distillation=True)
    with pytest.raises(WeightsError, match="/timm/deit_tiny_distilled_patch16_224.fb_in1k/"):
        retriever(settings, 32)
    with pytest.raises(WeightsError, match="no distilled twin of test_vit; .*such as deit_small_patch16_224"):
        retriever(ModelSettings("test_vit", weights="hub", drop_distillation=True), 32)


@pytest.mark.usefixtures("no_network")
def test_the_cache_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--timm--test_resnet.r160_in1k"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    weights = timm.create_model("test_resnet").state_dict()
    save_file(weights, folder / "snapshots" / "abc" / "model.safetensors")
    model = retriever(ModelSettings("test_resnet", weights="hub"), 32)
    assert all(torch.equal(value, weights[name]) for name, value in model.backbone.state_dict().items())


@pytest.mark.usefixtures("no_network")
def test_weights_at_an_address_of_their_own(tmp_path: Path) -> None:
    address = timm.models.get_pretrained_cfg("legacy_seresnet18").url
    with pytest.raises(WeightsError, match=f"github.com does not answer.*download {address},"):
        hub_file("legacy_seresnet18")
    kept = tmp_path / "torch" / "checkpoints" / address.split("/")[-1]
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert hub_file("legacy_seresnet18") == kept


def test_what_the_download_meets_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second name is tried when there is no file of the first; anything else ends it."""
    asked = []

    def download(filename: str, **_: Any) -> str:
        asked.append(filename)
        if filename == "model.safetensors":
            raise huggingface_hub.errors.EntryNotFoundError("404")
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("roadmap.models.hub.getproxies", lambda: {"https": "proxy"})
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(WeightsError, match="test_resnet could not be fetched .reset by peer"):
        hub_file("test_resnet")
    assert asked == ["model.safetensors", "pytorch_model.bin"]
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda filename, **_: f"/kept/{filename}")
    assert hub_file("test_resnet") == Path("/kept/model.safetensors")


@pytest.mark.parametrize("name", ["small_cnn", "vit_small_patch16_36x1_224"])
def test_what_is_not_published_is_told(name: str) -> None:
    with pytest.raises(WeightsError, match=f"{name}.* set model.weights=random or a file"):
        hub_file(name)


@pytest.mark.usefixtures("no_network")
def test_offline_mode_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub reads HF_HUB_OFFLINE=1 once, when it is imported."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        WeightsError, match="HF_HUB_OFFLINE is set and the file is not in the cache.*test_vit.r160_in1k"
    ):
        retriever(ModelSettings("test_vit", weights="hub"), 32)
