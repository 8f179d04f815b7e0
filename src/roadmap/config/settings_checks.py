"""What a setting may be: its type, its limits, whether it may say "auto"; refused in words that name it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from roadmap.names import did_you_mean

AUTO = "auto"
KINDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list[int]: "a list of whole numbers, such as [30,70]",
    list[float]: "a list of numbers, such as [0.16,1]",
    dict[str, str]: "names with values, such as {roxford5k:FOLDER}",
    dict[str, Any]: "its name with its options, such as {name: roadmap}",
}
Limit = tuple[Callable[[Any], bool], str]  # whether a value is allowed, and what it must do, in words
AT_LEAST_1: Limit = (lambda v: v >= 1, "be at least 1")
AT_LEAST_0: Limit = (lambda v: v >= 0, "be at least 0")
ABOVE_0: Limit = (lambda v: v > 0, "be above 0")
NAMED: Limit = (lambda v: v.strip() != "", "name a folder or be left out")
BELOW_1: Limit = (lambda v: 0 <= v < 1, "be at least 0 and below 1")
SHARE: Limit = (lambda v: 0 <= v <= 1, "lie in 0..1")
INSIDE: Limit = (lambda v: 0 < v < 1, "lie strictly between 0 and 1")
RANGE: Limit = (lambda v: len(v) == 2 and 0 < v[0] <= v[1], "be two numbers, 0 < low <= high")
DIMENSIONS: Limit = (lambda v: all(d >= 1 for d in v) and len(set(v)) == len(v), "be different numbers of at least 1")
SHARES: Limit = (lambda v: RANGE[0](v) and v[1] <= 1, "be two numbers, 0 < low <= high <= 1")


class SettingError(ValueError):
    """A setting that cannot be: whoever gave it, by whatever spelling, can look for it by its name.

    Attributes:
        field: the dotted name of the setting, such as "data.root"; the message begins with it or holds it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def setting(default: Any, limit: Limit | tuple[str, ...] | None = None, auto: bool = False) -> Any:
    """A field with a limit, or a list of what is allowed; "auto" beside it where the program may choose.

    Its annotation is the type that it has once `roadmap.engine.auto.resolve` has chosen.
    """
    about = {"limit": limit, AUTO: auto or default == AUTO}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=about)
    return dataclasses.field(default=default, metadata=about)


@cache
def fields(part: type) -> dict[str, tuple[Any, bool, Mapping[str, Any]]]:
    """Field -> its type, whether it may be null, and what `setting` said about it."""
    hints = get_type_hints(part)
    return {f.name: (*_without_none(hints[f.name]), f.metadata) for f in dataclasses.fields(part)}


def kind_in_words(hint: Any, nullable: bool, about: Mapping[str, Any]) -> str:
    """A type, for a person."""
    auto = about.get(AUTO) and hint is not str  # where it is text, the list of what is allowed says so
    return KINDS.get(hint, str(hint)) + (" or null" if nullable else "") + (" or auto" if auto else "")


def check(part: Any, where: str) -> None:
    """Every field has a value of its type and within its limits; whole numbers become floats where those are meant."""
    for name, (hint, nullable, about) in fields(part.__class__).items():
        key, value = f"{where}{name}", getattr(part, name)
        if dataclasses.is_dataclass(hint) or (value is None and nullable) or (about.get(AUTO) and value == AUTO):
            continue
        if not _is(value, hint):
            came = as_typed(value) if value is None or isinstance(value, bool) else repr(value)
            raise SettingError(key, f"{key} must be {kind_in_words(hint, nullable, about)}, got {came}")
        setattr(part, name, value := _as(value, hint))
        limit = about.get("limit")
        if limit and isinstance(limit[0], str):
            if value not in limit:
                near = did_you_mean(value, limit).removesuffix(".")
                raise SettingError(key, f"{key} must be one of {', '.join(limit)}, got {value!r}{near}")
        elif limit and not limit[0](value):
            raise SettingError(key, f"{key} must {limit[1]}, got {repr(value) if isinstance(value, str) else value}")


def keyword_arguments(kind: type[Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values as keyword arguments of a dataclass; an unknown name is an error that offers the nearest."""
    names = [f.name for f in dataclasses.fields(kind)]
    for name in values:
        if name not in names:
            near = did_you_mean(f"{where}{name}", [f"{where}{other}" for other in names])
            raise SettingError(f"{where}{name}", f"unknown setting {where}{name}{near} Known: {', '.join(names)}")
    return dict(values)


def as_typed(value: Any) -> str:
    """A value as it would be typed."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(as_typed(item) for item in value)}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    (inner,) = (part for part in get_args(hint) if part is not type(None))
    return inner, True


def _is(value: Any, hint: Any) -> bool:
    if get_origin(hint) is list:
        return isinstance(value, (list, tuple)) and all(_is(item, get_args(hint)[0]) for item in value)
    if get_origin(hint) is dict:
        return isinstance(value, Mapping)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _as(value: Any, hint: Any) -> Any:
    return (
        [get_args(hint)[0](item) for item in value] if get_origin(hint) is list else (get_origin(hint) or hint)(value)
    )
