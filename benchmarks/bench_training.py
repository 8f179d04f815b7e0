"""Whole training loop beside the bare step of the same compiled model on one fixed batch, in one run.

    python benchmarks/bench_training.py --root CUB_200_2011 --weights vit_small_patch14_dinov2_224_fp16.safetensors

The loop is what `roadmap train` runs: pictures, random crops, model, ROADMAP, optimiser, checks, log. The bare step is
forward, backward (of a dot product with fixed numbers) and optimiser. Both use the same model, compiled the same way,
and take turns. A profile says where the rest goes. Without --root, pictures of noise the size of CUB's are made.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure import provenance

from roadmap.config.settings import (
    DataSettings,
    HardwareSettings,
    ModelSettings,
    OptimSettings,
    SelectSettings,
    Settings,
)
from roadmap.data import Batches, Records
from roadmap.data.pictures.packing import pack_of
from roadmap.engine.arithmetic import arithmetic_of
from roadmap.engine.display import Display
from roadmap.engine.job import Job, job_of
from roadmap.engine.loop import train_epoch
from roadmap.engine.splits import records_of, sampler_of, splits_of
from roadmap.engine.watch import Watch
from roadmap.models import retriever
from roadmap.runs import Run

MODELS = {
    "vit_small_patch14_dinov2": {},
    "resnet50": {"dim": 512, "pooling": "max", "layer_norm": True, "freeze_batch_norm": True},
}
# Which part of the loop a kernel belongs to; the rest is the model's. Kernels of the losses by their whole names.
LOSS_KERNELS = {"unit_rows", "_scores", "_rank_rows", "_rank_tiles", "_reduce", "_score_gradient", "_unit_gradient",
                "_embedding_rows", "_product"}  # fmt: skip
OTHERS = {
    "optimiser and norm": ("adam", "Adam", "multi_tensor", "foreach", "lpnorm"),
    "copies": ("Memcpy", "Memset"),
}


def noise(folder: Path, count: int = 2048, classes: int = 100) -> Records:
    """Pictures of random pixels, as many to a class and as large as CUB's once packed."""
    random = np.random.default_rng(0)
    records = Records("noise", folder, tuple(f"{i}.png" for i in range(count)), np.arange(count) % classes,
                      splits=np.where(np.arange(count) % classes < 90, "train", "test"))  # fmt: skip
    pack_of((random.integers(0, 256, (256, 341, 3), dtype=np.uint8) for _ in range(count)), records, 256, folder)
    return records


def job(name: str, batch: int, mode: str, options: argparse.Namespace, records: Records, folder: Path) -> Job:
    weights = options.weights if options.weights and "vit" in name else "random"
    settings = Settings(
        data=DataSettings(
            name=options.dataset,
            root=str(options.root or folder),
            image=224,
            resize=256,
            scale=[0.16, 1.0],
            side=256,
            batch_size=batch,
            per_class=4,
            batches=options.steps,
        ),
        model=ModelSettings(name=name, weights=weights, **MODELS[name]),
        optim=OptimSettings(lr=3e-6, weight_decay=4e-4),
        select=SelectSettings(by="last"),
        hardware=HardwareSettings(compile=mode, device=options.device),
        run=str(folder / f"run-{name}-{batch}-{mode}"),
        epochs=100,
    )
    arithmetic = arithmetic_of(settings.hardware)
    splits = splits_of(records, settings.data, settings.select)
    torch.manual_seed(0)
    model = retriever(settings.model, settings.data.image)
    sampler = sampler_of(splits.train, settings.data, settings.seed)
    return job_of(settings, arithmetic, splits, sampler, model, Run.create(settings), Display(quiet=True))


