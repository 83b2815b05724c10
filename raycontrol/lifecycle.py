"""What becomes of a job: events in, the next state and commands out. Pure: no clock, no I/O, time is an argument.

``advance`` is the only writer of a job's state. Commands are never stored: ``duties`` derives from a state what must
be done or true now, and a transition commands what its new state demands and the old one did not. So a controller
that died between storing and acting finds the same commands again in ``resume``, and nothing is commanded twice.

::

    QUEUED ─ NodesChosen → PLACING ─ NodesReserved → PREPARING ─ all prepared → STARTING ─ last stage → RUNNING
       ↑                                                                                                  │
       └──────── after: QUEUED ── STOPPING ←── failed, lost, stopped, out of time, or all deciders exited 0┘
                                     └─ NodesReleased → SUCCEEDED | FAILED | STOPPED
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from raycontrol import transports, verdicts
from raycontrol.errors import PlanError
from raycontrol.events import (
    CarryOutStage,
    Command,
    InstanceClosed,
    InstanceFailed,
    InstanceLost,
    InstanceNoted,
    InstancePrepared,
    JobEvent,
    NodesChosen,
    NodesRefused,
    NodesReleased,
    NodesReserved,
    PlacementDeferred,
    PrepareInstance,
    ReleaseNodes,
    ReserveNodes,
    RunExited,
    RunsGone,
    ServiceEnded,
    StagePassed,
    StopInstance,
    StopRequested,
    TimePassed,
    TransportSeen,
    WatchInstance,
    WorldBroken,
    WorldFailed,
)
from raycontrol.job import Broken, Ended, Instance, Job, plan_of
from raycontrol.plan import Plan
from raycontrol.spec import members
from raycontrol.status import InstanceState, JobState, Note, Reason, Verdict

PLACING_S = 15.0
"""How long a reservation may take before it is given up for a new decision."""
PREPARING_S = 900.0
"""How long fetching and unpacking the working directory may take."""
STAGE_SLACK_S = 15.0
"""How much later than the instances' own limit the controller gives up a stage."""
STOP_SLACK_S = 30.0
"""How long after the grace instances have to end before they are killed, and again before they count as lost."""
SHIPPING_S = 900.0
"""How long after the grace instances have to ship logs and outputs once no process of theirs is left."""

BROKEN_S = 10.0
"""How long an MPI launcher has to end by itself, with a code that says more, once a part of its world has broken."""

LEFT_EARLY_S = 10.0
"""How long the deciders have to end, too, once an instance that serves them has exited 0: its end may be told first."""

FINAL_STATE = {
    Reason.COMPLETED: JobState.SUCCEEDED,
    Reason.STOP_REQUESTED: JobState.STOPPED,
}
"""Reasons that do not end as FAILED."""

NO_PLAN = Plan("", {}, {}, (), frozenset())
STOPPED = "stopped: "
"""How the note of an instance begins that was stopped because of something else."""


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
    changed = _HANDLERS[type(event)](job, event)
    while changed is not None:
        after, message = changed
        if message:
            notes.append(_note(after, event, message, about))
        about = None  # what follows by itself concerns the whole job
        changed = _settle(after, event.at)
    known = set(duties(job))
    return Step(after, tuple(command for command in duties(after) if command not in known), tuple(notes))


def resume(job: Job) -> tuple[Command, ...]:
    """Return everything that must be done for a job found in the store.

    The controller does not tell the two apart: it keeps running what ``duties`` demands, which comes to the same.
    """
    return duties(job)


def duties(job: Job) -> tuple[Command, ...]:
    """Return what this state demands."""
    match job.state:
        case JobState.PLACING:
            return (ReserveNodes(job.attempt_id),)
        case JobState.PREPARING:
            return _watches(job) + tuple(
                PrepareInstance(job.attempt_id, item.name) for item in job.instances if item.facts is None
            )
        case JobState.STARTING:
            return _watches(job) + tuple(
                CarryOutStage(job.attempt_id, item.name, job.stage)
                for item in job.instances
                if item.passed < job.stage and item.ended is None
            )
        case JobState.RUNNING:
            return _watches(job)
        case JobState.STOPPING:
            return _stopping_duties(job)
        case _:
            return ()


