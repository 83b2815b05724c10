"""Which ends are tried again, in which budget, where, and how often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raycontrol import backends
from raycontrol.attempts import fenced_anew
from raycontrol.demands import STOP_SLACK_S, deadline
from raycontrol.errors import SpecError
from raycontrol.events import (
    InstanceLost,
    LetGo,
    NodesChosen,
    NodesRefused,
    NodesReleased,
    NodesReserved,
    StopRequested,
    Suspended,
    TimePassed,
)
from raycontrol.job import Job, info
from raycontrol.lifecycle import advance
from raycontrol.retries import ENDS, Budget, budget_of
from raycontrol.spec import JobSpec, Retry
from raycontrol.specparts import ExitCodes
from raycontrol.status import JobState, Outcome, Reason, Verdict
from tests.unit import lifecycle_jobs as jobs
from tests.unit.fake_gangs import Program, nodes
from tests.unit.lifecycle_jobs import ATTEMPT, after, closed, exited
from tests.unit.world import World

RELEASED = NodesReleased(1030.0, ATTEMPT)
KEPT = NodesReleased(1030.0, ATTEMPT, kept=True)
LOST = InstanceLost(1018.0, ATTEMPT, "worker-0", "its node left the cluster")


def lost(**retry: Any) -> Job:
    """All is closed after worker-0 was lost with its node."""
    return after(jobs.running(retry=Retry(**retry)), LOST, closed("master-0", 1029.0))


def ends(
    code: int | None = None, signal: int | None = None, reason: Reason = Reason.INSTANCE_FAILED
) -> Verdict:
    return Verdict(reason=reason, summary="it failed", exit_code=code, signal=signal)


# Which budget.


@pytest.mark.parametrize(
    ("verdict", "codes", "budget"),
    [
        (ends(3), {}, Budget.PROGRAM),
        (ends(3), {"fail": (3,)}, Budget.NONE),
        (ends(4), {"fail": (3,)}, Budget.PROGRAM),
        (ends(3), {"retry": (75,)}, Budget.NONE),
        (ends(75), {"retry": (75,)}, Budget.PROGRAM),
        (ends(77), {"retry": (3, "64-78")}, Budget.PROGRAM),
        (ends(79), {"retry": (3, "64-78")}, Budget.NONE),
        (ends(65), {"fail": ("64-78",)}, Budget.NONE),
        (ends(signal=11), {"retry": (139,)}, Budget.PROGRAM),
        (ends(signal=11), {"fail": (139,)}, Budget.NONE),
        (ends(137, reason=Reason.OUT_OF_MEMORY), {}, Budget.NONE),
        (ends(137, reason=Reason.OUT_OF_MEMORY), {"retry": (137,)}, Budget.PROGRAM),
        (ends(reason=Reason.INSTANCE_LOST), {"retry": (75,), "fail": (1,)}, Budget.INFRASTRUCTURE),
        (ends(reason=Reason.RUN_TIMEOUT), {}, Budget.NONE),
        (ends(reason=Reason.PLAN_FAILED), {}, Budget.NONE),
    ],
)
def test_the_reason_and_the_exit_code_say_what_is_tried_again(
    verdict: Verdict, codes: dict[str, Any], budget: Budget
) -> None:
    assert budget_of(verdict, Retry(exit_codes=ExitCodes(**codes))) is budget


def test_every_reason_for_which_an_attempt_can_end_is_in_the_table() -> None:
    never = {
        Reason.SUBMITTED,
        Reason.WAITING,
        Reason.HELD,
        Reason.PLACED,
        Reason.STARTED,
        Reason.PLACEMENT_LOST,
    }
    assert set(ENDS) == set(Reason) - never


def test_an_exit_code_is_one_that_a_program_can_have() -> None:
    for code in (0, 256, "3", "0-3", "5-3", "3-256", True):
        with pytest.raises(SpecError, match="exit_codes"):
            JobSpec.from_dict({"command": "true", "retry": {"exit_codes": {"retry": [code]}}})


def test_an_exit_code_is_tried_again_or_not() -> None:
    codes = {"retry": ["3-5"], "fail": [5, 3]}
    with pytest.raises(
        SpecError, match=r"exit_codes.fail: must not name what exit_codes.retry names too, got 3, 5"
    ):
        JobSpec.from_dict({"command": "true", "retry": {"max": 1, "exit_codes": codes}})


# A program that has failed.


def test_a_program_that_has_failed_is_tried_again_on_the_same_nodes() -> None:
    job = jobs.trying_again()
    assert (job.state, job.after, job.retries, job.infra_retries) == (
        JobState.STOPPING,
        JobState.PLACING,
        1,
        0,
    )
    job, commands, notes = advance(job, KEPT)
    assert (job.state, job.attempt, job.attempt_id, job.group_id) == (
        JobState.PLACING,
        1,
        "digits-1.1",
        "digits-1.0",
    )
    assert [(item.node_id, item.facts, item.closed) for item in job.instances] == [
        ("node-a", None, False),
        ("node-b", None, False),
    ]
    assert job.verdict is None and job.failed_at is None
    assert [note.message for note in notes] == ["on the same nodes again"]
    assert [type(command).__name__ for command in commands] == ["ReserveNodes"]
    (past,) = info(job).attempts
    assert (past.number, past.outcome, past.reason, past.exit_code, past.nodes) == (
        0,
        Outcome.FAILED,
        Reason.INSTANCE_FAILED,
        3,
        ("host-a", "host-b"),
    )


def test_the_story_says_which_retry_it_is() -> None:
    _, _, notes = advance(after(jobs.failing_once(), closed("master-0")), closed("worker-0"))
    assert [note.message for note in notes] == ["trying again on the same nodes (retry 1 of 1)"]


def test_nodes_that_went_while_they_were_kept_are_chosen_anew() -> None:
    job = after(jobs.trying_again(), KEPT, TimePassed(1100.0))
    assert (job.state, job.after, job.reason) == (JobState.STOPPING, JobState.QUEUED, Reason.PLACEMENT_LOST)
    job = after(job, NodesReleased(1101.0, "digits-1.1"))
    assert (job.state, job.attempt, job.group_id) == (JobState.QUEUED, 1, "digits-1.1")


def test_with_a_pause_the_nodes_are_given_back_and_the_pause_grows() -> None:
    job = jobs.trying_again(max=2, backoff_s=30)
    assert (job.after, job.not_before) == (JobState.QUEUED, 1019.0 + 30)
    again = replace(jobs.failing_once(max=2, backoff_s=30), retries=1)
    assert after(again, closed("master-0"), closed("worker-0")).not_before == 1025.0 + 60


def test_the_last_attempt_s_end_is_the_job_s() -> None:
    again = replace(jobs.failing_once(), retries=1)
    job = after(again, closed("master-0"), closed("worker-0"), RELEASED)
    assert (job.state, job.verdict and job.verdict.exit_code) == (JobState.FAILED, 3)
    assert [attempt.outcome for attempt in info(job).attempts] == [Outcome.FAILED]


def test_what_had_failed_before_decides_also_when_it_is_told_late() -> None:
    """worker-0 exited 3, which is tried again; then it is heard that master-0 had exited 4 before, which is not."""
    codes = ExitCodes(fail=(4,))
    job = after(jobs.failing_once(exit_codes=codes), exited("master-0", 1019.0, code=4, ended_at=1017.0))
    job = after(job, closed("master-0"), closed("worker-0"))
    assert (job.after, job.verdict and job.verdict.exit_code) == (JobState.FAILED, 4)


# Nodes and instances that were lost.


def test_a_lost_node_is_avoided_and_counted_in_a_budget_of_its_own() -> None:
    job = lost()
    assert (job.after, job.retries, job.infra_retries, job.avoided) == (JobState.QUEUED, 0, 1, ("node-b",))
    job = after(job, RELEASED)
    assert (job.state, job.attempt, job.instances) == (JobState.QUEUED, 1, ())
    assert [attempt.outcome for attempt in job.past] == [Outcome.LOST]


def test_the_nodes_of_earlier_attempts_are_remembered_because_folders_of_the_job_are_there() -> None:
    job = after(lost(), RELEASED)
    assert job.visited == ("node-a", "node-b")
    elsewhere = replace(jobs.ASSIGNMENTS[1], node_id="node-c")
    job = after(job, NodesChosen(1040.0, (jobs.ASSIGNMENTS[0], elsewhere)))
    job = after(
        job, NodesRefused(1041.0, job.attempt_id, "host-c is full"), NodesReleased(1042.0, job.attempt_id)
    )
    assert (job.state, job.visited) == (JobState.QUEUED, ("node-a", "node-b", "node-c"))


def test_an_instance_that_could_not_be_made_ready_makes_its_node_a_suspect() -> None:
    from tests.unit.test_lifecycle import EVENTS

    job = after(jobs.preparing(retry=Retry()), EVENTS["not prepared"], closed("master-0"), closed("worker-0"))
    assert (job.after, job.infra_retries, job.avoided) == (JobState.QUEUED, 1, ("node-b",))


def test_an_attempt_that_failed_before_it_began_is_told_of() -> None:
    """Its end was counted in a budget; one that was only withdrawn, before it began, was not."""
    first = after(jobs.preparing(retry=Retry()), replace(LOST, at=1012.0), closed("master-0"), RELEASED)
    assert (first.state, first.attempt, first.infra_retries) == (JobState.QUEUED, 1, 1)
    assert [(past.number, past.outcome) for past in info(first).attempts] == [(0, Outcome.LOST)]


def test_a_job_that_waited_too_long_was_no_attempt() -> None:
    job = after(jobs.queued(), TimePassed(1100.0), NodesReleased(1101.0, "digits-1.-1"))
    assert (job.state, job.reason, job.past) == (JobState.FAILED, Reason.QUEUE_TIMEOUT, ())


def test_a_supervisor_that_was_killed_is_no_fault_of_the_program() -> None:
    killed = exited("worker-0", 1018.0, code=None, signal=9, error="its supervisor was killed", lost=True)
    job = after(jobs.running(retry=Retry()), killed, closed("master-0"), closed("worker-0"))
    assert job.verdict is not None
    assert (job.verdict.reason, job.verdict.hint) == (Reason.INSTANCE_LOST, None)
    assert job.verdict.summary == "worker-0 on host-b was ended: its supervisor was killed"
    assert (job.after, job.retries, job.infra_retries, job.avoided) == (JobState.QUEUED, 0, 1, ("node-b",))


def test_without_a_budget_a_lost_node_fails_the_job() -> None:
    job = after(lost(infra_max=0), RELEASED)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.INSTANCE_LOST)


def test_what_may_run_on_on_a_silent_host_is_waited_for() -> None:
    silent = replace(LOST, until=1068.0)
    job = after(jobs.running(retry=Retry()), silent, closed("master-0"), RELEASED)
    assert (job.state, job.not_before, job.waits_until) == (JobState.QUEUED, None, 1068.0)
    paused = after(jobs.running(retry=Retry(backoff_s=600)), silent, closed("master-0"), RELEASED)
    assert paused.waits_until is not None and paused.waits_until > 1068.0


def test_an_instance_that_does_not_answer_when_it_is_stopped_is_waited_for_too() -> None:
    given_up = after(jobs.suspending(), TimePassed(2000.0), TimePassed(3000.0))
    assert all(item.closed for item in given_up.instances)
    job = after(given_up, replace(RELEASED, at=3001.0))
    assert (job.state, job.waits_until) == (JobState.QUEUED, 3050.0)


def test_how_long_such_an_instance_is_waited_for_was_settled_when_its_attempt_was_placed() -> None:
    suspending = replace(jobs.suspending(), fence_s=120.0)
    job = after(suspending, TimePassed(2000.0), TimePassed(3000.0), replace(RELEASED, at=3001.0))
    assert (job.waits_until, job.fence_s) == (3120.0, 120.0)
    again = after(replace(job, held=None), NodesChosen(3200.0, jobs.ASSIGNMENTS, fence_s=30.0))
    assert (again.waits_until, again.fence_s) == (None, 30.0)


def test_another_controller_counts_the_fence_from_when_it_takes_the_job_up() -> None:
    job = after(jobs.running(retry=Retry()), replace(LOST, until=1068.0), closed("master-0"), RELEASED)
    for now in (1030.0, 4630.0, -2570.0):
        assert fenced_anew(job, now).waits_until == now + 50
    assert fenced_anew(jobs.queued(), 4630.0) == jobs.queued()


# Wishes meanwhile.


def test_who_stops_a_job_that_is_failing_wants_no_further_attempt() -> None:
    for force in (False, True):
        stopped = after(jobs.failing_once(), replace(jobs_stop(), force=force))
        job = after(stopped, closed("master-0"), closed("worker-0"), RELEASED)
        assert (job.state, job.reason) == (JobState.FAILED, Reason.INSTANCE_FAILED)


def test_who_stops_a_job_that_is_to_be_tried_again_leaves_it_the_verdict_that_it_has() -> None:
    job = after(jobs.trying_again(), jobs_stop())
    assert after(job, KEPT) == job, "the nodes are to be given back first"
    job = after(job, RELEASED)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.INSTANCE_FAILED)
    assert [(attempt.outcome, attempt.exit_code) for attempt in job.past] == [(Outcome.FAILED, 3)]


def test_who_stops_a_job_that_waits_for_its_next_attempt_stops_it() -> None:
    waits = after(lost(), RELEASED)
    job = after(waits, jobs_stop(), NodesReleased(1040.0, waits.attempt_id))
    assert (job.state, job.reason) == (JobState.STOPPED, Reason.STOP_REQUESTED)


def test_a_forced_stop_of_a_job_on_its_way_to_the_queue_gives_its_instances_time_to_die() -> None:
    job = after(jobs.making_room(grace_s=600), StopRequested(1100.0, "asked by ada", force=True))
    assert (job.after, job.forced, deadline(job)) == (JobState.STOPPED, True, 1100.0 + STOP_SLACK_S)


def test_the_limit_of_a_running_job_is_told_without_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock asks it of all jobs whenever one changes."""
    job = jobs.running()
    monkeypatch.setattr(backends, "make_plan", None)
    assert deadline(replace(job, spec=job.spec.model_copy())) == 1217.0


