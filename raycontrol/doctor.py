"""What is wrong with a node, and what to do: every check that its facts can answer.

The prerequisites of GPU nodes as Microsoft's HPC Pack guide lists them (GPU on the bus, driver, headers, compiler, CUDA,
disk, PyTorch), and what multi-node training needs besides. Pure: judges what others have found.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from raycontrol.hardware import (
    ETHERNET,
    SLOW_LOOKUP_S,
    UNLIMITED,
    Gpu,
    Interface,
    Limit,
    NodeFacts,
    NodeInfo,
    RayStart,
    RdmaPort,
    essentials,
    foreign,
)
from raycontrol.raysettings import SETTINGS, RaySetting, Reader
from raycontrol.status import Model, Word
from raycontrol.wording import GIB, counted, size, some

FULL_DISK_BYTES = 1 * GIB
TIGHT_DISK_BYTES = 5 * GIB
LEAST_SHM_BYTES = 1 * GIB
LEAST_SHM_SHARE = 0.05
LEAST_OPEN_FILES = 65_536
CLOCK_WARN_S = 1.0
CLOCK_FAIL_S = 30.0
COMPATIBLE_SINCE = 11
"""From this CUDA on a driver runs what is built for any CUDA of its major version (CUDA's minor version compatibility)."""
PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")


class CheckVerdict(Word):
    """``SKIPPED``: the check does not apply to the node, or nothing is known that it could judge."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


class Check(Model):
    """One check on one node: what was found and, unless it is well, what to do."""

    node: str
    name: str
    verdict: CheckVerdict
    found: str
    advice: str | None = None


class Patient(NamedTuple):
    """What a check looks at. ``peers`` are the cluster's other nodes, those that did not answer included."""

    node: NodeInfo
    facts: NodeFacts
    peers: tuple[NodeInfo, ...]


class Finding(NamedTuple):
    """What a check came to."""

    verdict: CheckVerdict
    found: str
    advice: str | None = None


class Need(NamedTuple):
    """What a node must have for a check to apply; ``lack`` says that it has not."""

    holds: Callable[[NodeFacts], bool]
    lack: str


class Rule(NamedTuple):
    """A check: its name, what judges, and what it needs, the first need first."""

    name: str
    judge: Callable[[Patient], Finding]
    needs: tuple[Need, ...] = ()


def checks(node: NodeInfo, peers: Sequence[NodeInfo]) -> tuple[Check, ...]:
    """Return every check on the node, in reading order; one that fails, when the node did not answer."""
    if node.facts is None:
        advice = "see `ray status` and the node's raylet.out and raylet.err; then ask again"
        return (_check(node, "answer", Finding(CheckVerdict.FAIL, node.silent or "no facts", advice)),)
    others = tuple(peer for peer in peers if peer.id != node.id)
    patient = Patient(node, node.facts, others)
    return tuple(_check(node, rule.name, _judge(rule, patient)) for rule in RULES)


def _check(node: NodeInfo, name: str, finding: Finding) -> Check:
    return Check(
        node=node.name, name=name, verdict=finding.verdict, found=finding.found, advice=finding.advice
    )


def _judge(rule: Rule, patient: Patient) -> Finding:
    for need in rule.needs:
        if not need.holds(patient.facts):
            return _skipped(need.lack)
    return rule.judge(patient)


def _ok(found: str) -> Finding:
    return Finding(CheckVerdict.OK, found)


def _warn(found: str, advice: str) -> Finding:
    return Finding(CheckVerdict.WARN, found, advice)


def _fail(found: str, advice: str) -> Finding:
    return Finding(CheckVerdict.FAIL, found, advice)


def _skipped(found: str) -> Finding:
    return Finding(CheckVerdict.SKIPPED, found)


# GPUs.


def _bus(patient: Patient) -> Finding:
    facts = patient.facts
    idle = facts.driver.idle_devices
    if not idle:
        return _ok(_models(facts.gpus) if facts.gpus else "each has a driver in the kernel")
    found = f"{counted(len(idle), 'NVIDIA device')} without a working driver: {some(idle)}"
    advice = "install NVIDIA's driver and load it (`modprobe nvidia`); `lspci -k` shows which driver has them"
    return _warn(found, advice) if facts.gpus else _fail(found, advice)


def _driver(patient: Patient) -> Finding:
    driver = patient.facts.driver
    if driver.problem is not None:
        return _fail(driver.problem, "`nvidia-smi` on the node must list its GPUs")
    lost = [f"GPU {gpu.index} ({gpu.pci}): {gpu.fault}" for gpu in patient.facts.gpus if gpu.fault]
    if lost:
        return _fail(some(lost), "look for XID errors in `dmesg`; reset the GPU or restart the node")
    if not patient.facts.gpus:
        return _fail("it names no GPU", "`nvidia-smi` on the node must list its GPUs")
    runs = f", runs CUDA up to {driver.cuda}" if driver.cuda else ""
    return _ok(f"{driver.version or 'version not known'}{runs}")


def _in_ray(patient: Patient) -> Finding:
    node, found = patient.node, len(patient.facts.gpus)
    if not node.total:
        return _skipped("no Ray was asked")
    by_ray = node.total.get("GPU", 0.0)
    if by_ray == found:
        return _ok(f"{by_ray:g}, as the driver") if found else _skipped("no GPU here, and none in Ray")
    if any(gpu.mig for gpu in patient.facts.gpus):
        return _skipped(f"Ray counts {by_ray:g}; with MIG that is not compared")
    if not _has_nvidia(patient.facts):
        return _warn(
            f"Ray counts {counted(by_ray, 'GPU')}, but this node has none: logical GPUs",
            "good for trying things out; else start this node's Ray without --num-gpus",
        )
    if by_ray < found:
        return _warn(
            f"Ray counts {counted(by_ray, 'GPU')}, the driver {found}",
            "jobs never get the others: start this node's Ray without --num-gpus and CUDA_VISIBLE_DEVICES",
        )
    return _fail(
        f"Ray counts {counted(by_ray, 'GPU')}, the driver {found}",
        "jobs are given GPUs that are not there: mend the driver, or start this node's Ray with "
        f"--num-gpus {found}",
    )


def _ecc(patient: Patient) -> Finding:
    counts = {gpu.index: gpu.ecc_errors for gpu in patient.facts.gpus if gpu.ecc_errors is not None}
    bad = [f"GPU {index} has {count}" for index, count in counts.items() if count]
    if bad:
        return _warn(
            f"uncorrected memory errors since the driver was loaded: {some(bad)}",
            "when no job runs here, reset the GPU (`nvidia-smi --gpu-reset -i N`); if they come back, replace it",
        )
    return _ok("none") if counts else _skipped("these GPUs keep no count")


def _mig(patient: Patient) -> Finding:
    cut = [f"GPU {gpu.index}" for gpu in patient.facts.gpus if gpu.mig]
    if not cut:
        return _ok("off")
    return _warn(
        f"cut into MIG instances: {some(cut)}",
        "a process can use one MIG instance only, and NCCL does not connect them: for training of several GPUs "
        "switch it off (`nvidia-smi -mig 0`)",
    )


def _foreign(patient: Patient) -> Finding:
    found = foreign(patient.facts)
    if not found:
        return _ok("none")
    return _warn(
        some(found),
        "jobs share GPU memory and time with them, and `rdma: auto` stays off: end them, or take the GPUs from Ray",
    )


# What programs are built with, and PyTorch.


def _headers(patient: Patient) -> Finding:
    facts = patient.facts
    if facts.headers is not None:
        return _ok(facts.headers)
    return _warn(
        f"no headers of kernel {facts.kernel}",
        f"a driver that is built on the node needs them: `apt install linux-headers-{facts.kernel}`",
    )


def _compiler(patient: Patient) -> Finding:
    if patient.facts.compiler is not None:
        return _ok(patient.facts.compiler)
    return _warn(
        "no C compiler on the PATH",
        "only needed for torch.compile and for building extensions: `apt install build-essential`",
    )


def _toolkit(patient: Patient) -> Finding:
    if patient.facts.nvcc is not None:
        return _ok(patient.facts.nvcc)
    return _warn(
        "no nvcc",
        "only needed for compiling CUDA extensions (PyTorch brings its own CUDA): install the CUDA toolkit, or "
        "put its bin folder on the PATH that `ray start` is given",
    )


def _torch(patient: Patient) -> Finding:
    facts = patient.facts
    if facts.torch is None:
        return _warn(
            "not in raycontrol's own Python environment",
            "`pip install torch` there, unless jobs bring an environment of their own",
        )
    if facts.torch_cuda is None:
        return _for_cpus(facts.torch, facts)
    built = f"{facts.torch}, built for CUDA {facts.torch_cuda}"
    if facts.driver.cuda is None:
        return _ok(built)
    if _can_run(facts.driver.cuda, facts.torch_cuda):
        return _ok(f"{built}; the driver runs up to {facts.driver.cuda}")
    return _fail(
        f"{built}, but the driver runs up to {facts.driver.cuda}",
        f"install a newer driver, or a PyTorch that is built for CUDA {facts.driver.cuda} or older",
    )


def _for_cpus(torch: str, facts: NodeFacts) -> Finding:
    if not _has_nvidia(facts):
        return _ok(f"{torch}, for CPUs")
    return _warn(f"{torch} is built without CUDA", "install a PyTorch with CUDA, or jobs run on the CPUs")


def _can_run(driver_cuda: str, built_for: str) -> bool:
    """Whether a driver that runs CUDA up to ``driver_cuda`` runs what is built for the other; True where that cannot be told."""
    newest, built = _numbers(driver_cuda), _numbers(built_for)
    if not newest or not built:
        return True
    return built <= newest or (built[0] == newest[0] and built[0] >= COMPATIBLE_SINCE)


def _numbers(version: str) -> tuple[int, ...]:
    """Return major and minor: (12, 4) for 12.4.1; () when it does not begin with a number."""
    match = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(match[1]), int(match[2] or 0)) if match else ()