def deadline(job: Job) -> float | None:
    """Return when the clock must call again (epoch seconds), or None."""
    limits = job.spec.timeouts
    match job.state:
        case JobState.QUEUED:
            return None if limits.queue_s is None else job.submitted_at + limits.queue_s
        case JobState.PLACING:
            return job.since + PLACING_S
        case JobState.PREPARING:
            return job.since + PREPARING_S
        case JobState.STARTING:
            return job.since + plan_of(job).stages[job.stage].limit_s + STAGE_SLACK_S
        case JobState.RUNNING:
            ends = [] if limits.run_s is None else [job.since + limits.run_s]
            if job.fault is not None:
                ends.append(job.fault.at + BROKEN_S)
            if (left := _left_early(job)) is not None:
                ends.append(left.ended.at + LEFT_EARLY_S)
            return min(ends, default=None)
        case JobState.STOPPING:
            return _stopping_deadline(job)
        case _:
            return None


def _stopping_deadline(job: Job) -> float | None:
    if all(item.closed for item in job.instances):
        return None
    if job.finish_by is not None:
        return job.finish_by
    if job.forced:
        return job.since + STOP_SLACK_S
    shipping = all(item.quiet for item in job.instances if not item.closed)
    graces = 2 if _known_plan(job).servers else 1  # they are stopped when the others have ended
    return job.since + graces * job.spec.timeouts.grace_s + (SHIPPING_S if shipping else STOP_SLACK_S)


# Handlers: one per kind of event; each returns the changed job and what to tell, or None when nothing changes.

Change = tuple[Job, str | None] | None


def _chosen(job: Job, event: NodesChosen) -> Change:
    if job.state is not JobState.QUEUED:
        return None
    instances = tuple(
        Instance(member.name, member.group, member.role, member.index, room.node_id, room.node_name, room.ip)
        for member, room in zip(members(job.spec), event.assignments, strict=True)
    )
    placed = _enter(job, JobState.PLACING, Reason.PLACED, event.at)
    placed = replace(placed, reservation=job.reservation + 1, instances=instances, stage=0, pending=None)
    placed = replace(placed, broken=None, failed_worlds=(), finish_by=None, relieved=False)
    return placed, "reserving " + ", ".join(f"{item.name} on {item.node_name}" for item in instances)


def _deferred(job: Job, event: PlacementDeferred) -> Change:
    if job.state is not JobState.QUEUED or job.pending == event.why:
        return None
    return replace(job, pending=event.why, reason=Reason.WAITING), f"waiting: {event.why}"


def _reserved(job: Job, event: NodesReserved) -> Change:
    if job.state is not JobState.PLACING:
        return None
    return _enter(job, JobState.PREPARING, Reason.PLACED, event.at), "nodes reserved, preparing instances"


def _refused(job: Job, event: NodesRefused) -> Change:
    if job.state is not JobState.PLACING:
        return None
    return _requeue(job, event.at, event.why)


def _prepared(job: Job, event: InstancePrepared) -> Change:
    if job.state is not JobState.PREPARING or job.instance(event.instance).facts is not None:
        return None
    return _with(job, event.instance, facts=event.facts, state=InstanceState.PREPARED), None


def _failed(job: Job, event: InstanceFailed) -> Change:
    if job.state not in (JobState.PREPARING, JobState.STARTING):
        return None
    verdict = Verdict(
        reason=event.reason, summary=f"{event.instance}: {event.message}", instance=event.instance
    )
    stopped, message = _stop(job, event.at, verdict, because=f"{event.instance} failed")
    return _with(stopped, event.instance, note=event.message), message


def _passed(job: Job, event: StagePassed) -> Change:
    if job.state is not JobState.STARTING or event.stage <= job.instance(event.instance).passed:
        return None
    return _with(job, event.instance, passed=event.stage), None


