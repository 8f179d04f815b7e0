"""What was kept of a frozen backbone is checked before it is used; where it cannot be kept, the run goes on."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from roadmap.embeddings import Embeddings
from roadmap.encoder import vector_files
from roadmap.encoder.vector_files import home, keep_vectors, kept_vectors
from roadmap.engine import fit

from .test_trunk import frozen
from .worlds import assert_same_run

DIGEST = "d" * 64
KEYS = ("a.png", "b.png", "c.png", "bad.png")
WIDTH = 5
SOURCE = Path(__file__).parents[2] / "src"


def made() -> Embeddings:
    vectors = torch.arange(15.0).reshape(3, WIDTH)
    about = {"skipped": {"bad.png": "truncated"}}
    return Embeddings(vectors, torch.tensor([0, 0, 1]), KEYS[:3], ("x", "y"), about)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What was kept."""
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    keep_vectors(made(), DIGEST)
    (found,) = home().glob("*.safetensors")
    return found


def test_what_is_kept_comes_back(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = kept_vectors(DIGEST, KEYS, WIDTH, "skip")
    assert found is not None
    assert torch.equal(found.vectors, made().vectors)
    assert found.ids == KEYS[:3]
    assert found.about["skipped"] == {"bad.png": "truncated"}
    assert kept_vectors(DIGEST, KEYS, WIDTH, "raise") is None
    assert kept_vectors("e" * 64, KEYS, WIDTH, "skip") is None
    assert not caplog.records  # nothing odd


def rewritten(file: Path, **changed: Any) -> None:
    """With right checksums where they are not what is changed."""
    found = dataclasses.replace(Embeddings.load(file), **{k: v for k, v in changed.items() if k != "about"})
    about = {**found.about, "content": vector_files._content(found), **changed.get("about", {})}
    dataclasses.replace(found, about={k: v for k, v in about.items() if v is not None}).save(file)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "half precision": ({"vectors": torch.zeros(3, WIDTH, dtype=torch.float16)}, "torch.float16 of 5, not float32 of 5"),
    "double precision": ({"vectors": torch.zeros(3, WIDTH, dtype=torch.float64)}, "torch.float64 of 5"),
    "another width": ({"vectors": torch.zeros(3, WIDTH + 1)}, "float32 of 6, not float32 of 5"),
    "another picture": ({"ids": ("a.png", "b.png", "d.png")}, "3 pictures and 1 that were left out, not the 4"),
    "no names": ({"ids": None}, "0 pictures and 1"),
    "fewer": (
        {"vectors": torch.zeros(2, WIDTH), "labels": torch.zeros(2, dtype=torch.int64), "ids": KEYS[:2]},
        "2 pictures and 1",
    ),
    "one that is left out as well": ({"about": {"skipped": {"a.png": "truncated"}}}, "3 pictures and 1"),
    "of something else": ({"about": {"digest": "e" * 64}}, "of another model, or of other pictures"),
    "of an earlier version": ({"about": {"digest": None}}, "written by an earlier version"),
    "no word of those left out": ({"about": {"skipped": None}}, "does not say which pictures were left out"),
    "no reasons": ({"about": {"skipped": {"bad.png": 3}}}, "does not say which pictures were left out"),
    "no checksum": ({"about": {"content": None}}, "its vectors are not what was written"),
    "another checksum": ({"about": {"content": "0" * 64}}, "its vectors are not what was written"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_is_not_used_and_said(change: str, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    changed, message = CHANGES[change]
    rewritten(file, **changed)
    assert kept_vectors(DIGEST, KEYS, WIDTH, "skip") is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(file) in record.getMessage()
    assert message in record.getMessage()


def test_two_rows_that_change_places(file: Path) -> None:
    before = Embeddings.load(file)
    dataclasses.replace(before, ids=("b.png", "a.png", "c.png")).save(file)
    assert kept_vectors(DIGEST, KEYS, WIDTH, "skip") is None


METADATA = [{"ids": "7"}, {"ids": "{"}, {"ids": "[" * 10**5}, {"about": "[]"}, {"about": "{"}, {"class_names": "3"}]


@pytest.mark.parametrize("metadata", [*METADATA, {"tree_names": "[]"}], ids=lambda found: str(found)[:30])
def test_texts_that_cannot_be(metadata: dict[str, str], file: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import load_file, save_file

    parts = load_file(file)
    parts["tree"] = torch.zeros(3, 2, dtype=torch.int64)
    save_file(parts, file, {"ids": json.dumps(KEYS[:3]), **metadata})
    assert kept_vectors(DIGEST, KEYS, WIDTH, "skip") is None
    assert "is not used" in caplog.text


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), damage=st.sampled_from(["flip", "cut", "extend"]))
def test_any_damage_is_seen_or_harmless(data: st.DataObject, damage: str, file: Path) -> None:
    whole = file.read_bytes()
    raw = bytearray(whole)
    if damage == "flip":
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif damage == "cut":
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        raw += data.draw(st.binary(min_size=1, max_size=50))
    file.write_bytes(raw)
    found = kept_vectors(DIGEST, KEYS, WIDTH, "skip")
    file.write_bytes(whole)
    assert damage == "flip" or found is None
    if found is not None:
        assert torch.equal(found.vectors, made().vectors)
        assert found.ids == KEYS[:3]
        assert set(found.about["skipped"]) == {"bad.png"}


def below_a_file(cache: Path, patch: pytest.MonkeyPatch) -> None:
    cache.write_text("not a folder")


def not_allowed(cache: Path, patch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def refusing(self: Path, *arguments: Any, **more: Any) -> None:
        if cache in self.parents:
            raise PermissionError(13, "Permission denied", str(self))
        mkdir(self, *arguments, **more)

    patch.setattr(Path, "mkdir", refusing)


def no_room(cache: Path, patch: pytest.MonkeyPatch) -> None:
    save = Embeddings.save

    def failing(self: Embeddings, path: Path) -> None:
        if path.parent == home():
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save(self, path)

    patch.setattr(Embeddings, "save", failing)


@pytest.mark.parametrize("trouble", [below_a_file, not_allowed, no_room])
def test_what_cannot_be_kept_is_said_and_the_run_goes_on(
    trouble: Any, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"data__pack": "no", "epochs": 1}
    expected = fit(frozen(pictures, tmp_path / "expected", **settings), quiet=True)
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "other"))
    trouble(tmp_path / "other", monkeypatch)
    assert_same_run(expected, fit(frozen(pictures, tmp_path / "run", **settings), quiet=True))
    assert "cannot be kept in" in caplog.text
    assert "or set ROADMAP_CACHE to another folder" in caplog.text


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=100k", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        monkeypatch.setenv("ROADMAP_CACHE", str(disk))
        count = 20_000
        large = Embeddings(torch.zeros(count, WIDTH), torch.zeros(count, dtype=torch.int64), about={"skipped": {}})
        keep_vectors(large, DIGEST)
        assert "cannot be kept in" in caplog.text
        assert "(os error 28)" in caplog.text
        assert [path.name for path in home().iterdir()] == [".lock"]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from roadmap.embeddings import Embeddings
from roadmap.encoder.vector_files import keep_vectors
torch.manual_seed(0)
count = 5000
ids = tuple(map(str, range(count)))
found = Embeddings(torch.randn(count, 64), torch.zeros(count, dtype=torch.int64), ids, about={"skipped": {}})
print("ready", flush=True)
sys.stdin.readline()
for _ in range(5):
    keep_vectors(found, "d" * 64)
"""


def test_two_writers_at_once_and_one_that_was_killed(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever reads meanwhile finds nothing, or all of it."""
    file.unlink()
    leftover = home() / ".abc.0123456789ab.partial.safetensors"
    leftover.write_bytes(b"half")
    command = [sys.executable, "-c", WRITER, str(SOURCE)]
    writers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ), text=True)
        for _ in range(2)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    keys = tuple(map(str, range(5000)))
    seen = False
    while any(writer.poll() is None for writer in writers):
        found = kept_vectors(DIGEST, keys, 64, "skip")
        assert found is not None or not seen
        seen = seen or found is not None
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert not leftover.exists()
    assert sorted(path.name for path in home().iterdir()) == [".lock", file.name]
    assert kept_vectors(DIGEST, keys, 64, "skip") is not None
    assert not caplog.records
