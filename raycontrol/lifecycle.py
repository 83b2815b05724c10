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
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from raycontrol import backends
from raycontrol.errors import PlanError
from raycontrol.placement import Assignment
from raycontrol.plan import Brief, Cause, Facts, Plan
from raycontrol.spec import JobSpec, members
from raycontrol.status import (
    InstanceInfo,
    InstanceState,
    JobInfo,
    JobState,
    Note,
    Reason,
    Verdict,
)

PLACING_S = 15.0
"""How long a reservation may take before it is given up for a new decision."""
PREPARING_S = 900.0
"""How long fetching and unpacking the working directory may take."""
STAGE_SLACK_S = 15.0
"""How much later than the instances' own limit the controller gives up a stage."""
STOP_SLACK_S = 30.0
"""How long after the grace instances have to ship their last bytes before they are killed, and again before they count as lost."""

FINAL_STATE = {
    Reason.COMPLETED: JobState.SUCCEEDED,
    Reason.STOP_REQUESTED: JobState.STOPPED,
}
"""Reasons that do not end as FAILED."""

STOPPED = "stopped: "
"""How the note of an instance begins that was stopped because of something else."""


@dataclass(frozen=True)
class Ended:
    """How a start command ended. ``at`` is epoch seconds of the controller's clock; ``error`` says why it could not be started."""

    at: float
    code: int | None = None
    signal: int | None = None
    sender: str | None = None
    oom: bool = False
    error: str | None = None
    cause: Cause | None = None
    last_lines: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.code == 0


@dataclass(frozen=True)
class Instance:
    """One instance of the current attempt, as the controller knows it.

    ``passed`` is the number of the last stage it reported as passed; ``closed`` says that nothing of it is left
    running and its logs are with the archive (or that it is lost).
    """

    name: str
    group: str
    role: str
    index: int
    node_id: str
    node_name: str
    ip: str
    state: InstanceState = InstanceState.PLACED
    facts: Facts | None = None
    passed: int = -1
    ended: Ended | None = None
    closed: bool = False
    note: str | None = None


@dataclass(frozen=True)
class Job:
    """A job and its current attempt.

    ``attempt`` counts tries as a user sees them; ``reservation`` counts placements, so that the names made from it
    (actors, placement groups, marks of processes) are never used twice. ``after`` is where STOPPING leads to,
    ``failed_at`` when the verdict's first cause happened.
    """

    id: str
    cluster: str
    spec: JobSpec
    user: str
    submitted_at: float
    package: str | None = None
    state: JobState = JobState.QUEUED
    reason: Reason = Reason.SUBMITTED
    since: float = 0.0
    attempt: int = 0
    reservation: int = -1
    instances: tuple[Instance, ...] = ()
    stage: int = 0
    after: JobState | None = None
    forced: bool = False
    verdict: Verdict | None = None
    failed_at: float | None = None
    pending: str | None = None
    started_at: float | None = None
    ended_at: float | None = None

    @property
    def attempt_id(self) -> str:
        return f"{self.id}.{self.reservation}"

    @property
    def brief(self) -> Brief:
        return Brief(self.id, self.spec.name or self.id, self.attempt, self.attempt_id)

    def instance(self, name: str) -> Instance:
        return next(item for item in self.instances if item.name == name)


# Events: what happened. Those with ``attempt_id`` are dropped when they speak of another reservation than the current.


@dataclass(frozen=True)
class NodesChosen:
    """The queue has found room: one node for every instance, in the order of INDEX."""

    at: float
    assignments: tuple[Assignment, ...]


@dataclass(frozen=True)
class PlacementDeferred:
    """The queue cannot place the job now; ``why`` is for a person."""

    at: float
    why: str


@dataclass(frozen=True)
class NodesReserved:
    at: float
    attempt_id: str


@dataclass(frozen=True)
class NodesRefused:
    """The reservation did not come about; the queue decides anew."""

    at: float
    attempt_id: str
    why: str


