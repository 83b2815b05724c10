"""What a job waits for of other jobs (``after`` in its spec): whether it has come, and whether it still can. Pure.

How those ended is kept with the job that waits (``Job.found_ends``), so that it does not matter when they are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from raycontrol.events import AwaitedEnded
from raycontrol.job import Job
from raycontrol.status import JobState, Reason, Verdict

MEETS: Mapping[str, tuple[JobState | None, ...]] = {
    "ok": (JobState.SUCCEEDED,),
    "failed": (JobState.FAILED,),
    "any": (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED, None),
}
"""By the field of the spec: with which ends of the other job the condition holds. None: it was removed, nobody knows."""
WORDS: Mapping[str, str] = {"ok": "to succeed", "failed": "to fail", "any": "to end"}


class Condition(NamedTuple):
    kind: str
    job_id: str


def conditions(job: Job) -> Iterator[Condition]:
    """Yield what the job waits for of others. For a member of an array that has come before it began."""
    if job.index is not None:
        return
    for kind in MEETS:
        for job_id in getattr(job.spec.after, kind):
            yield Condition(kind, job_id)


def open_conditions(job: Job) -> list[Condition]:
    """Return those of which the end of the other job is not known yet."""
    return [one for one in conditions(job) if one.job_id not in job.found_ends]


def failure(job: Job) -> Verdict | None:
    """Return why the job can never start, once one of its conditions can hold no more."""
    for kind, job_id in conditions(job):
        if job_id in job.found_ends and job.found_ends[job_id] not in MEETS[kind]:
            state = job.found_ends[job_id]
            how = f"is {state}" if state else "was removed before its end was known"
            return Verdict(
                reason=Reason.DEPENDENCY_FAILED,
                summary=f"waited for {job_id} {WORDS[kind]}, but it {how}",
            )
    return None


def why(job: Job, state_of: Callable[[str], JobState | None]) -> str | None:
    """Return what the job waits for, in words; None when nothing is open."""
    if not (left := open_conditions(job)):
        return None
    kind, job_id = left[0]
    state = state_of(job_id)
    shown = f"{job_id} ({state})" if state else job_id
    more = f", and for {len(left) - 1} more" if len(left) > 1 else ""
    return f"waits for {shown} {WORDS[kind]}{more}"


def ended(job: Job, event: AwaitedEnded) -> tuple[Job, str | None] | None:
    """Keep how another job has ended. The last one lets the job into the queue: only now it waits for nodes."""
    known = event.job_id in job.found_ends
    if known or job.state is not JobState.QUEUED:
        return None
    job = replace(job, found_ends={**job.found_ends, event.job_id: event.state})
    if not open_conditions(job):
        job = replace(job, queued_at=event.at, pending=job.held)
    return job, f"{event.job_id} {f'is {event.state}' if event.state else 'was removed'}"
