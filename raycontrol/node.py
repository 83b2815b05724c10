"""One node of the cluster: package cache, folders of jobs, port leases, and the sweep of processes nobody supervises.

A plain class; ``cluster`` makes a detached actor of it, one per Ray node.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from raycontrol import nodefacts, process
from raycontrol.disk import remove_tree
from raycontrol.packages import PackageCache

log = logging.getLogger(__name__)

SWEEP_S = 10.0
KEPT_PACKAGES = 8

ReadPackage = Callable[[str, int, int], Awaitable[bytes]]


class Node:
    """What instances and the controller need of a node. ``read_package`` fetches bytes of a package from the archive."""

    def __init__(self, scratch: str, read_package: ReadPackage) -> None:
        self._scratch = Path(scratch)
        self._jobs = self._scratch / "jobs"
        self._jobs.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._cache = PackageCache(self._scratch / "packages")
        self._read_package = read_package
        self._ledger = self._scratch / "ports.json"
        self._ports: dict[str, int] = json.loads(self._ledger.read_text()) if self._ledger.exists() else {}
        self._recent_packages: dict[str, None] = {}

    async def facts(self) -> dict[str, object]:
        """Return what this node is, for people."""
        return nodefacts.summary(self._scratch)

    async def code_dir(self, job_id: str, package: str | None) -> str:
        """Return the job's code folder on this node, made on the first call: a writable copy of the package, or empty."""
        if package is not None:
            self._recent_packages.pop(package, None)
            self._recent_packages[package] = None
            await self._cache.ensure(package, self._read_package)
        target = self._jobs / job_id / "code"
        await self._cache.make_code_dir(package, target)
        return str(target)

    async def lease_port(self, attempt_id: str, purpose: str) -> int:
        """Return a port that no other attempt is given; the same one for the same attempt and purpose."""
        key = f"{attempt_id} {purpose}"
        if key not in self._ports:
            self._ports[key] = nodefacts.free_port(set(self._ports.values()))
            self._write_ledger()
        return self._ports[key]

    async def release(self, job_id: str, attempt_id: str, last: bool) -> None:
        """End what is left of an attempt here, give its ports back and, if ``last``, remove the job's folder."""
        await asyncio.to_thread(process.sweep, attempt_id)
        self._ports = {key: port for key, port in self._ports.items() if not key.startswith(f"{attempt_id} ")}
        self._write_ledger()
        if last:
            await asyncio.to_thread(remove_tree, self._jobs / job_id)
            await self._cache.remove(keep=set(list(self._recent_packages)[-KEPT_PACKAGES:]))

    async def keep_clean(self) -> None:
        """For ever: kill processes of this node's attempts whose supervisor is gone (it was itself killed)."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for folder in self._jobs.glob("*/runs/*"):
                try:
                    killed = await asyncio.to_thread(process.sweep, folder.name)
                except OSError:
                    log.exception("sweeping %s", folder.name)
                else:
                    if killed:
                        log.warning("killed %d processes of %s that nobody supervised", killed, folder.name)

    def _write_ledger(self) -> None:
        fresh = self._ledger.with_suffix(".new")
        fresh.write_text(json.dumps(self._ports))
        fresh.replace(self._ledger)