# Room and limits.


def _disk(patient: Patient) -> Finding:
    facts = patient.facts
    found = f"{size(facts.scratch_free_bytes)} free under {facts.scratch}"
    advice = "code, logs and outputs of jobs lie there: make room, or choose another folder with RAYCONTROL_SCRATCH"
    if facts.scratch_free_bytes < FULL_DISK_BYTES:
        return _fail(found, advice)
    return _warn(found, advice) if facts.scratch_free_bytes < TIGHT_DISK_BYTES else _ok(found)


def _shared_memory(patient: Patient) -> Finding:
    facts = patient.facts
    found = f"/dev/shm has {size(facts.shm_bytes)}"
    if facts.shm_bytes >= max(LEAST_SHM_BYTES, LEAST_SHM_SHARE * facts.memory_bytes):
        return _ok(found)
    return _warn(
        found,
        "data loaders, NCCL and Ray's object store need it: `mount -o remount,size=50% /dev/shm`, in a container "
        "`--shm-size`",
    )


def _open_files(patient: Patient) -> Finding:
    hard = patient.facts.open_files.hard
    found = f"at most {_limit(patient.facts.open_files)}"
    if hard == UNLIMITED or hard >= LEAST_OPEN_FILES:
        return _ok(found)
    return _warn(
        found,
        f"every connection and data loader takes some: raise the hard limit to {LEAST_OPEN_FILES} "
        "(/etc/security/limits.conf, LimitNOFILE= in a systemd unit, `--ulimit nofile=` for a container) and start Ray anew",
    )


