"""Where a client reads from, and the way to the controller and archive of a cluster over Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from raycontrol.access import AuditEntry, Identity, Role, TokenInfo
from raycontrol.execution import Command, News, Target
from raycontrol.hardware import InstanceUsage, NodeGroup, NodeInfo, OfflineNode
from raycontrol.job import Submission
from raycontrol.outputs import PIECE_BYTES, OutputFile, Piece, pieces
from raycontrol.spec import JobSpec
from raycontrol.spread import Spread, SpreadExecution
from raycontrol.status import Event, JobInfo, JobState, MemberInfo, Metrics, QueueEntry, Wish

T = TypeVar("T")


class Execution(Protocol):
    """A command that runs across nodes. A context manager: whoever leaves it before all is over has it ended everywhere."""

    @property
    def places(self) -> tuple[str, ...]:
        """The names of where it runs."""

    def __enter__(self) -> Execution: ...

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Iterator[News]:
        """Yield what happens until every place is over."""

    def stop(self) -> None:
        """Begin to end it everywhere (TERM, a short grace, KILL), also from a signal handler; the rest of the news tells how that went."""


class Reader(Protocol):
    """What a client needs besides submitting."""

    def find(self, prefix: str) -> list[str]:
        """Return the ids that begin so."""

    def info(self, job_id: str) -> JobInfo:
        """Return a job; raises JobNotFound."""

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
        """Return jobs, newest first; see ``Store.jobs``."""

    def members(self, job_id: str) -> list[MemberInfo]:
        """Return the members of an array by their indices; raises JobNotFound, and UsageError for another job."""

    def events(self, job_id: str, after: int, timeout_s: float) -> list[Event]:
        """Return events after ``after``; wait up to ``timeout_s`` for the first."""

    def tail_offset(self, job_id: str, attempt: int, instance: str, lines: int) -> int:
        """Return where the last lines of an instance's log begin."""

    def log_sizes(self, job_id: str, attempt: int) -> dict[str, int]:
        """Return the bytes of each instance's log."""

    def log_news(
        self,
        job_id: str,
        attempt: int,
        offsets: dict[str, int],
        timeout_s: float,
        max_bytes: int,
        instances: Collection[str] | None,
    ) -> dict[str, bytes]:
        """Return bytes past the offsets (with ``instances``, of their logs only); wait up to ``timeout_s`` for the first."""

    def usage(self, job_id: str, attempt: int, last: int) -> dict[str, tuple[InstanceUsage, ...]]:
        """Return the last samples of each instance's usage, oldest first."""

    def outputs(self, job_id: str) -> Iterator[Piece]:
        """Yield the files that a job has left, piece by piece."""

    def stop(self, job_id: str, why: str, force: bool) -> JobInfo:
        """Ask a job to stop."""

    def sizes_of_jobs(self) -> dict[str, int]:
        """Return the bytes that each job keeps."""

    def prune(self, job_ids: Sequence[str]) -> None:
        """Remove finished jobs with all they kept."""


class Door(Reader, Protocol):
    """The way in to a cluster: what a client needs to bring a job, and to look at nodes."""

    def doubts(self, spec: JobSpec) -> str | None:
        """Return why the cluster as it is could never run the job, or None; raises UsageError where none will join it."""

    def has_package(self, digest: str) -> bool:
        """Whether the archive holds a packed working directory."""

    def put_package(self, digest: str, offset: int, data: bytes, last: bool) -> int:
        """Send a piece of one; return how many bytes the archive holds."""

    def submit(self, submission: Submission) -> JobInfo:
        """Return the job once it is stored."""

    def nodes(self, names: Sequence[str] | None, check: bool) -> list[NodeInfo]:
        """Return the cluster's nodes; see ``Client.nodes``."""

    def set_offline(self, names: Sequence[str], reason: str, by: str) -> list[OfflineNode]:
        """Let nodes take no new job; see ``Roster.set_offline``."""

    def set_online(self, names: Sequence[str], by: str) -> list[str]:
        """Let nodes take jobs again; return their names."""

    def offline_nodes(self) -> list[OfflineNode]:
        """Return the nodes that are offline, ordered by name; also such as are not there now."""

    def node_groups(self) -> list[NodeGroup]:
        """Return the groups of nodes, ordered by name."""

    def add_to_group(self, group: str, names: Sequence[str], by: str) -> NodeGroup:
        """Put nodes into a group; return it as it is then."""

    def remove_from_group(self, group: str, names: Sequence[str] | None, by: str) -> NodeGroup:
        """Take nodes out of a group (None: all of them); raises UsageError where they are not in it."""

    def execute(self, target: Target, command: Command, parallel: int | None) -> Execution:
        """Begin a command across nodes, on so many at a time (None: all); raises UsageError, and nothing has begun."""

    def queue(self) -> list[QueueEntry]:
        """Return the jobs that wait for nodes of this cluster, in the order in which they are decided upon."""

    def wish(self, job_id: str, wish: Wish, why: str) -> JobInfo:
        """Hold, release, suspend or resume a job; raises JobNotFound, and UsageError where its state does not allow it."""

    def set_priority(self, job_id: str, priority: int, why: str) -> JobInfo:
        """Give a waiting job another priority; raises as ``wish``."""

    def create_token(
        self, name: str, role: Role, user: str, ttl_s: float | None, by: str
    ) -> tuple[TokenInfo, str]:
        """Make a token and return its text, this once; see ``Porter.create_token``."""

    def tokens(self) -> list[TokenInfo]:
        """Return all tokens, oldest first."""

    def revoke_token(self, name: str) -> TokenInfo:
        """End a token; raises UsageError when there was none of that name."""


