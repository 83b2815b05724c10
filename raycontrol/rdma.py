"""RDMA and the network of NCCL and Gloo: whether a job uses RDMA, and which variables every instance gets. Pure.

The variables are NCCL's (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html), Gloo's and TensorPipe's.
What the user sets wins over the preset, and the preset over what was detected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from raycontrol import presets
from raycontrol.errors import PlanError
from raycontrol.hardware import ETHERNET, INFINIBAND, UNLIMITED, Essentials, Hca
from raycontrol.plan import Facts, Rdma
from raycontrol.spec import JobSpec, Member, When

INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
DEFAULT_PRESET = "auto"
DEFAULT_MIN_GPUS = 8
MOST_TOLD = 4


class Value(NamedTuple):
    """A variable's value, and where it comes from."""

    text: str
    origin: str


class Instance(NamedTuple):
    """An instance as this module sees it."""

    member: Member
    facts: Facts

    @property
    def on_node(self) -> str:
        return f"{self.member.name} on {self.facts.node_name}"


def decide(spec: JobSpec, gang: Sequence[Member], facts: Sequence[Facts]) -> Rdma:
    """Return whether the job uses RDMA; raises PlanError when it must and cannot."""
    wish = spec.rdma
    preset = wish.preset or DEFAULT_PRESET
    instances = [Instance(member, fact) for member, fact in zip(gang, facts, strict=True)]
    wanted = wish.when is When.ON or (len(gang) > 1 and all(member.resources.gpu >= 1 for member in gang))
    if wish.when is When.OFF:
        return Rdma()
    known = all(fact.hardware is not None for fact in facts)
    missing = tuple(_missing(instances, wish.min_gpus or DEFAULT_MIN_GPUS)) if known else _alone(instances)
    if missing and wish.when is When.ON:
        raise PlanError(f"rdma is on, but {told(missing)}")
    if not known:
        on = True if wish.when is When.ON else None if wanted else False
        return Rdma(on=on, preset=preset if wanted else None, worth_telling=wanted)
    return Rdma(on=not missing, preset=None if missing else preset, missing=missing, worth_telling=wanted)


def variables(
    spec: JobSpec, gang: Sequence[Member], facts: Sequence[Facts], rdma: Rdma
) -> dict[str, dict[str, Value]]:
    """Return every instance's variables; raises PlanError when a preset names what a node lacks."""
    layer = _layer([fact.hardware for fact in facts if fact.hardware is not None])
    found = {}
    for member, fact in zip(gang, facts, strict=True):
        values = _interfaces(fact)
        if rdma.on and rdma.preset is not None:
            values |= _of_preset(rdma.preset, fact, layer)
        values |= {
            name: Value(text, "the job's env")
            for name in values
            if (text := member.env.get(name)) is not None
        }
        wanted = {name: value for name, value in values.items() if member.env.get(name, "") is not None}
        if rdma.on and rdma.preset is not None:
            _check_names(rdma.preset, Instance(member, fact), wanted)
        found[member.name] = wanted
    return found


def remarks(facts: Sequence[Facts], rdma: Rdma) -> Iterator[str]:
    """Yield what a person should know before the job starts."""
    if not rdma.on:
        if rdma.worth_telling and rdma.missing:
            yield f"RDMA stays off: {told(rdma.missing)}"
        return
    yield f"RDMA is on (preset {rdma.preset})"
    for node, hardware in _by_node(facts).items():
        if down := [hca.name for hca in hardware.hcas if not hca.up]:
            yield f"{node}: {some(down)} {'is' if len(down) == 1 else 'are'} not active"
        if hardware.memlock != UNLIMITED:
            yield (
                f"{node}: locked memory is limited to {hardware.memlock >> 10} KiB and RDMA has to lock its buffers; "
                "`ulimit -l unlimited` before `ray start` lifts that"
            )


def told(missing: Sequence[str]) -> str:
    """Return the reasons as one line; of many nodes the first ones stand for all."""
    return some(missing, "; ")


def some(words: Sequence[str], separator: str = ", ") -> str:
    """Return the first of many words, and how many more there are."""
    more = len(words) - MOST_TOLD
    return separator.join([*words[:MOST_TOLD], *([f"and {more} more"] if more > 0 else [])])


# What is missing.


def _alone(instances: Sequence[Instance]) -> tuple[str, ...]:
    return ("the job has one instance",) if len(instances) < 2 else ()


def _missing(instances: Sequence[Instance], min_gpus: int) -> Iterator[str]:
    """Yield what stands in the way."""
    if alone := _alone(instances):
        yield from alone
        return
    yield from _sharers(instances)
    yield from _of_gpus(instances, min_gpus)
    nodes = _by_node([item.facts for item in instances])
    if not any(hardware.hcas for hardware in nodes.values()):
        yield f"no RDMA device on {some(list(nodes))}"
        return
    reasons = {node: _of_network(hardware) for node, hardware in nodes.items()}
    yield from (f"{node} has {reason}" for node, reason in reasons.items() if reason)
    if not any(reasons.values()) and _layer(list(nodes.values())) is None:
        yield "the nodes have no link layer in common (InfiniBand here, Ethernet there)"


def _sharers(instances: Sequence[Instance]) -> Iterator[str]:
    names = {item.facts.ip: item.facts.node_name for item in instances}
    for ip, count in Counter(item.facts.ip for item in instances).items():
        if count > 1:
            yield f"{count} instances share {names[ip]}"


