"""Ray, as the controller and the actors see it: names, actors, placement groups. With ``connect``, the only user of ``ray``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import ActorDiedError, RayTaskError
from ray.util import list_named_actors, placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup, get_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raycontrol.archive import Archive
from raycontrol.controller import Controller, InstanceGone, Limits, ReservationRefused
from raycontrol.errors import RaycontrolError
from raycontrol.events import Report
from raycontrol.instance import Identity, Instance, Preparation
from raycontrol.job import Job
from raycontrol.lifecycle import PLACING_S
from raycontrol.node import Node
from raycontrol.placement import Node as NodeRoom
from raycontrol.placement import demand
from raycontrol.plan import Orders
from raycontrol.settings import Settings
from raycontrol.spec import Mode, members

NAMESPACE = "raycontrol"
CONTROLLER = "rc-controller"
ARCHIVE = "rc-archive"
HEAD_PIN = {"node:__internal_head__": 0.001}
WATCH_S = 15.0
NODE_CALL_S = 30.0
FREE = {
    "lifetime": "detached",
    "num_cpus": 0,
    "max_restarts": -1,
    "max_task_retries": -1,
    "namespace": NAMESPACE,
}
"""Options of the actors that serve all jobs: they need no resources, outlive their makers and start again."""

T = TypeVar("T")


@dataclass(frozen=True)
class Seed:
    """What an instance's actor is made with: small, and nothing secret."""

    job_id: str
    attempt: int
    attempt_id: str
    instance: str
    mode: Mode


# Actors: the plain classes, with their links to each other.


class InstanceActor(Instance):
    def __init__(self, seed: Seed) -> None:
        context = ray.get_runtime_context()
        super().__init__(
            Identity(
                job_id=seed.job_id,
                attempt=seed.attempt,
                attempt_id=seed.attempt_id,
                instance=seed.instance,
                mode=seed.mode,
                ip=str(_own_node()["NodeManagerAddress"]),
                node_name=_name_of(_own_node()),
                scratch=_scratch(),
                raylet_pid=_raylet_pid(),
                gpus=tuple(context.get_accelerator_ids()["GPU"]),
            ),
            RayLinks(seed, context.get_node_id()),
        )


class NodeActor(Node):
    def __init__(self) -> None:
        super().__init__(_scratch(), _read_package)
        self._cleaning = asyncio.ensure_future(self.keep_clean())


class ArchiveActor(Archive):
    """Runs on the head; may be killed at any time."""

    def __init__(self, home: str) -> None:
        super().__init__(home, min_free_bytes=Settings.of_home(home).min_free_bytes)


class ControllerActor(Controller):
    def __init__(self, home: str, name: str) -> None:
        settings = Settings.of_home(home)
        limits = Limits(settings.keep_days, settings.keep_gib)
        super().__init__(str(Path(home).expanduser()), name, RayCluster(name, home), limits=limits)
        self._booting = asyncio.ensure_future(self.keep_trying_to_start())

    async def describe(self) -> dict[str, Any]:
        """Return what ``raycontrol controller status`` shows, Ray's address included."""
        return {**await self.status(), "ray": ray.get_runtime_context().gcs_address}


class RayLinks:
    """An instance's links to controller, archive and node, looked up when they are first needed."""

    def __init__(self, seed: Seed, node_id: str) -> None:
        self._seed = seed
        self._node_id = node_id
        self._handles: dict[str, Any] = {}

    async def report(self, sent_at: float, reports: Sequence[Report]) -> None:
        await _result(self._actor(CONTROLLER).report.remote(sent_at, reports))

    async def append(self, offset: int, data: bytes) -> int:
        seed = self._seed
        append = self._actor(ARCHIVE).append
        return int(await _result(append.remote(seed.job_id, seed.attempt, seed.instance, offset, data)))

    async def append_output(
        self, relpath: str, offset: int, data: bytes, mode: int, size: int, mtime_ns: int
    ) -> int:
        seed = self._seed
        append = self._actor(ARCHIVE).append_output
        call = append.remote(seed.job_id, seed.instance, relpath, offset, data, mode, size, mtime_ns)
        return int(await _result(call))

    async def code_dir(self, package: str | None) -> str:
        node = self._actor(node_actor_name(self._node_id))
        return str(await _result(node.code_dir.remote(self._seed.job_id, package)))

    async def lease_port(self, purpose: str) -> int:
        node = self._actor(node_actor_name(self._node_id))
        return int(await _result(node.lease_port.remote(self._seed.attempt_id, purpose)))

    def _actor(self, name: str) -> Any:
        if name not in self._handles:
            self._handles[name] = ray.get_actor(name, namespace=NAMESPACE)
        return self._handles[name]


