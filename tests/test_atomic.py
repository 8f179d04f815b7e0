"""A file that is replaced is the old one or the new one, whatever happens in between."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roadmap.atomic import replaced


def test_the_new_content_takes_the_old_name(tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    target.write_text("old")
    with replaced(target) as temporary:
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
        with replaced(target) as temporary:
            Path(temporary).write_text("half")
            raise interruption

    with pytest.raises(interruption):
        write_half()
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["state.pt"]


def test_others_may_read_it_as_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with replaced(tmp_path / "replaced") as temporary:
        Path(temporary).write_text("")
    assert (tmp_path / "replaced").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match="cannot write .*file.*there is no folder .*absent"),
        replaced(tmp_path / "absent" / "file"),
    ):
        pass


def test_a_writer_that_makes_the_file_anew_does_not_decide_who_may_read_it(tmp_path: Path) -> None:
    """safetensors writes its own file, readable by its user alone."""
    import torch
    from safetensors.torch import save_file

    (tmp_path / "plain").touch()
    with replaced(tmp_path / "weights.safetensors") as temporary:
        save_file({"x": torch.zeros(1)}, temporary)
    assert (tmp_path / "weights.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
