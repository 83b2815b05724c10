"""What jobs' instances used, from the files on the head."""

from __future__ import annotations

from pathlib import Path

from raycontrol.hardware import InstanceUsage
from raycontrol.logs import JobFolder, jobs_folder
from raycontrol.samples import last_of_each

SAMPLES_MAX = 10_000
"""In one answer; of more instances than this there is one sample each."""


def last_samples(home: Path, job_id: str, attempt: int, count: int) -> dict[str, tuple[InstanceUsage, ...]]:
    """Return the last ``count`` samples of each instance, or fewer of many, oldest first; who has none is not in it."""
    return last_of_each(jobs_folder(home), JobFolder(home, job_id).usages(attempt), count, SAMPLES_MAX)
