"""Weights from files: all of them arrive or an error says which do not, and no file can run code."""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from roadmap.config.settings import ModelSettings
from roadmap.models import Retriever, WeightsError, retriever, save_checkpoint

State = dict[str, Tensor]


def state(name: str = "test_resnet", image: int | None = None, classes: int = 10) -> State:
    """Weights of a timm model that has a classifier, every one of them different from what a new model starts with."""
    torch.manual_seed(17)
    model = timm.create_model(name, num_classes=classes, **({} if image is None else {"img_size": image}))
    return {
        name: value + torch.rand_like(value) if value.is_floating_point() else value + 3
        for name, value in model.state_dict().items()
    }


def saved(content: Any, path: Path) -> str:
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return str(path)


def loaded(file: str, name: str = "test_resnet", image: int = 32, **more: Any) -> Retriever:
    return retriever(ModelSettings(name, weights=file, **more), image)


def check_arrived(model: Retriever, expected: State) -> None:
    found = model.backbone.state_dict()
    assert len(found) > 10
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
        assert value.dtype == expected[name].dtype


@pytest.mark.parametrize("ending", ["safetensors", "pth", "pt", "bin"])
def test_every_kind_of_file_arrives_without_its_classifier(ending: str, tmp_path: Path) -> None:
    weights = state()
    assert "fc.weight" in weights
    check_arrived(loaded(saved(weights, tmp_path / f"weights.{ending}")), weights)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda s: {"model": s, "epoch": 3},
        lambda s: {"state_dict": s, "best": 0.5, "arch": "resnet"},
        lambda s: {"state_dict": {k: v + 1 for k, v in s.items()}, "state_dict_ema": s},
        lambda s: {"model": {"state_dict": s}},
        lambda s: {f"module.{k}": v for k, v in s.items()},
        lambda s: {f"_orig_mod.{k}": v for k, v in s.items()},
        lambda s: {"state_dict": {**{f"module.backbone.{k}": v for k, v in s.items()}, "module.neck": torch.ones(3)}},
        lambda s: {k: nn.Parameter(v) if v.is_floating_point() else v for k, v in s.items()},
    ],
)
def test_wrappers_and_prefixes_are_taken_off(wrapped: Callable[[State], Any], tmp_path: Path) -> None:
    weights = state()
    check_arrived(loaded(saved(wrapped(weights), tmp_path / "weights.pth")), weights)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32(kind: torch.dtype, tmp_path: Path) -> None:
    weights = {name: value.to(kind) if value.is_floating_point() else value for name, value in state().items()}
    model = loaded(saved(weights, tmp_path / "weights.safetensors"))
    check_arrived(model, {n: v.float() if v.is_floating_point() else v for n, v in weights.items()})


def test_torchvisions_resnet_50_gives_the_same_features(tmp_path: Path) -> None:
    """Its older files have no counters of batches; the paper started from such a one."""
    theirs = torchvision.models.resnet50()
    weights = {n: v for n, v in theirs.state_dict().items() if not n.endswith("num_batches_tracked")}
    model = loaded(saved(weights, tmp_path / "resnet50.pth"), "resnet50", 64).eval()
    theirs.fc = nn.Identity()
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(model(images), nn.functional.normalize(theirs.eval()(images), dim=1))


def test_positions_are_resampled_to_the_pictures(tmp_path: Path) -> None:
    weights = state("test_vit", 160)
    half = {name: value.half() for name, value in weights.items()}
    model = loaded(saved(half, tmp_path / "vit.safetensors"), "test_vit", 96)
    exact = {name: value.float() for name, value in half.items()}
    exact["pos_embed"] = timm.layers.resample_abs_pos_embed(exact["pos_embed"], [6, 6], num_prefix_tokens=1)
    check_arrived(model, exact)


def test_resampling_leaves_the_random_numbers_of_the_head_alone(tmp_path: Path) -> None:
    files = [saved(state("test_vit", size), tmp_path / f"{size}.pth") for size in (160, 96)]
    heads = []
    for file in files:
        torch.manual_seed(5)
        heads.append(loaded(file, "test_vit", 96, dim=3).projection.weight)
    assert torch.equal(*heads)


def test_names_of_other_programs_are_translated_by_timm(tmp_path: Path) -> None:
    weights = state("test_vit", 32, classes=0)
    foreign = {f"visual.trunk.{name}": value for name, value in weights.items()} | {"text.embedding": torch.ones(4)}
    check_arrived(loaded(saved(foreign, tmp_path / "clip.pth"), "test_vit"), weights)
    del foreign["visual.trunk.blocks.0.attn.qkv.weight"]
    with pytest.raises(WeightsError, match="clip.pth does not fit test_vit"):
        loaded(saved(foreign, tmp_path / "clip.pth"), "test_vit")


