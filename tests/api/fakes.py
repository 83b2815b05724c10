"""A cluster behind the server that a test moves along by hand, and a client that speaks with the application itself."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import httpx

from raycontrol import tokens
from raycontrol.access import AuditEntry, Identity, Role, TokenInfo
from raycontrol.api.app import Config, make_app
from raycontrol.api.audits import Audits
from raycontrol.api.limits import Limits
from raycontrol.api.watchers import Watchers
from raycontrol.errors import (
    ControllerUnavailable,
    HeadFault,
    IdTaken,
    JobNotFound,
    KeyReused,
    PackageError,
    UsageError,
)
from raycontrol.execution import Command, Target
from raycontrol.hardware import InstanceUsage, NodeGroup, NodeInfo, OfflineNode
from raycontrol.job import Submission
from raycontrol.logs import JobFolder
from raycontrol.spec import JobSpec
from raycontrol.spread import Spread
from raycontrol.status import (
    Event,
    Histogram,
    JobInfo,
    JobState,
    MemberInfo,
    Metrics,
    QueueEntry,
    Reason,
    Wish,
)
from tests.exec_places import LocalWay, spread
from tests.fake_client import instance, job_info
from tests.support import wait_until

T = TypeVar("T")

DIGEST = "0" * 64
LOGIN = {"viewer": ("vera", Role.VIEWER), "user": ("ada", Role.USER), "operator": ("otto", Role.OPERATOR)}
LOGIN |= {"admin": ("root", Role.ADMIN), "other": ("bob", Role.USER)}


class FakeDoor:
    """Has the jobs, tokens and packages that a test puts in; ``calls`` records what was asked to be changed."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.audited: list[AuditEntry] = []
        self.submissions: dict[str, Submission] = {}
        self.packages: dict[str, bytes] = {}
        self.whole: set[str] = set()
        self.known_nodes: list[NodeInfo] = []
        self.known_members: list[MemberInfo] = []
        self.error: Exception | None = None
        self.asked_for_tokens = 0
        self.asked_for_jobs = 0
        self.asked_for_glances = 0
        self.asked_for_events = 0
        self.asked_for_lists = 0
        self.asked_for_nodes = 0
        self.audits_begun = 0
        self.can_write = True
        self.audit_error: Exception | None = None
        self.audit_pause: threading.Event | None = None
        self.refused = 0
        self.pause: threading.Event | None = None
        self.nodes_pause: threading.Event | None = None
        self.exec_pause: threading.Event | None = None
        self.way: LocalWay | None = None
        self._jobs: dict[str, JobInfo] = {}
        self._removed: set[str] = set()
        self._events: dict[str, list[Event]] = {}
        self._tokens: dict[str, tuple[TokenInfo, tokens.Parsed]] = {}
        self._changed = threading.Condition()
        self._submitting = threading.Lock()

    # What a test does.

    def put(self, job: JobInfo) -> JobInfo:
        """Make this a job of the cluster, or what has become of one."""
        with self._changed:
            self._jobs[job.id] = job
            self._note(job, "submitted")
        return job

    def becomes(self, job_id: str, state: JobState, message: str = "", **changes: Any) -> None:
        with self._changed:
            job = self._jobs[job_id].model_copy(update={"state": state, **changes})
            self._jobs[job_id] = job
            self._note(job, message)

    def let_in(self, name: str, user: str, role: Role, ttl_s: float | None = None) -> str:
        """Make a token; return its text."""
        return self.create_token(name, role, user, ttl_s, "test")[1]

    def _note(self, job: JobInfo, message: str) -> None:
        known = self._events.setdefault(job.id, [])
        known.append(
            Event(
                seq=sum(map(len, self._events.values())) + 1,
                job_id=job.id,
                at=job.submitted_at,
                kind="state",
                state=job.state,
                reason=job.reason,
                attempt=job.attempt,
                message=message,
            )
        )
        self._changed.notify_all()

    # What the server asks.

    def find(self, prefix: str) -> list[str]:
        self._fail()
        return [prefix] if prefix in self._jobs else sorted(i for i in self._jobs if i.startswith(prefix))

    def info(self, job_id: str) -> JobInfo:
        self.asked_for_jobs += 1
        return self._job(job_id)

    def members(self, job_id: str) -> list[MemberInfo]:
        self._job(job_id)
        return self.known_members

    def glance(self, job_id: str) -> JobInfo:
        self.asked_for_glances += 1
        return self._job(job_id)

    def spread(self, target: Target, command: Command, parallel: int | None) -> Spread:
        """Of jobs every instance, of nodes those that are known, are places of ``way``; without one nothing is ever run."""
        self._fail()
        if self.way is None:
            raise UsageError("no place runs commands here")
        if self.exec_pause is not None:
            self.exec_pause.wait(20)
        self.calls.append(("execute", target, command, parallel))
        if target.job is not None:
            names = [item.name for item in self._job(target.job).instances]
        else:
            names = [node.name for node in self.nodes(None if target.all else target.nodes, False)]
        return spread(self.way, names, command, parallel)

    def queue(self) -> list[QueueEntry]:
        waiting = sorted(self._own(JobState.QUEUED), key=lambda job: (job.priority, job.submitted_at))
        return [
            QueueEntry(
                position=position,
                id=job.id,
                name=job.name,
                user=job.user,
                priority=job.priority,
                submitted_at=job.submitted_at,
                why=job.pending,
                held=job.reason is Reason.HELD,
            )
            for position, job in enumerate(waiting, start=1)
        ]

    def wish(self, job_id: str, wish: Wish, why: str) -> JobInfo:
        job = self._job(job_id)
        if wish is Wish.HOLD and job.state is not JobState.QUEUED:
            raise UsageError(f"job {job_id} is {job.state}")
        self.calls.append((str(wish), job_id, why))
        return job

    def set_priority(self, job_id: str, priority: int, why: str) -> JobInfo:
        job = self._job(job_id)
        if job.state is not JobState.QUEUED:
            raise UsageError(f"job {job_id} is {job.state}")
        self.calls.append(("priority", job_id, priority, why))
        self._jobs[job_id] = job.model_copy(update={"priority": priority})
        return self._jobs[job_id]

    def running(self) -> list[JobInfo]:
        return self._own(JobState.RUNNING)

    def _own(self, state: JobState) -> list[JobInfo]:
        """The jobs of this cluster: the store has those of others too."""
        self._fail()
        found = [job for job in self._jobs.values() if job.state is state and not job.cluster]
        return sorted(found, key=lambda job: (job.submitted_at, job.id))

    def _job(self, job_id: str) -> JobInfo:
        self._fail()
        if job_id not in self._jobs:
            raise JobNotFound(job_id)
        return self._jobs[job_id]

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
        self._fail()
        self.asked_for_lists += 1
        found = [
            job
            for job in self._jobs.values()
            if (states is None or job.state in states)
            and user in (None, job.user)
            and (labels or {}).items() <= job.labels.items()
            and (text or "").lower() in f"{job.id} {job.name}".lower()
            and (before is None or (job.submitted_at, job.id) < before)
        ]
        return sorted(found, key=lambda job: (job.submitted_at, job.id), reverse=True)[:limit]

    def events(self, job_id: str, after: int, timeout_s: float) -> list[Event]:
        self._fail()
        self.asked_for_events += 1
        with self._changed:
            self._changed.wait_for(lambda: self._after(job_id, after) or job_id not in self._jobs, timeout_s)
            return self._after(job_id, after)

    def _after(self, job_id: str, after: int) -> list[Event]:
        return [event for event in self._events.get(job_id, []) if event.seq > after]

    def tail_offset(self, job_id: str, attempt: int, instance: str, lines: int) -> int:
        raise AssertionError("the server reads files itself")

    def log_sizes(self, job_id: str, attempt: int) -> dict[str, int]:
        raise AssertionError("the server reads files itself")

    def log_news(
        self,
        job_id: str,
        attempt: int,
        offsets: dict[str, int],
        timeout_s: float,
        max_bytes: int,
        instances: Collection[str] | None,
    ) -> dict[str, bytes]:
        raise AssertionError("the server reads files itself")

    def usage(self, job_id: str, attempt: int, last: int) -> dict[str, tuple[InstanceUsage, ...]]:
        raise AssertionError("the server reads files itself")

    def stop(self, job_id: str, why: str, force: bool) -> JobInfo:
        self.calls.append(("stop", job_id, why, force))
        return self.info(job_id)

    def sizes_of_jobs(self) -> dict[str, int]:
        raise AssertionError("the server reads files itself")

    def prune(self, job_ids: Sequence[str]) -> None:
        self.calls.append(("prune", *job_ids))
        for job_id in job_ids:
            del self._jobs[job_id]
            self._removed.add(job_id)

    def doubts(self, spec: JobSpec) -> str | None:
        return "no node has 64 CPUs" if spec.resources.cpu == 64 else None

    def has_package(self, digest: str) -> bool:
        self._fail()
        return digest in self.whole

    def put_package(self, digest: str, offset: int, data: bytes, last: bool) -> int:
        held = self.packages.get(digest, b"")
        if offset <= len(held):
            held += data[len(held) - offset :]
        self.packages[digest] = held
        if last and held == b"damaged":
            raise PackageError(
                f"package {digest}: the {len(held)} bytes that arrived are not its own; send it again"
            )
        if last:
            self.whole.add(digest)
        return len(held)

    def submit(self, submission: Submission) -> JobInfo:
        return self.take_in(submission)[0]

    def take_in(self, submission: Submission) -> tuple[JobInfo, bool]:
        with self._submitting:
            return self._taken_in(submission)

    def _taken_in(self, submission: Submission) -> tuple[JobInfo, bool]:
        self._fail()
        for known in self.submissions.values():
            if submission.key is not None and (known.user, known.key) == (submission.user, submission.key):
                if known.fingerprint != submission.fingerprint:
                    raise KeyReused(submission.key)
                return self._jobs[known.job_id], False
        known_job = self._jobs.get(submission.job_id)
        if known_job is not None and known_job.user != submission.user:
            raise IdTaken(submission.job_id)
        if submission.job_id in self._removed:
            raise IdTaken(submission.job_id, removed=True)
        if known_job is None:
            self.submissions[submission.job_id] = submission
            self.put(
                job_info(
                    submission.job_id,
                    name=submission.spec.name,
                    user=submission.user,
                    labels=submission.spec.labels,
                    submitted_at=time.time(),
                )
            )
        return self._jobs[submission.job_id], known_job is None

    def nodes(self, names: Sequence[str] | None, check: bool) -> list[NodeInfo]:
        self.asked_for_nodes += 1
        if self.nodes_pause is not None:
            self.nodes_pause.wait(10)
        missing = set(names or ()) - {node.name for node in self.known_nodes}
        if missing:
            raise UsageError(f"no node {missing.pop()!r}")
        return [node for node in self.known_nodes if names is None or node.name in names]

    def set_offline(self, names: Sequence[str], reason: str, by: str) -> list[OfflineNode]:
        self._fail()
        self.calls.append(("set_offline", [*names], reason, by))
        return [OfflineNode(name=name, reason=reason, by=by, at=1.0) for name in names]

    def set_online(self, names: Sequence[str], by: str) -> list[str]:
        self._fail()
        self.calls.append(("set_online", [*names], by))
        return [*names]

    def offline_nodes(self) -> list[OfflineNode]:
        self._fail()
        return [OfflineNode(name="host-z", reason="fan", by="root", at=1.0, absent=True)]

    def node_groups(self) -> list[NodeGroup]:
        self._fail()
        return [NodeGroup(name="a100", nodes=("host-a", "host-z"), absent=("host-z",))]

    def add_to_group(self, group: str, names: Sequence[str], by: str) -> NodeGroup:
        self._fail()
        self.calls.append(("add_to_group", group, [*names], by))
        return NodeGroup(name=group, nodes=tuple(names))

    def remove_from_group(self, group: str, names: Sequence[str] | None, by: str) -> NodeGroup:
        self._fail()
        self.calls.append(("remove_from_group", group, names, by))
        return NodeGroup(name=group, nodes=())

    def create_token(
        self, name: str, role: Role, user: str, ttl_s: float | None, by: str
    ) -> tuple[TokenInfo, str]:
        if name in self._tokens:
            raise UsageError(f"there is a token {name!r}")
        text = tokens.new_token()
        parts = tokens.parsed(text)
        assert parts is not None
        until = None if ttl_s is None else time.time() + ttl_s
        info = TokenInfo(name=name, role=role, user=user, created_at=time.time(), expires_at=until)
        self._tokens[name] = info, parts
        return info, text

    def tokens(self) -> list[TokenInfo]:
        return [info for info, _ in self._tokens.values()]

    def revoke_token(self, name: str) -> TokenInfo:
        if name not in self._tokens:
            raise UsageError(f"there is no token {name!r}")
        info, parts = self._tokens[name]
        revoked = info.model_copy(update={"revoked_at": time.time()})
        self._tokens[name] = revoked, parts
        return revoked

    def authenticate(self, token_id: str, digest: str) -> Identity | None:
        if self.pause is not None:
            self.pause.wait(10)
        self._fail()
        self.asked_for_tokens += 1
        for info, parts in self._tokens.values():
            over = info.revoked_at is not None or (info.expires_at or time.time() + 1) <= time.time()
            if (token_id, digest) == parts and not over:
                return Identity(token=info.name, user=info.user, role=info.role)
        return None

    def audit(self, entry: AuditEntry) -> int:
        self.audits_begun += 1
        if self.audit_pause is not None:
            self.audit_pause.wait(10)
        if self.audit_error is not None:
            raise self.audit_error
        self.audited.append(entry.model_copy(update={"seq": len(self.audited) + 1}))
        return len(self.audited)

    def audit_log(self, after: int, limit: int) -> list[AuditEntry]:
        return [entry for entry in self.audited if entry.seq > after][:limit]

    def metrics(self) -> Metrics:
        quick = Histogram(buckets=((1.0, 1), (60.0, 3)), count=4, sum_s=100.5)
        counts = {state: sum(job.state is state for job in self._jobs.values()) for state in JobState}
        return Metrics(
            jobs=counts, queue_wait_s=quick, launch_s=quick, attempts=4, endings={Reason.COMPLETED: 2}
        )

    def writable(self) -> bool:
        self._fail()
        return self.can_write

    def _fail(self) -> None:
        if self.error is not None:
            self.refused += 1
            raise self.error


