"""Ray, as the controller sees it: nodes, placement groups, instances. With ``actors`` and ``connect``, the only user of ``ray``."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import ActorDiedError
from ray.util import list_named_actors, placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup, get_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raycontrol import rayauth
from raycontrol.actors import (
    ARCHIVE,
    CONTROLLER,
    FREE,
    HEAD_PIN,
    NAMESPACE,
    InstanceActor,
    NodeActor,
    NoNodeActor,
    Seed,
    archive_handle,
    gang_name,
    instance_actor_name,
    node_actor_name,
    node_name,
    ray_nodes,
    regain_priority,
    result_of,
)
from raycontrol.controller import Controller
from raycontrol.demands import PLACING_S
from raycontrol.duties import InstanceGone, ReservationRefused
from raycontrol.errors import StoreError, UsageError
from raycontrol.fence import Answer, knock
from raycontrol.hardware import Lookup, NodeFacts
from raycontrol.job import Job, job_of
from raycontrol.placement import Node as NodeRoom
from raycontrol.placement import demand
from raycontrol.plan import Orders
from raycontrol.preparing import Preparation
from raycontrol.queue import Rules
from raycontrol.retention import Limits
from raycontrol.settings import Settings
from raycontrol.sharedprobe import Probed
from raycontrol.spec import Member, members
from raycontrol.status import Policy

T = TypeVar("T")

WATCH_S = 15.0
NODE_CALL_S = 30.0
ATTEMPT_ID = re.compile(r"[^:]+\.-?\d+")
ACTORS_AT_ONCE = 8
HOSTS_AT_ONCE = 256
"""How many threads may wait for hosts that say nothing, for up to ``PLACING_S`` each."""
CALLS_AT_ONCE = 1000
"""How many calls an instance takes at once, those of other instances not counted."""

log = logging.getLogger(__name__)


class ControllerActor(Controller):
    def __init__(self, home: str, name: str) -> None:
        regain_priority()
        super().__init__(
            str(Path(home).expanduser()),
            name,
            RayCluster(name, home, ray.get_runtime_context().current_actor),
            limits=lambda: _limits(home),
            rules=lambda: _rules(home),
            site=lambda: Settings.of_home(home).site,
            fence_s=lambda: Settings.of_home(home).fence_s,
            shared_dir=lambda: _shared_dir(home),
        )
        self._booting = asyncio.ensure_future(self.keep_trying_to_start())

    async def describe(self) -> dict[str, Any]:
        """Return what ``raycontrol controller status`` shows, Ray's address and the mode of its `ray start` included."""
        ray_address = ray.get_runtime_context().gcs_address
        return {**await self.status(), "ray": ray_address, "ray_auth_mode": rayauth.mode()}

    async def ask_roster(self, method: str, *arguments: Any) -> Any:
        """Return what this method of ``Roster`` does."""
        await self.started()
        return await getattr(self.roster, method)(*arguments)

    async def ask_porter(self, method: str, *arguments: Any) -> Any:
        """Return what this method of ``Porter`` does."""
        return await getattr(self.porter, method)(*arguments)


def _shared_dir(home: str) -> str | None:
    """Return the setting; none where the settings are wrong, for jobs have to go on."""
    try:
        return Settings.of_home(home).shared_dir
    except UsageError as error:
        log.error("%s; going on without a shared folder", error)
        return None


def _rules(home: str) -> Rules:
    settings = Settings.of_home(home)
    return Rules(
        policy=Policy(settings.queue_policy),
        user_jobs=settings.user_jobs,
        user_gpus=settings.user_gpus,
        all_jobs=settings.all_jobs,
        all_gpus=settings.all_gpus,
        topology=tuple(settings.topology_labels.split(",")),
    )


def _limits(home: str) -> Limits:
    settings = Settings.of_home(home)
    return Limits(settings.keep_days, settings.keep_gib)


# The controller's view.


