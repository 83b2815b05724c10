"""What one token may have of the server at a time, so that the others have something left of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import WeakValueDictionary

from raycontrol.api.problems import TooMany
from raycontrol.api.visits import caller

RETRY_AFTER_S = 1


class Shares:
    """Counts what each token has of one thing. What the server does by itself, for nobody in particular, is not counted."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._held: Counter[str] = Counter()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Take one for the token of the request that is answered here; raises TooMany when it has ``most``."""
        token = caller()
        if token is None:
            yield
            return
        if self._held[token] >= self._most:
            raise TooMany(
                f"token {token!r} has {self._most} {self._what} at a time; wait for one to end",
                {"Retry-After": str(RETRY_AFTER_S)},
            )
        self._held[token] += 1
        try:
            yield
        finally:
            self._held[token] -= 1
            if not self._held[token]:
                del self._held[token]


class Turns:
    """Lets each token have ``most`` of one thing at a time, and its others wait; what is for nobody need not wait."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def one(self) -> AbstractContextManager[None]:
        """Take one when it is the turn of the request that is answered here; what is returned gives it back."""
        token = caller()
        if token is None:
            return nullcontext()
        turns = self._turns.setdefault(token, asyncio.Semaphore(self._most))
        await turns.acquire()
        return _given_back(turns)


@contextmanager
def _given_back(turns: asyncio.Semaphore) -> Iterator[None]:
    try:
        yield
    finally:
        turns.release()
