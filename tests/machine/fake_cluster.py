"""A simulated Ray for the real controller: ``duties.Cluster`` over :class:`Gangs`, in real time, and its life and death."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sqlalchemy import event
from sqlalchemy.pool import Pool

from raycontrol.controller import Controller
from raycontrol.duties import InstanceGone
from raycontrol.errors import UsageError
from raycontrol.hardware import Lookup, NodeFacts
from raycontrol.job import Job, Submission
from raycontrol.placement import Node
from raycontrol.plan import Orders
from raycontrol.preparing import Preparation
from raycontrol.queue import Rules
from raycontrol.sharedprobe import Probed, probe
from raycontrol.spec import JobSpec, Timeouts
from raycontrol.status import Event, JobInfo, JobState
from raycontrol.version import __version__
from tests.node_facts import cpu_facts
from tests.unit.fake_gangs import FakeInstance, Gangs, Program


class FakeCluster(Gangs):
    """``trouble`` holds, by the name of a call, errors that its next calls raise. ``lagging`` is what is shown
    instead of what is free. ``hidden`` are ids of nodes that Ray has no record of and whose instances say nothing,
    ``heartbeats`` those of them whose own actors go on answering, ``silent`` those of nodes whose hosts do not answer. ``answers`` says, by a node's id, what its actor answers when
    asked for facts (an error is raised, None is no answer at all), ``clocks_ahead_s`` how far its clock is ahead. A look
    at all attempts is answered when ``looking`` is set. ``kill_at`` numbers the moments before and after calls at which
    ``killed`` is set; that call, and so its caller, goes no further.
    """

    def __init__(
        self, rooms: Sequence[Node], programs: Mapping[str, Program] | None = None, *, kill_at: int = 0
    ) -> None:
        super().__init__(rooms, programs or {})
        self.controller: Controller | None = None
        self.trouble: dict[str, list[Exception]] = {}
        self.lagging: tuple[Node, ...] | None = None
        self.hidden: set[str] = set()
        self.heartbeats: set[str] = set()
        self._joined = frozenset(room.id for room in rooms)
        self.silent: set[str] = set()
        self.answers: dict[str, NodeFacts | Exception | None] = {}
        self.clocks_ahead_s: dict[str, float] = {}
        self.calls: list[str] = []
        self.orders: list[Orders] = []
        self.stored_sizes: dict[str, int] = {}
        self.removed_stored: list[str] = []
        self.packages_kept: list[set[str]] = []
        self.points = 0
        self.kill_at = kill_at
        self.killed = asyncio.Event()
        self.looking = asyncio.Event()
        self.looking.set()
        self._senders: dict[FakeInstance, asyncio.Task[None]] = {}

    def now(self) -> float:
        return time.time()

    def delay(self) -> float:
        return 0.0

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(delay_s, action)

    def send_soon(self, instance: FakeInstance) -> None:
        sending = self._senders.get(instance)
        if self.controller is not None and (sending is None or sending.done()):
            self._senders[instance] = asyncio.ensure_future(self._send(instance, self.controller))

    async def _send(self, instance: FakeInstance, controller: Controller) -> None:
        while instance.unsent:
            batch = tuple(instance.unsent)
            await controller.report(self.now(), batch)
            del instance.unsent[: len(batch)]

    def attach(self, controller: Controller | None) -> None:
        """Let instances report to this controller."""
        self.controller = controller
        self._senders = {}
        for gang in self.gangs.values():
            for instance in gang.values():
                self.send_soon(instance)

    # What the controller calls.

    async def nodes(self) -> tuple[Node, ...]:
        self._fail("nodes")
        rooms = self.free_rooms() if self.lagging is None else self.lagging
        return tuple(room for room in rooms if room.id not in self.hidden)

    async def node_records(self) -> Mapping[str, bool]:
        return {node_id: node_id in self.rooms for node_id in self._joined - self.hidden}

    async def reserve(self, job: Job) -> None:
        await self._act(f"reserve {job.attempt_id}", lambda: self.reserve_gang(job))

    async def prepare(self, job: Job, instance: str, order: Preparation) -> None:
        found = self.find(job.attempt_id, instance)
        await self._act(f"prepare {found.name}", found.prepare)

    async def carry_out(self, job: Job, instance: str, order: Orders) -> None:
        found = self.find(job.attempt_id, instance)
        self.orders.append(order)
        await self._act(
            f"stage {order.stage} {found.name}", lambda: found.carry_out(order.stage, bool(order.runs))
        )

    async def stop(self, job: Job, instance: str, grace_s: float, why: str) -> None:
        found = self.find(job.attempt_id, instance)
        await self._act(f"stop {found.name} {grace_s:g}", lambda: found.stop(grace_s, why))

    async def watch(self, job: Job, instance: str) -> None:
        died = asyncio.Event()
        self.find(job.attempt_id, instance).mourners.append(died.set)
        await died.wait()
        raise InstanceGone("its actor died")

    async def release(self, job: Job, last: bool, keep: bool) -> None:
        await self._act(f"release {job.attempt_id}", lambda: self.release_gang(job.attempt_id))

    async def may_run_on(self, node_id: str, ip: str) -> bool:
        self._fail("may_run_on")
        return node_id in self.silent

    async def serve_nodes(self) -> None:
        self._fail("serve_nodes")

    async def head_id(self) -> str:
        return next(iter(self.rooms))

    async def facts(self, node_id: str, anew: bool) -> NodeFacts:
        answer = self.answers.get(node_id, cpu_facts())
        if isinstance(answer, Exception):
            raise answer
        return answer if answer is not None else await never()

    async def look_up(self, node_id: str, ips: Sequence[str], limit_s: float) -> tuple[Lookup, ...]:
        return tuple(Lookup(ip=ip, seconds=0.25, name=f"name of {ip}") for ip in ips)

    async def time_of(self, node_id: str) -> float:
        if node_id in self.hidden - self.heartbeats:
            raise ConnectionError("the actor does not answer")
        return self.now() + self.clocks_ahead_s.get(node_id, 0.0)

    async def probe_shared(self, node_id: str, act: str, folder: str, name: str, text: str) -> Probed:
        return probe(act, folder, name, text)  # all nodes are this machine

    async def attempts(self) -> set[str]:
        found = set(self.gangs)
        await self.looking.wait()
        return found

    async def remove_attempt(self, attempt_id: str, last: bool) -> None:
        await self._act(f"remove {attempt_id}", lambda: self._remove(attempt_id))

    def _remove(self, attempt_id: str) -> None:
        for instance in self.gangs.pop(attempt_id, {}).values():
            instance.die()

    async def sizes_of_jobs(self) -> dict[str, int]:
        return self.stored_sizes

    async def remove_stored(self, job_ids: Sequence[str], packages_in_use: set[str]) -> None:
        self._fail("remove_stored")
        self.removed_stored += job_ids
        self.packages_kept.append(packages_in_use)

    async def _act(self, name: str, action: Callable[[], None]) -> None:
        await self._point()
        self._fail(name.partition(" ")[0])
        self.calls.append(name)
        action()
        await self._point()

    def _fail(self, call: str) -> None:
        if self.trouble.get(call):
            self.calls.append(f"{call} failed")
            raise self.trouble[call].pop(0)

    async def _point(self) -> None:
        self.points += 1
        if self.points == self.kill_at:
            self.killed.set()
            await asyncio.Event().wait()


async def never() -> NoReturn:
    """Wait until cancelled."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


