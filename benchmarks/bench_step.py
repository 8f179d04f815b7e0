"""Where every millisecond of a training step goes: GPU time by kind of kernel, and the rate, by how it is compiled.

    python benchmarks/bench_step.py                        # ViT-S/14 and ResNet-50, batches of 128 at 224 pixels
    python benchmarks/bench_step.py --models vit_small_patch14_dinov2 --compile blocks --rewrites none patches scales \\
        flex stream halves scales,flex,patches scales,flex,patches,halves scales,flex,patches,halves,stream \\
        --out step_rewrites_cuda.csv

Forward, backward and AdamW of the network alone, bf16, on one fixed batch: what is left when pictures and loss cost
nothing. Results go to benchmarks/results/step_cuda.csv. With --rewrites, ViTs that are written otherwise, each beside
the plain one (`vit_rewrites.py`).
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_training import MODELS
from measure import provenance
from vit_rewrites import HALVES, NAMES, Masters, rewrite

from roadmap.config.settings import ModelSettings
from roadmap.engine.arithmetic import Arithmetic
from roadmap.engine.compiling import runnable_model
from roadmap.models import retriever

BATCH, IMAGE = 128, 224
KINDS = {  # the first whose mark is in a kernel's name
    "attention": ("sdpa", "flash", "fmha", "dot_do_o", "convert_dq"),
    "optimiser": ("multi_tensor", "adam", "Adam", "FusedAdam"),
    "convolutions": ("xmma", "implicit", "convolve", "cudnn", "cutlass__5x", "dgrad", "wgrad"),
    "matrix products": ("nvjet", "gemm", "cutlass"),
    "pooling": ("max_pool",),
}


def kind_of(kernel: str) -> str:
    return next((kind for kind, marks in KINDS.items() if any(mark in kernel for mark in marks)), "everything else")


def step_of(name: str, mode: str, rewrites: tuple[str, ...] = ()) -> Callable[[], None]:
    device, convolutional = torch.device("cuda"), "resnet" in name
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = retriever(ModelSettings(name=name, weights="random", **MODELS[name]), IMAGE).to(device)
    images = torch.randn(BATCH, 3, IMAGE, IMAGE, device=device)
    if convolutional:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = images.contiguous(memory_format=torch.channels_last)
    rewrite(model, rewrites)
    masters = Masters(model) if HALVES in rewrites else None
    runnable = runnable_model(model, mode, recorded=BATCH).train()
    moving = list(model.parameters()) if masters is None else masters.weights
    optimizer = torch.optim.AdamW(moving, lr=1e-6, fused=True)
    arithmetic, direction = Arithmetic(device, "bf16"), torch.randn(BATCH, model.dim, device=device)

    def step() -> None:
        with arithmetic.autocast():
            vectors = runnable(images)
        (vectors * direction).sum().backward()
        if masters is not None:
            masters.take_gradients()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if masters is not None:
            masters.give_weights()

    return step


def rows_of(name: str, mode: str, rewrites: str, steps: int) -> list[dict[str, object]]:
    torch.compiler.reset()
    began = time.perf_counter()
    step = step_of(name, mode, () if rewrites == "none" else tuple(rewrites.split(",")))
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    rates = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        rates.append(steps * BATCH / (time.perf_counter() - began))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    kinds: dict[str, float] = {}
    for event in profile.key_averages():
        kind = kind_of(event.key)
        kinds[kind] = kinds.get(kind, 0.0) + event.self_device_time_total / 5000
    rate = statistics.median(rates)
    kinds["waiting for the host"] = max(0.0, 1000 * BATCH / rate - sum(kinds.values()))
    about = {"model": name, "compile": mode, "rewrites": rewrites, "pictures/s": round(rate)}
    about |= {"lowest": round(min(rates)), "highest": round(max(rates)), "until the third step, s": round(first, 1)}
    print(about, {kind: round(ms, 2) for kind, ms in kinds.items()}, flush=True)
    return [{**about, "kind": kind, "ms": round(ms, 3)} for kind, ms in kinds.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--compile", nargs="*", default=["no", "blocks"])
    parser.add_argument(
        "--rewrites", nargs="*", default=["none"], help=f"names with commas between, of {', '.join(NAMES)}"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step_cuda.csv")
    options = parser.parse_args()
    if strange := {name for names in options.rewrites for name in names.split(",")} - {"none", *NAMES}:
        parser.error(f"no rewrite is called {', '.join(sorted(strange))}; there are {', '.join(NAMES)}, and none")
    rows: list[dict[str, object]] = []
    for name in options.models:
        for mode, rewrites in itertools.product(options.compile, options.rewrites):
            rows += [row | provenance("cuda") for row in rows_of(name, mode, rewrites, options.steps)]
            with options.out.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
