"""Routes that run a command across nodes, or inside a job; what comes of it is told while the connection lasts."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from raycontrol.access import Action, Identity
from raycontrol.api import bodies
from raycontrol.api.described import EVENT, MEDIA, PREFIX, PROBLEMS, gives, takes
from raycontrol.api.guards import Guard, JobGuard, shut_out
from raycontrol.api.hubs import hub_of
from raycontrol.api.models import JobExec, NodesExec
from raycontrol.api.sse import BEAT, BEAT_S, event
from raycontrol.api.streams import GuardedStream, ShutOut
from raycontrol.api.visits import visit_of
from raycontrol.execution import Began, Command, News, Over, Target, Wrote
from raycontrol.nodesets import folded
from raycontrol.spread import SpreadExecution
from raycontrol.status import JobInfo

router = APIRouter(prefix=PREFIX, tags=["exec"], responses=PROBLEMS)

Admin = Annotated[Identity, Depends(Guard(Action.RUN_ON_NODES, "exec"))]
EnteredJob = Annotated[JobInfo, Depends(JobGuard(Action.RUN_IN_JOB, "exec"))]

EVENTS = gives(
    "`places`: the names of where it runs; then `began`, `output` (bytes in base64) and `over` of each, and `end`.",
    events=EVENT,
)


@router.post(
    "/exec",
    response_class=StreamingResponse,
    responses=EVENTS,
    openapi_extra=takes(("application/json", NodesExec)),
)
async def exec_on_nodes(request: Request, identity: Admin) -> StreamingResponse:
    """Run a command on nodes, as the user that Ray runs as there. Who closes the connection has it ended everywhere."""
    limits = hub_of(request).limits
    wanted = await bodies.read_model(request, NodesExec, limits.piece_bytes, limits.body_s)
    target = Target(wanted.nodes, wanted.all, group=wanted.group, absent_too=wanted.absent_too)
    command = Command(_words(wanted), wanted.script, wanted.timeout_s, wanted.plain, wanted.root)
    return await _carried_out(request, target, command, wanted.parallel)


@router.post(
    "/jobs/{job_id}/exec",
    response_class=StreamingResponse,
    responses=EVENTS,
    openapi_extra=takes(("application/json", JobExec)),
)
async def exec_in_job(request: Request, job: EnteredJob) -> StreamingResponse:
    """Run a command inside instances of a job, as its start command runs. Who closes the connection has it ended."""
    limits = hub_of(request).limits
    wanted = await bodies.read_model(request, JobExec, limits.piece_bytes, limits.body_s)
    target = Target(job=job.id, instances=wanted.instances, group=wanted.group)
    command = Command(_words(wanted), wanted.script, wanted.timeout_s)
    return await _carried_out(request, target, command, wanted.parallel)


def _words(wanted: NodesExec | JobExec) -> str | tuple[str, ...]:
    if wanted.script is not None and not wanted.command:
        return ()
    return wanted.command if isinstance(wanted.command, str) else tuple(wanted.command)


async def _carried_out(
    request: Request, target: Target, command: Command, parallel: int | None
) -> StreamingResponse:
    """The audit tells where it ran, and who had it run; not the command, which may hold secrets."""
    hub = hub_of(request)
    with ExitStack() as held:
        held.enter_context(hub.execs.one())
        execution = SpreadExecution(await hub.calls.ask(lambda door: door.spread(target, command, parallel)))
        held.callback(execution.close)
        if target.job is None:
            visit_of(request).target = folded(execution.places)
        return ExecStream(execution, held.pop_all(), lambda: shut_out(request))


class ExecStream(GuardedStream):
    """The news of a command, which ends with the stream, however that ends; ``held`` is given back then."""

    def __init__(self, execution: SpreadExecution, held: ExitStack, shut_out: ShutOut) -> None:
        super().__init__(_pieces(execution), shut_out, media_type=MEDIA["events"])
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.shield(asyncio.to_thread(self._held.close))


async def _pieces(execution: SpreadExecution) -> AsyncIterator[bytes]:
    yield _event("places", {"places": list(execution.places)})
    while True:
        asked = asyncio.wrap_future(execution.next())
        while not (await asyncio.wait({asked}, timeout=BEAT_S))[0]:
            yield BEAT
        news = asked.result()
        if news is None:
            break
        yield _told(news)
    yield _event("end", {})


def _told(news: News) -> bytes:
    match news:
        case Began():
            return _event("began", asdict(news))
        case Wrote(place, data):
            return _event("output", {"place": place, "data": base64.b64encode(data).decode()})
        case Over():
            return _event("over", asdict(news))


def _event(kind: str, document: dict[str, object]) -> bytes:
    return event(json.dumps(document), kind=kind)
