"""What of a model learns: all, biases alone, the upper layers, the projection alone; and that the rest stays."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from roadmap.config.settings import ModelSettings, SettingError
from roadmap.models import Retriever, learning, load_checkpoint, retriever, save_checkpoint

VIT = "test_vit"  # a stem, six blocks, a last norm


def learn(name: str, image: int = 32, **options: object) -> set[str]:
    torch.manual_seed(0)
    model = retriever(ModelSettings(name, "random", **options), image)  # type: ignore[arg-type]
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_the_biases_of_a_transformer_by_a_literal_list() -> None:
    blocks = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    wanted = {f"backbone.blocks.{block}.{part}.bias" for block in range(6) for part in blocks}
    wanted |= {"backbone.patch_embed.proj.bias", "backbone.norm.bias"}
    assert learn(VIT, learns="biases") == wanted
    head = {"projection.weight", "projection.bias", "pooling.exponent"}
    assert learn(VIT, learns="biases", dim=4, pooling="gem") == wanted | head
    above = {name for name in wanted if name.split(".")[2] in ("4", "5") or name == "backbone.norm.bias"}
    assert learn(VIT, learns="biases", freeze_layers=5) == above


def test_the_biases_of_other_networks() -> None:
    norms = {f"backbone.blocks.{block}.{1 if block == 3 else 2}.bias" for block in range(4)}
    assert learn("small_cnn", learns="biases") == norms
    found = learn("eva02_tiny_patch14_224", 28, learns="biases")
    assert {"backbone.blocks.0.attn.q_bias", "backbone.blocks.0.attn.v_bias"} <= found
    assert not any("weight" in name or "token" in name for name in found)
    found = learn("levit_128s", 224, learns="biases")  # whose attention adds a table by position
    assert any(name.endswith("bn.bias") for name in found)
    assert not any("attention_bias" in name for name in found)


@pytest.mark.parametrize("name", ["small_cnn", VIT, "test_resnet"])
def test_every_number_of_layers_from_below(name: str) -> None:
    """By the depths that layer decay counts, which have a test of their own."""
    depths = retriever(ModelSettings(name, "random", dim=4), 32).layer_depths()
    layers = max(depths.values())  # the head is above them
    for number in range(layers):
        assert learn(name, dim=4, freeze_layers=number) == {n for n, depth in depths.items() if depth >= number}
    words = (
        rf"model.freeze_layers={layers}: {name} has {layers} layers, .* at most {layers - 1}, .*freeze_backbone=true"
    )
    with pytest.raises(SettingError, match=words) as error:
        learn(name, dim=4, freeze_layers=layers)
    assert error.value.field == "model.freeze_layers"


def gradients(model: Retriever, images: Tensor, pull: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    model(images).backward(pull)
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["small_cnn", VIT])
@pytest.mark.parametrize(
    "options", [{"learns": "biases"}, {"freeze_layers": 2}, {"learns": "biases", "freeze_layers": 2}]
)
def test_what_learns_has_the_gradient_of_the_whole_network(name: str, options: dict[str, object]) -> None:
    whole = retriever(ModelSettings(name, "random", dim=5, freeze_batch_norm=True), 32)
    part = retriever(ModelSettings(name, "random", dim=5, freeze_batch_norm=True, **options), 32)  # type: ignore[arg-type]
    part.load_state_dict(whole.state_dict())
    images, pull = torch.randn(4, 3, 32, 32), torch.randn(4, 5)
    wanted, found = gradients(whole, images, pull), gradients(part, images, pull)
    for key, parameter in part.named_parameters():
        gradient, expected = found[key], wanted[key]
        assert (gradient is not None) == parameter.requires_grad
        if gradient is not None:
            assert expected is not None
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_below_the_layers_that_learn_there_is_no_graph() -> None:
    """Nothing of theirs is kept for a pass backwards; above them there is one as ever."""
    model = retriever(ModelSettings(VIT, "random", freeze_layers=4), 32)
    blocks: list[bool] = []
    for block in model.backbone.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(lambda _module, _inputs, output: blocks.append(output.requires_grad))
    model(torch.randn(2, 3, 32, 32))
    assert blocks == [False] * 3 + [True] * 3


def test_layers_that_stay_drop_nothing_and_keep_their_statistics() -> None:
    model = retriever(ModelSettings("small_cnn", "random", freeze_layers=2), 32)
    for _ in range(2):  # however often it goes from one mode to the other
        assert model.eval().train().training
        for number, block in enumerate(model.backbone.blocks):  # type: ignore[arg-type, union-attr]
            assert {part.training for part in block.modules()} == {number >= 2}
    before = copy.deepcopy(model.state_dict())
    model(torch.randn(4, 3, 32, 32))
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "running" in name or "tracked" in name} - {
        name for name in before if name.startswith(("backbone.blocks.0", "backbone.blocks.1"))
    }
    vit = retriever(ModelSettings(VIT, "random", freeze_layers=3, drop_path=0.5), 32)
    assert [block.training for block in vit.backbone.blocks] == [False] * 2 + [True] * 4  # type: ignore[union-attr]


def test_biases_leave_every_mode_alone() -> None:
    model = retriever(ModelSettings("small_cnn", "random", learns="biases"), 32)
    assert all(module.training for module in model.modules())


def test_what_a_backbone_never_learns_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some come with position embeddings that are fixed."""
    from roadmap.models import beginning

    real = beginning.backbone_of

    def fixed(*arguments: object) -> nn.Module:
        backbone = real(*arguments)  # type: ignore[arg-type]
        backbone.pos_embed.requires_grad_(False)  # type: ignore[operator, union-attr]
        return backbone

    monkeypatch.setattr(beginning, "backbone_of", fixed)
    assert "backbone.pos_embed" not in learn(VIT)


def test_what_cannot_be() -> None:
    for options in ({"learns": "biases"}, {"freeze_layers": 2}):
        ((name, value),) = options.items()
        with pytest.raises(
            SettingError, match=rf"model.{name}={value} is about the backbone, of which nothing"
        ) as error:
            learn(VIT, dim=4, freeze_backbone=True, **options)
        assert error.value.field == f"model.{name}"
    plain = nn.Sequential(nn.Linear(2, 2, bias=False))
    settings = ModelSettings("plain", learns="biases")
    with pytest.raises(SettingError, match="plain has no biases; set model.learns=all") as error:
        learning.learning_names(plain, settings, ())
    assert error.value.field == "model.learns"
    mixed, settings = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)), ModelSettings("m", learns="biases")
    assert learning.learning_names(mixed, settings, ()) == {"0.bias"}
    settings = ModelSettings("m", learns="biases", freeze_layers=1)
    with pytest.raises(SettingError, match="m has no biases above the layers that stay; set model.learns=all"):
        learning.learning_names(mixed, settings, learning.layers_below(mixed, settings))


def test_a_checkpoint_says_what_learned_and_is_used_as_any(tmp_path: Path) -> None:
    model = retriever(ModelSettings(VIT, "random", learns="biases", freeze_layers=2), 32)
    save_checkpoint(tmp_path / "one.safetensors", model, {})
    again, _ = load_checkpoint(tmp_path / "one.safetensors")
    assert again.settings == model.settings
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(images), model.eval()(images))
