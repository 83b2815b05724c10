"""How one attempt of a job follows another: what is kept of the one that has ended, and where the next one begins. Pure."""

from __future__ import annotations

from dataclasses import replace

from raycontrol.job import Instance, Job
from raycontrol.retries import ENDS, Budget, again, suspects
from raycontrol.status import AttemptInfo, JobState, Reason
from raycontrol.stopping import Change, success_of

PAST_KEPT = 20
"""So many attempts that have ended are told of, the last ones."""


def placed(job: Job, instances: tuple[Instance, ...], at: float) -> Job:
    """Enter PLACING, with a name that was never used."""
    return replace(
        job.entered(JobState.PLACING, Reason.PLACED, at),
        placed_at=at,
        reservation=job.reservation + 1,
        instances=instances,
        stage=0,
        broken=None,
        failed_worlds=(),
        finish_by=None,
        relieved=False,
        succeeded_with=0,
        drained=(),
    )


def of_size(job: Job, nodes: int) -> Job:
    """Decide on a number of the range of nodes that the job asks for, if it asks for one."""
    if not isinstance(job.spec.nodes, str):
        return job
    return replace(job, spec=job.spec.sized(nodes), nodes_range=job.spec.nodes)


def of_any_size(job: Job) -> Job:
    """Leave the number open again."""
    if job.nodes_range is None:
        return job
    return replace(job, spec=job.spec.sized(job.nodes_range), nodes_range=None)


def recorded(job: Job, at: float) -> Job:
    """Put the attempt that has ended to those that are past; one that was given up before it began is none."""
    if not _counts(job):
        return job
    told = AttemptInfo(
        number=job.attempt,
        outcome=ENDS[job.reason].outcome,
        reason=job.reason,
        summary=job.verdict.summary if job.verdict else success_of(job),
        exit_code=job.verdict.exit_code if job.verdict else job.succeeded_with,
        nodes=tuple(item.node_name for item in job.instances),
        ended_at=at,
    )
    return replace(job, past=(*job.past, told)[-PAST_KEPT:])


def _has_begun(job: Job) -> bool:
    return any(item.facts is not None for item in job.instances)


def _counts(job: Job) -> bool:
    """Whether this was an attempt: it has begun, or it had nodes and has failed, which a budget was charged with."""
    return _has_begun(job) or (job.verdict is not None and bool(job.instances))


def _next(job: Job) -> Job:
    """Forget how the attempt has ended."""
    number = job.attempt + 1 if _counts(job) else job.attempt
    return replace(job, attempt=number, after=None, forced=False, verdict=None, failed_at=None)


def back_in_the_queue(job: Job, at: float) -> Change:
    waits = job.entered(JobState.QUEUED, Reason.WAITING if job.held is None else Reason.HELD, at)
    queued_at = at if _has_begun(job) else job.queued_at
    visited = tuple(dict.fromkeys([*job.visited, *(item.node_id for item in job.instances)]))
    queued = replace(
        _next(waits), instances=(), queued_at=queued_at, group=None, pending=job.held, visited=visited
    )
    return of_any_size(queued), "back in the queue" + (f": {job.held}" if job.held else "")


def fenced_anew(job: Job, now: float) -> Job:
    """Return the job as another controller takes it up at ``now``: what was lost may still run on for as long as it may at
    most. When it was lost is no measure: clocks may have been set since."""
    return job if job.fenced_until is None else replace(job, fenced_until=now + job.fence_s)


def later(one: float | None, other: float | None) -> float | None:
    return max((at for at in (one, other) if at is not None), default=None)


def on_the_same_nodes(job: Job, at: float) -> Change:
    instances = tuple(
        Instance(item.name, item.group, item.role, item.index, item.node_id, item.node_name, item.ip)
        for item in job.instances
    )
    return placed(replace(_next(job), group=job.group_id), instances, at), "on the same nodes again"


def try_again(job: Job, at: float) -> Change:
    """Only now it is known why the attempt has failed: news of what had happened before may have come until now."""
    following = again(job)
    assert following is not None
    counted = following.budget is Budget.PROGRAM
    job = replace(
        job,
        after=JobState.PLACING if following.keeps_nodes else JobState.QUEUED,
        retries=job.retries + counted,
        infra_retries=job.infra_retries + (not counted),
        not_before=at + following.pause_s if following.pause_s else None,
        avoided=suspects(job),
    )
    return job, str(following)