def _locked_memory(patient: Patient) -> Finding:
    limit = patient.facts.memlock
    if limit.hard == UNLIMITED:
        return _ok("unlimited")
    return _warn(
        f"at most {size(limit.hard)}",
        "RDMA locks its buffers in memory: `ulimit -l unlimited` before `ray start`, LimitMEMLOCK=infinity in a "
        "systemd unit, `--ulimit memlock=-1` for a container",
    )


def _limit(limit: Limit) -> str:
    return "any number" if limit.hard == UNLIMITED else str(limit.hard)


# How Ray was started.


def _ray_settings(patient: Patient) -> Finding:
    node, ray = patient.node, patient.facts.ray
    if not node.total:
        return _skipped("no Ray was asked")
    if ray is None:
        return _skipped("the environment of the node's raylet cannot be read")
    command = "raycontrol ray-env --head" if node.head else "raycontrol ray-env"
    tables = "" if ray.storage is None else f"; Ray's tables are in {_TABLES.get(ray.storage, ray.storage)}"
    odd = list(_odd_settings(ray))
    if not odd:
        return _ok(f"as `{command}` prints them{tables}")
    return _warn(
        "; ".join(odd) + tables,
        f"for jobs to start sooner and losses to be seen sooner, start this node's Ray, when no job needs it, with what "
        f"`{command}` prints (docs/operations.md)",
    )


_TABLES = {"memory": "memory only", "redis": "Redis", "rocksdb": "RocksDB, on disk"}


