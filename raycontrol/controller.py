"""The controller: takes jobs, answers for them, and keeps running what ``lifecycle`` demands.

It decides nothing itself: ``scheduler`` lets the queue say which job starts, ``ledger`` lets the lifecycle say what an
event makes of a job, and its ``duties`` keep running what the states of the jobs demand, so that a controller that
starts again on a store takes up exactly what the old one left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from raycontrol import targets
from raycontrol.accessrows import Belongings, Key
from raycontrol.caretaker import Caretaker
from raycontrol.duties import Cluster
from raycontrol.errors import (
    IdTaken,
    JobIsThere,
    JobNotFound,
    KeyReused,
    StoreError,
    UsageError,
    VersionMismatch,
)
from raycontrol.events import Held, LetGo, PriorityChanged, Report, StopRequested, Suspended
from raycontrol.execution import Place, Target
from raycontrol.hardware import NodeInfo
from raycontrol.heldstore import HeldStore
from raycontrol.job import FENCE_S, Job, Submission, checked_id
from raycontrol.jobrows import info_of, members_of, read_info, read_infos, read_job
from raycontrol.ledger import Ledger
from raycontrol.porter import Porter
from raycontrol.queue import Rules
from raycontrol.retention import Limits
from raycontrol.roster import Roster
from raycontrol.scheduler import Scheduler
from raycontrol.sharing import Sharing
from raycontrol.spec import After, JobSpec, Site
from raycontrol.status import Event, JobInfo, JobState, MemberInfo, Note, QueueEntry, Wish
from raycontrol.steadyclock import SteadyClock
from raycontrol.store import JobRow, Store
from raycontrol.survey import Survey
from raycontrol.version import __version__

log = logging.getLogger(__name__)

START_RETRY_S = 5.0
LONG_POLL_MAX_S = 20.0
ARRAY_ID_MAX = 72
"""Its members' ids end with their indices."""


