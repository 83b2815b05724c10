"""Routes about what jobs wrote: logs in ranges, by lines and as they grow; logs and outputs as one archive."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from starlette.responses import StreamingResponse

from raycontrol import wording
from raycontrol.access import Action
from raycontrol.api import bodies
from raycontrol.api.attempts import attempt_of
from raycontrol.api.described import BYTES, EVENT, MEDIA, PREFIX, PROBLEMS, gives, takes
from raycontrol.api.files import (
    CHUNK_BYTES,
    InThread,
    LogFiles,
    Packed,
    checked_instance,
    log_members,
    output_members,
    tar,
)
from raycontrol.api.guards import JobGuard, shut_out
from raycontrol.api.hubs import Hub, hub_of
from raycontrol.api.jobroutes import Attempt
from raycontrol.api.logevents import MOST_LOGS, LogsCutter
from raycontrol.api.models import LogRead, Place
from raycontrol.api.problems import Conflict, NoSuchRange, NotThere, Unfit
from raycontrol.api.sse import BEAT, BEAT_S, LineCutter, begin, end_event, log_events
from raycontrol.api.streams import GuardedStream
from raycontrol.api.watchers import EventStream, Mark, Watcher, happened
from raycontrol.errors import Fault
from raycontrol.status import JobInfo

router = APIRouter(prefix=PREFIX, tags=["logs"], responses=PROBLEMS)

READ_MAX_BYTES = 4 << 20
FOLLOWED_BYTES = 64 * 1024
LINES_MAX = 10_000
NAMES_SHOWN = 20

SeenJob = Annotated[JobInfo, Depends(JobGuard(Action.READ_JOB))]
Offset = Annotated[int | None, Query(ge=0, le=2**62)]
Tail = Annotated[int | None, Query(ge=0, le=LINES_MAX, description="Only the last so many lines.")]


@router.get("/jobs/{job_id}/logs", response_model=dict[str, int])
async def log_sizes(request: Request, job: SeenJob, attempt: Attempt = None) -> dict[str, int]:
    """Show the bytes of each instance's log."""
    hub = hub_of(request)
    wanted = await attempt_of(hub, job, attempt)
    return await hub.calls.read(LogFiles(hub.home, job.id, wanted).sizes)


@router.post(
    "/jobs/{job_id}/logs/read",
    response_model=dict[str, str],
    openapi_extra=takes(("application/json", LogRead)),
)
async def read_logs(request: Request, job: SeenJob) -> dict[str, str]:
    """Return the bytes past the offsets, in base64, by instance; wait for the first if there are none yet."""
    hub = hub_of(request)
    wanted = await bodies.read_model(request, LogRead, hub.limits.body_bytes, hub.limits.body_s)
    await attempt_of(hub, job, wanted.attempt)
    news = await _news(hub, job, wanted)
    return {name: base64.b64encode(data).decode() for name, data in news.items()}


@router.get(
    "/jobs/{job_id}/logs/stream",
    response_class=StreamingResponse,
    responses=gives('Lines as {"instance", "line"}; an event `end` is the last.', events=EVENT),
)
async def stream_logs(
    request: Request,
    job: SeenJob,
    last_event_id: Annotated[str | None, Header(max_length=65_536)] = None,
    tail: Tail = None,
) -> EventStream:
    """Follow all logs of the current attempt until it ends. Ids are JSON: the attempt, and where each log was read to.

    Only of a job of at most 128 instances (409).
    """
    hub = hub_of(request)
    attempt, offsets = (job.attempt, {}) if last_event_id is None else _all_resumed(last_event_id)
    files = LogFiles(hub.home, job.id, await attempt_of(hub, job, attempt))
    sizes = await hub.calls.read(files.sizes)
    _refuse_too_many(job, sizes)
    _refuse_past_end(offsets, sizes)
    if last_event_id is None and tail is not None:
        offsets = await hub.calls.read(
            lambda: {name: files.tail_offset(name, tail) for name in files.sizes()}
        )
    cutter = LogsCutter(attempt, offsets)
    return EventStream(
        hub.watchers,
        job,
        lambda watcher: _follow_all(hub, watcher, attempt, cutter),
        lambda: shut_out(request),
    )