def _odd_settings(ray: RayStart) -> Iterator[str]:
    """Say what differs from the table, and last, together, what is not there at all."""
    expected = [setting for setting in SETTINGS if ray.gcs is not None or not setting.head_only]
    missing = []
    for setting in expected:
        others = [found for found in _found(setting, ray) if not setting.holds(found)]
        if None in others:
            missing.append(setting.name)
        elif others and setting.part is not None:
            yield f"{setting.name} is without {setting.part}"
        elif others:
            yield f"{setting.name} is {others[0]}, not {setting.value}"
    if len(missing) == len(expected):
        yield "none of those advised is set"
    elif missing:
        yield f"not set: {', '.join(missing)}"


def _found(setting: RaySetting, ray: RayStart) -> Iterator[str | None]:
    """Give what each of those has that read the setting."""
    if setting.reader is not Reader.GCS:
        yield ray.raylet.get(setting.name)
    if setting.reader is not Reader.RAYLET and ray.gcs is not None:
        yield ray.gcs.get(setting.name)


# Network and RDMA.


def _interface(patient: Patient) -> Finding:
    facts = patient.facts
    owner = next((item for item in facts.interfaces if item.owns_ray_ip), None)
    if owner is None:
        return _fail(
            f"no interface has {facts.ip}, by which Ray knows this node",
            "NCCL and Gloo are told the interface with this address: start this node's Ray with "
            "--node-ip-address and an address that it has",
        )
    if not owner.up:
        return _fail(f"{owner.name}, which has {facts.ip}, is down", f"`ip link set {owner.name} up`")
    return _ok(f"{owner.name} has {facts.ip}{_speed(owner)}")


def _speed(interface: Interface) -> str:
    return f", {interface.speed_mbps / 1000:g} Gbit/s" if interface.speed_mbps else ""


def _ports(patient: Patient) -> Finding:
    ports = patient.facts.rdma
    down = [f"{port.name} is {port.state}" for port in ports if not port.up]
    found = f"{len(ports) - len(down)} of {len(ports)} up"
    if not down:
        layers = ", ".join(dict.fromkeys(port.link_layer for port in ports))
        return _ok(f"{found} ({layers})")
    return _warn(
        f"{found}; {some(down)}",
        "jobs can do without, but slower: look at cable and switch (`ibstat`, `rdma link`)",
    )


def _verbs(patient: Patient) -> Finding:
    facts = patient.facts
    if facts.verbs is None:
        return _warn("no libibverbs", _INSTALL_VERBS)
    bare = [port.name for port in facts.rdma if port.provider is None]
    if bare:
        return _warn(f"libibverbs has no provider for {some(bare)}", _INSTALL_VERBS)
    return _ok(f"{facts.verbs} with {', '.join(_providers(facts.rdma))}")


_INSTALL_VERBS = "NCCL reaches RDMA devices through them: `apt install libibverbs1 ibverbs-providers`"


def _providers(ports: Sequence[RdmaPort]) -> list[str]:
    return list(dict.fromkeys(port.provider for port in ports if port.provider is not None))


def _roce(patient: Patient) -> Finding:
    hcas = [hca for hca in essentials(patient.facts, 0.0).hcas if hca.up and hca.link_layer == ETHERNET]
    without = [hca.name for hca in hcas if hca.gid_index is None]
    if without:
        return _warn(
            f"no RoCE v2 address of the node's IPv4 on {some(without)}",
            "`rdma: auto` finds no GID index for them: give the port's interface an IPv4 address, or set "
            "NCCL_IB_GID_INDEX in the job",
        )
    return _ok(some([f"{hca.name} at GID index {hca.gid_index}" for hca in hcas]))


def _gpudirect(patient: Patient) -> Finding:
    loaded = [module for module in patient.facts.gpudirect if module in PEER_MEMORY]
    if loaded:
        return _ok(f"{loaded[0]} is loaded")
    return _warn(
        "no module that lets RDMA devices reach GPU memory",
        "`modprobe nvidia-peermem`; without it NCCL copies through the host's memory, unless kernel and driver have "
        "dma-buf",
    )


# The node among the others.


def _clock(patient: Patient) -> Finding:
    offset_s = patient.facts.clock_offset_s
    if offset_s is None:
        return _skipped("not measured")
    found = f"{abs(offset_s):.2f} s {'ahead of' if offset_s >= 0 else 'behind'} the head's"
    if abs(offset_s) <= CLOCK_WARN_S:
        return _ok(found)
    advice = "set the clocks by NTP (`timedatectl set-ntp true`, or chrony)"
    return _fail(found, advice) if abs(offset_s) > CLOCK_FAIL_S else _warn(found, advice)


