"""The YAML files: which groups there are, what each option is, which settings it gives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

GROUPS = {
    "recipe": "Everything at once: a row of the paper's tables, or a modern counterpart.",
    "data": "Which pictures.",
    "model": "Backbone, pooling and head.",
    "loss": "What is minimised.",
    "optim": "How the weights move.",
    "select": "Which epoch is kept.",
    "hardware": "Where and how it is computed.",
}
OVERRIDE = "override /"  # how a recipe's list of defaults names a group


@dataclass(frozen=True)
class Catalogue:
    """The options of every group: ours, and those of a folder of one's own (`--config-dir`).

    Attributes:
        folders: where GROUP/OPTION.yaml is looked for; the first that has it counts.
    """

    folders: tuple[Path, ...] = (Path(str(files("roadmap.config.groups"))),)

    def options(self, group: str) -> dict[str, str]:
        """Option -> the first line of its file, in alphabetical order, numbers by their size."""
        found = {path.stem: path for folder in reversed(self.folders) for path in (folder / group).glob("*.yaml")}
        return {name: _headline(found[name]) for name in sorted(found, key=_by_number)}

    def values(self, group: str, option: str) -> dict[str, Any]:
        """What the file of an option says, with what it takes over from other files of its group."""
        own = self._own_values(group, option)
        _, inherited = _defaults(own)
        merged = OmegaConf.merge(*(self.values(group, parent) for parent in inherited), own)
        return _plain(merged)

    def notes(self, group: str, option: str) -> dict[str, str]:
        """Name -> the comment behind its value, in the file of an option."""
        text = self._path(group, option).read_text(encoding="utf-8")
        return dict(re.findall(r"^(\w+): [^#\n]*# (.*)$", text, re.MULTILINE))

    def choices(self, recipe: str) -> dict[str, str]:
        """Group -> the option that a recipe takes."""
        chosen, inherited = _defaults(self._own_values("recipe", recipe))
        earlier: dict[str, str] = {}
        for parent in inherited:
            earlier |= self.choices(parent)
        return earlier | chosen

    def _own_values(self, group: str, option: str) -> dict[str, Any]:
        return _plain(OmegaConf.load(self._path(group, option)))

    def _path(self, group: str, option: str) -> Path:
        paths = [folder / group / f"{option}.yaml" for folder in self.folders]
        return next((path for path in paths if path.is_file()), paths[0])


def _plain(values: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(values)
    if not isinstance(plain, dict):
        raise ValueError(f"a file of options must hold names with values, got {values}")
    return {str(name): value for name, value in plain.items()}


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of the values of a tree."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _defaults(values: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The groups that a file chooses, and the files it goes on from; takes the list of them out of `values`."""
    chosen: dict[str, str] = {}
    inherited: list[str] = []
    for entry in values.pop("defaults", []):
        if isinstance(entry, Mapping):
            chosen |= {str(name).removeprefix(OVERRIDE): str(option) for name, option in entry.items()}
        elif entry != "_self_":
            inherited.append(str(entry))
    return chosen, inherited


def _by_number(name: str) -> list[tuple[str, int]]:
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]


def _headline(path: Path) -> str:
    """The first comment of a file that is not an instruction to Hydra."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @"):
            return line.removeprefix("#").strip()
        if not line.startswith("#"):
            break
    return ""
