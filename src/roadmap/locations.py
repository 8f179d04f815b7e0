"""Where models and pictures lie: the checkpoint that a name means, and what a dataset needs.

Nothing here imports torch, so that mistakes are told at once.
"""

from __future__ import annotations

from pathlib import Path

MODEL = "a run folder (its best epoch), a checkpoint (.safetensors or .onnx), small_cnn, or the name of any timm model"
CHECKPOINT = Path("checkpoints") / "best.safetensors"  # inside a run folder
WEIGHTS = (".safetensors", ".onnx", ".pt", ".pth", ".bin", ".ckpt", ".npz")


def checkpoint_of(what: str | Path) -> Path | None:
    """The checkpoint that a run folder or a path means; None where it can only be the name of a timm model.

    Raises:
        FileNotFoundError: what looks like a path leads nowhere, or to a run without a checkpoint.
        ValueError: it leads to something else.
    """
    path = Path(what).expanduser()
    if path.is_dir():
        return _inside(path)
    if path.is_file():
        if path.suffix not in (".safetensors", ".onnx"):
            raise ValueError(
                f"{path} is no checkpoint of a model, which ends in .safetensors. The last.pt of a run is its state: "
                f"name the run folder. Weights of a backbone need its name: NAME, with {path} as its weights"
            )
        return path
    if path.suffix in WEIGHTS or len(path.parts) > 1:
        raise FileNotFoundError(f"there is no run folder or checkpoint {path}. MODEL is {MODEL}")
    return None


def _inside(folder: Path) -> Path:
    if not (folder / "config.yaml").is_file():
        if inside := sorted(config.parent for config in folder.glob("*/config.yaml")):
            raise ValueError(f"{folder} is not a run but holds {len(inside)}; name one of them, such as {inside[0]}")
        raise FileNotFoundError(f"{folder} is not a run: it has no config.yaml")
    if not (folder / CHECKPOINT).is_file():
        raise FileNotFoundError(
            f"{folder} has no checkpoint yet: {folder / CHECKPOINT} is written once an epoch was evaluated; wait for "
            f"it, or go on with the run: roadmap train resume={folder}"
        )
    return folder / CHECKPOINT


def run_around(checkpoint: Path) -> Path | None:
    """The run folder whose best checkpoint this is, if it is one's."""
    folder = checkpoint.resolve().parent.parent
    is_its_best = (folder / CHECKPOINT) == checkpoint.resolve()
    return folder if is_its_best and (folder / "config.yaml").is_file() else None


def check_root(name: str, root: str | Path | None) -> None:
    """The dataset is known, and lies somewhere unless it is drawn; says where to get it and what is expected there."""
    from roadmap.data.datasets import DRAWN, READERS, dataset

    if name not in READERS or (root is None and name != DRAWN):
        dataset(name, None)  # says it
    if root is not None and not Path(root).exists():
        raise FileNotFoundError(f"{root} is not a folder or a file that exists")
