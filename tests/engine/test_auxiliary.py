"""Auxiliary modules: trained, saved and resumed with the run, the same on several processes, left out of what is
deployed; and what they do before an epoch."""

from __future__ import annotations

import copy
import os
import signal
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from roadmap.config.settings import HardwareSettings, ModelSettings, OptimSettings, SettingError, Settings
from roadmap.data.datasets.glyphs import _distinct
from roadmap.engine import fit, loop, resume
from roadmap.engine.arithmetic import arithmetic_of
from roadmap.engine.auxiliary import Auxiliary, Training, name_of
from roadmap.engine.comparing import BatchAlone
from roadmap.engine.optimiser import optimiser, schedule
from roadmap.engine.passes import OnePass
from roadmap.engine.state import TrainState
from roadmap.engine.step import Parts, step
from roadmap.features import Features
from roadmap.losses import ROADMAP
from roadmap.models import retriever
from roadmap.runs import Run

from .test_resume import killed
from .test_step import batches, fresh
from .together import together
from .worlds import SIDE, Killed, assert_equal, assert_same_run, best_weights, job, last, lines, tiny

MIC: dict[str, Any] = {
    "auxiliary": {"name": "mic", "dim": 8, "clusters": 3, "every": 2, "decorrelation": 10.0, "hidden": 8},
    "loss": {"name": "margin_distance_weighted"},
}


class Head(nn.Module):
    """Tells classes apart by the average of the cells, and remembers a mean of them from before each epoch."""

    mean: Tensor

    def __init__(self, channels: int, num_classes: int, weight: float = 0.5, draws: bool = False) -> None:
        super().__init__()
        self.classifier, self.weight, self.draws = nn.Linear(channels, num_classes), weight, draws
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("epochs", torch.zeros(0, dtype=torch.int64))

    def forward(self, features: Features, labels: Tensor) -> Tensor:
        centred = features.cells.mean(1) - self.mean
        return self.weight * nn.functional.cross_entropy(self.classifier(centred), labels)

    def before_epoch(self, epoch: int, training: Training) -> None:
        vectors, places = training.vectors(lambda features: features.cells.mean(1))
        assert vectors.shape == (len(training.labels), len(self.mean))
        assert places.tolist() == list(range(len(vectors)))
        assert not vectors.requires_grad
        noise = torch.rand((), generator=training.generator) + (torch.rand(()) if self.draws else 0)
        self.mean.copy_(vectors.mean(0) + 1e-3 * noise)


class Silent(Head):
    """It looks at the pictures and draws numbers, and adds nothing."""

    def forward(self, features: Features, labels: Tensor) -> Tensor:
        return super().forward(features, labels) * 0


class Blind(Silent):
    """The same, without looking."""

    before_epoch = None  # type: ignore[assignment]


def test_five_steps_are_those_of_a_plain_loop() -> None:
    """The loss of the vectors plus that of the module, each weight at its own rate, to the last bit."""
    settings = OptimSettings(name="sgd", lr=0.05, head_lr=0.1, auxiliary_lr=0.2, weight_decay=0.01)
    torch.manual_seed(3)
    module = Head(256, 4)
    theirs = Head(256, 4)
    theirs.load_state_dict(module.state_dict())
    model, plain, loss = fresh(), fresh(), ROADMAP()
    optimizer = optimiser(model, loss, settings, fused=False, auxiliary=module)
    arithmetic = arithmetic_of(HardwareSettings(device="cpu", threads=1))
    state = TrainState(model, optimizer)
    passes = OnePass(arithmetic, model, whole=True)
    rates = schedule(settings, 3, 2)
    parts = Parts(arithmetic, model, optimizer, passes, BatchAlone(loss), rates, auxiliary=Auxiliary(module))
    rows = {"backbone": plain.backbone.parameters(), "head": plain.head_parameters(), "beside": theirs.parameters()}
    by_rate = zip(rows.values(), (0.05, 0.1, 0.2), strict=True)
    literal = torch.optim.SGD([{"params": list(p), "lr": r} for p, r in by_rate], momentum=0.9, weight_decay=0.01)
    for batch in batches():
        outcome = step(state, batch, parts)
        assert passes.features is None  # nothing is kept from one step to the next
        cells = plain.backbone(batch.images)
        vectors = nn.functional.normalize(plain.projection(cells.amax((2, 3))), dim=1)
        value = loss(vectors, batch.labels) + 0.5 * nn.functional.cross_entropy(
            theirs.classifier(cells.flatten(2).transpose(1, 2).mean(1) - theirs.mean), batch.labels
        )
        value.backward()
        literal.step()
        literal.zero_grad()
        assert outcome.numbers[0] == value.detach()
    assert_equal(dict(model.state_dict()), dict(plain.state_dict()))
    assert_equal(dict(module.state_dict()), dict(theirs.state_dict()))


