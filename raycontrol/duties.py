"""Duties: for everything that ``demands.duties`` names for a job, one running task that sees to it.

What the tasks need of Ray is the protocol ``Cluster``; what they learn goes out as events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from raycontrol import backends, demands, placement, rdma
from raycontrol.events import (
    CarryOutStage,
    Command,
    InstanceLost,
    JobEvent,
    NodesRefused,
    NodesReleased,
    NodesReserved,
    PrepareInstance,
    ReleaseNodes,
    ReserveNodes,
    StopInstance,
    WatchInstance,
)
from raycontrol.hardware import Lookup, NodeFacts
from raycontrol.job import Instance, Job, plan_of
from raycontrol.plan import Orders, orders
from raycontrol.preparing import Preparation
from raycontrol.sharedprobe import Probed
from raycontrol.sharing import Sharing
from raycontrol.spec import Mode, Site, members, serves_ssh

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0

Post = Callable[[str, JobEvent], None]
"""``post(job_id, event)``: take an event in; returns at once."""


class ReservationRefused(Exception):
    """Ray did not give the nodes; the argument says why."""


class InstanceGone(Exception):
    """The instance's actor is dead; the argument says how that is known."""


class Cluster(Protocol):
    """What the controller needs of Ray. Every call is idempotent by attempt and instance, and may be retried."""

    async def nodes(self) -> tuple[placement.Node, ...]:
        """Return the living nodes and what is free on them, what others use included."""

    async def node_records(self) -> Mapping[str, bool]:
        """Return, for every node that Ray has a record of, whether it lives by that; by its id."""

    async def reserve(self, job: Job) -> None:
        """Reserve one bundle an instance on the chosen nodes and start the instances' actors; raises ReservationRefused."""

    async def prepare(self, job: Job, instance: str, order: Preparation) -> None:
        """Pass an order on; raises InstanceGone when the actor is dead."""

    async def carry_out(self, job: Job, instance: str, order: Orders) -> None:
        """Pass a stage's orders on; raises InstanceGone."""

    async def stop(self, job: Job, instance: str, grace_s: float, why: str) -> None:
        """Pass a stop on; raises InstanceGone."""

    async def watch(self, job: Job, instance: str) -> None:
        """Return only by raising InstanceGone, when the instance's actor is dead."""

    async def release(self, job: Job, last: bool, keep: bool) -> None:
        """Remove actors and, unless ``keep``, the placement group, wait until they are gone, and clean up on the nodes; if
        ``last``, on those that the job has visited, too."""

    async def may_run_on(self, node_id: str, ip: str) -> bool:
        """Whether the node has left the cluster, and its host does not say that nothing of Ray is left there."""

    async def serve_nodes(self) -> None:
        """See to it that every living node has its node actor."""

    async def head_id(self) -> str:
        """Return the id of the head node, where this controller runs."""

    async def facts(self, node_id: str, anew: bool) -> NodeFacts:
        """Return what a node's actor finds there now; with ``anew`` it also looks again for what is installed."""

    async def look_up(self, node_id: str, ips: Sequence[str], limit_s: float) -> tuple[Lookup, ...]:
        """Return how long names of these addresses take to find on a node, ``limit_s`` seconds at most."""

    async def time_of(self, node_id: str) -> float:
        """Return a node's clock, in seconds since the epoch. Its actor is asked itself, whatever Ray has a record of."""

    async def probe_shared(self, node_id: str, act: str, folder: str, name: str, text: str) -> Probed:
        """``sharedprobe.probe`` on a node."""

    async def attempts(self) -> set[str]:
        """Return the ids of the attempts of this cluster's jobs that have an actor or a placement group."""

    async def remove_attempt(self, attempt_id: str, last: bool) -> None:
        """Remove the actors and the placement group of an attempt, and what it left on the nodes; if ``last``, all of its job's."""

    async def sizes_of_jobs(self) -> dict[str, int]:
        """Return the bytes that the archive keeps of each job."""

    async def remove_stored(self, job_ids: Sequence[str], packages_in_use: set[str]) -> None:
        """Let the archive forget the logs and outputs of these jobs, and packages that no job uses."""


