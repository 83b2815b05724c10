"""The jobs of a cluster that have not ended: here alone they change, by events, which are stored before anything is done."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TypeVar

from raycontrol import demands, lifecycle
from raycontrol.accessrows import Belongings
from raycontrol.attempts import fenced_anew
from raycontrol.dependencies import open_conditions
from raycontrol.duties import Cluster, Duties
from raycontrol.errors import IdTaken, RaycontrolError, StoreError, StoreOwned, StoreRefused
from raycontrol.events import AwaitedEnded, JobEvent, Report, RunExited, ServiceEnded, TimePassed
from raycontrol.heldstore import HeldStore
from raycontrol.job import Job, job_of
from raycontrol.jobrows import readable, row_of
from raycontrol.relations import Follow, Relations
from raycontrol.sharing import Sharing
from raycontrol.status import JobState, Note
from raycontrol.steadyclock import Moment
from raycontrol.store import Change, JobRow, New

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0
LONGEST_LOOK_AHEAD_S = 20.0
LEAST_WAIT_S = 0.05
SET_BACK_S = 5.0
"""Reports of an instance that come in another order than they were sent are not so far apart."""


@dataclass(frozen=True)
class _Told:
    """``stored`` is set when the event is stored. One that was ``asked`` for is refused where the store takes nothing."""

    job_id: str
    event: JobEvent
    stored: asyncio.Future[None] | None = None
    asked: bool = False

    @property
    def refused(self) -> bool:
        stored = self.stored
        return (
            stored is not None and stored.done() and not stored.cancelled() and stored.exception() is not None
        )


@dataclass(frozen=True)
class _Arrival:
    """A new job on its way to the store; ``stored`` is set when it is there."""

    job: Job
    new: New
    stored: asyncio.Future[None]


class Ledger:
    """Takes events in (``tell``, ``ask``, ``post``, ``report``), advances the jobs, stores them, and lets ``Duties`` act.

    ``load``, then ``resume`` and the two loops. ``look`` is set when the queue has something new to decide: a job waits,
    or is about to give its nodes back.
    """

    def __init__(
        self, held: HeldStore, cluster: Cluster, clock: Callable[[], float], sharing: Sharing | None = None
    ) -> None:
        self._held = held
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._unreadable: frozenset[str] = frozenset()
        self._relations = Relations()
        self._secrets: dict[str, dict[str, str]] = {}
        self._lags: dict[str, float] = {}
        self._limits: dict[str, float] = {}  # by when the clock must call, of those jobs that it must call
        self._offsets: dict[str, dict[tuple[str, str], tuple[float, float]]] = {}
        self._not_understood: set[str] = set()
        self._arrivals: asyncio.Queue[_Arrival] = asyncio.Queue()
        self._inbox: asyncio.Queue[_Told] = asyncio.Queue()
        self._asked: set[asyncio.Future[None]] = set()
        self._trouble: StoreError | None = None
        self._duties = Duties(
            cluster, clock, self.post, lambda job_id: self._secrets.get(job_id, {}), sharing
        )
        self._changed = asyncio.Condition()
        self.look = asyncio.Event()

    @property
    def jobs(self) -> Mapping[str, Job]:
        return self._jobs

    @property
    def unreadable(self) -> frozenset[str]:
        """The ids of the jobs that have not ended and that this version cannot read: another one may take them up again."""
        return self._unreadable

    def members_of(self, array_id: str) -> list[Job]:
        """Return the members of an array that have begun and not ended, the first first."""
        return [self._jobs[job_id] for job_id in self._relations.members_of(array_id)]

    def state_of(self, job_id: str) -> JobState | None:
        """Return the state of a job; None of one that has ended, or never was."""
        return self._jobs[job_id].state if job_id in self._jobs else None

    async def load(self, cluster: str) -> None:
        """Read the jobs that an earlier controller of the cluster left."""
        rows = await self._held.ask(lambda store: store.active(cluster))
        now = self._clock()
        self._jobs = {row.id: fenced_anew(job, now) for row, job in readable(rows)}
        self._unreadable = frozenset(row.id for row in rows) - self._jobs.keys()
        for job in self._jobs.values():
            self._relations.add(job)
        self._secrets = await self._held.ask(lambda store: store.access.secrets_of(self._jobs))
        self._lags = {job.id: max(0.0, now - job.since) for job in self._jobs.values()}
        for job in self._jobs.values():
            self._note_limit(job)
        await self._look_for_ends(self._jobs.values())

    def resume(self) -> None:
        """Go on with what the states of the jobs demand."""
        for job in self._jobs.values():
            self._duties.keep(job)

    async def add(self, job: Job, note: Note, belongings: Belongings) -> None:
        """Take a new job in; return once it is stored. Raises as ``Store.add_all``."""
        arrival = _Arrival(
            job, New(row_of(job), note, belongings), asyncio.get_running_loop().create_future()
        )
        self._arrivals.put_nowait(arrival)
        await arrival.stored

    async def _look_for_ends(self, jobs: Iterable[Job]) -> None:
        """Tell jobs of the ends of others that came before anybody knew that they wait for them."""
        awaited = [(job.id, one.job_id) for job in jobs for one in open_conditions(job)]
        for job_id, other in awaited:
            if other in self._jobs and self._jobs[other].kept_until is not None:  # it has failed, as is known
                self.post(job_id, AwaitedEnded(self._clock(), other, JobState.FAILED))
        gone = [(job_id, other) for job_id, other in awaited if other not in self._jobs]
        if not gone:
            return
        states = await self._states({other for _, other in gone})
        for job_id, other in gone:
            state = states.get(other)
            if state is None or state.terminal:  # else nobody can read it, and its end is still to come
                self.post(job_id, AwaitedEnded(self._clock(), other, state))

    async def _states(self, job_ids: set[str]) -> dict[str, JobState]:
        """Return the states of jobs in the store, for as long as it takes: who waits for one would wait for ever."""
        while True:
            try:
                return await self._held.ask(lambda store: store.states(job_ids))
            except StoreOwned:
                raise
            except StoreError:
                log.exception("the ends of other jobs cannot be read; trying again in %g s", RETRY_MAX_S)
                await asyncio.sleep(RETRY_MAX_S)

    async def tell(self, job_id: str, event: JobEvent) -> None:
        """Put an event in and return when it is stored."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(_Told(job_id, event, stored))
        await stored

    async def ask(self, job_id: str, event: JobEvent) -> None:
        """As ``tell``, for whoever can be told that it was not stored: raises StoreError where the store takes nothing now.

        Then the event has not happened, and will not.
        """
        if self._trouble is not None:
            raise StoreError(str(self._trouble))
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.add(stored)
        stored.add_done_callback(self._asked.discard)
        self._inbox.put_nowait(_Told(job_id, event, stored, asked=True))
        await stored

    def post(self, job_id: str, event: JobEvent) -> None:
        """Put an event in."""
        self._inbox.put_nowait(_Told(job_id, event))

    async def report(self, reports: Sequence[Report], sent_at: float, arrived: Moment) -> None:
        """Take what an instance reports; return once it is stored.

        Times are moved from the clock of its node, on which it was sent at ``sent_at``, to this one. Raises StoreError for
        a job that cannot be read: its instances keep what they have to say.
        """
        told = []
        for report in reports:
            job_id = job_of(report.attempt_id)
            if job_id in self._unreadable:
                raise StoreError(f"job {job_id} cannot be read; its reports are not taken")
            if job_id in self._jobs:
                told.append(
                    self.tell(job_id, _on_our_clock(report, self._offset(job_id, report, sent_at, arrived)))
                )
        await asyncio.gather(*told)

    def _offset(self, job_id: str, report: Report, sent_at: float, arrived: Moment) -> float:
        """Return how far this clock is ahead of the instance's: the least that was ever measured, for Ray may deliver
        a call long after it was made. A clock that was set back since is measured anew.

        It is measured by how long this machine has been up: the steady clock moves against all others after a step.
        """
        key, known = (report.attempt_id, report.instance), self._offsets.setdefault(job_id, {})
        measured = arrived.up_s - sent_at
        last_sent, least = known.get(key, (sent_at, measured))
        offset = min(measured, least) if sent_at >= last_sent - SET_BACK_S else measured
        known[key] = (sent_at, offset)
        return arrived.at - arrived.up_s + offset

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return when a job may have changed, or after ``timeout_s``."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_s)
            except asyncio.TimeoutError:
                pass

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # New jobs.

    async def take_arrivals(self) -> None:
        """Take new jobs in, for ever. All that arrive while the disk is busy go to it in one commit."""
        while True:
            batch = await _all_of(self._arrivals)
            try:
                await self._store(batch)
            except (IdTaken, StoreRefused):  # of one; the others must not suffer for it
                for arrival in batch:
                    await self._store_alone(arrival)
            except RaycontrolError as error:
                _refuse(batch, error)

    async def _store_alone(self, arrival: _Arrival) -> None:
        try:
            await self._store([arrival])
        except RaycontrolError as error:
            _refuse([arrival], error)

    async def _store(self, batch: Sequence[_Arrival]) -> None:
        new = [arrival.new for arrival in batch]
        await self._held.ask(lambda store: store.add_all(new, lease=self._held.lease))
        for arrival in batch:
            job = arrival.job
            self._secrets[job.id] = dict(arrival.new.belongings.secrets)
            self._jobs[job.id] = job
            self._relations.add(job)
            self._note_limit(job)
            if not arrival.stored.done():  # who called may have gone
                arrival.stored.set_result(None)
        await self._look_for_ends([arrival.job for arrival in batch])
        self.look.set()
        await self._announce()

    # Events.

    async def take_events(self) -> None:
        """Take events in, for ever."""
        while True:
            for part in _apart(await _all_of(self._inbox)):
                if left := [told for told in part if not told.refused]:
                    await self._take(left)

    async def _take(self, batch: Sequence[_Told]) -> None:
        """Advance the jobs, and others with what follows for them, store all of it in one commit, then act and acknowledge.

        What was asked for comes alone.
        """
        advanced: dict[str, Job] = {}
        rows: dict[str, JobRow] = {}
        notes: dict[str, list[Note]] = {}
        news = deque(Follow(told.job_id, told.event) for told in batch)
        while news:
            job_id, event, newborn = news.popleft()
            job = advanced.get(job_id) or self._jobs.get(job_id) or newborn
            if job is None:
                continue
            stepped = _advanced(job, event)
            if stepped is None:
                continue
            step, rows[job_id] = stepped
            advanced[job_id] = step.job
            if newborn is not None and job_id not in self._jobs:
                self._relations.add(step.job)  # what becomes of its array in this very batch is for it too
            notes.setdefault(job_id, []).extend(step.notes)
            news.extend(self._relations.following(job, step.job, event))
        changed = {
            job_id: job for job_id, job in advanced.items() if job != self._jobs.get(job_id) or notes[job_id]
        }
        if changed:
            changes = [
                Change(rows[job_id], tuple(notes[job_id]), new=job_id not in self._jobs) for job_id in changed
            ]
            if not any(told.asked for told in batch):
                await self._save(changes)
            elif (error := await self._try_to_save(changes)) is not None:
                for job_id in changed.keys() - self._jobs.keys():
                    self._relations.remove(changed[job_id])
                self._refuse_asked(error)
                return
        for job_id, job in changed.items():
            before = self._jobs.get(job_id)
            if before is None or job.since != before.since:
                self._lags[job_id] = max(0.0, self._clock() - job.since)
            self._jobs[job_id] = job
            self._note_limit(job)
            self._duties.keep(job)
            if job.state.terminal:
                self._forget(job)
            if job.is_array or job.state in (JobState.QUEUED, JobState.STOPPING) or job.state.terminal:
                self.look.set()
        for told in batch:
            if told.stored is not None and not told.stored.done():
                told.stored.set_result(None)
        await self._announce()

    async def _save(self, changes: Sequence[Change]) -> None:
        """Store the changes, for as long as it takes: what is not stored has not happened.

        One that the store will never take must not keep the others waiting: it is logged, and what it says is lost.
        """
        pause_s = RETRY_FIRST_S
        while (error := await self._try_to_save(changes)) is not None:
            self._trouble = error
            self._refuse_asked(error)
            log.error(
                "the store does not take %d changes; trying again in %.1f s",
                len(changes),
                pause_s,
                exc_info=error,
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)
        self._trouble = None

    async def _try_to_save(self, changes: Sequence[Change]) -> StoreError | None:
        """Return why the store does not take the changes now, None when it has, or never will."""
        try:
            await self._held.ask(lambda store: store.save(changes, lease=self._held.lease))
        except StoreOwned:
            raise
        except StoreRefused:
            log.exception("the store refuses changes of %s", ", ".join(item.row.id for item in changes))
            if len(changes) > 1:
                for change in changes:
                    await self._save([change])
        except StoreError as error:
            return error
        return None

    def _refuse_asked(self, error: StoreError) -> None:
        """Tell all who asked for something that waits. They can ask again; here they would wait for as long as it takes."""
        for stored in self._asked:
            if not stored.done():
                stored.set_exception(StoreError(str(error)))

    def _forget(self, job: Job) -> None:
        """Let go of a job that has ended. Who came to wait for it while its end was being stored is told now."""
        for job_id in self._relations.waiting_for(job.id):
            self.post(job_id, AwaitedEnded(self._clock(), job.id, job.state))
        del self._jobs[job.id]
        self._relations.remove(job)
        self._secrets.pop(job.id, None)
        self._lags.pop(job.id, None)
        self._limits.pop(job.id, None)
        self._offsets.pop(job.id, None)

    # The clock.

    async def run_clock(self) -> None:
        """Tell jobs that their time has come, for ever."""
        while True:
            now = self._clock()
            over = {job_id: self._jobs[job_id] for job_id, limit in self._limits.items() if limit <= now}
            await asyncio.gather(*(self.tell(job_id, TimePassed(now)) for job_id in over))
            if any(self._jobs.get(job_id) is not job for job_id, job in over.items()):
                continue  # meanwhile other limits may have begun
            soonest_s = min(self._limits.values(), default=math.inf) - now
            # At least a moment: what is due, and changes nothing, would be told again at once.
            await self.wait_for_change(max(LEAST_WAIT_S, min(soonest_s, LONGEST_LOOK_AHEAD_S) + 0.01))

    def _note_limit(self, job: Job) -> None:
        limit = self._deadline(job)
        if limit is None:
            self._limits.pop(job.id, None)
        else:
            self._limits[job.id] = limit

    def _deadline(self, job: Job) -> float | None:
        """Return the job's deadline; one whose limits cannot be told must not end all others."""
        try:
            return demands.due(job, self._lags.get(job.id, 0.0))
        except Exception:
            if job.id not in self._not_understood:
                self._not_understood.add(job.id)
                log.exception("job %s: its limits cannot be understood, and are not kept", job.id)
            return None


async def _all_of(waiting: asyncio.Queue[T]) -> list[T]:
    """Return all that is in a queue, at least one."""
    batch = [await waiting.get()]
    while not waiting.empty():
        batch.append(waiting.get_nowait())
    return batch


def _refuse(batch: Iterable[_Arrival], error: RaycontrolError) -> None:
    for arrival in batch:
        if not arrival.stored.done():
            arrival.stored.set_exception(copy(error))


def _apart(batch: Sequence[_Told]) -> Iterator[list[_Told]]:
    """Yield what was asked for one by one, and what comes between together."""
    together: list[_Told] = []
    for told in batch:
        if not told.asked:
            together.append(told)
            continue
        yield together
        together = []
        yield [told]
    yield together


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
    if isinstance(report, RunExited | ServiceEnded):
        ended = replace(report.ended, at=report.ended.at + offset)
        return replace(report, at=report.at + offset, ended=ended)
    return replace(report, at=report.at + offset)
