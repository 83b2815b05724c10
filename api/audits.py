"""Entries of the audit on their way to the store: what it does not take now is kept, and brought again."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from raycontrol.access import AuditEntry
from raycontrol.api.calls import Calls
from raycontrol.api.visits import for_nobody

log = logging.getLogger(__name__)

MOST_KEPT = 10_000


class Audits:
    """Tries again every ``retry_s``, with as many entries as it may keep; of the others the log tells."""

    def __init__(self, calls: Calls, retry_s: float) -> None:
        self._calls = calls
        self._retry_s = retry_s
        self._kept: deque[AuditEntry] = deque()
        self._bringing: asyncio.Task[None] | None = None

    async def add(self, entry: AuditEntry) -> None:
        """Return when the entry is stored, or kept until it can be."""
        try:
            await self._store(entry)
        except Exception:  # whatever it is: what was done is done, and has to be answered
            self._keep(entry)

    def close(self) -> None:
        """Give up what is still kept."""
        if self._bringing is not None:
            self._bringing.cancel()
        for entry in self._kept:
            log.error("not in the audit: %s", entry)

    def _keep(self, entry: AuditEntry) -> None:
        if len(self._kept) >= MOST_KEPT:
            log.exception("not in the audit: %s", entry)
            return
        log.exception("not in the audit yet: %s", entry)
        self._kept.append(entry)
        if self._bringing is None or self._bringing.done():
            self._bringing = for_nobody(self._bring())

    async def _bring(self) -> None:
        while self._kept:
            try:
                await self._store(self._kept[0])
            except Exception as error:  # the next time may do
                log.warning("%d entries wait for the audit: %s", len(self._kept), error)
                await asyncio.sleep(self._retry_s)
            else:
                self._kept.popleft()

    async def _store(self, entry: AuditEntry) -> None:
        await self._calls.record(lambda door: door.audit(entry))
