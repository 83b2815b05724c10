"""Routes that change a job: stop it, remove it, and what else is wanted of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from raycontrol.access import Action
from raycontrol.api import bodies
from raycontrol.api.described import PREFIX, PROBLEMS, takes
from raycontrol.api.guards import JobGuard
from raycontrol.api.hubs import Hub, hub_of
from raycontrol.api.models import NewPriority, Stop, Why
from raycontrol.api.problems import Conflict
from raycontrol.api.visits import visit_of
from raycontrol.errors import UsageError
from raycontrol.readers import ServerDoor
from raycontrol.status import JobInfo, Wish

router = APIRouter(prefix=PREFIX, tags=["jobs"], responses=PROBLEMS)

StoppedJob = Annotated[JobInfo, Depends(JobGuard(Action.CHANGE_JOB, "stop"))]
HeldJob = Annotated[JobInfo, Depends(JobGuard(Action.CHANGE_JOB, "hold"))]
ReleasedJob = Annotated[JobInfo, Depends(JobGuard(Action.CHANGE_JOB, "release"))]
SuspendedJob = Annotated[JobInfo, Depends(JobGuard(Action.CHANGE_JOB, "suspend"))]
ResumedJob = Annotated[JobInfo, Depends(JobGuard(Action.CHANGE_JOB, "resume"))]
ReorderedJob = Annotated[JobInfo, Depends(JobGuard(Action.CHANGE_JOB, "priority"))]
DeletedJob = Annotated[JobInfo, Depends(JobGuard(Action.CHANGE_JOB, "delete"))]


@router.delete("/jobs/{job_id}", status_code=204)
async def delete_job(request: Request, job: DeletedJob) -> Response:
    """Remove an ended job with all it kept: events, logs, outputs."""
    if job.index is not None:
        raise Conflict(f"job {job.id!r} is a member of an array, and is removed with it")
    if not (job.state.terminal or job.abandoned):
        raise Conflict(f"job {job.id!r} is {job.state}; stop it before it is removed")
    hub = hub_of(request)
    try:
        await hub.change(lambda door: door.prune([job.id]))
    finally:
        hub.sizes.forget()
    return Response(status_code=204)


@router.post(
    "/jobs/{job_id}/stop",
    response_model=JobInfo,
    openapi_extra=takes(("application/json", Stop), required=False),
)
async def stop_job(request: Request, job: StoppedJob) -> JobInfo:
    """Ask a job to stop; the answer comes before it has. One that has ended stays as it is."""
    hub = hub_of(request)
    wanted = await bodies.read_model(request, Stop, hub.limits.body_bytes, hub.limits.body_s)
    why = wanted.why or f"stopped by {_user(request)} over HTTP"
    return await hub.change(lambda door: door.stop(job.id, why, wanted.force))


@router.put(
    "/jobs/{job_id}/priority",
    response_model=JobInfo,
    openapi_extra=takes(("application/json", NewPriority)),
)
async def set_priority(request: Request, job: ReorderedJob) -> JobInfo:
    """Give a waiting job another priority; 409 where it does not wait."""
    hub = hub_of(request)
    wanted = await bodies.read_model(request, NewPriority, hub.limits.body_bytes, hub.limits.body_s)
    why = wanted.why or f"priority {wanted.priority}, by {_user(request)} over HTTP"
    return await _if_its_state_allows(hub, lambda door: door.set_priority(job.id, wanted.priority, why))


@router.post(
    "/jobs/{job_id}/hold",
    response_model=JobInfo,
    openapi_extra=takes(("application/json", Why), required=False),
)
async def hold_job(request: Request, job: HeldJob) -> JobInfo:
    """Keep a waiting job from being started; 409 where it does not wait."""
    return await _wish(request, job, Wish.HOLD)


@router.post(
    "/jobs/{job_id}/release",
    response_model=JobInfo,
    openapi_extra=takes(("application/json", Why), required=False),
)
async def release_job(request: Request, job: ReleasedJob) -> JobInfo:
    """Let a job go that was held or suspended; one that is not stays as it is."""
    return await _wish(request, job, Wish.RELEASE)


@router.post(
    "/jobs/{job_id}/suspend",
    response_model=JobInfo,
    openapi_extra=takes(("application/json", Why), required=False),
)
async def suspend_job(request: Request, job: SuspendedJob) -> JobInfo:
    """Stop a job and keep it in the queue, held; the answer comes before it has stopped. 409 where it is ending."""
    return await _wish(request, job, Wish.SUSPEND)


@router.post(
    "/jobs/{job_id}/resume",
    response_model=JobInfo,
    openapi_extra=takes(("application/json", Why), required=False),
)
async def resume_job(request: Request, job: ResumedJob) -> JobInfo:
    """Let a suspended job go on, with another attempt; one that is not suspended stays as it is."""
    return await _wish(request, job, Wish.RESUME)


async def _wish(request: Request, job: JobInfo, wish: Wish) -> JobInfo:
    hub = hub_of(request)
    wanted = await bodies.read_model(request, Why, hub.limits.body_bytes, hub.limits.body_s)
    why = wanted.why or f"{wish.done} by {_user(request)} over HTTP"
    return await _if_its_state_allows(hub, lambda door: door.wish(job.id, wish, why))


async def _if_its_state_allows(hub: Hub, change: Callable[[ServerDoor], JobInfo]) -> JobInfo:
    """Return the job as it is now; raises Conflict where its state does not allow the change."""
    try:
        return await hub.change(change)
    except UsageError as error:
        raise Conflict(str(error)) from None


def _user(request: Request) -> str:
    identity = visit_of(request).identity
    assert identity is not None
    return identity.user
