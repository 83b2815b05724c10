"""Which finished jobs are removed to keep the archive within its limits. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raycontrol.arrayspec import array_of
from raycontrol.status import JobInfo

DAY_S = 86_400.0


@dataclass(frozen=True)
class Limits:
    """What finished jobs may keep: for how long, and how much together."""

    keep_days: float = 30
    keep_gib: float = 50


def expired(
    jobs: Sequence[JobInfo], sizes: Mapping[str, int], now: float, keep_days: float, keep_gib: float
) -> list[str]:
    """Return the ids of finished jobs to remove: those that ended over ``keep_days`` ago, then the oldest of the
    rest until what finished jobs keep is within ``keep_gib``. ``sizes`` is in bytes by job id. An abandoned job
    counts as finished when it was submitted.
    """
    sizes = _by_array(sizes)
    finished = sorted((job for job in jobs if job.ended_at is not None or job.abandoned), key=_end)
    kept = sum(sizes.get(job.id, 0) for job in finished)
    doomed = []
    for job in finished:
        too_old = now - _end(job) > keep_days * DAY_S
        if too_old or kept > keep_gib * 2**30:
            doomed.append(job.id)
            kept -= sizes.get(job.id, 0)
    return doomed


def _by_array(sizes: Mapping[str, int]) -> Counter[str]:
    """Count what the members of an array keep as their array's."""
    together: Counter[str] = Counter()
    for job_id, size in sizes.items():
        together[array_of(job_id) or job_id] += size
    return together


def _end(job: JobInfo) -> float:
    return job.submitted_at if job.ended_at is None else job.ended_at