def _exited(job: Job, event: RunExited) -> Change:
    instance = job.instance(event.instance)
    if instance.ended is not None or instance.state is InstanceState.LOST:
        return None
    ended = event.ended
    # Only the verdict keeps last lines: those of every instance would be stored again with every event.
    recorded = _with(job, event.instance, ended=replace(ended, last_lines=()), state=InstanceState.EXITED)
    told = f"{event.instance} {verdicts.describe_end(ended)}"
    if job.state is JobState.STOPPING:
        return _acquit(_blame_earlier(recorded, instance, ended)), told
    if ended.ok:
        return recorded, told
    verdict = verdicts.failure(instance, ended, job.broken)
    stopped, message = _stop(recorded, event.at, verdict, because=f"{event.instance} failed")
    return replace(stopped, failed_at=ended.at), message


def _service_ended(job: Job, event: ServiceEnded) -> Change:
    """An end that the start command asked for is only told; any other fails the attempt, unless the spec allows it."""
    instance = job.instance(event.instance)
    if instance.service_ended is not None or instance.state is InstanceState.LOST:
        return None
    how = "was ended by the job itself" if event.asked else verdicts.describe_end(event.ended)
    told = f"{event.instance}: its {event.run} {how}"
    unasked = not event.asked and not job.relieved
    job = _with(job, event.instance, service_ended=replace(event.ended, last_lines=()))
    if job.state is JobState.STOPPING:
        return (_blame_service(job, event, told) if unasked else job), None
    if job.state not in (JobState.STARTING, JobState.RUNNING):
        return job, told
    plan = _known_plan(job)
    if not unasked:
        # Without the head's node the others end by themselves some time later.
        return replace(job, relieved=job.relieved or event.instance not in plan.servers), told
    if job.state is JobState.RUNNING and event.instance in plan.dispensable:
        return _with(job, event.instance, state=InstanceState.EXITED, note=told), told
    verdict = verdicts.service_failure(instance, event.run, event.ended)
    stopped, message = _stop(job, event.at, verdict, because=f"{event.instance} failed")
    return replace(_with(stopped, event.instance, note=told), failed_at=event.ended.at), message


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
    return _fail_late(replace(job, broken=broken), verdicts.broken_world(broken)), told


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
    changed = _with(job, event.instance, transports=(*known, event.transport))
    if any(event.transport in item.transports for item in job.instances):
        return changed, None
    told = f"{event.instance}: NCCL reaches other nodes via NET/{event.transport}"
    if event.transport == transports.SOCKET and _known_plan(job).rdma.on:
        told += " although RDMA is on: look for `NET/IB` in its log, which says why"
    return changed, told


def _runs_gone(job: Job, event: RunsGone) -> Change:
    if job.state is not JobState.STOPPING or job.instance(event.instance).quiet:
        return None
    return _with(job, event.instance, quiet=True), None


def _closed(job: Job, event: InstanceClosed) -> Change:
    if job.state is not JobState.STOPPING or job.instance(event.instance).closed:
        return None
    told = (
        f"{event.instance}: the last {event.unsaved} bytes of its log were not saved"
        if event.unsaved
        else None
    )
    return _with(job, event.instance, closed=True, state=InstanceState.EXITED), told


def _lost(job: Job, event: InstanceLost) -> Change:
    instance = job.instance(event.instance)
    if instance.state is InstanceState.LOST or instance.closed:
        return None
    lost = _with(job, event.instance, state=InstanceState.LOST, closed=True, note=event.why)
    told = f"{event.instance} on {instance.node_name} was lost: {event.why}"
    if job.state is JobState.STOPPING:
        return lost, told
    if job.state is JobState.RUNNING and event.instance in _known_plan(job).dispensable:
        return lost, told
    verdict = Verdict(reason=Reason.INSTANCE_LOST, summary=told, instance=event.instance)
    return _stop(lost, event.at, verdict, because=f"{event.instance} was lost")


def _released(job: Job, event: NodesReleased) -> Change:
    nothing_left = all(item.closed for item in job.instances)
    if job.state is not JobState.STOPPING or job.after is None or not nothing_left:
        return None
    if job.after is JobState.QUEUED:
        queued = _enter(job, JobState.QUEUED, Reason.WAITING, event.at)
        return replace(queued, after=None, instances=(), forced=False), "back in the queue"
    ended = _enter(job, job.after, job.reason, event.at)
    summary = job.verdict.summary if job.verdict else "every start command that decides exited 0"
    return replace(ended, ended_at=event.at, after=None, pending=None), summary