# The controller's view.


class RayCluster:
    """``controller.Cluster`` over Ray. ``name`` is the cluster's name, part of every name that is made here."""

    def __init__(self, name: str, home: str) -> None:
        self._name = name
        self._home = home
        self._instances: dict[tuple[str, str], Any] = {}
        self._reserving: dict[str, asyncio.Future[None]] = {}

    async def nodes(self) -> tuple[NodeRoom, ...]:
        return await asyncio.to_thread(living_nodes)

    async def reserve(self, job: Job) -> None:
        """A thread does it, and goes on if this call is cancelled; ``release`` waits for it."""
        if job.attempt_id not in self._reserving:
            self._reserving[job.attempt_id] = asyncio.ensure_future(asyncio.to_thread(self._reserve, job))
        try:
            await asyncio.shield(self._reserving[job.attempt_id])
        except ReservationRefused:
            raise
        except Exception:
            self._reserving.pop(job.attempt_id, None)  # a retry tries anew
            raise

    def _reserve(self, job: Job) -> None:
        name = self._gang_name(job.attempt_id)
        group = _group_named(name) or _make_group(name, job)
        if not group.wait(PLACING_S):
            raise ReservationRefused(f"the placement group was not ready within {PLACING_S:g} s")
        for index, member in enumerate(members(job.spec)):
            wanted = demand(member.resources)
            ray.remote(InstanceActor).options(
                name=self._instance_name(job.attempt_id, member.name),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=0,
                num_cpus=wanted.get("CPU", 0),
                num_gpus=wanted.get("GPU", 0),
                memory=wanted.get("memory"),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            ).remote(Seed(job.id, job.attempt, job.attempt_id, member.name, job.spec.mode))

    async def prepare(self, job: Job, instance: str, order: Preparation) -> None:
        await self._call(job, instance, lambda actor: actor.prepare.remote(order))

    async def carry_out(self, job: Job, instance: str, order: Orders) -> None:
        await self._call(job, instance, lambda actor: actor.carry_out.remote(order))

    async def stop(self, job: Job, instance: str, grace_s: float, why: str) -> None:
        await self._call(job, instance, lambda actor: actor.stop.remote(grace_s, why))

    async def watch(self, job: Job, instance: str) -> None:
        while True:
            await self._call(job, instance, lambda actor: actor.watch.remote(WATCH_S))

    async def release(self, job: Job, last: bool) -> None:
        reserving = self._reserving.pop(job.attempt_id, None)
        if reserving is not None:
            await asyncio.wait([reserving])
        await asyncio.to_thread(self._remove_gang, job)
        for instance in job.instances:
            self._instances.pop((job.attempt_id, instance.name), None)
        living = {node.id for node in await self.nodes()}
        await asyncio.gather(
            *(
                _tidy_node(node_id, job.id, job.attempt_id, last)
                for node_id in {instance.node_id for instance in job.instances} & living
            )
        )

    def _remove_gang(self, job: Job) -> None:
        for instance in job.instances:
            _kill_actor(self._instance_name(job.attempt_id, instance.name))
        group = _group_named(self._gang_name(job.attempt_id))
        if group is not None:
            remove_placement_group(group)

    async def serve_nodes(self) -> None:
        await asyncio.to_thread(_make_node_actors)
        await asyncio.to_thread(archive_handle, self._home)

    async def remove_strangers(self, cluster: str, attempt_ids: set[str]) -> list[str]:
        return await asyncio.to_thread(_remove_strangers, cluster, attempt_ids)

    async def sizes_of_jobs(self) -> dict[str, int]:
        usage: dict[str, Any] = await archive_handle().usage.remote()
        sizes: dict[str, int] = usage["jobs"]
        return sizes

    async def remove_stored(self, job_ids: Sequence[str], packages_in_use: set[str]) -> None:
        archive = archive_handle()
        for job_id in job_ids:
            await archive.remove_job.remote(job_id)
        await archive.remove_packages.remote(packages_in_use)

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
        return f"rc:{self._name}:{attempt_id}"

    def _instance_name(self, attempt_id: str, instance: str) -> str:
        return f"{self._gang_name(attempt_id)}:{instance}"


