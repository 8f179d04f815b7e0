"""Whether a setting exists and its value fits, said in words that name the nearest right thing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roadmap.config.catalogue import GROUPS, Catalogue
from roadmap.config.meaning import settings
from roadmap.config.parsing import HELP, TEST_SETS, did_you_mean, is_hydras, singles
from roadmap.config.settings import Settings


class Checker:
    """Checks single overrides; knows which losses are asked for, on which the keys below `loss` depend."""

    def __init__(self, catalogue: Catalogue, parsed: Sequence[Override]) -> None:
        self.catalogue = catalogue
        chosen = {o.key_or_group: [_text(s) for s in singles(o) or [o]] for o in parsed if o.key_or_group in GROUPS}
        recipes = [name for name in chosen.get("recipe", []) if name in catalogue.options("recipe")]
        losses = chosen.get("loss") or [catalogue.choices(name).get("loss", "roadmap") for name in recipes]
        self.losses = [name for name in losses or ["roadmap"] if name in catalogue.options("loss")]

    def check_value(self, override: Override) -> None:
        """The value of an override without a sweep, or of one that `check_key` has passed."""
        key = override.key_or_group
        if is_hydras(key) or override.is_sweep_override():
            return
        if key in GROUPS:
            self._check_option(key, override.value())
        elif key.startswith("loss."):
            for loss in self.losses:
                _check_like(key, override.value(), self.catalogue.values("loss", loss)[key.removeprefix("loss.")])
        elif not key.startswith(f"{TEST_SETS}."):
            _check_type(key, override.value())

    def check_key(self, override: Override) -> None:
        """The key is known, and is changed: nothing is added, nothing left out."""
        key = override.key_or_group
        if is_hydras(key):
            return
        if key == "loss.name":
            raise ValueError("a loss is chosen with its options: loss=NAME, not loss.name=NAME")
        if key.startswith("loss."):
            self._check_loss_key(key.removeprefix("loss."))
        elif override.package is not None or not (
            key in GROUPS or key in settings() or key.startswith(f"{TEST_SETS}.")
        ):
            raise ValueError(self._unknown(override.get_key_element().lstrip("+~")))
        if override.type is OverrideType.DEL:
            raise ValueError(f"~{key}: a setting cannot be left out; set it to null, or to what you want")
        if override.type is OverrideType.ADD and not key.startswith(f"{TEST_SETS}."):
            raise ValueError(f"+{key}: there is nothing to add; write {key}=... without the +")

    def _check_option(self, group: str, value: Any) -> None:
        options = self.catalogue.options(group)
        if not isinstance(value, str):
            raise ValueError(f"{group} is chosen by name, got {_shown(value)}. Options: {', '.join(options)}")
        if value not in options and group == "data" and ("/" in value or Path(value).exists()):
            raise ValueError(f"unknown data {value!r}; for pictures of your own write: data=folder data.root={value}")
        if value not in options:
            raise ValueError(f"unknown {group} {value!r}{did_you_mean(value, options)} Options: {', '.join(options)}")

    def _check_loss_key(self, name: str) -> None:
        for loss in self.losses:
            known = [key for key in self.catalogue.values("loss", loss) if key != "name"]
            if name not in known:
                near = did_you_mean(f"loss.{name}", [f"loss.{key}" for key in known])
                raise ValueError(f"unknown setting loss.{name} of loss={loss}{near} It has: {', '.join(known)}")

    def _unknown(self, key: str) -> str:
        of_losses = [f"loss.{name}" for loss in self.losses for name in self.catalogue.values("loss", loss)]
        near = did_you_mean(key, [*settings(), *of_losses, *GROUPS])
        part = key.partition(".")[0]
        inside = [name.partition(".")[2] for name in settings() if name.startswith(f"{part}.")]
        known = f"Settings of {part}: {', '.join(inside)}; " if inside else ""
        return f"unknown setting {key}{near} {known}{HELP}"


def several(override: Override) -> str:
    key = override.get_key_element()
    said = f"{key} has several values; to try each in a run of its own, add -m"
    kind = settings()[key].kind if key in settings() else ""
    return f"{said}. If it is one list, write {key}=[...]" if kind.startswith("a list") else said


def _check_type(key: str, value: Any) -> None:
    """The value fits the type of the setting, as the schema will see it."""
    try:
        OmegaConf.update(_schema(), key, value)
    except OmegaConfBaseException:
        raise ValueError(f"{key} must be {settings()[key].kind}, got {_shown(value)}") from None


@cache
def _schema() -> DictConfig:
    """To try values on; what it holds afterwards is of no interest."""
    return OmegaConf.structured(Settings)  # type: ignore[no-any-return]


def _check_like(key: str, value: Any, default: Any) -> None:
    """The value of a loss's option is of the kind of its default; null stands for a number that is worked out."""
    allowed: dict[type, tuple[tuple[type, ...], str]] = {
        bool: ((bool,), "true or false"),
        int: ((int,), "a whole number"),
        float: ((int, float), "a number"),
        str: ((str,), "text"),
        type(None): ((int, float, type(None)), "a number or null"),
    }
    types, words = allowed[type(default)]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(f"{key} must be {words}, got {_shown(value)}")


def _text(override: Override) -> str:
    return str(override.value())


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value}".lower() if isinstance(value, bool) else repr(value)
