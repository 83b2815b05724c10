"""What this machine is: the boundary to /proc, interfaces and hardware."""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import shutil
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

LEASED_PORTS = range(20_000, 29_400)
"""Where leased ports come from: below the kernel's ephemeral range, above what services use, beside torchrun's 29400 and 29500."""

BATCH_STEP = ("SLURM_", "PBS_", "LSB_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_", "HOROVOD_RANK", "HOROVOD_SIZE")
"""How names begin that tell a program in which step of a batch system it runs, and as which rank: Ray's, not the job's."""

SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_SHARE = 0.8
OBJECT_STORE_SHARE = 0.3
"""Ray's own default too."""
LEAST_OBJECT_STORE = 75 << 20
"""Ray starts with no less."""
RAYS_ALLOCATOR = "/ray/core/libjemalloc.so"


def raylet_environment(raylet_pid: int) -> dict[str, str]:
    """Return the environment the raylet was started with, less all of Ray's own and of the batch step that runs it.

    It is what the person who ran ``ray start`` had set up for this node: PATH, modules, proxies, locale. The
    environment of a Ray worker is not used: Ray adds to it (facts in docs/environment.md).
    """
    raw = Path(f"/proc/{raylet_pid}/environ").read_bytes()
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    environment = without_ray({os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs})
    return {name: value for name, value in environment.items() if not name.startswith(BATCH_STEP)}


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


def interface_of(ip: str) -> str | None:
    """Return the name of the network interface that owns the address, or None."""
    wanted = ipaddress.ip_address(ip)
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                found = ipaddress.ip_address(address.address.partition("%")[0])
                if found == wanted:
                    return name
    return None


def network_of(ip: str) -> str | None:
    """Return the network that the address is in, as its interface has it (``10.0.0.0/24``), or None."""
    wanted = ipaddress.ip_address(ip)
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family is socket.AF_INET and address.netmask:
                found = ipaddress.ip_interface(f"{address.address}/{address.netmask}")
                if found.ip == wanted:
                    return str(found.network)
    return None


def free_port(taken: Collection[int]) -> int:
    """Return a port that nobody listens on, on any address, and that is not in ``taken``; raises OSError when there is none."""
    candidates = [port for port in LEASED_PORTS if port not in taken]
    random.shuffle(candidates)
    for port in candidates:
        if _can_bind(port):
            return port
    raise OSError(f"no free port between {LEASED_PORTS.start} and {LEASED_PORTS.stop - 1}")


def _can_bind(port: int) -> bool:
    return all(_is_free(port, family) for family in (socket.AF_INET, socket.AF_INET6))


def _is_free(port: int, family: socket.AddressFamily) -> bool:
    """Whether nobody has the port on an address of this family; a family that the system does not have is all free."""
    try:
        probe = socket.socket(family)
    except OSError as error:
        if error.errno != errno.EAFNOSUPPORT:
            raise
        return True
    with probe:
        try:
            if family is socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRNOTAVAIL  # not even the address of all addresses: switched off
    return True


def memory_of_cpus(cpus: float) -> int:
    """Return the bytes of memory that go with so many of this machine's CPUs: all of it with all of them."""
    return int(_memory() * min(1.0, cpus / (os.cpu_count() or 1)))


def _memory() -> int:
    """Return this machine's memory in bytes, or what its control group may use of it."""
    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max", and files that are not there
            limits.append(int(Path(path).read_text()))
    return min(limits)


def object_store_of(memory: int) -> int:
    """Return how large a Ray node's object store may be: 30 % of its memory, and what shared memory has room for."""
    room = shutil.disk_usage(SHARED_MEMORY).free if Path(SHARED_MEMORY).exists() else 0
    return max(LEAST_OBJECT_STORE, min(int(OBJECT_STORE_SHARE * memory), int(SHARED_MEMORY_SHARE * room)))


def summary(scratch: Path) -> dict[str, object]:
    """Return a node's facts for people: cores, memory, free disk under the scratch folder, size of /dev/shm, kernel."""
    memory = psutil.virtual_memory()
    return {
        "hostname": socket.gethostname(),
        "cores": os.cpu_count(),
        "memory_bytes": memory.total,
        "scratch": str(scratch),
        "scratch_free_bytes": shutil.disk_usage(scratch).free,
        "shm_bytes": shutil.disk_usage(SHARED_MEMORY).total if Path(SHARED_MEMORY).exists() else 0,
        "kernel": os.uname().release,
    }
