"""A frozen backbone: every picture goes through it once, and what comes after it learns as it would from pictures."""

from __future__ import annotations

import dataclasses
import os
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from roadmap.config.settings import ModelSettings, SettingError, Settings
from roadmap.data import dataset, evaluation_batches, pack
from roadmap.encoder import Encoder
from roadmap.encoder.trunk import vector_pack
from roadmap.encoder.vector_files import home
from roadmap.engine import fit, plan, resume
from roadmap.engine.auto import resolve
from roadmap.engine.faults import RunError
from roadmap.engine.loop import train_epoch
from roadmap.engine.splits import records_of
from roadmap.engine.watch import Watch
from roadmap.evaluation import Evaluation, evaluate
from roadmap.losses import ROADMAP
from roadmap.models import Retriever, load_checkpoint, retriever
from roadmap.runs import Run

from .test_resume import killed
from .together import together
from .worlds import assert_equal, assert_same_run, best_weights, job, last, tiny, write_classes

FROZEN: dict[str, Any] = {"model__freeze_backbone": True, "model__dim": 8}


def frozen(root: Path, run: Path, **changed: Any) -> Settings:
    return tiny(root, run, **{**FROZEN, **changed})


@pytest.fixture
def uncached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own: nothing is known yet."""
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vectors"


def unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no backbone may be asked."""

    def trunk(self: Retriever, images: Tensor) -> Tensor:
        raise AssertionError("the backbone was asked again")

    monkeypatch.setattr(Retriever, "trunk", trunk)


def test_steps_are_those_of_the_whole_network_on_centre_crops(pictures: Path, tmp_path: Path) -> None:
    """A plain loop: pictures cut as for evaluation, the backbone in evaluation mode and without a gradient."""
    settings = frozen(
        pictures, tmp_path / "run", optim__name="sgd", optim__weight_decay=0.0, optim__schedule="constant"
    )
    under_way = job(settings)
    train, sampler = under_way.splits.train, under_way.sampler
    torch.manual_seed(settings.seed)
    plain = retriever(settings.model, settings.data.image).eval()
    crop = under_way.pictures.centre
    images = torch.cat([batch.images for batch in evaluation_batches(train, crop, 64, side=settings.data.side)])
    moving = torch.optim.SGD(plain.projection.parameters(), lr=settings.optim.lr, momentum=0.9)
    loss = ROADMAP()
    for epoch in range(2):
        for indices in sampler.epoch_batches(epoch):
            with torch.no_grad():
                pooled = plain.backbone(images).amax((2, 3))[indices]
            vectors = nn.functional.normalize(plain.projection(pooled), dim=1)
            loss(vectors, torch.from_numpy(train.labels[indices])).backward()
            moving.step()
            moving.zero_grad()
    watch = Watch(train, False, under_way.ranks, settings.data.batch_size)
    for _ in range(2):
        train_epoch(under_way, under_way.pictures.training(train, sampler), watch)
    found = under_way.state.model.state_dict()
    expected = plain.state_dict()
    assert not torch.equal(found["projection.weight"], under_way.kept.projection.weight)  # it moved
    torch.testing.assert_close(found["projection.weight"], expected["projection.weight"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found["projection.bias"], expected["projection.bias"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"data__pack": "no"},
        {"model__pooling": "gem", "model__layer_norm": True},
        {"optim__ema": 0.5, "select__by": "test"},
        {"memory__size": 16, "dims": [4]},
        {"data__chunk": 4, "hardware__precision": "bf16"},
        {"loss": {"name": "proxy_nca"}, "model__normalise": False},
    ],
    ids=str,
)
def test_the_projection_alone_moves_and_the_whole_network_is_deployed(
    changed: dict[str, Any], pictures: Path, tmp_path: Path
) -> None:
    settings = frozen(pictures, tmp_path / "run", **changed)
    folder = fit(settings, quiet=True)
    torch.manual_seed(settings.seed)
    before, after = retriever(settings.model, settings.data.image).state_dict(), best_weights(folder)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"projection.weight", "projection.bias"}
    shutil.rmtree(home())
    # from pictures, by another object, through the whole network: the bits that training measured
    again = evaluate(Encoder.open(folder))
    assert not home().exists()
    trained = Evaluation.load(Run.open(folder).evaluation_file("pictures"))
    assert again.metrics == trained.metrics
    assert_equal(again.per_query, trained.per_query)
    assert torch.equal(again.neighbours, trained.neighbours)
    assert trained.facts["data"]["read"].startswith("vectors of the frozen backbone")


