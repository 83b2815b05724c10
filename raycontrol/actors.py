"""The plain classes as Ray actors, and their links to each other: names, handles, how an error crosses."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RayTaskError

from raycontrol import nodeenv
from raycontrol.archive import Archive
from raycontrol.errors import RaycontrolError, UsageError
from raycontrol.events import Report
from raycontrol.execs import Execs
from raycontrol.execution import Began, Chunk, Command, Place, PlaceFailed
from raycontrol.fence import CONNECT_S, end_raylet_given_up, fence_off
from raycontrol.gate import Outcome
from raycontrol.hardware import NodeFacts
from raycontrol.instance import Instance
from raycontrol.links import Identity
from raycontrol.node import Collector, Node
from raycontrol.raystart import ray_start
from raycontrol.settings import Settings
from raycontrol.shellenv import ShellEnv
from raycontrol.spareworkers import SpareWorkers
from raycontrol.spec import Mode
from raycontrol.terminals import Output, Terminals

log = logging.getLogger(__name__)

NAMESPACE = "raycontrol"
CONTROLLER = "rc-controller"
ARCHIVE = "rc-archive"
HEAD_PIN = {"node:__internal_head__": 0.001}
NODE_ACTOR_S = 60.0
NODE_ACTOR_RETRY_S = 0.2
PLACE_ACTOR_S = 10.0
UNAVAILABLE_RETRY_S = 0.2
MOST_PASSES = 10
"""So often ``regain_priority`` looks at all threads; the second look finds nothing, as a rule."""
FREE = {
    "lifetime": "detached",
    "num_cpus": 0,
    "max_restarts": -1,
    "max_task_retries": -1,
    "namespace": NAMESPACE,
}
"""Options of the actors that serve all jobs: they need no resources, outlive their makers and start again."""


@dataclass(frozen=True)
class Seed:
    """What an instance's actor is made with: small, and nothing secret. ``fence_s`` is its attempt's, whatever its host has set.

    ``controller`` is a handle; to look one up by its name takes the import of all that a controller is made of.
    """

    job_id: str
    attempt: int
    attempt_id: str
    instance: str
    mode: Mode
    fence_s: float
    controller: Any = None


class NoNodeActor(RaycontrolError):
    """The controller has not made the actor of a node that serves its instances."""


class WithTerminals:
    """What an instance's actor answers to who sits at a shell in it: the methods of its ``terminals``."""

    terminals: Terminals

    async def shell_open(self, rows: int, columns: int, term: str) -> int:
        return await self.terminals.open(rows, columns, term)

    async def shell_read(self, number: int, wait_s: float) -> Output:
        return await self.terminals.read(number, wait_s)

    async def shell_write(self, number: int, data: bytes) -> None:
        await self.terminals.write(number, data)

    async def shell_resize(self, number: int, rows: int, columns: int) -> None:
        await self.terminals.resize(number, rows, columns)

    async def shell_close(self, number: int) -> None:
        await self.terminals.close(number)


class WithExecs:
    """What an actor answers to who runs a command across nodes: the methods of its ``execs``."""

    execs: Execs

    async def exec_start(self, exec_id: str, place: str, command: Command) -> Began:
        return await self.execs.start(exec_id, place, command)

    async def exec_read(self, exec_id: str, offset: int, wait_s: float) -> Chunk:
        return await self.execs.read(exec_id, offset, wait_s)

    async def exec_keep(self, exec_id: str) -> None:
        await self.execs.keep(exec_id)

    async def exec_stop(self, exec_id: str, grace_s: float, why: str) -> None:
        await self.execs.stop(exec_id, grace_s, why)


class InstanceActor(WithExecs, WithTerminals, Instance):
    def __init__(self, seed: Seed) -> None:
        context = ray.get_runtime_context()
        node = _own_node()
        super().__init__(
            Identity(
                job_id=seed.job_id,
                attempt=seed.attempt,
                attempt_id=seed.attempt_id,
                instance=seed.instance,
                mode=seed.mode,
                ip=str(node["NodeManagerAddress"]),
                node_name=node_name(node),
                scratch=_scratch(),
                raylet_pid=_raylet_pid(),
                gpus=tuple(context.get_accelerator_ids()["GPU"]),
                node_gpus=float(node["Resources"].get("GPU", 0.0)),
            ),
            RayLinks(seed, context.get_node_id()),
        )
        member = Membership(context.gcs_address, context.get_node_id(), gcs_client)
        fence_off(context.gcs_address, seed.fence_s, member.is_given_up)


