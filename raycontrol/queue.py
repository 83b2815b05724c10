"""In which order jobs start. Pure: the controller asks, once per pass, what to do with every waiting job.

First in, first out: a job that does not fit holds up those behind it, so that none waits for ever. Only a job that
the cluster as it is could not run even if it were empty stands aside, and comes back to its place when nodes join.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raycontrol.placement import Assignment, Node, NoRoom, place, reserve
from raycontrol.spec import JobSpec, members


@dataclass(frozen=True)
class Waiting:
    """A job in the queue."""

    job_id: str
    spec: JobSpec
    submitted_at: float


@dataclass(frozen=True)
class PlaceNow:
    job_id: str
    assignments: tuple[Assignment, ...]


@dataclass(frozen=True)
class KeepWaiting:
    job_id: str
    why: str


def decide(waiting: Sequence[Waiting], nodes: Sequence[Node]) -> list[PlaceNow | KeepWaiting]:
    """Return one decision for every waiting job, in the order of the queue."""
    decisions: list[PlaceNow | KeepWaiting] = []
    blocked_by: str | None = None
    ahead = 0
    for item in in_order(waiting):
        if blocked_by is not None:
            decisions.append(
                KeepWaiting(
                    item.job_id, f"{ahead} ahead in the queue; the first, {blocked_by}, does not fit yet"
                )
            )
            ahead += 1
            continue
        gang = members(item.spec)
        found = place(gang, item.spec.placement, nodes)
        if isinstance(found, NoRoom):
            decisions.append(KeepWaiting(item.job_id, found.why))
            if not found.never:
                blocked_by, ahead = item.job_id, 1
            continue
        nodes = reserve(nodes, gang, found)
        decisions.append(PlaceNow(item.job_id, found))
    return decisions


def in_order(waiting: Iterable[Waiting]) -> list[Waiting]:
    """Return the jobs in the order in which they are decided upon."""
    return sorted(waiting, key=lambda job: (job.submitted_at, job.job_id))