class RayCluster:
    """``duties.Cluster`` over Ray. ``name`` is the cluster's name, part of every name that is made here; ``controller`` is the
    handle of the controller's actor.

    What waits for hosts, which may be silent, has threads of its own: all other calls share the few of Python's pool.
    """

    def __init__(self, name: str, home: str, controller: Any = None) -> None:
        self._name = name
        self._home = home
        self._controller = controller
        self._instances: dict[tuple[str, str], Any] = {}
        self._reserving: dict[str, asyncio.Future[None]] = {}
        self._asking: dict[str, asyncio.Future[bool]] = {}
        self._for_hosts = ThreadPoolExecutor(HOSTS_AT_ONCE, thread_name_prefix="for-hosts")
        self._servants: dict[str, Any] = {}

    async def nodes(self) -> tuple[NodeRoom, ...]:
        return await asyncio.to_thread(living_nodes)

    async def node_records(self) -> dict[str, bool]:
        return {node["NodeID"]: node["Alive"] for node in await asyncio.to_thread(ray_nodes)}

    async def reserve(self, job: Job) -> None:
        """A thread does it, and goes on if this call is cancelled; ``release`` waits for it."""
        if job.attempt_id not in self._reserving:
            self._reserving[job.attempt_id] = self._wait_for_hosts(self._reserve, job)
        try:
            await asyncio.shield(self._reserving[job.attempt_id])
        except ReservationRefused:
            raise
        except Exception:
            self._reserving.pop(job.attempt_id, None)  # a retry tries anew
            raise

    def _reserve(self, job: Job) -> None:
        name = self._gang_name(job.group_id)
        group = _group_named(name) or _make_group(name, job)
        if not group.wait(PLACING_S):
            raise ReservationRefused(f"the placement group was not ready within {PLACING_S:g} s")
        with ThreadPoolExecutor(ACTORS_AT_ONCE, thread_name_prefix="make-actors") as threads:
            making = [
                threads.submit(copy_context().run, self._make_instance, job, group, index, member)
                for index, member in enumerate(members(job.spec))
            ]
        for one in making:
            one.result()

    def _make_instance(self, job: Job, group: PlacementGroup, index: int, member: Member) -> None:
        """Return when Ray has written down that there is to be such an actor."""
        who = job.id, job.attempt, job.attempt_id, member.name, job.spec.mode
        seed = Seed(*who, job.fence_s, self._controller)
        wanted = demand(member.resources)
        _actor_class(InstanceActor).options(
            name=self._instance_name(job.attempt_id, member.name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            # Each of the others may wait at the launcher's, for a world's end and once more to tell of its own.
            max_concurrency=CALLS_AT_ONCE + 2 * len(job.instances),
            num_cpus=wanted.get("CPU", 0),
            num_gpus=wanted.get("GPU", 0),
            memory=wanted.get("memory"),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote(seed)

    async def prepare(self, job: Job, instance: str, order: Preparation) -> None:
        await self._call(job, instance, lambda actor: actor.prepare.remote(order))

    async def carry_out(self, job: Job, instance: str, order: Orders) -> None:
        await self._call(job, instance, lambda actor: actor.carry_out.remote(order))

    async def stop(self, job: Job, instance: str, grace_s: float, why: str) -> None:
        await self._call(job, instance, lambda actor: actor.stop.remote(grace_s, why))

    async def watch(self, job: Job, instance: str) -> None:
        while True:
            await self._call(job, instance, lambda actor: actor.watch.remote(WATCH_S))

    async def release(self, job: Job, last: bool, keep: bool) -> None:
        reserving = self._reserving.get(job.attempt_id)
        if reserving is not None:
            await asyncio.wait([reserving])
            self._reserving.pop(job.attempt_id, None)
        await asyncio.to_thread(self._remove_gang, job, keep)
        for instance in job.instances:
            self._instances.pop((job.attempt_id, instance.name), None)
        living = {node.id for node in await self.nodes()}
        left_at = {instance.node_id for instance in job.instances}.union(job.visited if last else ())
        await _tidy_nodes(left_at & living, job.id, job.attempt_id, last)

    def _remove_gang(self, job: Job, keep: bool) -> None:
        for instance in job.instances:
            _kill_actor(self._instance_name(job.attempt_id, instance.name))
        group = None if keep else _group_named(self._gang_name(job.group_id))
        if group is not None:
            remove_placement_group(group)

    async def may_run_on(self, node_id: str, ip: str) -> bool:
        """All who ask meanwhile share the answer: a silent host takes its time, and has many instances."""
        if node_id not in self._asking:
            self._asking[node_id] = self._wait_for_hosts(self._ask_host, node_id, ip)
            self._asking[node_id].add_done_callback(lambda _: self._asking.pop(node_id))
        return await asyncio.shield(self._asking[node_id])

    def _ask_host(self, node_id: str, ip: str) -> bool:
        """A raylet takes all along that runs under it. Ray gives one up that does not answer, be it alive; and of one of an
        earlier Ray it knows nothing."""
        node = next((node for node in ray_nodes() if node["NodeID"] == node_id), None)
        if node is None:
            return True
        return not node["Alive"] and knock(ip, node["NodeManagerPort"]) is not Answer.REFUSED

    async def serve_nodes(self) -> None:
        await asyncio.to_thread(self._keep_servants)
        await asyncio.to_thread(archive_handle, self._home)

    def _keep_servants(self) -> None:
        """Make the node actors that are not there, and hold all of them: so they can be reached whatever becomes of Ray's tables."""
        known = set(_actor_names())
        for node in ray_nodes():
            node_id, name = node["NodeID"], node_actor_name(node["NodeID"])
            if not node["Alive"]:
                self._servants.pop(node_id, None)
            elif name not in known:
                self._servants[node_id] = _make_node_actor(node_id)
            elif node_id not in self._servants:
                self._servants[node_id] = ray.get_actor(name, NAMESPACE)

    async def head_id(self) -> str:
        node_id: str = ray.get_runtime_context().get_node_id()  # the controller's actor is pinned to the head
        return node_id

    async def facts(self, node_id: str, anew: bool) -> NodeFacts:
        found: NodeFacts = await result_of((await _node_actor(node_id)).facts.remote(anew))
        return found

    async def look_up(self, node_id: str, ips: Sequence[str], limit_s: float) -> tuple[Lookup, ...]:
        found: tuple[Lookup, ...] = await result_of((await _node_actor(node_id)).look_up.remote(ips, limit_s))
        return found

    async def time_of(self, node_id: str) -> float:
        actor = self._servants.get(node_id) or await _node_actor(node_id)
        return float(await result_of(actor.now.remote()))

    async def probe_shared(self, node_id: str, act: str, folder: str, name: str, text: str) -> Probed:
        call = (await _node_actor(node_id)).probe_shared.remote(act, folder, name, text)
        probed: Probed = await result_of(call)
        return probed

    async def attempts(self) -> set[str]:
        return await asyncio.to_thread(self._attempts)

    def _attempts(self) -> set[str]:
        names = [*_actor_names(), *_groups().values()]
        return {found for name in names if (found := self._attempt_of(name)) is not None}

    async def remove_attempt(self, attempt_id: str, last: bool) -> None:
        await asyncio.to_thread(self._remove_attempt, attempt_id)
        job_id = job_of(attempt_id)
        await _tidy_nodes((node.id for node in await self.nodes()), job_id, attempt_id, last)

    def _remove_attempt(self, attempt_id: str) -> None:
        for name in _actor_names():
            if self._attempt_of(name) == attempt_id:
                _kill_actor(name)
        for group_id, name in _groups().items():
            if self._attempt_of(name) == attempt_id:
                remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))

    def _attempt_of(self, name: str) -> str | None:
        """Return the id of the attempt that an actor or a placement group of this name belongs to, if it is one of ours."""
        prefix = self._gang_name("")
        attempt_id = name.removeprefix(prefix).partition(":")[0]
        return attempt_id if name.startswith(prefix) and ATTEMPT_ID.fullmatch(attempt_id) else None

    async def sizes_of_jobs(self) -> dict[str, int]:
        usage: dict[str, Any] = await archive_handle().usage.remote()
        sizes: dict[str, int] = usage["jobs"]
        return sizes

    async def remove_stored(self, job_ids: Sequence[str], packages_in_use: set[str]) -> None:
        archive = archive_handle()
        for job_id in job_ids:
            try:
                await result_of(archive.remove_job.remote(job_id))
            except StoreError as error:
                # The next look at what is kept finds it again, and the others are not to wait.
                log.warning("%s", error)
        await archive.remove_packages.remote(packages_in_use)

    def _wait_for_hosts(self, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """As ``asyncio.to_thread``, which keeps Ray's context too."""
        work = partial(copy_context().run, call, *arguments)
        return asyncio.get_running_loop().run_in_executor(self._for_hosts, work)

    async def _call(self, job: Job, instance: str, call: Any) -> None:
        try:
            await call(await self._handle(job, instance))
        except ActorDiedError as error:
            raise InstanceGone(await self._cause_of_death(job, instance, error)) from error

    async def _handle(self, job: Job, instance: str) -> Any:
        key = (job.attempt_id, instance)
        if key not in self._instances:
            name = self._instance_name(*key)
            try:
                self._instances[key] = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
            except ValueError as error:
                raise InstanceGone("its actor does not exist any more") from error
        return self._instances[key]

    async def _cause_of_death(self, job: Job, instance: str, error: ActorDiedError) -> str:
        node_id = job.instance(instance).node_id
        if node_id not in {node.id for node in await self.nodes()}:
            return "its node left the cluster"
        lines = [
            line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")
        ]
        return f"its actor died: {lines[-1] if lines else error}"

    def _gang_name(self, attempt_id: str) -> str:
        return gang_name(self._name, attempt_id)

    def _instance_name(self, attempt_id: str, instance: str) -> str:
        return instance_actor_name(self._name, attempt_id, instance)


# Names and handles.


@cache
def _actor_class(cls: type) -> Any:
    """Return a class as Ray's; once, for Ray pickles and stores each anew."""
    return ray.remote(cls)


def controller_handle(home: str, name: str) -> Any:
    """Return the cluster's controller, made on the head if there is none."""
    options = {**FREE, "resources": HEAD_PIN, "name": CONTROLLER, "get_if_exists": True}
    return ray.remote(ControllerActor).options(**options).remote(home, name)


def existing_controller() -> Any | None:
    """Return the cluster's controller, or None."""
    try:
        return ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    except ValueError:
        return None


def renew_servants() -> None:
    """End the processes of the archive and of the nodes' actors; Ray starts them again, and repeats calls under way."""
    for name in _actor_names():
        if name == ARCHIVE or name.startswith(node_actor_name("")):
            _kill_actor(name, no_restart=False)


def cluster_address() -> str:
    """Return the GCS address of the cluster this process is connected to."""
    address: str = ray.get_runtime_context().gcs_address
    return address


# Ray's tables.


def living_nodes() -> tuple[NodeRoom, ...]:
    """Return every living node with its resources, in all and free."""
    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return tuple(
        NodeRoom(
            id=node["NodeID"],
            name=node_name(node),
            ip=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
            labels=node.get("Labels") or {},
        )
        for node in ray_nodes()
        if node["Alive"]
    )


def _make_group(name: str, job: Job) -> PlacementGroup:
    group: PlacementGroup = placement_group(
        [demand(member.resources) for member in members(job.spec)],
        strategy="PACK",
        name=name,
        lifetime="detached",
        bundle_label_selector=[{"ray.io/node-id": instance.node_id} for instance in job.instances],
    )
    return group


def _group_named(name: str) -> PlacementGroup | None:
    try:
        group: PlacementGroup = get_placement_group(name)
    except ValueError:
        return None
    return group


def _kill_actor(name: str, no_restart: bool = True) -> None:
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=no_restart)
    except ValueError:
        pass  # it is gone already


