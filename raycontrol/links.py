"""Who an instance is, where its files are on its node, and what it needs of the rest of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from raycontrol.events import Report
from raycontrol.gate import Outcome
from raycontrol.hardware import NodeFacts
from raycontrol.logs import OutputFolders
from raycontrol.shellenv import ShellEnv
from raycontrol.spec import Mode


@dataclass(frozen=True)
class Identity:
    """Who an instance is. ``scratch`` is its node's folder for jobs, ``raylet_pid`` whose environment jobs start from.

    ``gpus`` are the ids of its GPUs, ``node_gpus`` how many its node has by Ray's count.
    """

    job_id: str
    attempt: int
    attempt_id: str
    instance: str
    mode: Mode
    ip: str
    node_name: str
    scratch: str
    raylet_pid: int
    gpus: tuple[str, ...]
    node_gpus: float = 0.0

    @property
    def named(self) -> str:
        """The instance with its node, for a person."""
        return f"{self.instance} on {self.node_name} ({self.ip})"

    @property
    def folder(self) -> Path:
        """Where its files are that nobody else may read."""
        return Path(self.scratch) / "jobs" / self.job_id / "runs" / self.attempt_id / self.instance

    @property
    def ssh_folder(self) -> Path:
        return self.folder / "ssh"

    @property
    def outputs(self) -> Path:
        return OutputFolders(self.scratch, self.job_id).of(self.instance)


class Links(Protocol):
    """The rest of the cluster, as an instance sees it. Every call may fail while the other side restarts."""

    async def report(self, sent_at: float, reports: Sequence[Report]) -> None:
        """Return once the controller has stored the reports; ``sent_at`` is this node's clock."""

    async def append(self, offset: int, data: bytes) -> int:
        """Append to this instance's log in the archive; return how many bytes it holds."""

    async def append_output(
        self, relpath: str, offset: int, data: bytes, mode: int, size: int, mtime_ns: int
    ) -> int:
        """Append to a file of this instance's outputs in the archive."""

    async def append_usage(self, line: str) -> None:
        """Add a sample to this instance's usage in the archive."""

    async def code_dir(self, package: str | None) -> str:
        """Return the job's folder on this node, with the package unpacked in it."""

    async def lease_port(self, purpose: str) -> int:
        """Return the port of this node that is leased to this attempt for the purpose."""

    async def node_facts(self) -> NodeFacts:
        """Return what this node is, as its actor finds it now."""

    async def shell_env(self) -> ShellEnv:
        """Return what a person's shell on this node sets."""

    async def join(self, launcher: str, instance: str, call: int, timeout_s: float) -> Outcome | None:
        """``Instance.join`` of the launcher's instance."""

    async def leave(self, launcher: str, instance: str) -> None:
        """``Instance.leave`` of the launcher's instance."""

    async def secret_of(self, instance: str) -> str:
        """``Instance.secret`` of another instance of the job."""


@dataclass(frozen=True)
class LinkToLauncher:
    """``gatekeeper.Launcher`` over an instance's links."""

    links: Links
    launcher: str

    async def join(self, instance: str, call: int, timeout_s: float) -> Outcome | None:
        return await self.links.join(self.launcher, instance, call, timeout_s)

    async def leave(self, instance: str) -> None:
        await self.links.leave(self.launcher, instance)
