"""What a cluster test must not leave behind, and how to see it. Shared by ``tests/ray`` and ``tests/hosts``.

``with nothing_left(world):`` around a test looks before and after; the error has one sentence for each process,
actor, placement group, reserved resource, listening port, job folder or temporary file that the test added.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from raycontrol.supervisor import GROUP, GROUP_ROOTS
from tests.support import wait_until

MARK = b"RAYCONTROL_ATTEMPT_ID="
LASTING_ACTORS = ("rc-node", "rc-archive", "rc-controller")
RESERVABLE = ("CPU", "GPU", "memory")
RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # they begin to listen when they have come up
RAY_PROCESSES = ("ray::", "/site-packages/ray/", "/bin/ray ")


class World(Protocol):
    """A cluster under test."""

    def pids(self) -> list[int]:
        """Every process of the cluster's machines that may belong to a job or to Ray."""

    def reapers(self) -> list[int]:
        """One living process in each network of the cluster."""

    def folders(self) -> list[Path]:
        """The folders that the cluster's machines have as ``/tmp``."""

    def ask(self) -> dict[str, Any]:
        """What ``observer.py`` says about the cluster."""


class Observer:
    """The other end of ``observer.py``; ``popen`` starts a command on a host of the cluster."""

    def __init__(self, popen: Callable[[Sequence[str]], subprocess.Popen[str]], address: str) -> None:
        script = str(Path(__file__).with_name("observer.py"))
        self._unread = b""
        self._process = popen([sys.executable, "-I", script, address])  # -I: `tests/ray` is not ray
        assert self._line(120) == "ready"

    def ask(self, timeout_s: float = 20) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("look\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = self._line(timeout_s)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def pids(self) -> list[int]:
        return descendants(self._process.pid)

    def _line(self, timeout_s: float) -> Any:
        """The next line that is JSON: Ray may print lines of its own."""
        deadline = time.monotonic() + timeout_s
        while True:
            line, newline, rest = self._unread.partition(b"\n")
            if not newline:
                self._read_more(deadline - time.monotonic(), timeout_s)
                continue
            self._unread = rest
            try:
                return json.loads(line)
            except ValueError:
                continue

    def _read_more(self, left_s: float, timeout_s: float) -> None:
        """Not through the stream's own buffer: what has been read into it is not seen by ``select``."""
        stdout = self._process.stdout
        assert stdout is not None
        ready = select.select([stdout], [], [], max(0, left_s))[0]
        assert ready, f"the cluster's observer did not answer within {timeout_s:g} s"
        data = os.read(stdout.fileno(), 1 << 16)
        assert data, f"the cluster's observer ended (exit {self._process.wait()})"
        self._unread += data


@dataclass(frozen=True)
class Owner:
    """A process, told apart from a later one of the same number and from what it was before it took a new title."""

    pid: int
    started: float
    title: str

    @property
    def of_ray(self) -> bool:
        return any(part in self.title for part in RAY_PROCESSES)


@dataclass(frozen=True)
class Listener:
    port: int
    owner: Owner


@dataclass(frozen=True)
class Look:
    """A cluster at one moment: sentences about what is there that a job may have put there, and who listens."""

    things: frozenset[str]
    listeners: frozenset[Listener]
    owners: frozenset[Owner]


@contextmanager
def nothing_left(world: World, within_s: float = 15) -> Iterator[None]:
    """Fail unless all that the block adds to the cluster is gone within ``within_s`` of its end."""
    before = look(world)
    yield
    left: list[str] = []

    def clean() -> bool:
        left[:] = left_behind(before, look(world))
        return not left

    try:
        wait_until(clean, within_s)
    except AssertionError:
        raise AssertionError("left on the cluster:\n  " + "\n  ".join(left)) from None


def look(world: World) -> Look:
    pids = world.pids()
    owners = {pid: owner for pid in pids if (owner := owner_of(pid)) is not None}
    cluster = world.ask()
    things = [
        *processes(owners),
        *actors(cluster["actors"]),
        *(
            f"placement group {group['name']!r} {group['id']} is {group['state']}"
            for group in cluster["groups"]
        ),
        *reserved(cluster["nodes"]),
        *files(world.folders()),
        *cgroups(),
    ]
    listeners = listening(world.reapers(), owners)
    return Look(frozenset(things), frozenset(listeners), frozenset(owners.values()))


def left_behind(before: Look, after: Look) -> list[str]:
    """What is there after a test and was not before. A new process of Ray's may listen as it likes."""
    ports = [
        f"port {listener.port} is held by process {listener.owner.pid} ({listener.owner.title})"
        for listener in after.listeners - before.listeners
        if (listener.owner in before.owners or not listener.owner.of_ray)
        and not listener.owner.title.startswith(RAYS_AGENTS)
    ]
    return sorted([*(after.things - before.things), *ports])


# -- one kind of thing each


def processes(owners: dict[int, Owner]) -> Iterator[str]:
    for pid, owner in owners.items():
        mark = attempt_of(pid)
        if mark is not None or not owner.of_ray:
            yield f"process {pid} ({owner.title}) of attempt {mark}"


def actors(table: Iterable[dict[str, Any]]) -> Iterator[str]:
    for actor in table:
        if not actor["name"].startswith(LASTING_ACTORS):
            yield f"actor {actor['name'] or actor['id']!r} ({actor['class']}) is {actor['state']}"


def reserved(nodes: Iterable[dict[str, Any]]) -> Iterator[str]:
    for node in nodes:
        for name in RESERVABLE:
            total, free = node["total"].get(name, 0), node["available"].get(name, 0)
            if abs(total - free) > 1e-6:
                yield f"{name} of node {node['ip']}: {free:g} of {total:g} is free"


def files(folders: Iterable[Path]) -> Iterator[str]:
    """Job folders under the nodes' scratch, anything of raycontrol's directly in ``/tmp``, Ray's shared memory."""
    patterns = ("ray/session_2*/raycontrol/*/jobs/*", "raycontrol*", "rc-????????")
    for path in (path for folder in folders for pattern in patterns for path in folder.glob(pattern)):
        yield f"file {path}"
    for path in Path("/dev/shm").glob("*plasma*"):
        yield f"shared memory {path}"


def cgroups() -> Iterator[str]:
    """Those that have no processes; others may be of jobs of another cluster on this machine."""
    root = next((root for root in map(Path, GROUP_ROOTS) if (root / "cgroup.controllers").exists()), None)
    for folder in root.rglob(f"{GROUP}*") if root is not None else ():
        try:
            if "populated 0" in (folder / "cgroup.events").read_text():
                yield f"cgroup {folder}"
        except OSError:  # it has just been removed
            continue


def listening(reapers: Iterable[int], owners: dict[int, Owner]) -> Iterator[Listener]:
    inodes = {inode: owner for pid, owner in owners.items() for inode in sockets_of(pid)}
    for reaper in reapers:
        for kind in ("tcp", "tcp6"):
            for line in Path(f"/proc/{reaper}/net/{kind}").read_text().splitlines()[1:]:
                fields = line.split()
                state, inode = fields[3], fields[9]
                if state == "0A" and inode in inodes:
                    yield Listener(int(fields[1].rsplit(":", 1)[1], 16), inodes[inode])


# -- processes; each of these says None or nothing about one that has just ended


def owner_of(pid: int) -> Owner | None:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        command = " ".join(process.cmdline())
        # A worker of Ray's shows the call it is in: "ray::Node.beat" and "ray::Node" are one owner.
        title = command.split(".")[0].split("(")[0] if command.startswith("ray::") else command[:200]
        return Owner(pid, process.create_time(), title)
    except psutil.Error:
        return None


def attempt_of(pid: int) -> str | None:
    for variable in environment_of(pid):
        if variable.startswith(MARK):
            return variable[len(MARK) :].decode(errors="replace")
    return None


def environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def sockets_of(pid: int) -> Iterator[str]:
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                yield target[len("socket:[") : -1]
    except OSError:
        return


def descendants(pid: int) -> list[int]:
    """``pid`` and all below it."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []
