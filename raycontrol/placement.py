"""Which node each instance goes to. Pure: decides from one snapshot of the cluster, which includes what others use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

from raycontrol.hardware import Traits
from raycontrol.spec import Member, Placement, Resources
from raycontrol.wording import counted

EPSILON = 1e-6
TENANCY = "tenancy"
"""Of this every node has 1 for our jobs, and Ray knows nothing of it: an instance takes a hair, that of a job that is to
be alone all of it."""
NO_NODE = "the cluster has no living node"
A_HAIR = 1e-5
"""More than ``EPSILON``, and there is room for 100,000."""


@dataclass(frozen=True)
class Node:
    """One living node: ``total`` and ``free`` by Ray's resource names (CPU, GPU, memory in bytes).

    ``offline`` says why it is to take no new job; ``groups`` are those that it is in; ``traits`` what it is made of, None
    while that is not known; ``topology`` where it stands, from the widest to the narrowest: nodes that sort beside each
    other are neighbours.
    """

    id: str
    name: str
    ip: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    offline: str | None = None
    groups: frozenset[str] = frozenset()
    traits: Traits | None = None
    topology: tuple[str, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """The node of one instance."""

    instance: str
    node_id: str
    node_name: str
    ip: str


@dataclass(frozen=True)
class NoRoom:
    """Why a gang cannot be placed. ``never`` says that the cluster as it is could not run it even if it were empty."""

    why: str
    never: bool


Amounts: TypeAlias = Mapping[str, float]
"""By Ray's resource names."""


def demand(resources: Resources) -> dict[str, float]:
    """Return what one instance takes, by Ray's resource names: the scarcest first, which rules out most nodes."""
    wanted = {
        "GPU": float(resources.gpu),
        "CPU": float(resources.cpu),
        "memory": float(resources.memory or 0),
    }
    return {name: amount for name, amount in wanted.items() if amount > 0}


def needs(member: Member) -> dict[str, float]:
    """Return what one instance takes of a node, as we count: what Ray reserves, and its tenancy."""
    return {**demand(member.resources), TENANCY: 1.0 if member.exclusive else A_HAIR}


def with_tenancy(nodes: Iterable[Node], held: Mapping[str, float]) -> list[Node]:
    """Return the nodes with their tenancy, of which ``held`` is taken, by the nodes' ids."""
    return [
        _with(node, {**node.total, TENANCY: 1.0}, {**node.free, TENANCY: 1.0 - held.get(node.id, 0.0)})
        for node in nodes
    ]


def place(
    members: Sequence[Member], placement: Placement, nodes: Sequence[Node]
) -> tuple[Assignment, ...] | NoRoom:
    """Return a node for every member, in the members' order, or why there is none; no other job of ours is there.

    ``strict`` gives every instance a node of its own, ``pack`` fills the fullest nodes first. Inside a group
    instances follow the topology, then the names of nodes, so that neighbours in rank are neighbours.
    """
    nodes = with_tenancy(nodes, {})
    found = find(members, placement, nodes)
    if found is not None:
        return found
    if not nodes:
        return NoRoom(NO_NODE, never=True)
    never = not could_ever(members, placement, nodes)
    return NoRoom(explain(members, placement, nodes, never=never), never=never)


def find(
    members: Sequence[Member], placement: Placement, nodes: Sequence[Node], soonest: Amounts | None = None
) -> tuple[Assignment, ...] | None:
    """Return a node for every member, or None, without a reason. By ``soonest`` nodes (their ids) are taken before
    others whatever is free on them, the lowest number first."""
    chosen = _FINDERS[placement](members, nodes, attrgetter("free"), soonest or {})
    return None if chosen is None else _neighbours_beside_each_other(members, chosen)


def could_ever(members: Sequence[Member], placement: Placement, nodes: Sequence[Node]) -> bool:
    """Whether the nodes, empty, could run the gang."""
    return _FINDERS[placement](members, nodes, attrgetter("total"), {}) is not None


def reserve(
    nodes: Sequence[Node], members: Sequence[Member], assignments: Sequence[Assignment]
) -> tuple[Node, ...]:
    """Return the nodes with what the assignments take subtracted from what is free, of all that the nodes have."""
    taking = {room.node_id for room in assignments}
    free = {node.id: dict(node.free) for node in nodes if node.id in taking}
    for member, room in zip(members, assignments, strict=True):
        if room.node_id in free:
            taken = needs(member)
            if TENANCY not in free[room.node_id]:
                del taken[TENANCY]
            take(free[room.node_id], taken)
    return tuple(with_free(node, free[node.id]) if node.id in free else node for node in nodes)


