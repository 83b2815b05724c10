"""The controller: takes jobs, stores what becomes of them, and carries out what ``lifecycle`` demands.

It decides nothing itself: ``queue`` says which job starts, ``lifecycle.advance`` what an event makes of a job, and
``duties`` keeps running what the states of the jobs demand, so that a controller that starts again on a store takes
up exactly what the old one left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from raycontrol import lifecycle, placement, queue, tokens
from raycontrol.access import AuditEntry, Identity, Role, TokenInfo
from raycontrol.accessrows import Belongings, Key
from raycontrol.duties import Cluster, Duties
from raycontrol.errors import (
    IdTaken,
    JobNotFound,
    KeyReused,
    StoreError,
    StoreOwned,
    StoreRefused,
    VersionMismatch,
)
from raycontrol.events import (
    InstanceLost,
    JobEvent,
    NodesChosen,
    PlacementDeferred,
    Report,
    RunExited,
    StopRequested,
    TimePassed,
)
from raycontrol.hardware import NodeInfo
from raycontrol.job import Job, Submission, checked_id
from raycontrol.jobrows import info_of, read_info, read_infos, read_job, readable, row_of
from raycontrol.retention import DAY_S, expired
from raycontrol.spec import Site, members
from raycontrol.status import Event, JobInfo, JobState, Metrics, Note
from raycontrol.store import Change, JobRow, Lease, Store
from raycontrol.survey import Survey
from raycontrol.version import __version__

log = logging.getLogger(__name__)

QUEUE_POLL_S = 0.5
"""How often the cluster is looked at while jobs wait: other programs' resources and joining nodes are not announced."""
NODE_POLL_S = 5.0
RETENTION_S = 3600.0
LEASE_BEAT_S = 5.0
RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0
LONG_POLL_MAX_S = 20.0
WRITABLE_S = 5.0
"""How long a write may take before the store counts as one that takes none."""

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What finished jobs may keep: for how long, and how much together."""

    keep_days: float = 30
    keep_gib: float = 50


class Controller:
    """One per cluster. Public methods are what clients and instances call; times come from ``clock`` (epoch seconds)."""

    def __init__(
        self,
        home: str,
        name: str,
        cluster: Cluster,
        clock: Callable[[], float] = time.time,
        limits: Callable[[], Limits] | None = None,
        site: Callable[[], Site] = Site,
    ) -> None:
        self._home = Path(home)
        self._name = name
        self._cluster = cluster
        self._clock = clock
        self._limits = limits or Limits
        self._site = site
        self._lags: dict[str, float] = {}
        self._offsets: dict[tuple[str, str], float] = {}
        self._missing: set[str] = set()
        self._store: Store | None = None
        self._lease: Lease | None = None
        self._jobs: dict[str, Job] = {}
        self._secrets: dict[str, dict[str, str]] = {}
        self._inbox: asyncio.Queue[tuple[str, JobEvent, asyncio.Future[None] | None]] = asyncio.Queue()
        self._duties = Duties(cluster, clock, self._post, lambda job_id: self._secrets.get(job_id, {}))
        self._loops: list[asyncio.Task[None]] = []
        self._started: asyncio.Future[None] | None = None
        self._changed = asyncio.Condition()
        self._look = asyncio.Event()
        self._submitting = asyncio.Lock()
        self._probe: asyncio.Future[bool] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    # For clients.

    async def hello(self, version: str) -> dict[str, Any]:
        """Compare versions and return who this controller is; raises VersionMismatch."""
        await self.started()
        if version != __version__:
            raise VersionMismatch(version, __version__)
        return await self.status()

    async def status(self) -> dict[str, Any]:
        """Return what ``raycontrol controller status`` shows."""
        await self.started()
        states = [job.state for job in self._jobs.values()]
        return {
            "version": __version__,
            "cluster": self._name,
            "home": str(self._home),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "unfinished_jobs": len(states),
            "waiting_jobs": states.count(JobState.QUEUED),
        }

    async def submit(self, submission: Submission) -> JobInfo:
        """Store a job and queue it. The same id or key again returns the job as it is: a retried call submits once.

        Raises KeyReused for a key that came with another fingerprint, UsageError for secrets without a value, IdTaken for
        an id that another user's job has.
        """
        await self.started()
        if submission.version != __version__:
            raise VersionMismatch(submission.version, __version__)
        checked_id(submission.job_id)
        async with self._submitting:
            # A call that is repeated while the first one waits for the store must find its job.
            known = await self._submitted(submission) or await self._find(submission.job_id)
            if known is not None and known.user != submission.user:
                raise IdTaken(submission.job_id)
            return self._info(known or await self._add(submission))

    async def _submitted(self, submission: Submission) -> Job | None:
        """Return the job that the submission's key stands for; raises KeyReused."""
        user, key = submission.user, submission.key
        if key is None:
            return None
        used = await self._in_thread(lambda: self._open_store.access.used_key(self._name, user, key))
        if used is None:
            return None
        if used.fingerprint != (submission.fingerprint or ""):
            raise KeyReused(key)
        return await self._find(used.job_id)

    async def _add(self, submission: Submission) -> Job:
        now = self._clock()
        secrets = submission.spec.secrets()
        job = Job(
            id=submission.job_id,
            cluster=self._name,
            spec=submission.spec.without_secrets().settled(self._site()),
            user=submission.user,
            submitted_at=now,
            since=now,
            package=submission.package,
        )
        note = Note(
            at=now,
            kind="Submitted",
            state=job.state,
            reason=job.reason,
            attempt=0,
            message=_submitted_by(submission),
        )
        belongings = Belongings(_key_of(submission), secrets)
        store, lease = self._open_store, self._lease
        await self._in_thread(lambda: store.add(row_of(job), note, lease=lease, belongings=belongings))
        log.info("job %s %s, from %s", job.id, note.message, submission.origin or "this cluster")
        self._secrets[job.id] = secrets
        self._jobs[job.id] = job
        self._look.set()
        await self._announce()
        return job

    async def stop(self, job_id: str, why: str, force: bool = False) -> JobInfo:
        """Ask a job to stop; return when that is stored, which is before it has stopped. A job that has ended stays as it is."""
        await self.started()
        if job_id in self._jobs:
            await self._tell(job_id, StopRequested(self._clock(), why, force))
        return await self.info(job_id)

    async def info(self, job_id: str) -> JobInfo:
        """Return a job; raises JobNotFound."""
        return await self._shown(job_id, network=True)

    async def glance(self, job_id: str) -> JobInfo:
        """Return a job without what takes making its plan: for who asks often. Raises JobNotFound."""
        return await self._shown(job_id, network=False)

    async def _shown(self, job_id: str, network: bool) -> JobInfo:
        await self.started()
        if job_id in self._jobs:
            return info_of(self._jobs[job_id], self._home, network=network)
        row = await self._in_thread(lambda: self._open_store.job(job_id))
        if row is None:
            raise JobNotFound(job_id)
        return await self._in_thread(lambda: read_info(row, self._open_store, network=network))

    async def queued(self) -> list[JobInfo]:
        """Return the jobs that wait for nodes of this cluster, in the order in which they are decided upon."""
        await self.started()
        return [self._info(self._jobs[entry.job_id]) for entry in queue.in_order(self._waiting())]

    async def running(self) -> list[JobInfo]:
        """Return the jobs that run on this cluster, oldest first."""
        await self.started()
        found = [job for job in self._jobs.values() if job.state is JobState.RUNNING]
        return [self._info(job) for job in sorted(found, key=lambda job: (job.submitted_at, job.id))]

    async def find(self, prefix: str) -> list[str]:
        """Return the ids that begin so."""
        await self.started()
        return await self._in_thread(lambda: self._open_store.find(prefix))

    async def jobs(
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
        await self.started()
        store = self._open_store

        def read() -> list[JobInfo]:
            found = store.jobs(states=states, user=user, limit=limit, labels=labels, text=text, before=before)
            return read_infos(found, store)

        return await self._in_thread(read)

    async def events(self, job_id: str, after: int = 0, timeout_s: float = 0.0) -> list[Event]:
        """Return a job's events with ``seq`` above ``after``; wait up to ``timeout_s`` (at most 20) for the first."""
        await self.started()
        deadline = time.monotonic() + min(timeout_s, LONG_POLL_MAX_S)
        while True:
            found = await self._in_thread(lambda: self._open_store.events(job_id, after))
            left = deadline - time.monotonic()
            if found or left <= 0 or job_id not in self._jobs:
                return found
            await self._wait_for_change(left)

    async def nodes(self, names: Sequence[str] | None = None, check: bool = False) -> list[NodeInfo]:
        """Return the living nodes with their facts (``Survey``); raises UsageError for a name that no node has."""
        await self.started()
        rooms = self._less_our_own(await self._cluster.nodes())
        return await Survey(self._cluster, self._clock, check).nodes(rooms, tuple(self._jobs.values()), names)

    async def prune(self, job_ids: Sequence[str]) -> None:
        """Remove finished jobs, with their logs and outputs."""
        await self.started()
        doomed = [job_id for job_id in job_ids if job_id not in self._jobs]
        await self._in_thread(lambda: self._open_store.remove(doomed))
        await self._cluster.remove_stored(doomed, await self._in_thread(self._packages_in_use))

    def _packages_in_use(self) -> set[str]:
        return {job.package for _, job in readable(self._open_store.jobs()) if job.package}

    # For the HTTP server: who may come in, what was done, how the cluster fares.

    async def create_token(
        self, name: str, role: Role, user: str, ttl_s: float | None, by: str
    ) -> tuple[TokenInfo, str]:
        """Make a token that lives for ``ttl_s`` seconds (None: until it is revoked); return it with its text, this once.

        ``by`` is who asked for it. Raises UsageError when a living token has the name, or a value cannot be one.
        """
        await self.started()
        now = self._clock()
        info = TokenInfo(
            name=tokens.checked_name(name),
            role=Role(role),
            user=tokens.checked_user(user),
            created_at=now,
            expires_at=None if ttl_s is None else now + tokens.checked_ttl(ttl_s),
        )
        text = tokens.new_token()
        kept = tokens.parsed(text)
        assert kept is not None, "it has just been made so"
        access = self._open_store.access
        await self._in_thread(lambda: access.add_token(kept.id, kept.digest, info, by))
        return info, text

    async def tokens(self) -> list[TokenInfo]:
        """Return all tokens, the expired and revoked ones too, oldest first."""
        await self.started()
        return await self._in_thread(self._open_store.access.tokens)

    async def revoke_token(self, name: str) -> TokenInfo:
        """End the token of that name, if it has not been ended before; raises UsageError when there was none."""
        await self.started()
        now = self._clock()
        return await self._in_thread(lambda: self._open_store.access.revoke_token(name, now))

    async def authenticate(self, token_id: str, digest: str) -> Identity | None:
        """Return who comes with a token, of which only what ``tokens.parsed`` gives travels; None when it is wrong,
        expired or revoked. Takes as long for an id that is unknown."""
        await self.started()
        kept = await self._in_thread(lambda: self._open_store.access.token(token_id))
        right = tokens.same(digest, None if kept is None else kept.digest)
        return kept.identity(self._clock()) if kept is not None and right else None

    async def audit(self, entry: AuditEntry) -> int:
        """Store an entry and return its number."""
        await self.started()
        return await self._in_thread(lambda: self._open_store.access.add_audit(entry))

    async def audit_log(self, after: int, limit: int) -> list[AuditEntry]:
        """Return entries with ``seq`` above ``after``, oldest first."""
        await self.started()
        return await self._in_thread(lambda: self._open_store.access.audit_log(after, limit))

    async def metrics(self) -> Metrics:
        """Return figures about the jobs of this cluster."""
        await self.started()
        return await self._in_thread(lambda: self._open_store.metrics(self._name))

    async def writable(self) -> bool:
        """Whether the store has taken a write now, within ``WRITABLE_S`` seconds."""
        if self._probe is None or self._probe.done():  # one at a time: a stuck store must not gather them
            self._probe = asyncio.ensure_future(self._has_written())
        done, _ = await asyncio.wait({self._probe}, timeout=WRITABLE_S)
        return bool(done) and self._probe.result()

    async def _has_written(self) -> bool:
        try:
            await self.started()
            await self._in_thread(self._renew_lease)
        except StoreError as error:
            log.warning("the store takes no write: %s", error)
            return False
        return True

    # For instances.

    async def report(self, sent_at: float, reports: Sequence[Report]) -> None:
        """Take what an instance reports; return once it is stored. Times are moved to this node's clock."""
        arrived = self._clock()
        await self.started()
        told = []
        for report in reports:
            job_id = report.attempt_id.rpartition(".")[0]
            if job_id in self._jobs:
                offset = self._offset(report, arrived - sent_at)
                told.append(self._tell(job_id, _on_our_clock(report, offset)))
        await asyncio.gather(*told)

    def _offset(self, report: Report, measured: float) -> float:
        """Return how far this clock is ahead of the instance's: the least that was ever measured, for Ray may deliver
        a call long after it was made."""
        key = (report.attempt_id, report.instance)
        self._offsets[key] = min(measured, self._offsets.get(key, measured))
        return self._offsets[key]

    # Starting.

    async def started(self) -> None:
        """Take over the store and resume its jobs, once; raises StoreError (StoreOwned when another controller holds it)."""
        if self._started is None or _has_failed(self._started):
            self._started = asyncio.ensure_future(self._start())
        await asyncio.shield(self._started)

    async def keep_trying_to_start(self) -> None:
        """Start without being called: after a restart nobody may call, and jobs wait."""
        while True:
            try:
                await self.started()
                return
            except StoreError as error:
                log.error("cannot start: %s; trying again in %g s", error, LEASE_BEAT_S)
            except Exception:  # whatever it is, jobs wait for a controller
                log.exception("cannot start; trying again in %g s", LEASE_BEAT_S)
            await asyncio.sleep(LEASE_BEAT_S)

    async def _start(self) -> None:
        if self._store is None:
            self._store = await self._in_thread(lambda: Store(self._home))
        if self._lease is None:  # a start that failed after this point holds it already
            self._lease = await self._in_thread(
                lambda: self._open_store.acquire(self._name, socket.gethostname(), os.getpid(), self._clock())
            )
        rows = await self._in_thread(lambda: self._open_store.active(self._name))
        self._jobs = {row.id: job for row, job in readable(rows)}
        self._secrets = await self._in_thread(lambda: self._open_store.access.secrets_of(self._jobs))
        now = self._clock()
        self._lags = {job.id: now - job.since for job in self._jobs.values()}
        await self._cluster.serve_nodes()
        strangers = await self._cluster.remove_strangers(
            self._name, {job.attempt_id for job in self._jobs.values()}
        )
        if strangers:
            log.warning("removed what no job of the store owns: %s", ", ".join(strangers))
        for job in self._jobs.values():
            self._duties.keep(job)
        loops = (
            self._take_events(),
            self._run_queue(),
            self._run_clock(),
            self._hold_lease(),
            self._care_for_nodes(),
            self._keep_within_limits(),
        )
        self._loops = [asyncio.ensure_future(_for_ever(loop)) for loop in loops]

    # Events: the only place where jobs change.

    async def _take_events(self) -> None:
        while True:
            batch = [await self._inbox.get()]
            while not self._inbox.empty():
                batch.append(self._inbox.get_nowait())
            await self._take(batch)

    async def _take(self, batch: Sequence[tuple[str, JobEvent, asyncio.Future[None] | None]]) -> None:
        """Advance the jobs, store all of it in one commit, then act and acknowledge."""
        advanced: dict[str, Job] = {}
        rows: dict[str, JobRow] = {}
        notes: dict[str, list[Note]] = {}
        for job_id, event, _ in batch:
            job = advanced.get(job_id) or self._jobs.get(job_id)
            if job is None:
                continue
            stepped = _advanced(job, event)
            if stepped is None:
                continue
            step, rows[job_id] = stepped
            advanced[job_id] = step.job
            notes.setdefault(job_id, []).extend(step.notes)
        changed = {
            job_id: job for job_id, job in advanced.items() if job != self._jobs[job_id] or notes[job_id]
        }
        if changed:
            await self._save([Change(rows[job_id], tuple(notes[job_id])) for job_id in changed])
        for job_id, job in changed.items():
            if job.since != self._jobs[job_id].since:
                self._lags[job_id] = self._clock() - job.since
            self._jobs[job_id] = job
            self._duties.keep(job)
            if job.state.terminal:
                self._forget(job)
            if job.state in (JobState.QUEUED, JobState.STOPPING) or job.state.terminal:
                self._look.set()
        for _, _, stored in batch:
            if stored is not None and not stored.done():
                stored.set_result(None)
        await self._announce()

    def _forget(self, job: Job) -> None:
        del self._jobs[job.id]
        self._secrets.pop(job.id, None)
        self._lags.pop(job.id, None)
        for instance in job.instances:
            self._offsets.pop((job.attempt_id, instance.name), None)

    async def _save(self, changes: Sequence[Change]) -> None:
        """Store the changes, for as long as it takes: what is not stored has not happened.

        One that the store will never take must not keep the others waiting: it is logged, and what it says is lost.
        """
        pause_s = RETRY_FIRST_S
        while True:
            try:
                await self._in_thread(lambda: self._open_store.save(changes, lease=self._lease))
                return
            except StoreOwned:
                raise
            except StoreRefused:
                log.exception("the store refuses changes of %s", ", ".join(item.row.id for item in changes))
                if len(changes) > 1:
                    for change in changes:
                        await self._save([change])
                return
            except StoreError:
                log.exception(
                    "the store does not take %d changes; trying again in %.1f s", len(changes), pause_s
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def _tell(self, job_id: str, event: JobEvent) -> None:
        """Put an event in and return when it is stored."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait((job_id, event, stored))
        await stored

    def _post(self, job_id: str, event: JobEvent) -> None:
        self._inbox.put_nowait((job_id, event, None))

    # The queue, the clock, the lease, the nodes.

    async def _run_queue(self) -> None:
        while True:
            waiting = self._waiting()
            if waiting:
                await self._try(partial(self._place, waiting))
            with_timeout = QUEUE_POLL_S if waiting else None
            await _wait(self._look, with_timeout)
            self._look.clear()

    def _waiting(self) -> list[queue.Waiting]:
        return [
            queue.Waiting(job.id, job.spec, job.submitted_at)
            for job in self._jobs.values()
            if job.state is JobState.QUEUED
        ]

    async def _place(self, waiting: Sequence[queue.Waiting]) -> None:
        nodes = self._less_our_own(await self._cluster.nodes())
        now = self._clock()
        told = []
        for decision in queue.decide(waiting, nodes):
            match decision:
                case queue.PlaceNow(job_id, assignments):
                    told.append(self._tell(job_id, NodesChosen(now, assignments)))
                case queue.KeepWaiting(job_id, why):
                    told.append(self._tell(job_id, PlacementDeferred(now, why)))
        await asyncio.gather(*told)

    def _less_our_own(self, nodes: Sequence[placement.Node]) -> tuple[placement.Node, ...]:
        """Hold what is free against what our jobs have reserved: Ray's figures lag behind a reservation just made."""
        ours = tuple(replace(node, free=node.total) for node in nodes)
        for job in self._jobs.values():
            if job.instances and not job.state.terminal:
                rooms = [placement.Assignment(i.name, i.node_id, i.node_name, i.ip) for i in job.instances]
                ours = placement.reserve(ours, members(job.spec), rooms)
        return tuple(
            replace(
                node,
                free={name: min(node.free.get(name, 0.0), own.free.get(name, 0.0)) for name in node.total},
            )
            for node, own in zip(nodes, ours, strict=True)
        )

    async def _run_clock(self) -> None:
        while True:
            now = self._clock()
            due = {job.id: limit for job in self._jobs.values() if (limit := self._deadline(job)) is not None}
            over = [job_id for job_id, limit in due.items() if limit <= now]
            for job_id in over:
                await self._tell(job_id, TimePassed(now))
            if over:
                continue  # meanwhile other limits may have begun
            ahead = [limit - now for limit in due.values()]
            await self._wait_for_change(min([*ahead, LONG_POLL_MAX_S]) + 0.01)

    def _deadline(self, job: Job) -> float | None:
        """Return the job's deadline; where others have to act, counted from when they were told to, which is later
        than the event when the store did not take it at once or there was no controller."""
        limit = lifecycle.deadline(job)
        waits_for_others = job.state not in (JobState.QUEUED, JobState.RUNNING)
        return limit if limit is None or not waits_for_others else limit + self._lags.get(job.id, 0.0)

    async def _hold_lease(self) -> None:
        while True:
            try:
                await self._in_thread(self._renew_lease)
            except StoreOwned:
                log.critical("another controller has taken this cluster's jobs over; ending")
                os._exit(1)
            except StoreError:
                log.exception("the lease could not be renewed; trying again")
            await asyncio.sleep(LEASE_BEAT_S)

    def _renew_lease(self) -> None:
        assert self._lease is not None
        self._open_store.heartbeat(self._lease, self._clock())

    async def _care_for_nodes(self) -> None:
        while True:
            await asyncio.sleep(NODE_POLL_S)
            await self._try(self._cluster.serve_nodes)
            await self._try(self._look_for_lost_nodes)

    async def _look_for_lost_nodes(self) -> None:
        """Tell of instances whose node is gone: an actor that had not started yet has nobody to say so.

        A node counts as gone when two looks in a row miss it; Ray's list may be short while it restarts.
        """
        living = {node.id for node in await self._cluster.nodes()}
        open_ones = [
            (job, item)
            for job in self._jobs.values()
            if not job.state.terminal
            for item in job.instances
            if not item.closed and item.node_id not in living
        ]
        for job, item in open_ones:
            if item.node_id in self._missing:
                lost = InstanceLost(self._clock(), job.attempt_id, item.name, "its node left the cluster")
                self._post(job.id, lost)
        self._missing = {item.node_id for _, item in open_ones}

    async def _keep_within_limits(self) -> None:
        while True:
            try:
                limits = self._limits()
                oldest = self._clock() - limits.keep_days * DAY_S
                await self._in_thread(partial(self._open_store.access.forget_audit, oldest))
                await self._in_thread(partial(self._open_store.access.forget_tokens, oldest))
                infos = await self._in_thread(self._own_infos)
                sizes = await self._cluster.sizes_of_jobs()
                doomed = expired(infos, sizes, self._clock(), limits.keep_days, limits.keep_gib)
                if doomed:
                    log.info("removing finished jobs: %s", ", ".join(doomed))
                await self.prune(doomed)  # also without jobs: packages of those who upload and never submit
            except Exception:  # the archive restarts, the disk is full: no reason to stop managing jobs
                log.exception("removing old jobs failed; trying again later")
            await asyncio.sleep(RETENTION_S)

    def _own_infos(self) -> list[JobInfo]:
        return read_infos(self._open_store.jobs(cluster=self._name), self._open_store)

    async def _try(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do what is done again and again anyway: a cluster that does not answer now is asked again."""
        try:
            await call()
        except Exception:
            log.exception("the cluster could not be asked; trying again")

    # Helpers.

    @property
    def _open_store(self) -> Store:
        assert self._store is not None, "started() comes first"
        return self._store

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _find(self, job_id: str) -> Job | None:
        if job_id in self._jobs:
            return self._jobs[job_id]
        row = await self._in_thread(lambda: self._open_store.job(job_id))
        return None if row is None else read_job(row)

    def _info(self, job: Job) -> JobInfo:
        return info_of(job, self._home)

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for_change(self, timeout_s: float) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_s)
            except asyncio.TimeoutError:
                pass


def _submitted_by(submission: Submission) -> str:
    request = f" (request {submission.request_id})" if submission.request_id else ""
    return f"submitted by {submission.user}{request}"


def _key_of(submission: Submission) -> Key | None:
    if submission.key is None:
        return None
    return Key(submission.user, submission.key, submission.fingerprint or "")


def _advanced(job: Job, event: JobEvent) -> tuple[lifecycle.Step, JobRow] | None:
    """Return what the event leads to, and the row to store. A fault of ours in one job must not end all others, nor
    come back with every resend: then the event is logged and dropped (None)."""
    try:
        step = lifecycle.advance(job, event)
        return step, row_of(step.job)
    except Exception:
        log.exception("job %s: %s is dropped, it cannot be understood", job.id, event)
        return None


def _on_our_clock(report: Report, offset: float) -> Report:
    if isinstance(report, RunExited):
        ended = replace(report.ended, at=report.ended.at + offset)
        return replace(report, at=report.at + offset, ended=ended)
    return replace(report, at=report.at + offset)


def _has_failed(future: asyncio.Future[None]) -> bool:
    return future.done() and future.exception() is not None


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except asyncio.TimeoutError:
        pass


async def _for_ever(work: Coroutine[Any, Any, None]) -> None:
    """Run a loop of the controller; when one ends, the process does, and Ray starts the controller again on its store."""
    try:
        await work
    except asyncio.CancelledError:
        raise
    except BaseException:
        log.critical("a loop of the controller failed; starting again from the store", exc_info=True)
        os._exit(1)
