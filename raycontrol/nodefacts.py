"""What this machine is: the boundary to /sys, /proc, interfaces and hardware.

``installed`` reads what stays as it is while the node lives, ``collect`` the rest. Neither raises because of something
that cannot be read: it is None, empty or 0 then.
"""

from __future__ import annotations

import ast
import importlib.util
import ipaddress
import logging
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil

from raycontrol import nvml
from raycontrol.hardware import UNLIMITED, Interface, Limit, NodeFacts, RayStart
from raycontrol.nvidia import Describe, driver_and_gpus, gpudirect
from raycontrol.rdmaports import rdma_ports, verbs_library
from raycontrol.sysfiles import exists, in_order, matching, names_in, number_of, on_the_node, text_of

SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_SHARE = 0.8
OBJECT_STORE_SHARE = 0.3
"""Ray's own default too."""
LEAST_OBJECT_STORE = 75 << 20
"""Ray starts with no less."""

ROOT = Path("/")
ANSWER_LIMIT_S = 5.0
"""For a compiler to tell its version."""

Addresses = Mapping[str, Sequence[str]]
"""Addresses with their prefix length, by interface."""

Ask = Callable[[Sequence[str]], str | None]
"""Runs a program and returns what it prints."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Installed:
    """What takes long to find out and stays as it is; the fields are those of ``NodeFacts``."""

    headers: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    nvcc: str | None = None
    compiler: str | None = None
    ray: RayStart | None = None


def collect(
    scratch: Path,
    ip: str,
    *,
    environ: Mapping[str, str],
    installed: Installed,
    root: Path = ROOT,
    gpus: Describe = nvml.describe,
    addresses: Addresses | None = None,
) -> NodeFacts:
    """Return this node's facts; some milliseconds, and what the GPUs' driver takes.

    ``ip`` is the node's in Ray, ``environ`` what its jobs start with, ``root`` where /sys, /proc and libraries are
    read. ``gpus`` is given the version of the loaded kernel module, ``addresses`` are the system's if None.
    """
    driver, found = driver_and_gpus(root, environ, gpus)
    verbs = verbs_library(root, environ)
    return NodeFacts(
        hostname=socket.gethostname(),
        ip=ip,
        at=time.time(),
        kernel=_kernel(root),
        cores=os.cpu_count() or 1,
        numa_nodes=max(1, len(matching(root / "sys/devices/system/node", r"node\d+"))),
        memory_bytes=_memory(),
        shm_bytes=_disk(root / SHARED_MEMORY.lstrip("/")).total,
        scratch=str(scratch),
        scratch_free_bytes=_disk(scratch).free,
        open_files=_limit(resource.RLIMIT_NOFILE),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        driver=driver,
        gpus=found,
        interfaces=_interfaces(root, ip, _addresses() if addresses is None else addresses),
        verbs=on_the_node(root, verbs) if verbs else None,
        rdma=rdma_ports(root, verbs),
        gpudirect=gpudirect(root),
        **asdict(installed),
    )


def installed(
    environ: Mapping[str, str], root: Path = ROOT, *, answer_limit_s: float = ANSWER_LIMIT_S
) -> Installed:
    """Return what is installed on this node, for jobs with this environment; each compiler has so long to answer."""
    ask = partial(_answer, environ, answer_limit_s)
    torch, torch_cuda = _torch()
    return Installed(
        headers=_headers(root, _kernel(root)),
        torch=torch,
        torch_cuda=torch_cuda,
        nvcc=_nvcc(root, environ, ask),
        compiler=_compiler(environ, ask),
    )


# What the node's Ray and jobs are given.


def interface_of(ip: str) -> str | None:
    """Return the name of the network interface that owns the address, or None."""
    return next((name for name, _ in _owners(ip)), None)


def network_of(ip: str) -> str | None:
    """Return the network that the address is in, as its interface has it (``10.0.0.0/24``), or None."""
    return next((str(address.network) for _, address in _owners(ip)), None)


def _owners(ip: str) -> Iterator[tuple[str, ipaddress.IPv4Interface | ipaddress.IPv6Interface]]:
    wanted = ipaddress.ip_address(ip)
    for name, addresses in _addresses().items():
        for address in map(ipaddress.ip_interface, addresses):
            if address.ip == wanted:
                yield name, address


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


# Interfaces.


def _addresses() -> dict[str, tuple[str, ...]]:
    try:
        found = psutil.net_if_addrs()
    except OSError as error:
        log.debug("no addresses of interfaces: %s", error)
        return {}
    addresses: dict[str, tuple[str, ...]] = {}
    for label, entries in found.items():
        name = label.partition(":")[0]  # an address may have a label of its own: eth0:1
        addresses[name] = addresses.get(name, ()) + tuple(
            _with_prefix(entry.address, entry.netmask)
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        )
    return addresses


def _with_prefix(address: str, netmask: str | None) -> str:
    """Return ``10.0.0.5/24``, without the zone that an IPv6 address may have (``fe80::1%eth0``)."""
    bare = ipaddress.ip_address(address.partition("%")[0])
    length = int(ipaddress.ip_address(netmask)).bit_count() if netmask else bare.max_prefixlen
    return f"{bare}/{length}"


def _interfaces(root: Path, ip: str, addresses: Addresses) -> tuple[Interface, ...]:
    """Return the interfaces that the kernel lists, or that have addresses where it cannot be asked."""
    folder = root / "sys/class/net"
    names = {*(name for name in names_in(folder) if exists(folder / name / "operstate")), *addresses}
    own = ipaddress.ip_address(ip.partition("%")[0])
    return tuple(_interface(folder / name, tuple(addresses.get(name, ())), own) for name in in_order(names))


def _interface(
    folder: Path, addresses: tuple[str, ...], own: ipaddress.IPv4Address | ipaddress.IPv6Address
) -> Interface:
    speed = number_of(folder / "speed")
    return Interface(
        name=folder.name,
        up=text_of(folder / "operstate") in ("up", "unknown", None),  # unknown: loopback, tunnels
        speed_mbps=speed if speed is not None and 0 < speed < 0xFFFFFFFF else None,
        addresses=addresses,
        owns_ray_ip=any(ipaddress.ip_interface(address).ip == own for address in addresses),
    )


# The system.


def _kernel(root: Path) -> str:
    return text_of(root / "proc/sys/kernel/osrelease") or os.uname().release


def _limit(number: int) -> Limit:
    soft, hard = (
        UNLIMITED if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number)
    )
    return Limit(soft=soft, hard=hard)


@dataclass(frozen=True)
class _Room:
    total: int = 0
    free: int = 0


def _disk(folder: Path) -> _Room:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        log.debug("no disk: %s", error)
        return _Room()
    return _Room(usage.total, usage.free)


# What is installed.


def _headers(root: Path, release: str) -> str | None:
    for path in (
        f"lib/modules/{release}/build",
        f"usr/src/linux-headers-{release}",
        f"usr/src/kernels/{release}",
    ):
        if exists(root / path):  # the first is a link, which stays when the headers go
            return f"/{path}"
    return None


def _torch() -> tuple[str | None, str | None]:
    """Return the version of this Python's PyTorch and of its CUDA, without importing it."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError) as error:
        log.debug("no PyTorch: %s", error)
        return None, None
    if spec is None or spec.origin is None:
        return None, None
    return torch_versions(Path(spec.origin).parent)


