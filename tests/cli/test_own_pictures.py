"""`roadmap train` on pictures of one's own, for real, with what people's folders and tables look like."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from roadmap.cli.app import app

Draw = Callable[..., Path]
SHORT = ["epochs=1", "data.batches=2", "hardware.device=cpu"]


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Draws a class of coloured noise into PICTURES, which it gives."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))

    def drawn(name: str, count: int = 8) -> Path:
        folder = tmp_path / "PICTURES" / name
        folder.mkdir(parents=True)
        random = np.random.default_rng(len(list(folder.parent.iterdir())))
        colour = random.integers(0, 190, 3)
        for i in range(count):
            noise = colour + random.integers(0, 60, (20, 20, 3))
            Image.fromarray(noise.astype("uint8")).save(folder / f"{i}.png")
        return folder.parent

    return drawn


def trained(data: str, root: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["train", f"data={data}", f"data.root={root}", "run=run", *SHORT])
    return done.exit_code, done.output


def test_an_empty_class_is_named_and_the_others_are_trained_on(draw: Draw) -> None:
    for name in ("gull", "wren", "tern"):
        draw(name)
    root = draw("owl", 0)
    (root / "owl" / "notes.txt").touch()
    code, said = trained("folder", root)
    assert code == 0, said
    assert "1 folder holds no picture: owl" in said
    assert "of 3 classes" in said


def test_one_class_is_not_enough(draw: Draw) -> None:
    code, said = trained("folder", draw("gull"))
    assert code == 1
    assert "holds 1 class; retrieval needs at least 2" in said
    assert not Path("run").exists()


def test_labels_may_have_gaps(draw: Draw) -> None:
    for name in ("a", "b", "c"):
        root = draw(name)
    rows = [f"PICTURES/{name}/{i}.png,{label}" for name, label in (("a", 3), ("b", 70), ("c", 900)) for i in range(8)]
    table = root.parent / "list.csv"
    table.write_text("\n".join(["path,label", *rows]) + "\n")
    code, said = trained("table", table)
    assert code == 0, said
    after = json.loads(Path("run/summary.json").read_text())["after"]["list"]
    assert after["queries"] == 6  # two of each
    assert after["queries_without_positives"] == 0


def test_a_damaged_picture_is_named(draw: Draw) -> None:
    draw("gull")
    root = draw("wren")
    (root / "wren" / "3.png").write_bytes(b"not a picture")
    code, said = trained("folder", root)
    assert code == 1
    assert "wren/3.png" in said
    assert "Traceback" not in said


def test_a_root_that_is_missing_or_not_there(draw: Draw, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train", "data=folder", *SHORT])
    assert done.exit_code == 2
    assert "data.root is missing: give data.root=FOLDER. ROOT is a folder with" in done.output
    code, said = trained("folder", tmp_path / "nowhere")
    assert code == 1
    assert "is not a folder; expected ROOT/CLASS/picture.jpg" in said
