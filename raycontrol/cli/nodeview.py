"""A node in words: its row in the table, its sections, and the lines of the doctor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from raycontrol.cli.render import moment
from raycontrol.wording import GIB, size, some

if TYPE_CHECKING:
    from raycontrol.doctor import Check
    from raycontrol.hardware import Gpu, Interface, Limit, NodeFacts, NodeInfo, RdmaPort

COLUMNS = ("NAME", "IP", "STATE", "CPU", "GPU", "MEMORY", "RDMA", "GROUPS", "JOBS", "NOTE")
GROUPS_SHOWN = JOBS_SHOWN = 3

Section = dict[str, str | None]
"""Lines by their labels; what is None is not shown."""


def row(node: NodeInfo) -> tuple[str, ...]:
    return (
        node.name,
        node.ip,
        node.state,
        _share(node, "CPU"),
        _gpus(node),
        _memory(node),
        _ports_up(node.facts),
        some(node.groups, GROUPS_SHOWN),
        some(node.jobs, JOBS_SHOWN),
        "; ".join(_notes(node)),
    )


def sections(node: NodeInfo) -> dict[str, dict[str, str]]:
    """Return all that is known of the node, by the title of a section and the label of a line."""
    everything = {f"{node.name} ({node.ip})": _in_ray(node)}
    if node.facts is not None:
        everything |= _of_facts(node.facts)
    return {
        title: {label: value for label, value in section.items() if value is not None}
        for title, section in everything.items()
    }


def check_lines(checks: Sequence[Check]) -> list[str]:
    """Return a line per check: node, verdict, check, what was found, what to do."""
    names = max((len(check.node) for check in checks), default=0)
    titles = max((len(check.name) for check in checks), default=0)
    return [
        f"{check.node:<{names}}  {check.verdict:<7}  {check.name:<{titles}}  {_found(check)}"
        for check in checks
    ]


def tally(checks: Sequence[Check]) -> str:
    """Return ``2 nodes: 30 ok, 3 warnings, 1 failed, 4 skipped``, leaving out what there is none of."""
    counts = Counter(check.verdict.value for check in checks)
    warnings = "warning" if counts["warn"] == 1 else "warnings"
    words = {"ok": "ok", "warn": warnings, "fail": "failed", "skipped": "skipped"}
    nodes = len({check.node for check in checks})
    said = ", ".join(f"{counts[key]} {word}" for key, word in words.items() if counts[key])
    return f"{nodes} node{'' if nodes == 1 else 's'}: {said}"


def _found(check: Check) -> str:
    return check.found if check.advice is None else f"{check.found}: {check.advice}"


# The row.


def _share(node: NodeInfo, resource: str) -> str:
    """Return ``free/total``, or nothing where there is none in all."""
    total = node.total.get(resource, 0.0)
    return f"{node.free.get(resource, 0.0):g}/{total:g}" if total else ""


def _gpus(node: NodeInfo) -> str:
    models = dict.fromkeys(gpu.model for gpu in node.facts.gpus) if node.facts else {}
    return " ".join(filter(None, [_share(node, "GPU"), ", ".join(models)]))


def _memory(node: NodeInfo) -> str:
    total = node.total.get("memory", 0.0)
    return f"{node.free.get('memory', 0.0) / GIB:.0f}/{total / GIB:.0f} GiB" if total else ""


def _ports_up(facts: NodeFacts | None) -> str:
    if facts is None or not facts.rdma:
        return ""
    return f"{sum(port.up for port in facts.rdma)}/{len(facts.rdma)}"


def _notes(node: NodeInfo) -> Iterable[str]:
    if node.head:
        yield "head"
    if node.offline is not None:
        yield f"{node.offline.reason} ({node.offline.by})"
    if node.silent is not None:
        yield node.silent
    if node.facts is not None and node.facts.driver.problem is not None:
        yield node.facts.driver.problem
    if node.facts is not None and node.total.get("GPU") and not node.facts.gpus:
        yield "logical GPUs"


# The sections.


def _of_facts(facts: NodeFacts) -> dict[str, Section]:
    return {
        "machine": _machine(facts),
        "GPUs": _gpu_section(facts),
        "network": {item.name: _interface(item) for item in facts.interfaces},
        "RDMA": _rdma(facts),
        "software": _software(facts),
        "limits": _limits(facts),
        "clock and names": _clock_and_names(facts),
    }


def _in_ray(node: NodeInfo) -> Section:
    return {
        "id": node.id,
        "head": "yes" if node.head else None,
        "state": _state(node),
        "CPUs": _free_of(node, "CPU"),
        "GPUs": _free_of(node, "GPU"),
        "memory": f"{_memory(node).replace('/', ' of ')} free" if _memory(node) else None,
        "groups": ", ".join(node.groups) or None,
        "labels": ", ".join(f"{key}={value}" for key, value in node.labels.items()) or None,
        "jobs": ", ".join(node.jobs) or None,
        "silent": node.silent,
    }


def _state(node: NodeInfo) -> str:
    mark = node.offline
    return node.state if mark is None else f"{node.state}: {mark.reason} ({mark.by}, {moment(mark.at)})"


def _free_of(node: NodeInfo, resource: str) -> str | None:
    share = _share(node, resource)
    return f"{share.replace('/', ' of ')} free" if share else None


def _machine(facts: NodeFacts) -> Section:
    return {
        "hostname": facts.hostname,
        "kernel": facts.kernel,
        "cores": f"{facts.cores}, NUMA nodes: {facts.numa_nodes}",
        "memory": size(facts.memory_bytes),
        "/dev/shm": size(facts.shm_bytes),
        "scratch": f"{facts.scratch}, {size(facts.scratch_free_bytes)} free",
        "looked at": moment(facts.at),
    }


def _gpu_section(facts: NodeFacts) -> Section:
    driver = facts.driver
    ours: Section = {
        "driver": driver.version,
        "library": driver.library,
        "CUDA": f"up to {driver.cuda}" if driver.cuda else None,
        "problem": driver.problem,
        "without driver": ", ".join(driver.idle_devices) or None,
        "MPS": "an MPS daemon runs" if driver.mps else None,
    }
    return {**ours, **{f"GPU {gpu.index}": _gpu(gpu) for gpu in facts.gpus}}


def _gpu(gpu: Gpu) -> str:
    users = [
        f"{user.name} (pid {user.pid}, {user.attempt_id or 'not of raycontrol'})" for user in gpu.processes
    ]
    parts = [
        gpu.model,
        size(gpu.memory_bytes),
        gpu.uuid,
        gpu.pci,
        f"NUMA node {gpu.numa}" if gpu.numa is not None else None,
        "MIG" if gpu.mig else None,
        f"{gpu.ecc_errors} uncorrected memory errors" if gpu.ecc_errors is not None else None,
        f"used by {', '.join(users)}" if users else None,
        gpu.fault,
    ]
    return ", ".join(filter(None, parts))


def _interface(item: Interface) -> str:
    parts = [
        "up" if item.up else "down",
        f"{item.speed_mbps / 1000:g} Gbit/s" if item.speed_mbps else None,
        *item.addresses,
        "Ray's" if item.owns_ray_ip else None,
    ]
    return ", ".join(filter(None, parts))


def _rdma(facts: NodeFacts) -> Section:
    if not facts.rdma:
        return {}
    return {
        "libibverbs": facts.verbs or "not installed",
        "GPUDirect": ", ".join(facts.gpudirect) or "no module",
        **{port.name: _port(port) for port in facts.rdma},
    }


def _port(port: RdmaPort) -> str:
    gids = [f"{gid.index} {gid.type} {gid.gid}" for gid in port.gids]
    parts = [
        port.state,
        port.link_layer,
        port.rate,
        f"driver {port.driver}" if port.driver else None,
        f"provider {port.provider}" if port.provider else "no provider",
        f"interface {' '.join(port.interfaces)}" if port.interfaces else None,
        f"bond {port.bond}" if port.bond else None,
        f"GIDs: {'; '.join(gids)}" if gids else None,
    ]
    return ", ".join(filter(None, parts))


def _software(facts: NodeFacts) -> Section:
    cuda = f"for CUDA {facts.torch_cuda}" if facts.torch_cuda else "for CPUs"
    return {
        "PyTorch": f"{facts.torch}, {cuda}" if facts.torch else "none",
        "nvcc": facts.nvcc or "none",
        "compiler": facts.compiler or "none",
        "kernel headers": facts.headers or "none",
    }


def _limits(facts: NodeFacts) -> Section:
    return {"open files": _limit(facts.open_files, str), "locked memory": _limit(facts.memlock, size)}


def _limit(limit: Limit, words: Callable[[int], str]) -> str:
    from raycontrol.hardware import UNLIMITED

    soft, hard = (
        "unlimited" if amount == UNLIMITED else words(amount) for amount in (limit.soft, limit.hard)
    )
    return soft if soft == hard else f"{soft}, may be raised to {hard}"


def _clock_and_names(facts: NodeFacts) -> Section:
    clock = facts.clock_offset_s
    names = {look.ip: f"{look.name or 'no name'}, {look.seconds:.2f} s" for look in facts.lookups}
    return {"ahead of the head": f"{clock:.3f} s" if clock is not None else "not measured", **names}
