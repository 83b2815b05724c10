"""One command at many places at once: begun, read, kept wanted, ended. What comes is news, in the order in which it comes.

The news wait in a queue of a few pieces, and each place for it: so neither this side's memory grows, however much is
written and however slowly it is taken, nor a place's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from raycontrol.execution import (
    GRACE_S,
    NO_ANSWER,
    STOPPED,
    Began,
    Chunk,
    Command,
    News,
    Over,
    Place,
    PlaceFailed,
    Wrote,
)

log = logging.getLogger(__name__)

ANSWER_S = 15.0
"""A place that has not answered for so long is given up; a cable that is out for 10 seconds is survived."""
START_S = 5.0
"""Reading the shell's environment may add so much to the first answer."""
WAIT_S = 5.0
LEAST_S = 2.0
KEEP_S = 10.0
LEAVING_S = 2.0
PIECES = 16
INTERRUPTED = "it was interrupted"

T = TypeVar("T")


class Way(Protocol):
    """The way to the ``Execs`` of places. Every call may hang; those that fail raise PlaceFailed."""

    async def start(self, place: Place, exec_id: str, command: Command) -> Began: ...

    async def read(self, place: Place, exec_id: str, offset: int, wait_s: float) -> Chunk: ...

    async def keep(self, place: Place, exec_id: str) -> None: ...

    async def stop(self, place: Place, exec_id: str, grace_s: float, why: str) -> None: ...


class Spread:
    """At most ``parallel`` places have the command at a time. Everything here is of one event loop.

    Each place has begun (but where that failed), written, and is over in the end, exactly once.
    """

    def __init__(
        self,
        way: Way,
        places: Sequence[Place],
        command: Command,
        parallel: int | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.places = tuple(places)
        self._way = way
        self._command = command
        self._id = secrets.token_hex(8)
        self._parallel = parallel or max(1, len(places))
        self._answer_s = answer_s
        self._news: asyncio.Queue[News] = asyncio.Queue(PIECES)
        self._under_way: set[Place] = set()
        self._stopped: str | None = None
        self._asking: set[asyncio.Future[None]] = set()

    async def news(self) -> AsyncGenerator[News, None]:
        """Yield news until every place is over. Who leaves before has the command ended wherever it runs."""
        turns = asyncio.Semaphore(self._parallel)
        works = [asyncio.ensure_future(self._at(place, turns)) for place in self.places]
        keeping = asyncio.ensure_future(self._keep_wanted())
        left = len(works)
        try:
            while left:
                item = await self._news.get()
                left -= isinstance(item, Over)
                yield item
        finally:
            keeping.cancel()
            self.stop()
            for work in works:
                work.cancel()
            if self._asking:
                await asyncio.wait(self._asking, timeout=LEAVING_S)

    def stop(self, why: str = INTERRUPTED) -> None:
        """Begin to end it everywhere (TERM, a short grace, KILL); what has not begun will not."""
        self._stopped = self._stopped or why
        for place in self._under_way:
            self._ask(self._way.stop(place, self._id, GRACE_S, self._stopped))

    async def _at(self, place: Place, turns: asyncio.Semaphore) -> None:
        async with turns:
            if self._stopped is not None:
                over = Over(place.name, STOPPED, why="it was not begun")
            else:
                over = await self._carried_out(place)
        await self._news.put(over)

    async def _carried_out(self, place: Place) -> Over:
        self._under_way.add(place)
        try:
            return await self._followed(place)
        except PlaceFailed as error:
            return Over(place.name, NO_ANSWER, why=str(error))
        except Exception as error:  # whatever is wrong with one place, the others are to be told of
            log.exception("running a command on %s", place.name)
            return Over(place.name, NO_ANSWER, why=f"{type(error).__name__}: {error}")
        finally:
            self._under_way.discard(place)

    async def _followed(self, place: Place) -> Over:
        start = self._way.start(place, self._id, self._command)
        began = await self._in_time(start, START_S, self._due())
        due = self._due()  # its time counts from when it began
        if self._stopped is not None:  # asked before it had begun, the place may have known nothing to stop
            self._ask(self._way.stop(place, self._id, GRACE_S, self._stopped))
        await self._news.put(began)
        offset = 0
        while True:
            read = self._way.read(place, self._id, offset, WAIT_S)
            chunk = await self._in_time(read, WAIT_S, due)
            if chunk.data:
                offset += len(chunk.data)
                await self._news.put(Wrote(place.name, chunk.data))
            if chunk.over is not None:
                return chunk.over

    def _due(self) -> float:
        """Return by when a command with a time limit is over, wherever it can be."""
        limit_s = self._command.timeout_s
        return math.inf if limit_s is None else time.monotonic() + limit_s + GRACE_S + WAIT_S

    async def _in_time(self, answer: Awaitable[T], extra_s: float, due: float) -> T:
        limit_s = min(self._answer_s + extra_s, max(LEAST_S, due - time.monotonic()))
        try:
            return await asyncio.wait_for(answer, limit_s)
        except asyncio.TimeoutError:
            raise PlaceFailed(
                f"it has not answered for {limit_s:.0f} s; what it runs ends by itself"
            ) from None

    async def _keep_wanted(self) -> None:
        while True:
            await asyncio.sleep(KEEP_S)
            for place in tuple(self._under_way):
                self._ask(self._way.keep(place, self._id))

    def _ask(self, call: Coroutine[Any, Any, None]) -> None:
        """Ask something of a place, without waiting for it, or for an answer at all."""
        asking = asyncio.ensure_future(self._answered(call))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    async def _answered(self, call: Coroutine[Any, Any, None]) -> None:
        with suppress(PlaceFailed, asyncio.TimeoutError):
            await asyncio.wait_for(call, self._answer_s)


class SpreadExecution:
    """A spread for a program without an event loop: its news one by one, in a thread of their own behind it.

    To be closed, which ends what has not ended, and waits a moment for that to be on its way. ``next``, ``stop`` and ``close``
    may be called by any thread, ``stop`` by a signal handler too.
    """

    def __init__(self, spread: Spread) -> None:
        self.places = tuple(place.name for place in spread.places)
        self._spread = spread
        self._news = spread.news()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="raycontrol-follow-exec", daemon=True
        )
        self._thread.start()
        self._taking: asyncio.Task[Any] | None = None

    def __enter__(self) -> SpreadExecution:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[News]:
        while (item := self.next().result()) is not None:
            yield item

    def next(self) -> Future[News | None]:
        """Return what will be the next of the news; None comes after the last. One is asked for at a time."""
        return asyncio.run_coroutine_threadsafe(self._next(), self._loop)

    def stop(self) -> None:
        """Begin to end it everywhere; the rest of the news tells how that went."""
        self._loop.call_soon_threadsafe(self._spread.stop)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _next(self) -> News | None:
        self._taking = asyncio.current_task()
        return await anext(self._news, None)

    async def _end(self) -> None:
        """End the news, which has the command ended, then what may still be asked of places."""
        if self._taking is not None and not self._taking.done():
            self._taking.cancel()
            await asyncio.wait({self._taking})
        await self._news.aclose()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=LEAVING_S)