def torch_versions(folder: Path) -> tuple[str | None, str | None]:
    """Return the versions that an installed PyTorch has written down: its own and its CUDA's (None: built for CPUs)."""
    try:
        tree = ast.parse(text_of(folder / "version.py") or "")
    except (SyntaxError, ValueError) as error:
        log.debug("PyTorch's version: %s", error)
        return None, None
    values = dict(_literals(tree.body))
    return values.get("__version__"), values.get("cuda")


def _literals(statements: Iterable[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Give the names that are set to strings."""
    for statement in statements:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text)))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text)))
            ):
                yield name, text


def _nvcc(root: Path, environ: Mapping[str, str], ask: Ask) -> str | None:
    program = shutil.which("nvcc", path=environ.get("PATH", os.defpath)) or str(
        root / "usr/local/cuda/bin/nvcc"
    )
    version = re.search(r"\bV(\d+(\.\d+)+)", ask([program, "--version"]) or "")
    return version and version[1]


def _compiler(environ: Mapping[str, str], ask: Ask) -> str | None:
    """Return the first line that the C compiler says of itself."""
    for name in ("gcc", "cc"):
        program = shutil.which(name, path=environ.get("PATH", os.defpath))
        answer = program and ask([program, "--version"])
        if answer:
            return answer.splitlines()[0]
    return None


def _answer(environ: Mapping[str, str], limit_s: float, argv: Sequence[str]) -> str | None:
    """Return what a program prints, if it is there and ends well in time."""
    try:
        process = subprocess.Popen(
            argv,
            env={**environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        log.debug("%s: %s", argv[0], error)
        return None
    with process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            log.debug("%s did not answer", argv[0])
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started, which may hold its output open
            return None
    return said.decode(errors="replace").strip() if process.returncode == 0 else None
