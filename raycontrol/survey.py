"""The nodes of the cluster as people see them: what Ray counts, who uses them, and what each node says of itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from raycontrol.duties import Cluster
from raycontrol.errors import RaycontrolError, UsageError
from raycontrol.hardware import NodeFacts, NodeInfo, NodeState, OfflineNode, SharedFolder
from raycontrol.job import Job
from raycontrol.lookups import LOOKUP_S, PEERS_LOOKED_UP
from raycontrol.placement import Node
from raycontrol.sharing import Sharing

log = logging.getLogger(__name__)

ANSWER_S = 10.0
CLOCK_READINGS = 3
LEAST_OF_ID = 4
"""So many characters of a node's id may stand for it."""

T = TypeVar("T")


class SeveralNodes(UsageError):
    """A text that is to name a node could mean one of several."""


@dataclass(frozen=True)
class Survey:
    """Asks the node actors of a cluster, all at once. Times: ``clock`` is the head's, in epoch seconds.

    A node that does not answer within ``answer_s`` seconds, or cannot, is shown without facts and holds up no other.
    ``check``: also how far the nodes' clocks are off, and how long the names of their peers take.
    ``offline`` says of a name why that node is.
    """

    cluster: Cluster
    clock: Callable[[], float]
    check: bool = False
    answer_s: float = ANSWER_S
    offline: Callable[[str], OfflineNode | None] = lambda name: None
    sharing: Sharing | None = None

    async def nodes(
        self, rooms: Sequence[Node], jobs: Sequence[Job], names: Sequence[str] | None
    ) -> list[NodeInfo]:
        """Return the nodes of these names (None: all), ordered by name; raises UsageError for a name that no node has."""
        chosen = sorted(named(rooms, names), key=lambda room: (room.name, room.id))
        head = await self.cluster.head_id()
        peers = [room.ip for room in rooms]
        return list(
            await asyncio.gather(*(self._node(room, room.id == head, jobs, peers) for room in chosen))
        )

    async def _node(self, room: Node, head: bool, jobs: Sequence[Job], ips: Sequence[str]) -> NodeInfo:
        jobs_here = _jobs_on(room.id, jobs)
        offline = self.offline(room.name)
        bare = NodeInfo(
            id=room.id,
            name=room.name,
            ip=room.ip,
            head=head,
            total=_shown(room.total),
            free=_shown(room.free),
            labels=dict(room.labels),
            state=_state(offline, jobs_here),
            offline=offline,
            groups=tuple(sorted(room.groups)),
            jobs=jobs_here,
        )
        peers = [ip for ip in dict.fromkeys(ips) if ip != room.ip][:PEERS_LOOKED_UP]
        try:
            return bare.model_copy(update={"facts": await self._facts(room, peers)})
        except asyncio.TimeoutError:
            return bare.model_copy(update={"silent": f"did not answer within {self.answer_s:g} s"})
        except Exception as error:  # what is wrong with one node is to be shown, beside the others
            log.warning("node %s (%s) gave no facts", room.name, room.ip, exc_info=True)
            return bare.model_copy(update={"silent": _words(error)})

    async def _facts(self, room: Node, peers: Sequence[str]) -> NodeFacts:
        node_id = room.id
        if not self.check:
            return await self._in_time(self.cluster.facts(node_id, False))
        facts, offset_s = await asyncio.gather(
            self._in_time(self.cluster.facts(node_id, True)), self._if_possible(self._offset_s(node_id))
        )
        # Not beside the clock's readings: many look-ups would delay the node's answer.
        lookups = await self._if_possible(self.cluster.look_up(node_id, peers, min(LOOKUP_S, self.answer_s)))
        found = {
            "clock_offset_s": offset_s,
            "lookups": tuple(lookups or ()),
            "shared": await self._shared(room),
        }
        return facts.model_copy(update=found)

    async def _shared(self, room: Node) -> SharedFolder | None:
        found = None if self.sharing is None else await self.sharing.of(room.id, room.name, anew=True)
        return None if found is None else SharedFolder(folder=found.folder, fault=found.fault)

    async def _offset_s(self, node_id: str) -> float:
        """Return how far the node's clock is ahead, by the reading that took the shortest way."""
        readings = []
        for _ in range(CLOCK_READINGS):
            before = self.clock()
            theirs = await self.cluster.time_of(node_id)
            after = self.clock()
            readings.append((after - before, theirs - (before + after) / 2))
        return min(readings)[1]

    async def _if_possible(self, answer: Awaitable[T]) -> T | None:
        """Return the answer; None when there is none: facts are worth showing without it."""
        try:
            return await self._in_time(answer)
        except Exception:
            log.warning("a node could not be checked", exc_info=True)
            return None

    async def _in_time(self, answer: Awaitable[T]) -> T:
        return await asyncio.wait_for(answer, self.answer_s)


def named(rooms: Sequence[Node], names: Sequence[str] | None) -> list[Node]:
    """Return the nodes that have these names, IPs or beginnings of ids; raises UsageError for one that fits none."""
    if names is None:
        return list(rooms)
    found = {room.id for name in names for room in _fitting(rooms, name)}
    return [room for room in rooms if room.id in found]


def _fitting(rooms: Sequence[Node], name: str) -> list[Node]:
    """A name or IP goes before the beginning of an id, so that a short name never means another node."""
    exact = [room for room in rooms if name in (room.name, room.ip)]
    by_id = [room for room in rooms if len(name) >= LEAST_OF_ID and room.id.startswith(name)]
    if not exact and not by_id:
        known = ", ".join(sorted(f"{room.name} ({room.ip})" for room in rooms))
        raise UsageError(f"no node {name!r}; the cluster has {known or 'no nodes'}")
    if not exact and len(by_id) > 1:
        ids = ", ".join(sorted(room.id for room in by_id))
        raise SeveralNodes(f"{name!r} is the beginning of several nodes' ids: {ids}; give more of it")
    return exact or by_id


def _state(offline: OfflineNode | None, jobs: Sequence[str]) -> NodeState:
    if offline is None:
        return NodeState.ONLINE
    return NodeState.DRAINING if jobs else NodeState.OFFLINE


def _shown(resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources without those by which Ray only names the node (``node:10.0.0.5``)."""
    return {name: amount for name, amount in resources.items() if not name.startswith("node:")}


def _jobs_on(node_id: str, jobs: Sequence[Job]) -> tuple[str, ...]:
    return tuple(
        job.id
        for job in jobs
        if not job.state.terminal
        and any(
            item.node_id == node_id and (not item.closed or job.kept_until is not None)
            for item in job.instances
        )
    )


def _words(error: Exception) -> str:
    """Return the error in one line: our own words, or its kind and last line, which in Ray's errors is the cause."""
    if isinstance(error, RaycontrolError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[-1:]])