@router.get(
    "/jobs/{job_id}/logs/{instance}",
    response_class=Response,
    responses={
        **gives("The bytes; with `follow` server-sent events of lines.", bytes=BYTES, events=EVENT),
        **gives("The range that was asked for.", 206, bytes=BYTES),
    },
)
async def read_log(
    request: Request,
    job: SeenJob,
    instance: str,
    attempt: Attempt = None,
    offset: Offset = None,
    limit: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    tail: Tail = None,
    follow: bool = False,
    last_event_id: Annotated[str | None, Header(max_length=40)] = None,
    range_: Annotated[str | None, Header(alias="Range", max_length=200)] = None,
    if_range: Annotated[str | None, Header()] = None,
) -> Response:
    """Return bytes of a log, all of them unless `offset` and `limit`, `tail` or a Range header say otherwise.

    A Range with If-Range is passed over: a log has no validator that could match it.

    With `follow=1`: a server-sent event for each line until the attempt ends, with `<attempt>:<offset of the next line>` as its id.
    """
    hub = hub_of(request)
    if last_event_id is not None:
        attempt, offset = _resumed(last_event_id)
    wanted = await attempt_of(hub, job, attempt)
    files = LogFiles(hub.home, job.id, wanted)
    checked_instance(hub.home, job.id, wanted, instance)
    size = await _size(hub, job, files, instance)
    if last_event_id is not None:
        _refuse_past_end({instance: offset or 0}, {instance: size})
    if last_event_id is None and tail is not None:
        offset = await hub.calls.read(lambda: files.tail_offset(instance, tail))
    if follow:
        start = offset or 0
        return EventStream(
            hub.watchers,
            job,
            lambda watcher: _follow(hub, watcher, files, wanted, instance, start),
            lambda: shut_out(request),
        )
    in_range = offset is None and limit is None and if_range is None
    span = _range(range_, size) if in_range else None
    start, stop = span or _span(offset or 0, limit, size)
    return _bytes(request, files, instance, start, stop, size, partial=span is not None)


@router.get("/jobs/{job_id}/logs/{instance}/tail_offset", response_model=Place)
async def tail_offset(
    request: Request,
    job: SeenJob,
    instance: str,
    lines: Annotated[int, Query(ge=0, le=LINES_MAX)] = 20,
    attempt: Attempt = None,
) -> Place:
    """Say where the last lines of a log begin; at most 256 KiB before its end."""
    hub = hub_of(request)
    files = LogFiles(hub.home, job.id, await attempt_of(hub, job, attempt))
    checked_instance(hub.home, job.id, 0, instance)
    return Place(offset=await hub.calls.read(lambda: files.tail_offset(instance, lines)))


@router.get(
    "/jobs/{job_id}/logs.tar",
    response_class=StreamingResponse,
    responses=gives("All logs of all attempts, as `<attempt>/<instance>.log`.", tar=BYTES),
)
async def logs_archive(request: Request, job: SeenJob) -> StreamingResponse:
    """Download all logs."""
    return _archive(request, job, "logs", log_members, hub_of(request).calls.read)


@router.get(
    "/jobs/{job_id}/outputs.tar",
    response_class=StreamingResponse,
    responses=gives("All outputs, as `<instance>/<path>`.", tar=BYTES),
)
async def outputs_archive(request: Request, job: SeenJob) -> StreamingResponse:
    """Download all outputs that were collected. Links are left out."""
    return _archive(request, job, "outputs", output_members, hub_of(request).calls.read_outputs)


# -- ranges ----------------------------------------------------------------------------------------------------------


