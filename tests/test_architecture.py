"""Imports point down only, and each heavy library is known to one place; read from the source, lazy imports too."""

from __future__ import annotations

import ast
import importlib.metadata as metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"

# A part may import the parts on lower floors, and itself; not its neighbours.
FLOORS = {
    "atomic": 0,
    "colours": -1,
    "names": -1,
    "progress": -1,
    "plain_pickle": 0,
    "ranks": 0,
    "config.settings": 0,
    "features": 0,
    "kernels": 0,
    "hardware": 1,
    "losses": 1,
    "metrics": 0.5,  # below the losses, which stand for metrics: the exact AP is in both
    "data": 1,
    "models": 1,
    "locations": 1.5,
    "runs": 2,
    "embeddings": 2,
    "encoder": 3,
    "refinement": 3,
    "evaluation": 4,
    "engine": 5,
    "report": 6.75,
    "experiments": 6.5,
    "search": 6,
    "config": 6,
    "toy": 6,
    "demo": 7,
    "cli": 7,
    "__main__": 8,
}
# Which files may import these libraries.
KEEPERS = {
    "timm": r"models(\.py|/.*)",
    "pytorch_metric_learning": r"losses/pml\.py",
    "triton": r"kernels/triton/\w+\.py",
    "hydra": r"cli/.*|config/(?!settings).*",
    "omegaconf": r"cli/.*|config/(?!settings).*",
    "faiss": r"search/engines/faiss\.py",
    "pymilvus": r"search/engines/milvus\.py",
    "onnx": r"encoder/exporting\.py",
    "onnxruntime": r"encoder/(exporting|onnx_model)\.py",
    "fastapi": r"search/service/\w+\.py",
    "starlette": r"search/service/\w+\.py",
    "uvicorn": r"search/service/server\.py",
    "prometheus_client": r"search/service/metrics\.py",
}
# These parts know torch and numpy, and of the rest only what KEEPERS grants them.
BARE = {"colours", "names", "progress", "atomic", "plain_pickle", "ranks"}
BARE |= {"config.settings", "features", "kernels", "losses", "metrics"}
# Used where it happens to be installed, done without where it is not.
OPTIONAL = {
    ("metrics/ranking.py", "tqdm"): "a progress bar for long evaluations",
    ("progress.py", "tqdm"): "every other progress bar",
}


def imported(path: Path, source: Path) -> list[tuple[int, str]]:
    """(line, module) for every import in a file: at the top, in a function, relative, by name at run time."""
    package = list(path.relative_to(source).with_suffix("").parts[:-1])
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            # `from roadmap import losses` imports roadmap.losses.
            found += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append((node.lineno, node.args[0].value))
    return found


def part_named(module: str) -> str:
    """The part a module inside roadmap belongs to. The schema of the settings is a part of its own: plain values."""
    return "config.settings" if module.startswith("config.settings") else module.split(".")[0]


def violations(source: Path) -> list[str]:
    """What every file under source/roadmap imports and should not, one sentence each."""
    wrong = []
    for path in sorted((source / "roadmap").rglob("*.py")):
        inside = path.relative_to(source / "roadmap").as_posix()
        part = part_named(inside.removesuffix(".py").replace("/", "."))
        if part != "__init__" and part not in FLOORS:
            wrong.append(f"{inside} is on no floor; give {part!r} one in FLOORS")
            continue
        for line, module in imported(path, source):
            where = f"{inside}:{line} imports {module}"
            top = module.split(".")[0]
            if top == "roadmap":
                target = part_named(module.removeprefix("roadmap").removeprefix("."))
                if target in FLOORS and target != part and FLOORS[target] >= FLOORS.get(part, -1):
                    wrong.append(f"{where}: {part} may not know {target}")
            elif top in KEEPERS:
                if not re.fullmatch(KEEPERS[top], inside):
                    wrong.append(f"{where}: only {KEEPERS[top]} may")
            elif (
                part in BARE
                and (inside, top) not in OPTIONAL
                and top not in ("torch", "numpy", *sys.stdlib_module_names)
            ):
                wrong.append(f"{where}: {part} knows only torch and numpy")
    return wrong


def test_imports_point_down_and_libraries_keep_their_place() -> None:
    assert violations(SOURCE) == []


def test_the_source_was_read() -> None:
    losses = imported(SOURCE / "roadmap" / "losses" / "roadmap.py", SOURCE)
    assert "roadmap.losses.rank_ap.SupAP" in [module for _, module in losses]