class NodeActor(WithExecs, Node):
    def __init__(self) -> None:
        node, raylet_pid = _own_node(), _raylet_pid()
        environment = partial(nodeenv.raylet_environment, raylet_pid)
        collect = Collector(
            Path(_scratch()),
            str(node["NodeManagerAddress"]),
            environment,
            partial(ray_start, raylet_pid, str(node["NodeID"])),
        )
        super().__init__(_scratch(), _read_package, collect, environment)
        context = ray.get_runtime_context()
        member = Membership(context.gcs_address, context.get_node_id(), gcs_client)
        end_raylet_given_up(context.gcs_address, raylet_pid, member.is_given_up)
        self._spares = SpareWorkers(
            f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}",
            raylet_pid,
            _own_settings().spare_workers,
        )
        self._keeping_spares = asyncio.ensure_future(self._spares.keep())
        self._cleaning = asyncio.ensure_future(self.keep_clean())
        self._collecting = asyncio.ensure_future(self._collect_first())

    async def release(self, job_id: str, attempt_id: str, last: bool) -> None:
        self._spares.disturb()
        await super().release(job_id, attempt_id, last)

    async def code_dir(self, job_id: str, package: str | None) -> str:
        self._spares.disturb()
        return await super().code_dir(job_id, package)

    async def _collect_first(self) -> None:
        """Collect what takes long before anybody asks."""
        try:
            await self.facts()
        except Exception:  # whoever asks is told himself
            log.exception("collecting the facts of this node")


class ArchiveActor(Archive):
    """Runs on the head; may be killed at any time."""

    def __init__(self, home: str) -> None:
        regain_priority()
        super().__init__(home, min_free_bytes=_min_free_bytes(home))


def _min_free_bytes(home: str) -> int:
    """Return the setting; its default where the settings are wrong, for without an archive no job could end."""
    try:
        return Settings.of_home(home).min_free_bytes
    except UsageError as error:
        log.error("%s; using the default", error)
        return Settings().min_free_bytes


class RayLinks:
    """An instance's links to controller, archive and node, looked up when they are first needed."""

    def __init__(self, seed: Seed, node_id: str) -> None:
        self._seed = seed
        self._node_id = node_id
        self._handles: dict[str, Any] = {} if seed.controller is None else {CONTROLLER: seed.controller}

    async def report(self, sent_at: float, reports: Sequence[Report]) -> None:
        await self._call(CONTROLLER, "report", sent_at, reports)

    async def append(self, offset: int, data: bytes) -> int:
        seed = self._seed
        return int(
            await self._call(ARCHIVE, "append", seed.job_id, seed.attempt, seed.instance, offset, data)
        )

    async def append_output(
        self, relpath: str, offset: int, data: bytes, mode: int, size: int, mtime_ns: int
    ) -> int:
        seed = self._seed
        file = (relpath, offset, data, mode, size, mtime_ns)
        return int(await self._call(ARCHIVE, "append_output", seed.job_id, seed.instance, *file))

    async def append_usage(self, line: str) -> None:
        seed = self._seed
        await self._call(ARCHIVE, "append_usage", seed.job_id, seed.attempt, seed.instance, line)

    async def code_dir(self, package: str | None) -> str:
        return str(await self._call_node("code_dir", self._seed.job_id, package))

    async def lease_port(self, purpose: str) -> int:
        purpose_of_one = f"{self._seed.instance} {purpose}"  # instances of a job may share this node
        return int(await self._call_node("lease_port", self._seed.attempt_id, purpose_of_one))

    async def node_facts(self) -> NodeFacts:
        facts: NodeFacts = await self._call_node("facts")
        return facts

    async def shell_env(self) -> ShellEnv:
        found: ShellEnv = await self._call_node("shell_env")
        return found

    async def _call_node(self, method: str, *arguments: Any) -> Any:
        """Call this node's actor; on a node that has just joined, wait until the controller has made it."""
        name = node_actor_name(self._node_id)
        deadline = time.monotonic() + NODE_ACTOR_S
        while not self._is_there(name):
            if time.monotonic() > deadline:
                raise NoNodeActor(
                    f"this node has had no raycontrol node actor for {NODE_ACTOR_S:g} s: is the controller running?"
                )
            await asyncio.sleep(NODE_ACTOR_RETRY_S)
        return await self._call(name, method, *arguments)

    def _is_there(self, name: str) -> bool:
        try:
            self._actor(name)
        except ValueError:  # Ray's word for a name that nobody has
            return False
        return True

    async def join(self, launcher: str, instance: str, call: int, timeout_s: float) -> Outcome | None:
        found: Outcome | None = await self._call(self._peer(launcher), "join", instance, call, timeout_s)
        return found

    async def leave(self, launcher: str, instance: str) -> None:
        await self._call(self._peer(launcher), "leave", instance)

    async def secret_of(self, instance: str) -> str:
        return str(await self._call(self._peer(instance), "secret"))

    def _peer(self, instance: str) -> str:
        """Return the name of another instance's actor: this one's, but for the end."""
        own = ray.get_runtime_context().get_actor_name() or ""
        return own.removesuffix(self._seed.instance) + instance

    async def _call(self, actor: str, method: str, *arguments: Any) -> Any:
        """Call a method; an actor that is dead for good is looked up anew next time: another may have its name."""
        try:
            return await result_of(getattr(self._actor(actor), method).remote(*arguments))
        except ActorDiedError:
            self._handles.pop(actor, None)
            raise

    def _actor(self, name: str) -> Any:
        if name not in self._handles:
            self._handles[name] = ray.get_actor(name, namespace=NAMESPACE)
        return self._handles[name]


