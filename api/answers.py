"""Answers of the cluster that many want: asked for once, given for a moment, and asked for again before they are too old."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from raycontrol.api.calls import Calls
from raycontrol.api.visits import for_nobody

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True)
class _Asked(Generic[T]):
    """A question, and when it was put: its answer may be as old as that."""

    at: float
    answer: asyncio.Future[T]


class Answers(Generic[K, T]):
    """Asks ``question``, of what it is about. No answer is given that was asked for ``kept_s`` ago, or earlier.

    Who comes when it has half that age has it asked for anew, and does not wait. ``most`` answers are kept; for 0 seconds: none.
    """

    def __init__(
        self,
        calls: Calls,
        question: Callable[[K], Coroutine[Any, Any, T]],
        kept_s: float,
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls = calls
        self._question = question
        self._kept_s = kept_s
        self._most = most
        self._clock = clock
        self._asking: dict[K, _Asked[T]] = {}
        self._answered: OrderedDict[K, _Asked[T]] = OrderedDict()

    async def get(self, about: K) -> T:
        """Return what the question comes to; raises its errors, which are not kept, and TooMany where it would be one call too many.

        Those who come while it is asked for wait for the same answer.
        """
        known = self._answered.get(about)
        if known is not None and self._is_good(known):
            if self._age_s(known) >= self._kept_s / 2 and self._asked(about) is None:
                self._ask(about)
            return known.answer.result()
        asked = self._asked(about)
        if asked is not None:
            return await asyncio.shield(asked)  # one who leaves does not end it for the others
        with self._calls.counted():
            return await asyncio.shield(self._ask(about))

    def forget(self) -> None:
        """Give nobody who comes from now on what was asked for before: something has just been changed."""
        self._asking.clear()
        self._answered.clear()

    def _asked(self, about: K) -> asyncio.Future[T] | None:
        """Return the answer that is to come, if it was asked for a moment ago."""
        asking = self._asking.get(about)
        return asking.answer if asking is not None and self._is_good(asking) else None

    def _ask(self, about: K) -> asyncio.Future[T]:
        answer = for_nobody(self._question(about))
        asked = self._asking[about] = _Asked(self._clock(), answer)
        answer.add_done_callback(lambda _: self._take(about, asked))
        return answer

    def _take(self, about: K, asked: _Asked[T]) -> None:
        failed = asked.answer.cancelled() or asked.answer.exception() is not None
        if self._asking.get(about) is not asked:  # forgotten, or so slow that it was asked for again
            return
        del self._asking[about]
        if not failed:
            self._answered[about] = asked
            self._answered.move_to_end(about)
        while self._answered and self._is_one_too_many(next(iter(self._answered.values()))):
            self._answered.popitem(last=False)

    def _is_one_too_many(self, oldest: _Asked[T]) -> bool:
        return len(self._answered) > self._most or not self._is_good(oldest)

    def _is_good(self, asked: _Asked[T]) -> bool:
        return self._age_s(asked) < self._kept_s

    def _age_s(self, asked: _Asked[T]) -> float:
        return self._clock() - asked.at
