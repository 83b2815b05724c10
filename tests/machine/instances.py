"""An instance with real processes and, for the rest of the cluster, links that a test can hold, break and read."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from raycontrol import nvml
from raycontrol.events import Report
from raycontrol.gate import Outcome
from raycontrol.hardware import NodeFacts
from raycontrol.instance import Instance
from raycontrol.links import Identity
from raycontrol.plan import Alive, Orders, PlannedRun, Until
from raycontrol.preparing import Preparation
from raycontrol.process import marked
from raycontrol.shellenv import ShellEnv
from raycontrol.spec import Mode
from raycontrol.usage import PERIOD_S, Meter
from tests.node_facts import cpu_facts

R = TypeVar("R")
LIMIT_S = 20


class FakeLinks:
    """Controller, archive, node and the job's other instances, its ``peers``.

    While ``controller_down`` no report arrives; ``package_error`` fails the node.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.controller_down = False
        self.package_error: Exception | None = None
        self.calls: list[str] = []
        self.refused = 0
        self.reports: list[Report] = []
        self.log = b""
        self.usage: list[str] = []
        self.outputs: dict[str, bytes] = {}
        self.peers: dict[str, Instance] = {}
        self.facts = cpu_facts()
        self.shell = ShellEnv()

    async def report(self, sent_at: float, reports: Sequence[Report]) -> None:
        if self.controller_down:
            self.refused += 1
            raise ConnectionError("the controller restarts")
        self.reports.extend(reports)

    async def append(self, offset: int, data: bytes) -> int:
        self.log = self.log[:offset] + data
        return len(self.log)

    async def append_usage(self, line: str) -> None:
        self.usage.append(line)

    async def append_output(
        self, relpath: str, offset: int, data: bytes, mode: int, size: int, mtime_ns: int
    ) -> int:
        self.outputs[relpath] = self.outputs.get(relpath, b"")[:offset] + data
        return len(self.outputs[relpath])

    async def code_dir(self, package: str | None) -> str:
        self.calls.append(f"code_dir {package}")
        if self.package_error is not None:
            raise self.package_error
        code = self._folder / "code"
        code.mkdir(exist_ok=True)
        return str(code)

    async def lease_port(self, purpose: str) -> int:
        self.calls.append(f"lease_port {purpose}")
        return 29_000

    async def node_facts(self) -> NodeFacts:
        return self.facts

    async def shell_env(self) -> ShellEnv:
        return self.shell

    async def join(self, launcher: str, instance: str, call: int, timeout_s: float) -> Outcome | None:
        return await self.peers[launcher].join(instance, call, timeout_s)

    async def leave(self, launcher: str, instance: str) -> None:
        await self.peers[launcher].leave(instance)

    async def secret_of(self, instance: str) -> str:
        return await self.peers[instance].secret()


class Gang:
    """One instance of one attempt in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        *,
        instance: str = "worker-0",
        mode: Mode = Mode.DDP,
        job_id: str | None = None,
        node_name: str = "host-b",
        raylet_pid: int | None = None,
        gpus: tuple[str, ...] = (),
        meter: Callable[[], Meter] = nvml.Meter,
        sample_s: float = PERIOD_S,
    ) -> None:
        self.name = instance
        self.job_id = job_id or f"test-{uuid.uuid4().hex}"
        self.attempt_id = f"{self.job_id}.0"
        self.links = FakeLinks(folder)
        self.code = folder / "code"
        self.private = folder / "scratch" / "jobs" / self.job_id / "runs" / self.attempt_id / instance
        identity = Identity(
            job_id=self.job_id,
            attempt=0,
            attempt_id=self.attempt_id,
            instance=instance,
            mode=mode,
            ip="127.0.0.1",
            node_name=node_name,
            scratch=str(folder / "scratch"),
            raylet_pid=raylet_pid or os.getpid(),
            gpus=gpus,
        )
        self.instance = Instance(identity, self.links, meter=meter, sample_s=sample_s)

    async def prepared(
        self, package: str | None = None, leases: tuple[str, ...] = (), ssh: bool = False
    ) -> Any:
        """Prepare the instance; returns the facts it reported."""
        await self.instance.prepare(Preparation(package, leases, ssh))
        return (await self.heard("InstancePrepared")).facts

    async def heard(self, kind: str, count: int = 1) -> Any:
        """The last of ``count`` reports of a kind, once they have arrived."""
        await until(lambda: len(self.told(kind)) >= count, f"{count} {kind}")
        return self.told(kind)[count - 1]

    def told(self, kind: str) -> list[Any]:
        return [report for report in self.links.reports if type(report).__name__ == kind]

    def orders(
        self,
        command: str | tuple[str, ...] | None,
        *,
        stage: int = 0,
        until: tuple[Until, ...] | None = None,
        environment: Mapping[str, str | None] | None = None,
        cwd: str | None = None,
        limit_s: float = LIMIT_S,
    ) -> Orders:
        """One stage that runs ``command`` (None: nothing) and ends when it is alive."""
        runs = () if command is None else (PlannedRun("start", command, cwd=cwd),)
        return Orders(
            stage=stage,
            says="",
            limit_s=limit_s,
            environment=environment or {},
            files={},
            runs=runs,
            until=until if until is not None else (Alive("worker-0", "start"),),
        )

    async def closed(self, grace_s: float = 0, why: str = "the test is over") -> Any:
        """Stop the instance; returns its last report. Nothing of it is left then."""
        await self.instance.stop(grace_s, why)
        report = await self.heard("InstanceClosed")
        assert await asyncio.to_thread(marked, self.attempt_id) == []
        return report


def play(story: Coroutine[Any, Any, R]) -> R:
    return asyncio.run(asyncio.wait_for(story, 60))


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S} s"
        await asyncio.sleep(0.01)