def _stop_requested(job: Job, event: StopRequested) -> Change:
    verdict = Verdict(reason=Reason.STOP_REQUESTED, summary=event.why)
    if job.state is not JobState.STOPPING:
        stopped, message = _stop(job, event.at, verdict, because=event.why)
        return replace(stopped, forced=event.force), message
    if job.after is JobState.QUEUED:
        job = replace(job, after=JobState.STOPPED, reason=Reason.STOP_REQUESTED, verdict=verdict)
        return replace(job, forced=job.forced or event.force), f"stop requested: {event.why}"
    if event.force and not job.forced:
        job = replace(job, forced=True, since=event.at, finish_by=None)
        return job, f"forced: {event.why}"
    if job.finish_by is not None:
        return replace(job, since=event.at, finish_by=None), f"stop requested: {event.why}"
    return None


def _time_passed(job: Job, event: TimePassed) -> Change:
    limit = deadline(job)
    if limit is None or event.at < limit:
        return None
    match job.state:
        case JobState.PLACING:
            return _requeue(job, event.at, f"the nodes were not ready within {PLACING_S:g} s")
        case JobState.STOPPING if job.finish_by is not None:
            late = ", ".join(item.name for item in _finishing(job))
            told = f"{late} did not finish in time: ending it"
            return replace(job, since=event.at, finish_by=None), told
        case JobState.STOPPING if not job.forced:
            return replace(job, forced=True, since=event.at), "not ended in time: killing what is left"
        case JobState.STOPPING:
            return _give_up(job), "instances that do not answer are given up as lost"
        case JobState.RUNNING if job.fault is not None and event.at >= job.fault.at + BROKEN_S:
            return _stop_broken(job, job.fault, event.at)
        case JobState.RUNNING if (left := _left_early(job)) is not None and _is_past(left, event.at):
            return _stop_left(job, left, event.at)
        case _:
            verdict = verdicts.timeout(job)
            return _stop(job, event.at, verdict, because=verdict.summary)


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
    StopRequested: _stop_requested,
    TimePassed: _time_passed,
}


# What follows without a further event.


def _settle(job: Job, at: float) -> Change:
    match job.state:
        case JobState.PREPARING if all(item.facts for item in job.instances):
            return _begin(job, at)
        case JobState.STARTING if all(item.passed >= job.stage for item in job.instances):
            return _next_stage(job, at)
        case JobState.RUNNING if job.fault is not None and _decided(job):
            return _stop_broken(job, job.fault, at)
        case JobState.RUNNING if _decided(job):
            return _succeed(job, at)
        case JobState.STOPPING if job.finish_by is not None and not _finishing(job):
            return replace(job, finish_by=None, since=at), None
        case _:
            return None


def _begin(job: Job, at: float) -> Change:
    try:
        plan = plan_of(job)
    except PlanError as error:
        return _stop(job, at, Verdict(reason=Reason.PLAN_FAILED, summary=str(error)), because=str(error))
    told = "; ".join(["prepared", *plan.notes, f"stage: {plan.stages[0].name}"])
    return _enter(job, JobState.STARTING, job.reason, at), told


def _next_stage(job: Job, at: float) -> Change:
    stages = plan_of(job).stages
    if job.stage + 1 < len(stages):
        following = _enter(replace(job, stage=job.stage + 1), JobState.STARTING, job.reason, at)
        return following, f"{stages[job.stage].says}; stage: {stages[job.stage + 1].name}"
    instances = tuple(
        item if item.state.ended else replace(item, state=InstanceState.RUNNING) for item in job.instances
    )
    running = _enter(replace(job, instances=instances), JobState.RUNNING, Reason.STARTED, at)
    return replace(running, started_at=job.started_at or at), stages[job.stage].says


