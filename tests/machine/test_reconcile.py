"""What is there is compared with what the store knows: strangers go, and nobody is taken for one who is only new."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from raycontrol.errors import StoreError
from raycontrol.events import InstanceNoted
from raycontrol.status import JobState
from tests.machine.fake_cluster import Site, in_loop
from tests.machine.test_controller import STAYS, TRAINS, finish, locked, site

pytestmark = pytest.mark.timeout(60)


async def running(tmp_path: Path, job_id: str = "digits-1", **spec: Any) -> Site:
    here = site(tmp_path, STAYS, hosts=("a", "b", "c", "d"))
    await here.submit(job_id, **spec)
    await here.reaches(job_id, JobState.RUNNING)
    return here


async def stop_all(here: Site) -> None:
    for job in await here.controller.jobs(None, None, None):
        await here.controller.stop(job.id, "seen enough")
        await here.ends(job.id)
    await finish(here)


@in_loop
async def test_a_stranger_is_removed_and_a_running_job_is_left_alone(tmp_path: Path) -> None:
    here = await running(tmp_path)
    here.cluster.gangs["digits-0.7"] = {}
    here.cluster.gangs["digits-1.-1"] = {}
    await here.controller._caretaker.remove_strangers()
    assert list(here.cluster.gangs) == ["digits-1.0"]
    assert [call for call in here.cluster.calls if call.startswith("remove")] == [
        "remove digits-0.7",
        "remove digits-1.-1",
    ]
    assert (await here.controller.info("digits-1")).state is JobState.RUNNING
    await stop_all(here)


@in_loop
async def test_a_stranger_that_cannot_be_removed_keeps_no_other_one_there(tmp_path: Path) -> None:
    here = await running(tmp_path)
    here.cluster.gangs["digits-0.7"] = {}
    here.cluster.gangs["digits-0.8"] = {}
    here.cluster.trouble["remove"] = [TimeoutError("its node does not answer")]
    await here.controller._caretaker.remove_strangers()
    assert sorted(here.cluster.gangs) == ["digits-0.7", "digits-1.0"]
    await here.controller._caretaker.remove_strangers()
    assert list(here.cluster.gangs) == ["digits-1.0"]
    await stop_all(here)


@in_loop
async def test_strangers_are_looked_for_again_and_again(tmp_path: Path) -> None:
    here = await running(tmp_path)
    reconciling = asyncio.ensure_future(here.controller._caretaker.reconcile(every_s=0.01))
    for number in range(3):
        here.cluster.gangs[f"digits-0.{number}"] = {}
        while len(here.cluster.gangs) > 1:
            await asyncio.sleep(0.01)
    reconciling.cancel()
    await stop_all(here)


@in_loop
async def test_a_job_that_comes_while_the_cluster_is_looked_at_is_no_stranger(tmp_path: Path) -> None:
    here = await running(tmp_path)
    here.cluster.looking.clear()
    looking = asyncio.ensure_future(here.controller._caretaker.remove_strangers())
    await here.submit("digits-2")
    await here.reaches("digits-2", JobState.RUNNING)
    here.cluster.looking.set()
    await looking
    assert sorted(here.cluster.gangs) == ["digits-1.0", "digits-2.0"]
    await stop_all(here)


@in_loop
async def test_a_reservation_under_way_is_no_stranger(tmp_path: Path) -> None:
    """What is found of it was made after it was stored; a look in between finds the job that it belongs to."""
    here = site(tmp_path, TRAINS)
    await here.controller.started()
    seen: list[str] = []
    reserve = here.cluster.reserve_gang

    def reserve_and_look(job: Any) -> None:
        reserve(job)
        looked = asyncio.ensure_future(here.controller._caretaker.remove_strangers())
        looked.add_done_callback(lambda _: seen.append(job.attempt_id))

    here.cluster.reserve_gang = reserve_and_look  # type: ignore[method-assign]
    await here.submit("digits-1")
    assert (await here.ends("digits-1")).state is JobState.SUCCEEDED
    assert seen == ["digits-1.0"]
    await finish(here)


@in_loop
async def test_nodes_that_are_kept_for_the_next_attempt_are_no_strangers(tmp_path: Path) -> None:
    here = await running(tmp_path, retry={"max": 1})
    here.cluster.find("digits-1.0", "worker-0")._end(code=3)
    await here.shows("digits-1", lambda info: info.attempt == 1 and info.state is JobState.RUNNING)
    assert here.controller._ledger.jobs["digits-1"].group_id == "digits-1.0"
    here.cluster.gangs["digits-1.0"] = {}  # as Ray shows it: the group has the name of the first reservation
    await here.controller._caretaker.remove_strangers()
    assert sorted(here.cluster.gangs) == ["digits-1.0", "digits-1.1"]
    del here.cluster.gangs["digits-1.0"]
    await stop_all(here)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("json_set(doc, '$.attempt', 'x')", id="in the job"),
        pytest.param("json_set(doc, '$.spec.of_a_later_version', 1)", id="in its spec"),
    ],
)
def test_a_job_that_cannot_be_read_runs_on_and_is_taken_up_again_when_it_can(
    tmp_path: Path, fault: str
) -> None:
    @in_loop
    async def runs_on(home: Path) -> None:
        here = await running(home)
        await here.kill()
        doc = exchange(home, fault)
        controller = await here.restart()
        await controller._caretaker.remove_strangers()
        sent_at = here.cluster.now()
        note = InstanceNoted(sent_at, "digits-1.0", "master-0", "its GPU is idle")
        with pytest.raises(StoreError, match="digits-1 cannot be read"):
            await controller.report(sent_at, [note])
        assert list(here.cluster.gangs) == ["digits-1.0"]
        await here.kill()
        exchange(home, "?", doc)
        await here.restart()
        assert (await here.controller.info("digits-1")).state is JobState.RUNNING
        await stop_all(here)

    runs_on(tmp_path)


def exchange(home: Path, expression: str, *values: str) -> str:
    """Store another text of the only job; return the one that was there."""
    with sqlite3.connect(home / "store.db") as other:
        ((doc,),) = other.execute("SELECT doc FROM jobs").fetchall()
        other.execute(f"UPDATE jobs SET doc = {expression}", values)
    return str(doc)


@in_loop
async def test_who_has_lost_the_lease_removes_nothing(tmp_path: Path) -> None:
    here = await running(tmp_path)
    here.cluster.gangs["west-1.0"] = {}  # what a successor has made
    with sqlite3.connect(tmp_path / "store.db") as other:
        other.execute("UPDATE leases SET token = 'of the successor'")
    with pytest.raises(StoreError):
        await here.controller._caretaker.remove_strangers()
    assert sorted(here.cluster.gangs) == ["digits-1.0", "west-1.0"]
    await here.kill()


@in_loop
async def test_a_locked_store_delays_the_removal(tmp_path: Path) -> None:
    here = await running(tmp_path)
    here.cluster.gangs["digits-0.7"] = {}
    with locked(tmp_path):
        removing = asyncio.ensure_future(here.controller._caretaker.remove_strangers())
        done, _ = await asyncio.wait([removing], timeout=0.2)
        assert not done and "digits-0.7" in here.cluster.gangs
    await asyncio.wait_for(removing, 10)
    assert sorted(here.cluster.gangs) == ["digits-1.0"]
    await stop_all(here)