def _make_node_actor(node_id: str) -> Any:
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = {**FREE, "name": node_actor_name(node_id), "get_if_exists": True}
    return ray.remote(NodeActor).options(**options, scheduling_strategy=here).remote()


async def _node_actor(node_id: str) -> Any:
    """Return a node's actor; raises NoNodeActor."""
    try:
        return await asyncio.to_thread(ray.get_actor, node_actor_name(node_id), NAMESPACE)
    except ValueError as error:
        raise NoNodeActor("has no raycontrol node actor (yet); ask again in some seconds") from error


async def _tidy_nodes(node_ids: Iterable[str], job_id: str, attempt_id: str, last: bool) -> None:
    """Clean up on living nodes; raises NoNodeActor where nobody is there to do it (yet)."""
    await asyncio.gather(*(_tidy_node(node_id, job_id, attempt_id, last) for node_id in node_ids))


async def _tidy_node(node_id: str, job_id: str, attempt_id: str, last: bool) -> None:
    node = await _node_actor(node_id)
    await asyncio.wait_for(result_of(node.release.remote(job_id, attempt_id, last)), NODE_CALL_S)


def _groups() -> dict[str, str]:
    """Return the names of the placement groups that are not removed, by their ids."""
    rows = placement_group_table().items()
    return {group_id: row["name"] for group_id, row in rows if row["state"] != "REMOVED"}


def _actor_names() -> Iterable[str]:
    return [row["name"] for row in list_named_actors(all_namespaces=True) if row["namespace"] == NAMESPACE]
