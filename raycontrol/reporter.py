"""What an instance reports: kept, and sent again, until the controller has stored it."""

from __future__ import annotations

import asyncio
import logging
import time

from raycontrol.background import Background
from raycontrol.events import InstanceFailed, InstanceNoted, Report, WorldBroken, WorldFailed
from raycontrol.links import Identity, Links
from raycontrol.status import Reason

log = logging.getLogger(__name__)

RETRY_S = 0.2
REPORT_RETRY_MAX_S = 5.0


class Reporter:
    """Sends the reports of one instance in their order."""

    def __init__(self, identity: Identity, links: Links, background: Background) -> None:
        self._identity = identity
        self._links = links
        self._background = background
        self._unsent: list[Report] = []
        self._news = asyncio.Event()
        self._sending: asyncio.Future[None] | None = None

    def report(self, report: Report) -> None:
        """Queue a report; it is kept until the controller has stored it."""
        self._unsent.append(report)
        self._news.set()
        self._sending = self._sending or self._background.start(self._send())

    def tell(self, message: str) -> None:
        """Report something that a person should know."""
        me = self._identity
        self.report(InstanceNoted(time.time(), me.attempt_id, me.instance, storable(message)))

    def fail(self, reason: Reason, message: str) -> None:
        """Report that this instance cannot go on."""
        me = self._identity
        self.report(InstanceFailed(time.time(), me.attempt_id, me.instance, reason, storable(message)))

    def world_broken(self, world: str, message: str, at: float | None = None) -> None:
        """Report that a part of an MPI world ended abnormally here; ``world`` is its number, if that is known."""
        me = self._identity
        number = int(world) if world.isdecimal() else None
        when = time.time() if at is None else at
        self.report(WorldBroken(when, me.attempt_id, me.instance, storable(message), number))

    def world_ended(self, call: int, status: int) -> None:
        """Report a world whose launcher exited with another code than 0."""
        me = self._identity
        if status != 0:
            self.report(WorldFailed(time.time(), me.attempt_id, me.instance, call))

    async def _send(self) -> None:
        pause_s = RETRY_S
        while True:
            await self._news.wait()
            batch = tuple(self._unsent)
            try:
                await self._links.report(time.time(), batch)
            except Exception:  # the controller restarts; what it has not stored is sent again
                log.warning("reporting failed, trying again in %.1f s", pause_s, exc_info=True)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, REPORT_RETRY_MAX_S)
                continue
            pause_s = RETRY_S
            del self._unsent[: len(batch)]
            if not self._unsent:
                self._news.clear()


def storable(text: str) -> str:
    """Return the text with what is not Unicode (parts of file names) written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