# Names and handles.


def node_actor_name(node_id: str) -> str:
    """Return the name of a node's actor."""
    return f"rc-node:{node_id}"


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


def archive_handle(home: str | None = None) -> Any:
    """Return the archive; made on the head, with this home, if there is none."""
    if home is None:
        return ray.get_actor(ARCHIVE, namespace=NAMESPACE)
    options = {**FREE, "resources": HEAD_PIN, "name": ARCHIVE, "get_if_exists": True}
    return ray.remote(ArchiveActor).options(**options).remote(home)


def cluster_address() -> str:
    """Return the GCS address of the cluster this process is connected to."""
    address: str = ray.get_runtime_context().gcs_address
    return address


# Inside an actor's process.


def _scratch() -> str:
    """Return this node's folder for jobs: under Ray's session folder, so that it never outlives the Ray of this node."""
    chosen = Settings.load().scratch
    node_id = ray.get_runtime_context().get_node_id()
    own_node: Any = ray._private.worker.global_worker.node
    base = Path(chosen) if chosen else Path(own_node.get_session_dir_path()) / "raycontrol"
    return str(base / node_id[:16])


def _raylet_pid() -> int:
    """Return the pid of this node's raylet, the parent of every worker."""
    return os.getppid()


def _own_node() -> dict[str, Any]:
    node_id = ray.get_runtime_context().get_node_id()
    return next(node for node in _ray_nodes() if node["NodeID"] == node_id)


async def _read_package(digest: str, offset: int, max_bytes: int) -> bytes:
    data: bytes = await _result(archive_handle().read_package.remote(digest, offset, max_bytes))
    return data


# Ray's tables.


def _name_of(node: dict[str, Any]) -> str:
    """Return the name given at ``ray start --node-name``, else the host's name."""
    named = node.get("NodeName")
    return str(named if named and named != node["NodeManagerAddress"] else node["NodeManagerHostname"])


def _ray_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def living_nodes() -> tuple[NodeRoom, ...]:
    """Return every living node with its resources, in all and free."""
    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return tuple(
        NodeRoom(
            id=node["NodeID"],
            name=_name_of(node),
            ip=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
            labels=node.get("Labels") or {},
        )
        for node in _ray_nodes()
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


def _kill_actor(name: str) -> None:
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    except ValueError:
        pass  # it is gone already


def _make_node_actors() -> None:
    known = set(_actor_names())
    for node in _ray_nodes():
        name = node_actor_name(node["NodeID"])
        if node["Alive"] and name not in known:
            here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ray.remote(NodeActor).options(
                **FREE, name=name, get_if_exists=True, scheduling_strategy=here
            ).remote()


async def _tidy_node(node_id: str, job_id: str, attempt_id: str, last: bool) -> None:
    try:
        node = await asyncio.to_thread(ray.get_actor, node_actor_name(node_id), NAMESPACE)
    except ValueError:
        return  # the node's actor went with its node
    await asyncio.wait_for(_result(node.release.remote(job_id, attempt_id, last)), NODE_CALL_S)


async def _result(reference: Any) -> Any:
    """Return a call's result; an error of ours is raised as it was, without Ray's traceback around it."""
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, RaycontrolError):
            raise error.cause from None
        raise


def _remove_strangers(cluster: str, attempt_ids: set[str]) -> list[str]:
    prefix = f"rc:{cluster}:"
    removed = []
    for name in _actor_names():
        if name.startswith(prefix) and name[len(prefix) :].partition(":")[0] not in attempt_ids:
            _kill_actor(name)
            removed.append(name)
    for group_id, row in placement_group_table().items():
        name = row["name"]
        if name.startswith(prefix) and row["state"] != "REMOVED" and name[len(prefix) :] not in attempt_ids:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))
            removed.append(name)
    return removed


def _actor_names() -> Iterable[str]:
    return [row["name"] for row in list_named_actors(all_namespaces=True) if row["namespace"] == NAMESPACE]
