"""Where things lie: the checkpoint that a name means, a run, an index, and what a dataset needs.

Nothing here imports torch, so that mistakes are told at once.
"""

from __future__ import annotations

from pathlib import Path

from roadmap.names import CHECKPOINT, did_you_mean

MODEL = "a run folder (its best epoch), a checkpoint (.safetensors or .onnx), small_cnn, or the name of any timm model"
INDEX = "index.json"  # inside the folder of an index
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
        near = did_you_mean(str(path), map(str, _runs_in(path.parent)))
        raise FileNotFoundError(f"there is no run folder or checkpoint {path}{near} MODEL is {MODEL}")
    return None


def check_run(folder: Path) -> None:
    """The folder holds a run; says where one is that may have been meant.

    Raises:
        FileNotFoundError: it is not there, or holds none.
        ValueError: it holds several.
    """
    if (folder / "config.yaml").is_file():
        return
    if not folder.exists():
        near = did_you_mean(str(folder), map(str, _runs_in(folder.parent)))
        raise FileNotFoundError(f"there is no run folder {folder}{near}")
    if inside := _runs_in(folder):
        raise ValueError(f"{folder} is not a run but holds {len(inside)}; name one of them, such as {inside[0]}")
    raise FileNotFoundError(f"{folder} is not a run: it has no config.yaml")


def _runs_in(folder: Path) -> list[Path]:
    return sorted(config.parent for config in folder.glob("*/config.yaml"))


def _inside(folder: Path) -> Path:
    check_run(folder)
    if not (folder / CHECKPOINT).is_file():
        raise FileNotFoundError(
            f"{folder} has no checkpoint yet: {folder / CHECKPOINT} is written once an epoch was evaluated; wait for "
            f"it, or go on with the run: roadmap train resume={folder}"
        )
    return folder / CHECKPOINT


def check_index(folder: Path) -> None:
    """The folder holds an index; says how to make one."""
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder} holds no index; make one: roadmap index MODEL PICTURES -o {folder}")


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