def with_free(node: Node, free: Amounts) -> Node:
    return _with(node, node.total, free)


def _with(node: Node, total: Amounts, free: Amounts) -> Node:
    """As ``dataclasses.replace``, which takes several times as long."""
    return Node(
        node.id,
        node.name,
        node.ip,
        total,
        free,
        node.labels,
        node.offline,
        node.groups,
        node.traits,
        node.topology,
    )


def hardest(members: Iterable[Member]) -> Member:
    """Return the member that asks for most."""
    return max(members, key=lambda item: (item.resources.gpu, item.resources.cpu, item.resources.memory or 0))


def fits(wanted: Amounts, room: Amounts) -> bool:
    """Whether one instance fits into what is free on one node."""
    for name, amount in wanted.items():  # no generator: asked for every node
        if room.get(name, 0.0) + EPSILON < amount:
            return False
    return _has_gpu(wanted.get("GPU", 0.0), room.get("GPU", 0.0))


def _has_gpu(share: float, free: float) -> bool:
    """Whether one GPU has so large a share free. Ray tells only the sum: shares are taken to lie on as few GPUs as can be."""
    rest = free - int(free + EPSILON)
    return share >= 1 or free + EPSILON >= 1 or rest + EPSILON >= share


def take(room: dict[str, float], wanted: Amounts) -> None:
    """Subtract what one instance takes from what is free on its node."""
    for name, amount in wanted.items():
        room[name] = room.get(name, 0.0) - (_gpu_taken(amount, room) if name == "GPU" else amount)


def _gpu_taken(share: float, room: Amounts) -> float:
    """Return by how much the free GPUs become less. A share that has to begin a GPU leaves of the one that was begun
    before nothing that could be added to it, so that rest is given up."""
    free = room.get("GPU", 0.0)
    rest = free - int(free + EPSILON)
    begins_another = 0 < share < 1 and rest > EPSILON and rest + EPSILON < share
    return share + rest if begins_another else share


def _match(
    members: Sequence[Member],
    nodes: Sequence[Node],
    room: Callable[[Node], Amounts],
    soonest: Amounts,
) -> dict[str, Node] | None:
    """Give every member a node of its own: bipartite matching by augmenting paths, fullest nodes tried first.

    A free node is taken before another member is asked to move, so that a gang of equals fills nodes in order.
    """
    kinds = _kinds(members)
    fitting = [node for node in nodes if _fits_one(kinds, room(node))]
    if len(members) > len(fitting):
        return None
    asked = {name for wanted in kinds for name in wanted}
    order = sorted(fitting, key=lambda node: _preference(node, room(node), asked, soonest))
    chosen: dict[str, Node] = {}
    holder: dict[str, Member] = {}
    for member in members:
        path = _augmenting_path(member, order, room, holder)
        if path is None:
            return None
        for node, taker in path:
            chosen[taker.name], holder[node.id] = node, taker
    return chosen


def _kinds(members: Iterable[Member]) -> list[dict[str, float]]:
    """Return what members ask for, each kind once."""
    return list({tuple(wanted.items()): wanted for wanted in map(needs, members)}.values())


def _fits_one(kinds: Sequence[Amounts], room: Amounts) -> bool:
    if len(kinds) == 1:
        return fits(kinds[0], room)
    return any(fits(wanted, room) for wanted in kinds)


def _augmenting_path(
    member: Member,
    order: Sequence[Node],
    room: Callable[[Node], Amounts],
    holder: Mapping[str, Member],
) -> list[tuple[Node, Member]] | None:
    """Return who takes which node so that ``member`` gets one too, or None: breadth first, so that few must move."""
    asked_by: dict[str, tuple[Node, Member]] = {}
    movers = [member]
    came_from: dict[str, Node] = {}
    for mover in movers:  # grows while it is walked
        wanted = needs(mover)
        for node in order:
            if node.id in asked_by or not fits(wanted, room(node)):
                continue
            asked_by[node.id] = node, mover
            if node.id not in holder:
                return _walk_back(node, asked_by, came_from)
            movers.append(holder[node.id])
            came_from[holder[node.id].name] = node
    return None


