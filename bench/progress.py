"""How far a run is, in plain lines: for a terminal, and for a log file all the same."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

EVERY_S = 10.0
"""Seconds between two lines on one part; three times as many before the same is printed again."""

Say = Callable[[str], None]
"""Takes a line, or how far something is."""


def print_line(line: str) -> None:
    """Prints to stderr at once, apart from a command's result."""
    print(line, file=sys.stderr, flush=True)


class Part:
    """One part of a run: says how far it is, seldom enough for a log (see `EVERY_S`).

    ``say`` takes the lines; None says nothing.
    """

    def __init__(self, say: Say | None) -> None:
        self._say = say
        self._started = self._said = time.monotonic()
        self._where = ""

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._started

    def at(self, where: str) -> None:
        """Prints where it is, unless it printed just now."""
        pause = 3 * EVERY_S if where == self._where else EVERY_S
        if self._say is not None and time.monotonic() - self._said >= pause:
            self._said, self._where = time.monotonic(), where
            self._say(f"  {self.seconds:.0f} s: {where}")
