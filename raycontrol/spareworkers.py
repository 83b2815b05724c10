"""Fresh workers of Ray that wait on a node for its next instances.

A worker process takes the better part of a second of a core before it can become an actor, and Ray starts one when an actor is
wanted. The raylet starts some ahead of time if it is asked to (``PrestartWorkers`` in its ``node_manager.proto``), and takes
one of them for whatever actor comes next, with whatever resources. That is no promise of Ray's: where it is not to be had,
instances start as they do without.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from raycontrol import trees

log = logging.getLogger(__name__)

LOOK_S = 10.0
QUIET_S = 2.0
"""So long nothing must have begun or ended here: a worker that is being started takes a core, which a job that starts needs."""
TROUBLE_S = 600.0
ASK_S = 5.0
BEGIN_S, BEGIN_LOOK_S = 2.0, 0.05
KEPT_S = 3600
"""So long Ray lets a worker live for which there is nothing to do; then another one is asked for."""
WORKERS = (b"ray::IDLE", b"default_worker.py")
"""What the command line of a worker has in it that waits, or is on its way to."""


class SpareWorkers:
    """Keeps ``wanted`` of them on the node whose raylet serves at ``address`` and has this pid."""

    def __init__(
        self,
        address: str,
        raylet_pid: int,
        wanted: int,
        *,
        look_s: float = LOOK_S,
        quiet_s: float = QUIET_S,
        trouble_s: float = TROUBLE_S,
    ) -> None:
        self._look_s = look_s
        self._quiet_s = quiet_s
        self._trouble_s = trouble_s
        self._address = address
        self._raylet_pid = raylet_pid
        self._wanted = wanted
        self._disturbed = asyncio.Event()
        self._ours: set[int] = set()
        """The pids of those that were asked for here. Others wait, too: for the driver whose tasks they have run."""

    async def keep(self) -> None:
        """For ever: ask for those that are missing once it is quiet here, and look again from time to time."""
        wait_s = self._look_s
        while self._wanted:
            self._disturbed.clear()
            try:
                await asyncio.wait_for(self._disturbed.wait(), wait_s)
                wait_s = self._quiet_s
                continue
            except asyncio.TimeoutError:
                wait_s = self._look_s
            try:
                await asyncio.to_thread(self._top_up)
            except Exception as error:  # instances start all the same, only later
                log.warning("this Ray cannot be asked for spare workers, or starts none: %r", error)
                wait_s = self._trouble_s

    def disturb(self) -> None:
        """Say that an instance begins or has ended here."""
        self._disturbed.set()

    def _top_up(self) -> None:
        before = waiting_workers(self._raylet_pid)
        self._ours &= before
        missing = self._wanted - len(self._ours)
        if missing > 0:
            ask_for_workers(self._address, missing)
            self._ours |= self._begun(before, missing)

    def _begun(self, before: set[int], number: int) -> set[int]:
        """Return the workers that have been started since; raises RuntimeError where there are none: to ask again and again could
        make many of them once this Ray can.
        """
        deadline = time.monotonic() + BEGIN_S
        while len(new := waiting_workers(self._raylet_pid) - before) < number and time.monotonic() < deadline:
            time.sleep(BEGIN_LOOK_S)
        if not new:
            raise RuntimeError("it was asked, and has started none")
        return new


def ask_for_workers(address: str, number: int) -> None:
    """Have the raylet start so many workers; raises ImportError or grpc.RpcError where it cannot be asked."""
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc

    messages: Any = node_manager_pb2
    languages: Any = common_pb2
    asked = messages.PrestartWorkersRequest(
        language=languages.PYTHON, num_workers=number, keep_alive_duration_secs=KEPT_S
    )
    with init_grpc_channel(address) as channel:
        raylet = node_manager_pb2_grpc.NodeManagerServiceStub(channel)  # type: ignore[no-untyped-call]
        raylet.PrestartWorkers(asked, timeout=ASK_S)


def waiting_workers(raylet_pid: int) -> set[int]:
    """Return the pids of a raylet's workers that have nothing to do, or have just been started."""
    rows = (trees.row_of(pid) for pid in trees.all_pids())
    children = [row.pid for row in rows if row is not None and row.parent == raylet_pid]
    return {pid for pid in children if any(word in _command_line(pid) for word in WORKERS)}


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""
