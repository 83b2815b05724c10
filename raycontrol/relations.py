"""What the news of one job means for others: they are advanced with it, and stored in the same commit. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from raycontrol import arrays
from raycontrol.arrayspec import member_id
from raycontrol.dependencies import open_conditions
from raycontrol.events import (
    AwaitedEnded,
    Held,
    JobEvent,
    LetGo,
    MemberChosen,
    MemberEnded,
    NodesChosen,
    PriorityChanged,
    StopRequested,
    Suspended,
)
from raycontrol.job import Job
from raycontrol.status import JobState


class Follow(NamedTuple):
    """What happens to another job because of it; ``newborn`` is that job where it begins only now."""

    job_id: str
    event: JobEvent
    newborn: Job | None = None


class Relations:
    """Who waits for whom, and who is a member of which array, of the jobs that have not ended."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[str]] = {}
        self._members: dict[str, dict[str, None]] = {}

    def add(self, job: Job) -> None:
        for _, other in open_conditions(job):
            self._waiting.setdefault(other, set()).add(job.id)
        if job.array_id is not None:
            self._members.setdefault(job.array_id, {})[job.id] = None

    def remove(self, job: Job) -> None:
        for _, other in open_conditions(job):
            self._waiting.get(other, set()).discard(job.id)
        self._waiting.pop(job.id, None)
        self._members.pop(job.id, None)
        self._members.get(job.array_id or "", {}).pop(job.id, None)

    def members_of(self, array_id: str) -> tuple[str, ...]:
        """Return the ids of the members that have begun and not ended, the first first."""
        return tuple(self._members.get(array_id, ()))

    def waiting_for(self, job_id: str) -> list[str]:
        """Return the ids of those that wait for this job, or did."""
        return sorted(self._waiting.get(job_id, ()))

    def following(self, before: Job, after: Job, event: JobEvent) -> Iterator[Follow]:
        """Yield what follows for others when an event has made of a job another."""
        if after.state.terminal and not before.state.terminal:
            for job_id in self.waiting_for(after.id):
                yield Follow(job_id, AwaitedEnded(event.at, after.id, after.state))
            if after.array_id is not None and after.index is not None:
                told = MemberEnded(event.at, after.index, after.state, after.verdict)
                yield Follow(after.array_id, told)
        elif after.kept_until is not None and before.kept_until is None:  # how it has ended is known
            for job_id in self.waiting_for(after.id):
                yield Follow(job_id, AwaitedEnded(event.at, after.id, JobState.FAILED))
        if after.is_array and (after != before or isinstance(event, Suspended)):
            yield from self._of_array(before, after, event)

    def _of_array(self, before: Job, after: Job, event: JobEvent) -> Iterator[Follow]:
        match event:
            case MemberChosen(at, index, rooms, fence_s):
                newborn = arrays.newborn(after, index, at)
                yield Follow(member_id(after.id, index), NodesChosen(at, rooms, fence_s), newborn)
            case Held() | Suspended() | LetGo() | PriorityChanged():
                for job_id in self.members_of(after.id):
                    yield Follow(job_id, event)
        if after.state is JobState.STOPPING and (before.state, before.forced) != (after.state, after.forced):
            assert after.verdict is not None
            stop = StopRequested(event.at, f"its array ends: {after.verdict.summary}", after.forced)
            for job_id in self.members_of(after.id):
                yield Follow(job_id, stop)