def _walk_back(
    node: Node, asked_by: Mapping[str, tuple[Node, Member]], came_from: Mapping[str, Node]
) -> list[tuple[Node, Member]]:
    path = []
    while True:
        _, taker = asked_by[node.id]
        path.append((node, taker))
        if taker.name not in came_from:
            return path
        node = came_from[taker.name]


def _pack(
    members: Sequence[Member],
    nodes: Sequence[Node],
    room: Callable[[Node], Amounts],
    soonest: Amounts,
) -> dict[str, Node] | None:
    """Put the most demanding members first, each on the fullest node that still has room."""
    kinds = _kinds(members)
    fitting = [node for node in nodes if _fits_one(kinds, room(node))]
    free = {node.id: dict(room(node)) for node in fitting}
    chosen: dict[str, Node] = {}
    for member in sorted(members, key=lambda item: (-item.resources.gpu, -item.resources.cpu, item.index)):
        wanted = needs(member)
        able = [node for node in fitting if fits(wanted, free[node.id])]
        if not able:
            return None
        node = min(able, key=lambda item: _preference(item, free[item.id], wanted, soonest))
        take(free[node.id], wanted)
        chosen[member.name] = node
    return chosen


_FINDERS = {Placement.STRICT: _match, Placement.PACK: _pack}


def _preference(
    node: Node, room: Amounts, asked: Collection[str], soonest: Amounts
) -> tuple[float, bool, float, float, float, tuple[str, ...], str]:
    """Nodes that nobody uses come last, however small they are: they stay whole for those who need whole ones.

    Memory counts only where it is asked for: Ray's figures differ by some bytes between machines that are equal.
    """
    gpu, cpu = room.get("GPU", 0.0), room.get("CPU", 0.0)
    total = node.total
    untouched = gpu + EPSILON >= total.get("GPU", 0.0) and cpu + EPSILON >= total.get("CPU", 0.0)
    memory = room.get("memory", 0.0) if "memory" in asked else 0.0
    return soonest.get(node.id, 0.0), untouched, gpu, cpu, memory, node.topology, node.name


def _neighbours_beside_each_other(
    members: Sequence[Member], chosen: Mapping[str, Node]
) -> tuple[Assignment, ...]:
    rooms: dict[str, list[Node]] = {}
    for member in members:
        rooms.setdefault(member.group, []).append(chosen[member.name])
    for nodes in rooms.values():
        nodes.sort(key=lambda node: (node.topology, node.name, node.id), reverse=True)
    assignments = []
    for member in members:
        node = rooms[member.group].pop()
        assignments.append(Assignment(member.name, node.id, node.name, node.ip))
    return tuple(assignments)


def explain(
    members: Sequence[Member],
    placement: Placement,
    nodes: Sequence[Node],
    *,
    never: bool,
    fitting: int | None = None,
    may_pack: bool = True,
) -> str:
    """Say what is missing, in words that a person can act on; ``fitting``: how many nodes can take the most demanding
    instance, if that is known; ``may_pack``: whether the job could do with `placement: pack`."""
    most = hardest(members)
    wanted = needs(most)
    room = attrgetter("total") if never else attrgetter("free")
    if fitting is None:
        fitting = sum(fits(wanted, room(node)) for node in nodes)
    word = "" if never else " free"
    wants = f"needs {counted(len(members), 'instance')} with {_amounts(wanted)}{word}"
    if placement is Placement.STRICT:
        alone = " and of no other job" if most.exclusive else ""
        apart = f", each on a node of its own{alone}"
        single = " on a node of no other job" if most.exclusive else " on one node"
        text = wants + (apart if len(members) > 1 else single)
        if nodes:
            text += f"; {fitting} of {counted(len(nodes), 'node')} can take one"
        if never and may_pack and not most.exclusive and could_ever(members, Placement.PACK, nodes):
            text += "; `placement: pack` (or `--set placement=pack`) lets instances share a node"
    elif nodes:
        text = f"{wants}; the {counted(len(nodes), 'node')} together cannot take all of them"
    else:
        text = wants
    return ("infeasible now: " if never else "") + text


def _amounts(wanted: Amounts) -> str:
    parts = [f"{name.lower()} {wanted[name]:g}" for name in ("CPU", "GPU") if name in wanted]
    if "memory" in wanted:
        parts.append(f"memory {wanted['memory'] / 2**30:.3g} GiB")
    return ", ".join(parts)
