"""The YAML files: which groups there are, which options each has, and what an option says about itself."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

GROUPS = {
    "recipe": "Everything at once: the paper's runs, and modern counterparts.",
    "data": "Which pictures.",
    "model": "Backbone, pooling and head.",
    "loss": "What is minimised.",
    "optim": "How the weights move.",
    "select": "Which epoch is kept.",
    "hardware": "Where and how it is computed.",
}
FOLDER = Path(str(files("roadmap.config.groups")))


def options(group: str, folder: Path | None = None) -> dict[str, str]:
    """Option -> the first line of its file, in alphabetical order; with those of a folder of one's own."""
    paths = {p.stem: p for home in (folder, FOLDER) if home is not None for p in (home / group).glob("*.yaml")}
    return {name: (_comment(paths[name].read_text(encoding="utf-8"))[0] or [""])[0] for name in sorted(paths)}


def parts_of(group: str, option: str) -> tuple[list[str], str]:
    """The comment that one of our files opens with, line by line, and what follows."""
    return _comment((FOLDER / group / f"{option}.yaml").read_text(encoding="utf-8"))


def _comment(text: str) -> tuple[list[str], str]:
    lines = text.splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    comment = [line[1:].removeprefix(" ") for line in lines[:end] if not line.startswith("# @")]  # @: for Hydra
    return comment, "\n".join(lines[end:])
