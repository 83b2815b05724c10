"""The queue at work: what is free is looked up, ``queue`` decides, and the jobs are told."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from raycontrol import arrayqueue, arrays, dependencies, placement, queue
from raycontrol.arrayspec import array_of, index_of
from raycontrol.duties import Cluster
from raycontrol.errors import UsageError
from raycontrol.events import JobEvent, MemberChosen, NodesChosen, PlacementDeferred, Preempted
from raycontrol.job import FENCE_S, Job
from raycontrol.ledger import Ledger
from raycontrol.roster import Roster
from raycontrol.spec import JobSpec
from raycontrol.status import JobState

log = logging.getLogger(__name__)

QUEUE_POLL_S = 0.5
"""How often the cluster is looked at while jobs wait: other programs' resources and joining nodes are not announced."""
NEWS_AT_ONCE = 200
"""Of how many jobs the store is told in one go why they wait."""
FIGURES_LAG_S = 5.0
"""So long after a job has let its nodes go, Ray's figures may still count what it had as used."""


class Scheduler:
    """Decides upon all waiting jobs whenever the ledger has news for the queue, and while jobs wait again and again."""

    def __init__(
        self,
        ledger: Ledger,
        cluster: Cluster,
        clock: Callable[[], float],
        rules: Callable[[], queue.Rules],
        fence_s: Callable[[], float],
        roster: Roster,
    ) -> None:
        self._ledger = ledger
        self._roster = roster
        self._cluster = cluster
        self._clock = clock
        self._read_rules = rules
        self._rules = queue.Rules()
        self._read_fence_s = fence_s
        self._fence_s = FENCE_S
        self._capacity = queue.Capacity()
        self._pass_s = 0.0
        self._waits: dict[str, queue.KeepWaiting] = {}
        self._told: dict[str, queue.Wait] = {}  # of what kind the reason is that the store has
        self._known_fresh: dict[str, queue.Waiting] = {}
        self._first_of: dict[str, str] = {}
        """By array the first of its members that have not begun, as long as they stand in the queue."""
        # What the queue works out of a job's spec, it remembers in these.
        self._known_waiting: dict[str, tuple[Job, queue.Waiting | None]] = {}
        self._known_running: dict[str, tuple[Job, queue.Running | None]] = {}
        self._left: list[tuple[float, queue.Running]] = []  # until when it is remembered, by the steady clock

    def line(self) -> list[tuple[int | None, Job]]:
        """Return the waiting jobs, in the order in which they are decided upon; an array stands where its first member does.

        The number is a job's place in the line, from 1; who stands aside has none.
        """
        waiting = dict.fromkeys(self._owner(entry.job_id) for entry in queue.in_order(self._waiting()))
        places = itertools.count(1)
        jobs = [self._ledger.jobs[job_id] for job_id in waiting]
        return [(None if self._stands_aside(job) else next(places), job) for job in jobs]

    def _stands_aside(self, job: Job) -> bool:
        found = self._wait_of(job)
        return job.held is not None or (found is not None and found.aside)

    def _wait_of(self, job: Job) -> queue.KeepWaiting | None:
        return self._waits.get(self._first_of.get(job.id, job.id))

    def _owner(self, job_id: str) -> str:
        """Return the id of an entry's job, which is its array's for a member that has not begun."""
        return job_id if job_id in self._ledger.jobs else array_of(job_id) or job_id

    def why(self, job: Job) -> str | None:
        """Return what the job waits for, as the queue saw it last: the store has it only as it was when its kind changed."""
        found = self._wait_of(job)
        if not (job.state is JobState.QUEUED or job.is_array) or job.held is not None or found is None:
            return job.pending
        return found.text

    async def rooms(self) -> tuple[placement.Node, ...]:
        """Return the living nodes with what is free on them, and what is known of them."""
        nodes = await self._cluster.nodes()
        return self._roster.marked(_less_our_own(nodes, self._running()), self._rules.topology)

    async def doubts(self, spec: JobSpec) -> str | None:
        """Return why the cluster as it is could never run a job that is not submitted yet, or None.

        Raises UsageError where it names a group of nodes that there is not.
        """
        self._roster.check(spec)
        item = queue.Waiting("", spec, 0.0)
        if item.choice.asks_for_facts and (asked := self._roster.learn(await self._cluster.nodes())):
            await asyncio.wait(asked)
        return queue.lacks(item, await self.rooms())

    async def run(self) -> None:
        """Serve the queue, for ever."""
        while True:
            waiting = self._waiting()
            if waiting:
                try:
                    await self._place(waiting)
                except Exception:  # a cluster that does not answer now is asked again
                    log.exception("the queue could not decide; trying again")
            await _wait(self._ledger.look, QUEUE_POLL_S if waiting else None)
            await asyncio.sleep(self._pass_s)  # a long queue leaves the others half of the time
            self._ledger.look.clear()

    def _waiting(self) -> list[queue.Waiting]:
        known, now = self._known_waiting, self._clock()
        self._known_waiting = {
            job.id: _as_before(job, known.get(job.id)) or (job, self._seen(job, known.get(job.id), now))
            for job in self._ledger.jobs.values()
            if job.state is JobState.QUEUED
        }
        waiting = {job_id: one for job_id, (_, one) in self._known_waiting.items() if one is not None}
        self._put_members_in(waiting)
        return list(waiting.values())

    def _seen(
        self, job: Job, known: tuple[Job, queue.Waiting | None] | None, now: float
    ) -> queue.Waiting | None:
        return _waiting(job, known, now, dependencies.why(job, self._ledger.state_of))

    def _put_members_in(self, waiting: dict[str, queue.Waiting]) -> None:
        """Let members of arrays that have not begun stand in their array's place."""
        known, self._known_fresh, self._first_of = self._known_fresh, {}, {}
        for array in [job for job in self._ledger.jobs.values() if job.is_array]:
            if array.id in waiting and not arrays.may_begin(array):
                continue  # it stands there itself
            waiting.pop(array.id, None)
            members = self._ledger.members_of(array.id)
            back = [waiting[member.id] for member in members if member.id in waiting]
            found = {one.job_id: one for one in arrayqueue.entries(array, members, back, known)}
            fresh = {job_id: one for job_id, one in found.items() if job_id not in self._ledger.jobs}
            if fresh:
                self._first_of[array.id] = next(iter(fresh))
            self._known_fresh.update(fresh)
            waiting.update(found)

    def _running(self) -> list[queue.Running]:
        known, jobs = self._known_running, [job for job in self._ledger.jobs.values() if job.instances]
        self._remember_left(set(known) - {job.id for job in jobs})
        self._known_running = {
            job.id: known[job.id] if job.id in known and known[job.id][0] is job else (job, _running(job))
            for job in jobs
        }
        return [running for _, running in self._known_running.values() if running is not None]

    def _remember_left(self, gone: Iterable[str]) -> None:
        now = time.monotonic()
        left = [self._known_running[job_id][1] for job_id in gone]
        self._left = [one for one in self._left if one[0] > now]
        self._left += [(now + FIGURES_LAG_S, job) for job in left if job is not None]

    async def _place(self, waiting: Sequence[queue.Waiting]) -> None:
        self._look_at_settings()
        nodes = await self.rooms()
        if any(item.choice.asks_for_facts for item in waiting):
            self._roster.learn(nodes)
        now = self._clock()
        began = time.monotonic()
        running = self._running()
        left = [job for _, job in self._left]
        decisions = queue.decide(waiting, nodes, running, self._rules, now, self._capacity, left)
        self._pass_s = time.monotonic() - began
        self._waits = {one.job_id: one for one in decisions if isinstance(one, queue.KeepWaiting)}
        told: list[tuple[str, JobEvent]] = []
        for decision in decisions:
            match decision:
                case queue.PlaceNow(job_id, assignments):
                    told.append(self._placed(job_id, assignments, now))
                case queue.Preempt(job_id, for_job):
                    told.append((job_id, Preempted(now, for_job)))
        told += [(self._owner(one.job_id), PlacementDeferred(now, one.text)) for one in self._news()]
        await asyncio.gather(*(self._ledger.tell(job_id, event) for job_id, event in told))
        for decision in decisions:
            if isinstance(decision, queue.PlaceNow):
                self._roster.tell_if_offline(decision.job_id, decision.assignments)

    def _news(self) -> list[queue.KeepWaiting]:
        """Return the reasons that the store shall have, some at a time: what else there is to tell must not wait for them."""
        told_of = {*self._ledger.jobs, *self._first_of.values()}
        news = [one for one in self._waits.values() if one.job_id in told_of and self._is_news(one)]
        later = {one.job_id for one in news[NEWS_AT_ONCE:]}
        if later:
            self._ledger.look.set()
        before = {job_id: self._told[job_id] for job_id in later & self._told.keys()}
        self._told = {
            **{job_id: one.kind for job_id, one in self._waits.items() if job_id not in later},
            **before,
        }
        return news[:NEWS_AT_ONCE]

    def _placed(
        self, job_id: str, rooms: tuple[placement.Assignment, ...], now: float
    ) -> tuple[str, JobEvent]:
        owner = self._owner(job_id)
        if owner == job_id:
            return owner, NodesChosen(now, rooms, self._fence_s)
        return owner, MemberChosen(now, index_of(job_id), rooms, self._fence_s)

    def _look_at_settings(self) -> None:
        """Follow the settings; while they are wrong, those that were right last hold: jobs wait for a decision."""
        try:
            self._rules, self._fence_s = self._read_rules(), self._read_fence_s()
        except UsageError as error:
            log.error("the settings of the queue cannot be used, the last ones hold: %s", error)

    def _is_news(self, wait: queue.KeepWaiting) -> bool:
        """Whether the job waits for something else than before: numbers change with every job that starts, and nobody
        wants ten thousand jobs to tell of it."""
        if wait.kind is queue.Wait.HELD:
            return False
        known = self._told.get(wait.job_id)
        if known is None:  # an earlier controller may have told it
            job = self._ledger.jobs.get(self._owner(wait.job_id))
            return job is not None and job.pending is None
        return known is not wait.kind


