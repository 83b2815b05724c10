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
from raycontrol.plan import Facts, RdmaDecision, RdmaUse
from raycontrol.presets import Preset
from raycontrol.spec import JobSpec, Member, Site, When, members
from raycontrol.status import Word

INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
MOST_TOLD = 4


class Source(Word):
    """Where a variable's value comes from."""

    PRESET = "preset"
    NODE = "node"


class Value(NamedTuple):
    """A variable's value, where it comes from, and that in words."""

    text: str
    source: Source
    origin: str


class Placed(NamedTuple):
    """An instance and what it found on its node."""

    member: Member
    facts: Facts

    @property
    def on_node(self) -> str:
        return f"{self.member.name} on {self.facts.node_name}"


def may_be_used(spec: JobSpec) -> bool:
    """Whether the job can come to use RDMA, as far as its spec tells."""
    match spec.rdma.when:
        case When.OFF:
            return False
        case When.ON:
            return True
        case When.AUTO:
            gang = members(spec)
            return len(gang) > 1 and any(member.resources.gpu >= 1 for member in gang)


def decide(spec: JobSpec, gang: Sequence[Member], facts: Sequence[Facts]) -> RdmaDecision:
    """Return whether the job uses RDMA; raises PlanError when it must and cannot."""
    if not may_be_used(spec):
        return RdmaDecision(RdmaUse.OFF)
    # What the site lays down is in the spec already, but in a job of an older version.
    wish = spec.settled(Site()).rdma
    placed = [Placed(member, fact) for member, fact in zip(gang, facts, strict=True)]
    known = all(fact.hardware is not None for fact in facts)
    must = wish.when is When.ON
    few = () if must else _too_few(placed, wish.min_gpus or 0)
    missing = (*few, *_forbidden(placed), *(_missing(placed) if known else ()))
    if missing and must:
        raise PlanError(
            f"rdma is on, but {told(missing)} (`raycontrol doctor` says what to do; with `rdma: auto` the job goes without)"
        )
    if missing:
        return RdmaDecision(RdmaUse.MISSED, missing=missing)
    return RdmaDecision(RdmaUse.ON if known or must else RdmaUse.OPEN, preset=wish.preset)


def variables(
    gang: Sequence[Member], facts: Sequence[Facts], decision: RdmaDecision
) -> dict[str, dict[str, Value]]:
    """Return every instance's variables but those that the user has set or unset.

    Raises PlanError when a preset names what a node lacks.
    """
    layer = _layer([fact.hardware for fact in facts if fact.hardware is not None])
    preset = presets.preset(decision.preset) if decision.on and decision.preset is not None else None
    found = {}
    for member, fact in zip(gang, facts, strict=True):
        values = _interfaces(fact) | (_of_preset(preset, fact, layer) if preset is not None else {})
        found[member.name] = {name: value for name, value in values.items() if name not in member.env}
        if preset is not None:
            _check_names(preset, fact, found[member.name])
    return found


