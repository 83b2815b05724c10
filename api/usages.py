"""What jobs' instances used, from the files on the head; links are not followed, like those of logs."""

from __future__ import annotations

from pathlib import Path

from raycontrol.api.files import is_own, read_end
from raycontrol.disk import matching
from raycontrol.hardware import InstanceUsage
from raycontrol.logs import JobFolder
from raycontrol.samples import last_in, window_bytes

SAMPLES_MAX = 10_000
"""In one answer; of more instances than this there is one sample each."""
SUFFIX = ".jsonl"


def last_samples(home: Path, job_id: str, attempt: int, count: int) -> dict[str, tuple[InstanceUsage, ...]]:
    """Return the last ``count`` samples of each instance, or fewer of many, oldest first; who has none is not in it."""
    folder = JobFolder(home, job_id)
    usages = folder.usages(attempt)
    names = _names(usages) if is_own(home, folder.root, usages) else []
    each = min(count, max(1, SAMPLES_MAX // max(1, len(names))))
    found = {name: _last(usages / f"{name}{SUFFIX}", each) for name in names}
    return {name: samples for name, samples in found.items() if samples}


def _names(folder: Path) -> list[str]:
    names = (path.name for path in matching(folder, f"[!.]*{SUFFIX}"))
    return sorted(name.removesuffix(SUFFIX) for name in names)


def _last(path: Path, count: int) -> tuple[InstanceUsage, ...]:
    return last_in(read_end(path, window_bytes(count)), count)
