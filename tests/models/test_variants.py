"""Models that timm has not as they are: a distilled DeiT without its token, ResNet-50 as first published."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from roadmap.config.composition import settings_from
from roadmap.config.settings import ModelSettings, SettingError
from roadmap.models import load_checkpoint, retriever, save_checkpoint
from roadmap.models.backbones import is_transformer, outline

V1 = ModelSettings("resnet50", stride_first=True)
STAGES = ("layer1", "layer2", "layer3", "layer4")


def strides(model: torch.nn.Module) -> list[tuple[int, int]]:
    """Of the first two convolutions of each stage."""
    blocks = [getattr(model, stage)[0] for stage in STAGES]
    return [(block.conv1.stride[0], block.conv2.stride[0]) for block in blocks]


def test_the_released_deit_takes_distilled_weights_and_drops_their_token(tmp_path: Path) -> None:
    file = tmp_path / "distilled.safetensors"
    theirs = timm.create_model("deit_small_distilled_patch16_224").state_dict()
    save_file(theirs, file)
    settings = settings_from(["model=deit_small_released", f"model.weights={file}"]).model
    ours = retriever(settings, 224).backbone.state_dict()
    assert "dist_token" not in ours
    kept = {name for name in theirs if name.split(".")[0] not in ("dist_token", "head", "head_dist")}
    assert set(ours) == kept
    positions = theirs["pos_embed"]  # the class token's, the distillation token's, the patches'
    assert torch.equal(ours["pos_embed"], torch.cat([positions[:, :1], positions[:, 2:]], dim=1))
    assert all(torch.equal(ours[name], theirs[name]) for name in kept - {"pos_embed"})


def test_the_released_deit_asks_the_hub_for_distilled_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "distilled.safetensors"
    save_file(timm.create_model("deit_small_distilled_patch16_224").state_dict(), file)
    asked: list[str] = []
    monkeypatch.setattr("roadmap.models.weights.hub_file", lambda name: asked.append(name) or file)
    retriever(settings_from(["model=deit_small_released"]).model, 224)
    assert asked == ["deit_small_distilled_patch16_224"]


def test_the_first_resnet_strides_in_its_first_convolutions() -> None:
    first, later = (retriever(dataclasses.replace(V1, stride_first=on), 64) for on in (True, False))
    assert strides(first.backbone) == [(1, 1), (2, 1), (2, 1), (2, 1)]
    assert strides(later.backbone) == [(1, 1), (1, 2), (1, 2), (1, 2)]
    for block in later.backbone.layer2:  # type: ignore[union-attr]
        torch.nn.init.ones_(block.bn3.weight)  # timm starts with zero, which leaves the convolutions out
    first.load_state_dict(later.state_dict())  # the same weights, elsewhere applied
    pictures = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        one, other = first.eval()(pictures), later.eval()(pictures)
    assert one.shape == other.shape
    assert not torch.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("name", ["small_cnn", "resnet18", "test_vit"])
def test_others_have_no_such_strides(name: str) -> None:
    said = f"model.stride_first is for ResNets with bottlenecks, such as resnet50; {name} has none"
    with pytest.raises(SettingError, match=said) as caught:
        retriever(ModelSettings(name, stride_first=True), 32)
    assert caught.value.field == "model.stride_first"


def test_a_checkpoint_remembers_the_strides(tmp_path: Path) -> None:
    model = retriever(dataclasses.replace(V1, dim=8), 64).eval()
    save_checkpoint(tmp_path / "v1.safetensors", model, {})
    again, _ = load_checkpoint(tmp_path / "v1.safetensors")
    assert again.settings.stride_first
    pictures = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(model(pictures), again(pictures))


def test_the_options_of_the_group() -> None:
    first, usual = (settings_from([f"model={name}"]) for name in ("resnet50_v1", "resnet50"))
    assert first.optim == usual.optim
    assert dataclasses.replace(first.model, name=usual.model.name, weights="hub", stride_first=False) == usual.model


def test_real_weights_of_the_first_resnet(outside_data: Path) -> None:
    file = outside_data / "weights" / "resnet50_v1_in1k_fp16.safetensors"
    if not file.is_file():
        pytest.skip("the weights are not there")
    settings = settings_from(["recipe=cub_resnet50", "model=resnet50_v1", f"model.weights={file}"]).model
    model = retriever(settings, 224).eval()  # all of them or an error
    assert strides(model.backbone)[1] == (2, 1)
    with torch.no_grad():
        vectors = model(torch.randn(2, 3, 224, 224))
    assert vectors.shape == (2, 512)
    assert vectors.isfinite().all()


@pytest.mark.parametrize(
    ("name", "wanted", "size", "transformer"),
    [
        ("vit_small_patch14_dinov2", 160, 154, True),
        ("vit_small_patch14_dinov2", 224, 224, True),
        ("deit_small_distilled_patch16_224", 96, 96, True),
        ("efficientformer_l1", 160, 224, True),
        ("resnet50", 160, 160, False),
        ("convnext_tiny", 160, 160, False),
        ("small_cnn", 96, 96, False),
    ],
)
def test_an_outline_knows_size_and_family_without_weights(name: str, wanted: int, size: int, transformer: bool) -> None:
    backbone, found = outline(name, wanted)
    assert (found, is_transformer(backbone)) == (size, transformer)
    assert all(weight.is_meta for weight in backbone.parameters())
