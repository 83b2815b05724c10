"""Words for jobs on the session's Ray: what a test submits, waits for and looks at."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil

from raycontrol import JobSpec
from raycontrol.client import JobHandle
from raycontrol.logs import JobFolder
from raycontrol.status import JobInfo, JobState
from tests.ray.conftest import LocalRay
from tests.support import wait_until

PYTHON = sys.executable
WAIT_S = 120.0
"""A deadline, not an expectation: on a busy machine everything takes its time."""

SAY_AND_SLEEP = "echo pid $$; exec sleep 600"


def spec(command: str | tuple[str, ...], **fields: Any) -> JobSpec:
    """A small job: a tenth of a CPU for each instance."""
    return JobSpec(command=command, **{"resources": {"cpu": 0.1}, **fields})


def python(program: str, **fields: Any) -> JobSpec:
    """A job that runs Python code."""
    return spec((PYTHON, "-c", program), **fields)


def ended(job: JobHandle) -> JobInfo:
    return job.wait(timeout_s=WAIT_S)


def lines(job: JobHandle) -> list[str]:
    return list(job.logs(prefix=False))


def kinds(job: JobHandle) -> list[str]:
    return [event.kind for event in job.events()]


def log_file(cluster: LocalRay, job: JobHandle, instance: str = "master-0") -> Path:
    return JobFolder(cluster.home, job.id).log(instance, 0)


def said(job: JobHandle, word: str) -> str:
    """Wait until the job has written a line ``word VALUE``, and return the value."""

    def found() -> str | None:
        values = [line.partition(" ")[2] for line in lines(job) if line.startswith(f"{word} ")]
        return values[0] if values else None

    value = wait_until(found, WAIT_S, f"{job.id} says {word!r}")
    assert value is not None
    return value


def reaches(job: JobHandle, state: JobState) -> None:
    wait_until(lambda: job.info().state is state, WAIT_S, f"{job.id} is {state}")


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
