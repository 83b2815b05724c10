"""Many follow one log: what is read for one is read for all who stand at the same place, and requests get in between them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from raycontrol.api.calls import Calls
from raycontrol.api.files import LogFiles
from raycontrol.api.limits import Limits
from raycontrol.api.readings import KEPT, Piece, Readings
from raycontrol.api.sse import LineCutter
from raycontrol.api.watchers import Watcher, Watchers
from raycontrol.status import JobState
from tests.api.fakes import Api, FakeDoor, adas_job, events_in, until, write_log

FOLLOW = "/api/v1/jobs/digits-ab12cd/logs/worker-0?follow=1"


class Log:
    """A log of which each reading is counted; while ``may`` is not set they wait."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data
        self.read_from: list[int] = []
        self.may = threading.Event()
        self.may.set()
        self.error: Exception | None = None

    def read(self, offset: int) -> bytes:
        self.read_from.append(offset)
        found = self.data[offset:]
        assert self.may.wait(10)
        if self.error is not None:
            raise self.error
        return found


def follow(work: Callable[[Readings], Coroutine[Any, Any, None]]) -> None:
    """Do ``work`` with readings of their own."""

    async def run() -> None:
        calls = Calls(FakeDoor, Limits())
        await work(Readings(calls))
        calls.close()

    asyncio.run(run())


def test_followers_at_one_place_share_what_is_read_and_cut() -> None:
    log = Log(b"one\ntwo\nthr")

    async def work(readings: Readings) -> None:
        first, *others = await asyncio.gather(*(_next(readings, log, 0) for _ in range(20)))
        assert first is not None
        assert first.events == b"id: 0:4\ndata: one\n\nid: 0:8\ndata: two\n\n"
        assert all(other is first for other in others)
        assert await _next(readings, log, "later") is first
        log.data += b"ee\n"
        after = [await readings.next(0, "worker-0", first.cutter, n, log.read) for n in range(3)]
        assert [piece and piece.events for piece in after] == [b"id: 0:14\ndata: three\n\n"] * 3

    follow(work)
    assert log.read_from == [0, 11]


def test_who_stands_elsewhere_has_a_reading_of_his_own() -> None:
    log = Log(b"one\ntwo\n")

    async def work(readings: Readings) -> None:
        places = [(0, "worker-0", 0), (0, "worker-0", 4), (0, "worker-1", 0), (1, "worker-0", 0)]
        pieces = [
            await readings.next(attempt, name, LineCutter(at), 0, log.read) for attempt, name, at in places
        ]
        assert [piece and piece.events.partition(b"\n")[0] for piece in pieces] == [
            b"id: 0:4",
            b"id: 0:8",
            b"id: 0:4",
            b"id: 1:4",
        ]

    follow(work)
    assert log.read_from == [0, 4, 0, 0]


def test_that_there_was_nothing_is_no_answer_for_who_knows_more() -> None:
    log = Log()

    async def work(readings: Readings) -> None:
        log.may.clear()
        early = [asyncio.ensure_future(_next(readings, log, "runs")) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.to_thread(until, lambda: log.read_from, "the look")
        log.data = b"last\n"
        late = asyncio.ensure_future(_next(readings, log, "has ended"))
        await asyncio.sleep(0)
        log.may.set()
        assert await asyncio.gather(*early) == [None, None]
        found = await late
        assert found is not None
        assert found.events == b"id: 0:5\ndata: last\n\n"

    follow(work)
    assert log.read_from == [0, 0]


def test_one_who_leaves_does_not_take_the_reading_with_him() -> None:
    log = Log(b"one\n")

    async def work(readings: Readings) -> None:
        log.may.clear()
        first, second = (asyncio.ensure_future(_next(readings, log, 0)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        log.may.set()
        assert await second is not None
        assert first.cancelled()

    follow(work)
    assert log.read_from == [0]


def test_a_reading_that_failed_is_made_again() -> None:
    log = Log(b"one\n")

    async def work(readings: Readings) -> None:
        log.error = OSError("a disk")
        with pytest.raises(OSError, match="a disk"):
            await _next(readings, log, 0)
        log.error = None
        assert await _next(readings, log, 0) is not None

    follow(work)


def test_only_the_last_readings_are_kept() -> None:
    log = Log(b"line\n" * 1000)

    async def work(readings: Readings) -> None:
        for at in range(0, 5 * 3 * KEPT, 5):
            await readings.next(0, "worker-0", LineCutter(at), 0, log.read)
        assert len(readings._kept) == KEPT

    follow(work)


async def _next(readings: Readings, log: Log, since: object) -> Piece | None:
    return await readings.next(0, "worker-0", LineCutter(0), since, log.read)


def test_followers_to_whom_something_is_new_take_turns_with_the_rest(tmp_path: Path) -> None:
    """Whatever else the event loop has to do comes to its turn between any two of them."""
    turns, taken_in = [0], []

    async def run() -> None:
        calls = Calls(FakeDoor, Limits())
        watchers = Watchers(calls, Limits(), lambda job_id, attempt: LogFiles(tmp_path, job_id, attempt))
        ticking = asyncio.ensure_future(tick())
        jobs = (adas_job(), adas_job().model_copy(update={"id": "other-1"}))
        with watchers.following(jobs[0]) as first, watchers.following(jobs[1]) as second:
            await asyncio.gather(*(take(watcher) for watcher in (first, second) * 25))
        ticking.cancel()
        watchers.close()
        calls.close()

    async def tick() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def take(watcher: Watcher) -> None:
        await watcher.turn()
        taken_in.append(turns[0])

    asyncio.run(run())
    assert len(taken_in) == len(set(taken_in)) == 50


def test_all_followers_of_a_log_get_every_byte_once(api: Api) -> None:
    api.door.put(adas_job())
    write_log(api.home, b"0\n1\n2\n")
    lines = [str(number) for number in range(300)]
    streams = [api.live(FOLLOW, headers={"Last-Event-ID": f"0:{2 * (n % 3)}"}) for n in range(12)]
    answers = [stream.__enter__() for stream in streams]
    for number in range(3, 300):
        write_log(api.home, f"{number}\n".encode()[: 1 + number % 2])
        write_log(api.home, f"{number}\n".encode()[1 + number % 2 :])
    api.door.becomes("digits-ab12cd", JobState.SUCCEEDED)
    until(lambda: all(answer.over for answer in answers), "the end of all")
    for stream in streams:
        stream.__exit__(None, None, None)
    for number, answer in enumerate(answers):
        found = [event["data"] for event in events_in(answer.text) if event.get("event") != "end"]
        assert found == lines[number % 3 :]
