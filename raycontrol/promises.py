"""By when jobs that do not fit yet can start, if those that have nodes take as long as they may.

Every node has its own calendar: what is on it and until when. A promise is a moment and nodes; a job that is filled in
keeps it if, at that moment, it is over or leaves these nodes what was promised on them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from raycontrol.choosing import Choices
from raycontrol.placement import Assignment, Node, find, fits, with_free
from raycontrol.queuejobs import Holding, Job, Kind, Rules, Running, Waiting, held_by
from raycontrol.room import Usage
from raycontrol.spec import Placement

NEVER = float("inf")


class Outlook(IntEnum):
    """What is taken to become free, the surest first. A promise is made from the first that is enough.

    ``LIMITS``: jobs with a limit end by it. ``ANY_END``: those without one end too, at any moment: what they hold is
    kept for who is promised it as if they had ended. ``OUTSIDE``: so do programs that are no jobs of ours.
    """

    LIMITS = 0
    ANY_END = 1
    OUTSIDE = 2


@dataclass(frozen=True)
class Stay:
    """A job on its nodes from ``begins`` to ``ends_by`` at the latest; None: nobody knows."""

    job: Job
    holding: Holding
    begins: float
    ends_by: float | None

    def over(self, outlook: Outlook) -> float:
        if self.ends_by is not None:
            return max(self.begins, self.ends_by)
        return NEVER if outlook is Outlook.LIMITS else self.begins


_Entry: TypeAlias = "tuple[tuple[float, ...], Mapping[str, float]]"
"""When a stay is over, by outlook, and what it holds on one node until then."""


@dataclass(frozen=True)
class Promise:
    """The stay that a job is promised: it begins no later."""

    stay: Stay
    outlook: Outlook

    @property
    def start(self) -> float:
        return self.stay.begins


class Promises:
    """The promises of one moment; those made first are kept first.

    ``nodes`` tell what is free at that moment beside the ``stays``; what is still missing then, others hold.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        stays: Iterable[Stay],
        rules: Rules,
        now: float,
        choices: Choices | None = None,
    ) -> None:
        self._nodes = {node.id: node for node in nodes}
        self._choices = choices or Choices(nodes)
        self._rules = rules
        self._now = now
        self._made: list[Promise] = []
        self._stays: list[Stay] = []
        self._held: dict[str, list[_Entry]] = {}  # by node: what is not free there
        self._added: dict[str, list[_Entry]] = {}  # what was promised and filled in since
        self._calendars: dict[tuple[str, Outlook], list[tuple[float, dict[str, float]]]] = {}
        self._openings: dict[tuple[Kind, Outlook], dict[str, float]] = {}
        for stay in stays:
            self._enter(stay, self._held)

    def make(self, item: Waiting) -> Promise:
        """Promise the job the soonest start that is sure; where none is, everything is kept for it."""
        for outlook in Outlook:
            start = max(self._opening(item, outlook), self._limits_allow(item, outlook))
            found = self._first_fit(item, outlook, start) if start < NEVER else None
            if found is not None:
                moment, rooms = found
                stay = Stay(item, held_by(item.gang, rooms), moment, item.over_by(moment))
                self._made.append(Promise(stay, outlook))
                self.add(stay)
                return self._made[-1]
        everything = {node_id: node.total for node_id, node in self._nodes.items()}
        self._made.append(Promise(Stay(item, everything, self._now, None), Outlook.OUTSIDE))
        return self._made[-1]

    def add(self, stay: Stay) -> None:
        """Enter one more stay in the calendars of its nodes."""
        self._enter(stay, self._added)
        touched = stay.holding.keys() & self._nodes.keys()
        for outlook in Outlook:
            for node_id in touched:
                self._calendars.pop((node_id, outlook), None)
        for (kind, outlook), openings in self._openings.items():
            openings.update((node_id, self._opens(node_id, dict(kind), outlook)) for node_id in touched)

    @property
    def count(self) -> int:
        return len(self._made)

    def spare(self, nodes: Iterable[Node], ends_by: float) -> list[Node]:
        """Return the nodes with no more free than a job may take that starts now and is over at ``ends_by``."""
        free = {node.id: node for node in nodes}
        for promise in self._made:
            if promise.start < ends_by:
                for node_id in promise.stay.holding.keys() & free.keys():
                    least = _smaller(free[node_id].free, self._left_by(promise, node_id))
                    free[node_id] = with_free(free[node_id], least)
        return list(free.values())

    def limits_spare(self, item: Waiting, ends_by: float) -> bool:
        """Whether, by the site's limits, the job could run until ``ends_by`` beside those who are promised a start."""
        return not self._rules.limited or all(
            self._usage_beside(promise, item).allows(promise.stay.job)
            for promise in self._made
            if promise.start < ends_by
        )

    # The calendars.

    def _enter(self, stay: Stay, entries: dict[str, list[_Entry]]) -> None:
        self._stays.append(stay)
        overs = tuple(stay.over(outlook) for outlook in Outlook)
        for node_id, amounts in stay.holding.items():
            entries.setdefault(node_id, []).append((overs, amounts))

    def _calendar(self, node_id: str, outlook: Outlook) -> list[tuple[float, dict[str, float]]]:
        """Return what is free on a node from which moment on, beside all that is promised on it: it only grows.

        What is promised counts from now on, so that nobody is promised what he would have to give back in time.
        """
        known = self._calendars.get((node_id, outlook))
        if known is not None:
            return known
        added = self._added.get(node_id, [])
        entries = [*self._held.get(node_id, []), *added]
        empty = outlook is Outlook.OUTSIDE
        free = dict(self._nodes[node_id].total if empty else self._nodes[node_id].free)
        for _, amounts in entries if empty else added:
            _subtract(free, amounts)
        calendar = [(self._now, free)]
        entries.sort(key=lambda entry: entry[0][outlook])
        for overs, amounts in entries:
            over = overs[outlook]
            if over == NEVER:
                break
            free = dict(free)
            for name, amount in amounts.items():
                free[name] = free.get(name, 0.0) + amount
            if over > calendar[-1][0]:
                calendar.append((over, free))
            else:
                calendar[-1] = calendar[-1][0], free
        self._calendars[node_id, outlook] = calendar
        return calendar

    def _free_at(self, node_id: str, moment: float, outlook: Outlook) -> dict[str, float]:
        free: dict[str, float] = {}
        for since, amounts in self._calendar(node_id, outlook):
            if since > moment:
                break
            free = amounts
        return free

    def _opens(self, node_id: str, wanted: Mapping[str, float], outlook: Outlook) -> float:
        """Return from which moment on one instance fits on a node."""
        for since, free in self._calendar(node_id, outlook):
            if fits(wanted, free):
                return since
        return NEVER

    # Promises.

    def _openings_for(self, kind: Kind, outlook: Outlook) -> dict[str, float]:
        """Return from which moment on one instance of a kind fits on each node."""
        if (kind, outlook) not in self._openings:
            wanted = dict(kind)
            openings = {node_id: self._opens(node_id, wanted, outlook) for node_id in self._nodes}
            self._openings[kind, outlook] = openings
        return self._openings[kind, outlook]

    def _opening(self, item: Waiting, outlook: Outlook) -> float:
        """Return before which moment the job fits nowhere: when there are nodes for its most demanding instance, be they
        those that it may use or others."""
        openings = self._openings_for(item.kinds[0], outlook)
        apart = item.spec.placement is Placement.STRICT and len(item.kinds) == 1
        needed = len(item.gang) if apart else 1
        soonest = heapq.nsmallest(needed, openings.values())
        return soonest[-1] if len(soonest) == needed else NEVER

    def _first_fit(
        self, item: Waiting, outlook: Outlook, earliest: float
    ) -> tuple[float, tuple[Assignment, ...]] | None:
        """Return the first moment from ``earliest`` on at which the job fits, and where: that one, for a gang of
        equals that may use any node."""
        rooms = self._rooms_at(item, outlook, earliest)
        if rooms is not None:
            return earliest, rooms
        moments = sorted(
            {
                since
                for node_id in self._nodes
                for since, _ in self._calendar(node_id, outlook)
                if since > earliest
            }
        )
        low, high, found = 0, len(moments), None
        while low < high:  # what is free only grows
            middle = (low + high) // 2
            rooms = self._rooms_at(item, outlook, moments[middle])
            if rooms is None:
                low = middle + 1
            else:
                high, found = middle, (moments[middle], rooms)
        return found

    def _rooms_at(self, item: Waiting, outlook: Outlook, moment: float) -> tuple[Assignment, ...] | None:
        """Return nodes for the job at a moment, first those that are surely free for it soonest.

        Whoever outlasts the promise keeps off those; others may become free before, and they be all that is missing.
        """
        openings = self._openings_for(item.kinds[0], outlook)
        soonest = self._openings_for(item.kinds[0], Outlook.LIMITS)
        equals = len(item.kinds) == 1
        able = [node_id for node_id, opens in openings.items() if opens <= moment] if equals else self._nodes
        chosen = self._choices.among((self._nodes[node_id] for node_id in able), item.choice)
        nodes = [
            with_free(node, self._free_at(node.id, moment, outlook))
            for node in chosen
            if node.id not in item.avoided
        ]
        found = find(item.gang, item.spec.placement, nodes, soonest)
        return find(item.gang, item.spec.placement, nodes) if found is None and not equals else found

    def _left_by(self, promise: Promise, node_id: str) -> dict[str, float]:
        """Return what the job will leave of one of its nodes when it starts."""
        left = dict(self._free_at(node_id, promise.start, promise.outlook))
        if promise.stay.over(promise.outlook) <= promise.start:  # without a limit: not in the calendar
            _subtract(left, promise.stay.holding[node_id])
        return left

    # Limits.

    def _usage_beside(self, promise: Promise, item: Waiting) -> Usage:
        """Return who has how much when the promised job starts, without it, if another one is filled in."""
        others = [stay for stay in self._stays if stay is not promise.stay]
        usage = Usage(
            self._rules, [stay.job for stay in others if stay.over(promise.outlook) > promise.start]
        )
        usage.add(item)
        return usage

    def _limits_allow(self, item: Waiting, outlook: Outlook) -> float:
        """Return from which moment on no limit is in the job's way."""
        if not self._rules.limited:
            return self._now
        usage = Usage(self._rules, [stay.job for stay in self._stays])
        if usage.allows(item):
            return self._now
        for over, stay in sorted(
            ((stay.over(outlook), stay) for stay in self._stays), key=lambda end: end[0]
        ):
            if over == NEVER:
                break
            usage.add(stay.job, -1)
            if usage.allows(item):
                return max(self._now, over)
        return NEVER


def stay_of(job: Running, now: float) -> Stay:
    """A job that is past its limit may end at any moment, as one without a limit does, only surely.

    Of one that has nodes and does not run yet, the limit has not begun.
    """
    return Stay(job, job.holding, now, job.over_by(now) if job.ends_by is None else max(now, job.ends_by))


def _smaller(one: Mapping[str, float], other: Mapping[str, float]) -> Mapping[str, float]:
    return {name: min(amount, other.get(name, 0.0)) for name, amount in one.items()}


def _subtract(free: dict[str, float], amounts: Mapping[str, float]) -> None:
    for name, amount in amounts.items():
        free[name] = free.get(name, 0.0) - amount
