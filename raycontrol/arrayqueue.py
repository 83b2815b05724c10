"""What an array has in the queue: its members that have not begun stand there before they are jobs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from raycontrol import arrays
from raycontrol.arrayspec import member_id
from raycontrol.job import Job
from raycontrol.queuejobs import Waiting
from raycontrol.status import JobState
from raycontrol.wording import counted


def entries(
    array: Job, members: Iterable[Job], back: Sequence[Waiting], known: Mapping[str, Waiting]
) -> list[Waiting]:
    """Return what stands in the queue for an array, with its limit ``parallel`` kept.

    ``members`` are those that have begun and not ended, ``back`` those of them that wait for a further attempt: they
    come first. ``known`` are entries of the last pass by their ids, which remember what was worked out of them.
    """
    assert array.spec.array is not None
    if array.held is not None:  # what comes back to the queue is held with the others
        back = [one if one.held is not None else replace(one, held=array.held) for one in back]
    left = arrays.not_begun(array) if array.state in arrays.OPEN else ()
    held_back = sum(one.held is not None for one in back)
    with_nodes = sum(member.state is not JobState.QUEUED for member in members)
    most = array.spec.array.parallel
    free = len(back) + len(left) if most is None else max(0, most - with_nodes)
    may_return = [one for one in back if one.held is None]
    full = f"{counted(with_nodes, 'member')} of its array run already, and `parallel` is {most}"
    found = [one for one in back if one.held is not None]
    found += may_return[:free]
    found += [replace(one, awaits=full) for one in may_return[free:]]
    begins = left[: free - min(free, len(back) - held_back)] if arrays.may_begin(array) else ()
    fresh = [_fresh(array, member_id(array.id, index), known) for index in begins]
    if left and not fresh:
        found.append(Waiting(array.id, array.spec, array.submitted_at, array.user, array.held, awaits=full))
    return found + fresh


def _fresh(array: Job, job_id: str, known: Mapping[str, Waiting]) -> Waiting:
    entry = known.get(job_id)
    if entry is not None and entry.spec is array.spec:
        return entry
    return Waiting(job_id, array.spec, array.submitted_at, array.user)
