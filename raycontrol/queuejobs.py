"""What the queue decides about, and what it decides: jobs that wait, jobs that have nodes, the site's rules."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from raycontrol.arrayspec import array_of, index_of
from raycontrol.choosing import ANY, Choice, choice_of
from raycontrol.placement import TENANCY, Assignment, hardest, needs
from raycontrol.spec import JobSpec, Member, members
from raycontrol.status import Policy, Word


class Wait(Word):
    """Why a job waits. By the first four it stands aside: nobody waits behind it."""

    HELD = "HELD"
    AFTER = "AFTER"
    INFEASIBLE = "INFEASIBLE"
    USER_LIMIT = "USER_LIMIT"
    LIMIT = "LIMIT"
    NO_ROOM = "NO_ROOM"
    BEHIND = "BEHIND"
    MAKING_ROOM = "MAKING_ROOM"


ASIDE = frozenset({Wait.HELD, Wait.AFTER, Wait.INFEASIBLE, Wait.USER_LIMIT})


@dataclass(frozen=True)
class Rules:
    """The site's: the policy, how much may run at a time, of one user and of all together (None: any number), and by which
    labels nodes are neighbours, the widest first."""

    policy: Policy = Policy.TRAVERSE
    user_jobs: int | None = None
    user_gpus: float | None = None
    all_jobs: int | None = None
    all_gpus: float | None = None
    topology: tuple[str, ...] = ()

    @cached_property
    def limited(self) -> bool:
        return (self.user_jobs, self.user_gpus, self.all_jobs, self.all_gpus) != (None,) * 4


Kind: TypeAlias = "tuple[tuple[str, float], ...]"
"""What one instance takes, by Ray's resource names, and its tenancy."""


def _kind(member: Member) -> Kind:
    return tuple(needs(member).items())


@dataclass(frozen=True)
class QueueJob:
    """What the queue asks of any job. It is worked out once: keep the object while the job waits or runs."""

    job_id: str
    spec: JobSpec

    @cached_property
    def gang(self) -> tuple[Member, ...]:
        """Its instances; of a range of nodes those of the least."""
        return members(self.spec.smallest)

    @cached_property
    def choice(self) -> Choice:
        return choice_of(self.spec)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """What its instances take, each kind once, the most demanding first."""
        first = _kind(hardest(self.gang))
        return first, *sorted({_kind(member) for member in self.gang} - {first})

    @cached_property
    def amounts(self) -> dict[str, float]:
        """What all its instances take together, by Ray's resource names."""
        held: Counter[str] = Counter()
        for member in self.gang:
            held.update(dict(_kind(member)))
        return dict(held)

    @cached_property
    def gpus(self) -> float:
        return self.amounts.get("GPU", 0.0)

    @cached_property
    def shape(self) -> str:
        """What decides whether the job fits: where one of a shape does not, no other of it does.

        A text, because those remember their hash.
        """
        kinds = itertools.groupby(_kind(member) for member in self.gang)
        chosen = "" if self.choice == ANY else f" {self.choice}"
        return f"{self.spec.placement} {[(kind, len(list(equal))) for kind, equal in kinds]}{chosen}"

    def over_by(self, now: float) -> float | None:
        """Return when the job is over at the latest if it starts now; None: nobody knows."""
        run_s = self.spec.timeouts.run_s
        return None if run_s is None else now + run_s


@dataclass(frozen=True)
class Waiting(QueueJob):
    """A job in the queue; ``held`` says who wants it to wait, ``awaits`` for which other jobs it does. It is not placed on the nodes with the ids ``avoided``,
    if the cluster, empty, could run it without them.
    """

    submitted_at: float
    user: str = ""
    held: str | None = None
    avoided: frozenset[str] = frozenset()
    awaits: str | None = None

    @cached_property
    def shape(self) -> str:
        """As of any job, and without the nodes that it avoids."""
        return f"{super().shape} but {sorted(self.avoided)}" if self.avoided else super().shape

    @cached_property
    def alike(self) -> str:
        """What an answer to the job depends on, in one moment of a pass; a text, as ``shape`` is."""
        return f"{self.spec.priority} {self.shape} {self.held!r} {self.awaits!r}"

    @cached_property
    def alike_of_user(self) -> str:
        """As ``alike``, where users have limits."""
        return f"{self.alike} {self.user!r}"

    @cached_property
    def turn(self) -> tuple[int, float, str, int]:
        """What the order of the queue goes by; members of one array go by their indices."""
        array_id = array_of(self.job_id)
        if array_id is None:
            return self.spec.priority, self.submitted_at, self.job_id, 0
        return self.spec.priority, self.submitted_at, array_id, index_of(self.job_id)

    def work_out(self) -> None:
        """Work out all that a pass asks of the job; raises whatever comes of a spec that cannot be understood."""
        _ = self.turn, self.alike_of_user, self.kinds, self.gpus, self.over_by(0.0)

    def sized(self, nodes: int) -> Waiting:
        """Return the job with a number of its range of nodes."""
        return replace(self, spec=self.spec.sized(nodes))


@dataclass(frozen=True)
class Running(QueueJob):
    """A job that has nodes, since ``since`` (epoch seconds). ``ends_by`` is when its limit ends it; None: it has
    none, or does not run yet.

    ``stopping``: it is being stopped already, and soon gone.
    """

    user: str
    rooms: tuple[Assignment, ...]
    since: float
    ends_by: float | None = None
    stopping: bool = False

    @cached_property
    def holding(self) -> Holding:
        return held_by(self.gang, self.rooms)


Job: TypeAlias = "Waiting | Running"

Holding: TypeAlias = Mapping[str, Mapping[str, float]]
"""What a job holds on each of its nodes, by their ids."""


def held_by(gang: Sequence[Member], rooms: Sequence[Assignment]) -> Holding:
    held: dict[str, dict[str, float]] = {}
    for member, room in zip(gang, rooms, strict=True):
        on_node = held.setdefault(room.node_id, {})
        for name, amount in _kind(member):
            on_node[name] = on_node.get(name, 0.0) + amount
    return held


@dataclass(frozen=True, slots=True)
class PlaceNow:
    job_id: str
    assignments: tuple[Assignment, ...]


class KeepWaiting(NamedTuple):
    """``why`` is for a person; ``ahead`` is how many jobs are to start before this one.

    A tuple, because there are ten thousand in a pass.
    """

    job_id: str
    kind: Wait
    why: str
    ahead: int = 0

    @property
    def aside(self) -> bool:
        """Whether the job stands aside: it blocks nobody, and has no place in the line."""
        return self.kind in ASIDE

    @property
    def text(self) -> str:
        """All of it in words."""
        return f"{self.why}; {self.ahead} ahead in the queue" if self.ahead else self.why


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop a running job, so that ``for_job`` can have its nodes."""

    job_id: str
    for_job: str


def tenancy_of(jobs: Iterable[Running]) -> dict[str, float]:
    """Return how much of each node's tenancy these jobs have, by its id."""
    held: dict[str, float] = {}
    for job in jobs:
        for node_id, amounts in job.holding.items():
            held[node_id] = held.get(node_id, 0.0) + amounts[TENANCY]
    return held


Decision: TypeAlias = PlaceNow | KeepWaiting | Preempt


def in_order(waiting: Iterable[Waiting]) -> list[Waiting]:
    """Return the jobs in the order in which they are decided upon."""
    return sorted(waiting, key=attrgetter("turn"))
