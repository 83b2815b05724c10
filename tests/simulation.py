"""A cluster in virtual time: jobs come, ``queue.decide`` starts them, they end. Every pass is checked.

Nothing waits: the clock jumps from one event to the next. Used by tests, and by ``python -m tests.bench.trace``.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from raycontrol.placement import Node, NoRoom, demand, place, with_free
from raycontrol.queue import (
    Capacity,
    KeepWaiting,
    PlaceNow,
    Policy,
    Preempt,
    Rules,
    Running,
    Wait,
    Waiting,
    decide,
    in_order,
)
from raycontrol.spec import JobSpec, Resources, Timeouts

ASIDE = {Wait.HELD, Wait.INFEASIBLE, Wait.USER_LIMIT}
STOP_S = 30.0
"""So long a job that has to make room takes to stop."""


@dataclass(frozen=True)
class Load:
    """A job that comes at ``job.submitted_at`` and works for ``takes_s``; one that is stopped starts from the beginning."""

    job: Waiting
    takes_s: float


class Simulation:
    """``run`` goes on until all jobs have ended."""

    def __init__(self, nodes: Sequence[Node], loads: Iterable[Load], rules: Rules) -> None:
        self.now = 0.0
        self.started: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.preemptions: Counter[str] = Counter()
        self.worked: list[tuple[float, float, float]] = []
        """From when to when a job had how many GPUs; without the work that was lost because it had to make room."""
        self.late: list[str] = []
        """First jobs of the line that started later than the limits of those that ran before them said."""
        self._loads = {load.job.job_id: load for load in loads}
        self._rules = rules
        self._nodes = nodes
        self._capacity = Capacity()
        self._waiting: dict[str, Waiting] = {}
        self._running: dict[str, Running] = {}
        self._due: dict[str, float] = {}
        self._promise: tuple[Waiting, float] | None = None
        self._events = [(load.job.submitted_at, job_id, "came") for job_id, load in self._loads.items()]
        heapq.heapify(self._events)

    def begin_with(self, running: Iterable[Running]) -> None:
        """Let jobs run from the beginning that take as long as they may."""
        for job in running:
            self._running[job.job_id] = job
            self._loads[job.job_id] = Load(Waiting(job.job_id, job.spec, job.since, job.user), 0.0)
            self._ends(job.job_id, job.ends_by or 0.0)

    def run(self, until: float = math.inf) -> None:
        while self._events and self._events[0][0] <= until:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                _, job_id, kind = heapq.heappop(self._events)
                self._came(job_id) if kind == "came" else self._gone(job_id)
            self._pass()

    def _came(self, job_id: str) -> None:
        self._waiting[job_id] = self._loads[job_id].job
        self._ahead_of_the_promised(self._waiting[job_id])

    def _gone(self, job_id: str) -> None:
        job = self._running.get(job_id)
        if job is None or self._due[job_id] != self.now:
            return  # it was to end now, but has had to make room before
        del self._running[job_id]
        if job.stopping:
            self._came(job_id)
        else:
            self.ended[job_id] = self.now
            self.worked.append((job.since, self.now, job.gpus))

    def _pass(self) -> None:
        nodes = left_by(self._nodes, self._running.values())
        line = in_order(self._waiting.values())
        decisions = decide(line, nodes, list(self._running.values()), self._rules, self.now, self._capacity)
        check_pass(line, decisions, self._rules.policy)
        for decision in decisions:
            match decision:
                case PlaceNow(job_id, rooms):
                    self._start(self._waiting.pop(job_id), rooms)
                case Preempt(job_id, for_job):
                    self._stop(self._running[job_id], self._waiting[for_job])
        check_nodes(self._nodes, self._running.values())
        self._promise_the_first(decisions)

    def _start(self, item: Waiting, rooms: tuple) -> None:  # type: ignore[type-arg]
        assert [room.instance for room in rooms] == [member.name for member in item.gang]
        job = Running(item.job_id, item.spec, item.user, rooms, self.now, item.over_by(self.now))
        self._running[job.job_id] = job
        self.started.setdefault(job.job_id, self.now)
        self._ends(job.job_id, self.now + self._loads[job.job_id].takes_s)
        if self._promise is not None and self._promise[0] == item:
            if self.now > self._promise[1] + 1e-6:
                self.late.append(job.job_id)
            self._promise = None

    def _stop(self, job: Running, rival: Waiting) -> None:
        assert job.spec.preemptible and job.spec.priority > rival.spec.priority and not job.stopping
        self._running[job.job_id] = replace(job, stopping=True)
        self.preemptions[job.job_id] += 1
        self._ends(job.job_id, min(self._due[job.job_id], self.now + STOP_S))

    def _ends(self, job_id: str, at: float) -> None:
        self._due[job_id] = at
        heapq.heappush(self._events, (at, job_id, "gone"))

    # What is promised to the first of the line.

    def _promise_the_first(self, decisions: Sequence[object]) -> None:
        blocked = [one for one in decisions if isinstance(one, KeepWaiting) and one.kind not in ASIDE]
        first = self._waiting[blocked[0].job_id] if blocked else None
        if first is None or (self._promise is not None and self._promise[0] == first):
            return
        self._promise = None
        if all(job.ends_by is not None for job in self._running.values()):
            self._promise = first, self._fits_at(first)

    def _ahead_of_the_promised(self, item: Waiting) -> None:
        if self._promise is not None and item.turn < self._promise[0].turn:
            self._promise = None

    def _fits_at(self, item: Waiting) -> float:
        """When the job would start if nobody else came and all that run took as long as they may."""
        running = sorted(self._running.values(), key=lambda one: one.ends_by or 0.0)
        for number, job in enumerate(running, 1):
            nodes = left_by(self._nodes, running[number:])
            if not isinstance(place(item.gang, item.spec.placement, nodes), NoRoom):
                return max(self.now, job.ends_by or 0.0)
        return math.inf


def left_by(nodes: Iterable[Node], running: Iterable[Running]) -> list[Node]:
    """What is free of empty nodes beside jobs that run."""
    free = {node.id: Counter(node.total) for node in nodes}
    for job in running:
        for node_id, amounts in job.holding.items():
            free[node_id].subtract(amounts)
    return [with_free(node, dict(free[node.id])) for node in nodes]


def check_pass(line: Sequence[Waiting], decisions: Sequence[object], policy: Policy) -> None:
    """Every job has one answer, with a reason; nobody passes whom the policy protects."""
    answers = [one for one in decisions if isinstance(one, (PlaceNow, KeepWaiting))]
    assert [one.job_id for one in answers] == [item.job_id for item in line]
    first: Waiting | None = None
    for item, answer in zip(line, answers, strict=True):
        if isinstance(answer, KeepWaiting):
            assert answer.why
            if answer.kind not in ASIDE and first is None:
                first = item
        elif first is not None:
            match policy:
                case Policy.FIFO:
                    raise AssertionError(f"{item.job_id} overtook {first.job_id}")
                case Policy.TRAVERSE:
                    assert item.spec.priority == first.spec.priority, (item, first)
                case Policy.BACKFILL:
                    assert item.spec.timeouts.run_s is not None, (item, first)


def check_nodes(nodes: Iterable[Node], running: Iterable[Running]) -> None:
    """No node gives more than it has."""
    held: dict[str, Counter[str]] = {}
    for job in running:
        for member, room in zip(job.gang, job.rooms, strict=True):
            held.setdefault(room.node_id, Counter()).update(demand(member.resources))  # type: ignore[arg-type]
    for node in nodes:
        for name, amount in held.get(node.id, {}).items():
            assert amount <= node.total[name] + 1e-6, (node.name, name, amount)


# A week of a mixed load.

DAY_S, WEEK_S = 86_400.0, 7 * 86_400.0


def cluster(count: int = 16, gpus: float = 8) -> list[Node]:
    whole = {"CPU": 64.0, "GPU": gpus}
    node = Node("", "", "", whole, whole)
    return [
        with_free(replace(node, id=f"id-{n:02}", name=f"node-{n:02}", ip=f"10.0.0.{n}"), whole)
        for n in range(count)
    ]


def week(seed: int = 1, jobs: int = 1200, limited: float = 0.7) -> list[Load]:
    """Many small jobs, few large ones, more by day than by night, run times from minutes to days.

    ``limited`` is the share of jobs that say how long they may run.
    """
    chance = random.Random(seed)
    shapes = [(1, 0.5), (1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8)]
    loads = []
    for number in range(jobs):
        nodes, gpus = chance.choices(shapes, weights=[6, 30, 16, 14, 16, 10, 6, 2])[0]
        takes_s = min(2 * DAY_S, max(120.0, chance.lognormvariate(math.log(3200), 1.3)))
        limit = takes_s * chance.choice([1.0, 1.2, 2.0, 4.0])
        priority = chance.choices([2, 5, 8], weights=[1, 6, 3])[0]
        spec = JobSpec(
            command="train",
            nodes=nodes,
            priority=priority,
            preemptible=priority == 8 and chance.random() < 0.7,
            resources=Resources(cpu=min(8.0, max(1.0, gpus)), gpu=gpus),
            timeouts=Timeouts(run_s=limit if chance.random() < limited else None),
        )
        user = f"user-{min(7, int(chance.expovariate(0.5)))}"
        loads.append(Load(Waiting(f"job-{number:04}", spec, arrival(chance), user), takes_s))
    return loads


def arrival(chance: random.Random) -> float:
    """A moment of the week: by day four times as likely as by night, at the weekend half as likely."""
    while True:
        at = chance.uniform(0, WEEK_S)
        by_day = 1.0 if 9 <= at % DAY_S / 3600 < 19 else 0.25
        if chance.random() < by_day * (0.5 if at >= 5 * DAY_S else 1.0):
            return at