def test_a_suspended_job_waits_until_it_is_resumed_and_its_wait_begins_anew() -> None:
    job = after(jobs.suspending(), closed("master-0"), closed("worker-0"), RELEASED)
    assert (job.state, job.reason, job.pending, job.attempt) == (
        JobState.QUEUED,
        Reason.HELD,
        "suspended by ada",
        1,
    )
    assert deadline(job) is None
    assert [(attempt.outcome, attempt.reason) for attempt in job.past] == [
        (Outcome.STOPPED, Reason.SUSPENDED)
    ]
    job = after(job, LetGo(2000.0, "resumed by ada"))
    assert (job.reason, job.held, deadline(job)) == (Reason.WAITING, None, 2100.0)
    assert (job.retries, job.infra_retries) == (0, 0)


def test_a_failing_job_that_is_suspended_is_held_before_its_next_attempt() -> None:
    job = after(jobs.failing_once(), Suspended(1019.0, "suspended by ada"))
    job = after(job, closed("master-0"), closed("worker-0"))
    assert (job.after, job.held) == (JobState.QUEUED, "suspended by ada")


def test_a_preempted_job_goes_back_to_the_queue_and_no_retry_is_counted() -> None:
    job = after(jobs.making_room(), closed("master-0"), closed("worker-0"), RELEASED)
    assert (job.state, job.reason, job.retries, job.infra_retries) == (
        JobState.QUEUED,
        Reason.WAITING,
        0,
        0,
    )
    assert [attempt.outcome for attempt in job.past] == [Outcome.PREEMPTED]
    assert job.past[0].summary == "makes room for urgent-1, which has a higher priority"


