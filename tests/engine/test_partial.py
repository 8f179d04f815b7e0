"""Runs of which biases alone learn, or the upper layers: what moves, how fast, and all else that works with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from roadmap.config.settings import ModelSettings, OptimSettings, SettingError, Settings
from roadmap.engine import fit, plan
from roadmap.engine.auto import cautions, resolve
from roadmap.engine.compiling import repeated_blocks, runnable_model
from roadmap.engine.splits import records_of
from roadmap.models import Retriever, retriever
from roadmap.runs import Run

from .test_optimiser import rates
from .together import together
from .worlds import best_weights, last, lines, tiny

VIT: dict[str, Any] = {"model__name": "test_vit.r160_in1k", "model__pooling": "auto"}
BIASES: dict[str, Any] = {**VIT, "model__learns": "biases", "optim__lr": 1e-2}


def before(settings: Settings) -> Retriever:
    torch.manual_seed(settings.seed)
    return retriever(settings.model, settings.data.image)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"optim__ema": 0.5, "select__by": "last"},
        {
            "model__dim": 4,
            "optim__layer_decay": 0.7,
            "optim__decay_matrices_only": True,
            "optim__head_first": 0.5,
            "memory__size": 16,
        },
        {"data__chunk": 3, "hardware__precision": "bf16", "model__drop_path": 0.2},
        {"auxiliary": {"name": "horde"}, "loss": {"name": "contrastive_horde"}, "model__freeze_layers": 2},
        {"loss": {"name": "proxy_nca"}, "optim__name": "sgd", "optim__clip": 1.0},
        {"model__learns": "all", "model__freeze_layers": 5, "optim__ema": 0.5},
        {"model__name": "small_cnn", "model__pooling": "gem", "model__freeze_batch_norm": True},
    ],
    ids=str,
)
def test_what_learns_moves_and_all_else_keeps_its_bits(changed: dict[str, Any], pictures: Path, tmp_path: Path) -> None:
    settings = tiny(pictures, tmp_path / "run", **{**BIASES, **changed})
    start = before(settings)
    folder = fit(settings, quiet=True)
    wanted = {name for name, parameter in start.named_parameters() if parameter.requires_grad}
    assert 0 < len(wanted) < len(list(start.parameters()))
    state = last(folder)["stateful"]
    held = [state["model"], state["kept"], best_weights(folder)]
    if "average" in state:
        held.append({name.removeprefix("model."): value for name, value in state["average"].items()})
    for weights in held:
        moved = {name for name, value in start.state_dict().items() if not torch.equal(value, weights[name])}
        # an average copies statistics; the best epoch may be the one before anything moved
        assert moved <= wanted | {name for name in weights if "running" in name or "tracked" in name}
    came = start.state_dict()
    assert {name for name in wanted if torch.equal(came[name], state["model"][name])} == set()


def test_rates_and_decay_are_those_of_the_layer_and_the_kind() -> None:
    model = retriever(ModelSettings("test_vit", "random", learns="biases", freeze_layers=5, dim=4), 32)
    found = rates(model, OptimSettings(lr=1.0, head_lr=3.0, layer_decay=0.5, weight_decay=0.25))
    blocks = [f"backbone.blocks.{block}" for block in (4, 5)]
    parts = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    wanted = {
        f"{block}.{part}.bias": (0.5 ** (2 - place), 0.25) for place, block in enumerate(blocks) for part in parts
    }
    wanted |= {"backbone.norm.bias": (0.5, 0.25), "projection.weight": (3.0, 0.25), "projection.bias": (3.0, 0.25)}
    assert found == wanted
    spared = rates(model, OptimSettings(decay_matrices_only=True, weight_decay=0.25))
    assert {name for name, (_, decay) in spared.items() if decay} == {"projection.weight"}


@pytest.mark.parametrize(
    "changed",
    [{"model__learns": "biases"}, {"model__freeze_layers": 2, "model__dim": 4}],
    ids=str,
)
def test_several_processes_learn_the_same(changed: dict[str, Any], pictures: Path, tmp_path: Path) -> None:
    """With BatchNorm too: that of layers that stay has the statistics it came with, in every process."""
    smooth = {"optim__name": "sgd", "data__batch_size": 12, "data__per_class": 3, "optim__ema": 0.5, "epochs": 2}
    alone = fit(tiny(pictures, tmp_path / "alone", **smooth, **changed), quiet=True)
    shared = tiny(pictures, tmp_path / "shared", **smooth, **changed)
    together(2, lambda: fit(shared, quiet=True))
    ours, theirs = (
        [line["gradient norm"] for line in lines(folder) if line["kind"] == "step"]
        for folder in (tmp_path / "shared", alone)
    )
    assert ours == pytest.approx(theirs, rel=1e-4)
    held = [last(folder)["stateful"] for folder in (tmp_path / "shared", alone)]
    for part in ("model", "average", "kept"):
        torch.testing.assert_close(held[0][part], held[1][part], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("options", [{"learns": "biases"}, {"freeze_layers": 2}], ids=str)
def test_compiled_blocks_give_the_same(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **more: real(self, backend="aot_eager", **more))
    torch.compiler.reset()
    torch.manual_seed(0)
    model = retriever(ModelSettings("test_vit", "random", **options), 32)
    runnable = runnable_model(model, "blocks")
    assert len(repeated_blocks(model)) == 6
    images, pull, gradients = torch.randn(2, 3, 32, 32), torch.randn(2, model.dim), []
    for network in (model, runnable):
        model.zero_grad()
        network.train()(images).backward(pull)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5)


def test_a_higher_rate_a_warning_and_a_count(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tiny(pictures, tmp_path / "run", **{**BIASES, "optim__lr": "auto"}, model__weights="hub")
    found, reasons = resolve(asked, records_of(asked.data))
    assert found.optim.lr == 1e-4  # ten times that of the whole transformer
    assert "optim.lr=0.0001: a transformer, to fine-tune, its biases alone" in reasons
    assert cautions(asked) == []
    random = tiny(pictures, tmp_path / "run", **BIASES, epochs=1)
    (said,) = cautions(random)
    assert said.startswith("WARNING: model.learns=biases with model.weights=random: what does not learn stays random")
    (said,) = cautions(tiny(pictures, tmp_path / "run", model__freeze_layers=2))
    assert said.startswith("WARNING: model.freeze_layers=2 with model.weights=random")
    fit(random)
    printed = capsys.readouterr().out
    assert "64 dimensions, 0.3 M parameters of which 3,968 learn, weights random" in printed
    assert said.split("=2")[0] not in printed


def test_what_a_plan_says_and_refuses(pictures: Path, tmp_path: Path) -> None:
    whole, part = (
        plan(tiny(pictures, tmp_path / "run", **{**BIASES, "model__learns": what})) for what in ("all", "biases")
    )
    assert 0.5 * whole.disk < part.disk < 0.6 * whole.disk  # no moments of what does not learn
    folder = fit(tiny(pictures, tmp_path / "run", **BIASES), quiet=True)
    written = sum(path.stat().st_size for path in (folder / "checkpoints").iterdir())
    assert part.disk == pytest.approx(written, rel=0.25)
    with pytest.raises(SettingError, match="model.freeze_layers=7: test_vit.r160_in1k has 7 layers"):
        plan(tiny(pictures, tmp_path / "other", **VIT, model__freeze_layers=7))


def test_a_run_from_before_there_was_a_choice(pictures: Path, tmp_path: Path) -> None:
    """Its settings lack the names; all of its backbone learned."""
    folder = fit(tiny(pictures, tmp_path / "run", epochs=1), quiet=True)
    file = folder / "config.yaml"
    told = [line for line in file.read_text().splitlines() if "learns:" not in line and "freeze_layers:" not in line]
    assert len(told) == len(file.read_text().splitlines()) - 2
    file.write_text("\n".join(told))
    settings = Run.open(folder).settings()
    assert (settings.model.learns, settings.model.freeze_layers) == ("all", 0)