def _succeed(job: Job, at: float) -> tuple[Job, str]:
    """Enter STOPPING as a success; those that may finish get their time."""
    told = "every start command that decides exited 0"
    stopping = _enter(replace(job, after=JobState.SUCCEEDED), JobState.STOPPING, Reason.COMPLETED, at)
    finish_s = _known_plan(job).finish_s
    finishing = ", ".join(item.name for item in _finishing(job))
    if not finishing or finish_s == 0:
        return stopping, told
    run_s = job.spec.timeouts.run_s
    finish_by = min(at + finish_s, at + finish_s if run_s is None else job.since + run_s)
    told = f"{told}; {finishing} may go on for {finish_by - at:.0f} s"
    return replace(stopping, finish_by=finish_by), told


def _finishing(job: Job) -> list[Instance]:
    """Return those that may go on when the deciders have ended, and do."""
    finishers = _known_plan(job).finishers
    return [item for item in job.instances if item.name in finishers and _works(item)]


def _works(item: Instance) -> bool:
    return item.ended is None and not item.quiet and not item.closed and item.state is not InstanceState.LOST


class Left(NamedTuple):
    """An instance that serves the others and has exited 0."""

    instance: Instance
    ended: Ended


def _left_early(job: Job) -> Left | None:
    """Return the first server whose start command has ended; before the deciders have, that is too early."""
    plan = _known_plan(job)
    servers = plan.servers - plan.deciders
    left = [
        Left(item, item.ended) for item in job.instances if item.name in servers and item.ended is not None
    ]
    return min(left, key=lambda found: found.ended.at, default=None)


def _is_past(left: Left | None, at: float) -> bool:
    return left is not None and at >= left.ended.at + LEFT_EARLY_S


def _known_plan(job: Job) -> Plan:
    """Return the plan; as long as there is none nothing of a job runs, and nobody has a part in it."""
    try:
        return plan_of(job)
    except PlanError:
        return NO_PLAN


def _decided(job: Job) -> bool:
    deciders = plan_of(job).deciders
    return all(item.ended is not None and item.ended.ok for item in job.instances if item.name in deciders)


# Helpers.


def _concerns(job: Job, event: JobEvent) -> bool:
    """Whether the event speaks of the current reservation and, where it names an instance, of one that is there."""
    name = getattr(event, "instance", None)
    return getattr(event, "attempt_id", job.attempt_id) == job.attempt_id and (
        name is None or any(item.name == name for item in job.instances)
    )


def _enter(job: Job, state: JobState, reason: Reason, at: float) -> Job:
    return replace(job, state=state, reason=reason, since=at)


def _with(job: Job, name: str, **changes: object) -> Job:
    instances = tuple(
        replace(item, **changes) if item.name == name else item  # type: ignore[arg-type]
        for item in job.instances
    )
    return replace(job, instances=instances)


def _stop(job: Job, at: float, verdict: Verdict, because: str) -> tuple[Job, str]:
    """Enter STOPPING towards the final state of the verdict's reason. While PLACING nothing runs yet."""
    final = FINAL_STATE.get(verdict.reason, JobState.FAILED)
    nothing_runs = job.state is JobState.PLACING
    state = InstanceState.EXITED if nothing_runs else InstanceState.STOPPING
    instances = tuple(
        item
        if item.state.ended
        else replace(item, state=state, closed=nothing_runs, note=f"{STOPPED}{because}")
        for item in job.instances
    )
    stopping = _enter(replace(job, instances=instances), JobState.STOPPING, verdict.reason, at)
    return replace(stopping, after=final, verdict=verdict, pending=None), f"stopping: {verdict.summary}"


def _stop_broken(job: Job, fault: Broken, at: float) -> tuple[Job, str]:
    return _stop(job, at, verdicts.broken_world(fault), because=f"{fault.instance}: {fault.message}")


def _stop_left(job: Job, left: Left, at: float) -> tuple[Job, str]:
    verdict = verdicts.left_early(left.instance)
    stopped, message = _stop(job, at, verdict, because=f"{left.instance.name} left early")
    return replace(stopped, failed_at=left.ended.at), message


