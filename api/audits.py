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
    """Tries again every ``retry_s``, with as many entries as it may keep; of the others the log tells.

    No answer waits for its entry longer than ``wait_s``.
    """

    def __init__(self, calls: Calls, retry_s: float, wait_s: float) -> None:
        self._calls = calls
        self._retry_s = retry_s
        self._wait_s = wait_s
        self._on_the_way: dict[asyncio.Task[None], AuditEntry] = {}
        self._kept: deque[AuditEntry] = deque()
        self._bringing: asyncio.Task[None] | None = None

    async def add(self, entry: AuditEntry) -> None:
        """Return when the entry is stored, or kept until it can be, or has been on its way for too long.

        It goes on its way also when who waits here is cancelled: what was done is done.
        """
        if len(self._on_the_way) >= MOST_KEPT:
            log.error("not in the audit: %s", entry)
            return
        storing = for_nobody(self._store_or_keep(entry))
        self._on_the_way[storing] = entry
        storing.add_done_callback(self._on_the_way.pop)
        await asyncio.wait({storing}, timeout=self._wait_s)

    def close(self) -> None:
        """Give up what is still kept, or on its way."""
        for storing, entry in self._on_the_way.items():
            storing.cancel()
            log.error("perhaps not in the audit: %s", entry)
        if self._bringing is not None:
            self._bringing.cancel()
        for entry in self._kept:
            log.error("not in the audit: %s", entry)

    async def _store_or_keep(self, entry: AuditEntry) -> None:
        try:
            await self._store(entry)
        except Exception:  # whatever it is: what was done has been answered, or will be
            self._keep(entry)

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
