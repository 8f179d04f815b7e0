"""What every test of the kernels finds."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_records() -> Iterator[None]:
    """No launches recorded by another test, which may have set the sizes of blocks otherwise: a record does not ask."""
    _forget_records()
    yield
    _forget_records()


def _forget_records() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("roadmap.kernels.triton."):
            for records in ("_programs", "_counting", "_placing"):
                vars(module).get(records, {}).clear()