def test_a_module_of_ones_own_is_trained_saved_and_not_deployed(pictures: Path, tmp_path: Path) -> None:
    folder = fit(tiny(pictures, tmp_path / "run"), quiet=True, auxiliary=Head)
    held = last(folder)["stateful"]
    assert held["auxiliary"]["classifier.weight"].shape == (6, 256)  # two classes of eight are held out
    assert held["auxiliary"]["mean"].any()
    alone = fit(tiny(pictures, tmp_path / "alone"), quiet=True)
    assert set(best_weights(folder)) == set(best_weights(alone))
    assert lines(folder)[1]["loss"] > lines(alone)[1]["loss"] + 0.1
    assert Run.open(folder).settings().auxiliary == {"name": "python:tests.engine.test_auxiliary.Head"}


@pytest.fixture(scope="module")
def glyphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 characters of Glyphs in every face that has them, 12 of them to train on."""
    root, classes = tmp_path_factory.mktemp("glyphs"), dict[int, int]()
    for code, face, ink in islice(_distinct(SIDE), 170):
        number = classes.setdefault(code, len(classes))
        folder = root / ("train" if number < 12 else "test") / f"{code:04x}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(255 - ink).convert("RGB").save(folder / f"{face}.png")
    assert len(classes) >= 16
    return root


@pytest.mark.parametrize("kind", [{}, MIC])
def test_a_run_that_is_killed_and_resumed_is_the_same_run(kind: dict[str, Any], glyphs: Path, tmp_path: Path) -> None:
    """Killed in the third epoch of four, so that the clusters of the third are made again."""
    given = {} if kind else {"auxiliary": partial(Head, draws=True)}
    whole = fit(tiny(glyphs, tmp_path / "whole", **kind), quiet=True, **given)
    folder = tmp_path / "twice"
    killed(6, lambda: fit(tiny(glyphs, folder, **kind), quiet=True, **given))
    torch.manual_seed(1234)
    resume(folder, quiet=True, **given)
    assert_same_run(whole, folder)


@pytest.mark.parametrize("given", [{"auxiliary": partial(Head, draws=True)}, {}])
def test_stopped_in_the_middle_of_an_epoch_and_saved_there(
    given: dict[str, Any], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was prepared for an epoch that is under way is not prepared again: the weights have moved since."""
    kind = {} if given else MIC
    whole = fit(tiny(pictures, tmp_path / "whole", **kind), quiet=True, **given)
    folder = tmp_path / "twice"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            fit(tiny(pictures, folder, **kind), quiet=True, **given)
    assert last(folder)["step"] == 5
    resume(folder, quiet=True, **given)
    assert_same_run(whole, folder)


def interrupt_after(patch: pytest.MonkeyPatch, number: int) -> None:
    """Ctrl-C while a step is taken, which is finished and saved."""
    real = loop.step

    def watched(state: Any, batch: Any, parts: Any) -> Any:
        if state.step + 1 == number:
            os.kill(os.getpid(), signal.SIGINT)
        return real(state, batch, parts)

    patch.setattr(loop, "step", watched)


