"""How much of the server one caller may take."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

MIB = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """``rate_per_s`` and ``burst`` are a token's, ``failures_…`` an address's whose tokens are wrong, ``strangers_…`` those of
    its tokens never seen before that are looked at even after that; ``refusals_…`` how many refused changes of a token the audit
    takes, and every ``audit_retry_s`` it is asked again to take what it did not; no answer waits for it longer than ``audit_wait_s``. A job, and a list, is shown as it was up to ``glance_s`` ago where it is only looked at in passing. Every
    ``recheck_s`` the tokens of streams are looked at again.

    ``followers_per_job``, ``followers_per_token`` and ``followers`` count streams and long polls that wait; ``watched_jobs``
    the jobs that they wait for, each of which takes a thread. A body has to be there within ``body_s`` seconds, a piece of
    a package within ``piece_s``; a user may have ``uploads_per_user`` packages that are not whole yet. The head of a request
    within ``request_s`` (twice that at most); who takes nothing of an answer for ``write_s`` is cut off. ``calls`` go to the
    cluster at a time, ``waiting_calls`` wait for their turn, ``calls_per_token`` of both are one token's, which has half of ``calls`` at a
    time, and ``answer_s`` is how long they may take together; ``requests`` are answered at a time, streams among them.
    """

    rate_per_s: float = 50
    burst: int = 100
    failures_per_s: float = 0.5
    failures_burst: int = 20
    strangers_per_s: float = 0.5
    strangers_burst: int = 5
    refusals_per_s: float = 0.1
    refusals_burst: int = 60
    recheck_s: float = 15
    audit_retry_s: float = 5
    audit_wait_s: float = 2
    glance_s: float = 1.0
    body_bytes: int = MIB
    piece_bytes: int = 8 * MIB
    body_s: float = 30
    piece_s: float = 120
    uploads_per_user: int = 8
    followers_per_job: int = 300
    followers_per_token: int = 400
    followers: int = 1000
    watched_jobs: int = 128
    request_s: float = 20
    write_s: float = 30
    calls: int = 16
    calls_per_token: int = 64
    waiting_calls: int = 500
    answer_s: float = 90
    requests: int = 2000


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
