"""The queue at work: what is free is looked up, ``queue`` decides, and the waiting jobs are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from raycontrol import placement, queue
from raycontrol.duties import Cluster
from raycontrol.events import NodesChosen, PlacementDeferred
from raycontrol.job import Job
from raycontrol.ledger import Ledger
from raycontrol.spec import members
from raycontrol.status import JobState

log = logging.getLogger(__name__)

QUEUE_POLL_S = 0.5
"""How often the cluster is looked at while jobs wait: other programs' resources and joining nodes are not announced."""


class Scheduler:
    """Decides upon all waiting jobs whenever the ledger has news for the queue, and while jobs wait again and again."""

    def __init__(self, ledger: Ledger, cluster: Cluster, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._cluster = cluster
        self._clock = clock

    def in_order(self) -> list[Job]:
        """Return the waiting jobs, in the order in which they are decided upon."""
        return [self._ledger.jobs[entry.job_id] for entry in queue.in_order(self._waiting())]

    async def rooms(self) -> tuple[placement.Node, ...]:
        """Return the living nodes with what is free on them."""
        return _less_our_own(await self._cluster.nodes(), self._ledger.jobs.values())

    async def run(self) -> None:
        """Serve the queue, for ever."""
        while True:
            waiting = self._waiting()
            if waiting:
                try:
                    await self._place(waiting)
                except Exception:  # a cluster that does not answer now is asked again
                    log.exception("the cluster could not be asked; trying again")
            await _wait(self._ledger.look, QUEUE_POLL_S if waiting else None)
            self._ledger.look.clear()

    def _waiting(self) -> list[queue.Waiting]:
        return [
            queue.Waiting(job.id, job.spec, job.submitted_at)
            for job in self._ledger.jobs.values()
            if job.state is JobState.QUEUED
        ]

    async def _place(self, waiting: Sequence[queue.Waiting]) -> None:
        nodes = await self.rooms()
        now = self._clock()
        told = []
        for decision in queue.decide(waiting, nodes):
            match decision:
                case queue.PlaceNow(job_id, assignments):
                    told.append(self._ledger.tell(job_id, NodesChosen(now, assignments)))
                case queue.KeepWaiting(job_id, why):
                    told.append(self._ledger.tell(job_id, PlacementDeferred(now, why)))
        await asyncio.gather(*told)


def _less_our_own(nodes: Sequence[placement.Node], jobs: Iterable[Job]) -> tuple[placement.Node, ...]:
    """Hold what is free against what our jobs have reserved: Ray's figures lag behind a reservation just made."""
    ours = tuple(replace(node, free=node.total) for node in nodes)
    for job in jobs:
        if job.instances and not job.state.terminal:
            rooms = [placement.Assignment(i.name, i.node_id, i.node_name, i.ip) for i in job.instances]
            ours = placement.reserve(ours, members(job.spec), rooms)
    return tuple(
        replace(
            node,
            free={name: min(node.free.get(name, 0.0), own.free.get(name, 0.0)) for name in node.total},
        )
        for node, own in zip(nodes, ours, strict=True)
    )


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except asyncio.TimeoutError:
        pass
