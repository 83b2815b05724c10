"""What a job waits for of other jobs: by the lifecycle alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raycontrol.demands import deadline
from raycontrol.dependencies import why
from raycontrol.errors import SpecError
from raycontrol.events import AwaitedEnded, Held, NodesChosen, NodesReleased, StopRequested
from raycontrol.job import Job, info
from raycontrol.lifecycle import advance
from raycontrol.queue import KeepWaiting, Wait, Waiting, decide
from raycontrol.spec import After, JobSpec
from raycontrol.status import JobState, Reason
from tests.unit import lifecycle_jobs as jobs
from tests.unit.fake_gangs import nodes
from tests.unit.lifecycle_jobs import ASSIGNMENTS, after


def waiting(**conditions: list[str]) -> Job:
    """A job submitted at 1000 s, with queue_s 100, that waits for others."""
    job = jobs.queued()
    return replace(job, spec=job.spec.model_copy(update={"after": After(**conditions)}))


def ended(job_id: str, state: JobState | None, at: float = 1050.0) -> AwaitedEnded:
    return AwaitedEnded(at, job_id, state)


def is_placed(job: Job) -> bool:
    return advance(job, NodesChosen(1060.0, ASSIGNMENTS)).job.state is JobState.PLACING


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("ok", JobState.SUCCEEDED),
        ("failed", JobState.FAILED),
        ("any", JobState.SUCCEEDED),
        ("any", JobState.FAILED),
        ("any", JobState.STOPPED),
        ("any", None),
    ],
)
def test_a_job_may_start_once_the_other_has_ended_as_it_is_wanted(kind: str, state: JobState | None) -> None:
    job = waiting(**{kind: ["first-1"]})
    assert not is_placed(job)
    assert is_placed(after(job, ended("first-1", state)))


@pytest.mark.parametrize(
    ("kind", "state", "summary"),
    [
        ("ok", JobState.FAILED, "waited for first-1 to succeed, but it is FAILED"),
        ("ok", JobState.STOPPED, "waited for first-1 to succeed, but it is STOPPED"),
        ("failed", JobState.SUCCEEDED, "waited for first-1 to fail, but it is SUCCEEDED"),
        ("failed", JobState.STOPPED, "waited for first-1 to fail, but it is STOPPED"),
        ("ok", None, "waited for first-1 to succeed, but it was removed before its end was known"),
    ],
)
def test_a_job_ends_by_itself_when_what_it_waits_for_cannot_come(
    kind: str, state: JobState | None, summary: str
) -> None:
    job = after(waiting(**{kind: ["first-1"]}), ended("first-1", state))
    assert job.state is JobState.STOPPING
    job = after(job, NodesReleased(1051.0, job.attempt_id))
    assert (job.state, job.reason) == (JobState.FAILED, Reason.DEPENDENCY_FAILED)
    assert job.verdict is not None
    assert job.verdict.summary == summary
    assert (info(job).exit_status, info(job).exit_code, job.past) == (125, None, ())


def test_a_job_waits_for_all_that_it_names() -> None:
    job = waiting(ok=["first-1", "second-1"], failed=["third-1"], any=["fourth-1"])
    for job_id, state in (
        ("third-1", JobState.FAILED),
        ("first-1", JobState.SUCCEEDED),
        ("fourth-1", JobState.STOPPED),
    ):
        job = after(job, ended(job_id, state))
        assert not is_placed(job)
    assert is_placed(after(job, ended("second-1", JobState.SUCCEEDED)))


def test_it_says_for_whom_it_waits_and_what_that_one_does() -> None:
    job = waiting(ok=["first-1"], any=["second-1"])
    states = {"first-1": JobState.RUNNING}
    assert why(job, states.get) == "waits for first-1 (RUNNING) to succeed, and for 1 more"
    job = after(job, ended("first-1", JobState.SUCCEEDED))
    assert why(job, states.get) == "waits for second-1 to end"
    assert why(after(job, ended("second-1", JobState.FAILED)), states.get) is None


def test_the_time_in_the_queue_counts_from_when_it_waits_for_nodes() -> None:
    job = waiting(any=["first-1"])
    assert deadline(job) is None
    job = after(job, ended("first-1", JobState.FAILED, at=5000.0))
    assert (deadline(job), job.submitted_at) == (5100.0, 1000.0)


def test_the_first_word_about_another_job_counts() -> None:
    job = after(waiting(ok=["first-1", "second-1"]), ended("first-1", JobState.SUCCEEDED))
    assert after(job, ended("first-1", None)) == job


def test_a_job_that_waits_can_be_held_and_stopped() -> None:
    job = after(waiting(ok=["first-1"]), Held(1010.0, "held by ada"), ended("first-1", JobState.SUCCEEDED))
    assert (job.held, job.pending, is_placed(job)) == ("held by ada", "held by ada", False)
    stopped = after(
        waiting(ok=["first-1"]), StopRequested(1010.0, "by ada"), ended("first-1", JobState.FAILED)
    )
    assert (stopped.state, stopped.reason) == (JobState.STOPPING, Reason.STOP_REQUESTED)


def test_nobody_waits_behind_a_job_that_waits_for_others() -> None:
    spec = JobSpec(command="true", resources={"cpu": 4})
    one = Waiting("one-1", spec, 1.0, awaits="waits for first-1 (RUNNING) to succeed")
    two = Waiting("two-1", spec, 2.0)
    first, second = decide([two, one], nodes("host-a", cpu=4))
    assert first == KeepWaiting("one-1", Wait.AFTER, "waits for first-1 (RUNNING) to succeed")
    assert second.job_id == "two-1"
    assert not isinstance(second, KeepWaiting)


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        ({"ok": ["a/b"]}, "after.ok"),
        ({"ok": ["first-1"], "failed": ["first-1"]}, "after.failed: must not name first-1"),
        ({"succeeded": ["first-1"]}, "after.succeeded"),
        ({"ok": "first-1"}, "after.ok"),
        ({"any": ["sweep-1~3"]}, "must not be a member of an array: wait for the array"),
    ],
)
def test_what_nobody_could_wait_for_is_refused(written: Any, fault: str) -> None:
    with pytest.raises(SpecError, match=fault):
        JobSpec(command="true", after=written)
