"""What becomes of an array: it has no instances, its state follows from its members'. Pure.

Its members become jobs when they start, in the order of their indices, in the same commit in which the array counts
them; and when one ends, the array is told in the commit that ends it. So what has not begun is known by one number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from raycontrol import dependencies, verdicts
from raycontrol.arrayspec import indices_of, member_id
from raycontrol.demands import deadline
from raycontrol.events import (
    AwaitedEnded,
    Held,
    LetGo,
    MemberChosen,
    MemberEnded,
    PlacementDeferred,
    PriorityChanged,
    StopRequested,
    Suspended,
    TimePassed,
)
from raycontrol.job import Job, Progress
from raycontrol.status import JobState, Reason, Verdict
from raycontrol.stopping import Change
from raycontrol.wording import counted

OPEN = (JobState.QUEUED, JobState.RUNNING)
"""In these states members may begin."""


def not_begun(array: Job) -> tuple[int, ...]:
    """Return the indices of the members that have not begun, in the order in which they will."""
    assert array.spec.array is not None
    return indices_of(array.spec.array.indices)[array.progress.begun :]


def may_begin(array: Job) -> bool:
    """Whether the queue is to look for room for members."""
    return array.state in OPEN and array.held is None and not dependencies.open_conditions(array)


def newborn(array: Job, index: int, at: float) -> Job:
    """Return a member that begins. It has its array's place in the queue, also for further attempts."""
    return Job(
        id=member_id(array.id, index),
        cluster=array.cluster,
        spec=array.spec,
        user=array.user,
        submitted_at=array.submitted_at,
        package=array.package,
        since=at,
        queued_at=at,
        index=index,
    )


def final(progress: Progress) -> JobState:
    """Return how an array has ended all of whose members have."""
    if progress.failed:
        return JobState.FAILED
    return JobState.STOPPED if progress.stopped else JobState.SUCCEEDED


def settle(array: Job, at: float) -> Change:
    """Return what follows without a further event."""
    failing = array.spec.array is not None and array.spec.array.fail_fast and array.progress.failed > 0
    match array.state:
        case JobState.QUEUED if (verdict := dependencies.failure(array)) is not None:
            return _ended(array, JobState.FAILED, verdict, at)
        case JobState.RUNNING if failing:
            assert array.verdict is not None
            stopping = replace(array, after=JobState.FAILED, pending=None)
            why = f"fail_fast: the others are stopped; {counted(len(not_begun(array)), 'member')} will not begin"
            return stopping.entered(JobState.STOPPING, array.verdict.reason, at), why
        case JobState.RUNNING if not not_begun(array) and not array.progress.living:
            return _over(array, at)
        case JobState.STOPPING if not array.progress.living:
            assert array.after is not None
            assert array.verdict is not None
            return _ended(array, array.after, array.verdict, at)
        case _:
            return None


def _over(array: Job, at: float) -> Change:
    state, total = final(array.progress), array.progress.begun
    if state is JobState.SUCCEEDED:
        ended = replace(array.entered(state, Reason.COMPLETED, at), ended_at=at, pending=None, held=None)
        return ended, f"all {counted(total, 'member')} succeeded"
    stopped = f"{array.progress.stopped} of {counted(total, 'member')} were stopped"
    verdict = array.verdict or Verdict(reason=Reason.STOP_REQUESTED, summary=stopped)
    return _ended(array, state, verdict, at)


def _ended(array: Job, state: JobState, verdict: Verdict, at: float) -> Change:
    ended = array.entered(state, verdict.reason, at)
    return replace(ended, ended_at=at, verdict=verdict, after=None, pending=None, held=None), verdict.summary


# Handlers.


def _chosen(array: Job, event: MemberChosen) -> Change:
    left = not_begun(array)
    if not may_begin(array) or not left or left[0] != event.index:
        return None
    progress = replace(array.progress, begun=array.progress.begun + 1)
    array = replace(array, progress=progress, pending=None)
    if array.state is JobState.RUNNING:
        return array, None
    return replace(array.entered(JobState.RUNNING, Reason.STARTED, event.at), started_at=event.at), (
        f"member {event.index} begins, the first of {len(left)}"
    )


def _member_ended(array: Job, event: MemberEnded) -> Change:
    counts = array.progress
    match event.state:
        case JobState.SUCCEEDED:
            return replace(array, progress=replace(counts, succeeded=counts.succeeded + 1)), None
        case JobState.STOPPED:
            array = replace(array, progress=replace(counts, stopped=counts.stopped + 1))
            return array, f"member {event.index} was stopped" if array.state is JobState.RUNNING else None
    array = replace(array, progress=replace(counts, failed=counts.failed + 1))
    assert event.verdict is not None, "who fails has a verdict"
    told = f"member {event.index}: {event.verdict.summary}"
    if array.verdict is None:
        array = replace(array, verdict=event.verdict.model_copy(update={"summary": told}))
    return array, told


def _stop_requested(array: Job, event: StopRequested) -> Change:
    if array.state is JobState.STOPPING:
        harder = event.force and not array.forced
        return (replace(array, forced=True), f"forced: {event.why}") if harder else None
    verdict = Verdict(reason=Reason.STOP_REQUESTED, summary=event.why)
    stopping = array.entered(JobState.STOPPING, verdict.reason, event.at)
    stopping = replace(stopping, after=JobState.STOPPED, verdict=verdict, forced=event.force, pending=None)
    return stopping, f"stopping: {event.why}"


def _held(array: Job, event: Held | Suspended) -> Change:
    """Who holds a suspended array leaves it as it is; who suspends a held one has its members stopped, too."""
    if array.state not in OPEN or (array.held is not None and isinstance(event, Held)):
        return None
    array = replace(array, held=event.why, pending=event.why)
    return (replace(array, reason=Reason.HELD) if array.state is JobState.QUEUED else array), event.why


def _let_go(array: Job, event: LetGo) -> Change:
    if array.held is None:
        return None
    array = replace(array, held=None, pending=None)
    if array.state is JobState.QUEUED:
        array = replace(array, reason=Reason.WAITING, queued_at=event.at)
    return array, event.why


def _deferred(array: Job, event: PlacementDeferred) -> Change:
    if array.state is not JobState.QUEUED or array.held is not None or array.pending == event.why:
        return None
    return replace(array, pending=event.why, reason=Reason.WAITING), f"waiting: {event.why}"


def _priority_changed(array: Job, event: PriorityChanged) -> Change:
    if array.state not in OPEN or array.spec.priority == event.priority:
        return None
    return replace(array, spec=array.spec.model_copy(update={"priority": event.priority})), event.why


def _time_passed(array: Job, event: TimePassed) -> Change:
    limit = deadline(array)
    if limit is None or event.at < limit:
        return None
    return _ended(array, JobState.FAILED, verdicts.timeout(array), event.at)


HANDLERS: Mapping[type, Callable[..., Change]] = {
    MemberChosen: _chosen,
    MemberEnded: _member_ended,
    StopRequested: _stop_requested,
    Held: _held,
    Suspended: _held,
    LetGo: _let_go,
    PlacementDeferred: _deferred,
    PriorityChanged: _priority_changed,
    AwaitedEnded: dependencies.ended,
    TimePassed: _time_passed,
}
"""By the kind of event; all others are none of an array's."""
