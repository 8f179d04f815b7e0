"""Where every second of a command goes: each line that it prints is stamped, and what lies between them is named.

    python benchmarks/bench_command.py --root CUB_200_2011 --weights vit_small_patch14_dinov2_224_fp16.safetensors

Trains recipe=cub_vits from a cold start (no pack, nothing compiled; its caches are in a folder of their own), again
with what was compiled but no pack, and evaluates. Then it trains once more, judged after each epoch on the test set:
"until R@1 77.4", the best on CUB that the paper has, is the time that the cold command compiled and trained for as many
epochs as that took; the weights are the same, for judging changes none. --log FILE adds a run whose stamped lines were
kept; --name and --facts say what it was. Results go to benchmarks/results/command_cuda.csv, a row for each part of each
command.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from measure import provenance

ROOT = Path(__file__).resolve().parents[1]
# A part of the command ends with the first line that its pattern finds.
TRAINING = {
    "start, imports, model": r"^run ",
    "pictures packed or found": r"pictures read from",
    "evaluation before": r"^(untrained|before training)",
}
EVALUATION = {"start, imports, model": r"^computed", "embedding": r"^embedded", "metrics": r" among themselves"}
EPOCH = re.compile(r"epoch +(\d+) of (\d+)")
JUDGED = re.compile(EPOCH.pattern + r".*, test R@1 (\d+\.\d+)")
REACH = 77.4  # R@1: the best on CUB in the paper, DeiT-S (Table 4)
Line = tuple[float, str]


def stamped(command: list[str], **environment: str) -> Iterator[Line]:
    """(seconds since the start, line) for each line; "exit CODE" comes last."""
    began = time.perf_counter()
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | environment, text=True, bufsize=1
    )
    assert child.stdout is not None
    for line in child.stdout:
        yield time.perf_counter() - began, line.rstrip()
    yield time.perf_counter() - began, f"exit {child.wait()}"


def parts_of(lines: list[Line], marks: dict[str, str]) -> dict[str, float]:
    """Part of the command -> its seconds."""
    if not lines[-1][1].startswith("exit 0"):
        raise RuntimeError("\n".join(line for _, line in lines[-20:]))
    found, last = {}, 0.0
    for name, pattern in marks.items():
        ends = next(at for at, line in lines if re.search(pattern, line))
        found[name], last = ends - last, ends
    epochs = [at for at, line in lines if EPOCH.search(line)]
    if epochs:
        each = statistics.median(b - a for a, b in itertools.pairwise(epochs))
        found["compiling, first step"] = epochs[0] - last - each
        found["training"], last = epochs[-1] - epochs[0] + each, epochs[-1]
        ended = next(at for at, line in lines if re.search(r"^\w+, test", line))
        found["saving, evaluation after"], last = ended - last, ended
    found["leaving"] = lines[-1][0] - last
    return found


def rows_of(name: str, lines: list[Line], marks: dict[str, str]) -> Iterator[dict[str, object]]:
    epochs = [line for _, line in lines if EPOCH.search(line)]
    for part, seconds in (*parts_of(lines, marks).items(), ("all", lines[-1][0])):
        yield {"command": name, "epochs": len(epochs) or "", "part": part, "seconds": round(seconds, 2)}


def reached(lines: list[Line], reach: float) -> int | None:
    """The first epoch whose R@1 on the test set is `reach` or better; None where there is none."""
    judged = (match for _, line in lines if (match := JUDGED.search(line)))
    return next((int(match[1]) for match in judged if float(match[3]) >= reach), None)


def seconds_until(epoch: int, parts: dict[str, float], epochs: int) -> float:
    """Of compiling and of training for so many epochs, in a command that trained for `epochs`."""
    return parts["compiling, first step"] + parts["training"] * epoch / epochs


def kept(path: Path) -> list[Line]:
    """Stamped lines of a run before: "  12.34 line"."""
    found = (re.match(r" *(\d+\.\d+) (.*)", line) for line in path.read_text(encoding="utf-8").splitlines())
    return [(float(match[1]), match[2]) for match in found if match]


def measured(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        caches = {
            "ROADMAP_CACHE": str(folder / "cache"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))),
            "PYTHONUNBUFFERED": "1",
        }
        begun = [sys.executable, "-m", "roadmap"]
        what = ["recipe=cub_vits", f"data.root={options.root}", f"model.weights={options.weights}"]
        what += [f"epochs={options.epochs}", *options.set]
        for name in ("train, cold", "train, compiled before"):
            shutil.rmtree(folder / "cache" / "packs", ignore_errors=True)
            shutil.rmtree(folder / "run", ignore_errors=True)
            lines = told([*begun, "train", *what, f"run={folder / 'run'}"], caches)
            yield from rows_of(name, lines, TRAINING)
            if name == "train, cold":
                parts = parts_of(lines, TRAINING)
            if options.cold:
                return
        lines = told([*begun, "evaluate", str(folder / "run")], caches)
        yield from rows_of("evaluate", lines, EVALUATION)
        judged = ["select=test", "select.every=1", f"run={folder / 'judged'}"]
        epoch = reached(told([*begun, "train", *what, *judged], caches), options.reach)
        seconds = "" if epoch is None else round(seconds_until(epoch, parts, options.epochs), 2)
        part = f"until R@1 {options.reach:g}"
        yield {"command": "train, judged", "epochs": epoch or "not reached", "part": part, "seconds": seconds}


def told(command: list[str], caches: dict[str, str]) -> list[Line]:
    """The stamped lines of a command, shown as they come."""
    lines = []
    for at, line in stamped(command, **caches):
        print(f"{at:7.2f} {line}", flush=True)
        lines.append((at, line))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of CUB")
    parser.add_argument("--weights", default="random", help="file of the ViT's weights; random without")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--set", nargs="*", default=[], help="further settings")
    parser.add_argument("--reach", type=float, default=REACH, help="R@1 in percent, of which it is told when")
    parser.add_argument("--cold", action="store_true", help="train from a cold start alone")
    parser.add_argument("--log", type=Path, help="stamped lines of a run before, instead of running anything")
    parser.add_argument("--name", help="of that run")
    parser.add_argument("--facts", nargs="*", default=[], help="columns of that run: commit=... hardware=...")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "command_cuda.csv")
    options = parser.parse_args()
    before = list(csv.DictReader(options.out.open())) if options.out.is_file() else []
    if options.log:
        marks = EVALUATION if "evaluate" in options.name else TRAINING
        facts = dict(text.split("=", 1) for text in options.facts)
        rows = [row | facts for row in rows_of(options.name, kept(options.log), marks)]
    else:
        facts = provenance("cuda" if torch.cuda.is_available() else "cpu")
        rows = [row | facts for row in measured(options)]
    names = {row["command"] for row in rows}
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([row for row in before if row["command"] not in names])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