def _bytes(
    request: Request, files: LogFiles, instance: str, start: int, stop: int, size: int, *, partial: bool
) -> Response:
    headers = {
        "X-Offset": str(start),
        "X-Size": str(size),
        "Accept-Ranges": "bytes",
        "Content-Length": str(stop - start),
    }
    if partial:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    pieces = _pieces(hub_of(request), files, instance, start, stop)
    return GuardedStream(
        pieces, lambda: shut_out(request), 206 if partial else 200, headers, media_type=MEDIA["bytes"]
    )


async def _pieces(hub: Hub, files: LogFiles, instance: str, start: int, stop: int) -> AsyncIterator[bytes]:
    while start < stop:
        want, place = min(CHUNK_BYTES, stop - start), start
        data = await hub.calls.read(lambda: files.read(instance, place, want))  # noqa: B023
        if not data:  # it was removed meanwhile; the answer stays shorter than it says
            return
        yield data
        start += len(data)


def _span(offset: int, limit: int | None, size: int) -> tuple[int, int]:
    start = min(offset, size)
    return start, size if limit is None else min(size, start + limit)


def _range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the one range of a Range header (RFC 9110, 14.2), None for what may be passed over; raises NoSuchRange."""
    match = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", (header or "").replace(" ", ""))
    if (
        match is None
        or match.groups() == ("", "")
        or (match[1] and match[2] and int(match[1]) > int(match[2]))
    ):
        return None
    if not match[1]:
        start, stop = max(0, size - int(match[2])), size
    else:
        start, stop = int(match[1]), min(size, int(match[2]) + 1) if match[2] else size
    if start >= size or start >= stop:
        raise NoSuchRange(f"the log has {size} bytes", {"Content-Range": f"bytes */{size}"})
    return start, stop


async def _size(hub: Hub, job: JobInfo, files: LogFiles, instance: str) -> int:
    """Return the bytes of a log; 0 of one whose instance has written nothing yet. Raises NotThere for a stranger."""
    size = await hub.calls.read(lambda: files.size(instance))
    if size is not None:
        return size
    names = [item.name for item in job.instances]
    if instance not in names:
        there_are = f"; there are {wording.some(names, NAMES_SHOWN)}" if names else ""
        raise NotThere(f"job {job.id!r} has no log of an instance {instance!r}{there_are}")
    return 0


# -- following -------------------------------------------------------------------------------------------------------


async def _follow(
    hub: Hub, watcher: Watcher, files: LogFiles, attempt: int, instance: str, offset: int
) -> AsyncIterator[bytes]:
    """Yield a log's lines until its attempt has ended and all was read. What it has ended with is looked for after that."""
    yield begin(f"{attempt}:{offset}")
    cutter = LineCutter(offset)

    def read(place: int) -> bytes:
        return files.read(instance, place, FOLLOWED_BYTES)

    while True:
        mark, ended = watcher.mark(), watcher.ended(attempt)
        piece = await watcher.readings.next(attempt, instance, cutter, (mark, ended), read)
        if piece is not None:
            cutter = piece.cutter
            if piece.events:
                yield piece.events
        elif ended:
            yield log_events(attempt, copy(cutter).close()) + _end(watcher, attempt)
            return
        elif not await _grown(watcher, attempt, instance, cutter.read_to, mark):
            yield BEAT


async def _grown(watcher: Watcher, attempt: int, instance: str, place: int, mark: Mark) -> bool:
    """Wait until this log has more than was read of it, or nothing more will come; False when neither was for a while."""
    deadline = time.monotonic() + BEAT_S
    while await happened(mark, max(0.0, deadline - time.monotonic())):
        mark = watcher.mark()
        if watcher.sizes.get(instance, 0) > place or watcher.ended(attempt):
            await watcher.turn()
            return True
    return False


