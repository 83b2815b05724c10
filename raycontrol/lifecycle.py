"""What becomes of a job: events in, the next state and commands out. Pure: no clock, no I/O, time is an argument.

``advance`` is the only writer of a job's state. Commands are never stored: ``demands.duties`` derives from a state what
must be done or true now, and a transition commands what its new state demands and the old one did not. So a controller
that died between storing and acting finds the same commands again in ``resume``, and nothing is commanded twice. The
controller itself goes by ``duties`` alone (the module of that name keeps what runs equal to them); who reads ``commands``
are the tests, which hold the two against each other.

::

    QUEUED ─ NodesChosen → PLACING ─ NodesReserved → PREPARING ─ all prepared → STARTING ─ last stage → RUNNING
       ↑                      ↑                                                                           │
       │                      └ after: PLACING ┐                                                          │
       └─────────────── after: QUEUED ── STOPPING ←── failed, lost, stopped, suspended, preempted, out of time,
                                           │          or all deciders exited 0
                                           └─ NodesReleased → SUCCEEDED | FAILED | STOPPED
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from raycontrol import arrays, attempts, dependencies, keeping, transports, verdicts, wishes
from raycontrol.demands import BROKEN_S, PLACING_S, deadline, duties
from raycontrol.errors import PlanError
from raycontrol.events import (
    AwaitedEnded,
    Command,
    Held,
    InstanceClosed,
    InstanceFailed,
    InstanceLost,
    InstanceNoted,
    InstancePrepared,
    JobEvent,
    LetGo,
    NodeDrained,
    NodesChosen,
    NodesRefused,
    NodesReleased,
    NodesReserved,
    PlacementDeferred,
    Preempted,
    PriorityChanged,
    RunExited,
    RunsGone,
    ServiceEnded,
    StagePassed,
    StopRequested,
    Suspended,
    TimePassed,
    TransportSeen,
    WorldBroken,
    WorldFailed,
)
from raycontrol.job import Broken, Instance, Job, plan_of
from raycontrol.parts import decided, known_plan, left_early, still_finishing
from raycontrol.retries import will_be_tried_again
from raycontrol.spec import members
from raycontrol.status import InstanceState, JobState, Note, Reason, Verdict
from raycontrol.stopping import (
    Change,
    acquit,
    blame_earlier,
    blame_service,
    fail_late,
    give_up,
    requeue,
    stop,
    stop_broken,
    stop_left,
    succeed,
    success_of,
)


class Step(NamedTuple):
    """What an event leads to: the job as it is now, what to do, and what to tell (in the order in which it happened)."""

    job: Job
    commands: tuple[Command, ...] = ()
    notes: tuple[Note, ...] = ()


def advance(job: Job, event: JobEvent) -> Step:
    """Return what ``event`` makes of ``job``. Late, repeated and foreign news changes nothing."""
    if job.state.terminal or not _concerns(job, event):
        return Step(job)
    notes: list[Note] = []
    after = job
    about: str | None = getattr(event, "instance", None)
    handlers, settle = (arrays.HANDLERS, arrays.settle) if job.is_array else (_HANDLERS, _settle)
    handler = handlers.get(type(event))
    changed = None if handler is None else handler(job, event)
    while changed is not None:
        after, message = changed
        if message:
            notes.append(_note(after, event, message, about))
        about = None  # what follows by itself concerns the whole job
        changed = settle(after, event.at)
    known = set(duties(job))
    return Step(after, tuple(command for command in duties(after) if command not in known), tuple(notes))


# Handlers: one per kind of event; each returns the changed job and what to tell, or None when nothing changes.


def _chosen(job: Job, event: NodesChosen) -> Change:
    if job.state is not JobState.QUEUED or job.held is not None or dependencies.open_conditions(job):
        return None
    job = attempts.of_size(job, len(event.assignments))
    instances = tuple(
        Instance(member.name, member.group, member.role, member.index, room.node_id, room.node_name, room.ip)
        for member, room in zip(members(job.spec), event.assignments, strict=True)
    )
    waited = replace(job, pending=None, not_before=None, fenced_until=None, group=None)
    placed = attempts.placed(replace(waited, fence_s=event.fence_s), instances, event.at)
    return placed, "reserving " + ", ".join(f"{item.name} on {item.node_name}" for item in instances)


def _deferred(job: Job, event: PlacementDeferred) -> Change:
    if job.state is not JobState.QUEUED or job.held is not None or job.pending == event.why:
        return None
    return replace(job, pending=event.why, reason=Reason.WAITING), f"waiting: {event.why}"


def _reserved(job: Job, event: NodesReserved) -> Change:
    if job.state is not JobState.PLACING:
        return None
    return job.entered(JobState.PREPARING, Reason.PLACED, event.at), "nodes reserved, preparing instances"


def _refused(job: Job, event: NodesRefused) -> Change:
    if job.state is not JobState.PLACING:
        return None
    return requeue(job, event.at, event.why)


def _prepared(job: Job, event: InstancePrepared) -> Change:
    if job.state is not JobState.PREPARING or job.instance(event.instance).facts is not None:
        return None
    return job.with_instance(event.instance, facts=event.facts, state=InstanceState.PREPARED), None


def _failed(job: Job, event: InstanceFailed) -> Change:
    if job.state not in (JobState.PREPARING, JobState.STARTING):
        return None
    verdict = Verdict(
        reason=event.reason, summary=f"{event.instance}: {event.message}", instance=event.instance
    )
    stopped, message = stop(job, event.at, verdict, because=f"{event.instance} failed")
    return stopped.with_instance(event.instance, note=event.message), message


def _passed(job: Job, event: StagePassed) -> Change:
    if job.state is not JobState.STARTING or event.stage <= job.instance(event.instance).passed:
        return None
    return job.with_instance(event.instance, passed=event.stage), None


def _exited(job: Job, event: RunExited) -> Change:
    instance = job.instance(event.instance)
    if instance.ended is not None or instance.state is InstanceState.LOST:
        return None
    ended = event.ended
    # Only the verdict keeps last lines: those of every instance would be stored again with every event.
    recorded = job.with_instance(
        event.instance, ended=replace(ended, last_lines=()), state=InstanceState.EXITED
    )
    told = f"{event.instance} {verdicts.describe_end(ended)}"
    if job.state is JobState.STOPPING:
        return acquit(blame_earlier(recorded, instance, ended)), told
    if job.ok(ended):
        return recorded, told
    verdict = verdicts.failure(job, instance, ended)
    stopped, message = stop(recorded, event.at, verdict, because=f"{event.instance} failed")
    return replace(stopped, failed_at=ended.at), message


def _service_ended(job: Job, event: ServiceEnded) -> Change:
    """An end that the start command asked for is only told; any other fails the attempt, unless the spec allows it."""
    instance = job.instance(event.instance)
    if instance.service_ended is not None or instance.state is InstanceState.LOST:
        return None
    how = "was ended by the job itself" if event.asked else verdicts.describe_end(event.ended)
    told = f"{event.instance}: its {event.run} {how}"
    unasked = not event.asked and not job.relieved
    job = job.with_instance(event.instance, service_ended=replace(event.ended, last_lines=()))
    if job.state is JobState.STOPPING:
        return (blame_service(job, event, told) if unasked else job), None
    if job.state not in (JobState.STARTING, JobState.RUNNING):
        return job, told
    plan = known_plan(job)
    if not unasked:
        # Without the head's node the others end by themselves some time later.
        return replace(job, relieved=job.relieved or event.instance not in plan.servers), told
    if job.state is JobState.RUNNING and event.instance in plan.dispensable:
        return job.with_instance(event.instance, state=InstanceState.EXITED, note=told), told
    verdict = verdicts.service_failure(instance, event.run, event.ended)
    stopped, message = stop(job, event.at, verdict, because=f"{event.instance} failed")
    return replace(stopped.with_instance(event.instance, note=told), failed_at=event.ended.at), message


def _world_broken(job: Job, event: WorldBroken) -> Change:
    """Keep the first; a job that was about to succeed has failed, a running one waits for its launcher's own word."""
    known = job.fault is not None and job.fault.at <= event.at
    if known or job.state not in (JobState.STARTING, JobState.RUNNING, JobState.STOPPING):
        return None
    broken = Broken(event.at, event.instance, event.message, event.world)
    told = f"{event.instance}: {event.message}"
    if job.state is not JobState.STOPPING:
        return replace(job, broken=broken), told
    if job.after is not JobState.SUCCEEDED or event.world in job.failed_worlds:
        return None
    return fail_late(replace(job, broken=broken), verdicts.broken_world(broken)), told


