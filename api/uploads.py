"""Whose uploads are under way: a package that is never finished takes room of the head's disk until it is stale."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
        self._coming: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def piece(self, user: str, digest: str) -> Iterator[None]:
        """A piece comes, until the end of the block; raises TooMany when it would be the first of one package too many.

        Whether the archive has it then is for ``begin`` to say.
        """
        self._check(user, digest)
        self._coming[user, digest] += 1
        try:
            yield
        finally:
            self._coming[user, digest] -= 1
            if not self._coming[user, digest]:
                del self._coming[user, digest]

    def begin(self, user: str, digest: str) -> None:
        """The archive has something of the package, or may have."""
        self._begun[user] = {**self._lately(user), digest: self._clock()}

    def end(self, user: str, digest: str) -> None:
        """The package is whole, or was dropped because its bytes were not its own."""
        self._begun.get(user, {}).pop(digest, None)

    def _check(self, user: str, digest: str) -> None:
        lately = self._lately(user)
        under_way = lately.keys() | {name for whose, name in self._coming if whose == user}
        if digest not in under_way and len(under_way) >= self._most:
            room_s = STALE_S - self._clock() + min(lately.values()) if lately else 0
            raise TooMany(
                f"{len(under_way)} packages of {user!r} are not whole yet; finish one of them, or wait an hour",
                {"Retry-After": str(int(room_s) + 1)},
            )

    def _lately(self, user: str) -> dict[str, float]:
        now = self._clock()
        return {name: at for name, at in self._begun.get(user, {}).items() if now - at < STALE_S}
