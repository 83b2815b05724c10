"""Pages of the list of jobs, as they are sent: to make one takes more than to send it to everybody who asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from raycontrol.api.models import JobPage
from raycontrol.cursors import cursor_after
from raycontrol.readers import ServerDoor
from raycontrol.status import JobState

KEPT = 64


@dataclass(frozen=True)
class Listing:
    """All that decides what is on a page: whose jobs (None: everybody's), which of them, how many, and before which place."""

    states: tuple[JobState, ...]
    user: str | None
    labels: tuple[tuple[str, str], ...]
    text: str | None
    limit: int
    before: tuple[float, str] | None


NO_JOBS = JobPage(jobs=[]).model_dump_json().encode()


def page(door: ServerDoor, wanted: Listing) -> bytes:
    """Return the page as JSON, newest job first."""
    found = door.jobs(
        wanted.states or None,
        wanted.user,
        wanted.limit + 1,
        labels=dict(wanted.labels) or None,
        text=wanted.text,
        before=wanted.before,
    )
    jobs = found[: wanted.limit]
    last = (jobs[-1].submitted_at, jobs[-1].id) if len(found) > wanted.limit else None
    return JobPage(jobs=jobs, next=None if last is None else cursor_after(last)).model_dump_json().encode()