def _world_failed(job: Job, event: WorldFailed) -> Change:
    if job.state not in (JobState.STARTING, JobState.RUNNING) or event.world in job.failed_worlds:
        return None
    return replace(job, failed_worlds=(*job.failed_worlds, event.world)), None


def _noted(job: Job, event: InstanceNoted) -> Change:
    return job, f"{event.instance}: {event.message}"


def _transport_seen(job: Job, event: TransportSeen) -> Change:
    """Keep how NCCL reaches other nodes; tell it of the first instance, and warn when RDMA is on and NCCL does without."""
    known = job.instance(event.instance).transports
    if event.transport in known:
        return None
    changed = job.with_instance(event.instance, transports=(*known, event.transport))
    if any(event.transport in item.transports for item in job.instances):
        return changed, None
    told = f"{event.instance}: NCCL reaches other nodes via NET/{event.transport}"
    if event.transport == transports.SOCKET and known_plan(job).rdma.on:
        told += " although RDMA is on: look for `NET/IB` in its log, which says why"
    return changed, told


def _runs_gone(job: Job, event: RunsGone) -> Change:
    if job.state is not JobState.STOPPING or job.instance(event.instance).quiet:
        return None
    return job.with_instance(event.instance, quiet=True), None


def _closed(job: Job, event: InstanceClosed) -> Change:
    if job.state is not JobState.STOPPING or job.instance(event.instance).closed:
        return None
    told = (
        f"{event.instance}: the last {event.unsaved} bytes of its log were not saved"
        if event.unsaved
        else None
    )
    return job.with_instance(event.instance, closed=True, state=InstanceState.EXITED), told