def _as_before(
    job: Job, known: tuple[Job, queue.Waiting | None] | None
) -> tuple[Job, queue.Waiting | None] | None:
    """Return what is known of the job if it is as it was, and no moment is to come that changes it."""
    if known is None or known[0] is not job:
        return None
    settled = job.waits_until is None and not dependencies.open_conditions(job)
    return known if settled or known[1] is None else None


def _waiting(
    job: Job, known: tuple[Job, queue.Waiting | None] | None, now: float, awaits: str | None
) -> queue.Waiting | None:
    """Return the job as the queue sees it: the one it has seen before, while nothing of that has changed. None, and a line
    in the log, where its spec cannot be understood: one that an older version took in must not keep all others waiting."""
    try:
        held, avoided = _held_back(job, now), frozenset(job.avoided)
        seen = known[1] if known is not None else None
        if (
            seen is not None
            and seen.spec is job.spec
            and (seen.held, seen.avoided, seen.awaits) == (held, avoided, awaits)
        ):
            return seen
        waiting = queue.Waiting(job.id, job.spec, job.submitted_at, job.user, held, avoided, awaits)
        waiting.work_out()
        return waiting
    except Exception:
        log.exception(
            "job %s: what it asks for cannot be understood, and it is left out of the queue", job.id
        )
        return None