def test_what_is_interrupted_before_an_epoch_leaves_no_trace() -> None:
    class Torn(Head):
        def before_epoch(self, epoch: int, training: Training) -> None:
            self.mean.fill_(7)
            raise Killed

    module = Torn(3, 2)
    with pytest.raises(Killed):
        Auxiliary(module).prepare(1, torch.zeros(4, dtype=torch.int64), lambda of: (torch.zeros(0), torch.zeros(0)), 0)
    assert not module.mean.any()


def test_looking_at_the_pictures_changes_nothing_else(pictures: Path, tmp_path: Path) -> None:
    """Statistics, modes and random numbers of the steps are left alone."""
    vit = {"model__name": "test_vit.r160_in1k", "model__pooling": "auto", "model__drop_path": 0.5}
    for number, kind in enumerate(({"select__by": "held_out"}, {**vit, "select__by": "last"})):
        runs = [
            fit(tiny(pictures, tmp_path / f"{module.__name__} {number}", **kind, epochs=2), True, auxiliary=made)
            for module, made in ((Silent, partial(Silent, draws=True)), (Blind, Blind))
        ]
        assert_equal(lines(runs[0]), lines(runs[1]))
        assert_equal(best_weights(runs[0]), best_weights(runs[1]))


@pytest.mark.parametrize("kind", [{}, MIC])
def test_the_number_of_processes_does_not_matter(kind: dict[str, Any], pictures: Path, tmp_path: Path) -> None:
    """Loss, gradient and weights of model and module, up to rounding; clusters exactly."""
    given = {} if kind else {"auxiliary": Head}
    smooth = {"optim__name": "sgd", "data__batch_size": 12, "data__per_class": 3, "data__batches": 3, "epochs": 2}
    changed = {**smooth, "optim__loss_lr": 1e-2, **kind}
    alone = fit(tiny(pictures, tmp_path / "alone", **changed), quiet=True, **given)
    found = together(2, lambda: fit(tiny(pictures, tmp_path / "run", **changed), quiet=True, **given))
    assert found == [tmp_path / "run"] * 2
    steps = [[line for line in lines(run) if line["kind"] == "step"] for run in (tmp_path / "run", alone)]
    if not kind:  # distance-weighted negatives are drawn: by the step where there are several processes
        for name in ("loss", "gradient norm"):
            values = [[line[name] for line in some] for some in steps]
            assert values[0] == pytest.approx(values[1], rel=1e-4), name
        ours, theirs = (last(run)["stateful"] for run in (tmp_path / "run", alone))
        for part in ("model", "auxiliary"):
            torch.testing.assert_close(ours[part], theirs[part], rtol=1e-3, atol=1e-5)
    else:
        clusters = [last(run)["stateful"]["auxiliary"]["surrogates"] for run in (tmp_path / "run", alone)]
        assert set(clusters[0].tolist()) == {0, 1, 2}
        assert torch.equal(*clusters)


@pytest.mark.parametrize("trained", [True, False])
def test_horde_beside_a_loss(trained: bool, pictures: Path, tmp_path: Path) -> None:
    """Sketches and heads of four orders move and are held; random signs stay as they are."""
    horde = {"name": "horde", "dim": 16, "embedding_size": 8, "trained": trained}
    made = job(tiny(pictures, tmp_path / "run", auxiliary=horde, loss={"name": "contrastive_horde"}))
    before = copy.deepcopy(made.state.parts["auxiliary"].state_dict())
    step(made.state, next(iter(made.pictures.training(made.splits.train, made.sampler))), made.parts)
    made.run.close()
    learned = {f"moments.projections.{k}": (256, 16) for k in range(5)}
    learned |= {f"moments.heads.{k}": (16, 8) for k in range(4)}
    assert {n: tuple(v.shape) for n, v in before.items()} == (learned if trained else {"moments.signs": (5, 256, 16)})
    after = made.state.parts["auxiliary"].state_dict()
    assert all(torch.equal(after[name], value) != trained for name, value in before.items())


