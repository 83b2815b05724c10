"""The store in the hands of a cluster's controller: opened, its lease taken and renewed, asked on one thread."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from raycontrol.errors import StoreError, StoreOwned
from raycontrol.store import Lease, Store

log = logging.getLogger(__name__)

LEASE_BEAT_S = 5.0

T = TypeVar("T")


class HeldStore:
    """``take`` comes first. The thread takes one question after the other, and no loop waits for the disk."""

    def __init__(self, home: Path, cluster: str, clock: Callable[[], float]) -> None:
        self._home = home
        self._cluster = cluster
        self._clock = clock
        self._store: Store | None = None
        self._lease: Lease | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    @property
    def lease(self) -> Lease:
        assert self._lease is not None, "take() comes first"
        return self._lease

    async def take(self) -> None:
        """Open the store and take the lease; raises StoreError (StoreOwned when another controller holds it)."""
        if self._store is None:
            self._store = await self._in_thread(lambda: Store(self._home))
        if self._lease is None:  # a start that failed after this point holds it already
            self._lease = await self.ask(
                lambda store: store.acquire(self._cluster, socket.gethostname(), os.getpid(), self._clock())
            )

    async def ask(self, work: Callable[[Store], T]) -> T:
        """Return what ``work`` finds or writes in the store."""
        store = self._store
        assert store is not None, "take() comes first"
        return await self._in_thread(lambda: work(store))

    async def renew(self) -> None:
        """Write that this controller lives; raises StoreError."""
        await self.ask(lambda store: store.heartbeat(self.lease, self._clock()))

    async def hold(self) -> None:
        """Renew the lease for ever. When another controller has it, this process ends."""
        while True:
            try:
                await self.renew()
            except StoreOwned:
                log.critical("another controller has taken this cluster's jobs over; ending")
                os._exit(1)
            except StoreError:
                log.exception("the lease could not be renewed; trying again")
            await asyncio.sleep(LEASE_BEAT_S)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