class Controller:
    """One per cluster. Public methods are what clients and instances call, and ``porter`` what the HTTP server asks.

    ``clock`` is this host's (epoch seconds); what becomes of jobs goes by a clock that its steps do not move.
    """

    def __init__(
        self,
        home: str,
        name: str,
        cluster: Cluster,
        clock: Callable[[], float] = time.time,
        limits: Callable[[], Limits] = Limits,
        rules: Callable[[], Rules] = Rules,
        site: Callable[[], Site] = Site,
        fence_s: Callable[[], float] = lambda: FENCE_S,
        shared_dir: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._home = Path(home)
        self._name = name
        self._cluster = cluster
        self._wall = clock
        self._clock = SteadyClock(clock)
        self._site = site
        self._held = HeldStore(self._home, name, self._clock)
        self._sharing = Sharing(cluster, shared_dir)
        self._ledger = Ledger(self._held, cluster, self._clock, self._sharing)
        self.roster = Roster(name, self._held, self._ledger, cluster, self._clock)
        self._scheduler = Scheduler(self._ledger, cluster, self._clock, rules, fence_s, self.roster)
        self._caretaker = Caretaker(name, self._held, self._ledger, cluster, self._clock, limits)
        self.porter = Porter(name, self._held, clock, self.started)
        self._loops: list[asyncio.Task[None]] = []
        self._started: asyncio.Future[None] | None = None

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
        states = [job.state for job in self._ledger.jobs.values()]
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
        an id that another user's job has or a removed one had; UsageError too for a group of nodes that there is not.
        """
        job, _ = await self.take_in(submission)
        return job

    async def take_in(self, submission: Submission) -> tuple[JobInfo, bool]:
        """As ``submit``; return also whether the job is new by this very call."""
        await self.started()
        if submission.version != __version__:
            raise VersionMismatch(submission.version, __version__)
        checked_id(submission.job_id)
        if submission.spec.array is not None and len(submission.job_id) > ARRAY_ID_MAX:
            raise UsageError(f"job id: an array's must have at most {ARRAY_ID_MAX} characters")
        known = await self._known(submission)
        if known is None:
            try:
                return self._info(await self._add(submission)), True
            except JobIsThere:  # the call was repeated while the first one was on its way
                known = await self._known(submission)
                if known is None:
                    raise
        return self._info(known), False

    async def _known(self, submission: Submission) -> Job | None:
        """Return the job that the submission has become already; raises KeyReused, IdTaken."""
        known = await self._submitted(submission) or await self._find(submission.job_id)
        if known is not None and known.user != submission.user:
            raise IdTaken(submission.job_id)
        return known

    async def _submitted(self, submission: Submission) -> Job | None:
        """Return the job that the submission's key stands for; raises KeyReused."""
        user, key = submission.user, submission.key
        if key is None:
            return None
        used = await self._held.ask(lambda store: store.access.used_key(self._name, user, key))
        if used is None:
            return None
        if used.fingerprint != (submission.fingerprint or ""):
            raise KeyReused(key)
        return await self._find(used.job_id)

    async def _add(self, submission: Submission) -> Job:
        self.roster.check(submission.spec)
        now = self._clock()
        secrets = submission.spec.secrets()
        await self._refuse_unknown(submission.spec.after)
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
        await self._ledger.add(job, note, Belongings(_key_of(submission), secrets))
        log.info("job %s %s, from %s", job.id, note.message, submission.origin or "this cluster")
        return job

    async def _refuse_unknown(self, after: After) -> None:
        """Raise UsageError for a job that this one could wait for in vain: it is not there, or another cluster has it."""
        named = [(kind, job_id) for kind in After.model_fields for job_id in getattr(after, kind)]
        elsewhere = {job_id for _, job_id in named if job_id not in self._ledger.jobs}
        states = await self._held.ask(lambda store: store.states(elsewhere)) if elsewhere else {}
        for kind, job_id in named:
            if job_id in elsewhere and not (job_id in states and states[job_id].terminal):
                raise UsageError(f"after.{kind}: there is no job {job_id!r} on this cluster")

    async def stop(self, job_id: str, why: str, force: bool = False) -> JobInfo:
        """Ask a job to stop; return when that is stored, which is before it has stopped. A job that has ended stays as it is.

        Raises StoreError, and nothing happens, when the store takes nothing now.
        """
        await self.started()
        if job_id in self._ledger.jobs:
            await self._ledger.ask(job_id, StopRequested(self._clock(), why, force))
        return await self.info(job_id)

    async def info(self, job_id: str) -> JobInfo:
        """Return a job; raises JobNotFound."""
        return await self._shown(job_id, whole=True)

    async def glance(self, job_id: str) -> JobInfo:
        """Return a job without what takes making its plan: for who asks often. Raises JobNotFound."""
        return await self._shown(job_id, whole=False)

    async def _shown(self, job_id: str, whole: bool) -> JobInfo:
        await self.started()
        if job_id in self._ledger.jobs:
            job = self._ledger.jobs[job_id]
            return self._with_why(info_of(job, self._home, whole=whole), job)
        row = await self._held.ask(lambda store: store.job(job_id))
        if row is None:
            raise JobNotFound(job_id)
        return await self._held.ask(lambda store: read_info(row, store, whole=whole))

    async def members(self, job_id: str) -> list[MemberInfo]:
        """Return the members of an array, in the order of their indices; raises JobNotFound, and UsageError for another job."""
        await self.started()
        return await self._held.ask(lambda store: members_of(store, job_id))

    async def queue(self) -> list[QueueEntry]:
        """Return the jobs that wait for nodes of this cluster, in the order in which they are decided upon."""
        await self.started()
        return [
            QueueEntry(
                position=position,
                id=job.id,
                name=job.spec.name or job.id,
                user=job.user,
                priority=job.spec.priority,
                submitted_at=job.submitted_at,
                why=self._scheduler.why(job),
                held=job.held is not None,
            )
            for position, job in self._scheduler.line()
        ]

    async def wish(self, job_id: str, wish: Wish, why: str) -> JobInfo:
        """Hold a job, let it go, suspend it or resume it; return when that is stored. What is so already stays so.

        Raises JobNotFound, UsageError where the job's state does not allow it, and StoreError as ``stop`` does.
        """
        await self.started()
        job = await self._unfinished(job_id)
        now = self._clock()
        match wish:
            case Wish.HOLD if job.held is not None:
                pass  # so it is already, or will be once it has stopped
            case Wish.HOLD if job.state is not JobState.QUEUED and not job.is_array:
                raise UsageError(
                    f"job {job_id} is {job.state}; `raycontrol suspend` stops it and keeps it in the queue"
                )
            case Wish.HOLD:
                await self._ledger.ask(job_id, Held(now, why))
                self._require(job_id, lambda job: job.held is not None)
            case Wish.SUSPEND:
                await self._ledger.ask(job_id, Suspended(now, why))
                self._require(job_id, lambda job: job.held is not None)
            case Wish.RELEASE | Wish.RESUME:
                await self._ledger.ask(job_id, LetGo(now, why))
        return await self.info(job_id)

    async def set_priority(self, job_id: str, priority: int, why: str) -> JobInfo:
        """Give a waiting job another priority, 0 (highest) to 9; raises JobNotFound, and UsageError where it does not wait."""
        await self.started()
        if not 0 <= priority <= 9:
            raise UsageError(f"priority: must be from 0 (highest) to 9, got {priority}")
        job = await self._unfinished(job_id)
        if job.state is not JobState.QUEUED and not job.is_array:
            raise UsageError(
                f"job {job_id} is {job.state}: only of a waiting job the priority can be changed"
            )
        await self._ledger.ask(job_id, PriorityChanged(self._clock(), priority, why))
        self._require(job_id, lambda job: job.spec.priority == priority)
        return await self.info(job_id)

    def _require(self, job_id: str, true: Callable[[Job], bool]) -> None:
        """Raise UsageError when what was asked for has not come about: the job went on meanwhile, or is ending."""
        job = self._ledger.jobs.get(job_id)
        if job is None:
            raise UsageError(f"job {job_id} has ended meanwhile; nothing was changed")
        if not true(job):
            raise UsageError(
                f"job {job_id} is {job.state}; nothing was changed, `raycontrol get {job_id}` shows it"
            )

    async def _unfinished(self, job_id: str) -> Job:
        if job_id not in self._ledger.jobs:
            info = await self.info(job_id)
            raise UsageError(f"job {job_id} has ended ({info.state})")
        return self._ledger.jobs[job_id]

    async def running(self) -> list[JobInfo]:
        """Return the jobs that run on this cluster, oldest first."""
        await self.started()
        found = [
            job for job in self._ledger.jobs.values() if job.state is JobState.RUNNING and not job.is_array
        ]
        return [self._info(job) for job in sorted(found, key=lambda job: (job.submitted_at, job.id))]

    async def find(self, prefix: str) -> list[str]:
        """Return the ids that begin so."""
        await self.started()
        return await self._held.ask(lambda store: store.find(prefix))

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

        living = dict(self._ledger.jobs)

        def read(store: Store) -> list[Job | JobInfo]:
            """Jobs that have not ended are at hand; to read one from its row takes checking its spec again."""
            found = store.jobs(states=states, user=user, limit=limit, labels=labels, text=text, before=before)
            at_hand = {row.id: living[row.id] for row in found if _is_as_stored(living.get(row.id), row)}
            others = {info.id: info for info in read_infos((r for r in found if r.id not in at_hand), store)}
            shown = (at_hand.get(row.id) or others.get(row.id) for row in found)
            return [one for one in shown if one is not None]

        listed = await self._held.ask(read)
        return [self._info(one) if isinstance(one, Job) else one for one in listed]

    def _with_why(self, info: JobInfo, job: Job) -> JobInfo:
        """Say what a waiting job waits for now."""
        if info.state is not JobState.QUEUED:
            return info
        return info.model_copy(update={"pending": self._scheduler.why(job)})

    async def events(self, job_id: str, after: int = 0, timeout_s: float = 0.0) -> list[Event]:
        """Return a job's events with ``seq`` above ``after``; wait up to ``timeout_s`` (at most 20) for the first."""
        await self.started()
        deadline = time.monotonic() + min(timeout_s, LONG_POLL_MAX_S)
        while True:
            found = await self._held.ask(lambda store: store.events(job_id, after))
            left = deadline - time.monotonic()
            if found or left <= 0 or job_id not in self._ledger.jobs:
                return found
            await self._ledger.wait_for_change(left)

    async def nodes(self, names: Sequence[str] | None = None, check: bool = False) -> list[NodeInfo]:
        """Return the living nodes with their facts (``Survey``); raises UsageError for a name that no node has."""
        await self.started()
        rooms = await self._scheduler.rooms()
        jobs = tuple(self._ledger.jobs.values())
        survey = Survey(self._cluster, self._wall, check, offline=self.roster.mark_of, sharing=self._sharing)
        return await survey.nodes(rooms, jobs, names)

    async def doubts(self, spec: JobSpec) -> str | None:
        """Return why the cluster as it is could never run the job, or None; raises UsageError where it can be no job here."""
        await self.started()
        return await self._scheduler.doubts(spec)

    async def places(self, target: Target) -> tuple[Place, ...]:
        """Return where a command is to be run (``targets.places``); raises UsageError, and JobNotFound."""
        await self.started()
        if target.job is not None:
            if target.job not in self._ledger.jobs:
                await self._unfinished(target.job)
            return targets.places(self._name, target, (), self._ledger.jobs)
        if target.group is not None:
            self.roster.require_group(target.group)
        return targets.places(self._name, target, await self._scheduler.rooms(), self._ledger.jobs)

    async def prune(self, job_ids: Sequence[str]) -> None:
        """Remove finished jobs, with their logs and outputs."""
        await self.started()
        await self._caretaker.remove(job_ids)

    # For instances.

    async def report(self, sent_at: float, reports: Sequence[Report]) -> None:
        """Take what an instance reports; return once it is stored. Times are moved to this node's clock."""
        arrived = self._clock.moment()
        await self.started()  # which may move the clock
        await self._ledger.report(reports, sent_at, self._clock.seen_from_now(arrived.up_s))

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
                log.error("cannot start: %s; trying again in %g s", error, START_RETRY_S)
            except Exception:  # whatever it is, jobs wait for a controller
                log.exception("cannot start; trying again in %g s", START_RETRY_S)
            await asyncio.sleep(START_RETRY_S)

    async def _start(self) -> None:
        await self._held.take()
        if (last := self._held.lease.predecessor_at) is not None:
            self._clock.go_on_from(last)
        await self._ledger.load(self._name)
        await self.roster.load()
        await self._cluster.serve_nodes()
        self._ledger.resume()
        loops = (
            self._ledger.take_arrivals(),
            self._ledger.take_events(),
            self._scheduler.run(),
            self._ledger.run_clock(),
            self._held.hold(),
            self._caretaker.care_for_nodes(),
            self._caretaker.reconcile(),
            self._caretaker.keep_within_limits(),
        )
        self._loops = [asyncio.ensure_future(_for_ever(loop)) for loop in loops]
        self._proving = asyncio.ensure_future(self._prove_sharing())

    # Helpers.

    async def _prove_sharing(self) -> None:
        """Look at the shared folder on every node before a job needs it; what is wrong is in the log."""
        try:
            rooms = await self._scheduler.rooms() if self._sharing.wanted else ()
            await asyncio.gather(*(self._sharing.of(room.id, room.name) for room in rooms))
        except Exception:  # it is proved again before a job needs it
            log.exception("the shared folder could not be looked at")

    async def _find(self, job_id: str) -> Job | None:
        if job_id in self._ledger.jobs:
            return self._ledger.jobs[job_id]
        row = await self._held.ask(lambda store: store.job(job_id))
        return None if row is None else read_job(row)

    def _info(self, job: Job) -> JobInfo:
        return self._with_why(info_of(job, self._home), job)


def _is_as_stored(job: Job | None, row: JobRow) -> bool:
    """Whether a job that is at hand is in the state by which its row was found: the store may be ahead by a moment."""
    return job is not None and job.state is row.state


def _submitted_by(submission: Submission) -> str:
    request = f" (request {submission.request_id})" if submission.request_id else ""
    return f"submitted by {submission.user}{request}"


def _key_of(submission: Submission) -> Key | None:
    if submission.key is None:
        return None
    return Key(submission.user, submission.key, submission.fingerprint or "")


def _has_failed(future: asyncio.Future[None]) -> bool:
    return future.done() and future.exception() is not None


async def _for_ever(work: Coroutine[Any, Any, None]) -> None:
    """Run a loop of the controller; when one ends, the process does, and Ray starts the controller again on its store."""
    try:
        await work
    except asyncio.CancelledError:
        raise
    except BaseException:
        log.critical("a loop of the controller failed; starting again from the store", exc_info=True)
        os._exit(1)