async def _follow_all(hub: Hub, watcher: Watcher, attempt: int, cutter: LogsCutter) -> AsyncIterator[bytes]:
    """Yield the lines of all logs. Should more instances come than there may be, it breaks off: who comes back is told why."""
    yield begin(cutter.place())
    files = LogFiles(hub.home, watcher.job.id, attempt)
    while len(cutter) <= MOST_LOGS:
        mark, ended = watcher.mark(), watcher.ended(attempt)
        news = await hub.calls.read(lambda: files.news(cutter.places(), CHUNK_BYTES, None))
        if news:
            async for piece in _taken(hub, cutter.feed(news)):
                yield piece
        elif ended:
            async for piece in _taken(hub, cutter.close()):
                yield piece
            yield _end(watcher, attempt)
            return
        elif await happened(mark, BEAT_S):
            await watcher.turn()
        else:
            yield BEAT


async def _taken(hub: Hub, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what takes its time to be made, and is no work for the event loop."""
    while (piece := await hub.calls.read(lambda: next(pieces, None))) is not None:
        yield piece


def _refuse_too_many(job: JobInfo, sizes: Mapping[str, int]) -> None:
    count = max(len(job.instances), len(sizes))
    if count > MOST_LOGS:
        raise Conflict(
            f"job {job.id!r} has {count} instances; the logs of at most {MOST_LOGS} come in one stream: follow single ones"
        )


def _refuse_past_end(offsets: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    """Raise NoSuchRange for an id that no event had: who came back with it would wait for what he has missed."""
    past = [name for name, offset in offsets.items() if offset > sizes.get(name, 0)]
    if past:
        name, size = past[0], sizes.get(past[0], 0)
        raise NoSuchRange(
            f"last-event-id: {offsets[name]} is past the end of the log of {name!r}, which has {size} bytes"
        )


def _resumed(event_id: str) -> tuple[int, int]:
    """Return the attempt and the offset of an id; raises Unfit."""
    match = re.fullmatch(r"([0-9]{1,7}):([0-9]{1,18})", event_id)
    if match is None:
        raise _unfit()
    return int(match[1]), int(match[2])


def _all_resumed(event_id: str) -> tuple[int, dict[str, int]]:
    """Return the attempt and the offsets of an id; raises Unfit."""
    try:
        document = json.loads(event_id)
        attempt, offsets = document["attempt"], document["offsets"]
        numbers = [attempt, *offsets.values()]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise _unfit() from None
    if any(type(number) is not int or not 0 <= number <= 2**62 for number in numbers):
        raise _unfit()
    return attempt, offsets


def _end(watcher: Watcher, attempt: int) -> bytes:
    """Say that nothing more comes; where another attempt has begun, which."""
    job = watcher.job
    following = {"next_attempt": job.attempt} if job.attempt > attempt else {}
    return end_event({"state": job.state, "attempt": attempt, **following})


async def _news(hub: Hub, job: JobInfo, wanted: LogRead) -> dict[str, bytes]:
    files = LogFiles(hub.home, job.id, wanted.attempt)
    cap = min(wanted.max_bytes, READ_MAX_BYTES)

    def look() -> dict[str, bytes]:
        return files.news(wanted.offsets, cap, wanted.instances)

    if not wanted.wait_s or job.over or job.attempt > wanted.attempt:
        return await hub.calls.read(look)
    deadline = time.monotonic() + wanted.wait_s
    with hub.watchers.following(job) as watcher:
        while True:
            mark, ended = watcher.mark(), watcher.ended(wanted.attempt)
            news = await hub.calls.read(look)
            left_s = deadline - time.monotonic()
            if news or ended or left_s <= 0:
                return news
            await happened(mark, left_s)


# -- archives --------------------------------------------------------------------------------------------------------


def _archive(
    request: Request,
    job: JobInfo,
    what: str,
    members: Callable[[Path, str], Iterator[Packed]],
    in_thread: InThread,
) -> StreamingResponse:
    headers = {"Content-Disposition": f'attachment; filename="{job.id}-{what}.tar"'}
    pieces = tar(members(hub_of(request).home, job.id), in_thread)
    return GuardedStream(pieces, lambda: shut_out(request), headers=headers, media_type=MEDIA["tar"])


def _unfit() -> Unfit:
    return Unfit(Fault("last-event-id", "must be the id of an event of this stream"))
