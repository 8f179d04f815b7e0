"""The demonstration, on few characters: what it prints and leaves. What is learned is tested in tests/engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from roadmap import demo
from roadmap.data import Pack, Records
from roadmap.data.datasets.glyphs import RECORDS, glyph_records
from roadmap.data.pictures.packing import pack_of
from roadmap.search import Index, encoder_of


@pytest.fixture(scope="module")
def few_glyphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 of the characters, in a dataset of their own."""
    whole = glyph_records(tmp_path_factory.mktemp("glyphs"))
    classes = [np.unique(whole.split(split).labels)[:40] for split in ("train", "test")]
    chosen: Records = whole.select(np.isin(whole.labels, np.concatenate(classes)))
    folder = tmp_path_factory.mktemp("few")
    pack = Pack.open(whole.root).of(chosen)
    pack_of((pack.picture(i) for i in range(len(chosen))), chosen, pack.side, folder)
    chosen.save(folder / RECORDS)
    return folder


@pytest.fixture(scope="module")
def finished(few_glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that a short demonstration left, and what it printed."""
    out = tmp_path_factory.mktemp("demo")
    earlier = out / "runs" / "supap"  # a demonstration before this one, whose place it takes
    earlier.mkdir(parents=True)
    (earlier / "config.yaml").write_text("{}")
    (earlier / "left over").touch()
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words))))
        patch.setattr(demo, "print_table", lambda metrics: printed.append(json.dumps(metrics)))
        short = [f"data.root={few_glyphs}", "data.batches=4", "epochs=2", "data.batch_size=64"]
        demo.main(["--out", str(out), *short])
    return out, "\n".join(printed)


def test_it_leaves_a_run_of_each_loss_and_a_page(finished: tuple[Path, str]) -> None:
    out, _ = finished
    assert sorted(p.name for p in (out / "runs").iterdir()) == ["roadmap", "smoothap", "supap"]
    for loss in demo.LOSSES:
        assert f"name: {loss}" in (out / "runs" / loss / "config.yaml").read_text()
        assert (out / "runs" / loss / "checkpoints" / "best.safetensors").is_file()
    assert not (out / "runs" / "supap" / "left over").exists()
    page = (out / "retrievals.html").read_text()
    assert page.count("<img") > 100
    for name in ("untrained", "SmoothAP", "SupAP", "ROADMAP"):
        assert name in page


def test_all_start_from_the_same_network_and_end_apart(finished: tuple[Path, str]) -> None:
    out, printed = finished
    summaries = [json.loads((out / "runs" / loss / "summary.json").read_text()) for loss in demo.LOSSES]
    befores = [summary["before"]["glyphs"] for summary in summaries]
    assert befores[0] == befores[1] == befores[2]
    afters = [summary["after"]["glyphs"]["mAP@R"] for summary in summaries]
    assert len(set(afters)) == 3
    assert min(afters) > befores[0]["mAP@R"]
    table = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    assert list(table) == ["untrained", "SmoothAP", "SupAP", "ROADMAP"]
    assert table["ROADMAP"] == summaries[2]["after"]["glyphs"]


def test_the_page_shows_the_metrics_of_the_summary(finished: tuple[Path, str]) -> None:
    out, _ = finished
    text = re.sub(r"<[^>]+>", " ", re.sub(r"<style.*?</style>", "", (out / "retrievals.html").read_text(), flags=re.S))
    for loss in demo.LOSSES:
        value = json.loads((out / "runs" / loss / "summary.json").read_text())["after"]["glyphs"]["mAP@R"]
        assert f"{100 * value:.1f}" in text or f"{100 * value:.2f}" in text


def test_it_tells_how_to_serve_what_it_trained(finished: tuple[Path, str]) -> None:
    out, printed = finished
    (command,) = re.findall(r"roadmap serve (\S+)", printed)
    with Index.open(command) as index:
        assert index.folder == out / "index"
        assert encoder_of(index).checkpoint == out / "runs" / "roadmap" / "checkpoints" / "best.safetensors"
        assert len(index) == len(list((out / "pictures").rglob("*.png"))) > 100


def test_it_tells_how_to_go_on_with_ones_own_pictures(finished: tuple[Path, str]) -> None:
    _, printed = finished
    assert "roadmap train data=folder data.root=PICTURES" in printed
    assert "retrievals.html" in printed
    guide = re.search(r"docs/\S+\.md", printed)
    assert guide is not None
    assert (Path(__file__).parent.parent / guide.group()).is_file()


def test_a_mistake_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^error: unknown setting epoch, did you mean 'epochs'\?"):
        demo.main(["--out", str(tmp_path / "demo"), "epoch=1"])
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"^error: .*file"):
        demo.main(["--out", str(tmp_path / "file"), "epochs=1"])


def test_ctrl_c_leaves_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "fit", stopped)
    with pytest.raises(SystemExit) as left:
        demo.main(["--out", str(tmp_path / "demo"), "epochs=1"])
    assert left.value.code == 130