class Membership:
    """What the Ray that is at an address now says of a node.

    The client is one of its own, kept while it works: that of this process speaks with the Ray that it began with only.
    It is no public part of Ray. Without it nobody is given up, and of the fence only the half that minds silence is left.
    """

    def __init__(self, gcs_address: str, node_id: str, connect: Callable[[str], Any]) -> None:
        self._address = gcs_address
        self._node_id = ray.NodeID(bytes.fromhex(node_id))
        self._connect = connect
        self._client: Any = None
        self._unusable = False

    def is_given_up(self) -> bool:
        """Whether that Ray has no such living node. Who says nothing gives nobody up."""
        try:
            return self._living() == [False]
        except (
            Exception
        ) as error:  # Ray has many for a GCS that says nothing; the host answers, which is enough
            self._client = None
            self._tell(error)
            return False

    def _living(self) -> list[bool]:
        if self._client is None:
            self._client = self._connect(self._address)
        living: list[bool] = self._client.check_alive([self._node_id], timeout=CONNECT_S)
        return living

    def _tell(self, error: Exception) -> None:
        """Log, once, what no later look can heal."""
        if isinstance(error, (ImportError, AttributeError, TypeError)) and not self._unusable:
            self._unusable = True
            log.error("this Ray cannot be asked whether it has given this node up", exc_info=error)


def gcs_client(address: str) -> Any:
    """Return a client that gives up after ``CONNECT_S`` and the 10 seconds that Ray adds; `GcsClient` would take 40."""
    from ray._raylet import InnerGcsClient  # type: ignore[attr-defined]

    return InnerGcsClient.standalone(address, None, round(CONNECT_S * 1000))


class Way:
    """``spread.Way`` over Ray: the actors of places, each asked for its handle once."""

    def __init__(self) -> None:
        self._handles: dict[Place, Any] = {}

    async def start(self, place: Place, exec_id: str, command: Command) -> Began:
        began: Began = await self._answer(place, "exec_start", exec_id, place.name, command)
        return began

    async def read(self, place: Place, exec_id: str, offset: int, wait_s: float) -> Chunk:
        chunk: Chunk = await self._answer(place, "exec_read", exec_id, offset, wait_s)
        return chunk

    async def keep(self, place: Place, exec_id: str) -> None:
        await self._answer(place, "exec_keep", exec_id)

    async def stop(self, place: Place, exec_id: str, grace_s: float, why: str) -> None:
        await self._answer(place, "exec_stop", exec_id, grace_s, why)

    async def _actor(self, place: Place) -> Any:
        """Return a place's actor; on a node that has just joined, wait until the controller has made it."""
        if not place.node_id:
            raise PlaceFailed("it is not in the cluster now")
        deadline = time.monotonic() + PLACE_ACTOR_S
        while place not in self._handles:
            try:
                self._handles[place] = await asyncio.to_thread(ray.get_actor, actor_name(place), NAMESPACE)
            except ValueError:  # Ray's word for a name that nobody has
                if place.instance is not None:
                    raise PlaceFailed("this instance has ended") from None
                if time.monotonic() > deadline:
                    raise PlaceFailed("this node has no raycontrol actor (yet)") from None
                await asyncio.sleep(NODE_ACTOR_RETRY_S)
        return self._handles[place]

    async def _answer(self, place: Place, method: str, *arguments: Any) -> Any:
        """Return an answer; raises PlaceFailed where there will be none.

        An actor that cannot be reached for a moment is asked again, for as long as the caller waits: each call may be repeated.
        """
        while True:
            actor = await self._actor(place)
            try:
                return await result_of(getattr(actor, method).remote(*arguments))
            except ActorUnavailableError:
                await asyncio.sleep(UNAVAILABLE_RETRY_S)
            except RayActorError as error:
                raise PlaceFailed(f"its actor is gone: {_last_line(error)}") from None
            except RayError as error:
                raise PlaceFailed(_last_line(error)) from error