class Duties:
    """The running tasks of all jobs, kept equal to what their states demand.

    ``clock`` gives the times of events, ``secrets`` the values of a job's ``secret_env``, ``sharing`` knows which nodes
    share a folder.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Callable[[], float],
        post: Post,
        secrets: Callable[[str], Mapping[str, str]] = lambda job_id: {},
        sharing: Sharing | None = None,
    ) -> None:
        self._sharing = sharing
        self._cluster = cluster
        self._clock = clock
        self._post = post
        self._secrets = secrets
        self._tasks: dict[tuple[str, Command], asyncio.Task[None]] = {}
        self._ended: dict[str, set[asyncio.Task[None]]] = {}

    def keep(self, job: Job) -> None:
        """Start a task for every duty that has none, cancel those that are no longer demanded."""
        wanted = set(demands.duties(job))
        for key, task in list(self._tasks.items()):
            if key[0] == job.id and key[1] not in wanted:
                del self._tasks[key]
                task.cancel()
                self._ended.setdefault(job.id, set()).add(task)
        for command in wanted:
            if (job.id, command) not in self._tasks:
                self._tasks[job.id, command] = asyncio.ensure_future(self._do(job, command))
        if job.state.terminal:
            self._ended.pop(job.id, None)

    async def _do(self, job: Job, command: Command) -> None:
        """Carry the command out, again and again until that succeeds: nobody else does. Cancelled when the duty ends."""
        pause_s = RETRY_FIRST_S
        while True:
            try:
                await self._carry_out(job, command)
                return
            except Exception:
                log.exception("job %s: a duty failed; trying again in %.1f s", job.id, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def _carry_out(self, job: Job, command: Command) -> None:
        match command:
            case ReserveNodes():
                await self._reserve(job)
            case WatchInstance(instance=name):
                await self._call(self._cluster.watch(job, name), job, name)
            case PrepareInstance(instance=name):
                await self._call(
                    self._cluster.prepare(job, name, await self._preparation(job, name)), job, name
                )
            case CarryOutStage(instance=name, stage=stage):
                part = orders(plan_of(job), stage, name, self._secrets(job.array_id or job.id))
                await self._call(self._cluster.carry_out(job, name, part), job, name)
            case StopInstance(instance=name, grace_s=grace_s, why=why):
                await self._call(self._cluster.stop(job, name, grace_s, why), job, name)
            case ReleaseNodes(last=last, keep=keep):
                await self._release(job, last, keep)

    async def _preparation(self, job: Job, name: str) -> Preparation:
        """Return the order, with the shared folder where it is proved that the instance's node has it."""
        item = job.instance(name)
        found = await self._sharing.of(item.node_id, item.node_name) if self._sharing is not None else None
        order = _preparation(job, name)
        if found is None:
            return order
        return replace(order, shared_dir=None if found.fault else found.folder, not_shared=found.fault)

    async def _reserve(self, job: Job) -> None:
        try:
            await self._cluster.reserve(job)
        except ReservationRefused as refusal:
            self._post(job.id, NodesRefused(self._clock(), job.attempt_id, str(refusal)))
        else:
            self._post(job.id, NodesReserved(self._clock(), job.attempt_id))

    async def _call(self, call: Coroutine[Any, Any, None], job: Job, instance: str) -> None:
        """Make a call to an instance; one that is dead is told as lost."""
        try:
            await call
        except InstanceGone as gone:
            self._post(job.id, await lost(self._cluster, self._clock, job, instance, str(gone)))

    async def _release(self, job: Job, last: bool, keep: bool) -> None:
        earlier = self._ended.pop(job.id, set())
        await asyncio.gather(*earlier, return_exceptions=True)
        await self._cluster.release(job, last, keep)
        self._post(job.id, NodesReleased(self._clock(), job.attempt_id, keep))


async def lost(
    cluster: Cluster, clock: Callable[[], float], job: Job, instance: str, why: str
) -> InstanceLost:
    """Return that an instance is lost, and until when what it ran may run on.

    A host that refuses its raylet's port is up without Ray, and then nothing of ours is left on it; of another one, its
    fence is all that is known.
    """
    runs_on = await _may_run_on(cluster, job.instance(instance))
    return InstanceLost(clock(), job.attempt_id, instance, why, clock() + job.fence_s if runs_on else None)


async def _may_run_on(cluster: Cluster, item: Instance) -> bool:
    """A cluster that cannot say it now must not keep the loss from being told: what is not known may be."""
    try:
        return await cluster.may_run_on(item.node_id, item.ip)
    except Exception:
        log.exception("nobody says whether node %s still runs %s: it may", item.node_id, item.name)
        return True


def _preparation(job: Job, name: str) -> Preparation:
    member = next(item for item in members(job.spec) if item.name == name)
    settled = job.spec.settled(Site())  # a job of an older version was not settled when it was submitted
    return Preparation(
        package=job.package,
        leases=backends.leases(job.spec.mode, member),
        ssh=serves_ssh(job.spec),
        ray_node=member.resources if job.spec.mode is Mode.RAY else None,
        idle_gpu_warn_s=settled.timeouts.idle_gpu_warn_s or 0.0,
        rdma=rdma.may_be_used(job.spec),
        shell_env=job.spec.shell_env,
    )
