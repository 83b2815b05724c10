"""Where a command across nodes is to be run: a selection becomes places, or an error in words. Nothing is started for either."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from raycontrol import keeping, wording
from raycontrol.errors import JobNotFound, UsageError
from raycontrol.execution import Place, Target
from raycontrol.job import Instance, Job
from raycontrol.placement import Node
from raycontrol.status import InstanceState
from raycontrol.survey import SeveralNodes, named

ALIVE = (InstanceState.PREPARED, InstanceState.RUNNING, InstanceState.STOPPING)


def places(cluster: str, target: Target, rooms: Sequence[Node], jobs: Mapping[str, Job]) -> tuple[Place, ...]:
    """Return the places of a target: nodes in the order of their names, instances in that of their indices; ``jobs`` are those that have not ended.

    Of nodes with the same name each is named with the beginning of its id, too, and may be chosen so (``host-a/1f2e3d4c``).

    Raises UsageError for a name that fits nothing, and for a job none of whose instances lives.
    """
    if target.job is not None:
        return _of_job(cluster, target, jobs)
    absent = _absent(target, rooms) if target.absent_too else []
    chosen = _of_nodes(target, rooms, absent)
    often = Counter(room.name for room in rooms)
    found = [
        Place(room.name if often[room.name] == 1 else f"{room.name}/{room.id[:8]}", room.id, cluster)
        for room in chosen
    ]
    found += [Place(name, "", cluster) for name in absent]
    return tuple(sorted(found, key=lambda place: place.name))


def _absent(target: Target, rooms: Sequence[Node]) -> list[str]:
    """Return the names that fit no node."""
    absent = []
    for name in dict.fromkeys(target.nodes):
        try:
            named(rooms, [name.rpartition("/")[2]])
        except SeveralNodes:
            raise
        except UsageError:
            absent.append(name)
    return absent


def _of_nodes(target: Target, rooms: Sequence[Node], absent: Sequence[str]) -> Sequence[Node]:
    if target.group is not None:
        members = [room for room in rooms if target.group in room.groups]
        if not members:
            raise UsageError(f"no node of the group {target.group} is in the cluster now")
        return members
    wanted = [name.rpartition("/")[2] for name in target.nodes if name not in absent]
    chosen = named(rooms, None if target.all else wanted)
    if not chosen and not absent:
        raise UsageError("the cluster has no nodes")
    return chosen


def _of_job(cluster: str, target: Target, jobs: Mapping[str, Job]) -> tuple[Place, ...]:
    assert target.job is not None
    if target.job not in jobs:
        raise JobNotFound(target.job)
    job = jobs[target.job]
    if job.is_array:
        raise UsageError(f"job {job.id} is an array: name a member of it, such as {job.id}~0")
    wanted = sorted(_wanted(job, target), key=lambda item: item.index)
    living = [item for item in wanted if _can_be_entered(job, item)]
    if not living:
        raise UsageError(f"job {job.id} is {job.state}: none of its instances runs now")
    return tuple(Place(item.name, item.node_id, cluster, job.attempt_id, item.name) for item in living)


def _can_be_entered(job: Job, item: Instance) -> bool:
    """Whether it runs, or is kept for a look inside."""
    if job.kept_until is not None:
        return keeping.can_be_entered(item)
    return item.state in ALIVE and not item.closed


def _wanted(job: Job, target: Target) -> Sequence[Instance]:
    """Return the instances that were named; raises UsageError for a name that none has."""
    if target.instances:
        _refuse_unknown("instance", target.instances, [item.name for item in job.instances], job)
        return [item for item in job.instances if item.name in target.instances]
    if target.group is not None:
        _refuse_unknown("group", [target.group], [item.group for item in job.instances], job)
        return [item for item in job.instances if item.group == target.group]
    return job.instances


def _refuse_unknown(what: str, asked: Sequence[str], known: Sequence[str], job: Job) -> None:
    unknown = [name for name in asked if name not in known]
    if unknown:
        there_are = wording.some(list(dict.fromkeys(known))) or "none yet"
        raise UsageError(f"job {job.id} has no {what} {unknown[0]!r}; there are {there_are}")
