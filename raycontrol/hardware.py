"""What a node is made of: the values that ``nodefacts`` reads and everybody else shows, checks or plans with."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from raycontrol.status import Model, Word

ROCE_V2 = "RoCE v2"
ETHERNET = "Ethernet"
INFINIBAND = "InfiniBand"
ACTIVE = "ACTIVE"
UNLIMITED = -1
"""A limit that is none, in ``Limit`` and ``Essentials.memlock``."""
UNKNOWN = "?"
"""Stands for a name, an address or a uuid that neither driver nor kernel tells."""


class GpuProcess(Model):
    """A program that holds memory of a GPU. ``attempt_id`` is the raycontrol attempt that it is part of, None for a stranger."""

    pid: int
    name: str
    memory_bytes: int | None = None
    attempt_id: str | None = None


class Gpu(Model):
    """One GPU as its driver describes it.

    ``index`` is its place in PCI order, which is its id in CUDA_VISIBLE_DEVICES (with CUDA_DEVICE_ORDER=PCI_BUS_ID);
    ``pci`` its address (``0000:65:00.0``); ``ecc_errors`` counts uncorrected memory errors since the driver was loaded
    (None: it keeps no count); ``mig`` says that it is cut into MIG instances; ``fault`` is what the driver could
    not say of it.
    """

    index: int
    uuid: str
    model: str
    memory_bytes: int
    pci: str
    numa: int | None = None
    mig: bool = False
    ecc_errors: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    fault: str | None = None


class Driver(Model):
    """NVIDIA's driver. ``version`` is the kernel module's, ``library`` that of NVML, ``cuda`` the newest CUDA they can run.

    ``problem`` says why the GPUs cannot be asked (no driver, versions that differ, …); None also where there is no
    GPU. ``idle_devices`` are the PCI addresses of NVIDIA devices that no working driver has; ``mps`` says that an MPS
    daemon runs.
    """

    version: str | None = None
    library: str | None = None
    cuda: str | None = None
    problem: str | None = None
    idle_devices: tuple[str, ...] = ()
    mps: bool = False


class Interface(Model):
    """A network interface. ``addresses`` have their prefix length (``10.0.0.5/24``); ``speed_mbps`` is None where it is not known.

    ``owns_ray_ip``: it has the address by which Ray knows the node.
    """

    name: str
    up: bool
    speed_mbps: int | None = None
    addresses: tuple[str, ...] = ()
    owns_ray_ip: bool = False


class Gid(Model):
    """An entry of an RDMA port's table of addresses; ``type`` is ``IB/RoCE v1`` or ``RoCE v2``."""

    index: int
    gid: str
    type: str
    interface: str | None = None


class RdmaPort(Model):
    """A port of an RDMA device. ``state`` and ``link_layer`` in the kernel's words (``ACTIVE``, ``InfiniBand``, ``Ethernet``).

    ``driver`` is the kernel's (``mlx5_core``), ``provider`` the user-space library that goes with it, None when it is
    not installed; ``bond`` is the bonded interface that the port belongs to.
    """

    device: str
    port: int
    state: str
    link_layer: str
    rate: str | None = None
    gids: tuple[Gid, ...] = ()
    interfaces: tuple[str, ...] = ()
    bond: str | None = None
    driver: str | None = None
    provider: str | None = None

    @property
    def up(self) -> bool:
        return self.state == ACTIVE

    @property
    def name(self) -> str:
        return f"{self.device}:{self.port}"


class Limit(Model):
    """A resource limit in the unit of the limit; -1 is unlimited."""

    soft: int
    hard: int


SLOW_LOOKUP_S = 0.5
"""A look-up that takes longer holds up programs that look up every peer, torch's TCPStore and horovodrun among them."""


class Lookup(Model):
    """How long a reverse look-up of a peer's address took on the node; ``name`` is None when there was no answer."""

    ip: str
    seconds: float
    name: str | None = None


class SharedFolder(Model):
    """The folder that all nodes are to share: ``fault`` says why this one does not, None that it is proved to."""

    folder: str
    fault: str | None = None


class RayStart(Model):
    """What the node's Ray was started with, of the settings in ``raysettings``: those that its raylet has, and on the head its GCS.

    ``gcs`` is None where there is no GCS, or none that may be looked into; ``storage`` is where it keeps its tables:
    ``memory``, ``redis`` or ``rocksdb``.
    """

    raylet: dict[str, str] = Field(default_factory=dict)
    gcs: dict[str, str] | None = None
    storage: str | None = None


