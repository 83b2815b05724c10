"""The way in to a cluster over HTTP: what ``raycontrol serve`` answers. Needs no Ray, so that a laptop has it too.

Every call may be repeated, and is while the server is away: readings by nature, changes because the same change again
changes nothing, a submission by the job's id. How far a log was read is known here and not there. So who follows a job
notices a server that is started again by a pause only.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import httpx
from pydantic import Base64Bytes, BaseModel, Field, TypeAdapter

from raycontrol.access import Role, TokenInfo
from raycontrol.cursors import cursor_after
from raycontrol.errors import JobNotFound
from raycontrol.execution import Command, Target
from raycontrol.hardware import InstanceUsage, NodeGroup, NodeInfo, OfflineNode
from raycontrol.httpcalls import Call, HttpCalls, about, as_json, given, segment
from raycontrol.job import Submission
from raycontrol.outputs import Piece, from_tar
from raycontrol.remoteexec import HttpExecution, exec_call
from raycontrol.spec import JobSpec
from raycontrol.status import Event, JobInfo, JobState, MemberInfo, QueueEntry, Wish

log = logging.getLogger(__name__)

LONG_POLL_MAX_S = 20.0
LARGEST_PAGE = 500
MOST_LINES = 10_000
"""What the server looks back at most, besides its 256 KiB."""
NO_SUCH_ROUTE = frozenset({404, 405})


class JobPage(BaseModel):
    """A part of a list of jobs; ``next`` is where the next one begins, None at the end."""

    jobs: list[JobInfo]
    next: str | None = None


class MadeToken(BaseModel):
    """A token that was just made; ``token`` is its text, told this once."""

    token: str = Field(repr=False)
    info: TokenInfo


JOB = TypeAdapter(JobInfo)
PAGE = TypeAdapter(JobPage)
MEMBERS = TypeAdapter(list[MemberInfo])
EVENTS = TypeAdapter(list[Event])
QUEUE = TypeAdapter(list[QueueEntry])
NODES = TypeAdapter(list[NodeInfo])
OFFLINE = TypeAdapter(list[OfflineNode])
NODE_GROUP = TypeAdapter(NodeGroup)
NODE_GROUPS = TypeAdapter(list[NodeGroup])
USAGE = TypeAdapter(dict[str, tuple[InstanceUsage, ...]])
SIZES = TypeAdapter(dict[str, int])
NAMES = TypeAdapter(list[str])
PIECES = TypeAdapter(dict[str, Base64Bytes])
DOUBTS = TypeAdapter(dict[str, str | None])
TOKEN = TypeAdapter(TokenInfo)
TOKENS = TypeAdapter(list[TokenInfo])
MADE_TOKEN = TypeAdapter(MadeToken)


class HttpDoor:
    """Asks the server at ``url``. Raises UsageError for a URL or token that cannot be one, and for plain http to another machine.

    Besides the errors of a ``Door``: Unauthorized, Forbidden, ServerUnreachable. May be used by several threads.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        insecure_http: bool = False,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._calls = HttpCalls(
            url, token, insecure_http=insecure_http, transport=transport, clock=clock, sleep=sleep
        )

    def __repr__(self) -> str:
        return f"HttpDoor({self._calls.url!r})"

    def close(self) -> None:
        self._calls.close()

    def find(self, prefix: str) -> list[str]:
        return self._calls.read(NAMES, Call("GET", "/ids", {"prefix": prefix}))

    def info(self, job_id: str) -> JobInfo:
        return self._calls.read(JOB, about(job_id, "GET"))

    def jobs(
        self,
        states: Sequence[JobState] | None,
        user: str | None,
        limit: int | None,
        *,
        labels: Mapping[str, str] | None = None,
        text: str | None = None,
        before: tuple[float, str] | None = None,
    ) -> list[JobInfo]:
        filters = given(
            state=[state.value for state in states] if states else None,
            user=user,
            label=[f"{name}={value}" for name, value in labels.items()] if labels else None,
            text=text,
            limit=LARGEST_PAGE if limit is None else min(limit, LARGEST_PAGE),
        )
        after = None if before is None else cursor_after(before)
        return [*itertools.islice(self._pages(filters, after), limit)]

    def _pages(self, filters: Mapping[str, Any], after: str | None) -> Iterator[JobInfo]:
        """Yield jobs, newest first; the next page is asked for when it is needed."""
        while True:
            page = self._calls.read(PAGE, Call("GET", "/jobs", given(**filters, after=after)))
            yield from page.jobs
            if page.next is None or page.next == after or not page.jobs:
                return  # a page that leads nowhere is the last one, whatever the server says
            after = page.next

    def members(self, job_id: str) -> list[MemberInfo]:
        return self._calls.read(MEMBERS, about(job_id, "GET", "/members"))

    def events(self, job_id: str, after: int, timeout_s: float) -> list[Event]:
        wait_s = min(timeout_s, LONG_POLL_MAX_S)
        params = {"after": after, "wait_s": wait_s}
        return self._calls.read(EVENTS, about(job_id, "GET", "/events", params=params, wait_s=wait_s))

    def tail_offset(self, job_id: str, attempt: int, instance: str, lines: int) -> int:
        path = f"/logs/{segment(instance)}/tail_offset"
        params = {"lines": min(lines, MOST_LINES), "attempt": attempt}
        return self._calls.read(SIZES, about(job_id, "GET", path, params=params))["offset"]

    def log_sizes(self, job_id: str, attempt: int) -> dict[str, int]:
        return self._calls.read(SIZES, about(job_id, "GET", "/logs", params={"attempt": attempt}))

    def log_news(
        self,
        job_id: str,
        attempt: int,
        offsets: dict[str, int],
        timeout_s: float,
        max_bytes: int,
        instances: Collection[str] | None,
    ) -> dict[str, bytes]:
        wait_s = min(timeout_s, LONG_POLL_MAX_S)
        names = None if instances is None else [*instances]
        wanted = {
            "attempt": attempt,
            "offsets": offsets,
            "wait_s": wait_s,
            "max_bytes": max_bytes,
            "instances": names,
        }
        call = about(job_id, "POST", "/logs/read", body=as_json(wanted), wait_s=wait_s)
        return self._calls.read(PIECES, call)

    def usage(self, job_id: str, attempt: int, last: int) -> dict[str, tuple[InstanceUsage, ...]]:
        params = {"last": last, "attempt": attempt}
        return self._calls.read(USAGE, about(job_id, "GET", "/usage", params=params))

    def outputs(self, job_id: str) -> Iterator[Piece]:
        with self._calls.download(about(job_id, "GET", "/outputs.tar")) as body:
            yield from from_tar(body)

    def stop(self, job_id: str, why: str, force: bool) -> JobInfo:
        return self._calls.read(
            JOB, about(job_id, "POST", "/stop", body=as_json({"why": why, "force": force}))
        )

    def execute(self, target: Target, command: Command, parallel: int | None) -> HttpExecution:
        """It is asked for once: what was begun by a call whose answer got lost has ended with it."""
        return HttpExecution(self._calls, exec_call(target, command, parallel))

    def queue(self) -> list[QueueEntry]:
        return self._calls.read(QUEUE, Call("GET", "/queue"))

    def wish(self, job_id: str, wish: Wish, why: str) -> JobInfo:
        return self._calls.read(JOB, about(job_id, "POST", f"/{wish}", body=as_json({"why": why})))

    def set_priority(self, job_id: str, priority: int, why: str) -> JobInfo:
        body = as_json({"priority": priority, "why": why})
        return self._calls.read(JOB, about(job_id, "PUT", "/priority", body=body))

    def sizes_of_jobs(self) -> dict[str, int]:
        return self._calls.read(SIZES, Call("GET", "/sizes"))

    def prune(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            try:
                self._calls.ask(about(job_id, "DELETE"))
            except JobNotFound:  # somebody was faster, or the answer to our own call was lost
                log.debug("job %s was removed before", job_id)

    def doubts(self, spec: JobSpec) -> str | None:
        """Return None also where the server cannot tell; it needs no secrets for it, and gets none."""
        document = spec.without_secrets().model_dump(mode="json")
        call = Call("POST", "/doubts", body=as_json({"spec": document}), tells=NO_SUCH_ROUTE)
        answer = self._calls.ask(call)
        return self._calls.decoded(DOUBTS, answer).get("doubts") if answer.is_success else None

    def has_package(self, digest: str) -> bool:
        call = Call("HEAD", f"/packages/{segment(digest)}", tells=frozenset({404}))
        return self._calls.ask(call).is_success

    def put_package(self, digest: str, offset: int, data: bytes, last: bool) -> int:
        params = {"offset": offset, "last": last}
        path = f"/packages/{segment(digest)}"
        call = Call("PUT", path, params, body=data, content_type="application/octet-stream")
        return self._calls.read(SIZES, call)["held"]

    def submit(self, submission: Submission) -> JobInfo:
        request = {
            "spec": submission.spec.revealed(),
            "job_id": submission.job_id,
            "package": submission.package,
        }
        return self._calls.read(JOB, Call("POST", "/jobs", body=as_json(request)))

    def nodes(self, names: Sequence[str] | None, check: bool) -> list[NodeInfo]:
        return self._calls.read(
            NODES, Call("GET", "/nodes", given(name=[*names] if names else None, check=check))
        )

    def set_offline(self, names: Sequence[str], reason: str, by: str) -> list[OfflineNode]:
        """``by`` is not sent, here and below: the server knows whose token asks."""
        body = as_json({"nodes": [*names], "reason": reason})
        return self._calls.read(OFFLINE, Call("POST", "/nodes/offline", body=body))

    def set_online(self, names: Sequence[str], by: str) -> list[str]:
        return self._calls.read(NAMES, Call("POST", "/nodes/online", body=as_json({"nodes": [*names]})))

    def offline_nodes(self) -> list[OfflineNode]:
        return self._calls.read(OFFLINE, Call("GET", "/offline_nodes"))

    def node_groups(self) -> list[NodeGroup]:
        return self._calls.read(NODE_GROUPS, Call("GET", "/node_groups"))

    def add_to_group(self, group: str, names: Sequence[str], by: str) -> NodeGroup:
        path = f"/node_groups/{segment(group)}/add"
        return self._calls.read(NODE_GROUP, Call("POST", path, body=as_json({"nodes": [*names]})))

    def remove_from_group(self, group: str, names: Sequence[str] | None, by: str) -> NodeGroup:
        path = f"/node_groups/{segment(group)}/remove"
        wanted = {"nodes": None if names is None else [*names]}
        return self._calls.read(NODE_GROUP, Call("POST", path, body=as_json(wanted)))

    def create_token(
        self, name: str, role: Role, user: str, ttl_s: float | None, by: str
    ) -> tuple[TokenInfo, str]:
        """``by`` is not sent: the server knows whose token asks. Where its answer got lost the name is taken: revoke it."""
        wanted = {"name": name, "role": role, "user": user, "ttl_s": ttl_s}
        made = self._calls.read(MADE_TOKEN, Call("POST", "/tokens", body=as_json(wanted)))
        return made.info, made.token

    def tokens(self) -> list[TokenInfo]:
        return self._calls.read(TOKENS, Call("GET", "/tokens"))

    def revoke_token(self, name: str) -> TokenInfo:
        return self._calls.read(TOKEN, Call("DELETE", f"/tokens/{segment(name)}"))
