"""Arrays with the real controller on a real store: one job with many members, on a simulated cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from raycontrol.errors import JobNotFound, UsageError
from raycontrol.status import JobInfo, JobState, MemberInfo, Reason, Wish
from tests.machine.fake_cluster import FakeCluster, Site, in_loop
from tests.unit.fake_gangs import Program, nodes


def site(home: Path, cpu: float = 4, hosts: tuple[str, ...] = ("host-a", "host-b"), **program: Any) -> Site:
    programs = {"master-0": Program(**{"seconds": None, **program})}
    return Site(home, FakeCluster(nodes(*hosts, cpu=cpu), programs))


async def submit(here: Site, array: Any, job_id: str = "sweep-1", **spec: Any) -> JobInfo:
    return await here.submit(job_id, nodes=1, command="python train.py", array=array, **spec)


async def members_show(here: Site, **wanted: int) -> list[MemberInfo]:
    """Return the members when so many of them are in these states, and none in another."""
    for _ in range(200):
        found = await here.controller.members("sweep-1")
        if Counter(str(one.state) for one in found) == wanted:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"{Counter(str(one.state) for one in found)}")


@in_loop
async def test_an_array_is_one_job_and_its_members_run_as_there_is_room(tmp_path: Path) -> None:
    here = site(tmp_path, seconds=0.05, hosts=("host-a",))
    taken = await submit(here, "0-10:2,3")
    assert taken.array is not None
    assert (taken.state, taken.array.members, taken.array.begun) == (JobState.QUEUED, 7, 0)
    done = await here.ends("sweep-1")
    assert (done.state, done.reason, done.exit_code, done.exit_status) == (
        JobState.SUCCEEDED,
        Reason.COMPLETED,
        0,
        0,
    )
    members = await here.controller.members("sweep-1")
    assert [(one.index, one.state, one.exit_code) for one in members] == [
        (index, JobState.SUCCEEDED, 0) for index in (0, 2, 3, 4, 6, 8, 10)
    ]
    assert [info.id for info in await here.controller.jobs(None, None, None)] == ["sweep-1"]
    assert await here.controller.find("sweep") == ["sweep-1"]
    assert (await here.controller.info("sweep-1~6")).index == 6
    assert here.cluster.left_over() == []
    await here.kill()


@in_loop
async def test_so_many_run_at_once_as_the_array_allows_and_others_pass_the_rest(tmp_path: Path) -> None:
    here = site(tmp_path)
    await submit(here, "0-9%3")
    await members_show(here, RUNNING=3, QUEUED=7)
    waits = [(one.id, one.why) for one in await here.controller.queue()]
    assert waits == [("sweep-1", "3 members of its array run already, and `parallel` is 3")]
    await here.submit("other-1", nodes=1, command="python train.py")
    await here.reaches("other-1", JobState.RUNNING)
    await here.controller.stop("sweep-1~1", "by ada", True)
    found = await members_show(here, RUNNING=3, STOPPED=1, QUEUED=6)
    assert [one.index for one in found if one.state is JobState.RUNNING] == [0, 2, 3]
    await here.kill()


@in_loop
async def test_a_failed_member_fails_the_array_and_the_others_go_on(tmp_path: Path) -> None:
    here = site(tmp_path, seconds=0.05, code=3)
    await submit(here, "0-3%1")
    done = await here.ends("sweep-1")
    assert done.verdict is not None
    assert (done.state, done.exit_code, done.exit_status) == (JobState.FAILED, 3, 3)
    assert done.verdict.summary.startswith("member 0: master-0 on host-")
    assert [one.exit_code for one in await here.controller.members("sweep-1")] == [3, 3, 3, 3]
    await here.kill()


@in_loop
async def test_fail_fast_stops_the_others_and_begins_no_more(tmp_path: Path) -> None:
    here = site(tmp_path)
    await submit(here, {"indices": "0-9", "parallel": 3, "fail_fast": True})
    await members_show(here, RUNNING=3, QUEUED=7)
    here.cluster.find("sweep-1~1.0", "master-0").exit(7)
    done = await here.ends("sweep-1")
    assert (done.state, done.reason, done.exit_status) == (JobState.FAILED, Reason.INSTANCE_FAILED, 7)
    found = await members_show(here, STOPPED=9, FAILED=1)
    assert [one.index for one in found if one.id is not None] == [0, 1, 2]
    assert here.cluster.left_over() == []
    await here.kill()


@in_loop
async def test_a_member_is_tried_again_by_itself(tmp_path: Path) -> None:
    here = site(tmp_path, seconds=0.05, code=3, heals=1)
    await submit(here, "0-3%2", retry={"max": 1, "infra_max": 0})
    assert (await here.ends("sweep-1")).state is JobState.SUCCEEDED
    assert [one.attempt for one in await here.controller.members("sweep-1")] == [1, 1, 1, 1]
    await here.kill()


@in_loop
async def test_members_on_a_lost_node_begin_again_before_others_begin(tmp_path: Path) -> None:
    here = site(tmp_path, cpu=1)
    await submit(here, "0-5%2", retry={"infra_max": 1})
    await members_show(here, RUNNING=2, QUEUED=4)
    lost = (await here.controller.info("sweep-1~0")).instances[0].node
    here.cluster.lose_node(f"id-of-{lost}")
    again = await here.shows("sweep-1~0", lambda info: info.attempt == 1)
    assert [one.outcome for one in again.attempts] == ["LOST"]
    await here.controller.stop("sweep-1~1", "by ada", True)
    await here.reaches("sweep-1~0", JobState.RUNNING, timeout_s=30)
    found = await here.controller.members("sweep-1")
    assert [one.index for one in found if one.id is not None] == [0, 1]
    await here.kill()


@in_loop
async def test_controllers_come_and_go_and_every_member_runs_once(tmp_path: Path) -> None:
    here = site(tmp_path, cpu=2, seconds=0.1)
    await submit(here, "0-19%3")
    for _ in range(4):
        await here.restart()
        await asyncio.sleep(0.15)
    done = await here.ends("sweep-1")
    assert done.array is not None
    assert (done.state, done.array.succeeded) == (JobState.SUCCEEDED, 20)
    reserved = [call.removeprefix("reserve ") for call in here.cluster.calls if call.startswith("reserve")]
    assert {one.rpartition(".")[0] for one in reserved} == {f"sweep-1~{index}" for index in range(20)}
    assert [one.attempt for one in await here.controller.members("sweep-1")] == [0] * 20
    assert here.cluster.faults == []
    assert here.cluster.left_over() == []
    await here.kill()


@in_loop
async def test_a_stopped_array_stops_its_members_and_ends_with_them(tmp_path: Path) -> None:
    here = site(tmp_path)
    await submit(here, "0-99%3")
    await members_show(here, RUNNING=3, QUEUED=97)
    stopping = await here.controller.stop("sweep-1", "stopped by ada", False)
    assert stopping.state in (JobState.STOPPING, JobState.STOPPED)
    done = await here.ends("sweep-1")
    assert (done.state, done.exit_status) == (JobState.STOPPED, 130)
    members = await here.controller.members("sweep-1")
    assert Counter(one.state for one in members) == {JobState.STOPPED: 100}
    assert [one.index for one in members if one.id is not None] == [0, 1, 2]
    await here.kill()


@in_loop
async def test_a_held_array_begins_no_more_and_a_suspended_one_gives_its_nodes_back(tmp_path: Path) -> None:
    here = site(tmp_path)
    await submit(here, "0-5%2")
    await members_show(here, RUNNING=2, QUEUED=4)
    await here.controller.wish("sweep-1", Wish.HOLD, "held by ada")
    await here.controller.stop("sweep-1~0", "by ada", True)
    await members_show(here, RUNNING=1, STOPPED=1, QUEUED=4)
    assert [(one.id, one.why, one.held) for one in await here.controller.queue()] == [
        ("sweep-1", "held by ada", True)
    ]
    await here.controller.wish("sweep-1", Wish.RELEASE, "released by ada")
    await members_show(here, RUNNING=2, STOPPED=1, QUEUED=3)
    await here.controller.wish("sweep-1", Wish.SUSPEND, "suspended by ada")
    await members_show(here, STOPPED=1, QUEUED=5)
    assert here.cluster.left_over() == []
    await here.controller.wish("sweep-1", Wish.RESUME, "resumed by ada")
    found = await members_show(here, RUNNING=2, STOPPED=1, QUEUED=3)
    assert [(one.index, one.attempt) for one in found if one.state is JobState.RUNNING] == [(1, 1), (2, 1)]
    changed = await here.controller.set_priority("sweep-1", 1, "urgent")
    assert changed.priority == 1
    await here.kill()


@in_loop
async def test_a_held_array_can_be_suspended_and_one_of_which_a_member_was_resumed_again(
    tmp_path: Path,
) -> None:
    here = site(tmp_path)
    await submit(here, "0-5%2")
    await members_show(here, RUNNING=2, QUEUED=4)
    await here.controller.wish("sweep-1", Wish.HOLD, "held by ada")
    await here.controller.wish("sweep-1", Wish.SUSPEND, "suspended by ada")
    await members_show(here, QUEUED=6)
    assert here.cluster.left_over() == []
    await here.controller.wish("sweep-1~0", Wish.RESUME, "resumed by ada")
    await here.controller.wish("sweep-1", Wish.SUSPEND, "suspended by ada")
    await members_show(here, QUEUED=6)
    await here.controller.wish("sweep-1", Wish.RESUME, "resumed by ada")
    await members_show(here, RUNNING=2, QUEUED=4)
    await here.kill()


@in_loop
async def test_members_of_a_held_array_that_come_back_to_the_queue_wait(tmp_path: Path) -> None:
    here = site(tmp_path, cpu=4, hosts=("host-a",))
    await submit(here, "0-1%1", preemptible=True, priority=8)
    await members_show(here, RUNNING=1, QUEUED=1)
    await here.controller.wish("sweep-1", Wish.HOLD, "held by ada")
    await here.submit("urgent-1", nodes=1, priority=0, resources={"cpu": 4})
    await here.reaches("urgent-1", JobState.RUNNING)
    await here.controller.stop("urgent-1", "seen enough", True)
    await here.ends("urgent-1")
    await here.submit("next-1", nodes=1, priority=9, resources={"cpu": 4})
    await here.reaches("next-1", JobState.RUNNING)
    await members_show(here, QUEUED=2)
    await here.controller.stop("next-1", "seen enough", True)
    await here.controller.wish("sweep-1", Wish.RELEASE, "released by ada")
    await members_show(here, RUNNING=1, QUEUED=1)
    await here.kill()


@in_loop
async def test_an_array_can_wait_for_a_job_and_a_job_for_an_array(tmp_path: Path) -> None:
    here = site(tmp_path, seconds=0.05)
    here.cluster.hidden |= {"id-of-host-a", "id-of-host-b"}
    await here.submit("first-1", nodes=1, command="python prepare.py")
    await submit(here, "0-2", after={"ok": ["first-1"]})
    await here.submit("last-1", nodes=1, command="python sum.py", after={"ok": ["sweep-1"]})
    waits = await here.shows("sweep-1", lambda info: info.pending is not None)
    assert waits.pending == "waits for first-1 (QUEUED) to succeed"
    here.cluster.hidden.clear()
    assert (await here.ends("last-1")).state is JobState.SUCCEEDED
    await here.kill()


@in_loop
async def test_secrets_and_the_index_reach_every_member(tmp_path: Path) -> None:
    here = site(tmp_path, seconds=0.05)
    await submit(here, "3,5", secret_env={"TOKEN": "hush"})
    await here.ends("sweep-1")
    started = [order for order in here.cluster.orders if order.runs]
    found = {(one.environment["RAYCONTROL_ARRAY_INDEX"], one.secret_env["TOKEN"]) for one in started}
    assert found == {("3", "hush"), ("5", "hush")}
    await here.kill()


@in_loop
async def test_an_array_is_removed_with_its_members_and_not_without(tmp_path: Path) -> None:
    here = site(tmp_path, seconds=0.05)
    await submit(here, "0-2")
    await here.ends("sweep-1")
    await here.controller.prune(["sweep-1~1"])
    assert (await here.controller.info("sweep-1~1")).state is JobState.SUCCEEDED
    await here.controller.prune(["sweep-1"])
    with pytest.raises(JobNotFound):
        await here.controller.info("sweep-1~1")
    assert here.cluster.removed_stored[-4:] == ["sweep-1", "sweep-1~0", "sweep-1~1", "sweep-1~2"]
    await here.kill()


@in_loop
async def test_only_arrays_have_members(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("digits-1", nodes=1)
    with pytest.raises(UsageError, match="job digits-1 is no array"):
        await here.controller.members("digits-1")
    with pytest.raises(JobNotFound):
        await here.controller.members("never-1")
    with pytest.raises(UsageError, match="at most 72 characters"):
        await submit(here, "0-2", job_id="a" * 73)
    await here.kill()
