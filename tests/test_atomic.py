"""A file that is replaced is the old one or the new one, whatever happens in between."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roadmap.atomic import remove_leftovers, sole_writer, whole_file

SOURCE = Path(__file__).parents[1] / "src"


def test_the_new_content_takes_the_old_name(tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    target.write_text("old")
    with whole_file(target) as temporary:
        assert temporary.endswith(".safetensors")
        assert Path(temporary).parent == tmp_path
        Path(temporary).write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["weights.safetensors"]


@pytest.mark.parametrize("interruption", [ValueError, KeyboardInterrupt])
def test_an_interruption_leaves_the_old_content_and_nothing_else(
    interruption: type[BaseException], tmp_path: Path
) -> None:
    target = tmp_path / "state.pt"
    target.write_text("old")

    def write_half() -> None:
        with whole_file(target) as temporary:
            Path(temporary).write_text("half")
            raise interruption

    with pytest.raises(interruption):
        write_half()
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["state.pt"]


def test_others_may_read_it_as_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with whole_file(tmp_path / "replaced") as temporary:
        Path(temporary).write_text("")
    assert (tmp_path / "replaced").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match="cannot write .*file.*there is no folder .*absent"),
        whole_file(tmp_path / "absent" / "file"),
    ):
        pass


def test_a_file_that_cannot_be_written_is_named_as_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()
    held = os.open(tmp_path / "locked", os.O_RDONLY)  # a folder that is there, and takes no new name
    (tmp_path / "locked").rmdir()
    try:
        with pytest.raises(FileNotFoundError) as told, whole_file(Path(f"/dev/fd/{held}/metrics.json")):
            pass
    finally:
        os.close(held)
    assert told.value.filename == f"/dev/fd/{held}/metrics.json"


def test_a_writer_that_makes_the_file_anew_does_not_decide_who_may_read_it(tmp_path: Path) -> None:
    """safetensors writes its own file, readable by its user alone."""
    import torch
    from safetensors.torch import save_file

    (tmp_path / "plain").touch()
    with whole_file(tmp_path / "weights.safetensors") as temporary:
        save_file({"x": torch.zeros(1)}, temporary)
    assert (tmp_path / "weights.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_name_reaches_the_disk_before_the_context_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written next, such as an index of this file, can then not be there without it."""
    done: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: done.append("synced"))
    original = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("named"), original(*names)))
    with whole_file(tmp_path / "file") as temporary:
        Path(temporary).write_text("")
        assert done == []
    assert done == ["synced", "named", "synced"]


def test_leftovers_are_known_from_other_files(tmp_path: Path) -> None:
    others = (".hidden", ".a.partial", "a.0123456789ab.partial", "b.partial.json", ".c.0123456789ab.json")
    for name in others:
        (tmp_path / name).touch()
    with whole_file(tmp_path / "x.tar.gz") as temporary:
        left = Path(temporary).name
    (tmp_path / left).touch()
    remove_leftovers(tmp_path)
    assert set(os.listdir(tmp_path)) == {*others, "x.tar.gz"}


HOLDER = """
import sys
from roadmap.atomic import sole_writer
with sole_writer(sys.argv[1]):
    print("mine", flush=True)
    sys.stdin.readline()
"""


def holding(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", HOLDER, str(folder)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_one_writer_waits_for_the_other(tmp_path: Path) -> None:
    with holding(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "mine\n"
        with holding(tmp_path) as second:
            assert second.stdin is not None
            assert second.stderr is not None
            second.stdin.write("go\n")
            second.stdin.flush()
            assert "another process writes to" in second.stderr.readline()
            first.kill()  # the system lets go of the lock
            assert second.communicate()[0] == "mine\n"


def test_a_writer_that_has_finished_lets_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with sole_writer(tmp_path):
            pass
    assert caplog.text == ""
