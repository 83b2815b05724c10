"""Asks the cluster from the server's event loop: a door is synchronous, so threads wait at it, and not too many."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import TypeVar

from raycontrol.api.limits import Limits
from raycontrol.api.problems import Busy
from raycontrol.api.shares import Shares, Turns
from raycontrol.errors import ControllerUnavailable
from raycontrol.readers import ServerDoor

log = logging.getLogger(__name__)

T = TypeVar("T")

FAILURE_KEPT_S = 1.0
"""For so long a door that could not be opened is not tried again: it takes its time, and many ask."""


class Calls:
    """``open_door`` is called before the first call, and again after one to which no controller answered any more."""

    def __init__(self, open_door: Callable[[], ServerDoor], limits: Limits) -> None:
        self._entrance = Entrance(open_door)
        self._answer_s = limits.answer_s
        self._shares = Shares(limits.calls_per_token, "requests that wait for the cluster")
        self._turns = Turns(max(1, limits.calls // 2))
        self._short = Crew("call", limits.calls, limits.waiting_calls)
        # Watching takes a thread for as long as it waits; it must not keep the others from asking. A watcher that nobody
        # needs any more still waits to the end of its call.
        self._long = Crew("watch", limits.watched_jobs, limits.watched_jobs)
        # Every follower reads, and all at once when a log grows.
        self._files = Crew("file", 8, limits.followers + limits.waiting_calls)
        # Outputs may lie on a file server that is dead: who waits for it holds up only others that do.
        self._outputs = Crew("outputs", 4, limits.waiting_calls)
        # A large spec takes seconds to be checked; two at a time leave the processor to others.
        self._checks = Crew("check", 2, limits.waiting_calls)
        self._records = Crew("record", 2, None)

    async def ask(self, work: Callable[[ServerDoor], T]) -> T:
        """Return what ``work`` gets at the door; raises its errors, and Busy when too many wait before it, or it takes too long.

        Raises TooMany when the token of the request waits for as many calls as it may.
        """
        return await self._answered(work, "try again")

    async def change(self, work: Callable[[ServerDoor], T]) -> T:
        """As ``ask``, for what changes something: what has not answered in time may do it yet."""
        return await self._answered(work, "it may have been done; look before you repeat it")

    async def _answered(self, work: Callable[[ServerDoor], T], advice: str) -> T:
        with ExitStack() as held:
            held.enter_context(self.counted())
            try:
                return await asyncio.wait_for(self._asked(work, held), self._answer_s)
            except asyncio.TimeoutError:
                raise Busy(f"the cluster has not answered in {self._answer_s:g} s; {advice}") from None

    async def _asked(self, work: Callable[[ServerDoor], T], held: ExitStack) -> T:
        """One token's calls may all have to wait long, as for a store that takes nothing; others are answered meanwhile.

        What the call holds it has as long as its thread is at it, whoever still waits for that.
        """
        held.enter_context(await self._turns.one())
        working = self._short.begin(lambda: self._entrance.at_the_door(work))
        _when_done(working, held.pop_all().close)
        return await asyncio.wrap_future(working)

    async def watch(self, work: Callable[[ServerDoor], T]) -> T:
        """As ``ask``, for what waits at the door for something to happen."""
        return await self._long.do(lambda: self._entrance.at_the_door(work))

    async def record(self, work: Callable[[ServerDoor], T]) -> T:
        """As ``ask``, for what has to be noted however many ask: it waits for none of them, and is never too much."""
        return await self._records.do(lambda: self._entrance.at_the_door(work))

    async def read(self, work: Callable[[], T]) -> T:
        """Return what ``work`` reads from this machine's files."""
        return await self._files.do(work)

    async def read_outputs(self, work: Callable[[], T]) -> T:
        """As ``read``, for what may lie in a folder that the nodes share."""
        return await self._outputs.do(work)

    async def check(self, work: Callable[[], T]) -> T:
        """Return what ``work`` computes; raises TooMany as ``ask`` does."""
        with self.counted():
            return await self._checks.do(work)

    def counted(self) -> AbstractContextManager[None]:
        """Count a wait as a call of the token whose request waits, who may have made it or not; raises TooMany."""
        return self._shares.one()

    def close(self) -> None:
        """Give up what waits; a call that is under way ends by itself."""
        for crew in (self._short, self._long, self._files, self._outputs, self._checks, self._records):
            crew.close()


class Crew:
    """Threads for one kind of work, and how much of it may wait for one; None: any."""

    def __init__(self, name: str, threads: int, most_waiting: int | None) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"api-{name}")
        self._most = None if most_waiting is None else threads + most_waiting
        self._at_it = 0

    async def do(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns; raises its errors, and Busy when too much waits before it."""
        return await asyncio.wrap_future(self.begin(work))

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Give ``work`` to the next thread that is free; raises Busy when too much waits before it."""
        if self._most is not None and self._at_it >= self._most:
            raise Busy("too many requests wait on this server; try again")
        working = self._pool.submit(work)
        self._at_it += 1
        _when_done(working, self._done)
        return working

    def _done(self) -> None:
        self._at_it -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _when_done(working: Future[T], then: Callable[[], None]) -> None:
    """Call ``then`` in this event loop when the thread has done with it, or nobody wants it any more and none has begun."""
    loop = asyncio.get_running_loop()

    def tell(_: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(then)

    working.add_done_callback(tell)


class Entrance:
    """The one door for all threads. It is opened once for all who wait for it, and so is told that it could not be."""

    def __init__(
        self, open_door: Callable[[], ServerDoor], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._open_door = open_door
        self._clock = clock
        self._lock = threading.Lock()
        self._opening: Future[ServerDoor] | None = None
        self._failed_at = 0.0

    def at_the_door(self, work: Callable[[ServerDoor], T]) -> T:
        opening = self._begun()
        try:
            return work(opening.result())
        except ControllerUnavailable:
            self._forget(opening)
            raise

    def _begun(self) -> Future[ServerDoor]:
        """Return the opening that goes on, or has ended; the thread that finds none does it."""
        with self._lock:
            if self._opening is not None and not self._stale(self._opening):
                return self._opening
            opening = self._opening = Future()
        try:
            opening.set_result(self._open_door())
        except BaseException as error:  # whatever it is: the others wait for it
            self._failed_at = self._clock()
            opening.set_exception(error)
        return opening

    def _stale(self, opening: Future[ServerDoor]) -> bool:
        failed = opening.done() and opening.exception() is not None
        return failed and self._clock() - self._failed_at >= FAILURE_KEPT_S

    def _forget(self, opening: Future[ServerDoor]) -> None:
        """Look for the controller anew with the next call; one that was not even found is remembered for a while."""
        with self._lock:
            if self._opening is opening and opening.exception() is None:
                log.warning("the controller does not answer; looking for it anew with the next request")
                self._opening = None
