"""The controller on a real store, with a simulated cluster."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raycontrol.controller import Controller
from raycontrol.errors import JobNotFound, StoreError, StoreOwned, VersionMismatch
from raycontrol.events import InstanceNoted, InstancePrepared, Report, RunExited, ServiceEnded, StagePassed
from raycontrol.job import Ended
from raycontrol.status import InstanceState, JobState, Reason
from raycontrol.steadyclock import Moment
from raycontrol.version import __version__
from tests.machine.fake_cluster import FakeCluster, Site, WriteStop, in_loop, submission
from tests.unit.fake_gangs import Program, nodes

pytestmark = pytest.mark.timeout(60)

TRAINS = {"master-0": Program(seconds=0.02), "worker-0": Program(seconds=0.02)}
STAYS = {"master-0": Program(seconds=None), "worker-0": Program(seconds=None)}


def site(home: Path, programs: dict[str, Program] | None = None, hosts: tuple[str, ...] = ("a", "b")) -> Site:
    return Site(home, FakeCluster(nodes(*hosts, cpu=1), TRAINS if programs is None else programs))


async def finish(here: Site) -> None:
    """What every test ends with: nothing broken, nothing reserved, the controller gone."""
    assert here.cluster.faults == []
    assert here.cluster.left_over() == []
    await here.kill()


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Another program holds the store's write lock."""
    with sqlite3.connect(home / "store.db", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@contextmanager
def refusing(home: Path) -> Iterator[None]:
    """The store takes no change of a job, as on a disk that is full."""
    with sqlite3.connect(home / "store.db", isolation_level=None, timeout=10) as other:
        other.execute(
            "CREATE TRIGGER no_room BEFORE UPDATE ON jobs BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
        )
        yield
        other.execute("DROP TRIGGER no_room")


# A job's way.


@in_loop
async def test_a_job_is_queued_placed_run_and_cleaned_up(tmp_path: Path) -> None:
    here = site(tmp_path)
    submitted = await here.submit("digits-1")
    assert (submitted.state, submitted.reason, submitted.user) == (JobState.QUEUED, Reason.SUBMITTED, "ada")
    ended = await here.ends("digits-1")
    assert (ended.state, ended.reason, ended.exit_code) == (JobState.SUCCEEDED, Reason.COMPLETED, 0)
    assert [(i.name, i.node, i.state, i.exit_code) for i in ended.instances] == [
        ("master-0", "a", InstanceState.EXITED, 0),
        ("worker-0", "b", InstanceState.EXITED, 0),
    ]
    assert ended.outputs is None
    outputs = tmp_path / "jobs" / "digits-1" / "outputs"
    outputs.mkdir(parents=True)
    assert (await here.controller.info("digits-1")).outputs == str(outputs)
    story = [(event.kind, event.state) for event in await here.story("digits-1")]
    assert [kind for kind, _ in story if kind != "RunExited"] == [
        "Submitted",
        "NodesChosen",
        "NodesReserved",
        "InstancePrepared",
        "StagePassed",
        "StagePassed",
        "NodesReleased",
    ]
    assert story[-1] == ("NodesReleased", JobState.SUCCEEDED)
    calls = [call for call in here.cluster.calls if call.endswith("master-0") or "digits" in call]
    assert calls == [
        "reserve digits-1.0",
        "prepare master-0",
        "stage 0 master-0",
        "stage 1 master-0",
        "release digits-1.0",
    ]
    await finish(here)


@in_loop
async def test_a_failing_instance_stops_the_others_and_names_itself(tmp_path: Path) -> None:
    here = site(tmp_path, {"master-0": Program(seconds=None), "worker-0": Program(seconds=0.01, code=3)})
    await here.submit("digits-1")
    ended = await here.ends("digits-1")
    assert (ended.state, ended.reason, ended.exit_status) == (JobState.FAILED, Reason.INSTANCE_FAILED, 3)
    assert ended.verdict is not None
    assert (ended.verdict.instance, ended.verdict.last_lines) == ("worker-0", ("last words of worker-0",))
    assert [(i.note, i.signal) for i in ended.instances] == [("stopped: worker-0 failed", 15), (None, None)]
    await finish(here)


@in_loop
async def test_a_lost_node_ends_the_job_and_gives_the_rest_back(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    here.cluster.lose_node("id-of-b")
    ended = await here.ends("digits-1")
    assert (ended.state, ended.reason, ended.exit_status) == (JobState.FAILED, Reason.INSTANCE_LOST, 125)
    assert [(i.name, i.state, i.note) for i in ended.instances] == [
        ("master-0", InstanceState.EXITED, "stopped: worker-0 was lost"),
        ("worker-0", InstanceState.LOST, "its actor died"),
    ]
    await finish(here)


@in_loop
async def test_the_same_submission_again_returns_the_job_as_it_is(tmp_path: Path) -> None:
    here = site(tmp_path)
    first = await here.submit("digits-1")
    again = await here.submit("digits-1")
    assert (first.id, first.submitted_at) == (again.id, again.submitted_at)
    await here.ends("digits-1")
    assert (await here.submit("digits-1")).state is JobState.SUCCEEDED
    assert here.cluster.calls.count("reserve digits-1.0") == 1
    assert len(await here.controller.jobs(None, None, None)) == 1
    await finish(here)


@in_loop
async def test_a_submission_that_is_repeated_before_the_first_is_answered_submits_once(
    tmp_path: Path,
) -> None:
    here = site(tmp_path)
    await here.controller.started()
    infos = await asyncio.gather(*(here.submit("digits-1") for _ in range(3)))
    assert {(info.id, info.submitted_at) for info in infos} == {("digits-1", infos[0].submitted_at)}
    await here.ends("digits-1")
    await finish(here)


@in_loop
async def test_another_version_is_refused_and_nothing_is_stored(tmp_path: Path) -> None:
    here = site(tmp_path)
    with pytest.raises(VersionMismatch, match=r"client is raycontrol 0\.0\.9"):
        await here.controller.submit(submission("digits-1", version="0.0.9"))
    with pytest.raises(VersionMismatch):
        await here.controller.hello("0.0.9")
    assert (await here.controller.hello(__version__))["unfinished_jobs"] == 0
    assert await here.controller.jobs(None, None, None) == []
    await finish(here)


@in_loop
async def test_status_counts_jobs_that_have_not_ended(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.submit("digits-2")
    await here.reaches("digits-1", JobState.RUNNING)
    status = await here.controller.status()
    assert (status["version"], status["cluster"], status["home"]) == (__version__, "east", str(tmp_path))
    assert (status["unfinished_jobs"], status["waiting_jobs"]) == (2, 1)
    await here.controller.stop("digits-2", "done with it")
    await here.controller.stop("digits-1", "done with it")
    await here.ends("digits-1")
    await here.ends("digits-2")
    assert (await here.controller.status())["unfinished_jobs"] == 0
    await finish(here)


@in_loop
async def test_jobs_can_be_found_listed_and_pruned(tmp_path: Path) -> None:
    here = site(tmp_path)
    for job_id in ("digits-1", "digits-2"):
        await here.submit(job_id)
        await here.ends(job_id)
    await here.submit("other-1", nodes=3)
    assert await here.controller.find("digits") == ["digits-1", "digits-2"]
    assert [info.id for info in await here.controller.jobs(None, None, 2)] == ["other-1", "digits-2"]
    succeeded = await here.controller.jobs([JobState.SUCCEEDED], "ada", None)
    assert [info.id for info in succeeded] == ["digits-2", "digits-1"]
    assert await here.controller.jobs(None, "bob", None) == []
    await here.controller.prune(["digits-1", "other-1"])
    assert here.cluster.removed_stored == ["digits-1"]
    assert sorted(info.id for info in await here.controller.jobs(None, None, None)) == ["digits-2", "other-1"]
    with pytest.raises(JobNotFound):
        await here.controller.info("digits-1")
    await finish(here)


# Stopping and limits.


@in_loop
async def test_a_stop_ends_a_running_job(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    asked = await here.controller.stop("digits-1", "asked by ada")
    assert asked.state is JobState.STOPPING
    ended = await here.ends("digits-1")
    assert (ended.state, ended.reason, ended.exit_status) == (JobState.STOPPED, Reason.STOP_REQUESTED, 130)
    assert {i.signal for i in ended.instances} == {15}
    assert (await here.controller.stop("digits-1", "asked again", force=True)) == ended
    await finish(here)


@in_loop
async def test_force_shortens_a_stop_that_is_under_way(tmp_path: Path) -> None:
    deaf = {name: Program(seconds=None, deaf=True) for name in STAYS}
    here = site(tmp_path, deaf)
    await here.submit("digits-1", timeouts={"grace_s": 600})
    await here.reaches("digits-1", JobState.RUNNING)
    await here.controller.stop("digits-1", "asked by ada")
    await here.controller.stop("digits-1", "asked by ada", force=True)
    ended = await here.ends("digits-1")
    assert (ended.state, {i.signal for i in ended.instances}) == (JobState.STOPPED, {9})
    assert {"stop master-0 600", "stop master-0 0"} <= set(here.cluster.calls)
    await finish(here)


@in_loop
async def test_a_waiting_job_can_be_stopped(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("digits-1", nodes=3)
    await here.controller.stop("digits-1", "asked by ada")
    assert (await here.ends("digits-1")).state is JobState.STOPPED
    assert here.cluster.calls == ["release digits-1.-1"]
    await finish(here)


@in_loop
async def test_a_job_that_nobody_submitted_is_not_found(tmp_path: Path) -> None:
    here = site(tmp_path)
    with pytest.raises(JobNotFound):
        await here.controller.stop("digits-1", "asked by ada")
    with pytest.raises(JobNotFound):
        await here.controller.info("digits-1")
    assert await here.controller.events("digits-1", timeout_s=20) == []
    await finish(here)


@in_loop
async def test_time_limits_are_kept(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1", timeouts={"run_s": 0.1})
    await here.submit("digits-2", nodes=3, timeouts={"queue_s": 0.1})
    ended = [await here.ends(job_id) for job_id in ("digits-1", "digits-2")]
    assert [(info.state, info.reason) for info in ended] == [
        (JobState.FAILED, Reason.RUN_TIMEOUT),
        (JobState.FAILED, Reason.QUEUE_TIMEOUT),
    ]
    assert ended[1].verdict is not None and "3 instances with cpu 1" in ended[1].verdict.summary
    await finish(here)


@in_loop
async def test_a_limit_that_begins_while_another_is_enforced_is_kept_too(tmp_path: Path) -> None:
    """Both changes reach the store in one commit, and nothing happens afterwards to wake the clock."""
    hung, silent = Program(seconds=None, hung=True), Program(silent=True)
    here = site(
        tmp_path, {"master-0": hung, "worker-0": hung, "worker-1": silent}, hosts=("a", "b", "c", "d")
    )
    await here.submit("late-1", nodes=None, groups={"worker": {"count": 2}}, timeouts={"run_s": 0.05})
    await here.reaches("late-1", JobState.PREPARING)
    facts = here.cluster.find("late-1.0", "worker-1").facts

    async def worker_reports(report: Report) -> None:
        await here.controller.report(time.time(), [report])

    await worker_reports(InstancePrepared(time.time(), "late-1.0", "worker-1", facts))
    await worker_reports(StagePassed(time.time(), "late-1.0", "worker-1", 0))
    await here.reaches("late-1", JobState.STARTING)
    await here.submit("over-1", timeouts={"run_s": 0.2})
    await here.reaches("over-1", JobState.RUNNING)
    with locked(tmp_path):
        note = worker_reports(InstanceNoted(time.time(), "late-1.0", "worker-1", "slow"))
        last = worker_reports(StagePassed(time.time(), "late-1.0", "worker-1", 1))
        waiting = [asyncio.ensure_future(note)]
        await asyncio.sleep(
            0.3
        )  # the commit of the note waits for the lock; behind it, the end of over-1's time
        waiting.append(asyncio.ensure_future(last))
        await asyncio.sleep(0.05)
    await asyncio.gather(*waiting)
    assert (await here.reaches("late-1", JobState.STOPPING, timeout_s=5)).reason is Reason.RUN_TIMEOUT
    assert (await here.reaches("over-1", JobState.STOPPING)).reason is Reason.RUN_TIMEOUT
    await here.kill()


# The queue.


@in_loop
async def test_jobs_start_in_the_order_of_their_submission(tmp_path: Path) -> None:
    here = site(tmp_path)
    for number in (1, 2, 3):
        await here.submit(f"digits-{number}")
    second, third = [
        await here.shows(job_id, lambda info: info.pending is not None and info.reason is Reason.WAITING)
        for job_id in ("digits-2", "digits-3")
    ]
    needs = "needs 2 instances with cpu 1 free, each on a node of its own; 0 of 2 nodes can take one; CPUs are held by "
    assert second.pending is not None and second.pending.startswith(needs)
    assert third.pending is not None and third.pending.startswith(needs)
    assert third.pending.endswith("; 1 ahead in the queue")
    assert (second.state, second.reason) == (JobState.QUEUED, Reason.WAITING)
    for number in (1, 2, 3):
        assert (await here.ends(f"digits-{number}")).state is JobState.SUCCEEDED
    reserved = [call for call in here.cluster.calls if call.startswith("reserve")]
    assert reserved == ["reserve digits-1.0", "reserve digits-2.0", "reserve digits-3.0"]
    await finish(here)


@in_loop
async def test_a_job_too_big_for_the_cluster_waits_with_a_reason_and_starts_when_a_node_joins(
    tmp_path: Path,
) -> None:
    here = site(tmp_path)
    await here.submit("big-1", nodes=3)
    waiting = await here.shows("big-1", lambda info: info.pending is not None)
    assert waiting.pending == (
        "infeasible now: needs 3 instances with cpu 1, each on a node of its own; 2 of 2 nodes can take one"
    )
    await here.submit("digits-1")  # does not wait behind a job that cannot run
    assert (await here.ends("digits-1")).state is JobState.SUCCEEDED
    for node in nodes("a", "b", "c", cpu=1):
        here.cluster.rooms[node.id] = node
    await here.reaches("big-1", JobState.RUNNING)
    await here.controller.stop("big-1", "seen enough")
    await here.ends("big-1")
    await finish(here)


@in_loop
async def test_what_our_jobs_hold_counts_before_the_cluster_shows_it(tmp_path: Path) -> None:
    here = site(tmp_path)
    here.cluster.lagging = tuple(here.cluster.rooms.values())
    await asyncio.gather(*(here.submit(f"digits-{number}") for number in (1, 2, 3)))
    for number in (1, 2, 3):
        assert (await here.ends(f"digits-{number}")).state is JobState.SUCCEEDED
    await finish(here)


@in_loop
async def test_a_refused_reservation_is_decided_anew(tmp_path: Path) -> None:
    here = site(tmp_path)
    here.cluster.refusals = 2
    await here.submit("digits-1")
    assert (await here.ends("digits-1")).attempt == 0
    assert [call for call in here.cluster.calls if call.startswith("release")] == [
        "release digits-1.0",
        "release digits-1.1",
        "release digits-1.2",
    ]
    told = [event.message for event in await here.story("digits-1") if event.kind == "NodesRefused"]
    assert told == ["the reservation did not come about (somebody else was faster); trying again"] * 2
    await finish(here)


# Events.


@in_loop
async def test_events_are_waited_for(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    seen = (await here.story("digits-1"))[-1].seq
    waiting = asyncio.ensure_future(here.controller.events("digits-1", seen, timeout_s=20))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await here.controller.stop("digits-1", "asked by ada")
    assert (await asyncio.wait_for(waiting, 5))[0].kind == "StopRequested"
    await here.ends("digits-1")
    last = (await here.story("digits-1"))[-1].seq
    assert await here.controller.events("digits-1", last, timeout_s=20) == []  # nothing can come any more
    await finish(here)


@in_loop
async def test_waiting_for_events_ends_with_its_time(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("digits-1", nodes=3)
    await here.shows("digits-1", lambda info: info.pending is not None)
    seen = (await here.story("digits-1"))[-1].seq
    began = time.monotonic()
    assert await here.controller.events("digits-1", seen, timeout_s=0.1) == []
    assert 0.1 <= time.monotonic() - began < 5
    await finish(here)


@in_loop
async def test_times_of_reports_are_moved_to_this_clock(tmp_path: Path) -> None:
    """The node's clock is an hour ahead: only how long ago something happened counts."""
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    ahead = time.time() + 3600
    ended = Ended(ahead - 2, code=3)
    await here.controller.report(ahead, [RunExited(ahead - 2, "digits-1.0", "worker-0", ended)])
    event = next(event for event in await here.story("digits-1") if event.kind == "RunExited")
    assert -3 < event.at - time.time() < -1
    await here.ends("digits-1")
    await finish(here)


@in_loop
async def test_when_a_service_has_ended_is_moved_to_this_clock_too(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    ahead = time.time() + 3600
    ended = Ended(ahead - 2, code=0)
    report = ServiceEnded(ahead - 2, "digits-1.0", "worker-0", "ray", ended, asked=True)
    await here.controller.report(ahead, [report])
    known = here.controller._ledger.jobs["digits-1"].instance("worker-0").service_ended
    assert known is not None and -3 < known.at - time.time() < -1
    await here.controller.stop("digits-1", "seen enough")
    await here.ends("digits-1")
    await finish(here)


@in_loop
async def test_times_are_right_after_the_clock_of_a_node_was_set_back(tmp_path: Path) -> None:
    """Else a peer's end, which followed the first failure, would seem to be an hour older, and be blamed."""
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    behind = time.time() - 3600
    note = InstanceNoted(behind - 2, "digits-1.0", "worker-0", "its clock was set back")
    await here.controller.report(behind, [note])
    event = next(event for event in await here.story("digits-1") if event.kind == "InstanceNoted")
    assert -3 < event.at - time.time() < -1
    await here.controller.stop("digits-1", "seen enough")
    await here.ends("digits-1")
    await finish(here)


@in_loop
async def test_times_are_right_while_the_clock_of_the_head_comes_back_from_a_step(tmp_path: Path) -> None:
    """It was set forward: in an hour the steady clock has gained three minutes on the node's."""
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    noon = time.time()
    for sent_at, arrived in (
        (noon, Moment(at=noon, up_s=70.0)),
        (noon + 3600, Moment(at=noon + 3780, up_s=3670.0)),
        (noon + 3600, Moment(at=noon + 3783, up_s=3673.0)),  # delivered late
    ):
        note = InstanceNoted(sent_at - 2, "digits-1.0", "worker-0", "its GPU is idle")
        await here.controller._ledger.report([note], sent_at, arrived)
    told = [event.at - noon for event in await here.story("digits-1") if event.kind == "InstanceNoted"]
    assert told == [pytest.approx(-2), pytest.approx(3778), pytest.approx(3778)]
    await here.controller.stop("digits-1", "seen enough")
    await here.ends("digits-1")
    await finish(here)


@in_loop
async def test_a_clock_of_the_head_that_is_set_back_changes_no_limit(tmp_path: Path) -> None:
    wall = Wall()
    here = Site(tmp_path, FakeCluster(nodes("a", "b", cpu=1), STAYS), clock=wall)
    await here.submit("digits-1", timeouts={"run_s": 1})
    await here.reaches("digits-1", JobState.RUNNING)
    wall.step_s = -3600
    ended = await here.ends("digits-1")
    assert (ended.state, ended.reason) == (JobState.FAILED, Reason.RUN_TIMEOUT)
    times = [event.at for event in await here.story("digits-1")]
    assert max(times) - min(times) < 60
    await finish(here)


@in_loop
async def test_a_controller_goes_on_by_the_clock_of_the_last_one_if_it_was_set_back(tmp_path: Path) -> None:
    wall = Wall()
    here = Site(tmp_path, FakeCluster(nodes("a", "b", cpu=1), STAYS), clock=wall)
    await here.submit("digits-1", timeouts={"run_s": 3})
    running = await here.reaches("digits-1", JobState.RUNNING)
    wall.step_s = -3600
    await here.restart()
    ended = await here.ends("digits-1")
    assert (ended.state, ended.reason) == (JobState.FAILED, Reason.RUN_TIMEOUT)
    assert ended.ended_at is not None and running.started_at is not None
    assert 0 <= ended.ended_at - running.started_at < 60
    await finish(here)


class Wall:
    """A clock on the wall, which somebody sets."""

    def __init__(self) -> None:
        self.step_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.step_s


@in_loop
async def test_reports_of_what_is_not_known_are_taken_and_dropped(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1", nodes=3)
    now = time.time()
    for attempt_id in ("digits-1.0", "digits-1.-1", "digits-9.0", "nonsense"):
        await here.controller.report(now, [RunExited(now, attempt_id, "worker-0", Ended(now, code=1))])
    await here.shows("digits-1", lambda info: info.pending is not None)
    assert {event.kind for event in await here.story("digits-1")} == {"Submitted", "PlacementDeferred"}
    await finish(here)


# A store in trouble.


@in_loop
async def test_a_report_is_acknowledged_only_when_it_is_stored(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    note = InstanceNoted(time.time(), "digits-1.0", "worker-0", "its log waits on the node")
    with locked(tmp_path):
        acknowledged = asyncio.ensure_future(here.controller.report(time.time(), [note]))
        await asyncio.sleep(0.1)
        assert not acknowledged.done()
        assert (await here.controller.status())["unfinished_jobs"] == 1  # answers meanwhile
    await asyncio.wait_for(acknowledged, 10)
    assert (await here.story("digits-1"))[-1].message == "worker-0: its log waits on the node"
    await here.controller.stop("digits-1", "seen enough")
    await here.ends("digits-1")
    await finish(here)


@in_loop
async def test_a_job_runs_on_while_the_store_takes_nothing(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    with refusing(tmp_path):
        for name in ("master-0", "worker-0"):
            here.cluster.find("digits-1.0", name).exit(0)
        stop_calls = [call for call in here.cluster.calls if call.startswith("stop")]
        await asyncio.sleep(0.3)
        info = await here.controller.info("digits-1")
        assert (info.state, stop_calls) == (JobState.RUNNING, [])  # what is not stored has not happened
    ended = await here.ends("digits-1")
    assert (ended.state, {i.exit_code for i in ended.instances}) == (JobState.SUCCEEDED, {0})
    await finish(here)


@in_loop
async def test_a_stop_that_the_store_does_not_take_is_refused_at_once_and_never_happens(
    tmp_path: Path,
) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    with refusing(tmp_path):
        for _ in range(2):
            with pytest.raises(StoreError, match="database or disk is full"):
                await asyncio.wait_for(here.controller.stop("digits-1", "too late"), 5)
        note = InstanceNoted(time.time(), "digits-1.0", "worker-0", "its log waits on the node")
        reported = asyncio.ensure_future(here.controller.report(time.time(), [note]))
        stops = [here.controller.stop("digits-1", f"while it retries {number}") for number in range(3)]
        refused = await asyncio.wait_for(asyncio.gather(*stops, return_exceptions=True), 5)
        assert [type(error) for error in refused] == [StoreError] * 3
        assert not reported.done()
    await asyncio.wait_for(reported, 10)
    assert (await here.story("digits-1"))[-1].message == "worker-0: its log waits on the node"
    assert (await here.controller.info("digits-1")).state is JobState.RUNNING
    await here.controller.stop("digits-1", "seen enough")
    assert "seen enough" in str((await here.ends("digits-1")).verdict)
    await finish(here)


@in_loop
async def test_only_one_controller_of_a_name_owns_the_store(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    second = Controller(str(tmp_path), "east", FakeCluster(()))
    with pytest.raises(StoreOwned, match="the store already has a controller for cluster 'east'"):
        await second.started()
    west = Site(tmp_path, FakeCluster(nodes("c", "d"), TRAINS), "west")
    await west.submit("west-1")
    assert (await west.ends("west-1")).state is JobState.SUCCEEDED
    assert west.cluster.faults == []
    assert [info.id for info in await west.controller.jobs(None, None, None)] == ["west-1", "digits-1"]
    assert (await here.controller.info("digits-1")).state is JobState.RUNNING
    await here.controller.stop("digits-1", "seen enough")
    await here.ends("digits-1")
    await here.kill()
    await second.started()
    assert (await second.status())["unfinished_jobs"] == 0


# A cluster in trouble.


@in_loop
async def test_calls_that_fail_are_made_again(tmp_path: Path) -> None:
    here = site(tmp_path)
    calls = ("reserve", "prepare", "stage", "stop", "release")
    here.cluster.trouble = {call: [RuntimeError("the GCS is restarting")] for call in calls}
    await here.submit("digits-1")
    assert (await here.ends("digits-1")).state is JobState.SUCCEEDED
    assert [call for call in here.cluster.calls if call.endswith("failed")] == [
        f"{call} failed" for call in calls
    ]
    await finish(here)


@in_loop
async def test_a_cluster_that_cannot_be_looked_at_is_looked_at_again(tmp_path: Path) -> None:
    here = site(tmp_path)
    here.cluster.trouble = {"nodes": [RuntimeError("the GCS is restarting")]}
    await here.submit("digits-1")
    assert (await here.ends("digits-1")).state is JobState.SUCCEEDED
    await finish(here)


@in_loop
async def test_a_start_that_failed_half_way_can_be_tried_again(tmp_path: Path) -> None:
    here = site(tmp_path)
    here.cluster.trouble = {"serve_nodes": [RuntimeError("the GCS is restarting")]}
    with pytest.raises(RuntimeError, match="GCS"):
        await here.controller.started()
    await here.controller.started()
    await here.submit("digits-1")
    assert (await here.ends("digits-1")).state is JobState.SUCCEEDED
    await finish(here)


@in_loop
async def test_a_controller_that_nobody_calls_goes_on_trying_to_start(tmp_path: Path) -> None:
    here = site(tmp_path)
    here.cluster.trouble = {"serve_nodes": [RuntimeError("the GCS is restarting")]}
    starting = asyncio.ensure_future(here.controller.keep_trying_to_start())
    while not here.cluster.calls:
        await asyncio.sleep(0.01)
    done, _ = await asyncio.wait([starting], timeout=0.1)
    assert here.cluster.calls == ["serve_nodes failed"]
    assert not done
    await finish(here)


# Another life.


@in_loop
async def test_a_new_controller_adopts_what_runs(tmp_path: Path) -> None:
    here = site(tmp_path, {"master-0": Program(seconds=0.3), "worker-0": Program(seconds=0.3)})
    await here.submit("digits-1")
    await here.submit("digits-2")
    await here.reaches("digits-1", JobState.RUNNING)
    await here.restart()
    assert (await here.controller.info("digits-1")).state is JobState.RUNNING
    assert [(await here.ends(job_id)).state for job_id in ("digits-1", "digits-2")] == [
        JobState.SUCCEEDED
    ] * 2
    assert set(here.cluster.starts.values()) == {1}
    await finish(here)


@in_loop
async def test_what_ended_while_there_was_no_controller_is_heard_of(tmp_path: Path) -> None:
    here = site(tmp_path, {"master-0": Program(seconds=None), "worker-0": Program(seconds=0.05, code=3)})
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    await here.kill()
    await asyncio.sleep(0.1)  # worker-0 fails and has nobody to tell
    await here.restart()
    ended = await here.ends("digits-1")
    assert (ended.reason, ended.exit_code) == (Reason.INSTANCE_FAILED, 3)
    await finish(here)


@in_loop
async def test_an_instance_lost_while_there_was_no_controller_is_missed(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    await here.kill()
    here.cluster.lose_node("id-of-a")
    await here.restart()
    ended = await here.ends("digits-1")
    assert (ended.reason, ended.verdict and ended.verdict.instance) == (Reason.INSTANCE_LOST, "master-0")
    await finish(here)


@in_loop
async def test_what_no_job_of_the_store_owns_is_removed_at_the_start(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    await here.kill()
    here.cluster.gangs["digits-0.7"] = {}
    await here.restart()
    while list(here.cluster.gangs) != ["digits-1.0"]:
        await asyncio.sleep(0.01)
    await here.controller.stop("digits-1", "seen enough")
    await here.ends("digits-1")
    await finish(here)


async def killed_once(home: Path, code: int, *, call: int = 0, write: int = 0) -> tuple[object, bool]:
    """Run a job, with the controller killed at that moment of its calls or right after that commit; how it ended,
    and whether that moment came.
    """
    program = Program(seconds=0.01, code=code)
    here = Site(home, FakeCluster(nodes("a", cpu=1), {"master-0": program}, kill_at=call))
    with WriteStop(write, here.cluster.killed) as thread:
        killed = asyncio.ensure_future(here.cluster.killed.wait())
        done = asyncio.ensure_future(submit_and_wait(here))
        await asyncio.wait([killed, done], return_when=asyncio.FIRST_COMPLETED)
        came = killed.done()
        if came:
            await here.kill(thread)
            here.controller = here._new()
            await submit_and_wait(here)
        ended = await here.controller.info("digits-1")
    assert set(here.cluster.starts.values()) == {1}
    await finish(here)
    instances = [(i.name, i.node, i.state, i.exit_code, i.signal, i.note) for i in ended.instances]
    return (ended.state, ended.reason, ended.verdict, instances), came


async def submit_and_wait(here: Site) -> None:
    await here.submit("digits-1", nodes=1)
    await here.ends("digits-1")


@pytest.mark.parametrize(("moment", "code"), [("call", 3), ("write", 0)])
def test_a_controller_killed_around_any_call_and_after_any_commit_is_not_noticed(
    tmp_path: Path, moment: str, code: int
) -> None:
    undisturbed, _ = asyncio.run(killed_once(tmp_path / "0", code))
    number, came = 1, True
    while came:
        home = tmp_path / str(number)
        ending, came = asyncio.run(killed_once(home, code, **{moment: number}))
        assert ending == undisturbed, f"killed at {moment} {number}"
        number += 1
    assert number > 10