def remarks(facts: Sequence[Facts], decision: RdmaDecision) -> Iterator[str]:
    """Yield what a person should know before the job starts, of many nodes together."""
    if decision.use is RdmaUse.MISSED:
        yield f"RDMA stays off: {told(decision.missing)}"
    if not decision.on:
        return
    yield f"RDMA is on (preset {decision.preset})"
    nodes = _by_node(facts)
    down = [f"{hca.name} on {node}" for node, found in nodes.items() for hca in found.hcas if not hca.up]
    if down:
        yield f"not active: {some(down)}"
    limited = [node for node, found in nodes.items() if found.memlock != UNLIMITED]
    if limited:
        yield (
            f"locked memory is limited on {some(limited)}, and RDMA has to lock its buffers; "
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


def _too_few(placed: Sequence[Placed], min_gpus: int) -> tuple[str, ...]:
    few = [item.member.name for item in placed if item.member.resources.gpu < min_gpus]
    verb = "asks" if len(few) == 1 else "ask"
    return (f"{some(few)} {verb} for fewer GPUs than `rdma.min_gpus` ({min_gpus})",) if few else ()


def _forbidden(placed: Sequence[Placed]) -> Iterator[str]:
    names = [item.member.name for item in placed if item.member.env.get("NCCL_IB_DISABLE") == "1"]
    if names:
        yield f"the job's env has NCCL_IB_DISABLE=1 ({some(names)})"


def _missing(placed: Sequence[Placed]) -> Iterator[str]:
    """Yield what stands in the way on the nodes."""
    yield from _sharers(placed)
    yield from _of_gpus(placed)
    nodes = _by_node([item.facts for item in placed])
    if not any(hardware.hcas for hardware in nodes.values()):
        yield f"no RDMA device on {some(list(nodes))}"
        return
    reasons = {node: _of_network(hardware) for node, hardware in nodes.items()}
    yield from (f"{node} has {reason}" for node, reason in reasons.items() if reason)
    if not any(reasons.values()) and _layer(list(nodes.values())) is None:
        yield "the nodes have no link layer in common (InfiniBand here, Ethernet there)"


def _sharers(placed: Sequence[Placed]) -> Iterator[str]:
    names = {item.facts.ip: item.facts.node_name for item in placed}
    for ip, count in Counter(item.facts.ip for item in placed).items():
        if count > 1:
            yield f"{count} instances share {names[ip]}"


def _of_gpus(placed: Sequence[Placed]) -> Iterator[str]:
    for item in placed:
        hardware, held = _hardware(item.facts), item.member.resources.gpu
        if held < hardware.gpus:
            yield f"{item.on_node} holds {held:g} of its {hardware.gpus:g} GPUs"
    for node, hardware in _by_node([item.facts for item in placed]).items():
        if hardware.foreign:
            yield f"on {node} other programs use the GPUs: {some(hardware.foreign)}"


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
    return {name: Value(exact.get(name, fact.interface), Source.NODE, origin) for name in INTERFACES}


def _of_preset(preset: Preset, fact: Facts, layer: str | None) -> dict[str, Value]:
    origin = f"preset {preset.name}"
    values = {key: Value(text, Source.PRESET, origin) for key, text in preset.variables.items()}
    detected = _symbolic(fact) if fact.hardware is None else _detected(fact.hardware, layer)
    return values | {key: value for key, value in detected.items() if key in preset.detect}


def _detected(hardware: Essentials, layer: str | None) -> dict[str, Value]:
    usable = _usable(hardware, layer)
    values = {}
    if usable:
        ports = ",".join(hca.name for hca in usable)
        values["NCCL_IB_HCA"] = Value(f"={ports}", Source.NODE, f"the active {layer} ports")
    indexes = {hca.gid_index for hca in usable}
    index = next(iter(indexes), None)
    if layer == ETHERNET and len(indexes) == 1 and index is not None:
        values["NCCL_IB_GID_INDEX"] = Value(str(index), Source.NODE, "RoCE v2 with the node's IPv4")
    return values


def _symbolic(fact: Facts) -> dict[str, Value]:
    return {
        "NCCL_IB_HCA": Value(f"<active RDMA ports of {fact.instance}>", Source.NODE, "the node"),
        "NCCL_IB_GID_INDEX": Value(f"<RoCE v2 GID index of {fact.instance}>", Source.NODE, "the node"),
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


def _check_names(preset: Preset, fact: Facts, values: Mapping[str, Value]) -> None:
    hardware = fact.hardware
    if hardware is None:
        return
    known: dict[str, list[str]] = {
        "NCCL_IB_HCA": [hca.name for hca in hardware.hcas if hca.up and hca.provider],
        "NCCL_SOCKET_IFNAME": list(hardware.interfaces),
        "GLOO_SOCKET_IFNAME": list(hardware.interfaces),
    }
    for name, there in known.items():
        value = values.get(name)
        if value is None or value.source is not Source.PRESET:
            continue
        exact = name == "GLOO_SOCKET_IFNAME"
        if not chosen_by(value.text, there, exact=exact):
            kind = "active RDMA port" if name == "NCCL_IB_HCA" else "network interface"
            raise PlanError(
                f"preset {preset.name} sets {name}={value.text}, but {fact.node_name} has no such {kind} "
                f"(it has {some(there) or 'none'}); set {name} in `env`, or choose another preset"
            )


def chosen_by(pattern: str, names: Collection[str], exact: bool = False) -> list[str]:
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
