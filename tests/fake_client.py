"""A client without a cluster: jobs that a test moves along by hand.

``python -m tests.fake_client SCENE ARGUMENTS…`` runs the command line on it in a process of its own, for what only a
process can show (signals, closed pipes). SCENE is a key of ``SCENES``.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raycontrol.access import Role, TokenInfo
from raycontrol.errors import ClusterUnreachable, JobNotFound, UsageError, WaitTimeout
from raycontrol.execution import Command, News, Target
from raycontrol.hardware import InstanceUsage, NodeGroup, NodeInfo, OfflineNode
from raycontrol.outputs import Fetched
from raycontrol.status import (
    Event,
    InstanceInfo,
    InstanceState,
    JobInfo,
    JobState,
    MemberInfo,
    QueueEntry,
    Reason,
)

SUBMITTED_AT = 1_700_000_000.0


def job_info(job_id: str = "digits-ab12cd", **changes: Any) -> JobInfo:
    """Return a queued job, with changes."""
    facts = {
        "id": job_id,
        "name": job_id.rpartition("-")[0],
        "user": "ada",
        "mode": "ddp",
        "state": JobState.QUEUED,
        "reason": Reason.SUBMITTED,
        "attempt": 0,
        "priority": 5,
        "submitted_at": SUBMITTED_AT,
    }
    return JobInfo(**{**facts, **changes})


def instance(name: str = "worker-0", node: str = "host-a", **changes: Any) -> InstanceInfo:
    group, _, index = name.rpartition("-")
    facts = {"name": name, "group": group, "role": group, "index": int(index), "node": node, "ip": "10.0.0.1"}
    return InstanceInfo(**{**facts, "state": InstanceState.RUNNING, **changes})


class FakeJob:
    """A job whose state, events and log lines are put in by the test; ``stops`` records the requests to stop."""

    def __init__(self, info: JobInfo, obeys: bool = True) -> None:
        self.id = info.id
        self.stops: list[tuple[bool, str | None]] = []
        self.error: Exception | None = None
        self._info = info
        self._obeys = obeys
        self._events: list[Event] = []
        self._lines: list[tuple[str, str]] = []
        self._usage: dict[str, tuple[InstanceUsage, ...]] = {}
        self._changed = threading.Condition()
        self.wishes: list[str] = []
        self.jobs_of_members: dict[int, FakeJob] = {}
        self.sat_at: str | None = None

    def becomes(
        self,
        state: JobState,
        reason: Reason,
        message: str = "",
        *,
        after_s: float = 1,
        instance: str | None = None,
        **changes: Any,
    ) -> None:
        """Change the job and note it; ``after_s`` counts from the submission."""
        at = SUBMITTED_AT + after_s
        with self._changed:
            self._info = self._info.model_copy(update={"state": state, "reason": reason, **changes})
            number = len(self._events) + 1
            self._events.append(
                Event(
                    at=at,
                    kind="state",
                    state=state,
                    reason=reason,
                    attempt=0,
                    instance=instance,
                    message=message,
                    seq=number,
                    job_id=self.id,
                )
            )
            self._changed.notify_all()

    def uses(self, name: str, *samples: InstanceUsage) -> None:
        self._usage[name] = samples

    def usage(self, last: int = 1, *, attempt: int | None = None) -> dict[str, tuple[InstanceUsage, ...]]:
        if attempt not in (None, self._info.attempt):
            return {}
        return {name: samples[-last:] for name, samples in self._usage.items()}

    def prints(self, name: str, line: str) -> None:
        with self._changed:
            self._lines.append((name, line))
            self._changed.notify_all()

    def breaks(self, error: Exception) -> None:
        """From now on whoever follows the job gets this error."""
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def info(self) -> JobInfo:
        return self._info

    def members(self) -> list[MemberInfo]:
        return [
            MemberInfo(
                index=index,
                id=job.id,
                state=job.info().state,
                reason=job.info().reason,
                exit_code=job.info().exit_code,
            )
            for index, job in self.jobs_of_members.items()
        ]

    def member(self, index: int) -> FakeJob:
        return self.jobs_of_members[index]

    def events(self, after: int = 0) -> list[Event]:
        return [event for event in self._events if event.seq > after]

    def watch(self, after: int = 0) -> Iterator[Event]:
        while True:
            news = self._news(after)
            if not news:
                return
            yield from news
            after = news[-1].seq

    def _news(self, after: int) -> list[Event]:
        with self._changed:
            self._changed.wait_for(lambda: self.error or self.events(after) or self._info.over)
            if self.error is not None:
                raise self.error
            return self.events(after)

    def logs(
        self,
        *,
        follow: bool = False,
        instance: str | None = None,
        group: str | None = None,
        tail: int | None = None,
        prefix: bool = True,
        attempt: int | None = None,
    ) -> Iterator[str]:
        of_group = group or ""
        lines = [
            (name, line)
            for name, line in self._lines
            if instance in (None, name) and name.startswith(of_group)
        ]
        start = max(0, len(lines) - tail) if tail is not None else 0
        while True:
            for name, line in lines[start:]:
                yield f"{name} | {line}" if prefix else line
            start = len(lines)
            if not follow:
                return
            lines = self._more_than(start)
            if len(lines) == start:
                return

    def _more_than(self, count: int) -> list[tuple[str, str]]:
        with self._changed:
            self._changed.wait_for(lambda: self.error or len(self._lines) > count or self._info.over)
            if self.error is not None:
                raise self.error
            return list(self._lines)

    def wait(self, timeout_s: float | None = None) -> JobInfo:
        with self._changed:
            if not self._changed.wait_for(lambda: self._info.over, timeout_s):
                raise WaitTimeout(self.id, timeout_s or 0)
        return self._info

    def stop(self, *, force: bool = False, why: str | None = None) -> JobInfo:
        self.stops.append((force, why))
        if not self._info.state.terminal:
            self.becomes(JobState.STOPPING, Reason.STOP_REQUESTED, why or "")
            if self._obeys:
                self.becomes(JobState.STOPPED, Reason.STOP_REQUESTED, ended_at=SUBMITTED_AT + 2)
        return self._info

    def shell(self, instance: str | None = None) -> int:
        self.sat_at = instance
        return 3

    def get_outputs(self, folder: str | None = None) -> Fetched:
        return Fetched(folder or f"outputs-{self.id}", 2, 3 << 20)

    def hold(self) -> JobInfo:
        return self._wish("hold")

    def release(self) -> JobInfo:
        return self._wish("release")

    def suspend(self) -> JobInfo:
        return self._wish("suspend")

    def resume(self) -> JobInfo:
        return self._wish("resume")

    def set_priority(self, priority: int) -> JobInfo:
        return self._wish(f"priority {priority}")

    def _wish(self, wish: str) -> JobInfo:
        if self._info.state.terminal:
            raise UsageError(f"job {self.id} has ended ({self._info.state})")
        self.wishes.append(wish)
        return self._info


class FakeExecution:
    """A command across nodes whose news a test has written down; it is over when they are told."""

    def __init__(self, places: tuple[str, ...], *news: News) -> None:
        self.places = places
        self._news = news
        self.stopped = False

    def __enter__(self) -> FakeExecution:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Iterator[News]:
        return iter(self._news)

    def stop(self) -> None:
        self.stopped = True


class FakeClient:
    """``next_job`` is what submit hands out; ``calls`` records what was asked."""

    def __init__(self, *jobs: FakeJob, next_job: FakeJob | None = None) -> None:
        self.jobs = {job.id: job for job in jobs}
        self.next_job = next_job
        self.calls: list[tuple[str, Any]] = []
        self.on_submit: Callable[[], None] = lambda: None
        self.offline: str | None = None
        self.url: str | None = None
        self.known_nodes: list[NodeInfo] = []
        self.known_groups: list[NodeGroup] = []
        self.known_offline: list[OfflineNode] = []
        self.known_tokens: list[TokenInfo] = []
        self.token_error: Exception | None = None
        self.waiting: list[QueueEntry] = []
        self.execution = FakeExecution(())
        self.home = Path("/nowhere")

    def __call__(self, address: str | None = None, *, embedded: bool = False) -> FakeClient:
        self.calls.append(("client", (address, embedded)))
        return self

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append(("close", None))

    def submit(
        self, spec: Any, *, job_id: str | None = None, progress: Callable[[str], None] | None = None
    ) -> FakeJob:
        self.calls.append(("submit", spec))
        self.on_submit()
        assert self.next_job is not None
        return self.next_job

    def job(self, job_id: str) -> FakeJob:
        found = [key for key in self.jobs if key.startswith(job_id)]
        if len(found) != 1:
            raise JobNotFound(job_id, tuple(found))
        return self.jobs[found[0]]

    def list(
        self,
        *,
        states: list[JobState] | None = None,
        user: str | None = None,
        limit: int | None = 100,
        labels: Mapping[str, str] | None = None,
        text: str | None = None,
        before: tuple[float, str] | None = None,
    ) -> list[JobInfo]:
        infos = [job.info() for job in self.jobs.values()]
        kept = [info for info in infos if states is None or info.state in states]
        kept = [info for info in kept if user in (None, info.user)]
        kept = [info for info in kept if (labels or {}).items() <= info.labels.items()]
        kept = [info for info in kept if (text or "") in info.id]
        kept = [info for info in kept if before is None or (info.submitted_at, info.id) < before]
        return sorted(kept, key=lambda info: info.submitted_at, reverse=True)[:limit]

    def prune(self, *, older_than_days: float | None, keep_gib: float | None, dry_run: bool) -> list[JobInfo]:
        self.calls.append(("prune", (older_than_days, keep_gib, dry_run)))
        return [job.info() for job in self.jobs.values() if job.info().state.terminal]

    def execute(self, target: Target, command: Command, parallel: int | None = None) -> FakeExecution:
        self.calls.append(("execute", (target, command, parallel)))
        return self.execution

    def nodes(self, names: Sequence[str] | None = None, *, check: bool = False) -> list[NodeInfo]:
        self.calls.append(("nodes", (names, check)))
        return [node for node in self.known_nodes if names is None or node.name in names]

    def create_token(
        self, name: str, role: Role, *, user: str | None = None, ttl_s: float | None = 0
    ) -> tuple[TokenInfo, str]:
        self.calls.append(("create_token", (name, role, user, ttl_s)))
        if self.token_error is not None:
            raise self.token_error
        info = TokenInfo(name=name, role=role, user=user or "ada", created_at=SUBMITTED_AT)
        self.known_tokens.append(info)
        return info, f"rct_k3x9abcd_{'s' * 43}"

    def tokens(self) -> builtins.list[TokenInfo]:
        return self.known_tokens

    def revoke_token(self, name: str) -> TokenInfo:
        found = next((info for info in self.known_tokens if info.name == name), None)
        if found is None:
            raise UsageError(f"there is no token {name!r}")
        return found.model_copy(update={"revoked_at": SUBMITTED_AT + 1})

    def set_offline(self, names: Sequence[str], *, reason: str) -> builtins.list[OfflineNode]:
        self.calls.append(("set_offline", (names, reason)))
        known = {node.name for node in self.known_nodes}
        return [
            OfflineNode(name=name, reason=reason, by="ada", at=SUBMITTED_AT, absent=name not in known)
            for name in names
        ]

    def set_online(self, names: Sequence[str]) -> builtins.list[str]:
        self.calls.append(("set_online", names))
        return [*names]

    def offline_nodes(self) -> builtins.list[OfflineNode]:
        return self.known_offline

    def node_groups(self) -> builtins.list[NodeGroup]:
        return self.known_groups

    def add_to_group(self, group: str, names: Sequence[str]) -> NodeGroup:
        self.calls.append(("add_to_group", (group, names)))
        known = {node.name for node in self.known_nodes}
        return NodeGroup(
            name=group, nodes=tuple(names), absent=tuple(name for name in names if name not in known)
        )

    def remove_from_group(self, group: str, names: Sequence[str] | None = None) -> NodeGroup:
        self.calls.append(("remove_from_group", (group, names)))
        return NodeGroup(name=group, nodes=())

    def queue(self) -> builtins.list[QueueEntry]:
        return self.waiting

    def controller_status(self) -> dict[str, Any]:
        return {"running": True, "version": "0.1.0", "unfinished_jobs": 2, "pid": 7, "ray": "10.0.0.1:6379"}

    def controller_restart(self) -> dict[str, Any]:
        return {"version": "0.1.0", "pid": 8, "ray": "10.0.0.1:6379"}


def running_job(obeys: bool = True) -> FakeJob:
    """Return a job that runs on two hosts, has printed two lines, and ends only when it is stopped."""
    job = FakeJob(job_info(), obeys=obeys)
    instances = (instance("master-0", "host-a"), instance("worker-0", "host-b"))
    job.becomes(JobState.QUEUED, Reason.WAITING, "waits for 2 nodes with 1 CPU", after_s=0.2)
    job.becomes(
        JobState.RUNNING, Reason.PLACED, "running", after_s=3.4, instances=instances, started_at=SUBMITTED_AT
    )
    job.prints("master-0", "step 1")
    job.prints("worker-0", "step 1")
    return job


def _lost_job() -> FakeJob:
    job = running_job()
    job.breaks(ClusterUnreachable("10.0.0.1:6379", "connection refused"))
    return job


def _chatty_job() -> FakeJob:
    job = running_job()
    for number in range(20_000):
        job.prints("master-0", f"line {number}")
    job.becomes(JobState.SUCCEEDED, Reason.COMPLETED, ended_at=SUBMITTED_AT + 5)
    return job


SCENES: dict[str, tuple[Callable[[], FakeJob], str | None]] = {
    "endless": (running_job, "10.0.0.1:6379"),
    "stubborn": (lambda: running_job(obeys=False), "10.0.0.1:6379"),
    "lost": (_lost_job, "10.0.0.1:6379"),
    "chatty": (_chatty_job, "10.0.0.1:6379"),
    "embedded": (lambda: running_job(obeys=False), None),
}


def main() -> None:
    import raycontrol.cli
    from raycontrol.cli import services

    make, address = SCENES[sys.argv[1]]
    job = make()
    client = FakeClient(job, next_job=job)
    raycontrol.cli.main(
        sys.argv[2:], services.Services(services.Output(), client, lambda explicit: explicit or address)
    )


if __name__ == "__main__":
    main()