def _held_back(job: Job, now: float) -> str | None:
    """Return why the queue is not to start the job."""
    until = job.waits_until
    if job.held is not None or until is None or until <= now:
        return job.held
    return f"waits {until - now:.0f} s before its next attempt"


def _running(job: Job) -> queue.Running | None:
    """Return the job as the queue sees it; None, and a line in the log, where its rooms and its spec do not go together:
    one that an older version placed otherwise must not keep all others waiting."""
    try:
        running = _as_running(job)
        assert running.holding is not None
        return running
    except Exception:
        log.exception("job %s: what it holds cannot be understood, and is not counted", job.id)
        return None


def _as_running(job: Job) -> queue.Running:
    limit_s = job.spec.timeouts.run_s
    begun = job.since if job.state is JobState.RUNNING else None
    ends_by = None if limit_s is None or begun is None else begun + limit_s
    return queue.Running(
        job_id=job.id,
        spec=job.spec,
        user=job.user,
        rooms=tuple(placement.Assignment(i.name, i.node_id, i.node_name, i.ip) for i in job.instances),
        since=job.since if job.placed_at is None else job.placed_at,
        ends_by=ends_by if job.kept_until is None else job.kept_until,
        stopping=job.state is JobState.STOPPING and job.kept_until is None,
    )


def _less_our_own(
    nodes: Sequence[placement.Node], running: Iterable[queue.Running]
) -> tuple[placement.Node, ...]:
    """Hold what is free against what our jobs have reserved: Ray's figures lag behind a reservation just made."""
    ours = {node.id: dict(node.total) for node in nodes}
    for job in running:
        for member, room in zip(job.gang, job.rooms, strict=True):
            if room.node_id in ours:
                placement.take(ours[room.node_id], placement.demand(member.resources))
    return tuple(
        placement.with_free(
            node, {name: min(node.free.get(name, 0.0), ours[node.id].get(name, 0.0)) for name in node.total}
        )
        for node in nodes
    )


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except asyncio.TimeoutError:
        pass
