"""One node of the cluster: its facts, package cache, folders of jobs, port leases, and the sweep of processes nobody supervises.

A plain class; ``cluster`` makes a detached actor of it, one per Ray node.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from raycontrol import nodefacts, nvml, ports, process
from raycontrol.disk import (
    TEMP_LINK,
    erase_hidden,
    matching,
    private_folder,
    remove_short_folder,
    remove_tree,
    replace_file,
)
from raycontrol.errors import RaycontrolError
from raycontrol.execs import Execs, Surroundings
from raycontrol.execution import Command
from raycontrol.hardware import Lookup, NodeFacts, RayStart
from raycontrol.lookups import LOOKUP_S, look_up
from raycontrol.nvidia import InTime
from raycontrol.packages import PackageCache
from raycontrol.sharedprobe import Probed, probe
from raycontrol.shellenv import ShellEnv, ShellEnvs, merged

log = logging.getLogger(__name__)

SWEEP_S = 10.0
RELEASE_S = 8.0
"""How long ``release`` waits for the end of what cannot be ended at once: less than its caller waits for the answer."""
LOOK_S = 0.05
PROBE_S = 10.0
"""A file server that has not answered for so long is taken to be dead: less than ``sharing.PROVE_S``."""
PROBES_AT_ONCE = 4
MOST_REMEMBERED = 10_000

T = TypeVar("T")

ReadPackage = Callable[[str, int, int], Awaitable[bytes]]
Collect = Callable[[bool], NodeFacts]


class NotReleased(RaycontrolError):
    """Something of an attempt is still under way on its node; ``release`` is to be called again."""


class AlreadyReleased(RaycontrolError):
    """A call for a job or attempt that this node has released: it came late, and nobody needs its answer."""


class Node:
    """What instances and the controller need of a node.

    ``read_package`` fetches bytes of a package from the archive; ``collect`` returns the node's facts (default: those
    of this machine, as a node by itself), and may block. ``environment`` returns the variables that jobs here start from.
    """

    def __init__(
        self,
        scratch: str,
        read_package: ReadPackage,
        collect: Collect,
        environment: Callable[[], Mapping[str, str]] = dict,
        *,
        sweep_s: float = SWEEP_S,
        release_s: float = RELEASE_S,
        probe_s: float = PROBE_S,
    ) -> None:
        self._scratch = Path(scratch)
        self._jobs = self._scratch / "jobs"
        self._shared = self._scratch.parent / "code"
        private_folder(self._scratch)
        private_folder(self._jobs)
        self._facts = SharedFacts(collect)
        self._cache = PackageCache(self._scratch / "packages")
        self._read_package = read_package
        self._ledger = self._scratch / "ports.json"
        self._ports = _read_ledger(self._ledger)
        self._sweep_s = sweep_s
        self._release_s = release_s
        self._probe_s = probe_s
        self._probes = ThreadPoolExecutor(PROBES_AT_ONCE, thread_name_prefix="probe")
        self._environment = environment
        remove_tree(self._scratch / "execs")
        mark = f"exec:{self._scratch.name}"
        self._left_by_a_former_self = {mark}
        self._shell = ShellEnvs(self._scratch)
        self.execs = Execs(self._scratch / "execs", mark, self._surroundings)
        self._copies: dict[str, set[asyncio.Future[None]]] = {}
        self._released: dict[tuple[str, str], None] = {}

    async def facts(self, anew: bool = False) -> NodeFacts:
        """Return what this node is now; with ``anew`` what is installed is looked for again, too."""
        return await self._facts.get(anew)

    async def shell_env(self) -> ShellEnv:
        """Return what a person's shell on this node sets."""
        return await self._shell.get()

    async def look_up(self, ips: Sequence[str], limit_s: float = LOOKUP_S) -> tuple[Lookup, ...]:
        """Return how long this node takes to find the names of these addresses."""
        return await look_up(ips, limit_s)

    async def now(self) -> float:
        """Return this node's clock, in seconds since the epoch."""
        return time.time()

    async def code_dir(self, job_id: str, package: str | None) -> str:
        """Return the job's code folder on this node, made on the first call: a writable copy of the package, or empty.

        Raises AlreadyReleased when the job has ended here, also if it ended meanwhile.
        """
        self._refuse_released("job", job_id)
        target = await asyncio.to_thread(self._claim_code_dir, job_id)
        with self._cache.using(package):
            if package is not None:
                await self._cache.ensure(package, self._read_package)
            self._refuse_released("job", job_id)
            await self._copy(job_id, package, target)
        self._refuse_released("job", job_id)
        return str(target)

    async def probe_shared(self, act: str, folder: str, name: str, text: str) -> Probed:
        """``sharedprobe.probe`` here, in threads of their own: a dead file server keeps those that it holds up for ever."""
        try:
            return await self._in_probes(probe, act, folder, name, text)
        except asyncio.TimeoutError:
            return Probed(
                os.geteuid(), fault=f"no answer within {self._probe_s:g} s, as of a dead file server"
            )

    async def lease_port(self, attempt_id: str, purpose: str) -> int:
        """Return a port that no other attempt is given; the same one for the same attempt and purpose."""
        self._refuse_released("attempt", attempt_id)
        key = f"{attempt_id} {purpose}"
        if key not in self._ports:
            self._ports[key] = ports.free_port(set(self._ports.values()))
            self._write_ledger()
        return self._ports[key]

    async def release(self, job_id: str, attempt_id: str, last: bool) -> None:
        """End what is left of an attempt here, give its ports back and, if ``last``, remove the job's folder.

        Returns when nothing of the attempt is alive on this node; raises NotReleased when it does not come to that in
        some seconds. What is still supervised ends by itself once the instance that owns it is dead.
        """
        self._remember_released("attempt", attempt_id)
        deadline = time.monotonic() + self._release_s
        await self._end(attempt_id, deadline)
        await asyncio.to_thread(self._remove_short_folders, f"{job_id}/runs/{attempt_id}")
        self._ports = {key: port for key, port in self._ports.items() if not key.startswith(f"{attempt_id} ")}
        self._write_ledger()
        if last:
            self._remember_released("job", job_id)
            await self._await_copies(job_id, deadline)
            await asyncio.to_thread(self._remove_job, job_id)
            await self._shrink_cache()

    async def keep_clean(self) -> None:
        """For ever: kill processes of this node's attempts whose supervisor is gone, remove what was half removed."""
        while True:
            await asyncio.sleep(self._sweep_s)
            try:
                await asyncio.to_thread(self._clean)
            except Exception:  # the next pass may do better, and this node needs one
                log.exception("keeping this node clean")

    async def _surroundings(self, command: Command) -> Surroundings:
        """Return in what a command runs here: the environment of this node's jobs and, but for a plain one, of a shell's."""
        node = await asyncio.to_thread(self._environment)
        home = node.get("HOME", "/")
        try:
            cwd = home if await self._in_probes(os.access, home, os.X_OK) else "/"
        except asyncio.TimeoutError:
            return Surroundings(
                node, "/", f"in `/`, without the environment of its shell: {home} does not answer"
            )
        if command.plain:
            return Surroundings(node, cwd)
        shell = await self._shell.get()
        remark = None if shell.trouble is None else f"without the environment of its shell: {shell.trouble}"
        return Surroundings({**node, **merged(shell.variables, node)}, cwd, remark)

    async def _in_probes(self, call: Callable[..., T], *arguments: Any) -> T:
        """Do what a dead file server may hold up for ever; raises TimeoutError."""
        working = asyncio.get_running_loop().run_in_executor(self._probes, call, *arguments)
        return await asyncio.wait_for(working, self._probe_s)

    def _claim_code_dir(self, job_id: str) -> Path:
        """Return where the job's code lies: at the same path on every node, because MPI starts ranks in the launcher's folder.

        Of two Ray nodes on one machine the first has it; the other has a folder of its own (and sees the first one's).
        """
        owner = self._shared / f".{job_id}.owner"
        private_folder(self._shared)
        try:
            owner.symlink_to(self._scratch.name)
        except FileExistsError:
            if owner.readlink() != Path(self._scratch.name):
                return self._jobs / job_id / "code"
        return self._shared / job_id

    def _remove_short_folders(self, runs: str) -> None:
        for link in matching(self._jobs, f"{runs}/*/{TEMP_LINK}"):
            remove_short_folder(link)

    def _remove_job(self, job_id: str) -> None:
        self._remove_short_folders(f"{job_id}/runs/*")
        remove_tree(self._jobs / job_id)
        owner = self._shared / f".{job_id}.owner"
        if owner.is_symlink() and owner.readlink() == Path(self._scratch.name):
            remove_tree(self._shared / job_id)
            owner.unlink()

    async def _copy(self, job_id: str, package: str | None, target: Path) -> None:
        """Make the copy; ``release`` waits for it, also when whoever asked for it has gone."""
        copy = asyncio.ensure_future(self._cache.make_code_dir(package, target))
        copies = self._copies.setdefault(job_id, set())
        copies.add(copy)
        copy.add_done_callback(copies.discard)
        await asyncio.shield(copy)

    async def _await_copies(self, job_id: str, deadline: float) -> None:
        copies = self._copies.get(job_id)
        if copies:
            _, copying = await asyncio.wait(copies, timeout=max(0.0, deadline - time.monotonic()))
            if copying:
                raise NotReleased(f"the working directory of {job_id} is still being copied on this node")
        self._copies.pop(job_id, None)

    async def _end(self, attempt_id: str, deadline: float) -> None:
        """Kill what nobody supervises, and wait for the rest."""
        while left := await asyncio.to_thread(process.marked, attempt_id, supervisors=True):
            await asyncio.to_thread(process.sweep, attempt_id)
            if time.monotonic() > deadline:
                pids = ", ".join(str(found.pid) for found in left)
                raise NotReleased(f"processes of {attempt_id} are still alive on this node: {pids}")
            await asyncio.sleep(LOOK_S)

    async def _shrink_cache(self) -> None:
        try:
            await self._cache.shrink()
        except OSError:  # no job needs this to end
            log.exception("shrinking the package cache")

    def _clean(self) -> None:
        attempts = {folder.name for folder in matching(self._jobs, "*/runs/*")}
        killed = (
            process.sweep_all(attempts | self._left_by_a_former_self)
            if attempts or self._left_by_a_former_self
            else 0
        )
        self._left_by_a_former_self = set()
        if killed:
            log.warning("killed %d processes that nobody supervised any more", killed)
        process.remove_groups()
        for folder in matching(self._jobs, "*"):
            if ("job", folder.name) in self._released:  # an instance that was dying has made it once more
                self._remove_job(folder.name)
        erase_hidden(self._jobs)
        erase_hidden(self._shared)

    def _remember_released(self, kind: str, name: str) -> None:
        self._released[kind, name] = None
        while len(self._released) > MOST_REMEMBERED:
            del self._released[next(iter(self._released))]

    def _refuse_released(self, kind: str, name: str) -> None:
        if (kind, name) in self._released:
            raise AlreadyReleased(f"{kind} {name} has ended on this node, and what it had here is removed")

    def _write_ledger(self) -> None:
        """Keep the leases for a successor; without room on the disk they hold as long as this actor lives."""
        try:
            replace_file(self._ledger, json.dumps(self._ports).encode())
        except OSError as error:
            log.warning("leases of ports are not on the disk: %s", error)


