"""Routes about jobs: submit, list, look at; their events, plans and usage."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from starlette.responses import StreamingResponse

from raycontrol.access import Action, Identity, allowed
from raycontrol.api import bodies, specs
from raycontrol.api.attempts import attempt_of
from raycontrol.api.described import EVENT, PREFIX, PROBLEMS, TEXT, gives, takes
from raycontrol.api.guards import Guard, JobGuard, own_only, shut_out
from raycontrol.api.hubs import Hub, hub_of
from raycontrol.api.listings import NO_JOBS, Listing
from raycontrol.api.models import Doubts, JobPage, JobPlan, NewJob, SpecOnly
from raycontrol.api.pages import place_of
from raycontrol.api.plans import stored_plan
from raycontrol.api.problems import Conflict, NoSuchRange, Unfit, UnknownMedia
from raycontrol.api.sse import BEAT, BEAT_S, begin, end_event, event
from raycontrol.api.usages import last_samples
from raycontrol.api.visits import visit_of
from raycontrol.api.watchers import EventStream, Mark, Watcher, happened
from raycontrol.client import new_job_id
from raycontrol.errors import Fault, JobNotFound
from raycontrol.hardware import InstanceUsage
from raycontrol.job import Submission, checked_id
from raycontrol.spec import After as Awaited
from raycontrol.spec import JobSpec
from raycontrol.status import Event, InstanceInfo, JobInfo, JobState, MemberInfo
from raycontrol.version import __version__

router = APIRouter(prefix=PREFIX, tags=["jobs"], responses=PROBLEMS)

YAML_TYPES = frozenset({"application/yaml", "application/x-yaml", "text/yaml"})
IDS_MAX = 100
PAGE_MAX = 500

T = TypeVar("T")

Submitter = Annotated[Identity, Depends(Guard(Action.SUBMIT, "submit"))]
Asker = Annotated[Identity, Depends(Guard(Action.SUBMIT))]
Viewer = Annotated[Identity, Depends(Guard(Action.READ_JOB))]
SeenJob = Annotated[JobInfo, Depends(JobGuard(Action.READ_JOB))]
WholeJob = Annotated[JobInfo, Depends(JobGuard(Action.READ_JOB, whole=True))]
After = Annotated[int, Query(ge=0, le=2**62, description="The `seq` of the last event that is known.")]
Attempt = Annotated[int | None, Query(ge=0, le=1_000_000, description="By default the current one.")]


@router.post(
    "/jobs",
    status_code=201,
    response_model=JobInfo,
    responses={200: {"model": JobInfo, "description": "It had been submitted before."}},
    openapi_extra=takes(("application/json", NewJob), ("application/yaml", TEXT)),
)
async def submit(
    request: Request,
    response: Response,
    identity: Submitter,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
    job_id: Annotated[str | None, Query(max_length=80, description="With a YAML body.")] = None,
    package: Annotated[str | None, Query(pattern="^[0-9a-f]{64}$", description="With a YAML body.")] = None,
) -> JobInfo:
    """Submit a job as the token's user. The same Idempotency-Key with the same body again submits nothing."""
    hub, visit = hub_of(request), visit_of(request)
    body = await bodies.read_body(request, hub.limits.body_bytes, hub.limits.body_s)
    kind = bodies.media_type(request)
    wanted, spec = await hub.calls.check(lambda: _read(kind, body, job_id, package))
    if wanted.job_id is not None:
        checked_id(wanted.job_id)
    await _check_package(hub, wanted.package)
    await _check_awaited(hub, identity, spec.after)
    submission = Submission(
        job_id=wanted.job_id or new_job_id(spec.name or "job"),
        spec=spec,
        user=identity.user,
        package=wanted.package,
        version=__version__,
        key=idempotency_key,
        fingerprint=specs.fingerprint(kind, request.url.query, body) if idempotency_key else None,
        request_id=visit.request_id,
        origin=visit.origin,
    )
    job, new = await hub.change(lambda door: door.take_in(submission))
    visit.target = job.id
    response.headers["Location"] = f"{PREFIX}/jobs/{job.id}"
    response.status_code = 201 if new else 200
    return job


@router.get("/jobs", response_model=JobPage)
async def list_jobs(
    request: Request,
    identity: Viewer,
    state: Annotated[list[JobState] | None, Query(max_length=9)] = None,
    user: Annotated[str | None, Query(max_length=256)] = None,
    label: Annotated[
        list[str] | None, Query(max_length=20, description="`name=value`; a job must have all.")
    ] = None,
    text: Annotated[str | None, Query(max_length=256, description="Part of a name or an id.")] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
    after: Annotated[str | None, Query(max_length=400, description="The `next` of the page before.")] = None,
) -> Response:
    """List jobs, newest first, as they were within the last second. The role `user` sees its own."""
    before = None if after is None else place_of(after)
    labels = _labels(label or [])
    own = own_only(identity)
    if own is not None and user not in (None, own):
        return Response(NO_JOBS, media_type=bodies.JSON)
    wanted = Listing(tuple(state or ()), own or user, labels, text or None, limit, before)
    return Response(await hub_of(request).listings.get(wanted), media_type=bodies.JSON)