@dataclass(frozen=True)
class InstancePrepared:
    at: float
    attempt_id: str
    instance: str
    facts: Facts


@dataclass(frozen=True)
class InstanceFailed:
    """An instance could not prepare itself or get through a stage."""

    at: float
    attempt_id: str
    instance: str
    reason: Reason
    message: str


@dataclass(frozen=True)
class StagePassed:
    at: float
    attempt_id: str
    instance: str
    stage: int


@dataclass(frozen=True)
class RunExited:
    """The start command of an instance ended."""

    at: float
    attempt_id: str
    instance: str
    ended: Ended


@dataclass(frozen=True)
class InstanceNoted:
    """Something about an instance that a person should know and that changes nothing (log shipping paused, …)."""

    at: float
    attempt_id: str
    instance: str
    message: str


@dataclass(frozen=True)
class InstanceClosed:
    """Nothing of the instance runs any more and what it wrote is with the archive (``unsaved`` bytes are not)."""

    at: float
    attempt_id: str
    instance: str
    unsaved: int = 0


@dataclass(frozen=True)
class InstanceLost:
    """The instance's actor or node is gone."""

    at: float
    attempt_id: str
    instance: str
    why: str


@dataclass(frozen=True)
class NodesReleased:
    at: float
    attempt_id: str


@dataclass(frozen=True)
class StopRequested:
    at: float
    why: str
    force: bool = False


@dataclass(frozen=True)
class TimePassed:
    """The clock reached ``deadline(job)``."""

    at: float


Report = InstancePrepared | InstanceFailed | StagePassed | RunExited | InstanceNoted | InstanceClosed
"""What instances report."""
JobEvent = (
    NodesChosen
    | PlacementDeferred
    | NodesReserved
    | NodesRefused
    | Report
    | InstanceLost
    | NodesReleased
    | StopRequested
    | TimePassed
)


# Commands: what the controller has to do. Each is idempotent by attempt and instance.


@dataclass(frozen=True)
class ReserveNodes:
    attempt_id: str


@dataclass(frozen=True)
class WatchInstance:
    """Tell when the instance's actor or node is gone."""

    attempt_id: str
    instance: str


@dataclass(frozen=True)
class PrepareInstance:
    attempt_id: str
    instance: str


@dataclass(frozen=True)
class CarryOutStage:
    attempt_id: str
    instance: str
    stage: int


@dataclass(frozen=True)
class StopInstance:
    """TERM, ``grace_s`` seconds, KILL; then ship what is left and report closed. Not commanded again for a better ``why``."""

    attempt_id: str
    instance: str
    grace_s: float
    why: str = field(compare=False)


@dataclass(frozen=True)
class ReleaseNodes:
    """Remove actors, placement group and, if ``last``, what the job keeps on its nodes between attempts."""

    attempt_id: str
    last: bool


Command = ReserveNodes | WatchInstance | PrepareInstance | CarryOutStage | StopInstance | ReleaseNodes


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
    changed = _DECIDERS[type(event)](job, event)
    while changed is not None:
        after, message = changed
        if message:
            notes.append(_note(after, event, message, about))
        about = None  # what follows by itself concerns the whole job
        changed = _settle(after, event.at)
    known = set(duties(job))
    return Step(after, tuple(command for command in duties(after) if command not in known), tuple(notes))


def resume(job: Job) -> tuple[Command, ...]:
    """Return everything that must be done for a job found in the store."""
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
            return None if limits.run_s is None else job.since + limits.run_s
        case JobState.STOPPING:
            if all(item.closed for item in job.instances):
                return None
            return job.since + (0.0 if job.forced else limits.grace_s) + STOP_SLACK_S
        case _:
            return None


def plan_of(job: Job) -> Plan:
    """Return the plan of the current attempt; raises PlanError while facts are missing."""
    return backends.make_plan(job.spec, job.brief, tuple(_known(item) for item in job.instances))