class ServerDoor(Door, Protocol):
    """What the HTTP server needs beside: who may come in, what was done, and how the cluster fares."""

    def spread(self, target: Target, command: Command, parallel: int | None) -> Spread:
        """Return what ``execute`` would begin. Nothing has begun, so that an answer for which nobody waits leaves nothing."""

    def take_in(self, submission: Submission) -> tuple[JobInfo, bool]:
        """Return the job once it is stored, and whether it is new by this very call."""

    def glance(self, job_id: str) -> JobInfo:
        """Return a job without what takes making its plan; raises JobNotFound."""

    def running(self) -> list[JobInfo]:
        """Return the jobs that run on this cluster, oldest first."""

    def authenticate(self, token_id: str, digest: str) -> Identity | None:
        """Return who comes with a token (``tokens.parsed``); None when it is wrong, expired or revoked."""

    def audit(self, entry: AuditEntry) -> int:
        """Return the entry's number once it is stored."""

    def audit_log(self, after: int, limit: int) -> list[AuditEntry]:
        """Return entries with ``seq`` above ``after``, oldest first."""

    def metrics(self) -> Metrics:
        """Return figures about the cluster's jobs."""

    def writable(self) -> bool:
        """Whether the store takes a write now."""


class ClusterDoor:
    """Asks the controller and the archive of a cluster, over Ray."""

    def __init__(self, session: Any, controller: Any) -> None:
        self._session = session
        self._controller = controller

    def find(self, prefix: str) -> list[str]:
        return self._ask(self._controller.find.remote(prefix))  # type: ignore[no-any-return]

    def info(self, job_id: str) -> JobInfo:
        return self._ask(self._controller.info.remote(job_id))  # type: ignore[no-any-return]

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
        query = {"labels": labels, "text": text, "before": before}
        return self._ask(self._controller.jobs.remote(states, user, limit, **query))  # type: ignore[no-any-return]

    def members(self, job_id: str) -> list[MemberInfo]:
        return self._ask(self._controller.members.remote(job_id))  # type: ignore[no-any-return]

    def events(self, job_id: str, after: int, timeout_s: float) -> list[Event]:
        return self._ask(self._controller.events.remote(job_id, after, timeout_s))  # type: ignore[no-any-return]

    def tail_offset(self, job_id: str, attempt: int, instance: str, lines: int) -> int:
        archive = self._session.archive()
        return self._ask(archive.tail_offset.remote(job_id, attempt, instance, lines))  # type: ignore[no-any-return]

    def log_sizes(self, job_id: str, attempt: int) -> dict[str, int]:
        return self._ask(self._session.archive().sizes.remote(job_id, attempt))  # type: ignore[no-any-return]

    def log_news(
        self,
        job_id: str,
        attempt: int,
        offsets: dict[str, int],
        timeout_s: float,
        max_bytes: int,
        instances: Collection[str] | None,
    ) -> dict[str, bytes]:
        archive = self._session.archive()
        call = archive.follow.remote(job_id, attempt, offsets, timeout_s, max_bytes, instances=instances)
        return self._ask(call)  # type: ignore[no-any-return]

    def usage(self, job_id: str, attempt: int, last: int) -> dict[str, tuple[InstanceUsage, ...]]:
        return self._ask(self._session.archive().usage_of.remote(job_id, attempt, last))  # type: ignore[no-any-return]

    def outputs(self, job_id: str) -> Iterator[Piece]:
        archive = self._session.archive()
        files: list[OutputFile] = self._ask(archive.outputs.remote(job_id))

        def read(path: str, offset: int) -> bytes:
            return self._ask(archive.read_output.remote(job_id, path, offset, PIECE_BYTES))  # type: ignore[no-any-return]

        return pieces(files, read)

    def stop(self, job_id: str, why: str, force: bool) -> JobInfo:
        return self._ask(self._controller.stop.remote(job_id, why, force))  # type: ignore[no-any-return]

    def doubts(self, spec: JobSpec) -> str | None:
        lacking = self._ask(self._controller.doubts.remote(spec.without_secrets()))
        return self._session.told_doubts(lacking)  # type: ignore[no-any-return]

    def has_package(self, digest: str) -> bool:
        return self._ask(self._session.archive().has_package.remote(digest))  # type: ignore[no-any-return]

    def put_package(self, digest: str, offset: int, data: bytes, last: bool) -> int:
        return self._ask(self._session.archive().put_package.remote(digest, offset, data, last))  # type: ignore[no-any-return]

    def submit(self, submission: Submission) -> JobInfo:
        return self._ask(self._controller.submit.remote(submission))  # type: ignore[no-any-return]

    def take_in(self, submission: Submission) -> tuple[JobInfo, bool]:
        return self._ask(self._controller.take_in.remote(submission))  # type: ignore[no-any-return]

    def nodes(self, names: Sequence[str] | None, check: bool) -> list[NodeInfo]:
        return self._ask(self._controller.nodes.remote(names, check))  # type: ignore[no-any-return]

    def set_offline(self, names: Sequence[str], reason: str, by: str) -> list[OfflineNode]:
        return self._ask_roster("set_offline", names, reason, by)  # type: ignore[no-any-return]

    def set_online(self, names: Sequence[str], by: str) -> list[str]:
        return self._ask_roster("set_online", names, by)  # type: ignore[no-any-return]

    def offline_nodes(self) -> list[OfflineNode]:
        return self._ask_roster("offline")  # type: ignore[no-any-return]

    def node_groups(self) -> list[NodeGroup]:
        return self._ask_roster("groups")  # type: ignore[no-any-return]

    def add_to_group(self, group: str, names: Sequence[str], by: str) -> NodeGroup:
        return self._ask_roster("add_to_group", group, names, by)  # type: ignore[no-any-return]

    def remove_from_group(self, group: str, names: Sequence[str] | None, by: str) -> NodeGroup:
        return self._ask_roster("remove_from_group", group, names, by)  # type: ignore[no-any-return]

    def execute(self, target: Target, command: Command, parallel: int | None) -> SpreadExecution:
        return SpreadExecution(self.spread(target, command, parallel))

    def spread(self, target: Target, command: Command, parallel: int | None) -> Spread:
        places = self._ask(self._controller.places.remote(target))
        return Spread(self._session.way(), places, command, parallel)

    def queue(self) -> list[QueueEntry]:
        return self._ask(self._controller.queue.remote())  # type: ignore[no-any-return]

    def wish(self, job_id: str, wish: Wish, why: str) -> JobInfo:
        return self._ask(self._controller.wish.remote(job_id, wish, why))  # type: ignore[no-any-return]

    def set_priority(self, job_id: str, priority: int, why: str) -> JobInfo:
        return self._ask(self._controller.set_priority.remote(job_id, priority, why))  # type: ignore[no-any-return]

    def create_token(
        self, name: str, role: Role, user: str, ttl_s: float | None, by: str
    ) -> tuple[TokenInfo, str]:
        return self._ask_porter("create_token", name, role, user, ttl_s, by)  # type: ignore[no-any-return]

    def tokens(self) -> list[TokenInfo]:
        return self._ask_porter("tokens")  # type: ignore[no-any-return]

    def revoke_token(self, name: str) -> TokenInfo:
        return self._ask_porter("revoke_token", name)  # type: ignore[no-any-return]

    def glance(self, job_id: str) -> JobInfo:
        return self._ask(self._controller.glance.remote(job_id))  # type: ignore[no-any-return]

    def running(self) -> list[JobInfo]:
        return self._ask(self._controller.running.remote())  # type: ignore[no-any-return]

    def audit(self, entry: AuditEntry) -> int:
        return self._ask_porter("audit", entry)  # type: ignore[no-any-return]

    def audit_log(self, after: int, limit: int) -> list[AuditEntry]:
        return self._ask_porter("audit_log", after, limit)  # type: ignore[no-any-return]

    def metrics(self) -> Metrics:
        return self._ask_porter("metrics")  # type: ignore[no-any-return]

    def writable(self) -> bool:
        return self._ask_porter("writable")  # type: ignore[no-any-return]

    def sizes_of_jobs(self) -> dict[str, int]:
        return self._ask(self._session.archive().usage.remote())["jobs"]  # type: ignore[no-any-return]

    def prune(self, job_ids: Sequence[str]) -> None:
        self._ask(self._controller.prune.remote(job_ids))

    def _ask_roster(self, method: str, *arguments: Any) -> Any:
        return self._ask(self._controller.ask_roster.remote(method, *arguments))

    def _ask_porter(self, method: str, *arguments: Any) -> Any:
        return self._ask(self._controller.ask_porter.remote(method, *arguments))

    def _ask(self, reference: Any) -> Any:
        return self._session.get(reference)


def completed(work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` comes to. Where this thread runs an event loop (a notebook does), another thread does it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
