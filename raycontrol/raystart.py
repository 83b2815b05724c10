"""How the Ray of this node was started, as its own processes say."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from raycontrol.hardware import RayStart
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
        command = _strings(folder / "cmdline")
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
    entries = _strings(folder / "environ")
    if entries is None:
        return None
    return {name: value for name, found, value in (entry.partition("=") for entry in entries) if found}


def _strings(path: Path) -> list[str] | None:
    """Return the strings of a file that ends each with a zero; None if it cannot be read: the process may just have ended."""
    try:
        return [os.fsdecode(text) for text in path.read_bytes().split(b"\0") if text]
    except OSError as error:
        log.debug("%s", error)
        return None