def test_a_second_run_asks_no_backbone(
    pictures: Path, tmp_path: Path, uncached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = fit(frozen(pictures, tmp_path / "one"), quiet=True)
    assert len(list(uncached.glob("*.safetensors"))) == 3  # training, held-out classes, test
    unused(monkeypatch)
    other = fit(frozen(pictures, tmp_path / "other"), quiet=True)
    assert_same_run(one, other)
    with monkeypatch.context() as patch:  # nor does an evaluation
        patch.setattr(Retriever, "_features", Retriever.trunk)
        trained = Evaluation.load(Run.open(one).evaluation_file("pictures"))
        assert evaluate(Encoder.open(one)).metrics == trained.metrics
        with pytest.raises(AssertionError, match="asked again"):
            evaluate(Encoder.open(one, flip=True))
    fit(frozen(pictures, tmp_path / "more", loss={"name": "smoothap"}, data__batch_size=4), quiet=True)
    job(frozen(pictures, tmp_path / "large", data__batch_size=12 * 6, data__per_class=12))


@pytest.mark.parametrize(
    "changed",
    [{"model__pooling": "avg"}, {"data__resize": 18}, {"hardware__precision": "bf16"}, {"data__squeeze": "test"}],
    ids=str,
)
def test_what_decides_the_vectors_is_looked_at(
    changed: dict[str, Any], pictures: Path, tmp_path: Path, uncached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(frozen(pictures, tmp_path / "one"))
    unused(monkeypatch)
    with pytest.raises(AssertionError, match="asked again"):
        job(frozen(pictures, tmp_path / "other", **changed))


def test_other_weights_are_other_vectors(
    pictures: Path, tmp_path: Path, uncached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = frozen(pictures, tmp_path / "one")
    folder = fit(settings, quiet=True)
    model, _ = load_checkpoint(folder / "checkpoints" / "best.safetensors")
    encoder = Encoder.of(model, settings, torch.device("cpu"))
    records = records_of(settings.data).split("test")
    unused(monkeypatch)
    vector_pack(encoder, [records])
    next(model.backbone.parameters()).data[0] += 1
    with pytest.raises(AssertionError, match="asked again"):
        vector_pack(encoder, [records])


@pytest.mark.parametrize("pack", ["no", "yes"])
def test_a_picture_that_changed_and_a_damaged_file(pack: str, tmp_path: Path, uncached: Path) -> None:
    root = tmp_path / "pictures"
    write_classes(root / "train", range(4))
    write_classes(root / "test", range(4, 6))
    settings = frozen(root, tmp_path / "one", data__pack=pack, select__by="last")
    first = job(settings).pictures._vectors
    changed = root / "train" / "c01" / "2.png"
    shutil.copy(root / "train" / "c02" / "2.png", changed)
    os.utime(changed, (1, 1))
    for file in uncached.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    again = job(dataclasses.replace(settings, run=str(tmp_path / "two"))).pictures._vectors
    (one,), (two,) = first.values(), again.values()
    assert one.keys == two.keys
    different = {one.keys[i] for i in range(len(one)) if not np.array_equal(one.vectors[i], two.vectors[i])}
    assert different == {"train/c01/2.png"}


def test_what_a_pack_held_is_not_taken_for_a_file_that_changed_since(tmp_path: Path, uncached: Path) -> None:
    """A picture is replaced after its pack was opened: what is kept of the pack is not found for the new picture."""
    root = tmp_path / "pictures"
    write_classes(root, range(4))
    records, encoder = dataset("folder", root), Encoder.open("small_cnn", device="cpu", dim=8)
    settings = dataclasses.replace(encoder.model.settings, freeze_backbone=True)
    assert isinstance(encoder.model, Retriever)
    encoder.model.settings = settings
    made = pack(records, encoder.side, workers=0, progress=False)
    shutil.copy(records.path(9), records.path(2))
    os.utime(records.path(2), (1, 1))
    old, new = vector_pack(encoder, [records], made), vector_pack(encoder, [records])
    assert [i for i in range(len(records)) if not np.array_equal(old.vectors[i], new.vectors[i])] == [2]
    assert np.array_equal(vector_pack(encoder, [records], made).vectors, old.vectors)
    fresh = pack(records, encoder.side, workers=0, progress=False)
    before = set(uncached.iterdir())
    assert np.array_equal(vector_pack(encoder, [records], fresh).vectors, new.vectors)
    assert set(uncached.iterdir()) == before  # a pack of pixels has the vectors of its files


def test_stopped_and_gone_on_with(pictures: Path, tmp_path: Path) -> None:
    whole = fit(frozen(pictures, tmp_path / "whole"), quiet=True)
    settings = frozen(pictures, tmp_path / "twice")
    killed(6, lambda: fit(settings, quiet=True))
    shutil.rmtree(home())  # somebody emptied the cache meanwhile
    resume(tmp_path / "twice", quiet=True)
    assert_same_run(whole, tmp_path / "twice")


@pytest.mark.parametrize("kept", [True, False])
def test_what_goes_on_looks_with_the_weights_that_it_began_with(
    kept: bool, pictures: Path, tmp_path: Path, uncached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights from a file, which a run that goes on need not find again; what they made of the pictures it does."""
    torch.manual_seed(7)
    save_file(retriever(ModelSettings(), 16).backbone.state_dict(), tmp_path / "weights.safetensors")
    settings = frozen(pictures, tmp_path / "whole", model__weights=str(tmp_path / "weights.safetensors"))
    whole = fit(settings, quiet=True)
    settings = dataclasses.replace(settings, run=str(tmp_path / "twice"))
    killed(6, lambda: fit(settings, quiet=True))
    (tmp_path / "weights.safetensors").unlink()
    if kept:
        unused(monkeypatch)
    else:
        shutil.rmtree(uncached)
    resume(tmp_path / "twice", quiet=True)
    assert_same_run(whole, tmp_path / "twice")


def test_two_processes_are_one(pictures: Path, tmp_path: Path, uncached: Path) -> None:
    alone = fit(frozen(pictures, tmp_path / "alone"), quiet=True)
    shutil.rmtree(uncached)
    settings = frozen(pictures, tmp_path / "together", hardware__devices=2)
    folders = together(2, lambda: fit(settings, quiet=True))
    assert folders == [tmp_path / "together"] * 2
    one, two = (Evaluation.load(Run.open(run).evaluation_file("pictures")) for run in (alone, folders[0]))
    assert one.metrics == two.metrics
    torch.testing.assert_close(best_weights(alone)["projection.weight"], best_weights(folders[0])["projection.weight"])


def test_queries_and_gallery(tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    write_classes(root / "train", range(8))
    write_classes(root / "query", range(8, 12), each=2)
    for folder in sorted((root / "query").iterdir()):
        shutil.copytree(folder, root / "gallery" / folder.name)
    folder = fit(frozen(root, tmp_path / "run"), quiet=True)
    trained = Evaluation.load(Run.open(folder).evaluation_file("pictures"))
    assert evaluate(Encoder.open(folder)).metrics == trained.metrics


@pytest.mark.parametrize("pack", ["no", "yes"])
def test_a_picture_that_cannot_be_decoded(pack: str, tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    write_classes(root / "train", range(8))
    write_classes(root / "test", range(8, 12))
    (root / "train" / "c02" / "1.png").write_bytes(b"no picture")
    (root / "test" / "c09" / "1.png").write_bytes(b"no picture")
    with pytest.raises(RunError, match=r"c0[29]/1\.png"):
        fit(frozen(root, tmp_path / "stops", data__pack=pack, select__by="last"), quiet=True)
    settings = frozen(root, tmp_path / "goes on", data__pack=pack, data__on_error="skip", select__by="last")
    folder = fit(settings, quiet=True)
    assert sorted(last(folder)["stateful"]["pictures"]["skipped"]) == ["test/c09/1.png", "train/c02/1.png"]
    assert len(Evaluation.load(Run.open(folder).evaluation_file("pictures")).labels) == 23
    # what was left out then is not left out where that is an error
    with pytest.raises(RunError, match=r"1\.png"):
        fit(frozen(root, tmp_path / "stops again", data__pack=pack, select__by="last"), quiet=True)


def test_what_cannot_be(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"trains the projection alone, and there is none.*model\.dim=256") as error:
        fit(frozen(pictures, tmp_path / "run", model__dim=None), quiet=True)
    assert error.value.field == "model.dim"
    with pytest.raises(SettingError, match="keeps the pooled features alone") as error:
        fit(frozen(pictures, tmp_path / "run", auxiliary={"name": "horde"}), quiet=True)
    assert error.value.field == "auxiliary"
    assert not (tmp_path / "run").exists()


def test_backbone_and_pooling_stay_in_evaluation_mode() -> None:
    model = retriever(ModelSettings("small_cnn", "random", pooling="gem", dim=4, freeze_backbone=True), 32)
    assert model.training
    assert model.projection.training
    assert not any(part.training for part in model.backbone.modules())
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"projection.weight", "projection.bias"}


def test_vectors_in_the_place_of_images() -> None:
    model = retriever(ModelSettings("small_cnn", "random", dim=4, layer_norm=True), 32).eval()
    images = torch.randn(3, 3, 32, 32)
    assert torch.equal(model(model.trunk(images)), model(images))
    with pytest.raises(ValueError, match=r"images must be of shape \(B, 3, S, S\), got \(3, 5\)"):
        model(torch.zeros(3, 5))


def test_a_rate_and_a_forecast_of_its_own(pictures: Path, tmp_path: Path) -> None:
    settings = frozen(pictures, tmp_path / "run", optim__lr="auto")
    resolved, reasons = resolve(settings, records_of(settings.data))
    assert resolved.optim.lr == 1e-3
    assert any("a projection after a frozen backbone" in reason for reason in reasons)
    assert plan(settings).rate > 0
    assert not (tmp_path / "run").exists()


def test_batches_of_vectors_are_in_the_order_of_the_sampler(pictures: Path, tmp_path: Path) -> None:
    under_way = job(frozen(pictures, tmp_path / "run"))
    train = under_way.splits.train
    vectors = under_way.pictures._input(train)
    for batch in islice(under_way.pictures.training(train, under_way.sampler), 2):
        assert batch.images.shape == (8, under_way.kept.width)
        expected = [vectors.vectors[vectors.rows[i]] for i in batch.indices.tolist()]  # type: ignore[union-attr]
        assert np.array_equal(batch.images.numpy(), np.stack(expected))
        assert batch.labels.tolist() == train.labels[batch.indices.numpy()].tolist()


def test_a_compressed_pack_has_vectors_of_its_own(pictures: Path, tmp_path: Path, uncached: Path) -> None:
    found = []
    for choice in ("compressed", "yes", "no"):
        fit(frozen(pictures, tmp_path / choice, epochs=1, data__pack=choice, data__side=16), quiet=True)
        found.append({path.name for path in uncached.glob("*.safetensors")})
    assert len(found[1]) == 2 * len(found[0])
    assert found[2] == found[1]  # a pack of pixels has those of the files
