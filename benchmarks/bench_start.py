"""What starting a command costs: seconds of a core until modules are imported, and of whole commands on few pictures.

    python benchmarks/bench_start.py

Every row is a fresh interpreter. Seconds of a core, not of the clock: a machine with other things to do moves them
little. Rows of modules hold what comes before them too: "timm" is torch, torchvision and timm. The commands embed 16
pictures of 32 pixels, with weights at random. The median of the rounds, with the lowest and the highest, goes to
benchmarks/results/start_cpu.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from measure import provenance
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    "interpreter": "pass",
    "torch": "import torch",
    "torch, its compiler's front": "import torch, torch._dynamo",
    "torch, its whole compiler": "import torch, torch._inductor.compile_fx",
    "torchvision": "import torch, torchvision",
    "timm": "import torch, torchvision, timm",
    "roadmap.encoder, roadmap.evaluation": "import roadmap.encoder, roadmap.evaluation",
    "roadmap.engine": "import roadmap.engine",
}
PICTURES = ["--weights", "random", "--data", "folder", "--root", "pictures", "--device", "cpu"]
TRAINING = ["data=folder", "data.root=pictures", "epochs=1", "data.batches=1", "data.batch_size=8", "data.image=32"]
TRAINING += ["model.weights=random", "hardware.device=cpu"]
COMMANDS = {
    "roadmap --help": ["--help"],
    "roadmap evaluate, small_cnn": ["evaluate", "small_cnn", *PICTURES],
    "roadmap evaluate, ViT-Ti of timm": ["evaluate", "vit_tiny_patch16_224", "--image", "32", *PICTURES],
    "roadmap train, small_cnn": ["train", *TRAINING, "model=small_cnn"],
    "roadmap train, ViT-Ti of timm": ["train", *TRAINING, "model=timm", "model.name=vit_tiny_patch16_224"],
}


def core_seconds(command: Sequence[str], folder: Path) -> float:
    """Of a fresh interpreter and of the processes that it starts."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ROADMAP_CACHE": str(folder / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, stdout=said, stderr=said)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            said.seek(0)
            raise RuntimeError(f"{' '.join(command)}: {said.read().decode()[-2000:]}")
    return used.ru_utime + used.ru_stime


def write_pictures(folder: Path) -> None:
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in map(str, range(4)):
            (folder / split / name).mkdir(parents=True)
            for number in range(4):
                pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="rows; all by default")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "start_cpu.csv")
    options = parser.parse_args()
    what = {name: ["-c", code] for name, code in MODULES.items()}
    what |= {name: ["-m", "roadmap", *typed] for name, typed in COMMANDS.items()}
    what = {name: what[name] for name in options.only or what}
    times: dict[str, list[float]] = {name: [] for name in what}
    with tempfile.TemporaryDirectory() as temporary:
        write_pictures(Path(temporary) / "pictures")
        for number in range(-1, options.rounds):  # the first writes byte code and packs, and is not counted
            for name, command in what.items():
                taken = core_seconds(command, Path(temporary))
                if number >= 0:
                    times[name].append(taken)
                    print(f"{name:40s} {taken:6.2f} s", flush=True)
    rows = [
        {"what": name, "core_seconds": round(statistics.median(taken), 2)}
        | {"lowest": round(min(taken), 2), "highest": round(max(taken), 2), "rounds": len(taken)}
        | {"load": round(os.getloadavg()[0], 1), "cores": os.cpu_count()}
        | provenance("cpu")
        for name, taken in times.items()
    ]
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
