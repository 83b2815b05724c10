"""Whose uploads are under way: a package that is never finished takes room of the head's disk until it is stale."""

from __future__ import annotations

import time
from collections.abc import Callable

from raycontrol.api.problems import TooMany
from raycontrol.archive import STALE_S


class Uploads:
    """The packages of each user that are not whole yet, as far as they came through this server.

    One that nothing came of for an hour is forgotten: the archive removes it.
    """

    def __init__(self, most_per_user: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most_per_user
        self._clock = clock
        self._begun: dict[str, dict[str, float]] = {}

    def begin(self, user: str, digest: str) -> None:
        """A piece comes; raises TooMany when it would be the first of one package too many."""
        now = self._clock()
        lately = {name: at for name, at in self._begun.get(user, {}).items() if now - at < STALE_S}
        if digest not in lately and len(lately) >= self._most:
            raise TooMany(
                f"{len(lately)} packages of {user!r} are not whole yet; finish one of them, or wait an hour",
                {"Retry-After": str(int(STALE_S - now + min(lately.values())) + 1)},
            )
        self._begun[user] = {**lately, digest: now}

    def end(self, user: str, digest: str) -> None:
        """The package is whole, or was dropped because its bytes were not its own."""
        self._begun.get(user, {}).pop(digest, None)
