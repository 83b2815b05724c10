"""What the controller knows of nodes beside Ray's count: what people have said of them, and what they say of themselves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from raycontrol.duties import Cluster
from raycontrol.errors import UsageError
from raycontrol.events import NodeDrained
from raycontrol.hardware import NodeGroup, OfflineNode, Traits, traits
from raycontrol.heldstore import HeldStore
from raycontrol.ledger import Ledger
from raycontrol.noderows import NodeRows
from raycontrol.placement import Assignment, Node
from raycontrol.spec import JobSpec
from raycontrol.specparts import NAME, NAME_RULE
from raycontrol.survey import SeveralNodes, named

log = logging.getLogger(__name__)

TRAITS_KEPT_S = 60.0
ASK_AGAIN_S = 5.0
ANSWER_S = 10.0
LONGEST = 500
"""Characters of a reason, and of a name."""


@dataclass
class _Known:
    """What a node has said of itself, and when it may be asked again (of a clock that only goes forward)."""

    traits: Traits | None = None
    again_at: float = 0.0
    asking: asyncio.Task[None] | None = None


class Roster:
    """The only writer of what is offline and which groups there are: in the store, and here as it is there.

    ``name`` is the cluster's. What nodes say of themselves is asked for when a job needs it, and kept for a minute.
    """

    def __init__(
        self, name: str, held: HeldStore, ledger: Ledger, cluster: Cluster, clock: Callable[[], float]
    ) -> None:
        self._name = name
        self._held = held
        self._ledger = ledger
        self._cluster = cluster
        self._clock = clock
        self._offline: dict[str, OfflineNode] = {}
        self._groups: Mapping[str, tuple[str, ...]] = {}
        self._known: dict[str, _Known] = {}
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Read what an earlier controller of the cluster left."""
        offline = await self._held.ask(lambda store: store.nodes.offline(self._name))
        self._offline = {node.name: node for node in offline}
        self._groups = await self._held.ask(lambda store: store.nodes.groups(self._name))

    # What people have said.

    async def set_offline(self, names: Sequence[str], reason: str, by: str) -> list[OfflineNode]:
        """Let nodes take no new job; jobs that are there go on. A name that no node has now is kept for one that will.

        Raises UsageError for a reason or a name that cannot be one.
        """
        reason = _checked("reason", reason)
        found, absent = await self._resolved(names)
        now = self._clock()
        marks = [OfflineNode(name=name, reason=reason, by=by, at=now) for name in (*found, *absent)]
        async with self._changing:
            await self._held.ask(lambda store: store.nodes.set_offline(self._name, marks))
            self._offline.update((mark.name, mark) for mark in marks)
        log.info("%s set %s offline: %s", by, ", ".join(mark.name for mark in marks), reason)
        self._tell_jobs(marks)
        self._ledger.look.set()
        return [mark.model_copy(update={"absent": mark.name in absent}) for mark in marks]

    async def set_online(self, names: Sequence[str], by: str) -> list[str]:
        """Let nodes take jobs again; return their names. One that is not offline stays as it is.

        Raises UsageError for a name that no node has and none that is offline.
        """
        found, absent = await self._resolved(names)
        unknown = [name for name in absent if name not in self._offline]
        if unknown:
            raise UsageError(
                f"no node {unknown[0]!r} is there or offline; `raycontrol nodes` shows those that are there, "
                "`raycontrol node offline` those that are offline"
            )
        wanted = [*found, *absent]
        async with self._changing:
            await self._held.ask(lambda store: store.nodes.set_online(self._name, wanted))
            for name in wanted:
                self._offline.pop(name, None)
        log.info("%s set %s online", by, ", ".join(wanted))
        self._ledger.look.set()
        return wanted

    async def offline(self) -> list[OfflineNode]:
        """Return the nodes that are offline, ordered by name; also such as are not there now."""
        living = {node.name for node in await self._cluster.nodes()}
        return [
            mark.model_copy(update={"absent": name not in living})
            for name, mark in sorted(self._offline.items())
        ]

    async def groups(self) -> list[NodeGroup]:
        """Return the groups, ordered by name."""
        living = {node.name for node in await self._cluster.nodes()}
        return [
            NodeGroup(name=name, nodes=nodes, absent=tuple(node for node in nodes if node not in living))
            for name, nodes in sorted(self._groups.items())
        ]

    async def add_to_group(self, group: str, names: Sequence[str], by: str) -> NodeGroup:
        """Put nodes into a group, made if there is none; also such as are not there now. Raises UsageError."""
        if not NAME.match(group):
            raise UsageError(f"group: {NAME_RULE}, got {group!r}")
        found, absent = await self._resolved(names)
        wanted = [*found, *absent]
        said = f"put {', '.join(wanted)} into"
        return await self._changed_group(
            group, said, by, lambda rows: rows.add_to_group(self._name, group, wanted)
        )

    async def remove_from_group(self, group: str, names: Sequence[str] | None, by: str) -> NodeGroup:
        """Take nodes out of a group (None: all); without nodes there is no group. Raises UsageError for an unknown one."""
        if group not in self._groups:
            raise UsageError(self._no_group(group))
        found, absent = ([], []) if names is None else await self._resolved(names)
        members = self._groups.get(group, ())  # somebody else may have removed it meanwhile
        wanted = None if names is None else [*found, *absent]
        strangers = [name for name in wanted or () if name not in members]
        if strangers:
            raise UsageError(f"{strangers[0]!r} is not in the group {group}; it has {', '.join(members)}")
        said = f"took {'all' if wanted is None else ', '.join(wanted)} out of"
        return await self._changed_group(
            group, said, by, lambda rows: rows.remove_from_group(self._name, group, wanted)
        )

    async def _changed_group(
        self, group: str, said: str, by: str, change: Callable[[NodeRows], None]
    ) -> NodeGroup:
        async with self._changing:
            self._groups = await self._held.ask(lambda store: self._changed_rows(store.nodes, change))
        log.info("%s %s the group %s", by, said, group)
        self._ledger.look.set()
        left = next((found for found in await self.groups() if found.name == group), None)
        return left or NodeGroup(name=group, nodes=())

    def _changed_rows(
        self, rows: NodeRows, change: Callable[[NodeRows], None]
    ) -> Mapping[str, tuple[str, ...]]:
        change(rows)
        return rows.groups(self._name)

    async def _resolved(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the names of the nodes that are meant (by name, IP or the beginning of an id), and those of no node."""
        if not names:
            raise UsageError("nodes: name at least one")
        living = await self._cluster.nodes()
        found: dict[str, None] = {}
        absent: dict[str, None] = {}
        for name in names:
            try:
                found.update((node.name, None) for node in named(living, [name]))
            except SeveralNodes:
                raise
            except UsageError:
                absent[_checked("a node's name", name)] = None
        return list(found), list(absent)

    def _tell_jobs(self, marks: Iterable[OfflineNode]) -> None:
        now = self._clock()
        for mark in marks:
            for job in [*self._ledger.jobs.values()]:
                if any(item.node_name == mark.name for item in job.instances):
                    self._ledger.post(job.id, NodeDrained(now, mark.name, f"{mark.reason} ({mark.by})"))

    def tell_if_offline(self, job_id: str, rooms: Iterable[Assignment]) -> None:
        """Tell a job that has just got its nodes of those that were set offline meanwhile."""
        for name in dict.fromkeys(room.node_name for room in rooms):
            if (mark := self._offline.get(name)) is not None:
                self._ledger.post(job_id, NodeDrained(self._clock(), name, f"{mark.reason} ({mark.by})"))

    # For the queue, and for those who look.

    def check(self, spec: JobSpec) -> None:
        """Raise UsageError where the spec names a group that there is not."""
        if spec.node_group is not None and spec.node_group not in self._groups:
            raise UsageError(f"node_group: {self._no_group(spec.node_group)}")

    def require_group(self, group: str) -> None:
        """Raise UsageError where there is no such group."""
        if group not in self._groups:
            raise UsageError(self._no_group(group))

    def _no_group(self, group: str) -> str:
        known = ", ".join(sorted(self._groups)) or "none"
        return f"there is no group {group!r} of nodes; known: {known} (`raycontrol node group add` makes one)"

    def mark_of(self, name: str) -> OfflineNode | None:
        """Return why a node is offline, None where it is not."""
        return self._offline.get(name)

    def marked(self, nodes: Sequence[Node], topology: Sequence[str]) -> tuple[Node, ...]:
        """Return the nodes with all that is known of them; ``topology`` names labels, the widest first."""
        groups: dict[str, list[str]] = {}
        for group, members in self._groups.items():
            for name in members:
                groups.setdefault(name, []).append(group)
        return tuple(
            replace(
                node,
                offline=self._offline[node.name].reason if node.name in self._offline else None,
                groups=frozenset(groups.get(node.name, ())),
                traits=self._known[node.id].traits if node.id in self._known else None,
                topology=tuple(node.labels.get(label, "") for label in topology),
            )
            for node in nodes
        )

    # What nodes say of themselves.

    def learn(self, nodes: Sequence[Node]) -> list[asyncio.Task[None]]:
        """Ask nodes of which nothing is known, or has been for long; return at once, with what is being asked.

        The queue is told when there is something new.
        """
        now = time.monotonic()
        self._known = {node.id: self._known.get(node.id) or _Known() for node in nodes}
        for node_id, known in self._known.items():
            if (known.asking is None or known.asking.done()) and known.again_at <= now:
                known.asking = asyncio.ensure_future(self._ask(node_id, known))
        asking = (known.asking for known in self._known.values())
        return [task for task in asking if task is not None and not task.done()]

    async def _ask(self, node_id: str, known: _Known) -> None:
        try:
            facts = await asyncio.wait_for(self._cluster.facts(node_id, False), ANSWER_S)
        except Exception as error:  # it may have no actor yet, or be on its way out: it is asked again
            log.warning("node %s has not told its facts: %s", node_id, error)
            known.again_at = time.monotonic() + ASK_AGAIN_S
            return
        found = traits(facts)
        known.again_at = time.monotonic() + TRAITS_KEPT_S
        if found != known.traits:
            known.traits = found
            self._ledger.look.set()


def _checked(what: str, text: str) -> str:
    if not text.strip() or not text.isprintable() or len(text) > LONGEST:
        raise UsageError(f"{what}: must be 1 to {LONGEST} printable characters, got {text[:LONGEST]!r}")
    return text.strip()