class WriteStop:
    """Stops the store's thread right after its ``at``-th commit, before anybody hears that it has happened."""

    def __init__(self, at: int, killed: asyncio.Event) -> None:
        self.count = 0
        self._at = at
        self._killed = killed
        self._loop = asyncio.get_running_loop()
        self._go_on = threading.Event()
        self._seen: dict[int, int] = {}

    def __enter__(self) -> WriteStop:
        event.listen(Pool, "checkin", self._returned)
        return self

    def __exit__(self, *_: object) -> None:
        event.remove(Pool, "checkin", self._returned)
        self._go_on.set()

    def let_go(self) -> None:
        self._go_on.set()

    def _returned(self, connection: Any, _: object) -> None:
        changes = getattr(connection, "total_changes", 0)
        if changes == self._seen.get(id(connection), 0):
            return
        self._seen[id(connection)] = changes
        self.count += 1
        if self.count == self._at:
            self._loop.call_soon_threadsafe(self._killed.set)
            self._go_on.wait(10)


class Site:
    """A home folder, a simulated cluster, and the controller that lives there now."""

    def __init__(
        self,
        home: Path,
        cluster: FakeCluster,
        name: str = "east",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.rules: Rules | UsageError = Rules()
        self.fence_s = 50.0
        self.home = home
        self.cluster = cluster
        self.name = name
        self.clock = clock
        self.controller = self._new()

    def _new(self) -> Controller:
        controller = Controller(
            str(self.home),
            self.name,
            self.cluster,
            self.clock,
            rules=self._rules,
            fence_s=lambda: self.fence_s,
        )
        self.cluster.attach(controller)
        return controller

    def _rules(self) -> Rules:
        if isinstance(self.rules, UsageError):
            raise self.rules
        return self.rules

    async def restart(self) -> Controller:
        await self.kill()
        self.controller = self._new()
        await self.controller.started()
        return self.controller

    async def kill(self, thread: WriteStop | None = None) -> None:
        """End the controller as the end of its process would: nothing more of it runs, the kernel frees its lock."""
        self.cluster.attach(None)
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:  # once may not do: wait_for of Python 3.11 can lose a cancellation
                task.cancel()
            await asyncio.wait(tasks, timeout=0.1)
        if thread is not None:
            thread.let_go()
        dead = self.controller._held
        dead._thread.shutdown(wait=True)
        if dead._store is not None:
            dead._store.close()
        for handle in Path("/proc/self/fd").iterdir():
            if handle.is_symlink() and (self.home / "locks") in handle.readlink().parents:
                os.close(int(handle.name))

    async def submit(self, job_id: str, **spec: Any) -> JobInfo:
        return await self.controller.submit(submission(job_id, **spec))

    async def reaches(self, job_id: str, *states: JobState, timeout_s: float = 10) -> JobInfo:
        """Return the job when it is in one of these states."""
        return await self.shows(job_id, lambda info: info.state in states, timeout_s)

    async def ends(self, job_id: str) -> JobInfo:
        return await self.shows(job_id, lambda info: info.state.terminal)

    async def shows(self, job_id: str, true: Callable[[JobInfo], bool], timeout_s: float = 10) -> JobInfo:
        """Return the job when this is true of it."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        while True:
            info = await self.controller.info(job_id)
            if true(info):
                return info
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {info}"
            news = await self.controller.events(job_id, seen, timeout_s=1.0)
            seen = max([seen, *(item.seq for item in news)])

    async def story(self, job_id: str) -> list[Event]:
        return await self.controller.events(job_id)


def submission(job_id: str, version: str = __version__, **values: Any) -> Submission:
    """A job of two instances, tried once, unless ``values`` of its spec, or of how it is asked for, say otherwise."""
    limits = Timeouts(**{"grace_s": 5, **values.pop("timeouts", {})})
    asked = {name: values.pop(name) for name in ("key", "fingerprint", "request_id") if name in values}
    usual = {"name": "digits", "command": "torchrun train.py", "nodes": 2, "retry": {"infra_max": 0}}
    spec = JobSpec(**{**usual, "timeouts": limits, **values})
    return Submission(job_id, spec, "ada", None, version, **asked)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Let pytest call an async test."""

    def run(tmp_path: Path) -> None:
        asyncio.run(test(tmp_path))

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run
