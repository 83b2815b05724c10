"""How much of the server one caller may take."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

MIB = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """Seconds, bytes and counts; of what is counted, so many are had at a time."""

    rate_per_s: float = 50
    """Requests of a token, after the first ``burst``."""
    burst: int = 100
    failures_per_s: float = 0.5
    """Wrong tokens from an address, after the first ``failures_burst``."""
    failures_burst: int = 20
    strangers_per_s: float = 0.5
    """Tokens never seen before that are looked at although their address has none of its failures left, after the first ``strangers_burst``."""
    strangers_burst: int = 5
    refusals_per_s: float = 0.1
    """Changes of a token that were refused or failed and that the audit takes, after the first ``refusals_burst``."""
    refusals_burst: int = 60
    recheck_s: float = 15
    """How often the tokens of streams are looked at again."""
    audit_retry_s: float = 5
    """How often the audit is asked again to take what it did not."""
    audit_wait_s: float = 2
    """How long an answer waits for the audit."""
    glance_s: float = 1.0
    """How old a list may be, and a job that is only looked at in passing."""
    body_bytes: int = MIB
    """Of a request, but for a piece of a package."""
    piece_bytes: int = 8 * MIB
    """Of a piece of a package."""
    body_s: float = 30
    """Within which a body has to be there."""
    piece_s: float = 120
    """Within which a piece of a package has to be there."""
    uploads_per_user: int = 8
    """Packages that are not whole yet."""
    followers_per_job: int = 300
    """Streams and long polls that wait for one job."""
    followers_per_token: int = 400
    """Streams and long polls that wait with one token."""
    followers: int = 1000
    """Streams and long polls that wait."""
    execs_per_token: int = 64
    """Commands across nodes that run, each of which takes a thread."""
    watched_jobs: int = 128
    """Jobs that they wait for, each of which takes a thread."""
    request_s: float = 20
    """Within which the head of a request has to be there; twice that at most."""
    write_s: float = 30
    """Who takes nothing of an answer for so long is cut off."""
    calls: int = 16
    """Threads that ask the cluster; one token has half of them."""
    calls_per_token: int = 64
    """Calls of one token that are under way or wait for a thread."""
    waiting_calls: int = 500
    """Calls that wait for a thread."""
    answer_s: float = 90
    """How long a call is waited for, from before it has a thread."""
    requests: int = 2000
    """Requests that are answered, streams among them."""


KEPT = 10_000


@dataclass
class Buckets:
    """Token buckets by name: each holds ``burst`` and gets ``rate_per_s`` a second. The least used are forgotten."""

    rate_per_s: float
    burst: float
    clock: Callable[[], float] = time.monotonic
    _levels: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)

    def take(self, name: str) -> float | None:
        """Take one; return None, or in how many seconds there will be one."""
        level = self.level(name)
        if level < 1:
            return (1 - level) / self.rate_per_s
        self._keep(name, level - 1)
        return None

    def give_back(self, name: str) -> None:
        """Undo a ``take``."""
        self._keep(name, min(self.burst, self.level(name) + 1))

    def level(self, name: str) -> float:
        now = self.clock()
        level, since = self._levels.get(name, (self.burst, now))
        return min(self.burst, level + (now - since) * self.rate_per_s)

    def _keep(self, name: str, level: float) -> None:
        self._levels[name] = (level, self.clock())
        self._levels.move_to_end(name)
        if len(self._levels) > KEPT:
            self._levels.popitem(last=False)