def info(job: Job, outputs: str | None = None) -> JobInfo:
    """Return the job as every surface shows it."""
    return JobInfo(
        id=job.id,
        name=job.spec.name or job.id,
        user=job.user,
        mode=job.spec.mode,
        state=job.state,
        reason=job.reason,
        attempt=job.attempt,
        exit_code=_job_exit_code(job),
        verdict=job.verdict,
        priority=job.spec.priority,
        submitted_at=job.submitted_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        instances=tuple(_instance_info(item) for item in job.instances),
        pending=job.pending,
        labels=job.spec.labels,
        cluster=job.cluster,
        outputs=outputs,
    )


# Deciders: one per kind of event; each returns the changed job and what to tell, or None when nothing changes.

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
    return _stop(job, event.at, verdict, because=f"{event.instance} failed")


def _passed(job: Job, event: StagePassed) -> Change:
    if job.state is not JobState.STARTING or event.stage <= job.instance(event.instance).passed:
        return None
    return _with(job, event.instance, passed=event.stage), None


def _exited(job: Job, event: RunExited) -> Change:
    instance = job.instance(event.instance)
    if instance.ended is not None or instance.state is InstanceState.LOST:
        return None
    ended = event.ended
    recorded = _with(job, event.instance, ended=ended, state=InstanceState.EXITED)
    told = f"{event.instance} {describe_end(ended)}"
    if job.state is JobState.STOPPING:
        return _blame_earlier(recorded, instance, ended), told
    if ended.ok:
        return recorded, told
    stopped, message = _stop(
        recorded, event.at, _verdict(instance, ended), because=f"{event.instance} failed"
    )
    return replace(stopped, failed_at=ended.at), message


def _noted(job: Job, event: InstanceNoted) -> Change:
    return job, f"{event.instance}: {event.message}"


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
    summary = job.verdict.summary if job.verdict else "every start command exited 0"
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
        return replace(job, forced=True, since=event.at), f"forced: {event.why}"
    return None


def _time_passed(job: Job, event: TimePassed) -> Change:
    limit = deadline(job)
    if limit is None or event.at < limit:
        return None
    match job.state:
        case JobState.PLACING:
            return _requeue(job, event.at, f"the nodes were not ready within {PLACING_S:g} s")
        case JobState.STOPPING if not job.forced:
            return replace(job, forced=True, since=event.at), "not ended in time: killing what is left"
        case JobState.STOPPING:
            return _give_up(job), "instances that do not answer are given up as lost"
        case _:
            verdict = _timeout_verdict(job)
            return _stop(job, event.at, verdict, because=verdict.summary)


