"""The one home of progress bars: drawn for whoever watches, silent where the output is piped or tqdm is not there."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Bar:
    """A bar to `update`; as a context it closes itself. Where nothing is drawn, nothing happens.

    Attributes:
        drawn: whether there is a bar to look at; a program without one may print lines instead.
    """

    def __init__(self, tqdm_bar: Any = None) -> None:
        self._bar = tqdm_bar
        self.drawn = tqdm_bar is not None

    def update(self, count: int = 1) -> None:
        """`count` more are done."""
        if self._bar is not None:
            self._bar.update(count)

    def note(self, words: str) -> None:
        """Words behind the bar, until there are others."""
        if self._bar is not None:
            self._bar.set_postfix_str(words, refresh=False)

    def name(self, what: str) -> None:
        """Another name in front of the bar."""
        if self._bar is not None:
            self._bar.set_description_str(what, refresh=False)

    def print(self, line: str) -> None:
        """A line that stays, above the bar."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stdout)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def bar(
    total: int,
    what: str,
    unit: str = " pictures",
    show: bool | None = None,
    delay: float = 0.0,
    done: int = 0,
    leave: bool = True,
) -> Bar:
    """A progress bar on standard error.

    Args:
        total: how many there are to do.
        what: the name in front of the bar.
        unit: what is counted, with a space before it.
        show: True draws it, False does not; None draws it where a person watches, that is on a terminal.
        delay: seconds for which it waits: short work shows nothing.
        done: how many are done already.
        leave: keep the full bar on the screen at the end.
    """
    if not (sys.stderr.isatty() if show is None else show):
        return Bar()
    try:
        from tqdm import tqdm
    except ImportError:
        return Bar()
    return Bar(
        tqdm(
            total=total,
            initial=done,
            desc=what,
            unit=unit,
            unit_scale=total >= 10_000,
            delay=delay,
            leave=leave,
            dynamic_ncols=True,
        )
    )