def _lost(job: Job, event: InstanceLost) -> Change:
    instance = job.instance(event.instance)
    if instance.state is InstanceState.LOST or instance.closed:
        return None
    lost = job.with_instance(event.instance, state=InstanceState.LOST, closed=True, note=event.why)
    lost = replace(lost, fenced_until=attempts.later(job.fenced_until, event.until))
    told = f"{event.instance} on {instance.node_name} was lost: {event.why}"
    if job.state is JobState.STOPPING:
        return lost, told
    if job.state is JobState.RUNNING and event.instance in known_plan(job).dispensable:
        return lost, told
    verdict = Verdict(reason=Reason.INSTANCE_LOST, summary=told, instance=event.instance)
    return stop(lost, event.at, verdict, because=f"{event.instance} was lost")


def _released(job: Job, event: NodesReleased) -> Change:
    nothing_left = all(item.closed for item in job.instances)
    if job.state is not JobState.STOPPING or job.after is None or not nothing_left:
        return None
    if event.kept and job.after is not JobState.PLACING:  # it is to be given back after all
        return None
    match job.after:
        case JobState.PLACING if event.kept:
            return attempts.on_the_same_nodes(attempts.recorded(job, event.at), event.at)
        case JobState.QUEUED | JobState.PLACING:
            return attempts.back_in_the_queue(attempts.recorded(job, event.at), event.at)
        case final:
            job = attempts.recorded(job, event.at)
            summary = job.verdict.summary if job.verdict else success_of(job)
            ended = job.entered(final, job.reason, event.at)
            return replace(ended, ended_at=event.at, after=None, pending=None, held=None), summary


def _drained(job: Job, event: NodeDrained) -> Change:
    """The attempt goes on; only the next one must not be there."""
    if event.node in job.drained or all(item.node_name != event.node for item in job.instances):
        return None
    told = f"{event.node} is offline: {event.why}; this attempt may end there"
    return replace(job, drained=(*job.drained, event.node)), told


def _time_passed(job: Job, event: TimePassed) -> Change:
    limit = deadline(job)
    if limit is None or event.at < limit:
        return None
    match job.state:
        case JobState.PLACING:
            return requeue(job, event.at, f"the nodes were not ready within {PLACING_S:g} s")
        case JobState.STOPPING if job.kept_until is not None:
            return keeping.over(job, "the time is over")
        case JobState.STOPPING if job.finish_by is not None:
            late = ", ".join(item.name for item in still_finishing(job))
            told = f"{late} did not finish in time: ending it"
            return replace(job, since=event.at, finish_by=None), told
        case JobState.STOPPING if not job.forced:
            return replace(job, forced=True, since=event.at), "not ended in time: killing what is left"
        case JobState.STOPPING:
            fenced_until = attempts.later(job.fenced_until, event.at + job.fence_s)
            given_up = replace(give_up(job), fenced_until=fenced_until)
            return given_up, "instances that do not answer are given up as lost"
        case JobState.RUNNING if job.fault is not None and event.at >= job.fault.at + BROKEN_S:
            return stop_broken(job, job.fault, event.at)
        case JobState.RUNNING if (left := left_early(job)) is not None and event.at >= left.until:
            return stop_left(job, left, event.at)
        case _:
            verdict = verdicts.timeout(job)
            return stop(job, event.at, verdict, because=verdict.summary)


