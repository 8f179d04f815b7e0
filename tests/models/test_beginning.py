"""Beginning with what another run left: all of its weights, at any size of pictures, or a word on why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from roadmap.config.settings import ModelSettings
from roadmap.models import Retriever, WeightsError, retriever, save_checkpoint
from roadmap.models.beginning import check_weights, left_by
from roadmap.names import CHECKPOINT

VIT = "test_vit"


def left(folder: Path, settings: ModelSettings, image: int) -> Retriever:
    """A run's folder with the checkpoint of a model of which no weight is what it began with."""
    torch.manual_seed(17)
    model = retriever(settings, image)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor += torch.rand_like(tensor) if tensor.is_floating_point() else 3
    (folder / CHECKPOINT).parent.mkdir(parents=True)
    save_checkpoint(folder / CHECKPOINT, model, {})
    return model


def begun(folder: Path, name: str, image: int, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(99)
    settings = ModelSettings(name, weights=str(folder), **options)
    check_weights(settings)
    return retriever(settings, image).state_dict()


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("small_cnn", {"pooling": "gem", "dim": 5, "layer_norm": True}, (32, 32)),
        ("small_cnn", {"dim": 5}, (32, 48)),
        ("test_resnet", {"dim": 5}, (32, 64)),
        (VIT, {"pooling": "gem", "dim": 5}, (32, 32)),
        (VIT, {"pooling": "both"}, (32, 32)),
    ],
)
def test_backbone_and_head_are_those_of_the_run(
    name: str, options: dict[str, Any], sizes: tuple[int, int], tmp_path: Path
) -> None:
    theirs = left(tmp_path, ModelSettings(name, **options), sizes[0]).state_dict()
    ours = begun(tmp_path, name, sizes[1], **options)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key


@pytest.mark.parametrize(("name", "prefix"), [(VIT, 1), ("deit_tiny_distilled_patch16_224", 2)])
@pytest.mark.parametrize("sizes", [(32, 64), (96, 48)])
def test_positions_are_resampled_to_other_pictures(
    name: str, prefix: int, sizes: tuple[int, int], tmp_path: Path
) -> None:
    theirs = left(tmp_path, ModelSettings(name, dim=3), sizes[0]).state_dict()
    ours = begun(tmp_path, name, sizes[1], dim=3)
    cells = sizes[1] // 16
    key = "backbone.pos_embed"
    wanted = timm.layers.resample_abs_pos_embed(theirs[key], [cells, cells], num_prefix_tokens=prefix)
    assert ours[key].shape[1] == prefix + cells**2
    assert torch.equal(ours[key], wanted)
    assert all(torch.equal(ours[other], theirs[other]) for other in theirs if other != key)


def test_a_distillation_token_was_dropped_before(tmp_path: Path) -> None:
    settings = ModelSettings("deit_tiny_patch16_224", drop_distillation=True)
    theirs = left(tmp_path, settings, 32).state_dict()
    ours = begun(tmp_path, settings.name, 32, drop_distillation=True)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("small_cnn", {}, r"whose model\.name is test_vit and not small_cnn: give model\.name=test_vit, "),
        (VIT, {"dim": 7}, r"whose model\.dim is 5 and not 7: give model\.dim=5, "),
        (VIT, {}, r"whose model\.dim is 5 and not null: "),
        (VIT, {"dim": 5, "pooling": "token"}, r"whose model\.pooling is auto and not token: "),
        (VIT, {"dim": 5, "layer_norm": True}, r"whose model\.layer_norm is false and not true: "),
    ],
)
def test_another_model_is_refused(name: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    left(tmp_path / "first", ModelSettings(VIT, dim=5), 32)
    settings = ModelSettings(name, weights=str(tmp_path / "first"), **options)
    for call in (check_weights, retriever):
        with pytest.raises(WeightsError, match=words) as error:
            call(settings)
        assert error.value.field == "model.weights"
        assert str(error.value).startswith(f"model.weights={tmp_path / 'first'} stands for all weights of that run")
        assert str(error.value).endswith(f"its backbone alone: model.weights={tmp_path / 'first' / CHECKPOINT}")


def test_what_does_not_shape_weights_may_differ(tmp_path: Path) -> None:
    theirs = left(tmp_path, ModelSettings(VIT, dim=5), 32).state_dict()
    ours = begun(tmp_path, VIT, 32, dim=5, drop_path=0.1, learns="biases", normalise=False, freeze_layers=2)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    settings = ModelSettings(VIT, weights=str(tmp_path))
    for call in (check_weights, retriever):
        with pytest.raises(
            WeightsError, match="the folder of a run that has saved some, but there is no .*best.safeten"
        ):
            call(settings)
    with pytest.raises(WeightsError, match='must be "random", "hub" or an existing file, or the folder of a run, got'):
        check_weights(ModelSettings(VIT, weights=str(tmp_path / "absent")))


def test_a_folder_that_is_called_as_what_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("random", "hub", "auto"):
        (tmp_path / name).mkdir()
        assert left_by(name) is None
        check_weights(ModelSettings(VIT, weights=name))


def test_what_is_told_of_the_model_that_was_left(tmp_path: Path) -> None:
    settings = ModelSettings(VIT, dim=5)
    left(tmp_path / "first", settings, 48)
    assert left_by(str(tmp_path / "first")) == (settings, 48)