def _of_gpus(instances: Sequence[Instance], min_gpus: int) -> Iterator[str]:
    for item in instances:
        hardware, held = _hardware(item.facts), item.member.resources.gpu
        if held < hardware.gpus:
            yield f"{item.on_node} holds {held:g} of its {hardware.gpus:g} GPUs"
        elif held < min_gpus:
            yield f"{item.on_node} holds {held:g}, and RDMA is for nodes with {min_gpus} GPUs (`rdma.min_gpus`)"
    for node, hardware in _by_node([item.facts for item in instances]).items():
        if hardware.foreign:
            yield f"on {node} other programs use the GPUs: {', '.join(hardware.foreign)}"


def _of_network(hardware: Essentials) -> str | None:
    if not hardware.hcas:
        return "no RDMA device"
    if not hardware.verbs:
        return "no libibverbs (Debian's libibverbs1)"
    up = [hca for hca in hardware.hcas if hca.up]
    if not up:
        return f"no active RDMA port: {some([hca.name for hca in hardware.hcas])}"
    if not any(hca.provider for hca in up):
        devices = some([hca.device for hca in up])
        return f"no user-space driver for {devices} (Debian's ibverbs-providers)"
    return None


# Values.


def _interfaces(fact: Facts) -> dict[str, Value]:
    if fact.interface is None:
        return {}
    origin = "the interface of the node's IP"
    exact = {"NCCL_SOCKET_IFNAME": f"={fact.interface}"}
    return {name: Value(exact.get(name, fact.interface), origin) for name in INTERFACES}


def _of_preset(name: str, fact: Facts, layer: str | None) -> dict[str, Value]:
    preset = presets.preset(name)
    values = {key: Value(text, f"preset {name}") for key, text in preset.variables.items()}
    detected = _symbolic(fact) if fact.hardware is None else _detected(fact.hardware, layer)
    return values | {key: value for key, value in detected.items() if key in preset.detect}


def _detected(hardware: Essentials, layer: str | None) -> dict[str, Value]:
    usable = _usable(hardware, layer)
    values = {}
    if usable:
        ports = ",".join(hca.name for hca in usable)
        values["NCCL_IB_HCA"] = Value(f"={ports}", f"the active {layer} ports")
    indexes = {hca.gid_index for hca in usable}
    index = next(iter(indexes), None)
    if layer == ETHERNET and len(indexes) == 1 and index is not None:
        values["NCCL_IB_GID_INDEX"] = Value(str(index), "RoCE v2 with the node's IPv4")
    return values


def _symbolic(fact: Facts) -> dict[str, Value]:
    return {
        "NCCL_IB_HCA": Value(f"<active RDMA ports of {fact.instance}>", "the node"),
        "NCCL_IB_GID_INDEX": Value(f"<RoCE v2 GID index of {fact.instance}>", "the node"),
    }


def _layer(nodes: Sequence[Essentials]) -> str | None:
    """Return the link layer that every node can use: InfiniBand rather than Ethernet; None when there is none."""
    for layer in (INFINIBAND, ETHERNET):
        if nodes and all(_usable(hardware, layer) for hardware in nodes):
            return layer
    return None


def _usable(hardware: Essentials, layer: str | None) -> list[Hca]:
    return [hca for hca in hardware.hcas if hca.up and hca.provider and hca.link_layer == layer]


# Names of a preset that a node must have.


def _check_names(preset: str, item: Instance, values: Mapping[str, Value]) -> None:
    hardware = item.facts.hardware
    if hardware is None:
        return
    known: dict[str, list[str]] = {
        "NCCL_IB_HCA": [hca.name for hca in hardware.hcas if hca.up],
        "NCCL_SOCKET_IFNAME": list(hardware.interfaces),
        "GLOO_SOCKET_IFNAME": list(hardware.interfaces),
    }
    for name, there in known.items():
        value = values.get(name)
        if value is None or value.origin != f"preset {preset}":
            continue
        exact = name == "GLOO_SOCKET_IFNAME"
        if not matching(value.text, there, exact=exact):
            kind = "active RDMA port" if name == "NCCL_IB_HCA" else "network interface"
            raise PlanError(
                f"preset {preset} sets {name}={value.text}, but {item.facts.node_name} has no such {kind} "
                f"(it has {some(there) or 'none'}); set {name} in `env`, or choose another preset"
            )


def matching(pattern: str, names: Collection[str], exact: bool = False) -> list[str]:
    """Return the names that a list in NCCL's notation chooses: prefixes, after ``=`` whole names, after ``^`` all others.

    A port may follow a device after a colon; without it all ports of the device are meant.
    """
    text = pattern.removeprefix("^")
    whole = exact or text.startswith("=")
    wanted = [part for part in text.removeprefix("=").split(",") if part]
    chosen = [name for name in names if any(_matches(part, name, whole) for part in wanted)]
    if pattern.startswith("^"):
        return [name for name in names if name not in chosen]
    return chosen


def _matches(wanted: str, name: str, whole: bool) -> bool:
    device, _, port = name.partition(":")
    wanted_device, _, wanted_port = wanted.partition(":")
    same_port = not wanted_port or wanted_port == port
    same_device = device == wanted_device if whole else device.startswith(wanted_device)
    return same_port and same_device


# Helpers.


def _by_node(facts: Sequence[Facts]) -> dict[str, Essentials]:
    """Return what each node is made of, by its name, with its address where several have the same name."""
    nodes = {fact.ip: fact for fact in facts}
    bearers = Counter(fact.node_name for fact in nodes.values())
    return {
        fact.node_name if bearers[fact.node_name] == 1 else f"{fact.node_name} ({ip})": _hardware(fact)
        for ip, fact in nodes.items()
    }


def _hardware(fact: Facts) -> Essentials:
    assert fact.hardware is not None, "asked only when all facts are known"
    return fact.hardware