_DECIDERS: dict[type, Callable[..., Change]] = {
    NodesChosen: _chosen,
    PlacementDeferred: _deferred,
    NodesReserved: _reserved,
    NodesRefused: _refused,
    InstancePrepared: _prepared,
    InstanceFailed: _failed,
    StagePassed: _passed,
    RunExited: _exited,
    InstanceNoted: _noted,
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
        case JobState.RUNNING if _decided(job):
            return _enter(replace(job, after=JobState.SUCCEEDED), JobState.STOPPING, Reason.COMPLETED, at), (
                "every start command that decides exited 0"
            )
        case _:
            return None


def _begin(job: Job, at: float) -> Change:
    try:
        plan = plan_of(job)
    except PlanError as error:
        return _stop(job, at, Verdict(reason=Reason.PLAN_FAILED, summary=str(error)), because=str(error))
    return _enter(job, JobState.STARTING, job.reason, at), f"prepared; stage: {plan.stages[0].name}"


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
    return _watches(job) + tuple(StopInstance(job.attempt_id, item.name, grace_s, why) for item in living)


def _known(item: Instance) -> Facts:
    if item.facts is None:
        raise PlanError(f"{item.name} has not reported its facts yet")
    return item.facts


def _blame_earlier(job: Job, instance: Instance, ended: Ended) -> Job:
    """Let the verdict name another instance if that one failed by itself before the one that reported first."""
    by_itself = not ended.ok and ended.sender is None and job.failed_at is not None
    if by_itself and job.failed_at is not None and ended.at < job.failed_at:
        verdict = _verdict(instance, ended)
        job = replace(job, verdict=verdict, reason=verdict.reason, failed_at=ended.at)
        return _mark_peers(_with(job, instance.name, note=None), because=f"{instance.name} failed")
    return job


def _mark_peers(job: Job, because: str) -> Job:
    """Say anew why those were stopped that were."""
    instances = tuple(
        replace(item, note=f"{STOPPED}{because}") if (item.note or "").startswith(STOPPED) else item
        for item in job.instances
    )
    return replace(job, instances=instances)


def _verdict(instance: Instance, ended: Ended) -> Verdict:
    return Verdict(
        reason=Reason.OUT_OF_MEMORY if ended.oom else Reason.INSTANCE_FAILED,
        summary=f"{instance.name} on {instance.node_name} {describe_end(ended)}",
        instance=instance.name,
        exit_code=ended.code,
        signal=ended.signal,
        signal_sender=ended.sender,
        rank=ended.cause.rank if ended.cause else None,
        rank_exit_code=ended.cause.exit_code if ended.cause else None,
        last_lines=ended.last_lines,
        hint=_hint(ended),
    )


def describe_end(ended: Ended) -> str:
    """Return how a start command ended, as the rest of a sentence that begins with its instance."""
    if ended.error is not None:
        never_ran = ended.signal is None
        return f"could not run its start command: {ended.error}" if never_ran else f"was ended: {ended.error}"
    if ended.signal is not None:
        text = f"was ended by signal {ended.signal}"
        text += f" ({ended.sender})" if ended.sender else " (not sent by raycontrol)"
    else:
        text = f"exited {ended.code}"
    if ended.cause is not None and ended.cause.rank is not None:
        text += f"; its launcher names rank {ended.cause.rank}{_rank_end(ended.cause.exit_code)}"
    return text + ("; the kernel killed a process for want of memory" if ended.oom else "")


def _rank_end(code: int | None) -> str:
    if code is None:
        return ""
    return f", signal {-code}" if code < 0 else f", exit code {code}"


def _hint(ended: Ended) -> str | None:
    if ended.oom:
        return "give the job more `resources.memory`, or let it use less"
    if ended.code == 127:
        return "the command was not found: is it installed in this environment, or in `working_dir`?"
    if ended.code == 126:
        return "the command is not executable: `chmod +x` it, or call its interpreter"
    if ended.code == 137 or (ended.signal == 9 and ended.sender is None):
        return "SIGKILL from outside: often the kernel's or the container's memory limit; see `dmesg` on the node"
    return None


def _timeout_verdict(job: Job) -> Verdict:
    limits = job.spec.timeouts
    match job.state:
        case JobState.QUEUED:
            why = f" ({job.pending})" if job.pending else ""
            return Verdict(
                reason=Reason.QUEUE_TIMEOUT, summary=f"not started within queue_s = {limits.queue_s:g} s{why}"
            )
        case JobState.RUNNING:
            return Verdict(reason=Reason.RUN_TIMEOUT, summary=f"ran longer than run_s = {limits.run_s:g} s")
        case _:
            preparing = job.state is JobState.PREPARING
            waiting = ", ".join(
                item.name
                for item in job.instances
                if (item.facts is None if preparing else item.passed < job.stage)
            )
            summary = f"{job.state} took too long; no word from {waiting}"
            return Verdict(reason=Reason.START_TIMEOUT, summary=summary)


def _job_exit_code(job: Job) -> int | None:
    if job.verdict is not None:
        return job.verdict.exit_code
    return 0 if job.reason is Reason.COMPLETED else None


def _instance_info(item: Instance) -> InstanceInfo:
    return InstanceInfo(
        name=item.name,
        group=item.group,
        role=item.role,
        index=item.index,
        node=item.node_name,
        ip=item.ip,
        state=item.state,
        exit_code=item.ended.code if item.ended else None,
        signal=item.ended.signal if item.ended else None,
        note=item.note,
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
