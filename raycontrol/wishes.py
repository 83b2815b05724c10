"""What people, and the queue, want of a job: that it stops, waits, goes on, makes room, has another priority. Pure.

Each function is the lifecycle's for an event of that kind: it returns the changed job and what to tell, or None when
nothing changes.
"""

from __future__ import annotations

from dataclasses import replace

from raycontrol import keeping
from raycontrol.events import Held, LetGo, Preempted, PriorityChanged, StopRequested, Suspended
from raycontrol.job import Job
from raycontrol.retries import ENDS, will_be_tried_again
from raycontrol.status import JobState, Reason, Verdict
from raycontrol.stopping import Change, stop


def stop_requested(job: Job, event: StopRequested) -> Change:
    verdict = Verdict(reason=Reason.STOP_REQUESTED, summary=event.why)
    if job.state is not JobState.STOPPING:
        stopped, message = stop(job, event.at, verdict, because=event.why)
        return replace(stopped, forced=event.force), message
    if job.kept_until is not None:
        return keeping.over(job, event.why)
    if job.after in (JobState.QUEUED, JobState.PLACING):
        if event.force and not job.forced:
            job = replace(job, forced=True, since=event.at)
        if job.verdict is not None and ENDS[job.verdict.reason].after is JobState.FAILED:
            job = replace(job, after=JobState.FAILED, unwanted=True, not_before=None)
            return job, f"stop requested: {event.why}; there will be no further attempt"
        job = replace(job, after=JobState.STOPPED, reason=Reason.STOP_REQUESTED, verdict=verdict)
        return job, f"stop requested: {event.why}"
    if event.force and not job.forced:
        job = replace(job, forced=True, since=event.at, finish_by=None, unwanted=True)
        return job, f"forced: {event.why}"
    if job.finish_by is not None:
        return replace(job, since=event.at, finish_by=None), f"stop requested: {event.why}"
    if will_be_tried_again(job):
        return replace(job, unwanted=True), f"stop requested: {event.why}; there will be no further attempt"
    return None


def held(job: Job, event: Held) -> Change:
    if job.state is not JobState.QUEUED or job.held is not None:
        return None
    return replace(job, held=event.why, pending=event.why, reason=Reason.HELD), event.why


def let_go(job: Job, event: LetGo) -> Change:
    if job.held is None:
        return None
    job = replace(job, held=None, pending=None)
    if job.state is JobState.QUEUED:
        job = replace(job, reason=Reason.WAITING, queued_at=event.at)
    return job, event.why


def suspended(job: Job, event: Suspended) -> Change:
    if job.held is not None:
        return None
    match job.state:
        case JobState.QUEUED:
            return held(job, Held(event.at, event.why))
        case JobState.STOPPING if job.after in (JobState.QUEUED, JobState.PLACING):
            return replace(job, held=event.why, after=JobState.QUEUED), event.why
        case JobState.STOPPING if will_be_tried_again(job):
            return replace(job, held=event.why), event.why
        case JobState.STOPPING:
            return None
    verdict = Verdict(reason=Reason.SUSPENDED, summary=event.why)
    stopped, message = stop(job, event.at, verdict, because=event.why)
    return replace(stopped, held=event.why), message


def preempted(job: Job, event: Preempted) -> Change:
    why = f"makes room for {event.for_job}, which has a higher priority"
    if job.kept_until is not None:
        return keeping.over(job, why)
    if job.state in (JobState.QUEUED, JobState.STOPPING):
        return None
    return stop(job, event.at, Verdict(reason=Reason.PREEMPTED, summary=why), because=why)


def priority_changed(job: Job, event: PriorityChanged) -> Change:
    changes = job.state is JobState.QUEUED or job.index is not None  # an array's holds for all its members
    if not changes or job.spec.priority == event.priority:
        return None
    return replace(job, spec=job.spec.model_copy(update={"priority": event.priority})), event.why
