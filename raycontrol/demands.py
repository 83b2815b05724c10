"""What the state of a job demands: what must be done or true now, and by when. Pure."""

from __future__ import annotations

from raycontrol.dependencies import open_conditions
from raycontrol.events import (
    CarryOutStage,
    Command,
    PrepareInstance,
    ReleaseNodes,
    ReserveNodes,
    StopInstance,
    WatchInstance,
)
from raycontrol.job import Instance, Job, plan_of
from raycontrol.parts import known_plan, left_early, works
from raycontrol.status import JobState

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


def duties(job: Job) -> tuple[Command, ...]:
    """Return what this state demands. An array has members, which are jobs themselves, and nothing else."""
    if job.is_array:
        return ()
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
    if job.is_array and job.state is not JobState.QUEUED:
        return None
    match job.state:
        case JobState.QUEUED:
            waits_for_nodes = job.held is None and not open_conditions(job)
            return (
                _waits_since(job) + limits.queue_s if limits.queue_s is not None and waits_for_nodes else None
            )
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
            if (left := left_early(job)) is not None:
                ends.append(left.until)
            return min(ends, default=None)
        case JobState.STOPPING:
            return _stopping_deadline(job)
        case _:
            return None


def due(job: Job, lag_s: float) -> float | None:
    """Return the deadline; where others have to act, counted from when they were told to: so much later than the event,
    because the store did not take it at once or there was no controller."""
    limit = deadline(job)
    waits_for_others = job.state not in (JobState.QUEUED, JobState.RUNNING)
    return limit if limit is None or not waits_for_others else limit + lag_s


def _waits_since(job: Job) -> float:
    """Return since when the job waits for nodes: not while its next attempt may not begin yet."""
    queued_at = job.submitted_at if job.queued_at is None else job.queued_at
    return queued_at if job.waits_until is None else max(queued_at, job.waits_until)


def _stopping_deadline(job: Job) -> float | None:
    if all(item.closed for item in job.instances):
        return job.kept_until
    if job.finish_by is not None:
        return job.finish_by
    if job.forced:
        return job.since + STOP_SLACK_S
    shipping = all(item.quiet for item in job.instances if not item.closed)
    graces = 2 if known_plan(job).servers else 1  # they are stopped when the others have ended
    return job.since + graces * job.spec.timeouts.grace_s + (SHIPPING_S if shipping else STOP_SLACK_S)


def _watches(job: Job) -> tuple[Command, ...]:
    return tuple(WatchInstance(job.attempt_id, item.name) for item in job.instances if not item.closed)


def _stopping_duties(job: Job) -> tuple[Command, ...]:
    living = [item for item in job.instances if not item.closed]
    if not living and job.kept_until is not None:
        return ()
    if not living:
        keep = job.after is JobState.PLACING
        return (ReleaseNodes(job.attempt_id, last=not keep and job.after is not JobState.QUEUED, keep=keep),)
    grace_s = 0.0 if job.forced else job.spec.timeouts.grace_s
    why = job.verdict.summary if job.verdict else "the job's work is done"
    return _watches(job) + tuple(
        StopInstance(job.attempt_id, item.name, grace_s, why) for item in _to_stop(job, living)
    )


def _to_stop(job: Job, living: list[Instance]) -> list[Instance]:
    """Return who has to end now: those that serve the others when these have ended, which may need them to save their work."""
    if job.forced:
        return living
    plan = known_plan(job)
    finishing = plan.finishers if job.finish_by is not None else frozenset[str]()
    clients = [item for item in living if item.name not in plan.servers and item.name not in finishing]
    held = finishing | (plan.servers if any(map(works, clients)) else frozenset())
    return [item for item in living if item.name not in held or not works(item)]