class Live:
    """An answer that is still coming; ``text`` is what has come of it, of which it takes ``most`` pieces at first.

    With ``late`` the last byte of the body is not sent before ``finish``.
    """

    def __init__(self, sent: bytes, most: int | None = None, late: bool = False) -> None:
        self._room = None if most is None else asyncio.Semaphore(most)
        self._may_end = asyncio.Event()
        self._late = late
        self.status = 0
        self.body = b""
        self._sent = [sent[:-1], sent[-1:]] if late else [sent]
        self.over = False
        self.ended = False
        self._left = asyncio.Event()

    @property
    def text(self) -> str:
        return self.body.decode()

    async def receive(self) -> dict[str, Any]:
        if self._sent:
            piece = self._sent.pop(0)
            if self._late and not self._sent:
                await self._may_end.wait()
            return {"type": "http.request", "body": piece, "more_body": bool(self._sent)}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            if self._room is not None:
                await self._room.acquire()
            self.body += message.get("body", b"")
            self.ended = not message.get("more_body", False)

    async def finish(self) -> None:
        self._may_end.set()

    def leave(self) -> None:
        self._left.set()
        self._may_end.set()


class Api:
    """The application over a ``FakeDoor``, in an event loop of its own. ``tokens`` has one of each role, and ``other``."""

    def __init__(self, home: Path, **limits: Any) -> None:
        self.home = home
        self.door = FakeDoor()
        self.tokens = {name: self.door.let_in(name, user, role) for name, (user, role) in LOGIN.items()}
        config = Config(home, limits=replace(Limits(), **limits), package_cap_bytes=20 << 20)
        self.app = make_app(lambda: self.door, config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def request(
        self, method: str, path: str, *, by: str | None = "admin", headers: Any = None, **rest: Any
    ) -> httpx.Response:
        """Ask as the holder of a token (None: without one)."""
        return self.run(self._request(method, path, [*self._login(by), *dict(headers or {}).items()], rest))

    def get(self, path: str, **rest: Any) -> httpx.Response:
        return self.request("GET", path, **rest)

    def post(self, path: str, **rest: Any) -> httpx.Response:
        return self.request("POST", path, **rest)

    @contextmanager
    def live(
        self,
        path: str,
        *,
        by: str = "admin",
        headers: Any = None,
        body: Any = None,
        most: int | None = None,
        late: bool = False,
    ) -> Iterator[Live]:
        """Give an answer while it is coming; leave at the end of the block. With a ``body`` it is a POST of it as JSON.

        The path goes as it is, dots and all; httpx would put it in order.
        """
        scope = self._scope("GET" if body is None else "POST", path, by, headers)
        answer = self.run(_made(b"" if body is None else json.dumps(body).encode(), most, late))
        future = asyncio.run_coroutine_threadsafe(self._drive(scope, answer), self._loop)
        try:
            yield answer
        finally:
            self._loop.call_soon_threadsafe(answer.leave)
            future.result(10)

    def exact(self, path: str, *, by: str = "admin") -> Live:
        """Return the whole answer to a path that goes as it is."""
        with self.live(path, by=by) as answer:
            until(lambda: answer.over, f"the answer to {path}")
        return answer

    def leave_within_a_body(self, path: str) -> list[int]:
        """Send the begin of a body; return the statuses that the server answered nobody with."""
        sent: list[dict[str, Any]] = [
            {"type": "http.request", "body": b'{"spec":', "more_body": True},
            {"type": "http.disconnect"},
        ]
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return sent.pop(0)

        async def send(message: Any) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        self.run(self.app(self._scope("POST", path, "admin", None), receive, send))
        return statuses

    def _scope(self, method: str, path: str, by: str, headers: Any) -> dict[str, Any]:
        raw, _, query = path.partition("?")
        given = headers.items() if isinstance(headers, Mapping) else headers or ()
        sent = [("host", "127.0.0.1"), *self._login(by), *given]
        return {
            "type": "http",
            "method": method,
            "scheme": "http",
            "path": unquote(raw),
            "raw_path": raw.encode(),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8642),
            "root_path": "",
        }

    async def _drive(self, scope: Any, answer: Live) -> None:
        try:
            await self.app(scope, answer.receive, answer.send)
        finally:
            answer.over = True

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self) -> None:
        hub = self.app._hub
        self.run(_ended(hub.watchers, hub.audits))
        hub.calls.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _login(self, by: str | None) -> list[tuple[str, str]]:
        return [] if by is None else [("Authorization", f"Bearer {self.tokens.get(by, by)}")]

    async def _request(self, method: str, path: str, headers: Any, rest: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, client=("10.0.0.9", 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8642") as client:
            return await client.request(method, path, headers=headers, **rest)


async def _ended(watchers: Watchers, audits: Audits) -> None:
    watchers.close()
    audits.close()
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0)


async def _made(sent: bytes, most: int | None, late: bool) -> Live:
    return Live(sent, most, late)


def lost() -> ControllerUnavailable:
    return ControllerUnavailable("raycontrol's actor on the head is gone")


def fault() -> HeadFault:
    return HeadFault("RuntimeError: the password is hunter2")


def adas_job(state: JobState = JobState.RUNNING, **changes: Any) -> JobInfo:
    """A job of the user ``ada`` with two instances."""
    found = {"instances": (instance("master-0"), instance("worker-0", "host-b")), "state": state, **changes}
    return job_info("digits-ab12cd", **found)


def write_log(home: Path, data: bytes, name: str = "worker-0", attempt: int = 0) -> None:
    """Append to a log of ada's job, as the archive does."""
    path = JobFolder(home, "digits-ab12cd").log(name, attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)


def events_in(text: str) -> list[dict[str, str]]:
    """Return the server-sent events of a stream, by the rules of the HTML standard, comments left out."""
    blocks = [block for block in text.split("\n\n") if "data: " in block]
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]


def until(condition: Callable[[], Any], what: str) -> None:
    wait_until(condition, what=what)
