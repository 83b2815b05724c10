"""Which node each instance goes to. Pure: decides from one snapshot of the cluster, which includes what others use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from raycontrol.spec import Member, Placement, Resources

EPSILON = 1e-6


@dataclass(frozen=True)
class Node:
    """One living node: ``total`` and ``free`` by Ray's resource names (CPU, GPU, memory in bytes)."""

    id: str
    name: str
    ip: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


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


def demand(resources: Resources) -> dict[str, float]:
    """Return what one instance takes, by Ray's resource names."""
    wanted = {
        "CPU": float(resources.cpu),
        "GPU": float(resources.gpu),
        "memory": float(resources.memory or 0),
    }
    return {name: amount for name, amount in wanted.items() if amount > 0}


def place(
    members: Sequence[Member], placement: Placement, nodes: Sequence[Node]
) -> tuple[Assignment, ...] | NoRoom:
    """Return a node for every member, in the members' order, or why there is none.

    ``strict`` gives every instance a node of its own, ``pack`` fills the fullest nodes first. Inside a group
    instances follow the order of node names, so that neighbours in rank are neighbours by name.
    """
    find = _match if placement is Placement.STRICT else _pack
    chosen = find(members, nodes, {node.id: node.free for node in nodes})
    if chosen is not None:
        return _in_name_order(members, chosen)
    empty = find(members, nodes, {node.id: node.total for node in nodes})
    return NoRoom(_explain(members, placement, nodes, never=empty is None), never=empty is None)


def reserve(
    nodes: Sequence[Node], members: Sequence[Member], assignments: Sequence[Assignment]
) -> tuple[Node, ...]:
    """Return the nodes with what the assignments take subtracted from what is free."""
    free = {node.id: dict(node.free) for node in nodes}
    for member, room in zip(members, assignments, strict=True):
        if room.node_id in free:
            _take(free[room.node_id], demand(member.resources))
    return tuple(Node(n.id, n.name, n.ip, n.total, free[n.id], n.labels) for n in nodes)


def _fits(wanted: Mapping[str, float], room: Mapping[str, float]) -> bool:
    amounts = all(room.get(name, 0.0) + EPSILON >= amount for name, amount in wanted.items())
    return amounts and _has_gpu(wanted.get("GPU", 0.0), room.get("GPU", 0.0))


def _has_gpu(share: float, free: float) -> bool:
    """Whether one GPU has so large a share free. Ray tells only the sum: shares are taken to lie on as few GPUs as can be."""
    rest = free - int(free + EPSILON)
    return share >= 1 or free + EPSILON >= 1 or rest + EPSILON >= share


def _take(room: dict[str, float], wanted: Mapping[str, float]) -> None:
    for name, amount in wanted.items():
        room[name] = room.get(name, 0.0) - (_gpu_taken(amount, room) if name == "GPU" else amount)


def _gpu_taken(share: float, room: Mapping[str, float]) -> float:
    """Return by how much the free GPUs become less. A share that has to begin a GPU leaves of the one that was begun
    before nothing that could be added to it, so that rest is given up."""
    free = room.get("GPU", 0.0)
    rest = free - int(free + EPSILON)
    begins_another = 0 < share < 1 and rest > EPSILON and rest + EPSILON < share
    return share + rest if begins_another else share


def _match(
    members: Sequence[Member], nodes: Sequence[Node], room: Mapping[str, Mapping[str, float]]
) -> dict[str, Node] | None:
    """Give every member a node of its own: bipartite matching by augmenting paths, fullest nodes tried first.

    A free node is taken before another member is asked to move, so that a gang of equals fills nodes in order.
    """
    if len(members) > len(nodes):
        return None
    asked = {name for member in members for name in demand(member.resources)}
    order = sorted(nodes, key=lambda node: (_emptiness(node, room[node.id], asked), node.name))
    chosen: dict[str, Node] = {}
    holder: dict[str, Member] = {}
    for member in members:
        path = _augmenting_path(member, order, room, holder)
        if path is None:
            return None
        for node, taker in path:
            chosen[taker.name], holder[node.id] = node, taker
    return chosen