@router.get("/ids", response_model=list[str])
async def find_ids(
    request: Request,
    identity: Viewer,
    prefix: Annotated[str, Query(max_length=80)] = "",
) -> list[str]:
    """List the ids that begin so, at most 100; only that id where one is the whole of it. The role `user` sees its own."""
    calls, own = hub_of(request).calls, own_only(identity)
    if own is None:
        return await calls.ask(lambda door: door.find(prefix))
    jobs = await calls.ask(lambda door: door.jobs(None, own, PAGE_MAX, text=prefix or None))
    found = sorted(job.id for job in jobs if job.id.startswith(prefix))
    return [prefix] if prefix in found else found[:IDS_MAX]


@router.post("/doubts", response_model=Doubts, openapi_extra=takes(("application/json", SpecOnly)))
async def doubts(request: Request, _: Asker) -> Doubts:
    """Say why the cluster as it is could never run a job of this spec."""
    hub = hub_of(request)
    wanted = await bodies.read_model(request, SpecOnly, hub.limits.body_bytes, hub.limits.body_s)
    spec = await hub.calls.check(lambda: specs.spec_of_json(wanted.spec))
    return Doubts(doubts=await hub.calls.ask(lambda door: door.doubts(spec)))


@router.get("/jobs/{job_id}", response_model=JobInfo)
async def get_job(job: WholeJob) -> JobInfo:
    """Show a job."""
    return job


@router.get("/jobs/{job_id}/instances", response_model=list[InstanceInfo])
async def list_instances(job: WholeJob) -> tuple[InstanceInfo, ...]:
    """List the instances of the current (or last) attempt."""
    return job.instances


@router.get("/jobs/{job_id}/members", response_model=list[MemberInfo])
async def list_members(request: Request, job: SeenJob) -> list[MemberInfo]:
    """List the members of an array, in the order of their indices; a member's own id serves wherever a job's does."""
    if job.array is None:
        raise Conflict(f"job {job.id!r} is no array")
    return await hub_of(request).calls.ask(lambda door: door.members(job.id))


@router.get("/jobs/{job_id}/plan", response_model=JobPlan)
async def get_plan(request: Request, job: SeenJob) -> JobPlan:
    """Show what the job does on each instance: environment, files, commands and their order."""
    hub = hub_of(request)
    return await hub.calls.read(lambda: stored_plan(hub.home, job.id))


@router.get("/jobs/{job_id}/usage", response_model=dict[str, list[InstanceUsage]])
async def get_usage(
    request: Request,
    job: SeenJob,
    last: Annotated[int, Query(ge=1, le=1000)] = 1,
    attempt: Attempt = None,
) -> dict[str, tuple[InstanceUsage, ...]]:
    """Show the last samples of what each instance uses, oldest first; at most 10000 of all instances together."""
    hub = hub_of(request)
    wanted = await attempt_of(hub, job, attempt)
    return await hub.calls.read(lambda: last_samples(hub.home, job.id, wanted, last))


@router.get("/jobs/{job_id}/events", response_model=list[Event])
async def list_events(
    request: Request,
    job: SeenJob,
    after: After = 0,
    wait_s: Annotated[float, Query(ge=0, le=20, allow_inf_nan=False)] = 0,
) -> list[Event]:
    """List what has happened to a job, oldest first, at most 1000; wait for the first if there is none yet."""
    hub = hub_of(request)
    if wait_s == 0 or job.over:
        return await hub.calls.ask(lambda door: door.events(job.id, after, 0))
    with hub.watchers.following(job) as watcher:
        mark = watcher.mark()
        found = await _events_of(request, watcher, after)
        if not found and not watcher.over:
            await _until_news(watcher, after, mark, wait_s)
            found = await _events_of(request, watcher, after)
        if not found and watcher.trouble is not None:
            raise watcher.trouble  # that nothing has happened nobody knows
    return found


