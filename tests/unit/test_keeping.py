"""A failed job that keeps its nodes for a look inside."""

from __future__ import annotations

from dataclasses import replace

from raycontrol.demands import deadline, duties
from raycontrol.events import (
    AwaitedEnded,
    InstanceLost,
    NodesReleased,
    Preempted,
    ReleaseNodes,
    StopRequested,
    TimePassed,
)
from raycontrol.job import Job, info
from raycontrol.jobrows import read_job, row_of
from raycontrol.lifecycle import advance
from raycontrol.relations import Relations
from raycontrol.spec import After, Retry
from raycontrol.status import JobState, Reason
from tests.unit.lifecycle_jobs import ATTEMPT, after, closed, exited, preparing, queued, running

RELEASE = ReleaseNodes(ATTEMPT, last=True, keep=False)


def failed(**timeouts: object) -> Job:
    """Its worker has exited with 7, and all instances are closed at 1030 s."""
    stopping = after(running(**timeouts), exited("worker-0", code=7), exited("master-0", 1021.0, code=0))
    return after(stopping, closed("worker-0", 1029.0), closed("master-0", 1030.0))


def test_it_keeps_its_nodes_for_so_long_with_its_verdict_known() -> None:
    job = failed(keep_failed_s=60)
    assert (job.state, job.after, job.reason) == (JobState.STOPPING, JobState.FAILED, Reason.INSTANCE_FAILED)
    assert (duties(job), deadline(job), job.kept_until) == ((), 1090.0, 1090.0)


def test_who_waits_for_it_is_told_at_once_that_it_is_over_and_with_which_status() -> None:
    shown = info(failed(keep_failed_s=60))
    assert (shown.over, shown.state, shown.exit_status, shown.kept_until) == (
        True,
        JobState.STOPPING,
        7,
        1090.0,
    )


def test_then_it_lets_go_and_has_failed() -> None:
    step = advance(failed(keep_failed_s=60), TimePassed(1090.0))
    assert step.commands == (RELEASE,)
    assert [note.message for note in step.notes] == ["its nodes are let go: the time is over"]
    ended = after(step.job, NodesReleased(1091.0, ATTEMPT))
    assert (ended.state, ended.reason, ended.ended_at) == (JobState.FAILED, Reason.INSTANCE_FAILED, 1091.0)
    assert info(ended).kept_until is None


def test_before_that_time_nothing_happens() -> None:
    job = failed(keep_failed_s=60)
    assert advance(job, TimePassed(1089.9)).job == job


def test_a_stop_lets_go_early_and_changes_no_verdict() -> None:
    step = advance(failed(keep_failed_s=60), StopRequested(1040.0, "seen enough"))
    assert (step.commands, step.job.reason) == ((RELEASE,), Reason.INSTANCE_FAILED)
    assert [note.message for note in step.notes] == ["its nodes are let go: seen enough"]


def test_it_makes_room_for_a_job_of_higher_priority() -> None:
    step = advance(failed(keep_failed_s=60), Preempted(1040.0, "urgent-1"))
    assert (step.commands, step.job.after) == ((RELEASE,), JobState.FAILED)
    assert [note.message for note in step.notes] == [
        "its nodes are let go: makes room for urgent-1, which has a higher priority"
    ]


def test_by_default_nothing_is_kept() -> None:
    assert duties(failed()) == (RELEASE,)


def test_a_job_that_was_stopped_or_has_succeeded_is_not_kept() -> None:
    stopped = after(running(keep_failed_s=60), StopRequested(1020.0, "enough"))
    stopped = after(stopped, closed("worker-0", 1029.0), closed("master-0", 1030.0))
    assert duties(stopped) == (RELEASE,)
    done = after(running(keep_failed_s=60), exited("worker-0", code=0), exited("master-0", code=0))
    assert duties(after(done, closed("worker-0"), closed("master-0"))) == (RELEASE,)


def test_a_force_stop_of_a_failing_job_keeps_nothing() -> None:
    stopping = after(running(keep_failed_s=60), exited("worker-0", code=7))
    forced = after(stopping, StopRequested(1022.0, "now", force=True))
    assert duties(after(forced, closed("worker-0"), closed("master-0"))) == (RELEASE,)


def test_only_the_last_attempt_is_kept() -> None:
    job = failed(keep_failed_s=60, retry=Retry(max=1))
    assert (job.after, job.kept_until) == (JobState.PLACING, None)


def test_a_job_without_a_living_instance_is_not_kept() -> None:
    job = after(running(keep_failed_s=60), InstanceLost(1020.0, ATTEMPT, "master-0", "gone"))
    job = after(job, InstanceLost(1021.0, ATTEMPT, "worker-0", "gone"))
    assert (job.after, job.kept_until) == (JobState.FAILED, None)


def test_a_controller_that_comes_back_goes_on_keeping_it() -> None:
    again = read_job(row_of(failed(keep_failed_s=60)))
    assert (duties(again), deadline(again), again.kept_until) == ((), 1090.0, 1090.0)


def test_who_waits_for_its_failure_is_told_as_soon_as_it_is_known_and_once() -> None:
    relations, kept = Relations(), failed(keep_failed_s=60)
    waiting = replace(
        queued(), id="next-1", spec=queued().spec.model_copy(update={"after": After(failed=(kept.id,))})
    )
    relations.add(waiting)
    before = replace(kept, kept_until=None)
    (follow,) = relations.following(before, kept, closed("master-0", 1030.0))
    assert (follow.job_id, follow.event) == ("next-1", AwaitedEnded(1030.0, kept.id, JobState.FAILED))
    relations.remove(waiting)
    relations.add(after(waiting, follow.event))
    ended = after(kept, TimePassed(1090.0), NodesReleased(1091.0, ATTEMPT))
    assert ended.state is JobState.FAILED
    assert list(relations.following(kept, ended, NodesReleased(1091.0, ATTEMPT))) == []


def test_a_job_that_failed_before_its_command_could_begin_is_not_kept() -> None:
    stopping = after(preparing(keep_failed_s=60), InstanceLost(1014.0, ATTEMPT, "worker-0", "its node left"))
    job = after(stopping, closed("master-0", 1030.0))
    assert (job.state, job.kept_until) == (JobState.STOPPING, None)
