"""What all routes of a server share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fastapi import Request

from raycontrol.api.calls import Calls
from raycontrol.api.limits import Buckets, Limits
from raycontrol.api.shares import Shares
from raycontrol.api.uploads import Uploads
from raycontrol.readers import ServerDoor

if TYPE_CHECKING:
    from raycontrol.api.answers import Answers
    from raycontrol.api.audits import Audits
    from raycontrol.api.guards import Authenticator
    from raycontrol.api.listings import Listing
    from raycontrol.api.measures import Measures
    from raycontrol.api.watchers import Watchers
    from raycontrol.status import JobInfo

T = TypeVar("T")


@dataclass(frozen=True)
class Hub:
    """``home`` is RAYCONTROL_HOME on the head; ``package_cap_bytes`` limits an upload.

    ``glances`` are jobs that are looked at in passing, ``listings`` pages of the list, ``sizes`` the bytes
    that each job keeps. ``refusals`` are those of each token that the audit still takes, ``execs`` the commands across nodes that it has running.
    """

    home: Path
    calls: Calls
    authenticator: Authenticator
    glances: Answers[str, JobInfo]
    listings: Answers[Listing, bytes]
    sizes: Answers[None, dict[str, int]]
    watchers: Watchers
    measures: Measures
    limits: Limits
    package_cap_bytes: int
    audits: Audits
    refusals: Buckets
    uploads: Uploads
    execs: Shares

    async def change(self, work: Callable[[ServerDoor], T]) -> T:
        """Have something changed. Who asks after that is shown it, also where nobody can say that it was done."""
        try:
            return await self.calls.change(work)
        finally:
            self.glances.forget()
            self.listings.forget()


def hub_of(request: Request) -> Hub:
    hub: Hub = request.app.state.hub
    return hub
