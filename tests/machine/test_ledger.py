"""What of several jobs meets in one commit, or beside one, with a real store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from raycontrol.accessrows import Belongings
from raycontrol.events import MemberChosen, NodesReleased, StopRequested
from raycontrol.heldstore import HeldStore
from raycontrol.job import Job
from raycontrol.ledger import Ledger
from raycontrol.placement import Assignment
from raycontrol.spec import JobSpec, Retry
from raycontrol.status import JobState, Note, Reason, Verdict
from tests.machine.fake_cluster import FakeCluster, in_loop
from tests.unit.fake_gangs import nodes

ROOM = (Assignment("master-0", "id-of-host-a", "host-a", "10.0.0.1"),)


def job(job_id: str, **spec: Any) -> Job:
    wanted = JobSpec(name=job_id, command="true", retry=Retry(infra_max=0), **spec)
    return Job(job_id, "east", wanted, "ada", submitted_at=1000.0, since=1000.0, queued_at=1000.0)


@asynccontextmanager
async def ledger(home: Path) -> AsyncIterator[tuple[Ledger, HeldStore]]:
    held = HeldStore(home, "east", lambda: 1000.0)
    await held.take()
    found = Ledger(held, FakeCluster(nodes("host-a"), {}), lambda: 1000.0)
    loops = [asyncio.ensure_future(loop) for loop in (found.take_arrivals(), found.take_events())]
    try:
        yield found, held
    finally:
        for loop in loops:
            loop.cancel()


async def add(here: Ledger, new: Job) -> None:
    note = Note(
        at=1000.0, attempt=0, state=new.state, reason=new.reason, message="submitted", kind="Submitted"
    )
    await here.add(new, note, Belongings())


async def until(true: Any) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


@in_loop
async def test_a_job_that_comes_while_the_end_it_waits_for_is_being_stored_is_told(tmp_path: Path) -> None:
    async with ledger(tmp_path) as (here, held):
        await add(here, job("first-1", array={"indices": "0-1"}))
        busy = threading.Event()
        store_waits = asyncio.ensure_future(held.ask(lambda store: busy.wait(10)))
        arrives = asyncio.ensure_future(add(here, job("second-1", after={"any": ["first-1"]})))
        await asyncio.sleep(0)  # it stands in the store's line before the end does
        await until(lambda: here._arrivals.empty())
        ends = asyncio.ensure_future(here.tell("first-1", StopRequested(1001.0, "enough")))
        await until(lambda: here._inbox.empty())
        busy.set()
        await asyncio.gather(store_waits, arrives, ends)
        await until(lambda: here.jobs["second-1"].found_ends)
        assert here.jobs["second-1"].found_ends == {"first-1": JobState.STOPPED}
        assert "first-1" not in here.jobs


@in_loop
async def test_fail_fast_stops_a_member_that_begins_in_the_same_commit(tmp_path: Path) -> None:
    async with ledger(tmp_path) as (here, _):
        await add(here, job("sweep-1", array={"indices": "0-9", "fail_fast": True}))
        await here.tell("sweep-1", MemberChosen(1001.0, 0, ROOM, 50.0))
        first = here.jobs["sweep-1~0"]
        here._jobs["sweep-1~0"] = replace(
            first,
            state=JobState.STOPPING,
            after=JobState.FAILED,
            reason=Reason.INSTANCE_FAILED,
            verdict=Verdict(reason=Reason.INSTANCE_FAILED, summary="it exited 1"),
            instances=tuple(replace(item, closed=True) for item in first.instances),
        )
        here.post("sweep-1", MemberChosen(1002.0, 1, ROOM, 50.0))
        await here.tell("sweep-1~0", NodesReleased(1002.0, first.attempt_id))
        assert here.jobs["sweep-1"].state is JobState.STOPPING
        assert (here.jobs["sweep-1~1"].state, here.jobs["sweep-1~1"].after) == (
            JobState.STOPPING,
            JobState.STOPPED,
        )
