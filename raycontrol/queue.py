"""Which jobs start now, and which have to make room. Pure: the controller asks, once per pass, about every waiting job.

Jobs are looked at in the order of their priority (0 first), those of one priority in the order of their submission. One
that the cluster as it is could not run even if it were empty, that its user's limit holds back, or that is held, stands
aside: it blocks nobody, and comes back to its place when that has changed. One that does not fit *yet* blocks; what
that means for those behind it is the site's ``Policy``.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter

from raycontrol.choosing import Choice, Choices
from raycontrol.placement import (
    NO_NODE,
    TENANCY,
    Assignment,
    Node,
    could_ever,
    explain,
    find,
    with_tenancy,
)
from raycontrol.promises import NEVER, Promises, Stay, stay_of
from raycontrol.queuejobs import (
    Decision,
    KeepWaiting,
    Kind,
    PlaceNow,
    Preempt,
    Rules,
    Running,
    Wait,
    Waiting,
    held_by,
    in_order,
    tenancy_of,
)
from raycontrol.room import Room, Usage
from raycontrol.spec import Placement
from raycontrol.status import Policy
from raycontrol.wording import size, some

__all__ = [
    "Capacity",
    "Decision",
    "KeepWaiting",
    "PlaceNow",
    "Policy",
    "Preempt",
    "Rules",
    "Running",
    "Wait",
    "Waiting",
    "decide",
    "in_order",
]

PROMISES = 16
"""So many blocked jobs are promised a start that nobody may delay; behind them nothing is filled in."""
CLOSED = f"; behind {PROMISES} jobs that do not fit yet nothing is filled in"
TRIES = 100
"""So many sets of victims are tried, the smallest first; then one is taken of which nobody can be spared."""
NAMED = 2
"""So many jobs are named where many are meant."""


@dataclass
class Capacity:
    """Which jobs the cluster could run if it were empty: kept between passes, it is worked out once for every shape.

    ``choices`` says which nodes each may use.
    """

    choices: Choices = field(default_factory=Choices)
    _nodes: tuple[Node, ...] = ()
    _known: dict[str, str | None] = field(default_factory=dict)
    _dispensable: dict[str, bool] = field(default_factory=dict)

    def look_at(self, nodes: Sequence[Node]) -> None:
        """Forget what is known if these are other nodes than before."""
        same = len(nodes) == len(self._nodes) and all(map(_is_as_before, nodes, self._nodes))
        if not same:
            self._nodes, self._known, self._dispensable = tuple(nodes), {}, {}
            self.choices = Choices(nodes)

    def sparing(self, item: Waiting) -> Waiting:
        """Return the job, avoiding nodes only where the cluster, empty, could run it without them."""
        if not item.avoided:
            return item
        if item.shape not in self._dispensable:
            chosen = self.choices.among(self._nodes, item.choice)
            others = [node for node in chosen if node.id not in item.avoided]
            self._dispensable[item.shape] = could_ever(item.gang, item.spec.placement, others)
        return item if self._dispensable[item.shape] else replace(item, avoided=frozenset())

    def lacks(self, item: Waiting) -> str | None:
        """Return why the cluster, empty, could not run the job; None when it could."""
        shape = item.shape
        if not self._nodes:
            return NO_NODE
        if shape not in self._known:
            gang, placement = item.gang, item.spec.placement
            chosen = self.choices.among(self._nodes, item.choice)
            able = could_ever(gang, placement, chosen)
            may_pack = not item.choice.names
            lacking = None if able else explain(gang, placement, chosen, never=True, may_pack=may_pack)
            self._known[shape] = lacking and self.choices.told(item.choice, lacking)
        return self._known[shape]


def decide(
    waiting: Iterable[Waiting],
    nodes: Sequence[Node],
    running: Sequence[Running] = (),
    rules: Rules | None = None,
    now: float = 0.0,
    capacity: Capacity | None = None,
    left: Sequence[Running] = (),
) -> list[Decision]:
    """Return one decision for every waiting job, in the order of the queue, and before it whom it preempts.

    ``nodes`` tell what is free now beside ``running``: the jobs that have nodes, those that are being stopped among
    them. Of those that have just ``left``, ``nodes`` may not tell yet that what they had is free. Keep ``Waiting``, ``Running`` and ``capacity`` between passes: they remember what they have worked out.
    """
    capacity = capacity or Capacity()
    nodes = with_tenancy(nodes, tenancy_of(running))
    capacity.look_at(nodes)
    one_pass = _Pass(nodes, running, left, rules or Rules(), now, capacity)
    return one_pass.walk(in_order(waiting))


def lacks(item: Waiting, nodes: Sequence[Node]) -> str | None:
    """Return why these nodes, empty, could not run a job that has not come yet; None when they could."""
    capacity = Capacity()
    capacity.look_at(with_tenancy(nodes, {}))
    return capacity.lacks(item)


def _is_as_before(one: Node, other: Node) -> bool:
    return (
        one.id == other.id
        and one.total == other.total
        and one.offline == other.offline
        and one.labels == other.labels
        and (one.groups, one.traits) == (other.groups, other.traits)
    )


PASSES: dict[Policy, Callable[[Waiting, Waiting], bool]] = {
    Policy.FIFO: lambda item, first: False,
    Policy.TRAVERSE: lambda item, first: item.spec.priority == first.spec.priority,
    Policy.BACKFILL: lambda item, first: item.spec.timeouts.run_s is not None,
}
"""Whether a job may pass the first one that is blocked, if it fits and, under backfill, delays nobody ahead."""


class _Pass:
    """One walk along the queue: what is left for those further behind."""

    def __init__(
        self,
        nodes: Sequence[Node],
        running: Sequence[Running],
        left: Sequence[Running],
        rules: Rules,
        now: float,
        capacity: Capacity,
    ) -> None:
        self._nodes = nodes
        self._running = running
        self._left = left
        self._rules = rules
        self._passes = PASSES[rules.policy]
        self._backfill = rules.policy is Policy.BACKFILL
        self._now = now
        self._capacity = capacity
        self._free = Room(nodes, Usage(rules, running), capacity.choices)
        self._leaving = {job.job_id: job for job in running if job.stopping}
        self._later = self._free.copy()
        """What will be free when those who are leaving have left, less what is claimed by those it is for."""
        for job in self._leaving.values():
            self._later.give_back(job)
        self._stays: list[Stay] = []  # of the jobs that were placed in this pass, or have a claim
        self._claimants: list[str] = []
        self._first: Waiting | None = None  # of those that are blocked
        self._before: dict[str, str] = {}
        self._stuck: list[Waiting] = []  # those of them that have no claim
        self._closed = False  # nobody behind is filled in any more
        self._ahead = 0
        # Since something last changed, by what makes jobs alike. Neither `run_s` nor a range of nodes is part of that: under
        # backfill they matter, so it is forgotten after each blocked job until nothing is filled in any more.
        self._told: dict[str, KeepWaiting] = {}
        self._promises: Promises | None = None
        # What was found for a shape holds for those behind too: what is free only becomes less.
        self._full_for: dict[str, str] = {}
        self._nobody_helps: set[str] = (
            set()
        )  # in queue order only: who comes later may have fewer stopped for it
        self._refused: dict[tuple[str, str], float] = {}
        self._holders: dict[tuple[Kind, Choice], str] = {}

    def walk(self, line: Sequence[Waiting]) -> list[Decision]:
        """Answer everybody in turn; who is like one that was answered since anything changed gets the same answer."""
        alike = attrgetter("alike_of_user" if self._rules.limited else "alike")
        decisions: list[Decision] = []
        for item in line:
            known = self._told.get(alike(item))
            if known is None:
                told = self._told
                decisions += self._decide(item)
                if isinstance(decisions[-1], KeepWaiting) and self._told is told:
                    told[alike(item)] = decisions[-1]
            elif known.aside:
                decisions.append(KeepWaiting(item.job_id, known.kind, known.why))
            else:
                decisions.append(KeepWaiting(item.job_id, known.kind, known.why, self._ahead))
                self._ahead += 1
        return decisions

    def _decide(self, item: Waiting) -> list[Decision]:
        item = self._capacity.sparing(item)
        aside = self._aside(item)
        if aside is not None:
            return [aside]
        may_start = self._first is None or (not self._closed and self._passes(item, self._first))
        rooms = self._rooms(item) if may_start else None
        if rooms is not None:
            return [self._place(*self._as_many_as_fit(item, rooms))]
        decisions = self._claim(item) if self._may_claim(item) else None
        if decisions is None:
            decisions = [self._blocked(item) if may_start else self._behind(item)]
            if not self._stuck or (self._backfill and not self._closed):
                self._told = {}
            self._stuck.append(item)
            self._closed = self._backfill and len(self._stuck) > PROMISES
        self._ahead += 1
        if self._first is None:
            self._first, self._told = item, {}
        return decisions

    def _aside(self, item: Waiting) -> KeepWaiting | None:
        if item.held is not None:
            return KeepWaiting(item.job_id, Wait.HELD, item.held)
        if item.awaits is not None:
            return KeepWaiting(item.job_id, Wait.AFTER, item.awaits)
        lacking = self._capacity.lacks(item)
        if lacking is None and self._rules.limited:
            lacking = self._free.usage.never_allows(item)
        if lacking is not None:
            return KeepWaiting(item.job_id, Wait.INFEASIBLE, lacking)
        limit = self._free.usage.limit_of_user(item) if self._rules.limited else None
        return None if limit is None else KeepWaiting(item.job_id, Wait.USER_LIMIT, limit)

    # Starting.

    def _rooms(self, item: Waiting) -> tuple[Assignment, ...] | None:
        if item.shape in self._full_for:
            return None
        if self._stuck and self._backfill:
            return self._rooms_beside_promises(item)
        return self._free_rooms(item)

    def _as_many_as_fit(
        self, item: Waiting, rooms: tuple[Assignment, ...]
    ) -> tuple[Waiting, tuple[Assignment, ...]]:
        """Return the job with the most of its range of nodes that fits now, and where; it fits on ``rooms`` with the least."""
        least, most = item.spec.span if isinstance(item.spec.nodes, str) else (0, 0)
        while least < most:
            middle = (least + most + 1) // 2
            larger = item.sized(middle)
            found = self._rooms(larger)
            if found is None:
                most = middle - 1
            else:
                item, rooms, least = larger, found, middle
        return item, rooms

    def _free_rooms(self, item: Waiting) -> tuple[Assignment, ...] | None:
        rooms = self._free.find(item)
        if rooms is None and self._free.usage.allows(item):
            self._full_for[item.shape] = self._told_missing(item)
        return rooms

    def _place(self, item: Waiting, rooms: tuple[Assignment, ...]) -> PlaceNow:
        self._free.take(item, rooms)
        self._later.take(item, rooms)
        self._note(item, rooms)
        return PlaceNow(item.job_id, rooms)

    def _note(self, item: Waiting, rooms: tuple[Assignment, ...]) -> None:
        stay = Stay(item, held_by(item.gang, rooms), self._now, item.over_by(self._now))
        self._stays.append(stay)
        self._told = {}
        if self._promises is not None:
            self._promises.add(stay)

    # Filling in.

    def _rooms_beside_promises(self, item: Waiting) -> tuple[Assignment, ...] | None:
        """Return nodes for a job to be filled in: nobody ahead starts later than is promised to him."""
        ends_by = item.over_by(self._now)
        alike = item.shape, item.user if self._rules.limited else ""
        if ends_by is None or self._refused.get(alike, NEVER) <= ends_by or self._free_rooms(item) is None:
            return None
        promises = self._promised()
        nodes = promises.spare(self._free.candidates(item), ends_by)
        rooms = find(item.gang, item.spec.placement, nodes) if promises.limits_spare(item, ends_by) else None
        if rooms is None:
            self._refused[alike] = ends_by
        return rooms

    def _promised(self) -> Promises:
        """Return the promises to all who are stuck so far."""
        if self._promises is None:
            staying = [stay_of(job, self._now) for job in self._running if job.job_id not in self._leaving]
            nodes = list(self._later.nodes.values())
            self._promises = Promises(
                nodes, [*staying, *self._stays], self._rules, self._now, self._capacity.choices
            )
        for item in self._stuck[self._promises.count :]:
            self._promises.make(item)
        return self._promises

    # Making room.

    def _may_claim(self, item: Waiting) -> bool:
        """Whether others may be stopped for the job: nobody is stuck ahead, or only equals that it may pass."""
        if not self._stuck:
            return True
        return self._rules.policy is Policy.TRAVERSE and item.spec.priority == self._stuck[0].spec.priority

    def _claim(self, item: Waiting) -> list[Decision] | None:
        """Keep what the job needs of what is free and of what will be; with others stopped for it, where that helps."""
        if item.shape in self._nobody_helps:
            return None
        victims: tuple[Running, ...] = ()
        rooms = self._later.find(item)
        if rooms is None:
            staying = [job for job in self._running if job.job_id not in self._leaving]
            victims = _victims(item, self._later, staying)
            if not victims:
                self._nobody_helps.add(item.shape)
                return None
            self._later = _without(self._later, victims)
            self._leaving.update((job.job_id, job) for job in victims)
            rooms = self._later.find(item)
            assert rooms is not None, "the victims were chosen so that it fits"
        waits = self._awaits(item, rooms, victims)
        self._later.take(item, rooms)
        self._free.keep_within(self._later, rooms)
        self._free.usage.add(item)
        self._note(item, rooms)
        self._claimants.append(item.job_id)
        return [*(Preempt(job.job_id, item.job_id) for job in victims), waits]

    def _awaits(self, item: Waiting, rooms: Sequence[Assignment], victims: Sequence[Running]) -> KeepWaiting:
        nodes = {room.node_id for room in rooms}
        stopped = {job.job_id for job in victims}
        limited = self._first is None and self._free.usage.limit_of_all(item) is not None
        leaving = [
            job.job_id
            for job in self._leaving.values()
            if limited or job.job_id in stopped or not nodes.isdisjoint(job.holding)
        ]
        if not leaving:
            return self._behind(item)
        why = f"waits until {some(leaving, NAMED)} {'has' if len(leaving) == 1 else 'have'} stopped"
        return KeepWaiting(item.job_id, Wait.MAKING_ROOM, why, self._ahead)

    # Words for those who wait.

    def _blocked(self, item: Waiting) -> KeepWaiting:
        limit = self._free.usage.limit_of_all(item)
        if limit is not None:
            return KeepWaiting(item.job_id, Wait.LIMIT, limit, self._ahead)
        if item.shape not in self._full_for:
            return self._behind(item)
        kept = f"; what {some(self._claimants, NAMED)} waits for is kept" if self._claimants else ""
        return KeepWaiting(item.job_id, Wait.NO_ROOM, self._full_for[item.shape] + kept, self._ahead)

    def _behind(self, item: Waiting) -> KeepWaiting:
        return KeepWaiting(item.job_id, Wait.BEHIND, self._why_behind(item), self._ahead)

    def _why_behind(self, item: Waiting) -> str:
        if not self._backfill:
            rule = " and does not fit yet"
        elif self._closed:
            rule = CLOSED
        elif item.spec.timeouts.run_s is None:
            rule = "; only a job with `timeouts.run_s` can be filled in"
        else:
            rule = "; who is ahead could start later if this one started now"
        if rule not in self._before:  # thousands wait behind one
            first = self._first.job_id if self._first is not None else "another job"
            self._before[rule] = f"{first} is before it{rule}"
        return self._before[rule]

    def _told_missing(self, item: Waiting) -> str:
        """Say what the job lacks, how many nodes have it, and who has the rest of what is scarcest for it."""
        kind, choices = item.kinds[0], self._capacity.choices
        nodes = [
            node
            for node in choices.among(self._free.nodes.values(), item.choice)
            if node.id not in item.avoided
        ]
        able = choices.among(self._free.able(kind), item.choice)
        fitting = sum(node.id not in item.avoided for node in able)
        missing = explain(item.gang, item.spec.placement, nodes, never=False, fitting=fitting)
        if (kind, item.choice) not in self._holders:
            self._holders[kind, item.choice] = self._holders_for(item)
        told = choices.told(item.choice, missing) + self._avoids(item) + self._holders[kind, item.choice]
        return told if item.spec.exclusive else told + self._alone

    def _avoids(self, item: Waiting) -> str:
        names = sorted(node.name for node in self._nodes if node.id in item.avoided)
        return f"; avoids {some(names, NAMED + 1)}, where an attempt was lost" if names else ""

    @cached_property
    def _alone(self) -> str:
        """Who lets nobody onto his nodes, however much is free there."""
        alone = sorted(job.job_id for job in self._running if job.spec.exclusive)
        return (
            f"; {some(alone, NAMED + 1)} {'has' if len(alone) == 1 else 'have'} nodes alone" if alone else ""
        )

    def _holders_for(self, item: Waiting) -> str:
        """Say who has most of what is scarcest for the job on the nodes that it may use."""
        nodes = self._capacity.choices.among(self._nodes, item.choice)

        def times_free(one: tuple[str, float]) -> float:
            """For how many instances all these nodes together have enough of a resource."""
            return sum(node.free.get(one[0], 0.0) for node in nodes) / one[1]

        return self._holders_of(min(item.kinds[0], key=times_free)[0], nodes)

    def _holders_of(self, name: str, nodes: Sequence[Node]) -> str:
        here = {node.id for node in nodes}

        def has(stay: Running | Stay) -> float:
            return sum(stay.holding[node_id].get(name, 0.0) for node_id in stay.holding.keys() & here)

        placed = {
            stay.job.job_id: has(stay) for stay in self._stays if stay.job.job_id not in self._claimants
        }
        ours = {job.job_id: has(job) for job in self._running}
        held = {**ours, **placed}
        used = sum(node.total.get(name, 0.0) - node.free.get(name, 0.0) for node in nodes)
        others = used - sum(ours.values())
        leaving = min(others, sum(has(job) for job in self._left))
        outside = others - leaving
        amount = size if name == "memory" else "{:g}".format
        largest = sorted((job_id for job_id in held if held[job_id]), key=lambda one: (-held[one], one))
        if name == TENANCY:
            return f"; other jobs are there: {some(largest, NAMED + 1)}" if largest else ""
        told = [f"{job_id} ({amount(held[job_id])})" for job_id in largest]
        negligible = 1e-3 * (1 + used)  # the bytes by which Ray's figures for memory differ
        if leaving > negligible:
            told.insert(0, f"jobs that have just left ({amount(leaving)})")
        if outside > negligible:
            told.insert(0, f"programs outside raycontrol ({amount(outside)})")
        verb = "memory is" if name == "memory" else f"{name}s are"
        return f"; {verb} held by {some(told, NAMED + 1)}" if told else ""


def _without(room: Room, jobs: Iterable[Running]) -> Room:
    """Return what is free when these jobs have gone."""
    left = room.copy()
    for job in jobs:
        left.give_back(job)
    return left


def _victims(item: Waiting, room: Room, running: Iterable[Running]) -> tuple[Running, ...]:
    """Return the fewest jobs that would have to go, the youngest where there is a choice; none where it would not help."""
    rivals = [job for job in running if job.spec.preemptible and job.spec.priority > item.spec.priority]
    rivals.sort(key=lambda job: (-job.since, job.job_id))

    def enough(victims: Iterable[Running]) -> bool:
        return _without(room, victims).find(item) is not None

    if not rivals or not enough(rivals):
        return ()
    sizes = range(_fewest(item, room, rivals), len(rivals) + 1)
    sets = itertools.chain.from_iterable(itertools.combinations(rivals, size) for size in sizes)
    for victims in itertools.islice(sets, TRIES):
        if enough(victims):
            return victims
    return _spared(rivals, enough)


def _fewest(item: Waiting, room: Room, rivals: Iterable[Running]) -> int:
    """Return how many have to go at least: nobody frees more nodes than he has."""
    if item.spec.placement is Placement.PACK:
        return 1
    alike = len(item.gang) if len(item.kinds) == 1 else 1
    needed = alike - len(room.able(item.kinds[0]))
    most = sorted((len({place.node_id for place in job.rooms}) for job in rivals), reverse=True)
    freed = itertools.accumulate(most)
    return next((number for number, nodes in enumerate(freed, 1) if nodes >= needed), 1)


def _spared(rivals: Sequence[Running], enough: Callable[[Iterable[Running]], bool]) -> tuple[Running, ...]:
    """Return the youngest that are enough, less all whom it does without, the oldest first."""
    number = bisect_left(range(len(rivals)), True, key=lambda count: enough(rivals[:count]))
    chosen = list(rivals[:number])
    for job in reversed(chosen.copy()):
        others = [other for other in chosen if other is not job]
        if enough(others):
            chosen = others
    return tuple(chosen)