def jobs_stop() -> Any:
    from tests.unit.test_lifecycle import EVENTS

    return EVENTS["stop"]


# From end to end.


def test_a_program_that_fails_twice_succeeds_at_the_third_attempt() -> None:
    job = replace(jobs.queued(), spec=JobSpec(command="train", nodes=2, retry=Retry(max=2)))
    world = World(job, nodes("host-a", "host-b"), {"worker-0": Program(seconds=5, code=3, heals=2)})
    world.run()
    assert (world.job.state, world.job.attempt, world.job.retries) == (JobState.SUCCEEDED, 2, 2)
    assert [attempt.outcome for attempt in world.job.past] == [
        Outcome.FAILED,
        Outcome.FAILED,
        Outcome.SUCCEEDED,
    ]
    assert world.job.group_id == "digits-1.0", "all three ran on one reservation"
    assert world.faults == []


def test_a_job_whose_node_is_lost_goes_on_elsewhere() -> None:
    job = replace(jobs.queued(), spec=JobSpec(command="train", nodes=2))
    world = World(job, nodes("host-a", "host-b", "host-c"), losses={"id-of-host-b": 1005.0})
    world.run()
    assert (world.job.state, world.job.attempt, world.job.infra_retries) == (JobState.SUCCEEDED, 1, 1)
    assert {item.node_name for item in world.job.instances} == {"host-a", "host-c"}
    assert world.faults == []


def test_the_reservation_of_the_next_attempt_is_reserved_under_its_old_name() -> None:
    job = after(jobs.trying_again(), KEPT, NodesReserved(1031.0, "digits-1.1"))
    assert (job.state, job.group_id, job.attempt_id) == (JobState.PREPARING, "digits-1.0", "digits-1.1")
