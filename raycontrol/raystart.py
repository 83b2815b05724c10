"""How the Ray of this node was started, as its own processes say."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from raycontrol.hardware import RayStart
from raycontrol.nodeenv import started_with
from raycontrol.raysettings import STORAGE, known
from raycontrol.sysfiles import matching

log = logging.getLogger(__name__)

PROC = Path("/proc")
GCS_PROGRAM = "gcs_server"


def ray_start(raylet_pid: int, node_id: str, proc: Path = PROC) -> RayStart | None:
    """Return what the raylet, and the GCS of the same node if there is one, have in their environments; None if that cannot be read."""
    raylet = _environment(proc / str(raylet_pid))
    if raylet is None:
        return None
    for folder in (proc / pid for pid in matching(proc, r"\d+")):
        command = _command(folder)
        if command and _is_gcs_of(node_id, command) and (gcs := _environment(folder)) is not None:
            return RayStart(raylet=known(raylet), gcs=known(gcs), storage=_storage(command, gcs))
    return RayStart(raylet=known(raylet))


def _is_gcs_of(node_id: str, command: list[str]) -> bool:
    """Whether it is this node's: a machine may run more than one Ray, those of jobs among them."""
    return Path(command[0]).name == GCS_PROGRAM and f"--node-id={node_id}" in command


def _storage(command: list[str], environment: dict[str, str]) -> str:
    chosen = environment.get(STORAGE)
    if chosen:
        return chosen
    return "redis" if any(word.startswith("--redis_address=") for word in command) else "memory"


def _environment(folder: Path) -> dict[str, str] | None:
    """Return a process's environment; None if it cannot be read: it may just have ended, or be another user's."""
    try:
        return started_with(folder)
    except OSError as error:
        log.debug("%s", error)
        return None


def _command(folder: Path) -> list[str]:
    try:
        return [os.fsdecode(word) for word in (folder / "cmdline").read_bytes().split(b"\0") if word]
    except OSError:
        return []
