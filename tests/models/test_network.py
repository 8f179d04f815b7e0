"""Pictures to unit vectors: what comes out, in which precision and mode, and which parameter lies where."""

from __future__ import annotations

import ast
import copy
import re
import sys
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roadmap.models
from roadmap.config.settings import ModelSettings
from roadmap.models import Retriever, retriever

HEADS = {
    "small_cnn": ModelSettings("small_cnn", pooling="gem", layer_norm=True, dim=7),
    "test_resnet": ModelSettings("test_resnet", pooling="gem", layer_norm=True, dim=7),
    "test_vit": ModelSettings("test_vit", pooling="gem", layer_norm=True, dim=7),
    "test_mambaout": ModelSettings("test_mambaout", pooling="gem", dim=7),
    "crossvit_9_240": ModelSettings("crossvit_9_240", dim=7),
}


def pictures(side: int = 32, count: int = 3) -> Tensor:
    return torch.randn(count, 3, side, side)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("autocast", [False, True])
def test_unit_vectors_in_float32(name: str, autocast: bool) -> None:
    model = retriever(HEADS[name], 120 if name == "crossvit_9_240" else 32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        vectors = model(pictures(model.image))
    assert vectors.dtype == torch.float32
    assert vectors.shape == (3, 7)
    assert model.dim == 7
    # a norm that had been divided by in bfloat16 would be off by up to 4e-3
    torch.testing.assert_close(vectors.double().norm(dim=1), torch.ones(3).double(), atol=1e-6, rtol=0)


def test_the_head_is_float32_under_autocast() -> None:
    model = retriever(ModelSettings("small_cnn", dim=64), 32).eval()
    seen: list[Tensor] = []
    model.projection.register_forward_hook(lambda _module, inputs, output: seen.extend([*inputs, output]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(pictures())
    assert [tensor.dtype for tensor in seen] == [torch.float32] * 2
    exact = seen[0] @ model.projection.weight.T + model.projection.bias
    torch.testing.assert_close(seen[1], exact, atol=1e-5, rtol=1e-5)


def test_a_zero_vector_stays_finite() -> None:
    model = retriever(ModelSettings("small_cnn", dim=5), 32)
    nn.init.zeros_(model.projection.weight)
    nn.init.zeros_(model.projection.bias)
    vectors = model(pictures())
    assert torch.equal(vectors, torch.zeros(3, 5))
    vectors.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_layer_norm_comes_before_the_projection_and_learns_nothing() -> None:
    model = retriever(ModelSettings("small_cnn", layer_norm=True, dim=9), 32).eval()
    images = pictures()
    pooled = model.backbone(images).mean((2, 3))
    centred = pooled - pooled.mean(1, keepdim=True)
    normalised = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
    projected = normalised @ model.projection.weight.T + model.projection.bias
    torch.testing.assert_close(model(images), projected / projected.norm(dim=1, keepdim=True))
    assert not list(model.layer_norm.parameters())


@pytest.mark.parametrize(("frozen", "name"), [(True, "test_resnet"), (False, "test_resnet"), (True, "small_cnn")])
def test_frozen_batch_norm_keeps_its_statistics_and_learns_its_scale(frozen: bool, name: str) -> None:
    model = retriever(ModelSettings(name, freeze_batch_norm=frozen, dim=8), 32).train()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) > 3
    for norm in norms:  # ResNets start some at zero, behind which nothing learns at first
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    before = [copy.deepcopy(norm.state_dict()) for norm in norms]
    model(pictures())[:, 0].sum().backward()
    for norm, old in zip(norms, before, strict=True):
        for part in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(getattr(norm, part), old[part]) == frozen
        assert norm.weight.grad is not None
        assert norm.weight.grad.abs().sum() > 0
        assert norm.training != frozen
    assert model.training
    assert model.projection.training
    assert not model.eval().projection.training


def test_vision_transformer_depths() -> None:
    model = retriever(ModelSettings("test_vit", pooling="gem", dim=4), 32)
    depths = model.layer_depths()
    blocks = len(model.backbone.blocks)
    assert depths.keys() == dict(model.named_parameters()).keys()
    for name, depth in depths.items():
        block = re.match(r"backbone\.blocks\.(\d+)\.", name)
        if block:
            assert depth == 1 + int(block[1]), name
        elif name.startswith("backbone.norm"):
            assert depth == blocks, name  # with the last block
        elif name.startswith("backbone"):
            assert depth == 0, name
        else:
            assert depth == blocks + 1, name
    assert model.layers == blocks + 2
    assert retriever(ModelSettings("test_vit"), 32).layers == blocks + 1


@pytest.mark.parametrize("name", ["test_resnet", "small_cnn", "poolformer_s12"])
def test_depths_follow_the_order_of_the_layers(name: str) -> None:
    model = retriever(ModelSettings(name, dim=4), 32)
    depths = model.layer_depths()
    assert depths.keys() == dict(model.named_parameters()).keys()
    assert set(depths.values()) == set(range(model.layers))
    assert list(depths.values()) == sorted(depths.values())
    assert depths["projection.weight"] == depths["projection.bias"] == model.layers - 1
    if name == "small_cnn":
        assert model.layers == 4 + 1


def test_head_parameters_are_what_is_not_the_backbone() -> None:
    model = retriever(ModelSettings("small_cnn", pooling="gem", dim=4), 32)
    assert {id(p) for p in model.head_parameters()} == {
        id(p) for p in (model.pooling.exponent, model.projection.weight, model.projection.bias)
    }
    assert retriever(ModelSettings("small_cnn", layer_norm=True), 32).head_parameters() == []


def test_undecayed_are_biases_scales_and_tokens() -> None:
    model = retriever(ModelSettings("test_vit", pooling="gem", dim=4), 32)
    undecayed = model.undecayed()
    assert {"backbone.cls_token", "backbone.pos_embed", "backbone.blocks.0.norm1.weight"} <= undecayed
    assert {"pooling.exponent", "projection.bias", "backbone.blocks.0.attn.qkv.bias"} <= undecayed
    assert (
        not {"projection.weight", "backbone.blocks.0.attn.qkv.weight", "backbone.patch_embed.proj.weight"} & undecayed
    )


@pytest.mark.parametrize("name", ["small_cnn", "test_vit"])
def test_a_seed_decides_everything(name: str) -> None:
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(retriever(ModelSettings(name, dim=6), 32).eval())
    images = pictures()
    first, same, other = (model(images) for model in models)
    assert torch.equal(first, same)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("name", ["small_cnn", "test_resnet", "test_vit"])
def test_compiles_into_one_graph(name: str) -> None:
    model = retriever(HEADS[name], 32).train()
    images = pictures()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(images), model(images))


@pytest.mark.parametrize("name", ["small_cnn", "test_resnet", "test_mambaout"])
def test_channels_last_gives_the_same(name: str) -> None:
    model = retriever(HEADS[name], 32).eval()
    images = pictures()
    expected = model(images)
    found = model.to(memory_format=torch.channels_last)(images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_normalisation_is_the_backbones() -> None:
    for name in ("test_vit", "test_mambaout"):
        model, cfg = retriever(ModelSettings(name), 32), timm.models.get_pretrained_cfg(name)
        assert (model.mean, model.std) == (cfg.mean, cfg.std)
    small = retriever(ModelSettings(), 32)
    assert (small.mean, small.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_stochastic_depth_reaches_the_backbone() -> None:
    rates = [
        m.drop_prob
        for m in retriever(ModelSettings("test_vit", drop_path=0.3), 32).modules()
        if hasattr(m, "drop_prob")
    ]
    assert max(rates) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="small_cnn has no stochastic depth; set model.drop_path=0"):
        retriever(ModelSettings("small_cnn", drop_path=0.1), 32)
    with pytest.raises(ValueError, match="dla46x_c has no stochastic depth; set model.drop_path=0"):
        retriever(ModelSettings("dla46x_c", drop_path=0.1), 32)
    with pytest.raises(ValueError, match="model.drop_path must be at least 0 and below 1, got 1.0"):
        retriever(ModelSettings("test_vit", drop_path=1.0), 32)


def test_position_embeddings_are_made_for_the_size() -> None:
    model = retriever(ModelSettings("test_vit"), 96)
    assert model.backbone.pos_embed.shape[1] == 1 + 6 * 6
    assert model(pictures(96)).shape == (3, 64)


@pytest.mark.parametrize(
    ("settings", "image", "words"),
    [
        (ModelSettings("test_vit"), 100, "test_vit cuts.*patches of 16 pixels.*100.*multiple, such as 96 or 112"),
        (ModelSettings("test_vit"), 8, "such as 16$"),
        (ModelSettings("small_cnn"), 4, "small_cnn does not take pictures of 4 pixels.*set data.image=32"),
        (ModelSettings("efficientformer_l1"), 96, "efficientformer_l1 does not take pictures of 96 .*made for 224"),
        (ModelSettings("resnet5"), 32, "one of timm's .* models, got 'resnet5', did you mean 'resnet50'"),
        (ModelSettings("small_cn"), 32, "did you mean 'small_cnn'"),
        (ModelSettings("test_resnet.r161"), 32, "no weights 'test_resnet.r161'.*it knows: test_resnet.r160_in1k"),
    ],
)
def test_what_cannot_be_built_is_named(settings: ModelSettings, image: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        retriever(settings, image)


def test_images_of_another_shape_are_refused() -> None:
    model = retriever(ModelSettings("test_resnet"), 32)
    for shape in ((2, 1, 32, 32), (3, 32, 32)):
        with pytest.raises(ValueError, match=re.escape(f"images must be of shape (B, 3, S, S), got {shape}")):
            model(torch.zeros(shape))


def test_the_papers_models() -> None:
    cub = ModelSettings("resnet50", pooling="max", layer_norm=True, dim=512, freeze_batch_norm=True)
    resnet = retriever(cub, 64)
    assert (resnet.dim, resnet.projection.in_features) == (512, 2048)
    deit = retriever(ModelSettings("deit_small_distilled_patch16_224"), 32)
    assert (deit.dim, deit.head_parameters()) == (384, [])


def test_the_small_network_does_without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    model = retriever(ModelSettings("small_cnn", pooling="gem", dim=4), 32)
    assert isinstance(model, Retriever)
    assert model(pictures()).shape == (3, 4)
    assert model.layers == 5
    with pytest.raises(
        ImportError, match=r"every backbone but small_cnn comes from timm: pip install 'roadmap-retrieval\[train\]'"
    ):
        retriever(ModelSettings("resnet50"), 32)


def test_importing_the_package_is_cheap() -> None:
    """Heavy libraries are imported where they are used, inside functions."""
    files = sorted(Path(roadmap.models.__file__).parent.glob("*.py"))
    assert len(files) > 5
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= {"torch", "roadmap", *sys.stdlib_module_names}, file


@pytest.mark.parametrize(
    ("name", "image", "layout"),
    [("small_cnn", 16, "map"), ("test_vit", 32, "tokens"), ("test_mambaout", 64, "map")],
)
def test_the_features_that_the_vectors_were_pooled_from(name: str, image: int, layout: str) -> None:
    """Average pooling of what comes with the vectors gives the vectors again, whatever the backbone's own order is."""
    model = retriever(ModelSettings(name, pooling="avg"), image).eval()
    images = torch.randn(2, 3, image, image)
    found = model(images, whole=True)
    assert torch.equal(found.embedding, model(images))
    assert (found.map is None) == (layout == "tokens")
    assert (found.tokens is None) == (layout == "map")
    assert found.cells.shape[2] == model.channels
    if name == "small_cnn":
        assert torch.equal(found.map, model.backbone(images))
        torch.testing.assert_close(F.normalize(found.cells.mean(1), dim=1), found.embedding)


def test_features_that_only_the_backbone_knows_how_to_pool() -> None:
    model = retriever(HEADS["crossvit_9_240"], 240).eval()
    assert model.channels is None
    found = model(pictures(240, 1), whole=True)
    assert (found.map, found.tokens) == (None, None)


def test_vectors_as_long_as_they_come_in_training_alone() -> None:
    torch.manual_seed(0)
    model = retriever(ModelSettings(pooling="avg", normalise=False, freeze_batch_norm=True), 16)
    images = torch.randn(4, 3, 16, 16)
    long = model(images)
    torch.testing.assert_close(long, model.backbone(images).mean((2, 3)))
    assert (long.norm(dim=1) - 1).abs().min() > 0.01
    torch.testing.assert_close(model.eval()(images), F.normalize(long, dim=1))