def test_small_network_from_a_file(tmp_path: Path) -> None:
    first = retriever(ModelSettings("small_cnn"), 32)
    file = saved(first.backbone.state_dict(), tmp_path / "small.pth")
    torch.manual_seed(99)
    check_arrived(loaded(file, "small_cnn"), first.backbone.state_dict())


def test_a_checkpoint_gives_its_backbone(tmp_path: Path) -> None:
    first = retriever(ModelSettings("small_cnn", pooling="gem", dim=5), 32)
    save_checkpoint(tmp_path / "best.safetensors", first, {})
    torch.manual_seed(99)
    second = loaded(str(tmp_path / "best.safetensors"), "small_cnn", dim=7)
    check_arrived(second, first.backbone.state_dict())


DISTILLED, PLAIN = "deit_tiny_distilled_patch16_224", "deit_tiny_patch16_224"


@pytest.mark.parametrize("image", [32, 48])
def test_the_released_variant_drops_the_distillation_token(image: int, tmp_path: Path) -> None:
    weights = state(DISTILLED, 32)
    assert weights["pos_embed"].shape[1] == 2 + 4
    model = loaded(saved({"model": weights}, tmp_path / "deit.pth"), PLAIN, image, drop_distillation=True).eval()
    kept = {n: v for n, v in weights.items() if n not in ("dist_token", "head_dist.weight", "head_dist.bias")}
    kept["pos_embed"] = weights["pos_embed"][:, [0, 2, 3, 4, 5]]
    if image == 48:
        kept["pos_embed"] = timm.layers.resample_abs_pos_embed(kept["pos_embed"], [3, 3], num_prefix_tokens=1)
    check_arrived(model, kept)
    oracle = timm.create_model(PLAIN, num_classes=10, img_size=image).eval()
    oracle.load_state_dict(kept)
    oracle.reset_classifier(0)
    images = torch.randn(2, 3, image, image)
    torch.testing.assert_close(model(images), nn.functional.normalize(oracle(images), dim=1))


def test_distilled_weights_arrive_in_the_distilled_model(tmp_path: Path) -> None:
    weights = state(DISTILLED, 32)
    file = saved(weights, tmp_path / "deit.safetensors")
    check_arrived(loaded(file, DISTILLED), weights)
    larger = loaded(file, DISTILLED, 48).backbone.pos_embed
    assert torch.equal(larger, timm.layers.resample_abs_pos_embed(weights["pos_embed"], [3, 3], num_prefix_tokens=2))
    both = f"model.name={DISTILLED}; or drop it, .*model.drop_distillation=true"
    with pytest.raises(WeightsError, match=f"deit.safetensors holds a distilled .*{PLAIN} is a plain one.*{both}"):
        loaded(file, PLAIN)
    with pytest.raises(WeightsError, match=f"{DISTILLED} is distilled itself; set model.name={PLAIN}, or leave"):
        loaded(file, DISTILLED, drop_distillation=True)


def test_a_distillation_token_that_is_not_there_cannot_be_dropped(tmp_path: Path) -> None:
    file = saved(state("test_vit", 32), tmp_path / "plain.pth")
    with pytest.raises(WeightsError, match="plain.pth has no distillation token .* set model.drop_distillation=false"):
        loaded(file, "test_vit", drop_distillation=True)
    plain = saved(state(PLAIN, 32), tmp_path / "deit.pth")
    with pytest.raises(WeightsError, match="1 missing .dist_token.; 1 of another shape .pos_embed.*plain transformer"):
        loaded(plain, DISTILLED)


def without(*names: str) -> Callable[[State], State]:
    return lambda s: {name: value for name, value in s.items() if name not in names}


