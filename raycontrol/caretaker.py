"""What is looked after for the whole cluster, beside the jobs: its nodes, and how much finished jobs may keep."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from raycontrol.duties import Cluster, lost
from raycontrol.heldstore import HeldStore
from raycontrol.job import job_of
from raycontrol.jobrows import read_infos
from raycontrol.ledger import Ledger
from raycontrol.retention import DAY_S, Limits, expired

log = logging.getLogger(__name__)

NODE_POLL_S = 5.0
HEARTBEAT_S = 5.0
"""How long a node's actor has to answer that it is there."""
RECONCILE_S = 60.0
RETENTION_S = 3600.0


class Caretaker:
    """Three loops, and what removes finished jobs. ``name`` is the cluster's."""

    def __init__(
        self,
        name: str,
        held: HeldStore,
        ledger: Ledger,
        cluster: Cluster,
        clock: Callable[[], float],
        limits: Callable[[], Limits],
    ) -> None:
        self._name = name
        self._held = held
        self._ledger = ledger
        self._cluster = cluster
        self._clock = clock
        self._limits = limits
        self._missing: set[str] = set()

    # Nodes.

    async def care_for_nodes(self) -> None:
        """Keep the nodes' actors there and tell of nodes that are gone, for ever."""
        while True:
            await asyncio.sleep(NODE_POLL_S)
            await _try(self._cluster.serve_nodes)
            await _try(self.look_for_lost_nodes)

    async def look_for_lost_nodes(self) -> None:
        """Tell of instances whose node is gone: an actor that had not started yet has nobody to say so.

        A node counts as gone when two looks in a row miss it.
        """
        open_ones = [
            (job, item)
            for job in self._ledger.jobs.values()
            if not job.state.terminal
            for item in job.instances
            if not item.closed
        ]
        missing = await self._missing_of({item.node_id for _, item in open_ones})
        gone = [(job, item) for job, item in open_ones if item.node_id in self._missing & missing]
        why = "its node left the cluster"
        events = (lost(self._cluster, self._clock, job, item.name, why) for job, item in gone)
        for event, (job, _) in zip(await asyncio.gather(*events), gone, strict=True):
            self._ledger.post(job.id, event)
        self._missing = missing

    async def _missing_of(self, node_ids: set[str]) -> set[str]:
        records = await self._cluster.node_records()
        unknown = sorted(node_ids - records.keys())
        answers = dict(zip(unknown, await asyncio.gather(*map(self._answers, unknown)), strict=True))
        return {one for one in node_ids if is_missing(records.get(one), answers.get(one, False))}

    async def _answers(self, node_id: str) -> bool:
        """Return whether the node's actor answers: the node's heartbeat, felt for only where Ray has no record of it."""
        try:
            await asyncio.wait_for(self._cluster.time_of(node_id), HEARTBEAT_S)
        except Exception as error:  # whatever it is, it is no answer
            log.warning("node %s, of which Ray has no record, does not answer: %r", node_id, error)
            return False
        log.warning("node %s answers, although Ray has no record of it", node_id)
        return True

    # What no job owns.

    async def reconcile(self, every_s: float = RECONCILE_S) -> None:
        """Compare what is there with what the store knows, for ever."""
        while True:
            await _try(self.remove_strangers)
            await asyncio.sleep(every_s)

    async def remove_strangers(self) -> None:
        """Remove what there is of attempts that no job is at.

        An attempt is in the ledger before anything of it is made, so whatever is seen first and is not in the ledger
        afterwards is a stranger. Only who still holds the lease may say so: a successor knows more. Of a job that cannot be
        read nobody knows at which attempt it is, so that all of them stay.
        """
        found = await self._cluster.attempts()
        jobs = self._ledger.jobs.values()
        known = {attempt_id for job in jobs for attempt_id in (job.attempt_id, job.group_id)}
        strangers = {one for one in found - known if job_of(one) not in self._ledger.unreadable}
        for attempt_id in sorted(strangers):
            await self._held.renew()
            log.warning("removing what is there of %s, which no job of the store is at", attempt_id)
            last = job_of(attempt_id) not in self._ledger.jobs
            await _try(partial(self._cluster.remove_attempt, attempt_id, last))

    # Finished jobs.

    async def keep_within_limits(self) -> None:
        """Remove what is older or more than the limits allow, for ever."""
        while True:
            try:
                await self._remove_expired()
            except Exception:  # the archive restarts, the disk is full: no reason to stop managing jobs
                log.exception("removing old jobs failed; trying again later")
            await asyncio.sleep(RETENTION_S)

    async def _remove_expired(self) -> None:
        limits = self._limits()
        oldest = self._clock() - limits.keep_days * DAY_S
        await self._held.ask(lambda store: store.access.forget_audit(oldest))
        await self._held.ask(lambda store: store.access.forget_tokens(oldest))
        infos = await self._held.ask(lambda store: read_infos(store.jobs(cluster=self._name), store))
        sizes = await self._cluster.sizes_of_jobs()
        doomed = expired(infos, sizes, self._clock(), limits.keep_days, limits.keep_gib)
        # What an archive that was down has kept. That the store does not know a job is not enough: it may be an older copy.
        doomed += await self._held.ask(lambda store: store.removed(sizes))
        if doomed:
            log.info("removing finished jobs: %s", ", ".join(doomed))
        await self.remove(doomed)  # also without jobs: packages of those who upload and never submit

    async def remove(self, job_ids: Sequence[str]) -> None:
        """Remove finished jobs, with their logs and outputs, and packages that no job needs any more."""
        ended = [job_id for job_id in job_ids if job_id not in self._ledger.jobs]
        doomed = await self._held.ask(lambda store: store.with_members(ended))
        await self._held.ask(lambda store: store.remove(doomed))
        await self._cluster.remove_stored(doomed, await self._held.ask(lambda store: store.packages()))


def is_missing(lives: bool | None, answers: bool) -> bool:
    """Return whether a node is to be missed, by Ray's record of it (None: it has none) and by its own actor's answer.

    That a node is dead Ray never takes back, and what runs there ends (``fence``), be it that its actor still answers: its
    raylet hangs. That it has no record says little, as while Ray starts again; only with the actor's silence is it a loss.
    """
    return not answers if lives is None else not lives


async def _try(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do what is done again and again anyway: a cluster that does not answer now is asked again."""
    try:
        await call()
    except Exception:
        log.exception("the cluster could not be asked; trying again")
