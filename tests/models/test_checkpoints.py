"""Checkpoints: everything to the bit, in one file that needs nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from roadmap.config.settings import ModelSettings
from roadmap.models import Retriever, WeightsError, load_checkpoint, retriever, save_checkpoint

MODELS = {
    "small_cnn": ModelSettings("small_cnn", pooling="gem", layer_norm=True, dim=6, freeze_batch_norm=True),
    "test_resnet": ModelSettings("test_resnet", pooling="max", dim=6),
    "test_vit": ModelSettings("test_vit", drop_path=0.1),
}


def trained(name: str) -> Retriever:
    """A model that has left its start: parameters moved, statistics of BatchNorm collected."""
    model = retriever(MODELS[name], 48).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 0 else 0.0, std=0.1)
    with torch.no_grad():
        model(torch.randn(4, 3, 48, 48))
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_comes_back_to_the_bit(name: str, tmp_path: Path) -> None:
    model, images = trained(name), torch.randn(3, 3, 48, 48)
    about = {"resize": 256, "crop": 224, "scores": {"R@1": 81.4, "mAP@R": None}, "name": "Übung"}
    save_checkpoint(tmp_path / "best.safetensors", model, about)
    torch.manual_seed(77)
    again, told = load_checkpoint(tmp_path / "best.safetensors")
    assert told == about
    assert again.settings == model.settings
    assert (again.image, again.mean, again.std, again.dim) == (48, model.mean, model.std, model.dim)
    assert not again.training
    assert again.state_dict().keys() == model.state_dict().keys()
    for key, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
    assert torch.equal(again(images), model(images))
    frozen = [m for m in again.train().modules() if isinstance(m, nn.BatchNorm2d) and not m.training]
    assert bool(frozen) == model.settings.freeze_batch_norm


def test_neither_the_first_weights_nor_the_hub_are_needed(tmp_path: Path) -> None:
    start = tmp_path / "start.pth"
    torch.save(retriever(MODELS["test_vit"], 48).backbone.state_dict(), start)
    settings = ModelSettings("test_vit", weights=str(start))
    model = retriever(settings, 48)
    start.unlink()
    save_checkpoint(tmp_path / "best.safetensors", model, {})
    model.settings = ModelSettings("test_vit", weights="hub", drop_distillation=True)
    save_checkpoint(tmp_path / "hub.safetensors", model, {})
    assert load_checkpoint(tmp_path / "best.safetensors")[0].settings == settings
    assert load_checkpoint(tmp_path / "hub.safetensors")[0].settings.weights == "hub"


def test_the_normalisation_is_the_files(tmp_path: Path) -> None:
    model = trained("small_cnn")
    model.mean, model.std = (0.5, 0.25, 0.125), (1.0, 2.0, 3.0)
    save_checkpoint(tmp_path / "a.safetensors", model, {})
    again, _ = load_checkpoint(tmp_path / "a.safetensors")
    assert (again.mean, again.std) == ((0.5, 0.25, 0.125), (1.0, 2.0, 3.0))


def test_loading_leaves_the_random_numbers_alone(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.safetensors", trained("small_cnn"), {})
    before = torch.get_rng_state()
    load_checkpoint(tmp_path / "a.safetensors")
    assert torch.equal(torch.get_rng_state(), before)


def test_memory_formats_and_shared_tensors_do_not_matter(tmp_path: Path) -> None:
    model = trained("small_cnn").to(memory_format=torch.channels_last)
    model.projection.bias = nn.Parameter(model.projection.weight[:, 0])  # a view
    save_checkpoint(tmp_path / "a.safetensors", model, {})
    again, _ = load_checkpoint(tmp_path / "a.safetensors")
    assert torch.equal(again.projection.bias, model.projection.bias)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_failed_save_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "best.safetensors"
    save_checkpoint(file, trained("small_cnn"), {"epoch": 1})

    def run_out_of_space(_tensors: Any, path: str, **_more: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", run_out_of_space)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(file, trained("small_cnn"), {"epoch": 2})
    assert load_checkpoint(file)[1] == {"epoch": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    model = trained("small_cnn")
    with pytest.raises(ValueError, match="best.pth must end in .safetensors, got '.pth'"):
        save_checkpoint(tmp_path / "best.pth", model, {})
    with pytest.raises(TypeError, match="about must be of plain JSON values: .*Path"):
        save_checkpoint(tmp_path / "best.safetensors", model, {"root": tmp_path})
    assert list(tmp_path.iterdir()) == []


def rewritten(file: Path, tensors: bool = True, **changes: str) -> None:
    """The checkpoint with another header, or without tensors."""
    with safe_open(file, framework="pt") as content:
        header = {**content.metadata(), **changes}
        kept = {name: content.get_tensor(name) for name in content.keys()} if tensors else {}  # noqa: SIM118
    safetensors.torch.save_file(kept, file, metadata={name: value for name, value in header.items() if value})


def changed(file: Path, **changes: Any) -> None:
    with safe_open(file, framework="pt") as content:
        description = {**json.loads(content.metadata()["retriever"]), **changes}
    rewritten(file, retriever=json.dumps(description))


DAMAGES: dict[str, tuple[Any, str]] = {
    "cut": (lambda f: f.write_bytes(f.read_bytes()[:-100]), "could not be read as a checkpoint, is it whole"),
    "garbage": (lambda f: f.write_bytes(b"garbage" * 50), "could not be read as a checkpoint, is it whole"),
    "empty": (lambda f: f.write_bytes(b""), "could not be read as a checkpoint, is it whole"),
    "plain weights": (
        lambda f: safetensors.torch.save_file({"a": torch.ones(1)}, f),
        "no checkpoint of a trained retrieval model; .*model.weights=.*best",
    ),
    "other format": (lambda f: rewritten(f, format="other"), "no checkpoint of a trained retrieval model"),
    "newer": (lambda f: rewritten(f, version="2"), "newer version of roadmap .format 2, this one reads up to 1"),
    "no version": (lambda f: rewritten(f, version=""), "newer version of roadmap .format unknown"),
    "no description": (lambda f: rewritten(f, retriever=""), "damaged description"),
    "broken description": (lambda f: rewritten(f, retriever="{"), "damaged description"),
    "unknown setting": (
        lambda f: changed(f, settings={"nam": "x"}),
        "unknown setting model.nam, did you mean 'model.name'",
    ),
    "no tensors": (lambda f: rewritten(f, tensors=False), "weights do not fit small_cnn as it is built here"),
    "other head": (lambda f: changed(f, settings={"name": "small_cnn"}), "weights do not fit small_cnn"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    file = tmp_path / "best.safetensors"
    save_checkpoint(file, trained("small_cnn"), {})
    damage, words = DAMAGES[name]
    damage(file)
    with pytest.raises(WeightsError, match=f"best.safetensors.*{words}"):
        load_checkpoint(file)


def test_an_absent_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint .*absent.safetensors"):
        load_checkpoint(tmp_path / "absent.safetensors")
