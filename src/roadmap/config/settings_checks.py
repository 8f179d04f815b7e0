"""What a setting may be, told from its type and its dataclass; refused in words that name the field."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
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


class SettingError(ValueError):
    """A setting that cannot be: whoever gave it, by whatever spelling, can look for it by its name.

    Attributes:
        field: the dotted name of the setting, such as "data.root"; the message begins with it or holds it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def choosable(default: Any = AUTO) -> Any:
    """A field that the program may choose: "auto" is allowed beside the values of its type.

    Its annotation is the type that it has once `roadmap.engine.auto.resolve` has chosen.
    """
    return dataclasses.field(default=default, metadata={AUTO: True})


@cache
def kinds(part: type) -> dict[str, tuple[Any, bool, bool]]:
    """Field -> its type, whether it may be null, whether it may be "auto"."""
    hints = get_type_hints(part)
    return {f.name: (*_without_none(hints[f.name]), AUTO in f.metadata) for f in dataclasses.fields(part)}


def in_words(kind: tuple[Any, bool, bool]) -> str:
    """A type, for a person."""
    hint, nullable, auto = kind
    auto = auto and hint is not str  # where it is text, the list of what is allowed says so
    return KINDS.get(hint, str(hint)) + (" or null" if nullable else "") + (" or auto" if auto else "")


def check_types(part: Any, where: str) -> None:
    """Every field has a value of its type; whole numbers become floats where those are meant."""
    for name, kind in kinds(part.__class__).items():
        if not dataclasses.is_dataclass(kind[0]):
            setattr(part, name, _fitting(f"{where}{name}", getattr(part, name), kind))


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        near = did_you_mean(str(value), allowed)
        raise SettingError(
            name, f"{name} must be one of {', '.join(allowed)}, got {value!r}{near if near != '.' else ''}"
        )


def check_at_least(name: str, value: Any, least: float) -> None:
    if value is not None and value != AUTO and not value >= least:
        raise SettingError(name, f"{name} must be at least {least}, got {value}")


def check_above_0(name: str, value: Any) -> None:
    if value is not None and value != AUTO and not value > 0:
        raise SettingError(name, f"{name} must be above 0, got {value}")


def check_range(name: str, value: float | None, low: str, high: str, words: str) -> None:
    """`low` and `high` are "[0" or "(0", "1]" or "1)"."""
    least, most = float(low[1:]), float(high[:-1])
    if value is None:
        return
    inside = (value >= least if low[0] == "[" else value > least) and (
        value <= most if high[-1] == "]" else value < most
    )
    if not inside:
        raise SettingError(name, f"{name} must {words}, got {value}")


def check_interval(name: str, value: Any, most: float = math.inf) -> None:
    if value != AUTO and (len(value) != 2 or not 0 < value[0] <= value[1] <= most):
        limit = "" if math.isinf(most) else f" <= {most:g}"
        raise SettingError(name, f"{name} must be two numbers, 0 < low <= high{limit}, got {value}")


def shown(value: Any) -> str:
    """A value as it would be typed."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(shown(item) for item in value)}]"
    return str(value)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    (inner,) = (part for part in get_args(hint) if part is not type(None))
    return inner, True


def _fitting(name: str, value: Any, kind: tuple[Any, bool, bool]) -> Any:
    hint, nullable, auto = kind
    if (value is None and nullable) or (auto and value == AUTO):
        return value
    if get_origin(hint) is list and isinstance(value, (list, tuple)):
        (inner,) = get_args(hint)
        if all(_is(item, inner) for item in value):
            return [inner(item) for item in value]
    elif get_origin(hint) is dict:
        if isinstance(value, Mapping):
            return {str(key): item for key, item in value.items()}
    elif _is(value, hint):
        return hint(value)
    came = shown(value) if value is None or isinstance(value, bool) else repr(value)
    raise SettingError(name, f"{name} must be {in_words(kind)}, got {came}")


def _is(value: Any, hint: type) -> bool:
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)
