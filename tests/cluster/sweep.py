"""A sweep of four Glyphs runs on a cluster of this machine. The longest meets its time limit, is put back and goes on;
its bits are compared with those of a run that was never stopped.

    python tests/cluster/sweep.py slurm FOLDER     # needs Debian's slurm-wlm and munge, root, hydra-submitit-launcher
    python tests/cluster/sweep.py ray FOLDER       # needs ray

Takes some ten minutes of two cores. The commands and the program are those of docs/guides/cluster.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
from tests.engine.worlds import assert_same_evaluations, assert_same_run  # noqa: E402

GUIDE = ROOT / "docs" / "guides" / "cluster.md"
EPOCHS = (1, 2, 3, 150)
FIXED = ["hardware=cpu", "hardware.threads=1", "data.batches=2", "data.batch_size=64", "select=last"]
LIMIT = {"slurm": 3, "ray": 3}  # minutes; long enough for a start and the first evaluation


def roadmap(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "roadmap", "train", *words], check=True)


def on_slurm(folder: Path) -> str:
    """The sweep's table is printed; what the jobs said is given back."""
    cluster = ["sh", str(ROOT / "tests" / "cluster" / "slurm.sh")]
    os.environ["SLURM_CONF"] = str(folder / "slurm" / "slurm.conf")
    subprocess.run([*cluster, "start", str(folder / "slurm")], check=True)
    try:
        small = [f"timeout_min={LIMIT['slurm']}", "signal_delay_s=60", "cpus_per_task=1"]
        told = [
            "hydra/launcher=slurm",
            *(f"hydra.launcher.{word}" for word in small),
            f"hydra.sweep.dir={folder}/sweep",
        ]
        roadmap("-m", *told, *FIXED, f"epochs={','.join(map(str, EPOCHS))}")
    finally:
        subprocess.run([*cluster, "stop", str(folder / "slurm")], check=True)
    return "".join(path.read_text() for path in (folder / "sweep" / ".submitit").rglob("*.err"))


def on_ray(folder: Path) -> str:
    """What was printed; Ray's processes end with the program."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (folder / "sweep.py").write_text(program)
    limited = [*FIXED, f"hardware.time_limit={LIMIT['ray']}"]
    command = [sys.executable, "sweep.py", str(folder / "sweep"), *map(str, EPOCHS), *limited]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


def main(where: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("ROADMAP_CACHE", str(folder / "cache"))
    os.environ["OMP_NUM_THREADS"] = "1"
    longest = EPOCHS[-1]
    if not (folder / "whole" / "summary.json").is_file():
        roadmap(*FIXED, f"epochs={longest}", f"run={folder}/whole")
    said = {"slurm": on_slurm, "ray": on_ray}[where](folder)
    stops = len(re.findall({"slurm": "this job is timed-out", "ray": "minutes are over: stopped"}[where], said))
    assert stops, f"no run came to its time limit:\n{said}"
    for epochs in EPOCHS:
        assert (folder / "sweep" / f"epochs={epochs}" / "summary.json").is_file(), epochs
    for same in (assert_same_run, assert_same_evaluations):
        same(folder / "whole", folder / "sweep" / f"epochs={longest}")
    print(f"{where}: {len(EPOCHS)} runs; time limits met: {stops}; the longest has the bits of one never stopped")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute())
