"""One watcher a job, for all who follow it: it waits at the door for events and looks at the sizes of the job's logs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from starlette.types import Receive, Scope, Send

from raycontrol.api.calls import Calls
from raycontrol.api.files import LogFiles
from raycontrol.api.limits import Limits
from raycontrol.api.problems import Busy
from raycontrol.api.readings import Readings
from raycontrol.api.shares import Shares
from raycontrol.api.streams import GuardedStream, ShutOut
from raycontrol.api.visits import for_nobody
from raycontrol.errors import JobNotFound, RaycontrolError
from raycontrol.status import Event, JobInfo

log = logging.getLogger(__name__)

WATCH_S = 10.0
SIZES_POLL_S = 0.2
PAUSE_S = 1.0
SHORTEST_WATCH_S = 0.5
"""A controller does not wait for jobs that are not its own; asking it must take so long all the same."""
LINGER_S = 10.0
"""Long polls come again and again; their watcher stays for the next one."""
EVENTS_KEPT = 1000

Mark = asyncio.Future[None]


class Watcher:
    """What is known of one job. ``over``: nothing more will come, all events are here and all logs in their files.

    ``events`` are those after ``events_since``; older ones are to be asked for. ``trouble`` is why the last question to the
    controller had no answer.
    """

    def __init__(
        self, job: JobInfo, calls: Calls, files: Callable[[str, int], LogFiles], turn: asyncio.Lock
    ) -> None:
        self.job = job
        self.over = False
        self.sizes: dict[str, int] = {}
        self.events: list[Event] = []
        self.events_since = 0
        self.followers = 0
        self.trouble: Exception | None = None
        self.readings = Readings(calls)
        self._calls = calls
        self._files = files
        self._turn = turn
        self._news: Mark = asyncio.get_running_loop().create_future()

    def mark(self) -> Mark:
        """Return what the next change sets. Taken before a look, so that a change after the look ends the wait."""
        return self._news

    def ended(self, attempt: int) -> bool:
        """Whether nothing more comes of this attempt."""
        return self.over or self.job.attempt > attempt

    async def turn(self) -> None:
        """Wait for one's turn to take what is new: one follower has it in each turn of the event loop, in their order.

        A log that grows has something for all its followers at once, and requests that come then get in between them.
        """
        async with self._turn:
            await asyncio.sleep(0)

    async def run(self) -> None:
        """Watch until the job is over."""
        looking = asyncio.ensure_future(self._watch_sizes())
        try:
            await self._watch_events()
        finally:
            looking.cancel()

    async def _watch_events(self) -> None:
        while not self.over:
            try:
                await self._take_events()
                self.trouble = None
            except JobNotFound:  # it was removed
                self.over = True
                self._tell()
            except RaycontrolError as error:  # the controller restarts: logs are read on meanwhile
                log.warning("job %s cannot be watched: %s; trying again", self.job.id, error)
                self.trouble = error
                await asyncio.sleep(PAUSE_S)
            except Exception as error:  # whatever it is, its followers wait for us alone
                self.trouble = error
                log.exception("job %s cannot be watched; trying again", self.job.id)
                await asyncio.sleep(PAUSE_S)

    async def _take_events(self) -> None:
        """Look at the job first: what it did before it was over is then among the events."""
        job_id, after = self.job.id, self.events[-1].seq if self.events else self.events_since
        was_over = self.job.over
        wait_s = 0.0 if was_over or not self.events else WATCH_S
        asked = time.monotonic()
        news = await self._calls.watch(lambda door: door.events(job_id, after, wait_s))
        if was_over and not news:
            self.over = True
        else:  # where this fails, the news come again
            self.job = await self._calls.ask(lambda door: door.glance(job_id))
        self._keep(news)
        if news or self.over:
            self._tell()
        elif not self.job.over:
            await asyncio.sleep(max(0.0, SHORTEST_WATCH_S - (time.monotonic() - asked)))

    async def _watch_sizes(self) -> None:
        while True:
            try:
                sizes = await self._calls.read(self._files(self.job.id, self.job.attempt).sizes)
                if sizes != self.sizes:
                    self.sizes = sizes
                    self._tell()
            except Exception:  # whatever it is, its followers wait for us alone
                log.exception("the logs of job %s cannot be looked at; trying again", self.job.id)
                await asyncio.sleep(PAUSE_S)
            await asyncio.sleep(SIZES_POLL_S)

    def _keep(self, news: list[Event]) -> None:
        self.events += news
        if len(self.events) > EVENTS_KEPT:
            self.events_since = self.events[-EVENTS_KEPT // 2 - 1].seq
            del self.events[: -EVENTS_KEPT // 2]

    def _tell(self) -> None:
        told, self._news = self._news, asyncio.get_running_loop().create_future()
        told.set_result(None)


class Watchers:
    """The watchers of all jobs that somebody follows; each comes with its first follower and goes after its last."""

    def __init__(self, calls: Calls, limits: Limits, files: Callable[[str, int], LogFiles]) -> None:
        self._calls = calls
        self._limits = limits
        self._files = files
        self._shares = Shares(limits.followers_per_token, "followers")
        self._watchers: dict[str, tuple[Watcher, asyncio.Task[None]]] = {}
        self._turn = asyncio.Lock()
        """Of the followers of all jobs."""

    @property
    def followers(self) -> int:
        return sum(watcher.followers for watcher, _ in self._watchers.values())

    @contextmanager
    def following(self, job: JobInfo) -> Iterator[Watcher]:
        """Give the job's watcher; raises Busy when too many follow, and TooMany when too many do so with this token."""
        with self._shares.one():
            watcher = self._watcher(job)
            watcher.followers += 1
            try:
                yield watcher
            finally:
                watcher.followers -= 1
                if not watcher.followers:
                    asyncio.get_running_loop().call_later(LINGER_S, self._retire, job.id, watcher)

    def close(self) -> None:
        for _, task in self._watchers.values():
            task.cancel()

    def _watcher(self, job: JobInfo) -> Watcher:
        if self.followers >= self._limits.followers:
            raise Busy("too many follow jobs of this server; try again later")
        watcher, task = self._watchers.get(job.id, (None, None))
        if watcher is not None and task is not None and (watcher.over or not task.done()):
            if watcher.followers >= self._limits.followers_per_job:
                raise Busy("too many follow this job; try again later")
            return watcher
        if len(self._watchers) >= self._limits.watched_jobs:
            self._make_room()
        watcher = Watcher(job, self._calls, self._files, self._turn)
        self._watchers[job.id] = watcher, for_nobody(watcher.run())
        return watcher

    def _make_room(self) -> None:
        """Let a watcher go that nobody needs now; raises Busy when there is none."""
        for job_id, (watcher, _) in list(self._watchers.items()):
            if not watcher.followers:
                self._retire(job_id, watcher)
                return
        raise Busy("too many jobs are followed on this server; try again later")

    def _retire(self, job_id: str, watcher: Watcher) -> None:
        found = self._watchers.get(job_id)
        if found is not None and found[0] is watcher and not watcher.followers:
            del self._watchers[job_id]
            found[1].cancel()


class EventStream(GuardedStream):
    """Server-sent events of a job. Its follower is counted from before the answer begins until it has ended."""

    media_type = "text/event-stream"

    def __init__(
        self,
        watchers: Watchers,
        job: JobInfo,
        events: Callable[[Watcher], AsyncIterator[bytes]],
        shut_out: ShutOut,
    ) -> None:
        super().__init__((), shut_out, headers={"X-Accel-Buffering": "no"})
        self._watchers = watchers
        self._job = job
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._watchers.following(self._job) as watcher:
            self.body_iterator = self._events(watcher)
            await super().__call__(scope, receive, send)

    async def cut(self, send: Send) -> None:
        """End it; only after an event `end` it is whole."""
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def happened(mark: Mark, timeout_s: float) -> bool:
    """Return True as soon as the watcher has news, False when there were none in time."""
    await asyncio.wait(
        {mark}, timeout=timeout_s
    )  # not wait_for, which would end the wait of all others with it
    return mark.done()
