"""Rows and notes for the tests of the store, with everything that a test does not care about filled in."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from raycontrol.status import JobState, Note, Reason
from raycontrol.store import JobRow

REPOSITORY = Path(__file__).parents[2]

_ROW = JobRow(
    id="digits-1",
    cluster="10.0.0.1:6379",
    name="digits",
    user="ann",
    mode="ddp",
    state=JobState.QUEUED,
    priority=5,
    submitted_at=1000.0,
    ended_at=None,
    doc="{}",
)
_NOTE = Note(
    at=1000.0,
    kind="JobSubmitted",
    state=JobState.QUEUED,
    reason=Reason.SUBMITTED,
    attempt=0,
    message="submitted by ann",
)


def row(job_id: str = "digits-1", **values: Any) -> JobRow:
    return replace(_ROW, id=job_id, **values)


def note(message: str = "submitted by ann", **values: Any) -> Note:
    return _NOTE.model_copy(update={"message": message, **values})


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Another Python process, at the top of the checkout, that runs ``code``."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