PLANTED = {
    "up": ("losses/rank_ap.py", "from roadmap.engine.step import step", "losses may not know engine"),
    "up by module": ("metrics/ranking.py", "import roadmap.evaluation", "metrics may not know evaluation"),
    "up by package": ("kernels/cpu.py", "from roadmap import losses", "kernels may not know losses"),
    "up, relative": ("metrics/ranking.py", "from ..engine import fit", "metrics may not know engine"),
    "up from the bottom": (
        "plain_pickle.py",
        "from roadmap.data.pictures.images import picture",
        "plain_pickle may not know data",
    ),
    "sideways at the bottom": (
        "plain_pickle.py",
        "from roadmap import kernels",
        "plain_pickle may not know kernels",
    ),
    "sideways": ("metrics/ranking.py", "from roadmap.losses import supap", "metrics may not know losses"),
    "losses see data": ("losses/x.py", "from roadmap.data.records import Records", "losses may not know data"),
    "from the top": ("__init__.py", "from roadmap.cli.app import app", "__init__ may not know cli"),
    "lazily": ("kernels/cpu.py", "def f():\n    from roadmap.losses import supap", "kernels may not know losses"),
    "by name": (
        "losses/x.py",
        "import importlib\nimportlib.import_module('roadmap.cli.app')",
        "losses may not know cli",
    ),
    "timm": ("embeddings.py", "import timm", r"embeddings.py:1 imports timm: only models"),
    "pml": ("losses/rank_ap.py", "from pytorch_metric_learning import losses", r"only losses/pml"),
    "triton": ("losses/rank_ap.py", "def f():\n    import triton.language as tl", r"only kernels/triton"),
    "triton elsewhere": ("kernels/cpu.py", "import triton", r"only kernels/triton"),
    "hydra": ("engine/training.py", "from hydra import compose", r"only cli"),
    "other library": ("metrics/x.py", "from scipy.stats import rankdata", "metrics knows only torch and numpy"),
    "lazy library": ("losses/x.py", "def f():\n    import tqdm", "losses knows only torch and numpy"),
    "no floor": ("utils.py", "", "utils.py is on no floor"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(name: str, tmp_path: Path) -> None:
    inside, code, message = PLANTED[name]
    file = tmp_path / "roadmap" / inside
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    found = violations(tmp_path)
    assert len(found) == 1
    assert re.search(message, found[0])


@pytest.mark.parametrize(
    ("inside", "code"),
    [
        ("losses/pml.py", "import pytorch_metric_learning\nfrom roadmap.losses.comparison import Comparison"),
        ("kernels/triton/rows.py", "import triton\nimport triton.language as tl\nimport torch"),
        ("losses/rank_ap.py", "from roadmap import kernels\nfrom . import comparison\nimport math\nimport numpy"),
        ("models.py", "import timm"),
        ("data/datasets/sfm.py", "from roadmap.plain_pickle import plain_content"),
        ("metrics/revisited.py", "from roadmap.plain_pickle import plain_content"),
        ("cli/app.py", "import hydra\nfrom roadmap.engine import fit\nimport rich"),
    ],
)
def test_what_is_allowed_is_not_found(inside: str, code: str, tmp_path: Path) -> None:
    file = tmp_path / "roadmap" / inside
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    assert violations(tmp_path) == []


def modules_besides(*distributions: str) -> set[str]:
    """Top-level modules installed here that belong neither to these distributions nor to anything they require."""
    wanted, needed = list(distributions), set()
    while wanted:
        name = canonical(wanted.pop())
        if name not in needed:
            needed.add(name)
            try:
                required = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            wanted += [re.split(r"[^\w.-]", r, maxsplit=1)[0] for r in required if "extra ==" not in r]
    owners = metadata.packages_distributions()
    return {top for top, names in owners.items() if not any(canonical(n) in needed for n in names)}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


BLOCKED_RUN = """
import json, sys
from importlib.machinery import PathFinder

blocked = set(json.loads(sys.argv[1])) - {"roadmap"}

class Blocker:  # blocked modules look as if they were not installed
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in blocked else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Blocker()
import torch
from roadmap.losses import ROADMAP
import roadmap.losses
import roadmap.metrics
assert not blocked & {name.split(".")[0] for name in sys.modules}

x = torch.randn(8, 4, requires_grad=True)
ROADMAP()(x, torch.arange(8) // 2).backward()
assert x.grad.isfinite().all()
for name in roadmap.losses.__all__:
    getattr(roadmap.losses, name)
if hasattr(roadmap.metrics, "retrieval_metrics"):
    assert 0 <= roadmap.metrics.retrieval_metrics(x.detach(), torch.arange(8) // 2)["mAP@R"] <= 1
try:
    import roadmap.losses.pml
except ImportError as missing:
    assert "pip install roadmap-retrieval[pml]" in str(missing), missing
else:
    raise AssertionError("pytorch-metric-learning was imported")
print("done")
"""


def test_losses_and_metrics_run_with_torch_and_numpy_alone() -> None:
    blocked = modules_besides("torch", "numpy")
    assert not blocked & {"torch", "numpy"}
    assert {"pytest", "hypothesis"} <= blocked
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED_RUN, json.dumps(sorted(blocked))],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "done"
