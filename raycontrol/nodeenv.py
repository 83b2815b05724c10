"""The environment that a job gets from its node: what the person who started Ray there had set up."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

BATCH_STEP = ("SLURM_", "PBS_", "LSB_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_", "HOROVOD_RANK", "HOROVOD_SIZE")
"""How names begin that tell a program in which step of a batch system it runs, and as which rank: Ray's, not the job's."""
RAYS_ALLOCATOR = "/ray/core/libjemalloc.so"


def raylet_environment(raylet_pid: int) -> dict[str, str]:
    """Return the environment the raylet was started with, less all of Ray's own and of the batch step that runs it.

    It is what the person who ran ``ray start`` had set up for this node: PATH, modules, proxies, locale. The
    environment of a Ray worker is not used: Ray adds to it (facts in docs/environment.md).
    """
    environment = without_ray(started_with(Path(f"/proc/{raylet_pid}")))
    return {name: value for name, value in environment.items() if not name.startswith(BATCH_STEP)}


def started_with(process: Path) -> dict[str, str]:
    """Return the environment that a process was started with, by its folder in /proc; raises OSError."""
    entries = (process / "environ").read_bytes().split(b"\0")
    pairs = (entry.partition(b"=") for entry in entries if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def without_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a raylet's environment without what Ray has added to that of ``ray start``."""
    return {name: value for name, value in environment.items() if not _is_of_ray(name, value)}


def _is_of_ray(name: str, value: str) -> bool:
    if name.startswith(("RAY_", "__RAY", "RAYCONTROL_")) or name in (
        "PYTHONBREAKPOINT",
        "VIRTUAL_ENV_PROMPT",
    ):
        return True
    # Ray gives the raylet an allocator of its own, where the operator has not preloaded anything.
    return name == "LD_PRELOAD" and value.endswith(RAYS_ALLOCATOR)


def search_path(environment: Mapping[str, str], own_bin: str) -> str:
    """Return the PATH of a job that sets none: raycontrol's own environment first, then the node's."""
    node_path = environment.get("PATH") or os.defpath
    return os.pathsep.join(
        [own_bin, *(part for part in node_path.split(os.pathsep) if part and part != own_bin)]
    )
