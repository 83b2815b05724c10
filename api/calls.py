"""Asks the cluster from the server's event loop: a door is synchronous, so threads wait at it, and not too many."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from raycontrol.api.limits import Limits
from raycontrol.api.problems import Busy
from raycontrol.errors import ControllerUnavailable
from raycontrol.readers import ServerDoor

log = logging.getLogger(__name__)

T = TypeVar("T")


class Calls:
    """``open_door`` is called before the first call, and again after one to which no controller answered any more."""

    def __init__(self, open_door: Callable[[], ServerDoor], limits: Limits) -> None:
        self._open_door = open_door
        self._limits = limits
        self._door: ServerDoor | None = None
        self._opening = threading.Lock()
        self._asking = 0
        self._short = ThreadPoolExecutor(limits.calls, thread_name_prefix="api-call")
        # Watching takes a thread for as long as it waits; it must not keep the others from asking.
        self._long = ThreadPoolExecutor(limits.watched_jobs, thread_name_prefix="api-watch")
        self._files = ThreadPoolExecutor(8, thread_name_prefix="api-file")
        # A large spec takes seconds to be checked; two at a time leave the processor to others.
        self._checks = ThreadPoolExecutor(2, thread_name_prefix="api-check")

    async def ask(self, work: Callable[[ServerDoor], T]) -> T:
        """Return what ``work`` gets at the door; raises its errors, and Busy when too many wait before it."""
        if self._asking >= self._limits.waiting_calls:
            raise Busy("too many requests wait for the cluster; try again")
        self._asking += 1
        try:
            return await self._in(self._short, lambda: self._at_the_door(work))
        finally:
            self._asking -= 1

    async def watch(self, work: Callable[[ServerDoor], T]) -> T:
        """As ``ask``, for what waits at the door for something to happen."""
        return await self._in(self._long, lambda: self._at_the_door(work))

    async def read(self, work: Callable[[], T]) -> T:
        """Return what ``work`` reads from this machine's files."""
        return await self._in(self._files, work)

    async def check(self, work: Callable[[], T]) -> T:
        """Return what ``work`` computes."""
        return await self._in(self._checks, work)

    def close(self) -> None:
        """Give up what waits; a call that is under way ends by itself."""
        for pool in (self._short, self._long, self._files, self._checks):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _in(self, pool: Executor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def _at_the_door(self, work: Callable[[ServerDoor], T]) -> T:
        door = self._opened()
        try:
            return work(door)
        except ControllerUnavailable:
            self._forget(door)
            raise

    def _opened(self) -> ServerDoor:
        with self._opening:
            if self._door is None:
                self._door = self._open_door()
            return self._door

    def _forget(self, door: ServerDoor) -> None:
        with self._opening:
            if self._door is door:
                log.warning("the controller does not answer; looking for it anew with the next request")
                self._door = None
