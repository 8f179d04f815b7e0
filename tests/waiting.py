"""Waiting for what other processes, threads and pages do: for as long as a machine that is busy may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# Seconds for what takes a moment on a machine that is idle. Only a test that fails waits so long, and one whose
# machine stood still in the meantime does not fail for that.
PATIENCE = 300.0


def wait_until(condition: Callable[[], bool], pause: float = 0.001) -> None:
    """Wait for what other threads and processes do."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(pause)


def until(page: Any, condition: str) -> None:
    """Wait for JavaScript to be true. Playwright's own way evaluates text inside the page, which our pages forbid."""
    end = time.monotonic() + PATIENCE
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(10)