def test_a_transformer_has_tokens(pictures: Path, tmp_path: Path) -> None:
    """Also where the network computes in bfloat16: what comes after it is float32."""
    changed = {"model__name": "test_vit.r160_in1k", "model__pooling": "auto", "select__by": "last", "epochs": 1}
    folder = fit(tiny(pictures, tmp_path / "run", **changed, **MIC, hardware__precision="bf16"), quiet=True)
    assert last(folder)["stateful"]["auxiliary"]["encoder.weight"].shape == (8, 64)


def test_the_weights_of_its_losses_move_as_those_of_a_loss() -> None:
    class Boundary(Head):
        def loss_parameters(self) -> list[nn.Parameter]:
            return [self.classifier.bias]

    module, proxies = Boundary(256, 4), nn.Linear(3, 2)
    settings = OptimSettings(lr=0.5, head_lr=0.25, loss_lr=2.0, loss_weight_decay=0.125, weight_decay=0.0625)
    model = retriever(ModelSettings(pooling="max"), 16)
    *_, loss, beside = optimiser(model, proxies, settings, fused=False, auxiliary=module).param_groups
    assert (loss["lr"], loss["base_lr"], loss["weight_decay"]) == (2.0, 2.0, 0.125)
    assert [id(p) for p in loss["params"]] == [*map(id, proxies.parameters()), id(module.classifier.bias)]
    assert (beside["lr"], beside["weight_decay"]) == (0.25, 0.0625)
    assert [id(p) for p in beside["params"]] == [id(module.classifier.weight)]
    rate = optimiser(model, nn.Identity(), OptimSettings(lr=0.5), False, module).param_groups[-1]["lr"]
    assert rate == 0.5


def refusal(call: Any) -> SettingError:
    with pytest.raises(SettingError) as caught:
        call()
    return caught.value


def test_what_is_refused(pictures: Path, tmp_path: Path) -> None:
    settings = tiny(pictures, tmp_path / "run", data__chunk=3)
    said = refusal(lambda: fit(settings, quiet=True, auxiliary=Head))
    assert said.field == "data.chunk"
    assert "an auxiliary module sees the features of the whole batch, and in two passes there" in str(said)
    assert not (tmp_path / "run").exists()
    both = refusal(lambda: fit(tiny(pictures, tmp_path / "run", **MIC), quiet=True, auxiliary=Head))
    assert "auxiliary=mic is in the settings, and tests.engine.test_auxiliary.Head was given beside them" in str(both)
    folder = fit(tiny(pictures, tmp_path / "other", epochs=1), quiet=True, auxiliary=partial(Head, weight=2.0))
    missing = refusal(lambda: resume(folder, epochs=2, quiet=True))
    assert "this run trains with tests.engine.test_auxiliary.Head, which is none of ours; pass it: resume(" in str(
        missing
    )
    another = refusal(lambda: resume(folder, epochs=2, quiet=True, auxiliary=Silent))
    assert "test_auxiliary.Silent was given beside them" in str(another)
    unnamed = refusal(lambda: Settings(auxiliary={"dim": 3}))
    assert (unnamed.field, str(unnamed)) == ("auxiliary.name", "auxiliary must have a name, such as {'name': 'none'}")
    assert name_of(partial(Head, weight=1.0)) == name_of(Head)


def test_it_must_give_one_number(pictures: Path, tmp_path: Path) -> None:
    class Several(nn.Module):
        def forward(self, features: Features, labels: Tensor) -> Tensor:
            return features.embedding.sum(1)

    with pytest.raises(TypeError, match=r"the auxiliary module Several must give one number, got shape \(8,\)"):
        fit(tiny(pictures, tmp_path / "run"), quiet=True, auxiliary=Several)
    with pytest.raises(TypeError, match="an auxiliary module must be an nn.Module, got dict"):
        fit(tiny(pictures, tmp_path / "other"), quiet=True, auxiliary=lambda: {"a": 1})  # type: ignore[arg-type, return-value]
