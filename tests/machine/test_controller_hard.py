"""The controller against what a reading of its code feared: strange ids, rows it cannot read, stalls, silent nodes."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from raycontrol.caretaker import is_missing
from raycontrol.demands import STOP_SLACK_S, deadline
from raycontrol.duties import Duties, lost
from raycontrol.errors import StoreError, UsageError
from raycontrol.events import InstanceLost, InstanceNoted
from raycontrol.placement import Node
from raycontrol.retention import Limits
from raycontrol.spec import Timeouts
from raycontrol.status import JobState, Reason
from tests.machine.fake_cluster import FakeCluster, Site, in_loop, submission
from tests.machine.test_controller import STAYS, finish, site
from tests.unit import lifecycle_jobs as jobs
from tests.unit.fake_gangs import nodes

pytestmark = pytest.mark.timeout(60)


@in_loop
async def test_an_id_that_could_lead_elsewhere_is_refused(tmp_path: Path) -> None:
    here = site(tmp_path)
    for job_id in ("team/run1", "/home/me/data", "a:b", "..", "", "x" * 81, "tab\t"):
        with pytest.raises(UsageError, match="job id"):
            await here.controller.submit(submission(job_id))
    assert await here.controller.jobs(None, None, None) == []
    await finish(here)


@in_loop
async def test_a_row_that_cannot_be_read_hides_no_other_job(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("old-1")
    await here.reaches("old-1", JobState.RUNNING)
    controller = await here.restart()
    await controller.stop("old-1", "enough")
    await here.ends("old-1")
    await here.submit("new-1")
    with sqlite3.connect(tmp_path / "store.db") as other:
        for (name,) in other.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            other.execute(f"DROP TRIGGER {name}")
        other.execute("UPDATE jobs SET doc = '{}' WHERE id = 'old-1'")
    assert [info.id for info in await controller.jobs(None, None, None)] == ["new-1"]
    await controller.stop("new-1", "enough")
    await here.ends("new-1")
    await finish(here)


@in_loop
async def test_what_the_store_will_never_take_does_not_keep_other_jobs_waiting(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    for job_id in ("poison-1", "fine-1"):
        await here.submit(job_id, nodes=1)
        await here.reaches(job_id, JobState.RUNNING)
    controller = await here.restart()
    await here.reaches("fine-1", JobState.RUNNING)
    with sqlite3.connect(tmp_path / "store.db") as other:
        other.execute("DELETE FROM jobs WHERE id = 'poison-1'")
    note = InstanceNoted(here.cluster.now(), "poison-1.0", "master-0", "nobody will ever read this")
    await asyncio.wait_for(controller.report(here.cluster.now(), [note]), 10)
    await controller.stop("fine-1", "enough")
    assert (await here.ends("fine-1")).state is JobState.STOPPED
    await here.kill()


@in_loop
async def test_time_in_which_the_store_was_stuck_is_not_taken_from_a_jobs_limits(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    controller = here.controller
    ledger = controller._ledger
    running = ledger.jobs["digits-1"]
    stopping = replace(running, state=JobState.STOPPING, since=1000.0)
    limited = replace(
        running, spec=running.spec.model_copy(update={"timeouts": Timeouts(run_s=60)}), since=1000.0
    )
    ledger._lags["digits-1"] = 500.0  # as if storing had taken so long
    assert deadline(stopping) == 1000.0 + running.spec.timeouts.grace_s + STOP_SLACK_S
    assert ledger._deadline(stopping) == 1500.0 + running.spec.timeouts.grace_s + STOP_SLACK_S
    assert ledger._deadline(limited) == 1060.0  # a limit of the user's own is not moved
    await controller.stop("digits-1", "enough")
    await here.ends("digits-1")
    assert ledger._lags == {}
    await finish(here)


@in_loop
async def test_an_instance_whose_node_is_gone_is_lost_though_its_actor_never_said_so(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    controller = here.controller
    here.cluster.hidden.add("id-of-b")
    await controller._caretaker.look_for_lost_nodes()
    assert (await controller.info("digits-1")).state is JobState.RUNNING  # one look is no proof
    await controller._caretaker.look_for_lost_nodes()
    ended = await here.ends("digits-1")
    assert (ended.state, ended.reason) == (JobState.FAILED, Reason.INSTANCE_LOST)
    assert ended.verdict is not None and "its node left the cluster" in ended.verdict.summary
    await here.kill()


@in_loop
async def test_a_node_that_ray_has_no_record_of_is_not_lost_while_its_actor_answers(tmp_path: Path) -> None:
    """As long as a Ray that has just started again does not know all of its nodes."""
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    here.cluster.hidden.add("id-of-b")
    here.cluster.heartbeats.add("id-of-b")
    for _ in range(3):
        await here.controller._caretaker.look_for_lost_nodes()
    assert (await here.controller.info("digits-1")).state is JobState.RUNNING
    here.cluster.hidden.clear()
    await here.controller.stop("digits-1", "seen enough")
    await here.ends("digits-1")
    await finish(here)


@in_loop
async def test_an_instance_is_lost_though_nobody_can_say_whether_its_node_lives(tmp_path: Path) -> None:
    """Its duty is to tell of it, and there is nobody else to: its node is there."""
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    here.cluster.trouble["may_run_on"] = [ConnectionError("no answer"), ConnectionError("no answer")]
    here.cluster.find("digits-1.0", "worker-0").die()
    ended = await here.ends("digits-1")
    assert (ended.state, ended.reason) == (JobState.FAILED, Reason.INSTANCE_LOST)
    await finish(here)


@in_loop
async def test_one_node_of_which_nobody_can_say_whether_it_lives_hides_no_other_loss(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    for job_id in ("digits-1", "digits-2"):
        await here.submit(job_id, nodes=1)
        await here.reaches(job_id, JobState.RUNNING)
    here.cluster.hidden |= {"id-of-a", "id-of-b"}
    here.cluster.trouble["may_run_on"] = [ConnectionError("no answer")]
    await here.controller._caretaker.look_for_lost_nodes()
    await here.controller._caretaker.look_for_lost_nodes()
    assert [(await here.ends(job_id)).reason for job_id in ("digits-1", "digits-2")] == [
        Reason.INSTANCE_LOST,
        Reason.INSTANCE_LOST,
    ]
    await here.kill()


@in_loop
async def test_what_nobody_can_say_counts_as_may_run_on(tmp_path: Path) -> None:
    cluster = FakeCluster(nodes("a", "b"))
    cluster.trouble["may_run_on"] = [ConnectionError("no answer")]
    event = await lost(cluster, lambda: 1020.0, jobs.running(), "worker-0", "its actor died")
    assert event == InstanceLost(1020.0, "digits-1.0", "worker-0", "its actor died", 1070.0)


@in_loop
async def test_a_duty_that_fails_in_a_way_that_nobody_foresaw_is_carried_out_again(tmp_path: Path) -> None:
    one_cpu = {"CPU": 1.0}
    cluster = FakeCluster(
        [Node(f"node-{one}", f"host-{one}", "10.0.0.1", one_cpu, one_cpu) for one in ("a", "b")]
    )
    cluster.reserve_gang(jobs.placing())
    faults = [KeyError("digits-1"), KeyError("digits-1")]

    def secrets(job_id: str) -> dict[str, str]:
        if faults:
            raise faults.pop()
        return {}

    duties = Duties(cluster, cluster.now, lambda job_id, event: None, secrets)
    duties.keep(jobs.starting())
    await asyncio.wait_for(_until_called(cluster, {"stage 0 master-0", "stage 0 worker-0"}), 10)


async def _until_called(cluster: FakeCluster, calls: set[str]) -> None:
    while set(cluster.calls) != calls:
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("record", "answers", "missing"),
    [
        ("it lives", True, False),
        ("it lives", False, False),
        ("it is dead", True, True),
        ("it is dead", False, True),
        ("none", True, False),
        ("none", False, True),
    ],
)
def test_when_a_node_is_missing_by_what_ray_says_and_by_its_own_answer(
    record: str, answers: bool, missing: bool
) -> None:
    lives = {"it lives": True, "it is dead": False, "none": None}[record]
    assert is_missing(lives, answers) is missing


@in_loop
async def test_a_controller_removes_what_ended_jobs_may_no_longer_keep(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    for job_id in ("old-1", "new-1"):
        await here.submit(job_id, nodes=1)
    await here.reaches("old-1", JobState.RUNNING)
    await here.controller.stop("old-1", "enough")
    await here.ends("old-1")
    await here.kill()
    here.controller = here._new()
    here.controller._caretaker._limits = lambda: Limits(keep_days=0)
    await here.controller.started()
    await asyncio.wait_for(_until_gone(here, "old-1"), 10)
    assert [info.id for info in await here.controller.jobs(None, None, None)] == ["new-1"]
    assert here.cluster.removed_stored == ["old-1"]
    await here.controller.stop("new-1", "enough")
    await here.ends("new-1")
    await finish(here)


@in_loop
async def test_what_the_archive_kept_of_a_removed_job_while_it_was_down_is_removed_later(
    tmp_path: Path,
) -> None:
    here = site(tmp_path)
    await here.submit("digits-1")
    await here.ends("digits-1")
    here.cluster.stored_sizes = {"digits-1": 10 << 30, "of-another-store-1": 5}
    here.cluster.trouble["remove_stored"] = [StoreError("the archive restarts")]
    with pytest.raises(StoreError):
        await here.controller.prune(["digits-1"])
    assert (await here.controller.find("digits-1"), here.cluster.removed_stored) == ([], [])
    await here.restart()
    await asyncio.wait_for(_until_gone(here, "digits-1"), 10)
    assert here.cluster.removed_stored == ["digits-1"]
    await finish(here)


async def _until_gone(here: Site, job_id: str) -> None:
    while job_id in await here.controller.find(job_id) or not here.cluster.removed_stored:
        await asyncio.sleep(0.02)
