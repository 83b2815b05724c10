"""How a job comes to STOPPING, and how news that comes later changes where that leads and whom its verdict blames. Pure."""

from __future__ import annotations

from dataclasses import replace

from raycontrol import verdicts
from raycontrol.events import ServiceEnded
from raycontrol.job import Broken, Ended, Instance, Job
from raycontrol.parts import Left, code_of_deciders, decided, known_plan, left_early, still_finishing
from raycontrol.retries import ENDS
from raycontrol.status import InstanceState, JobState, Reason, Verdict

Change = tuple[Job, str | None] | None
"""What an event makes of a job, and what to tell; None: nothing."""

DECIDED = "every start command that decides exited 0"
"""What is told of an attempt that has succeeded, as it mostly does."""
STOPPED = "stopped: "
"""How the note of an instance begins that was stopped because of something else."""


def stop(job: Job, at: float, verdict: Verdict, because: str) -> tuple[Job, str]:
    """Enter STOPPING, towards where the verdict's reason leads. While PLACING nothing runs yet."""
    nothing_runs = job.state is JobState.PLACING
    state = InstanceState.EXITED if nothing_runs else InstanceState.STOPPING
    instances = tuple(
        item
        if item.state.ended
        else replace(item, state=state, closed=nothing_runs, note=f"{STOPPED}{because}")
        for item in job.instances
    )
    stopping = replace(job, instances=instances).entered(JobState.STOPPING, verdict.reason, at)
    return replace(
        stopping, after=ENDS[verdict.reason].after, verdict=verdict, pending=None
    ), f"stopping: {verdict.summary}"


def stop_broken(job: Job, fault: Broken, at: float) -> tuple[Job, str]:
    return stop(job, at, verdicts.broken_world(fault), because=f"{fault.instance}: {fault.message}")


def stop_left(job: Job, left: Left, at: float) -> tuple[Job, str]:
    verdict = verdicts.left_early(left.instance, left.ended)
    stopped, message = stop(job, at, verdict, because=f"{left.instance.name} left early")
    return replace(stopped, failed_at=left.ended.at), message


def succeed(job: Job, at: float) -> tuple[Job, str]:
    """Enter STOPPING as a success; those that may finish get their time."""
    job = replace(job, succeeded_with=code_of_deciders(job))
    told = success_of(job)
    stopping = replace(job, after=JobState.SUCCEEDED).entered(JobState.STOPPING, Reason.COMPLETED, at)
    finish_s = known_plan(job).finish_s
    finishing = ", ".join(item.name for item in still_finishing(job))
    if not finishing or finish_s == 0:
        return stopping, told
    run_s = job.spec.timeouts.run_s
    finish_by = min(at + finish_s, at + finish_s if run_s is None else job.since + run_s)
    told = f"{told}; {finishing} may go on for {finish_by - at:.0f} s"
    return replace(stopping, finish_by=finish_by), told


def success_of(job: Job) -> str:
    """Return what is told of an attempt that has succeeded."""
    if not job.succeeded_with:
        return DECIDED
    return f"every start command that decides exited with a valid code ({job.succeeded_with})"


def requeue(job: Job, at: float, why: str) -> tuple[Job, str]:
    """Give the reservation back; nothing has run on it."""
    instances = tuple(replace(item, closed=True, state=InstanceState.EXITED) for item in job.instances)
    stopping = replace(job, instances=instances).entered(JobState.STOPPING, Reason.PLACEMENT_LOST, at)
    return replace(
        stopping, after=JobState.QUEUED
    ), f"the reservation did not come about ({why}); trying again"


def fail_late(job: Job, verdict: Verdict) -> Job:
    """Let a job fail that is ending as a success: it has not ended yet."""
    return replace(job, after=JobState.FAILED, reason=verdict.reason, verdict=verdict)


def acquit(job: Job) -> Job:
    """Let a job succeed after all that failed because of a server that left early, when all deciders had ended in time:
    news of them waits while the controller is away.
    """
    left = left_early(job)
    if left is None or job.verdict != verdicts.left_early(left.instance, left.ended) or not decided(job):
        return job
    deciders = known_plan(job).deciders
    ends = [item.ended.at for item in job.instances if item.name in deciders and item.ended is not None]
    if max(ends) >= left.until:
        return job
    code = code_of_deciders(job)
    job = replace(job, after=JobState.SUCCEEDED, reason=Reason.COMPLETED, succeeded_with=code)
    return replace(job, verdict=None, failed_at=None)


def give_up(job: Job) -> Job:
    instances = tuple(
        item
        if item.closed
        else replace(item, closed=True, state=InstanceState.LOST, note="did not answer when it was stopped")
        for item in job.instances
    )
    return replace(job, instances=instances)


def blame_earlier(job: Job, instance: Instance, ended: Ended) -> Job:
    """Let the verdict name another instance if that one failed by itself before the one that reported first, or led it."""
    if job.ok(ended) or ended.followed or job.failed_at is None:
        return job
    if ended.sender is not None:
        return _blame_leader(job, instance, ended) if instance.index == 0 and _blames_a_follower(job) else job
    if ended.at >= job.failed_at and not _blames_a_follower(job):
        return job
    verdict = verdicts.failure(job, instance, ended)
    job = replace(job, verdict=verdict, reason=verdict.reason, failed_at=ended.at)
    return _mark_peers(job.with_instance(instance.name, note=None), because=f"{instance.name} failed")


def _blame_leader(job: Job, instance: Instance, ended: Ended) -> Job:
    """A launcher that was stopped before it could tell how the world that it led had ended: those that followed it have told."""
    assert job.verdict is not None, "a follower is blamed"
    follower, code = job.verdict.instance, job.verdict.exit_code
    told = (
        f"{instance.name} on {instance.node_name} led a world that ended with {code}, as {follower} has told"
    )
    lines = ended.last_lines or job.verdict.last_lines
    verdict = job.verdict.model_copy(update={"instance": instance.name, "summary": told, "last_lines": lines})
    job = replace(job, verdict=verdict)
    return _mark_peers(job.with_instance(instance.name, note=None), because=f"{instance.name} failed")


def blame_service(job: Job, event: ServiceEnded, told: str) -> Job:
    """Let the verdict name a service that ended by itself before the start command failed."""
    if event.ended.sender is not None or job.failed_at is None or event.ended.at >= job.failed_at:
        return job
    instance = job.instance(event.instance)
    verdict = verdicts.service_failure(instance, event.run, event.ended)
    job = replace(job, verdict=verdict, reason=verdict.reason, failed_at=event.ended.at)
    return _mark_peers(job.with_instance(instance.name, note=told), because=f"{instance.name} failed")


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
