"""Settings are plain values: they come back as they were, and what cannot be is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roadmap.config.settings import (
    DataSettings,
    HardwareSettings,
    ModelSettings,
    OptimSettings,
    SelectSettings,
    SettingError,
    Settings,
    keyword_arguments,
)


def test_plain_values_and_back() -> None:
    settings = Settings(
        data=DataSettings(name="cub", root="x", batches=3),
        optim=OptimSettings(milestones=[1, 2]),
        loss={"name": "supap", "tau": 0.05},
        seed=4,
    )
    values = settings.as_dict()
    assert Settings.from_dict(json.loads(json.dumps(values))) == settings
    values["loss"]["tau"] = 9
    values["optim"]["milestones"].append(3)
    assert settings.loss["tau"] == 0.05  # a copy
    assert settings.optim.milestones == [1, 2]


def test_what_is_not_named_has_its_default() -> None:
    assert Settings.from_dict({}) == Settings()
    assert Settings.from_dict({"optim": {"lr": 0.5}}).optim == OptimSettings(lr=0.5)
    assert Settings().loss is not Settings().loss
    assert DataSettings().ratio is not DataSettings().ratio


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epoch": 3}, "unknown setting epoch, did you mean 'epochs'? Known: data, model, loss,"),
        ({"optim": {"learning": 1}}, "unknown setting optim.learning"),
        ({"data": {"imagesize": 3}}, "unknown setting data.imagesize, did you mean 'data.image'?"),
        ({"data": {"batchsize": 3}}, "unknown setting data.batchsize, did you mean 'data.batch_size'?"),
        ({"data": 3}, "data must hold settings by name, got int 3"),
        ({"model": None}, "model must hold settings by name, got NoneType None"),
        ({"loss": "roadmap"}, "loss must be its name with its options, such as {name: roadmap}, got 'roadmap'"),
        ({"loss": {"tau": 1}}, "loss must have a name, such as {'name': 'roadmap'}"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"checkpoint_minutes": -1}, "checkpoint_minutes must be at least 0, got -1"),
        ({"run": ""}, "run must name a folder or be left out, got ''"),  # run=$UNSET was the folder one is in
        ({"out": " "}, "out must name a folder or be left out, got ' '"),
    ],
)
def test_what_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Settings.from_dict(values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (DataSettings, {"pack": "maybe"}, "data.pack must be one of auto, yes, no, compressed, got 'maybe'"),
        (DataSettings, {"sampler": "m_per_clas"}, "got 'm_per_clas', did you mean 'm_per_class'?"),
        (DataSettings, {"on_error": "stop"}, "data.on_error must be one of raise, skip, got 'stop'"),
        (DataSettings, {"root": ""}, "data.root must name a folder or be left out, got ''"),
        (DataSettings, {"image": 0}, "data.image must be at least 1, got 0"),
        (DataSettings, {"batch_size": -4}, "data.batch_size must be at least 1, got -4"),
        (DataSettings, {"batches": 0}, "data.batches must be at least 1, got 0"),
        (DataSettings, {"workers": -1}, "data.workers must be at least 0, got -1"),
        (DataSettings, {"flip": 1.5}, "data.flip must lie in 0..1, got 1.5"),
        (DataSettings, {"scale": [0.5]}, "data.scale must be two numbers, 0 < low <= high <= 1, got [0.5]"),
        (DataSettings, {"scale": [0.5, 1.2]}, "data.scale must be two numbers, 0 < low <= high <= 1, got [0.5, 1.2]"),
        (DataSettings, {"scale": [0, 1]}, "data.scale must be two numbers, 0 < low <= high <= 1, got [0.0, 1.0]"),
        (DataSettings, {"ratio": [2, 1]}, "data.ratio must be two numbers, 0 < low <= high, got [2.0, 1.0]"),
        (
            ModelSettings,
            {"pooling": "mean"},
            "model.pooling must be one of auto, avg, max, gem, token, both",
        ),
        (ModelSettings, {"dim": 0}, "model.dim must be at least 1, got 0"),
        (ModelSettings, {"drop_path": 1.0}, "model.drop_path must be at least 0 and below 1, got 1.0"),
        (
            OptimSettings,
            {"name": "adamv"},
            "optim.name must be one of adam, adamw, sgd, got 'adamv', did you mean 'adam'?",
        ),
        (OptimSettings, {"schedule": "cosin"}, "did you mean 'cosine'?"),
        (OptimSettings, {"lr": 0}, "optim.lr must be above 0, got 0"),
        (OptimSettings, {"lr": float("nan")}, "optim.lr must be above 0, got nan"),
        (OptimSettings, {"layer_decay": -1}, "optim.layer_decay must be above 0, got -1"),
        (OptimSettings, {"gamma": 0}, "optim.gamma must be above 0, got 0"),
        (OptimSettings, {"head_lr": -1e-3}, "optim.head_lr must be above 0, got -0.001"),
        (OptimSettings, {"loss_lr": 0}, "optim.loss_lr must be above 0, got 0"),
        (OptimSettings, {"auxiliary_lr": 0}, "optim.auxiliary_lr must be above 0, got 0"),
        (OptimSettings, {"loss_weight_decay": -1}, "optim.loss_weight_decay must be at least 0, got -1"),
        (OptimSettings, {"momentum": 1.0}, "optim.momentum must be at least 0 and below 1, got 1.0"),
        (OptimSettings, {"eps": 0}, "optim.eps must be above 0, got 0"),
        (OptimSettings, {"head_first": -1}, "optim.head_first must be at least 0, got -1"),
        (OptimSettings, {"clip": 0}, "optim.clip must be above 0, got 0"),
        (OptimSettings, {"clip": -1}, "optim.clip must be above 0, got -1"),
        (OptimSettings, {"weight_decay": -1}, "optim.weight_decay must be at least 0, got -1"),
        (OptimSettings, {"warmup": -1}, "optim.warmup must be at least 0, got -1"),
        (OptimSettings, {"final": 2}, "optim.final must lie in 0..1, got 2"),
        (OptimSettings, {"ema": 1.0}, "optim.ema must lie strictly between 0 and 1, got 1.0"),
        (OptimSettings, {"ema": 0.0}, "optim.ema must lie strictly between 0 and 1, got 0.0"),
        (SelectSettings, {"by": "best"}, "select.by must be one of auto, held_out, last, test, got 'best'"),
        (SelectSettings, {"every": 0}, "select.every must be at least 1, got 0"),
        (SelectSettings, {"fraction": 1.0}, "select.fraction must lie strictly between 0 and 1, got 1.0"),
        (SelectSettings, {"fraction": 0}, "select.fraction must lie strictly between 0 and 1, got 0"),
        (HardwareSettings, {"precision": "16"}, "hardware.precision must be one of auto, 32, bf16, fp16, got '16'"),
        (HardwareSettings, {"compile": "yes"}, "hardware.compile must be one of auto, no, blocks, default,"),
        (HardwareSettings, {"device": "gpu"}, "hardware.device must be one of auto, cpu, cuda, mps, got 'gpu'"),
        (HardwareSettings, {"devices": 0}, "hardware.devices must be at least 1, got 0"),
        (DataSettings, {"image": "big"}, "data.image must be a whole number or auto, got 'big'"),
        (DataSettings, {"image": 1.5}, "data.image must be a whole number or auto, got 1.5"),
        (DataSettings, {"image": True}, "data.image must be a whole number or auto, got true"),
        (DataSettings, {"image": None}, "data.image must be a whole number or auto, got null"),
        (DataSettings, {"batches": "few"}, "data.batches must be a whole number or null or auto, got 'few'"),
        (DataSettings, {"scale": [0.5, "x"]}, "data.scale must be a list of numbers, such as [0.16,1] or auto, got"),
        (DataSettings, {"flip": "auto"}, "data.flip must be a number, got 'auto'"),
        (DataSettings, {"test_sets": "ox"}, "data.test_sets must be names with values, such as {roxford5k:FOLDER}"),
        (ModelSettings, {"name": 3}, "model.name must be text, got 3"),
        (ModelSettings, {"layer_norm": 1}, "model.layer_norm must be true or false or auto, got 1"),
        (OptimSettings, {"milestones": [1.5]}, "optim.milestones must be a list of whole numbers, such as [30,70]"),
        (OptimSettings, {"lr": "fast"}, "optim.lr must be a number or auto, got 'fast'"),
        (HardwareSettings, {"precision": 32}, "hardware.precision must be text, got 32"),
        (HardwareSettings, {"threads": 0}, "hardware.threads must be at least 1, got 0"),
    ],
)
def test_values_that_cannot_be(kind: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        kind(**values)
    assert message in str(caught.value)


def test_none_stands_for_what_is_worked_out() -> None:
    optim = OptimSettings(head_lr=None, loss_lr=None, clip=None, ema=None)
    assert (optim.head_lr, optim.loss_lr, optim.clip, optim.ema) == (None,) * 4
    data = DataSettings(batches=None, workers=None, root=None)
    assert (data.batches, data.workers, data.root) == (None,) * 3
    assert HardwareSettings(threads=None).threads is None


def test_the_field_at_fault_can_be_asked_for() -> None:
    for values, field in (
        ({"epochs": "ten"}, "epochs"),
        ({"data": {"imag": 3}}, "data.imag"),
        ({"loss": {}}, "loss.name"),
    ):
        with pytest.raises(SettingError) as caught:
            Settings.from_dict(values)
        assert caught.value.field == field


def test_whole_numbers_become_numbers() -> None:
    data = DataSettings(flip=0, scale=[1, 1])
    assert (type(data.flip), data.scale) == (float, [1.0, 1.0])
    assert type(OptimSettings(lr=1).lr) is float


def test_what_nobody_decides_is_left_to_the_program() -> None:
    values = Settings().as_dict()
    left = [f"{part}.{name}" for part in values if isinstance(values[part], dict) for name in values[part]]
    left = [key for key in left if values[key.split(".")[0]][key.split(".")[1]] == "auto"]
    assert [key for key in left if not key.startswith("hardware.")] == [
        *(
            f"data.{name}"
            for name in ("image", "resize", "scale", "pack", "side", "batch_size", "per_class", "batches")
        ),
        *(f"model.{name}" for name in ("name", "weights", "pooling", "layer_norm")),
        "memory.form",
        "optim.lr",
        "select.by",
    ]
    assert Settings().epochs == "auto"  # type: ignore[comparison-overlap]


def test_known_names_are_passed_on() -> None:
    assert keyword_arguments(SelectSettings, {"by": "last"}, "select.") == {"by": "last"}
    with pytest.raises(ValueError, match="unknown setting select.bye, did you mean 'select.by'\\? Known: by, fraction"):
        keyword_arguments(SelectSettings, {"bye": 1}, "select.")
