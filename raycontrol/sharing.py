"""Whether nodes share the folder that the settings name: proved for every node before a job's outputs go there, not believed.

Head and node each leave a file that the other has to find. What every node shares with the head, all share. What was
found holds for a minute: a folder may be mounted, and unmounted, at any time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from raycontrol.errors import RaycontrolError
from raycontrol.sharedprobe import Probed

log = logging.getLogger(__name__)

PROVE_S = 15.0
FIND_S = 5.0
"""A network file system may show a new file elsewhere only after a while."""
RETRY_S = 0.2
HOLDS_S = 60.0
"""A node whose proof is older is asked again: somebody may have mounted the folder meanwhile, or it may have gone."""


class Prober(Protocol):
    """What is needed of the cluster."""

    async def head_id(self) -> str: ...

    async def probe_shared(self, node_id: str, act: str, folder: str, name: str, text: str) -> Probed:
        """``sharedprobe.probe`` on a node."""


class NotShared(RaycontrolError):
    """A node does not have the shared folder as the head has it."""


@dataclass(frozen=True)
class Found:
    """What was proved of a node: ``fault`` says why it does not share ``folder``, None: it does. ``at`` is monotonic."""

    folder: str
    fault: str | None
    at: float


class Sharing:
    """``folder`` returns what the settings name now, None for nothing; ``clock`` is monotonic."""

    def __init__(
        self, cluster: Prober, folder: Callable[[], str | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._folder = folder
        self._clock = clock
        self._found: dict[str, Found] = {}
        self._shared: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}

    @property
    def wanted(self) -> bool:
        """Whether a folder is to be shared."""
        return self._folder() is not None

    async def of(self, node_id: str, node_name: str, *, anew: bool = False) -> Found | None:
        """Return what is known of a node, or found out now (``anew``: in any case); None where nothing is to be shared."""
        folder = self._folder()
        if folder is None:
            return None
        async with self._locks.setdefault(node_id, asyncio.Lock()):
            known = self._found.get(node_id)
            if known is None or anew or known.folder != folder or self._clock() - known.at > HOLDS_S:
                known = Found(folder, await self._fault(node_id, node_name, folder), self._clock())
                self._found[node_id] = known
                if known.fault is not None:
                    log.error("%s", known.fault)
            return known

    async def _fault(self, node_id: str, node_name: str, folder: str) -> str | None:
        try:
            await asyncio.wait_for(self._prove(node_id, node_name, folder), PROVE_S)
        except NotShared as fault:
            return f"shared_dir {folder} is not shared by {node_name}: {fault}"
        except asyncio.TimeoutError:
            return f"shared_dir {folder} is not shared by {node_name}: no answer within {PROVE_S:g} s, as of a dead file server"
        except Exception as error:  # a node that cannot be asked is not proved
            log.warning("proving the shared folder on %s", node_name, exc_info=True)
            return f"shared_dir {folder} is not proved on {node_name}: {type(error).__name__}: {error}"
        return None

    async def _prove(self, node_id: str, node_name: str, folder: str) -> None:
        head = await self._cluster.head_id()
        # What has been shared once has the folder of probes: where that is missing now, so is the mount.
        act = "leave" if folder in self._shared else "begin"
        await self._carry(act, head, "the head", node_id, node_name, folder)
        if node_id != head:
            await self._carry("leave", node_id, node_name, head, "the head", folder)
            self._shared.add(folder)

    async def _carry(
        self, act: str, writer: str, writer_name: str, reader: str, reader_name: str, folder: str
    ) -> None:
        """What the one leaves the other has to find; raises NotShared."""
        name, text = secrets.token_hex(8), secrets.token_hex(16)
        try:
            left = await self._cluster.probe_shared(writer, act, folder, name, text)
            if left.fault is not None:
                raise NotShared(f"{writer_name} (uid {left.uid}) cannot write there: {left.fault}")
            found = await self._sought(reader, folder, name)
        finally:
            await self._cluster.probe_shared(writer, "drop", folder, name, "")
        if found.text != text:
            raise NotShared(
                f"what {writer_name} (uid {left.uid}) wrote, {reader_name} (uid {found.uid}) does not find there: "
                f"{found.fault or 'it has other contents'}"
            )

    async def _sought(self, reader: str, folder: str, name: str) -> Probed:
        deadline = time.monotonic() + FIND_S
        while True:
            found = await self._cluster.probe_shared(reader, "find", folder, name, "")
            if found.fault is None or time.monotonic() > deadline:
                return found
            await asyncio.sleep(RETRY_S)
