"""Choosing nodes with the real controller on a real store: what people say of nodes, and what nodes say of themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raycontrol.errors import UsageError
from raycontrol.hardware import NodeState
from raycontrol.queue import Rules
from raycontrol.status import JobInfo, JobState, Wish
from tests.machine.fake_cluster import FakeCluster, Site, in_loop, submission
from tests.node_facts import cpu_facts, gpu_facts
from tests.unit.fake_gangs import Program, nodes

STAYS = {f"worker-{n}": Program(seconds=None) for n in range(3)} | {"master-0": Program(seconds=None)}


def site(home: Path, hosts: str = "abc") -> Site:
    return Site(home, FakeCluster(nodes(*hosts, cpu=1), STAYS))


async def runs(here: Site, job_id: str, **spec: Any) -> list[str]:
    """Submit a job; return the nodes that it runs on, in the order of INDEX."""
    await here.submit(job_id, **spec)
    return on(await here.reaches(job_id, JobState.RUNNING))


def on(info: JobInfo) -> list[str]:
    return [item.node for item in info.instances]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


async def waits(here: Site, job_id: str, part: str) -> str:
    """Return why the job waits, when that has this in it."""
    found = await here.shows(job_id, lambda info: part in (info.pending or ""))
    return found.pending or ""


async def finish(here: Site, *job_ids: str) -> None:
    for job_id in job_ids:
        await here.controller.stop(job_id, "seen enough", True)
    for job_id in job_ids:
        await here.ends(job_id)
    assert here.cluster.faults == []
    assert here.cluster.left_over() == []
    await here.kill()


@in_loop
async def test_a_range_takes_what_is_free_and_decides_anew_after_a_suspension(tmp_path: Path) -> None:
    here = site(tmp_path)
    assert await runs(here, "one-1", nodes=1) == ["a"]
    assert await runs(here, "range-1", nodes="1-4") == ["b", "c"]
    await here.controller.wish("range-1", Wish.SUSPEND, "suspended")
    await here.shows("range-1", lambda info: info.state is JobState.QUEUED)
    await here.controller.stop("one-1", "seen enough", True)
    await here.ends("one-1")
    await here.controller.wish("range-1", Wish.RESUME, "resumed")
    assert on(await here.reaches("range-1", JobState.RUNNING)) == ["a", "b", "c"]
    await finish(here, "range-1")


@in_loop
async def test_an_offline_node_keeps_its_job_and_gets_no_other_also_after_a_restart(tmp_path: Path) -> None:
    here = site(tmp_path, "ab")
    await here.controller.started()
    assert await runs(here, "first-1", nodes=1) == ["a"]
    seen = (await here.story("first-1"))[-1].seq
    (mark,) = await here.controller.roster.set_offline(["10.0.0.1"], "fan", "root")
    assert (mark.name, mark.reason, mark.by, mark.absent) == ("a", "fan", "root", False)
    (told,) = await here.controller.events("first-1", seen, timeout_s=10)
    assert told.message == "a is offline: fan (root); this attempt may end there"
    states = [(node.name, node.state, node.jobs) for node in await here.controller.nodes()]
    assert states == [("a", NodeState.DRAINING, ("first-1",)), ("b", NodeState.ONLINE, ())]
    await here.restart()
    await here.submit("wide-1", nodes=2)
    assert (await waits(here, "wide-1", "offline")).endswith("1 of 2 nodes is excluded: 1 offline")
    await here.controller.stop("first-1", "seen enough", True)
    await here.ends("first-1")
    (first, _) = await here.controller.nodes()
    assert (first.state, first.offline and first.offline.reason) == (NodeState.OFFLINE, "fan")
    assert await here.controller.roster.set_online(["a"], "root") == ["a"]
    assert on(await here.reaches("wide-1", JobState.RUNNING)) == ["a", "b"]
    await finish(here, "wide-1")


@in_loop
async def test_a_name_that_no_node_has_yet_may_be_set_offline_but_not_online(tmp_path: Path) -> None:
    here = site(tmp_path, "ab")
    await here.controller.started()
    roster = here.controller.roster
    (mark,) = await roster.set_offline(["host-x"], "not mounted yet", "root")
    assert mark.absent
    await roster.set_offline(["a"], "fan", "root")
    assert [(one.name, one.absent) for one in await roster.offline()] == [("a", False), ("host-x", True)]
    await roster.set_online(["a"], "root")
    assert await roster.set_online(["host-x"], "root") == ["host-x"]
    with pytest.raises(UsageError, match="no node 'host-x' is there or offline"):
        await roster.set_online(["host-x"], "root")
    with pytest.raises(UsageError, match="'id-of' is the beginning of several nodes' ids: id-of-a, id-of-b"):
        await roster.set_offline(["id-of"], "which one", "root")
    assert await roster.offline() == []
    with pytest.raises(UsageError, match="reason: must be 1 to 500 printable characters, got ' '"):
        await roster.set_offline(["a"], " ", "root")
    await here.kill()


@in_loop
async def test_a_group_is_chosen_by_its_name_and_one_that_there_is_not_is_refused(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.controller.started()
    roster = here.controller.roster
    group = await roster.add_to_group("train", ["b", "10.0.0.3", "later"], "root")
    assert (group.nodes, group.absent) == (("b", "c", "later"), ("later",))
    with pytest.raises(UsageError, match="node_group: there is no group 'tarin' of nodes; known: train"):
        await here.submit("wrong-1", node_group="tarin")
    with pytest.raises(UsageError, match="there is no group 'tarin'"):
        await here.controller.doubts(submission("wrong-1", node_group="tarin").spec)
    assert await runs(here, "two-1", node_group="train") == ["b", "c"]
    assert [found.groups for found in await here.controller.nodes()] == [(), ("train",), ("train",)]
    await here.restart()
    roster = here.controller.roster
    with pytest.raises(UsageError, match="'a' is not in the group train; it has b, c, later"):
        await roster.remove_from_group("train", ["a"], "root")
    assert (await roster.remove_from_group("train", ["later"], "root")).nodes == ("b", "c")
    assert (await roster.remove_from_group("train", None, "root")).nodes == ()
    assert await roster.groups() == []
    await finish(here, "two-1")


@in_loop
async def test_facts_are_asked_of_nodes_when_a_job_wants_them(tmp_path: Path) -> None:
    here = site(tmp_path)
    here.cluster.answers = {"id-of-a": cpu_facts(), "id-of-b": gpu_facts(), "id-of-c": None}
    wanted = {"gpu_model": "H100", "gpu_memory_gib": ">= 80", "rdma": "true"}
    assert await runs(here, "fast-1", nodes=1, where=wanted) == ["b"]
    await here.submit("more-1", nodes=2, where=wanted)
    why = await waits(here, "more-1", "by where")
    assert why.endswith("2 of 3 nodes are excluded: 1 by where gpu_model, 1 whose gpu_model is not known yet")
    await finish(here, "fast-1", "more-1")


@in_loop
async def test_doubts_wait_for_what_nodes_say_of_themselves(tmp_path: Path) -> None:
    here = site(tmp_path)
    here.cluster.answers = {f"id-of-{name}": gpu_facts() for name in "abc"}
    await here.controller.started()
    fits = submission("a-1", nodes=3, where={"gpu_model": "H100"}).spec
    assert await here.controller.doubts(fits) is None
    lacking = await here.controller.doubts(submission("a-1", nodes=1, where={"gpu_model": "A100"}).spec)
    assert lacking is not None and lacking.endswith("3 of 3 nodes are excluded: 3 by where gpu_model")
    await here.kill()


@in_loop
async def test_an_exclusive_job_shares_its_nodes_with_nobody(tmp_path: Path) -> None:
    here = Site(tmp_path, FakeCluster(nodes("a", "b", cpu=4), STAYS))
    assert await runs(here, "alone-1", nodes=1, exclusive=True) == ["a"]
    assert await runs(here, "other-1", nodes=1) == ["b"]
    await here.submit("wide-1", nodes=2)
    assert "alone-1 has nodes alone" in await waits(here, "wide-1", "needs 2")
    await here.submit("alone-2", nodes=1, exclusive=True, priority=0)
    assert (await waits(here, "alone-2", "needs 1")).endswith("other jobs are there: alone-1, other-1")
    await finish(here, "wide-1", "alone-2", "other-1", "alone-1")


@in_loop
async def test_ranks_follow_the_labels_of_the_settings(tmp_path: Path) -> None:
    racks = {"a": "r2", "b": "r1", "c": "r2", "d": "r1"}
    rooms = [replace(node, labels={"rack": racks[node.name]}) for node in nodes(*"abcd", cpu=1)]
    here = Site(tmp_path, FakeCluster(rooms, STAYS))
    here.rules = Rules(topology=("rack",))
    assert await runs(here, "wide-1", nodes=4) == ["b", "d", "a", "c"]
    await finish(here, "wide-1")


@in_loop
async def test_a_node_that_is_set_offline_while_a_job_is_being_placed_there_is_told_of(
    tmp_path: Path,
) -> None:
    here = site(tmp_path, "a")
    here.cluster.hidden.add("id-of-a")
    await here.submit("first-1", nodes=1)
    await waits(here, "first-1", "no living node")
    busy = threading.Event()
    held = here.controller._held
    store_waits = asyncio.ensure_future(held.ask(lambda store: busy.wait(10)))
    offline = asyncio.ensure_future(here.controller.roster.set_offline(["a"], "fan", "root"))
    ledger, scheduler = here.controller._ledger, here.controller._scheduler
    await until(here.controller.roster._changing.locked)  # the mark stands in the store's line
    here.cluster.hidden.clear()
    ledger.look.set()
    await until(lambda: not scheduler._waits and ledger._inbox.empty())  # so do the job's nodes, behind it
    busy.set()
    await asyncio.gather(store_waits, offline)
    told = await here.shows("first-1", lambda info: info.state is JobState.RUNNING)
    assert on(told) == ["a"]
    assert any("a is offline: fan" in event.message for event in await here.story("first-1"))
    await finish(here, "first-1")