class NodeFacts(Model):
    """One node, as its own actor has found it. Times are seconds since the epoch, sizes bytes.

    ``verbs`` is the path of libibverbs, ``gpudirect`` the loaded kernel modules that let RDMA reach GPU memory;
    ``headers`` the folder of the headers that match the running kernel; ``torch``, ``torch_cuda``: the installed
    PyTorch and the CUDA it was built for (None: none, or for CPUs); ``nvcc``, ``compiler``: versions on the node's PATH;
    ``ray`` how its Ray was started (None: there is none, or it cannot be looked into); ``clock_offset_s`` how far the
    node's clock is ahead of the head's (None: not measured).
    """

    hostname: str
    ip: str
    at: float
    kernel: str
    headers: str | None = None
    cores: int
    numa_nodes: int = 1
    memory_bytes: int
    shm_bytes: int
    scratch: str
    scratch_free_bytes: int
    open_files: Limit
    memlock: Limit
    driver: Driver = Driver()
    gpus: tuple[Gpu, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    verbs: str | None = None
    rdma: tuple[RdmaPort, ...] = ()
    gpudirect: tuple[str, ...] = ()
    torch: str | None = None
    torch_cuda: str | None = None
    nvcc: str | None = None
    compiler: str | None = None
    ray: RayStart | None = None
    clock_offset_s: float | None = None
    lookups: tuple[Lookup, ...] = ()
    shared: SharedFolder | None = None


class NodeState(Word):
    """``draining``: offline, and jobs that were there before still run; nothing new is placed there in either case."""

    ONLINE = "online"
    DRAINING = "draining"
    OFFLINE = "offline"


class OfflineNode(Model):
    """A node that is to take no new job: why, at whose word, since when (epoch seconds). ``absent``: no node of the cluster
    has the name now."""

    name: str
    reason: str
    by: str
    at: float
    absent: bool = False


class NodeGroup(Model):
    """Nodes that jobs may ask for by one name; ``absent`` are those of them that are not in the cluster now."""

    name: str
    nodes: tuple[str, ...]
    absent: tuple[str, ...] = ()


class NodeInfo(Model):
    """A node of the cluster as every surface shows it: Ray's count of its resources, who uses them, and its facts.

    ``total`` and ``free`` are by Ray's resource names (CPU, GPU, memory in bytes); ``offline`` says why it takes no new
    job; ``jobs`` are the ids of the raycontrol jobs that have instances there; ``facts`` is None, and ``silent`` says why,
    when the node did not answer.
    """

    id: str
    name: str
    ip: str
    head: bool = False
    total: dict[str, float] = Field(default_factory=dict)
    free: dict[str, float] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    state: NodeState = NodeState.ONLINE
    offline: OfflineNode | None = None
    groups: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    facts: NodeFacts | None = None
    silent: str | None = None


class GpuSample(Model):
    """One GPU at one moment; None is what its driver does not say.

    ``utilisation_percent`` is the share of the last second or less in which a program of anybody ran on it; ``memory_bytes``
    what all programs hold of ``memory_total_bytes``. ``throttled`` names what slows it down, ``xids`` the XID errors
    since the sample before, ``fault`` says why it could not be measured.
    """

    index: int
    uuid: str
    utilisation_percent: float | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: tuple[str, ...] = ()
    xids: tuple[int, ...] = ()
    fault: str | None = None


class InstanceUsage(Model):
    """What an instance of a job uses: all processes of its runs together, and its GPUs. ``at`` is seconds since the epoch.

    ``cpu_percent`` is the mean since the sample before, 100 for one core; processes that ended in between count as
    soon as their parents have waited for them. ``memory_bytes`` is the resident memory of every process, summed: a page that
    several share counts for each of them. ``read_bytes`` and ``written_bytes`` are what the runs that still live have had
    from disks and given to them since they began; what the page cache, a tmpfs or a pipe served is not in it.
    """

    at: float
    cpu_percent: float
    memory_bytes: int
    read_bytes: int
    written_bytes: int
    processes: int
    gpus: tuple[GpuSample, ...] = ()


# What the choice of nodes needs of it.


@dataclass(frozen=True)
class Traits:
    """The part of a node's facts by which jobs choose. ``gpu_memory_gib`` is the least of one of its GPUs, rounded to
    whole GiB as drivers keep some of it back; ``rdma`` says that a port is up."""

    gpu_models: frozenset[str] = frozenset()
    gpu_memory_gib: int = 0
    rdma: bool = False


def traits(node: NodeFacts) -> Traits:
    return Traits(
        gpu_models=frozenset(gpu.model for gpu in node.gpus),
        gpu_memory_gib=round(min((gpu.memory_bytes for gpu in node.gpus), default=0) / 2**30),
        rdma=any(port.up for port in node.rdma),
    )


# What a plan needs of it.


@dataclass(frozen=True)
class Hca:
    """An RDMA port as a plan sees it. ``gid_index``: see ``roce_index``."""

    device: str
    port: int
    up: bool
    link_layer: str
    provider: bool
    gid_index: int | None = None

    @property
    def name(self) -> str:
        return f"{self.device}:{self.port}"


@dataclass(frozen=True)
class Essentials:
    """The part of a node's facts that a plan is made with: small, for it is stored with the job.

    ``gpus`` counts those of the whole node (the larger of Ray's count and the driver's); ``foreign`` names programs on
    them that are not of raycontrol; ``memlock`` is the hard limit on locked memory (-1: unlimited); ``gpu_memory``
    the least memory of one of its GPUs in bytes, 0 where it is not known; ``gpu_problem`` is why the driver cannot be
    asked. ``foreign``, ``interfaces`` (those with addresses) and ``hcas`` are empty for a job that will not use RDMA.
    """

    gpus: float = 0.0
    foreign: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    verbs: bool = False
    hcas: tuple[Hca, ...] = ()
    memlock: int = UNLIMITED
    gpu_memory: int = 0
    mps: bool = False
    torch: str | None = None
    gpu_problem: str | None = None


def essentials(node: NodeFacts, ray_gpus: float, *, network: bool = True) -> Essentials:
    """Return what a plan needs of a node that has so many GPUs by Ray's count; without ``network`` nothing of RDMA."""
    addressed = (interface.name for interface in node.interfaces if interface.addresses)
    return Essentials(
        gpus=max(ray_gpus, float(len(node.gpus))),
        foreign=foreign(node) if network else (),
        interfaces=tuple(addressed) if network else (),
        verbs=node.verbs is not None,
        hcas=tuple(_hca(port, _addresses(node)) for port in node.rdma) if network else (),
        memlock=node.memlock.hard,
        gpu_memory=min((gpu.memory_bytes for gpu in node.gpus), default=0),
        mps=node.driver.mps,
        torch=node.torch,
        gpu_problem=node.driver.problem,
    )


def foreign(node: NodeFacts) -> tuple[str, ...]:
    """Return the programs on the node's GPUs that are no part of a raycontrol job: ``python (pid 4711) on GPU 3``."""
    return tuple(
        f"{process.name} (pid {process.pid}) on GPU {gpu.index}"
        for gpu in node.gpus
        for process in gpu.processes
        if process.attempt_id is None
    ) + tuple(
        f"not to be told on GPU {gpu.index} ({gpu.fault})" for gpu in node.gpus if gpu.fault is not None
    )


def _addresses(node: NodeFacts) -> tuple[str, ...]:
    """Return the node's addresses, first that by which Ray knows it."""
    others = (address.partition("/")[0] for interface in node.interfaces for address in interface.addresses)
    return (node.ip, *others)


def _hca(port: RdmaPort, addresses: Sequence[str]) -> Hca:
    return Hca(
        device=port.device,
        port=port.port,
        up=port.up,
        link_layer=port.link_layer,
        provider=port.provider is not None,
        gid_index=roce_index(port.gids, addresses),
    )


def roce_index(gids: Sequence[Gid], addresses: Sequence[str]) -> int | None:
    """Return the index of the RoCE v2 entry that holds the first of the addresses that is an IPv4 and has one, else None.

    Such an entry is the address in its IPv4-mapped IPv6 form (``0000:…:ffff:0a00:0005``).
    """
    held = {_mapped(entry.gid): entry.index for entry in reversed(gids) if entry.type == ROCE_V2}
    for address in addresses:
        ip = ipaddress.ip_address(address)
        if isinstance(ip, ipaddress.IPv4Address) and ip in held:
            return held[ip]
    return None


def _mapped(gid: str) -> ipaddress.IPv4Address | None:
    try:
        return ipaddress.IPv6Address(gid).ipv4_mapped
    except ValueError:
        return None
