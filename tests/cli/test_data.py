"""`roadmap data`, as a person calls it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import roadmap.cli.app as cli
from roadmap.cli.data import app
from roadmap.data.datasets import READERS, SOURCES, dataset
from roadmap.data.pictures.policy import fresh_pack
from tests.data import layouts


@pytest.fixture
def called(tmp_path, monkeypatch):
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))

    def call(*arguments):
        return CliRunner().invoke(app, [str(a) for a in arguments])

    return call


def test_what_the_help_says_is_what_there_is(called):
    said = " ".join(called("check", "--help").output.replace("│", " ").split())
    assert f"One of: {', '.join(READERS)}." in said
    assert "[default: 32]" in called("glyphs", "--help").output


def test_the_command_is_mounted_and_imports_nothing_before_it_runs():
    heavy = ("PIL", "numpy", "torch", "torchvision", "matplotlib")
    code = f"import sys, roadmap.cli.app; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    result = CliRunner().invoke(cli.app, ["data", "--help"])
    assert result.exit_code == 0
    assert "pack" in result.output


def test_check_passes_a_good_folder(called, tmp_path):
    result = called("check", "folder", layouts.folder_layout(tmp_path / "mine"), "--quiet", "--workers", 0)
    assert result.exit_code == 0, result.output
    assert "mine: all: 24 pictures, 6 classes" in result.output
    assert "mine is usable (every file decoded)" in result.output


def test_a_folder_of_ones_own_may_be_named_as_a_published_dataset_is(called, tmp_path):
    result = called("check", "folder", layouts.folder_layout(tmp_path / "cub"), "--no-decode", "--quiet")
    assert result.exit_code == 0, result.output
    assert "WRONG COUNT" not in result.output


def test_a_pack_json_of_another_program_does_not_make_pictures_drawn(called, tmp_path):
    root = layouts.folder_layout(tmp_path / "mine")
    (root / "pack.json").write_text('{"items": []}')
    result = called("check", "folder", root, "--quiet", "--workers", 0)
    assert result.exit_code == 0, result.output
    assert "mine is usable (every file decoded)" in result.output
    assert "note: 1 file ignored: .json" in result.output
    result = called("pack", "folder", root, "--quiet", "--workers", 0)
    assert result.exit_code == 0, result.output
    assert "packed 24 pictures" in result.output


def test_check_fails_a_folder_of_one_class(called, tmp_path):
    result = called("check", "folder", layouts.folder_layout(tmp_path / "mine", classes=1), "--quiet", "--workers", 0)
    assert result.exit_code == 1
    assert "TOO FEW CLASSES: 1 class has two or more pictures to train with" in result.output
    assert "mine is NOT USABLE (every file decoded)" in result.output


def test_check_fails_a_partial_dataset_and_says_where_to_get_it(called, tmp_path):
    result = called("check", "cub", layouts.cub_layout(tmp_path), "--no-decode", "--quiet")
    assert result.exit_code == 1
    assert "WRONG COUNT train: 4 pictures, 2 classes, published 5,864" in result.output
    assert SOURCES["cub"].obtained in result.output


def test_check_of_nothing_is_exit_code_2(called, tmp_path):
    result = called("check", "sop", tmp_path)
    assert result.exit_code == 2
    assert "Ebay_train.txt" in result.output
    assert SOURCES["sop"].obtained in result.output
    result = called("check", "spo", tmp_path)
    assert result.exit_code == 2
    assert "did you mean 'sop'?" in result.output


def test_check_of_a_broken_list_is_exit_code_1(called, tmp_path):
    (tmp_path / "t.csv").write_text("path,label\na.jpg\n")
    result = called("check", "table", tmp_path / "t.csv")
    assert result.exit_code == 1
    assert "line 2: expected 2 columns" in result.output


def test_pack_is_found_by_training_afterwards(called, tmp_path):
    root = layouts.folder_layout(tmp_path / "mine")
    result = called("pack", "folder", root, "--side", 20, "--workers", 0, "--quiet")
    assert result.exit_code == 0, result.output
    assert "packed 24 pictures" in result.output
    assert len(fresh_pack(dataset("folder", root), 20)) == 24


def test_a_compressed_pack_says_what_it_changed(called, tmp_path):
    root = layouts.folder_layout(tmp_path / "mine")
    result = called("pack", "folder", root, "--side", 20, "--workers", 0, "--quiet", "--compressed")
    assert result.exit_code == 0, result.output
    assert "-20-compressed\n24 pictures encoded again as JPEG of quality 95" in result.output
    assert len(fresh_pack(dataset("folder", root), 20, compressed=True)) == 24
    assert fresh_pack(dataset("folder", root), 20) is None


def test_pack_stops_at_damage_or_skips_it(called, tmp_path):
    root = layouts.folder_layout(tmp_path / "mine")
    (root / "class_3/1.png").write_bytes(b"x")
    result = called("pack", "folder", root, "--workers", 0, "--quiet")
    assert result.exit_code == 1
    assert "class_3/1.png: not a picture" in result.output
    result = called("pack", "folder", root, "--workers", 0, "--quiet", "--on-error", "skip", "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "packed 23 pictures" in result.output
    assert "skipped class_3/1.png" in result.output
    assert (tmp_path / "out/pack.json").is_file()


def test_glyphs_are_written_checked_and_already_packed(called, tmp_path):
    result = called("check", "glyphs", tmp_path / "glyphs")
    assert result.exit_code == 0, result.output
    assert "glyphs is usable" in result.output
    result = called("pack", "glyphs", tmp_path / "glyphs")
    assert result.exit_code == 0
    assert "is kept as a pack already" in result.output