def _shared_folder(patient: Patient) -> Finding:
    shared = patient.facts.shared
    if shared is None:
        return _skipped("no shared_dir in the settings")
    if shared.fault is None:
        return _ok(f"{shared.folder} is proved to be the head's")
    return _fail(
        shared.fault,
        "mount it there, writable for this user (docs/shared-folder.md); jobs collect their outputs meanwhile",
    )


def _lookups(patient: Patient) -> Finding:
    lookups = patient.facts.lookups
    if not lookups:
        return _skipped("no other node was looked up")
    slowest = max(lookups, key=lambda lookup: lookup.seconds)
    if slowest.seconds <= SLOW_LOOKUP_S:
        return _ok(f"{counted(len(lookups), 'peer')}, the slowest in {slowest.seconds:.2f} s")
    return _warn(
        f"name look-ups on this node take {slowest.seconds:.2g} s ({slowest.ip})",
        "torch's TCPStore, Ray Train and horovodrun look up every peer; add the peers to /etc/hosts or mend DNS",
    )


def _versions(patient: Patient) -> Finding:
    """Warn of each version that most of the nodes do not have; the head's counts as theirs when there is a tie."""
    everyone = sorted((patient.node, *patient.peers), key=lambda node: (not node.head, node.name, node.id))
    known = [node.facts for node in everyone if node.facts is not None]
    if len(known) < 2:
        return _skipped("no other node to compare with")
    odd = list(_odd_versions(patient.facts, known))
    if odd:
        return _warn("; ".join(odd), "install the same on every node: ranks of a job must fit each other")
    return _ok(f"driver, PyTorch and kernel as on most of {len(known)} nodes")


def _odd_versions(facts: NodeFacts, known: Sequence[NodeFacts]) -> Iterator[str]:
    for name, version_of in _VERSIONS.items():
        mine = version_of(facts)
        found = [version for other in known if (version := version_of(other)) is not None]
        if mine is None or not found:
            continue
        usual, count = Counter(found).most_common(1)[0]
        if mine != usual:
            yield f"{name} {mine}, but {usual} on {count} of {len(found)} nodes"


_VERSIONS: dict[str, Callable[[NodeFacts], str | None]] = {
    "driver": lambda facts: facts.driver.version,
    "PyTorch": lambda facts: facts.torch,
    "kernel": lambda facts: facts.kernel,
}


# Words.


def _models(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{count} x {model}" for model, count in Counter(gpu.model for gpu in gpus).items())


# The table, in reading order.


def _has_nvidia(facts: NodeFacts) -> bool:
    return bool(facts.gpus or facts.driver.idle_devices or facts.driver.problem)


def _has_roce(facts: NodeFacts) -> bool:
    return any(port.up and port.link_layer == ETHERNET for port in facts.rdma)


NVIDIA = Need(_has_nvidia, "no NVIDIA device")
GPUS = Need(lambda facts: bool(facts.gpus), "the driver names no GPU")
RDMA = Need(lambda facts: bool(facts.rdma), "no RDMA device")
ROCE = Need(_has_roce, "no RDMA port over Ethernet is up")

RULES = (
    Rule("GPUs on the bus", _bus, (NVIDIA,)),
    Rule("driver", _driver, (NVIDIA,)),
    Rule("GPUs in Ray", _in_ray),
    Rule("ECC errors", _ecc, (NVIDIA, GPUS)),
    Rule("MIG", _mig, (NVIDIA, GPUS)),
    Rule("other programs on GPUs", _foreign, (NVIDIA, GPUS)),
    Rule("kernel headers", _headers, (NVIDIA,)),
    Rule("compiler", _compiler),
    Rule("CUDA toolkit", _toolkit, (NVIDIA,)),
    Rule("PyTorch", _torch),
    Rule("free disk", _disk),
    Rule("shared memory", _shared_memory),
    Rule("open files", _open_files),
    Rule("locked memory", _locked_memory, (RDMA,)),
    Rule("Ray's settings", _ray_settings),
    Rule("network interface", _interface),
    Rule("RDMA ports", _ports, (RDMA,)),
    Rule("RDMA libraries", _verbs, (RDMA,)),
    Rule("RoCE address", _roce, (RDMA, ROCE)),
    Rule("GPUDirect", _gpudirect, (NVIDIA, GPUS, RDMA)),
    Rule("clock", _clock),
    Rule("name look-ups", _lookups),
    Rule("shared folder", _shared_folder),
    Rule("same versions", _versions),
)
