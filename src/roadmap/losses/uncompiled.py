"""Calls that torch.compile leaves out of its graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """As `torch.compiler.disable`, which loads the whole compiler (a second) where it stands: here, once it is used."""

    @functools.wraps(function)
    def call(*values: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*values, **options)  # type: ignore[no-untyped-call]
        return function(*values, **options)

    return call  # type: ignore[return-value]
