"""The queue and further attempts, with the real controller on a real store: what users want of jobs, and what faults do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raycontrol.errors import JobNotFound, StoreError, UsageError
from raycontrol.queue import Rules
from raycontrol.scheduler import NEWS_AT_ONCE
from raycontrol.status import JobInfo, JobState, Outcome, Reason, Wish
from tests.machine.fake_cluster import FakeCluster, Site, WriteStop, in_loop
from tests.machine.test_controller import refusing
from tests.unit.fake_gangs import Program, nodes

STAYS = {"master-0": Program(seconds=None), "worker-0": Program(seconds=None)}


def site(home: Path, programs: Any = None, hosts: str = "ab") -> Site:
    return Site(home, FakeCluster(nodes(*hosts, cpu=1), STAYS if programs is None else programs))


async def finish(here: Site, *job_ids: str) -> None:
    """Stop what is left; nothing is broken, nothing reserved."""
    for job_id in job_ids:
        await here.controller.stop(job_id, "seen enough", True)
    for job_id in job_ids:
        await here.ends(job_id)
    assert here.cluster.faults == []
    assert here.cluster.left_over() == []
    await here.kill()


def reservations(here: Site) -> list[str]:
    return [call.removeprefix("reserve ") for call in here.cluster.calls if call.startswith("reserve")]


# Held, suspended, given another priority.


@in_loop
async def test_a_held_job_is_passed_by_others_and_starts_when_it_is_released(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("first-1")
    await here.reaches("first-1", JobState.RUNNING)
    for job_id in ("held-1", "second-1"):
        await here.submit(job_id)
    held = await here.controller.wish("held-1", Wish.HOLD, "held by ada")
    assert (held.state, held.reason, held.pending) == (JobState.QUEUED, Reason.HELD, "held by ada")
    assert await here.controller.wish("held-1", Wish.HOLD, "held again") == held
    await here.controller.stop("first-1", "seen enough", True)
    await here.reaches("second-1", JobState.RUNNING)
    assert [(one.id, one.position, one.held, one.why) for one in await here.controller.queue()] == [
        ("held-1", None, True, "held by ada")
    ]
    await here.controller.wish("held-1", Wish.RELEASE, "released by ada")
    await here.controller.stop("second-1", "seen enough", True)
    await here.reaches("held-1", JobState.RUNNING)
    await finish(here, "held-1")


@in_loop
async def test_who_stands_aside_has_no_place_in_the_line(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("first-1")
    await here.reaches("first-1", JobState.RUNNING)
    await here.submit("huge-1", nodes=9)
    await here.submit("second-1")
    await here.submit("third-1")
    await here.shows("third-1", lambda info: info.pending is not None)
    places = [(one.id, one.position) for one in await here.controller.queue()]
    assert places == [("huge-1", None), ("second-1", 1), ("third-1", 2)]
    await finish(here, "first-1", "huge-1", "second-1", "third-1")


@in_loop
async def test_while_ray_still_counts_what_a_job_had_nobody_outside_is_said_to_have_it(
    tmp_path: Path,
) -> None:
    here = site(tmp_path)
    await here.submit("first-1")
    await here.reaches("first-1", JobState.RUNNING)
    await here.submit("second-1")
    await here.shows("second-1", lambda info: "CPUs are held by first-1 (2)" in str(info.pending))
    here.cluster.lagging = here.cluster.free_rooms()
    await here.controller.stop("first-1", "seen enough", True)
    await here.ends("first-1")
    await here.shows(
        "second-1", lambda info: "CPUs are held by jobs that have just left (2)" in str(info.pending)
    )
    here.cluster.lagging = None
    await here.reaches("second-1", JobState.RUNNING)
    await finish(here, "second-1")


@in_loop
async def test_a_suspended_job_gives_its_nodes_back_and_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    await here.controller.wish("digits-1", Wish.SUSPEND, "suspended by ada")
    info = await here.shows("digits-1", lambda info: info.state is JobState.QUEUED)
    assert (info.reason, info.pending, info.attempt) == (Reason.HELD, "suspended by ada", 1)
    assert [one.outcome for one in info.attempts] == [Outcome.STOPPED]
    assert here.cluster.left_over() == []
    await here.restart()
    assert (await here.controller.info("digits-1")).pending == "suspended by ada"
    await here.controller.wish("digits-1", Wish.RESUME, "resumed by ada")
    await here.reaches("digits-1", JobState.RUNNING)
    assert reservations(here) == ["digits-1.0", "digits-1.1"]
    await finish(here, "digits-1")


@in_loop
async def test_what_a_job_s_state_does_not_allow_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("digits-1")
    running = await here.reaches("digits-1", JobState.RUNNING)
    with pytest.raises(UsageError, match="is RUNNING; `raycontrol suspend`"):
        await here.controller.wish("digits-1", Wish.HOLD, "held by ada")
    with pytest.raises(UsageError, match="only of a waiting job"):
        await here.controller.set_priority("digits-1", 1, "urgent")
    with pytest.raises(UsageError, match="from 0"):
        await here.controller.set_priority("digits-1", 10, "urgent")
    with pytest.raises(JobNotFound):
        await here.controller.wish("never-1", Wish.HOLD, "held by ada")
    assert await here.controller.wish("digits-1", Wish.RELEASE, "released") == running
    await here.controller.stop("digits-1", "seen enough", True)
    await here.ends("digits-1")
    with pytest.raises(UsageError, match="has ended"):
        await here.controller.wish("digits-1", Wish.SUSPEND, "suspended by ada")
    await finish(here)


@in_loop
async def test_a_job_whose_priority_is_raised_goes_first(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("first-1")
    await here.reaches("first-1", JobState.RUNNING)
    for job_id in ("second-1", "third-1"):
        await here.submit(job_id)
    changed = await here.controller.set_priority("third-1", 1, "urgent")
    assert changed.priority == 1
    assert [one.id for one in await here.controller.queue()] == ["third-1", "second-1"]
    await here.controller.stop("first-1", "seen enough", True)
    await here.reaches("third-1", JobState.RUNNING)
    await finish(here, "third-1", "second-1")


# What the queue does by itself.


@in_loop
async def test_a_preemptible_job_makes_room_and_comes_back(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("cheap-1", preemptible=True)
    await here.reaches("cheap-1", JobState.RUNNING)
    await here.submit("urgent-1", priority=0)
    await here.reaches("urgent-1", JobState.RUNNING)
    cheap = await here.controller.info("cheap-1")
    assert (cheap.state, [one.outcome for one in cheap.attempts]) == (JobState.QUEUED, [Outcome.PREEMPTED])
    await here.controller.stop("urgent-1", "seen enough", True)
    await here.reaches("cheap-1", JobState.RUNNING)
    assert reservations(here) == ["cheap-1.0", "urgent-1.0", "cheap-1.1"]
    await finish(here, "cheap-1")


@in_loop
async def test_who_may_not_be_preempted_is_not(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("steady-1")
    await here.reaches("steady-1", JobState.RUNNING)
    await here.submit("urgent-1", priority=0)
    urgent = await here.shows("urgent-1", lambda info: info.pending is not None)
    assert urgent.pending is not None and "CPUs are held by steady-1 (2)" in urgent.pending
    assert (await here.controller.info("steady-1")).state is JobState.RUNNING
    await finish(here, "urgent-1", "steady-1")


@in_loop
async def test_a_user_s_limit_holds_his_next_job_back(tmp_path: Path) -> None:
    here = site(tmp_path, hosts="abcd")
    here.rules = Rules(user_jobs=1)
    await here.submit("first-1")
    await here.reaches("first-1", JobState.RUNNING)
    await here.submit("second-1")
    second = await here.shows("second-1", lambda info: info.pending is not None)
    assert second.pending is not None and "ada" in second.pending
    here.rules = Rules()
    await here.reaches("second-1", JobState.RUNNING)
    await finish(here, "first-1", "second-1")


@in_loop
async def test_settings_that_are_wrong_stop_nobody(tmp_path: Path) -> None:
    here = site(tmp_path, hosts="abcd")
    here.rules = Rules(user_jobs=1)
    await here.submit("first-1")
    await here.reaches("first-1", JobState.RUNNING)
    here.rules = UsageError("settings.yaml: user_jobs: must be a whole number of at least 1, got 'two'")
    await here.submit("second-1")
    second = await here.shows("second-1", lambda info: info.pending is not None)
    assert second.pending is not None and "may have 1" in second.pending, "what was right last holds"
    await here.controller.stop("first-1", "seen enough", True)
    await here.reaches("second-1", JobState.RUNNING)
    await finish(here, "second-1")


@in_loop
async def test_ten_waiting_jobs_tell_once_what_they_wait_for(tmp_path: Path) -> None:
    """Their places change with each job that starts; only who asks is told so, not the store."""
    here = site(tmp_path)
    await here.submit("first-1")
    await here.reaches("first-1", JobState.RUNNING)
    for number in range(3):
        await here.submit(f"later-{number}")
    last = await here.shows("later-2", lambda info: "2 ahead" in (info.pending or ""))
    assert last.state is JobState.QUEUED
    await here.controller.stop("later-0", "seen enough")
    await here.shows("later-2", lambda info: "1 ahead" in (info.pending or ""))
    (listed,) = [info for info in await here.controller.jobs(None, None, None) if info.id == "later-2"]
    assert "1 ahead" in (listed.pending or "")
    told = [event for event in await here.story("later-2") if event.kind == "PlacementDeferred"]
    assert len(told) == 1
    await finish(here, "later-1", "later-2", "first-1")


@in_loop
async def test_many_jobs_that_come_at_once_all_tell_once_what_they_wait_for(tmp_path: Path) -> None:
    """They are more than the store is told of in one go."""
    here = site(tmp_path)
    await here.submit("first-1")
    await here.reaches("first-1", JobState.RUNNING)
    await asyncio.gather(*(here.submit(f"later-{number}") for number in range(NEWS_AT_ONCE + 50)))
    for number in range(NEWS_AT_ONCE + 50):
        (submitted, *_) = await here.story(f"later-{number}")
        await here.controller.events(f"later-{number}", submitted.seq, timeout_s=30)
        kinds = [event.kind for event in await here.story(f"later-{number}")]
        assert kinds == ["Submitted", "PlacementDeferred"]
    await finish(here, *(f"later-{number}" for number in range(NEWS_AT_ONCE + 50)), "first-1")


@in_loop
async def test_a_new_controller_does_not_tell_again_what_jobs_wait_for(tmp_path: Path) -> None:
    here = site(tmp_path)
    for job_id in ("first-1", "second-1", "third-1"):
        await here.submit(job_id)
    await here.reaches("first-1", JobState.RUNNING)
    await here.shows("third-1", lambda info: "1 ahead" in (info.pending or ""))
    await here.controller.stop("second-1", "seen enough")
    await here.restart()
    await here.shows("third-1", lambda info: "ahead" not in (info.pending or "ahead"))
    kinds = [event.kind for event in await here.story("third-1")]
    assert kinds == ["Submitted", "PlacementDeferred"]
    await finish(here, "third-1", "first-1")


# Further attempts.


async def tried(here: Site, **retry: Any) -> JobInfo:
    await here.submit("digits-1", retry=retry)
    return await here.ends("digits-1")


@in_loop
async def test_a_program_that_fails_is_tried_again_on_the_nodes_that_it_has(tmp_path: Path) -> None:
    here = site(
        tmp_path, {"master-0": Program(seconds=0.1), "worker-0": Program(seconds=0.01, code=3, heals=2)}
    )
    ended = await tried(here, max=3)
    assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 2)
    assert [(one.outcome, one.exit_code) for one in ended.attempts] == [
        (Outcome.FAILED, 3),
        (Outcome.FAILED, 3),
        (Outcome.SUCCEEDED, 0),
    ]
    assert reservations(here) == ["digits-1.0", "digits-1.1", "digits-1.2"]
    kinds = [event.kind for event in await here.story("digits-1")]
    assert kinds.count("NodesChosen") == 1, "it did not queue again"
    await finish(here)


@in_loop
async def test_a_job_whose_node_is_lost_waits_for_another_and_goes_on(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("digits-1", retry={})
    await here.reaches("digits-1", JobState.RUNNING)
    here.cluster.lose_node("id-of-b")
    waits = await here.shows(
        "digits-1", lambda info: info.state is JobState.QUEUED and info.pending is not None
    )
    assert waits.pending is not None and waits.pending.startswith("infeasible now: ")
    assert (waits.verdict, [one.outcome for one in waits.attempts]) == (None, [Outcome.LOST])
    for node in nodes("a", "c", cpu=1):
        here.cluster.rooms.setdefault(node.id, node)
    again = await here.reaches("digits-1", JobState.RUNNING)
    assert (again.attempt, {item.node for item in again.instances}) == (1, {"a", "c"})
    await finish(here, "digits-1")


@in_loop
async def test_a_controller_that_is_killed_between_two_attempts_goes_on_with_the_next(tmp_path: Path) -> None:
    here = site(
        tmp_path, {"master-0": Program(seconds=0.1), "worker-0": Program(seconds=0.05, code=3, heals=1)}
    )
    await here.submit("digits-1", retry={"max": 1})
    while "release digits-1.0" not in here.cluster.calls:
        await asyncio.sleep(0)
    await here.restart()
    ended = await here.ends("digits-1")
    assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1)
    await finish(here)


@in_loop
async def test_what_may_run_on_on_a_silent_host_is_waited_for(tmp_path: Path) -> None:
    here = site(tmp_path, hosts="abc")
    await here.submit("digits-1", retry={})
    await here.reaches("digits-1", JobState.RUNNING)
    here.cluster.silent.add("id-of-b")
    here.cluster.lose_node("id-of-b")
    waits = await here.shows("digits-1", lambda info: info.state is JobState.QUEUED)
    (entry,) = await here.controller.queue()
    assert (waits.attempt, entry.held) == (1, False)
    await here.shows("digits-1", lambda info: "before its next attempt" in (info.pending or ""))
    assert reservations(here) == ["digits-1.0"]
    await finish(here, "digits-1")


@in_loop
async def test_an_attempt_keeps_the_fence_it_was_placed_with_whatever_the_next_controller_finds_set(
    tmp_path: Path,
) -> None:
    here = site(tmp_path, hosts="abc")
    here.fence_s = 600.0
    await here.submit("digits-1", retry={})
    await here.reaches("digits-1", JobState.RUNNING)
    here.fence_s = 30.0
    await here.restart()
    here.cluster.silent.add("id-of-b")
    here.cluster.lose_node("id-of-b")
    waits = await here.shows("digits-1", lambda info: "before its next attempt" in (info.pending or ""))
    assert waits.pending is not None and 500 < float(waits.pending.split()[1]) <= 600
    await finish(here, "digits-1")


@in_loop
async def test_what_the_store_does_not_take_is_refused_and_does_not_happen_later(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    with refusing(tmp_path):
        with pytest.raises(StoreError):
            await here.controller.wish("digits-1", Wish.SUSPEND, "suspended by ada")
        assert (await here.controller.info("digits-1")).state is JobState.RUNNING
    await here.controller.wish("digits-1", Wish.RELEASE, "released by ada")
    assert (await here.controller.info("digits-1")).state is JobState.RUNNING
    await finish(here, "digits-1")


@in_loop
async def test_a_hold_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    """The job is being placed when it is asked for: what was looked at before is not what the lifecycle sees."""
    here = site(tmp_path)
    await here.submit("digits-1")
    for ask in (
        lambda: here.controller.wish("digits-1", Wish.HOLD, "held by ada"),
        lambda: here.controller.set_priority("digits-1", 1, "urgent"),
    ):
        try:
            info = await ask()
            assert info.reason is Reason.HELD or info.priority == 1
        except UsageError as error:
            assert "digits-1 is " in str(error)
    await here.controller.wish("digits-1", Wish.RELEASE, "released by ada")
    await finish(here, "digits-1")


@in_loop
async def test_a_job_whose_limits_cannot_be_told_ends_nobody_else(tmp_path: Path) -> None:
    here = site(tmp_path, hosts="abcd")
    await here.submit("strange-1")
    await here.reaches("strange-1", JobState.RUNNING)
    ledger = here.controller._ledger
    strange = ledger.jobs["strange-1"]
    ledger._jobs["strange-1"] = replace(strange, state=JobState.STARTING, stage=99)
    await here.submit("digits-1", timeouts={"run_s": 0.2})
    ended = await here.ends("digits-1")
    assert ended.reason is Reason.RUN_TIMEOUT
    ledger._jobs["strange-1"] = strange
    await finish(here, "strange-1")


@in_loop
async def test_limits_that_end_together_are_stored_together(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.controller.started()
    ids = [f"digits-{number}" for number in range(30)]
    with WriteStop(at=0, killed=asyncio.Event()) as commits:
        await asyncio.gather(*(here.submit(one, nodes=3, timeouts={"queue_s": 0.001}) for one in ids))
        for one in ids:
            assert (await here.ends(one)).reason is Reason.QUEUE_TIMEOUT
    assert commits.count < 15
    await finish(here)


@in_loop
async def test_a_waiting_job_that_cannot_be_understood_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    here = site(tmp_path)
    await here.submit("first-1")
    await here.reaches("first-1", JobState.RUNNING)
    await here.submit("strange-1")
    ledger = here.controller._ledger
    strange = ledger.jobs["strange-1"]
    ledger._jobs["strange-1"] = replace(strange, spec=strange.spec.model_copy(update={"resources": None}))
    await here.controller.stop("first-1", "seen enough", True)
    await here.submit("digits-1")
    await here.reaches("digits-1", JobState.RUNNING)
    assert await here.controller.queue() == []
    ledger._jobs["strange-1"] = strange
    assert [entry.id for entry in await here.controller.queue()] == ["strange-1"]
    await finish(here, "digits-1", "strange-1")


@in_loop
async def test_the_nodes_of_a_failed_job_that_is_kept_are_claimed_by_nobody(tmp_path: Path) -> None:
    """They are not about to be free: whom they would be needed for waits, and others go by."""
    here = site(tmp_path, {"master-0": Program(seconds=0.05, code=3)})
    await here.submit("kept-1", nodes=1, timeouts={"keep_failed_s": 600})
    kept = await here.shows("kept-1", lambda info: info.kept_until is not None)
    assert [node.jobs for node in await here.controller.nodes([kept.instances[0].node])] == [("kept-1",)]
    here.cluster.programs = STAYS
    await here.submit("wide-1")
    await here.submit("small-1", nodes=1)
    small = await here.reaches("small-1", JobState.RUNNING)
    assert small.instances[0].node != kept.instances[0].node
    assert (await here.controller.info("wide-1")).state is JobState.QUEUED
    await here.controller.stop("kept-1", "seen enough", False)
    assert (await here.ends("kept-1")).exit_status == 3
    await finish(here, "small-1", "wide-1")