@router.get(
    "/jobs/{job_id}/events/stream",
    response_class=StreamingResponse,
    responses=gives("Events as they happen; an event `end` is the last.", events=EVENT),
)
async def stream_events(
    request: Request,
    job: SeenJob,
    after: After = 0,
    last_event_id: Annotated[int | None, Header(ge=0, le=2**62)] = None,
) -> EventStream:
    """Follow a job's events until it ends, as server-sent events whose id is the event's `seq`."""
    start = after if last_event_id is None else await _resumed(request, job, last_event_id)
    return EventStream(
        hub_of(request).watchers,
        job,
        lambda watcher: _stream(request, watcher, start),
        lambda: shut_out(request),
    )


async def _resumed(request: Request, job: JobInfo, event_id: int) -> int:
    """Return the id; raises NoSuchRange for one past the last event, who would wait for what he has missed."""
    if event_id and not await hub_of(request).calls.ask(lambda door: door.events(job.id, event_id - 1, 0)):
        raise NoSuchRange(f"last-event-id: {event_id} is past the last event of job {job.id!r}")
    return event_id


async def _stream(request: Request, watcher: Watcher, after: int) -> AsyncIterator[bytes]:
    yield begin(after)
    while True:
        mark, over = watcher.mark(), watcher.over
        found = await _events_of(request, watcher, after)
        if found:
            after = found[-1].seq
            yield b"".join(event(item.model_dump_json(), item.seq) for item in found)
        elif over:
            yield end_event({"state": watcher.job.state})
            return
        elif await happened(mark, BEAT_S):
            await watcher.turn()
        else:
            yield BEAT


async def _events_of(request: Request, watcher: Watcher, after: int) -> list[Event]:
    """Return the events after ``after``: those that the watcher has, and from the store what is older."""
    if after >= watcher.events_since:
        return [item for item in watcher.events if item.seq > after]
    job_id = watcher.job.id
    return await hub_of(request).calls.ask(lambda door: door.events(job_id, after, 0))


async def _until_news(watcher: Watcher, after: int, mark: Mark, wait_s: float) -> None:
    """Wait for an event, not only for bytes of a log, which are news too."""
    deadline = time.monotonic() + wait_s
    while await happened(mark, max(0.0, deadline - time.monotonic())):
        mark = watcher.mark()
        if watcher.over or any(item.seq > after for item in watcher.events):
            return


def _read(kind: str, body: bytes, job_id: str | None, package: str | None) -> tuple[NewJob, JobSpec]:
    """Return what is wanted, and its spec, from a body of either kind."""
    if kind in YAML_TYPES:
        wanted = bodies.validated(NewJob, {"spec": {}, "job_id": job_id, "package": package})
        document = specs.document_of_yaml(body)
    elif kind == bodies.JSON:
        _refuse_in_query(job_id=job_id, package=package)
        wanted = bodies.validated(NewJob, bodies.parsed_json(body))
        document = specs.document_of_json(wanted.spec)
    else:
        raise UnknownMedia("the body must be application/json or application/yaml")
    return wanted, specs.submittable(document, wanted.package)


def _refuse_in_query(**given: str | None) -> None:
    """What goes into the query with a YAML body has its place in a JSON body: two places could say two things."""
    faults = [
        Fault(name, "goes into the body where that is JSON")
        for name, value in given.items()
        if value is not None
    ]
    if faults:
        raise Unfit(*faults)


async def _check_package(hub: Hub, digest: str | None) -> None:
    """Raise Unfit where the archive has no such package."""
    if digest is not None and not await hub.calls.ask(lambda door: door.has_package(digest)):
        raise Unfit(Fault("package", "is not in the archive; upload it with PUT first"))


async def _check_awaited(hub: Hub, identity: Identity, after: Awaited) -> None:
    """Raise Unfit for jobs that are not there for who asks: to wait for another's job would tell how it ends."""
    named = [(kind, job_id) for kind in Awaited.model_fields for job_id in getattr(after, kind)]
    faults = [
        Fault(f"after.{kind}", f"there is no job {job_id!r}")
        for kind, job_id in named
        if not await _may_see(hub, identity, job_id)
    ]
    if faults:
        raise Unfit(*faults)


async def _may_see(hub: Hub, identity: Identity, job_id: str) -> bool:
    try:
        job = await hub.calls.ask(lambda door: door.glance(job_id))
    except JobNotFound:
        return False
    return allowed(identity, Action.READ_JOB, job.user)


def _labels(pairs: list[str]) -> tuple[tuple[str, str], ...]:
    faults = [Fault("label", "must be name=value", pair) for pair in pairs if "=" not in pair]
    named = [(name, value) for name, value in (pair.split("=", 1) for pair in pairs if "=" in pair)]
    wanted = dict(named)
    faults += [Fault("label", "must have one value", name) for name, value in named if wanted[name] != value]
    if faults:
        raise Unfit(*faults)
    return tuple(wanted.items())
