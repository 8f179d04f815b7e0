"""Poolings against literal loops and against timm's own."""

from __future__ import annotations

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roadmap.config.settings import ModelSettings
from roadmap.models import Retriever, retriever
from roadmap.models.pooling import generalised_mean


def literal_gem(cells: list[float], p: float) -> float:
    return (sum(max(x, 1e-6) ** p for x in cells) / len(cells)) ** (1 / p)


LITERAL = {"avg": lambda cells: sum(cells) / len(cells), "max": max, "gem": lambda cells: literal_gem(cells, 3.0)}


def literally_pooled(kind: str, features: Tensor) -> Tensor:
    """(B, cells, C) -> unit vectors, one number at a time."""
    pooled = [
        [LITERAL[kind](column) for column in zip(*picture, strict=True)] for picture in features.double().tolist()
    ]
    return F.normalize(torch.tensor(pooled), dim=1)


@pytest.mark.parametrize("kind", LITERAL)
@pytest.mark.parametrize("name", ["small_cnn", "test_resnet", "test_vit", "test_vit3"])
def test_maps_and_patch_tokens_are_pooled_literally(name: str, kind: str) -> None:
    model = retriever(ModelSettings(name, pooling=kind), 48).eval()
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        if name == "small_cnn":
            features = model.backbone(images).flatten(2).transpose(1, 2)
        elif name == "test_resnet":
            features = model.backbone.forward_features(images).flatten(2).transpose(1, 2)
        else:
            features = model.backbone.forward_features(images)[:, 1:]
            assert features.shape[1] == 9
        torch.testing.assert_close(model(images), literally_pooled(kind, features), atol=1e-6, rtol=1e-5)


AUTO = ["test_resnet", "test_efficientnet", "test_convnext", "test_mambaout", "test_nfnet", "test_vit", "test_vit4"]


@pytest.mark.parametrize("name", AUTO)
def test_auto_is_what_timm_feeds_its_classifier(name: str) -> None:
    torch.manual_seed(3)
    model = retriever(ModelSettings(name), 64).eval()
    torch.manual_seed(3)
    size = {"img_size": 64} if "vit" in name else {}
    oracle = timm.create_model(name, num_classes=0, **size).eval()
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(images), F.normalize(oracle(images), dim=1))
    assert model.dim == oracle(images).shape[1]


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_mambaout", "test_efficientnet"])
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_what_follows_a_backbones_pooling_still_follows(name: str, kind: str) -> None:
    """ConvNeXt and MambaOut (channels last) normalise after pooling; timm does so for another pooling too."""
    torch.manual_seed(3)
    model = retriever(ModelSettings(name, pooling=kind), 64).eval()
    torch.manual_seed(3)
    oracle = timm.create_model(name, num_classes=0, global_pool=kind).eval()
    for parameters in (model.backbone.parameters(), oracle.parameters()):
        torch.manual_seed(4)
        for parameter in parameters:  # a fresh LayerNorm's scale of one would be nothing to see
            nn.init.normal_(parameter, std=0.2)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(images), F.normalize(oracle(images), dim=1), atol=1e-5, rtol=1e-4)
    model.train()(images)[:, 0].sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_distilled_deit_takes_the_mean_of_both_tokens() -> None:
    """As it was trained: a classifier on each token, their outputs averaged; one linear map for both shows the mean."""
    model = retriever(ModelSettings("deit_tiny_distilled_patch16_224"), 32).eval()
    images = torch.randn(2, 3, 32, 32)
    oracle = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=192, img_size=32).eval()
    oracle.load_state_dict(model.backbone.state_dict(), strict=False)
    for head in (oracle.head, oracle.head_dist):
        nn.init.eye_(head.weight)
        nn.init.zeros_(head.bias)
    torch.testing.assert_close(model(images), F.normalize(oracle(images), dim=1))
    tokens = model.backbone.forward_features(images)
    assert not torch.allclose(tokens[:, 0], tokens[:, 1])
    torch.testing.assert_close(model(images), F.normalize((tokens[:, 0] + tokens[:, 1]) / 2, dim=1))
    patches = retriever(ModelSettings("deit_tiny_distilled_patch16_224", pooling="avg"), 32).eval()
    patches.load_state_dict(model.state_dict())
    torch.testing.assert_close(patches(images), F.normalize(tokens[:, 2:].mean(1), dim=1))