def bare(job: Job, steps: int) -> Callable[[], int]:
    """`steps` times forward, backward and optimiser on one batch; gives the pictures it saw."""
    size, batch = job.settings.data.image, job.settings.data.batch_size
    images = torch.randn(batch, 3, size, size, device=job.arithmetic.device)
    direction = torch.randn(batch, job.current.dim, device=job.arithmetic.device)

    def run() -> int:
        job.parts.model.train()
        for _ in range(steps):
            with job.arithmetic.autocast():
                vectors = job.parts.model(images)
            job.arithmetic.pull_back((vectors * direction).sum())
            job.arithmetic.move(job.parts.optimizer)
            job.parts.optimizer.zero_grad(set_to_none=True)
        return steps * batch

    return run


def loop(job: Job, batches: Batches | None = None) -> Callable[[], int]:
    """An epoch of training, as `fit` does it; on other batches, where they are given."""
    batches = job.pictures.training(job.splits.train, job.sampler) if batches is None else batches
    watch = Watch(job.splits.train, scaled=False)

    def run() -> int:
        train_epoch(job, batches, watch)
        return len(batches) * job.settings.data.batch_size

    return run


def rate(work: Callable[[], int], device: torch.device) -> float:
    synchronise(device)
    began = time.perf_counter()
    pictures = work()
    synchronise(device)
    return pictures / (time.perf_counter() - began)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def group_of(kernel: str) -> str:
    if kernel == "_crops":
        return "crops"
    if kernel in LOSS_KERNELS:
        return "loss"
    return next((group for group, marks in OTHERS.items() if any(mark in kernel for mark in marks)), "model")


def shares(work: Callable[[], int], device: torch.device, rate: float) -> dict[str, float]:
    """Milliseconds of GPU time per 1,000 pictures, by part of the loop.

    "waiting" is what is left of the time at `rate`, which was measured without the profiler: the GPU had nothing to do.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pictures = work()
        synchronise(device)
    parts = dict.fromkeys(["crops", "loss", *OTHERS, "model"], 0.0)
    for event in profile.key_averages():
        parts[group_of(event.key)] += event.self_device_time_total / pictures
    parts["waiting"] = max(0.0, 1e6 / rate - sum(parts.values()))
    return {f"{name} ms per 1000": round(value, 3) for name, value in parts.items()}


def measured(
    name: str, batch: int, mode: str, options: argparse.Namespace, records: Records, folder: Path
) -> dict[str, object]:
    work = job(name, batch, mode, options, records, folder)
    device = work.arithmetic.device
    contenders = {"bare": bare(work, options.steps), "loop": loop(work)}
    for contender in contenders.values():
        contender()  # compiles
    rates: dict[str, list[float]] = {c: [] for c in contenders}
    for _ in range(options.rounds):
        for contender, run in contenders.items():
            rates[contender].append(rate(run, device))
    row: dict[str, object] = {"model": name, "batch": batch, "compile": mode}
    row |= {f"{c} pictures/s": round(statistics.median(values)) for c, values in rates.items()}
    ratios = [b / a for a, b in zip(rates["bare"], rates["loop"], strict=True)]
    row["loop / bare"] = round(statistics.median(ratios), 3)
    row |= {"lowest": round(min(ratios), 3), "highest": round(max(ratios), 3)}
    if device.type == "cuda":
        row |= shares(contenders["loop"], device, statistics.median(rates["loop"]))
    work.run.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of the dataset; noise without")
    parser.add_argument("--dataset", default="cub")
    parser.add_argument("--weights", help="file of the ViT's weights; random without")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="*", default=[128, 384])
    parser.add_argument("--compile", nargs="*", default=["default", "reduce-overhead"], help="modes of torch.compile")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=40, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="CSV file; results/training_<device>.csv by default")
    options = parser.parse_args()
    device = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    out = options.out or Path(__file__).parent / "results" / f"training_{device}.csv"
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.root is None:
            records = noise(folder / "noise")
        else:
            records = records_of(DataSettings(name=options.dataset, root=str(options.root)))
        for name, batch, mode in itertools.product(options.models, options.batches, options.compile):
            rows.append(measured(name, batch, mode, options, records, folder))
            rows[-1] |= provenance(device)
            print(rows[-1], flush=True)
            with out.open("w", newline="") as file:  # after each row: a stopped run keeps them
                writer = csv.DictWriter(file, fieldnames=list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
