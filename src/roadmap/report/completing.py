"""What a run itself does not hold: its pictures, and what they are embedded for, before and after training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from roadmap.config.settings import Settings
from roadmap.data import Pack, Records, pack_for
from roadmap.encoder import Encoder
from roadmap.evaluation import records_to_search
from roadmap.hardware import device_of, in_layout
from roadmap.models import retriever
from roadmap.report.material import Material
from roadmap.report.measures import Sides, embeddings_of_test, evaluation_of, load, measures_of, save, stamp
from roadmap.report.scores import thresholds

# What may stand in the way of embedding pictures again: the report is made without, and says so.
OBSTACLES = (ValueError, TypeError, OSError, ImportError, RuntimeError)


def complete(
    material: Material,
    embed: bool = True,
    device: str = "auto",
    progress: bool | None = None,
    others: Sequence[Material] = (),
) -> None:
    """Finds the pictures of a run and, beside them, what has to be embedded for: kept in its folder for the next time.

    What cannot be had is named in `missing`, with the reason.

    Args:
        material: to be completed.
        embed: False takes only what is kept.
        device: that pictures are embedded on; "auto": that of the run.
        progress: show bars; None: where a person watches and it takes long.
        others: complete ones of the same test set; one that began with the same model shares what is known of it.
    """
    if not material.has_classes:
        material.missing.append(
            f"{material.test} has easy, hard and junk answers and no classes: scores, ranks, classes, queries and the "
            "map are left out"
        )
        return
    try:
        encoder = Encoder.open(material.run.folder, device=device)
        material.records, material.pack = _pictures(material, encoder)
    except OBSTACLES as error:
        material.missing.append(f"the pictures cannot be shown, nor scores and the map be computed: {error}")
        return
    alpha, beta, _ = thresholds(material.settings.loss)
    files = material.run.best, material.run.evaluation_file(material.test)
    folder, stamped = material.run.folder / "report", stamp(*files, alpha=alpha, beta=beta)
    name = files[1].stem
    material.measures, material.before = load(folder, name, stamped)
    if not embed:
        if "after" not in material.measures:
            material.missing.append("scores, precision by rank and the map: they need the pictures embedded again")
        return
    known = len(material.measures)
    for which in ("after", "before"):
        if which not in material.measures:
            _measure(material, which, encoder, progress, others)
    if len(material.measures) > known:
        try:
            save(folder, name, stamped, material.measures, material.before)
        except OSError as error:
            material.missing.append(f"what was computed could not be kept for the next report: {error}")


def _pictures(material: Material, encoder: Encoder) -> tuple[Records, Pack | None]:
    """The test set as the run divided it; every picture of the evaluation is there."""
    settings = material.settings.data
    root = settings.test_sets.get(material.test)
    everything = encoder.records() if root is None else encoder.records(material.test, root)
    records = records_to_search(everything)
    pack, _ = pack_for(everything, encoder.side, settings.pack, make=False)
    return records, pack


def _measure(
    material: Material, which: str, trained: Encoder, progress: bool | None, others: Sequence[Material]
) -> None:
    words = {"after": "scores, precision by rank and the map", "before": "the model before training"}[which]
    assert material.records is not None
    try:
        encoder = trained if which == "after" else untrained(material.settings, trained.device)
        if which == "before" and (other := _same_start(material, encoder, others)) is not None:
            material.before, material.measures[which] = other.before, other.measures[which]
            return
        parts = embeddings_of_test(encoder, material.records, material.pack, progress)
        ids = parts[0].ids, parts[-1].ids
        if ids != (material.evaluation.ids, material.evaluation.gallery_ids):
            raise ValueError("the pictures are not those of the evaluation any more")
        alpha, beta, _ = thresholds(material.settings.loss)
        sides = Sides.of(parts[0], parts[1] if len(parts) > 1 else None)
        found = measures_of(sides, np.asarray(parts[0].labels.cpu()), alpha, beta, progress)
        if which == "before":
            material.before = evaluation_of(parts, material.records.name)
    except OBSTACLES as error:
        material.missing.append(f"{words}: {error}")
        return
    material.measures[which] = found


def _same_start(material: Material, encoder: Encoder, others: Sequence[Material]) -> Material | None:
    """A run that began with the same weights, whose pictures are seen alike."""
    wanted = encoder.description(), thresholds(material.settings.loss)[:2]
    for other in others:
        if other.before is not None and "before" in other.measures:
            about, counts = other.before.facts["queries"], other.measures["before"].counts
            if ({name: about.get(name) for name in wanted[0]}, (counts.alpha, counts.beta)) == wanted:
                return other
    return None


def untrained(settings: Settings, device: torch.device | None = None) -> Encoder:
    """The model that a run began with, ready for pictures: pretrained weights, and what is random by the run's seed."""
    where = device_of(settings.hardware.device) if device is None else device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = retriever(settings.model, settings.data.image).eval()
    encoder = Encoder.of(in_layout(model.to(where), settings.hardware), settings, where)
    return dataclasses.replace(encoder, name=f"{settings.model.name} before training")