@pytest.mark.parametrize("name", ["test_vit", "deit_tiny_distilled_patch16_224"])
def test_token_is_the_class_token(name: str) -> None:
    model = retriever(ModelSettings(name, pooling="token"), 32).eval()
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(images), F.normalize(model.backbone.forward_features(images)[:, 0], dim=1))


@pytest.mark.parametrize("name", ["test_vit", "deit_tiny_distilled_patch16_224"])
def test_both_are_the_class_token_and_the_mean_of_the_patches(name: str) -> None:
    model = retriever(ModelSettings(name, pooling="both"), 32).eval()
    images = torch.randn(2, 3, 32, 32)
    tokens = model.backbone.forward_features(images)
    patches = tokens[:, model.backbone.num_prefix_tokens :].mean(1)
    expected = F.normalize(torch.cat([tokens[:, 0], patches], dim=1), dim=1)
    torch.testing.assert_close(model(images), expected)
    assert model.dim == 2 * model.backbone.num_features


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("test_resnet", "token", "pooling=token .*test_resnet has no class token; allowed: auto, avg, max, gem$"),
        ("small_cnn", "token", "small_cnn has no class token; allowed: auto, avg, max, gem$"),
        ("crossvit_9_240", "gem", "pooling=gem .*only it knows how to pool; allowed: auto$"),
    ],
)
def test_impossible_poolings_name_the_possible(name: str, kind: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        retriever(ModelSettings(name, pooling=kind), 120)


def test_attention_pooling_gives_way_to_another() -> None:
    backbone = timm.create_model("test_vit", num_classes=0, global_pool="map", img_size=32)
    model = Retriever(backbone, ModelSettings("test_vit", pooling="avg"), 32).eval()
    images = torch.randn(2, 3, 32, 32)
    expected = model.backbone.forward_features(images)[:, 1:].mean(1)
    torch.testing.assert_close(model(images), F.normalize(expected, dim=1))
    assert not any("attn_pool" in name for name, _ in model.named_parameters())


def test_attention_pooling_that_stays_is_an_error() -> None:
    backbone = timm.create_model("test_byobnet", num_classes=0)
    backbone.head = timm.layers.AttentionPool2d(256, feat_size=5)
    with pytest.raises(ValueError, match="test_byobnet pools by attention.*set model.pooling=auto"):
        Retriever(backbone, ModelSettings("test_byobnet", pooling="max"), 160)


@pytest.mark.parametrize("p", [1.0, 2.5, 3.0, 12.0, 60.0])
def test_generalised_mean_and_its_gradients(p: float) -> None:
    features = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    exponent = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    found = generalised_mean(features, exponent, (2, 3))
    for picture in range(2):
        for channel in range(4):
            cells = features[picture, channel].flatten().tolist()
            assert math.isclose(found[picture, channel].item(), literal_gem(cells, p), rel_tol=1e-9)
    assert torch.autograd.gradcheck(lambda x, e: generalised_mean(x, e, (2, 3)), (features, exponent))


@pytest.mark.parametrize("p", [3.0, 30.0])
def test_dead_and_large_channels_have_finite_gradients(p: float) -> None:
    features = torch.stack([torch.zeros(9), torch.full((9,), 1e4), torch.arange(9.0)]).reshape(1, 3, 3, 3)
    features.requires_grad_()
    exponent = torch.tensor(p, requires_grad=True)
    found = generalised_mean(features, exponent, (2, 3))
    torch.testing.assert_close(found[0, :2], torch.tensor([1e-6, 1e4]))
    found.sum().backward()
    assert features.grad is not None
    assert features.grad.isfinite().all()
    assert exponent.grad is not None
    assert exponent.grad.isfinite()


def test_the_exponent_starts_at_three_and_learns() -> None:
    model = retriever(ModelSettings("small_cnn", pooling="gem"), 32)
    assert model.pooling.exponent.item() == 3.0
    model(torch.randn(2, 3, 32, 32))[:, 0].sum().backward()
    assert model.pooling.exponent.grad.abs() > 0