class Collector:
    """Collects a node's facts. What changes rarely (compilers, PyTorch, Ray's start, …) is looked for once, or when it is asked for ``anew``.

    ``environment`` returns the variables that the node's jobs start from, ``ray`` how its Ray was started.
    """

    def __init__(
        self,
        scratch: Path,
        ip: str,
        environment: Callable[[], Mapping[str, str]],
        ray: Callable[[], RayStart | None] = lambda: None,
    ) -> None:
        self._scratch = scratch
        self._ip = ip
        self._environment = environment
        self._ray = ray
        self._gpus = InTime(nvml.describe)
        self._installed: nodefacts.Installed | None = None

    def __call__(self, anew: bool) -> NodeFacts:
        environ = self._environment()
        installed = None if anew else self._installed
        self._installed = installed or replace(nodefacts.installed(environ), ray=self._ray())
        return nodefacts.collect(
            self._scratch, self._ip, environ=environ, installed=self._installed, gpus=self._gpus
        )


class SharedFacts:
    """Facts that are collected in a thread; calls that come while it is under way get what it finds."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect
        self._collecting: dict[bool, asyncio.Future[NodeFacts]] = {}

    async def get(self, anew: bool) -> NodeFacts:
        collecting = self._collecting.get(anew)
        if collecting is None or collecting.done():
            collecting = asyncio.ensure_future(asyncio.to_thread(self._collect, anew))
            self._collecting[anew] = collecting
        return await asyncio.shield(collecting)


def _read_ledger(path: Path) -> dict[str, int]:
    try:
        ports = json.loads(path.read_bytes())
        return {str(key): int(port) for key, port in ports.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        log.warning("%s cannot be read, so no port is leased: %s", path, error)
        return {}
