"""A clock that goes on when this machine's is set: what a job may take is counted by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

SLEW = 0.05
"""By how much it may go faster or slower than time does, to come back to the wall clock."""


class Moment(NamedTuple):
    """A moment by the steady clock, and by one that is never set and never hurries: how long this machine has been up."""

    at: float
    up_s: float


class SteadyClock:
    """Epoch seconds as ``wall`` has them, but for its steps: those are made up for little by little.

    Else a clock that is set back by an hour would give every job an hour more, and one that is set forward end all
    that have an hour left.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, passing: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall = wall
        self._passing = passing
        self._lock = threading.Lock()
        self._read_at = passing()
        self._now = wall()

    def go_on_from(self, last: float) -> None:
        """Go on from where an earlier clock was last, if the wall clock is behind that: else what was noted by it would lie
        ahead, and all limits be so much longer."""
        now = self()
        with self._lock:
            self._now += max(0.0, last - now)

    def __call__(self) -> float:
        return self.moment().at

    def seen_from_now(self, up_s: float) -> Moment:
        """Return the moment, not long ago, at which this machine had been up for so long."""
        now = self.moment()
        return Moment(now.at - (now.up_s - up_s), up_s)

    def moment(self) -> Moment:
        with self._lock:
            read_at = self._passing()
            passed = read_at - self._read_at
            ahead = self._now + passed - self._wall()
            most = SLEW * passed
            self._now += passed - max(-most, min(ahead, most))
            self._read_at = read_at
            return Moment(self._now, read_at)
