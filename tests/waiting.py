"""Waiting for what a page does."""

from __future__ import annotations

import time
from typing import Any


def until(page: Any, condition: str) -> None:
    """Wait for JavaScript to be true. Playwright's own way evaluates text inside the page, which our pages forbid."""
    end = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(10)