def _augmenting_path(
    member: Member,
    order: Sequence[Node],
    room: Mapping[str, Mapping[str, float]],
    holder: Mapping[str, Member],
) -> list[tuple[Node, Member]] | None:
    """Return who takes which node so that ``member`` gets one too, or None: breadth first, so that few must move."""
    asked_by: dict[str, tuple[Node, Member]] = {}
    movers = [member]
    came_from: dict[str, Node] = {}
    for mover in movers:  # grows while it is walked
        wanted = demand(mover.resources)
        for node in order:
            if node.id in asked_by or not _fits(wanted, room[node.id]):
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
    members: Sequence[Member], nodes: Sequence[Node], room: Mapping[str, Mapping[str, float]]
) -> dict[str, Node] | None:
    """Put the most demanding members first, each on the fullest node that still has room."""
    free = {node.id: dict(room[node.id]) for node in nodes}
    chosen: dict[str, Node] = {}
    for member in sorted(members, key=lambda item: (-item.resources.gpu, -item.resources.cpu, item.index)):
        wanted = demand(member.resources)
        fitting = [node for node in nodes if _fits(wanted, free[node.id])]
        if not fitting:
            return None
        node = min(fitting, key=lambda item: (_emptiness(item, free[item.id], wanted), item.name))
        _take(free[node.id], wanted)
        chosen[member.name] = node
    return chosen


def _emptiness(
    node: Node, room: Mapping[str, float], asked: Collection[str]
) -> tuple[bool, float, float, float]:
    """Nodes that nobody uses come last, however small they are: they stay whole for those who need whole ones.

    Memory counts only where it is asked for: Ray's figures differ by some bytes between machines that are equal.
    """
    untouched = all(room.get(name, 0.0) + EPSILON >= node.total.get(name, 0.0) for name in ("GPU", "CPU"))
    memory = room.get("memory", 0.0) if "memory" in asked else 0.0
    return untouched, room.get("GPU", 0.0), room.get("CPU", 0.0), memory


def _in_name_order(members: Sequence[Member], chosen: Mapping[str, Node]) -> tuple[Assignment, ...]:
    rooms: dict[str, list[Node]] = {}
    for member in members:
        rooms.setdefault(member.group, []).append(chosen[member.name])
    for nodes in rooms.values():
        nodes.sort(key=lambda node: (node.name, node.id), reverse=True)
    assignments = []
    for member in members:
        node = rooms[member.group].pop()
        assignments.append(Assignment(member.name, node.id, node.name, node.ip))
    return tuple(assignments)


def _explain(members: Sequence[Member], placement: Placement, nodes: Sequence[Node], *, never: bool) -> str:
    """Say what is missing, in words that a person can act on."""
    if not nodes:
        return "the cluster has no living node"
    hardest = max(
        members, key=lambda item: (item.resources.gpu, item.resources.cpu, item.resources.memory or 0)
    )
    wanted = demand(hardest.resources)
    field_name = "total" if never else "free"
    fitting = sum(_fits(wanted, getattr(node, field_name)) for node in nodes)
    word = "" if never else " free"
    needs = f"needs {_count(len(members), 'instance')} with {_amounts(wanted)}{word}"
    if placement is Placement.STRICT:
        text = f"{needs}, each on a node of its own; {fitting} of {_count(len(nodes), 'node')} can take one"
        if never and _pack(members, nodes, {node.id: node.total for node in nodes}) is not None:
            text += "; `placement: pack` (or `--set placement=pack`) lets instances share a node"
    else:
        text = f"{needs}; the {_count(len(nodes), 'node')} together cannot take all of them"
    return ("the cluster as it is can never run it: " if never else "") + text


def _amounts(wanted: Mapping[str, float]) -> str:
    words = {"CPU": "cpu", "GPU": "gpu"}
    parts = [f"{words[name]} {amount:g}" for name, amount in wanted.items() if name in words]
    if "memory" in wanted:
        parts.append(f"memory {wanted['memory'] / 2**30:.3g} GiB")
    return ", ".join(parts)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