def _last_line(error: RayError) -> str:
    """Return what an error of Ray comes to: others' tracebacks stand before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def actor_name(place: Place) -> str:
    """Return the name of the actor that runs commands at a place."""
    if place.attempt_id is None or place.instance is None:
        return node_actor_name(place.node_id)
    return instance_actor_name(place.cluster, place.attempt_id, place.instance)


def instance_actor_name(cluster: str, attempt_id: str, instance: str) -> str:
    """Return the name of an instance's actor in a cluster of that name."""
    return f"{gang_name(cluster, attempt_id)}:{instance}"


def gang_name(cluster: str, attempt_id: str) -> str:
    """Return what the names of all of an attempt begin with."""
    return f"rc:{cluster}:{attempt_id}"


def node_actor_name(node_id: str) -> str:
    """Return the name of a node's actor."""
    return f"rc-node:{node_id}"


def archive_handle(home: str | None = None) -> Any:
    """Return the archive; made on the head, with this home, if there is none."""
    if home is None:
        return ray.get_actor(ARCHIVE, namespace=NAMESPACE)
    options = {**FREE, "resources": HEAD_PIN, "name": ARCHIVE, "get_if_exists": True}
    return ray.remote(ArchiveActor).options(**options).remote(home)


def node_name(node: dict[str, Any]) -> str:
    """Return the name given at ``ray start --node-name``, else the host's name."""
    named = node.get("NodeName")
    return str(named if named and named != node["NodeManagerAddress"] else node["NodeManagerHostname"])


def ray_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


async def result_of(reference: Any) -> Any:
    """Return a call's result; an error of ours is raised as it was, without Ray's traceback around it."""
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, RaycontrolError):
            raise error.cause from None
        raise


def regain_priority() -> None:
    """Give this process back the priority that Ray takes from its workers (they run at nice 15), where that is permitted.

    For the actors on the head, whose answers every job waits for, also while programs keep the head busy. In Linux each
    thread has a priority of its own and hands it on to those it makes, so that one made meanwhile may still lack it.
    """
    try:
        for _ in range(MOST_PASSES):
            if not any([_lift(thread) for thread in _threads()]):
                return
    except PermissionError as error:
        log.debug("the priority of this process stays as it is: %s", error)


def _threads() -> list[int]:
    return [int(task.name) for task in Path("/proc/self/task").iterdir()]


def _lift(thread: int) -> bool:
    """Raise a thread to nice 0; whether it was below."""
    try:
        if os.getpriority(os.PRIO_PROCESS, thread) <= 0:
            return False
        os.setpriority(os.PRIO_PROCESS, thread, 0)
    except ProcessLookupError:  # it has ended
        return False
    return True


def _scratch() -> str:
    """Return this node's folder for jobs: under Ray's session folder, so that it never outlives the Ray of this node."""
    chosen = _own_settings().scratch
    node_id = ray.get_runtime_context().get_node_id()
    own_node: Any = ray._private.worker.global_worker.node
    base = Path(chosen) if chosen else Path(own_node.get_session_dir_path()) / "raycontrol"
    return str(base / node_id[:16])


def _own_settings() -> Settings:
    """Return this node's settings; the defaults where they are wrong, or whatever starts meanwhile would count as lost."""
    try:
        return Settings.load()
    except UsageError as error:
        log.error("%s; using the defaults on this node", error)
        return Settings()


def _raylet_pid() -> int:
    """Return the pid of this node's raylet, the parent of every worker."""
    return os.getppid()


def _own_node() -> dict[str, Any]:
    node_id = ray.get_runtime_context().get_node_id()
    return next(node for node in ray_nodes() if node["NodeID"] == node_id)


async def _read_package(digest: str, offset: int, max_bytes: int) -> bytes:
    data: bytes = await result_of(archive_handle().read_package.remote(digest, offset, max_bytes))
    return data
