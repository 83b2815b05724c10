"""A failed job keeps its nodes for a look inside: whether, until when, and how that ends. Pure.

All its processes are gone then and what it wrote is with the archive; its instances only stay, so that a shell can be opened
in them.
"""

from __future__ import annotations

from dataclasses import replace

from raycontrol.job import Instance, Job
from raycontrol.status import InstanceState, JobState
from raycontrol.stopping import Change


def is_due(job: Job) -> bool:
    """Whether the job has just ended as a failure for good and is to be kept; one that was asked to stop is not."""
    ended = job.state is JobState.STOPPING and job.after is JobState.FAILED
    wanted = job.spec.timeouts.keep_failed_s > 0 and not job.unwanted
    return ended and wanted and job.kept_until is None and not job.was_kept and _has_somebody(job)


def begun(job: Job, at: float) -> Change:
    seconds = job.spec.timeouts.keep_failed_s
    told = f"its nodes are kept for {seconds:g} s for a look inside (`raycontrol shell {job.id}`)"
    return replace(job, kept_until=at + seconds), told


def over(job: Job, why: str) -> Change:
    return replace(job, kept_until=None, was_kept=True), f"its nodes are let go: {why}"


def can_be_entered(item: Instance) -> bool:
    """Whether a shell can be opened in an instance that has ended: it had come so far that runs could begin there."""
    equipped = item.passed >= 0 or item.ended is not None
    return equipped and item.state is not InstanceState.LOST


def _has_somebody(job: Job) -> bool:
    return all(item.closed for item in job.instances) and any(map(can_be_entered, job.instances))