MISFITS: dict[str, tuple[str, Callable[[State], State], str]] = {
    "not whole": (
        "test_resnet",
        # older files have no counters of batches, which is no fault of theirs
        lambda s: {n: v for n, v in s.items() if n not in ("conv1.0.weight", "bn1.running_var") and "num_" not in n},
        r"2 missing \(conv1.0.weight, bn1.running_var\)\. .*not whole.*model.name",
    ),
    "more than wanted": (
        "test_resnet",
        lambda s: {**s, **{f"layer9.{i}": torch.ones(1) for i in range(6)}},
        r"6 unexpected \(layer9.0, layer9.1, layer9.2, layer9.3, \.\.\.\)\. .*deeper",
    ),
    "another architecture": ("test_vit", lambda s: s, "missing .*unexpected.*another architecture"),
    "another width": (
        "test_resnet",
        lambda s: {name: torch.cat([value, value]) if value.ndim else value for name, value in s.items()},
        r"of another shape \(conv1.0.weight \(32, 3, 3, 3\) for \(16, 3, .*narrower or wider",
    ),
    "one shape": (
        "test_resnet",
        lambda s: {**s, "bn1.bias": torch.ones(5)},
        r"1 of another shape \(bn1.bias \(5,\) for",
    ),
    # timm loads this family in part without a word
    "a part, silently": ("dla46x_c", without("base_layer.0.weight"), r"1 missing \(base_layer.0.weight\)"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named_with_its_reason(name: str, tmp_path: Path) -> None:
    model, changed, words = MISFITS[name]
    source = "test_resnet" if name == "another architecture" else model
    file = saved(changed(state(source)), tmp_path / "weights.pth")
    with pytest.raises(WeightsError, match=rf"weights.pth does not fit {model}: \d+ tensors are wanted, .*{words}"):
        loaded(file, model)


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("old_format", [False, True])
def test_a_file_that_would_run_code_is_refused_and_does_not(old_format: bool, tmp_path: Path) -> None:
    mark, file = tmp_path / "it_ran", tmp_path / "weights.pth"
    torch.save({"state_dict": state(), "x": Bomb(mark)}, file, _use_new_zipfile_serialization=not old_format)
    with pytest.raises(
        WeightsError, match="weights.pth holds Python objects .*could run code; nothing of it was loaded"
    ):
        loaded(str(file))
    assert not mark.exists()
    torch.load(file, weights_only=False)
    assert mark.exists(), "the bomb must be live for this test to mean anything"


def test_a_plain_pickle_that_would_run_code_does_not(tmp_path: Path) -> None:
    mark, file = tmp_path / "it_ran", tmp_path / "weights.bin"
    file.write_bytes(pickle.dumps(Bomb(mark), protocol=2))
    with pytest.raises(WeightsError):
        loaded(str(file))
    assert not mark.exists()


def test_a_harmless_object_is_named_and_the_way_out_told(tmp_path: Path) -> None:
    file = saved({"model": state(), "args": argparse.Namespace(lr=1)}, tmp_path / "weights.pth")
    with pytest.raises(WeightsError, match=re.escape("(argparse.Namespace)") + ".*torch.save"):
        loaded(file)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "absent.pth",
            None,
            '"random", "hub" or an existing file, or the folder of a run, got .*absent.pth; there is no such file$',
        ),
        ("none/absent.pth", None, "there is no such file, nor the folder .*none"),
        ("weights.npz", b"x", "weights.npz must end in .safetensors, .pth, .pt, .bin, got '.npz'"),
        ("weights.safetensors", b"garbage" * 20, "weights.safetensors could not be read as .safetensors, is it whole"),
        ("weights.pth", b"garbage" * 20, "weights.pth could not be read, is it whole"),
        ("weights.pt", b"", "weights.pt could not be read, is it whole"),
        ("weights.bin", {}, "weights.bin holds no tensors"),
        ("list.pth", [torch.ones(1)], "list.pth must hold tensors by name, a state dict; it holds a list"),
        ("odd.pth", {"a": torch.ones(1), "epoch": 3}, "odd.pth must hold tensors.*under 'epoch' it has a int"),
    ],
)
def test_what_is_no_file_of_weights_is_named(name: str, content: Any, words: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(WeightsError, match=words):
        loaded(str(file))


@pytest.mark.parametrize("cut", [200, 5000])
def test_cut_files_are_named(cut: int, tmp_path: Path) -> None:
    for ending in ("safetensors", "pth"):
        file = tmp_path / f"weights.{ending}"
        saved(state(), file)
        file.write_bytes(file.read_bytes()[:-cut])
        with pytest.raises(WeightsError, match=f"weights.{ending} could not be read.*is it whole"):
            loaded(str(file))


def test_real_weights_in_half_precision_at_two_sizes(outside_data: Path) -> None:
    file = outside_data / "weights" / "vit_small_patch14_dinov2_224_fp16.safetensors"
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    exact = {name: value.float() for name, value in load_file(file).items()}
    assert len(exact) == 174
    check_arrived(loaded(str(file), "vit_small_patch14_dinov2", 224), exact)
    resampled = timm.layers.resample_abs_pos_embed(exact["pos_embed"], [20, 20], num_prefix_tokens=1)
    check_arrived(loaded(str(file), "vit_small_patch14_dinov2", 280), {**exact, "pos_embed": resampled})
