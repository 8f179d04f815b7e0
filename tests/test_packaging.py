"""The package as somebody would install it: built from a copy, put into an empty environment, used from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COPIED = ("src", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What the command printed; its errors are this test's."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist and the wheel that is made from it; from a copy, so that the clone stays clean."""
    copy = tmp_path_factory.mktemp("copy")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, copy / name)
    run(sys.executable, "-m", "build", "--no-isolation", copy, cwd=copy)
    return copy / "dist"


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it and nothing else; dependencies are seen where this one has them."""
    home = tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", home, cwd=home)
    (wheel,) = built.glob("*.whl")
    run(home / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=home)
    return home


def sources(*endings: str) -> set[str]:
    files = (path for path in (ROOT / "src" / "roadmap").rglob("*") if path.suffix in endings)
    return {f"roadmap/{path.relative_to(ROOT / 'src' / 'roadmap').as_posix()}" for path in files}


def test_the_distribution_has_a_name_of_its_own(built: Path) -> None:
    names = sorted(path.name for path in built.iterdir())
    assert len(names) == 2
    assert all(re.match(r"roadmap_retrieval-\d", name) for name in names), names


def test_sdist_and_wheel_hold_every_file(built: Path) -> None:
    wanted = sources(".py", ".yaml", ".csv", ".typed", ".html", ".css", ".js")
    assert sum(name.endswith(".yaml") for name in wanted) > 20
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wanted <= set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/src/")[2] for name in archive.getnames()}
    assert wanted <= inside


def test_the_command_works_from_an_empty_environment(environment: Path, tmp_path: Path) -> None:
    dependencies = sysconfig.get_path("purelib")  # without its .pth files, so without this clone

    def inside(*command: str) -> str:
        return run(environment / "bin" / command[0], *command[1:], cwd=tmp_path, PYTHONPATH=dependencies)

    where = inside("python", "-c", "import roadmap; print(roadmap.__file__)").strip()
    assert Path(where).is_relative_to(environment), where
    version = inside("python", "-c", "import importlib.metadata as m; print(m.version('roadmap-retrieval'))").strip()
    assert re.fullmatch(r"\d+\.\d+.*", version)
    assert "roadmap" in inside("roadmap", "--help")
    assert "small_cnn" in inside("roadmap", "train", "recipe=glyphs", "--cfg", "job")  # the YAML files came along
    assert list(tmp_path.iterdir()) == []