_HANDLERS: dict[type, Callable[..., Change]] = {
    NodesChosen: _chosen,
    PlacementDeferred: _deferred,
    NodesReserved: _reserved,
    NodesRefused: _refused,
    InstancePrepared: _prepared,
    InstanceFailed: _failed,
    StagePassed: _passed,
    RunExited: _exited,
    ServiceEnded: _service_ended,
    WorldBroken: _world_broken,
    WorldFailed: _world_failed,
    InstanceNoted: _noted,
    TransportSeen: _transport_seen,
    RunsGone: _runs_gone,
    InstanceClosed: _closed,
    InstanceLost: _lost,
    NodesReleased: _released,
    NodeDrained: _drained,
    StopRequested: wishes.stop_requested,
    Held: wishes.held,
    LetGo: wishes.let_go,
    Suspended: wishes.suspended,
    Preempted: wishes.preempted,
    PriorityChanged: wishes.priority_changed,
    AwaitedEnded: dependencies.ended,
    TimePassed: _time_passed,
}


# What follows without a further event.


def _settle(job: Job, at: float) -> Change:
    match job.state:
        case JobState.QUEUED if (verdict := dependencies.failure(job)) is not None:
            return stop(job, at, verdict, because=verdict.summary)
        case JobState.PREPARING if all(item.facts for item in job.instances):
            return _begin(job, at)
        case JobState.STARTING if all(item.passed >= job.stage for item in job.instances):
            return _next_stage(job, at)
        case JobState.RUNNING if job.fault is not None and decided(job):
            return stop_broken(job, job.fault, at)
        case JobState.RUNNING if decided(job):
            return succeed(job, at)
        case JobState.STOPPING if job.finish_by is not None and not still_finishing(job):
            return replace(job, finish_by=None, since=at), None
        case JobState.STOPPING if will_be_tried_again(job) and all(item.closed for item in job.instances):
            return attempts.try_again(job, at)
        case JobState.STOPPING if keeping.is_due(job):
            return keeping.begun(job, at)
        case _:
            return None


def _begin(job: Job, at: float) -> Change:
    try:
        plan = plan_of(job)
    except PlanError as error:
        return stop(job, at, Verdict(reason=Reason.PLAN_FAILED, summary=str(error)), because=str(error))
    told = "; ".join(["prepared", *plan.notes, f"stage: {plan.stages[0].name}"])
    return job.entered(JobState.STARTING, job.reason, at), told


def _next_stage(job: Job, at: float) -> Change:
    stages = plan_of(job).stages
    if job.stage + 1 < len(stages):
        following = replace(job, stage=job.stage + 1).entered(JobState.STARTING, job.reason, at)
        return following, f"{stages[job.stage].says}; stage: {stages[job.stage + 1].name}"
    instances = tuple(
        item if item.state.ended else replace(item, state=InstanceState.RUNNING) for item in job.instances
    )
    running = replace(job, instances=instances).entered(JobState.RUNNING, Reason.STARTED, at)
    return replace(running, started_at=job.started_at or at), stages[job.stage].says


# Helpers.


def _concerns(job: Job, event: JobEvent) -> bool:
    """Whether the event speaks of the current reservation and, where it names an instance, of one that is there."""
    name = getattr(event, "instance", None)
    return getattr(event, "attempt_id", job.attempt_id) == job.attempt_id and (
        name is None or any(item.name == name for item in job.instances)
    )


def _note(job: Job, event: JobEvent, message: str, instance: str | None) -> Note:
    return Note(
        at=event.at,
        kind=type(event).__name__,
        state=job.state,
        reason=job.reason,
        attempt=job.attempt,
        instance=instance,
        message=message,
    )