def _acquit(job: Job) -> Job:
    """Let a job succeed after all that failed because of a server that left early, when all deciders had ended in time:
    news of them waits while the controller is away.
    """
    left = _left_early(job)
    if left is None or job.verdict != verdicts.left_early(left.instance) or not _decided(job):
        return job
    deciders = _known_plan(job).deciders
    ends = [item.ended.at for item in job.instances if item.name in deciders and item.ended is not None]
    if max(ends) >= left.ended.at + LEFT_EARLY_S:
        return job
    return replace(job, after=JobState.SUCCEEDED, reason=Reason.COMPLETED, verdict=None, failed_at=None)


def _fail_late(job: Job, verdict: Verdict) -> Job:
    """Let a job fail that is ending as a success: it has not ended yet."""
    return replace(job, after=JobState.FAILED, reason=verdict.reason, verdict=verdict)


def _requeue(job: Job, at: float, why: str) -> tuple[Job, str]:
    """Give the reservation back; nothing has run on it."""
    instances = tuple(replace(item, closed=True, state=InstanceState.EXITED) for item in job.instances)
    stopping = _enter(replace(job, instances=instances), JobState.STOPPING, Reason.PLACEMENT_LOST, at)
    return replace(
        stopping, after=JobState.QUEUED
    ), f"the reservation did not come about ({why}); trying again"


def _give_up(job: Job) -> Job:
    instances = tuple(
        item
        if item.closed
        else replace(item, closed=True, state=InstanceState.LOST, note="did not answer when it was stopped")
        for item in job.instances
    )
    return replace(job, instances=instances)


def _watches(job: Job) -> tuple[Command, ...]:
    return tuple(WatchInstance(job.attempt_id, item.name) for item in job.instances if not item.closed)


def _stopping_duties(job: Job) -> tuple[Command, ...]:
    living = [item for item in job.instances if not item.closed]
    if not living:
        return (ReleaseNodes(job.attempt_id, last=job.after is not JobState.QUEUED),)
    grace_s = 0.0 if job.forced else job.spec.timeouts.grace_s
    why = job.verdict.summary if job.verdict else "the job's work is done"
    return _watches(job) + tuple(
        StopInstance(job.attempt_id, item.name, grace_s, why) for item in _to_stop(job, living)
    )


def _to_stop(job: Job, living: list[Instance]) -> list[Instance]:
    """Return who has to end now: those that serve the others when these have ended, which may need them to save their work."""
    if job.forced:
        return living
    plan = _known_plan(job)
    finishing = plan.finishers if job.finish_by is not None else frozenset[str]()
    clients = [item for item in living if item.name not in plan.servers and item.name not in finishing]
    held = finishing | (plan.servers if any(map(_works, clients)) else frozenset())
    return [item for item in living if item.name not in held or not _works(item)]


def _blame_earlier(job: Job, instance: Instance, ended: Ended) -> Job:
    """Let the verdict name another instance if that one failed by itself before the one that reported first, or led it."""
    if ended.ok or ended.sender is not None or ended.followed or job.failed_at is None:
        return job
    if ended.at >= job.failed_at and not _blames_a_follower(job):
        return job
    verdict = verdicts.failure(instance, ended, job.broken)
    job = replace(job, verdict=verdict, reason=verdict.reason, failed_at=ended.at)
    return _mark_peers(_with(job, instance.name, note=None), because=f"{instance.name} failed")


def _blame_service(job: Job, event: ServiceEnded, told: str) -> Job:
    """Let the verdict name a service that ended by itself before the start command failed."""
    if event.ended.sender is not None or job.failed_at is None or event.ended.at >= job.failed_at:
        return job
    instance = job.instance(event.instance)
    verdict = verdicts.service_failure(instance, event.run, event.ended)
    job = replace(job, verdict=verdict, reason=verdict.reason, failed_at=event.ended.at)
    return _mark_peers(_with(job, instance.name, note=told), because=f"{instance.name} failed")


def _blames_a_follower(job: Job) -> bool:
    blamed = job.verdict.instance if job.verdict is not None else None
    return any(
        item.name == blamed and item.ended is not None and item.ended.followed for item in job.instances
    )


def _mark_peers(job: Job, because: str) -> Job:
    """Say anew why those were stopped that were."""
    instances = tuple(
        replace(item, note=f"{STOPPED}{because}") if (item.note or "").startswith(STOPPED) else item
        for item in job.instances
    )
    return replace(job, instances=instances)


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
