"""One node's share of a job: prepares itself, carries out its part of each stage, supervises runs, ships what they write.

A plain class with a small protocol to the rest of the cluster; ``cluster`` makes an actor of it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from raycontrol import backends, nodeenv, nodefacts, nvml, process
from raycontrol.backends.world import BROKEN
from raycontrol.disk import TEMP_LINK, matching, private_folder, remove_tree, short_folder, write_private
from raycontrol.errors import RaycontrolError
from raycontrol.events import (
    InstanceClosed,
    InstanceFailed,
    InstanceNoted,
    InstancePrepared,
    Report,
    RunExited,
    RunsGone,
    ServiceEnded,
    StagePassed,
    TransportSeen,
    WorldBroken,
    WorldFailed,
)
from raycontrol.gate import Outcome
from raycontrol.gatekeeper import Gatekeeper
from raycontrol.hardware import SLOW_LOOKUP_S, NodeFacts, essentials
from raycontrol.job import Ended
from raycontrol.logs import tail
from raycontrol.lookups import LOOKUP_S, PEERS_LOOKED_UP, look_up
from raycontrol.plan import (
    ASKED,
    Alive,
    Cause,
    Facts,
    Orders,
    PlannedRun,
    RayNodesJoined,
    ServesSsh,
    SshAnswers,
    TcpReachable,
    Until,
    shell_argv,
)
from raycontrol.proofs import RayProofs, SshProofs, UnreachableError, reach
from raycontrol.shipping import Shipper, ship_outputs
from raycontrol.spec import Mode, Resources
from raycontrol.sshd import Endpoint, make_keys
from raycontrol.status import Reason
from raycontrol.transports import TransportReader
from raycontrol.usage import PERIOD_S, Meter, Sampler
from raycontrol.verdicts import last_words

log = logging.getLogger(__name__)

RETRY_S = 0.2
REPORT_RETRY_MAX_S = 5.0
SHIP_LIMIT_S = 20.0
OUTPUTS_LIMIT_S = 840.0
"""Less than demands.SHIPPING_S, so that the instance itself says what was left behind."""
EXPLAIN_LINES = 400
MAX_TOLD = 5
BIN = "bin/"
ENVIRONMENT_FILE = "environment"
"""Where stand-ins find what this instance's runs were given: ``NAME=value`` and a zero byte each."""

T = TypeVar("T")


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


@dataclass(frozen=True)
class Preparation:
    """What an instance needs before the plan is made: the packed working directory, ports of its node, an ssh endpoint.

    ``ray_node``: what a Ray node of the job's own, which the instance will start, may use of the machine. A GPU of the
    instance that has been idle for ``idle_gpu_warn_s`` seconds while its runs live is told of (0: never). ``rdma``: the job
    may come to use RDMA, so that its plan needs to know the node's ports and interfaces.
    """

    package: str | None
    leases: tuple[str, ...]
    ssh: bool = False
    ray_node: Resources | None = None
    idle_gpu_warn_s: float = 0.0
    rdma: bool = False


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

    async def join(self, launcher: str, instance: str, call: int, timeout_s: float) -> Outcome | None:
        """``Instance.join`` of the launcher's instance."""

    async def leave(self, launcher: str, instance: str) -> None:
        """``Instance.leave`` of the launcher's instance."""

    async def secret_of(self, instance: str) -> str:
        """``Instance.secret`` of another instance of the job."""


class Instance:
    """Carries out orders and reports. ``prepare``, ``carry_out`` and ``stop`` return at once; their outcome is a report.

    Each may be called again. ``watch``, ``join`` and ``leave`` wait. ``meter`` makes what measures its GPUs;
    usage is sampled every ``sample_s`` seconds.
    """

    def __init__(
        self,
        identity: Identity,
        links: Links,
        *,
        meter: Callable[[], Meter] = nvml.Meter,
        sample_s: float = PERIOD_S,
    ) -> None:
        self._identity = identity
        self._links = links
        self._meter = meter
        self._sample_s = sample_s
        self._sampler: Sampler | None = None
        self._facts: Facts | None = None
        self._probe: asyncio.Server | None = None
        self._processes: dict[str, process.Process] = {}
        self._services: dict[str, process.Process] = {}
        self._secret = secrets.token_hex(32)
        self._launches: list[asyncio.Future[None]] = []
        self._exits: list[asyncio.Future[None]] = []
        self._shipper: Shipper | None = None
        self._transports = TransportReader()
        self._passed = -1
        self._stopping = False
        self._collecting: asyncio.Future[None] | None = None
        self._closed: InstanceClosed | None = None
        self._endpoint: Endpoint | None = None
        self._gatekeeper: Gatekeeper | None = None
        self._equipped: asyncio.Future[None] | None = None
        self._job_environment: dict[str, str] = {}
        self._proofs: SshProofs | None = None
        self._sessions = itertools.count()
        self._grace_s = 0.0
        self._unsent: list[Report] = []
        self._news = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loose: set[asyncio.Future[Any]] = set()

    async def watch(self, timeout_s: float) -> None:
        """Return after ``timeout_s``; a caller learns from the error of this call that the instance is gone."""
        await asyncio.sleep(timeout_s)

    async def prepare(self, order: Preparation) -> None:
        """Fetch code, lease ports, listen, with ssh make keys too; then report facts (again, when they are known already)."""
        if self._facts is not None:
            self._report(
                InstancePrepared(time.time(), self._identity.attempt_id, self._identity.instance, self._facts)
            )
            return
        self._once("prepare", lambda: self._prepare(order))

    async def carry_out(self, orders: Orders) -> None:
        """Do this instance's part of a stage; report when it has passed (again, when it has already)."""
        if orders.stage <= self._passed:
            self._report(self._stage_passed(orders.stage))
            return
        self._once(f"stage {orders.stage}", lambda: self._carry_out(orders))

    async def stop(self, grace_s: float, why: str) -> None:
        """End everything: TERM, ``grace_s``, KILL; ship the rest; report closed. A shorter grace replaces a longer one."""
        if self._closed is not None:
            self._report(self._closed)
            return
        self._grace_s = grace_s
        for running in self._processes.values():
            self._start(running.stop(grace_s, why))
        self._start(self._stop_services(grace_s, why))
        if self._endpoint is not None:
            # Ranks that a launcher elsewhere started end with it; what outlives its grace is killed.
            self._start(self._endpoint.drain(grace_s, why))
        if grace_s == 0 and self._collecting is not None:
            self._collecting.cancel()  # what is left of the outputs is given up for a forced stop
        self._stopping = True
        self._once("close", self._close)

    async def join(self, instance: str, call: int, timeout_s: float) -> Outcome | None:
        """As ``gatekeeper.Launcher``; other instances call it on the launcher."""
        return await self._gate_of_all().join(instance, call, timeout_s)

    async def leave(self, instance: str) -> None:
        """As ``gatekeeper.Launcher``."""
        await self._gate_of_all().leave(instance)

    async def secret(self) -> str:
        """Return what this instance has made for all of its attempt; other instances call it."""
        return self._secret

    def _gate_of_all(self) -> Gatekeeper:
        if self._gatekeeper is None:  # whoever calls tries again
            raise NotReadyError(f"{self._identity.instance} takes no calls of MPI launchers yet")
        return self._gatekeeper

    # Preparing.

    async def _prepare(self, order: Preparation) -> None:
        self._sampler = Sampler(
            gpus=self._identity.gpus,
            meter=self._meter,
            keep=self._links.append_usage,
            tell=self._tell,
            idle_gpu_warn_s=order.idle_gpu_warn_s,
            period_s=self._sample_s,
        )
        try:
            self._facts = await self._collect(order)
        except Exception as error:  # whatever it is, the job must hear of it
            log.exception("preparing")
            self._fail(Reason.PREPARE_FAILED, f"could not prepare: {_words(error)}")
        else:
            self._report(
                InstancePrepared(time.time(), self._identity.attempt_id, self._identity.instance, self._facts)
            )

    async def _collect(self, order: Preparation) -> Facts:
        me = self._identity
        private_folder(self._folder)
        self._outputs.mkdir(parents=True, exist_ok=True)
        self._probe = self._probe or await asyncio.start_server(_hang_up, me.ip, 0)
        ports = {"probe": str(self._probe.sockets[0].getsockname()[1])}
        for purpose in order.leases:
            ports[purpose] = str(await self._links.lease_port(purpose))
        code_dir, node = await asyncio.gather(self._links.code_dir(order.package), self._links.node_facts())
        facts = Facts(
            instance=me.instance,
            ip=me.ip,
            node_name=me.node_name,
            ports=ports,
            gpus=me.gpus,
            interface=nodefacts.interface_of(me.ip),
            network=nodefacts.network_of(me.ip),
            code_dir=code_dir,
            output_dir=str(self._outputs),
            private_dir=str(self._folder),
            python=sys.executable,
            package_dir=str(Path(__file__).parent),
            root=os.geteuid() == 0,
            hardware=essentials(node, me.node_gpus, network=order.rdma),
        )
        if order.ray_node is not None:
            facts = await asyncio.to_thread(self._with_room_for_ray, facts, order.ray_node)
        return await self._open_ssh(facts) if order.ssh else facts

    def _with_room_for_ray(self, facts: Facts, resources: Resources) -> Facts:
        """Make a folder for Ray's sockets and say how much memory a Ray node here may have."""
        memory = resources.memory or nodefacts.memory_of_cpus(resources.cpu)
        return replace(
            facts,
            temp_dir=str(short_folder(self._folder / TEMP_LINK)),
            memory=str(memory),
            object_store=str(nodefacts.object_store_of(memory)),
        )

    async def _open_ssh(self, facts: Facts) -> Facts:
        """Listen for ssh, with fresh keys; nobody is let in before the keys of the others are known."""
        keys = await asyncio.to_thread(make_keys, self._ssh)
        self._endpoint = Endpoint(self._ssh, self._start_session, self._world_broken)
        port = await self._endpoint.open(self._identity.ip)
        ports = {**facts.ports, "ssh": str(port)}
        return replace(facts, ports=ports, login_key=keys.login, host_key=keys.host)

    # Stages.

    async def _carry_out(self, orders: Orders) -> None:
        deadline = time.monotonic() + orders.limit_s
        try:
            await self._equip(orders)
            if orders.stage == 0:
                self._start(self._time_look_ups(orders))
            for run in orders.runs:
                await self._start_run(run, orders)
            await _all_of(self._fulfil(condition, deadline) for condition in orders.until)
        except Exception as error:  # whatever it is, the job must hear of it
            log.exception("stage %d", orders.stage)
            self._fail(Reason.STAGE_FAILED, _words(error))
        else:
            self._passed = orders.stage
            self._report(self._stage_passed(orders.stage))

    async def _time_look_ups(self, orders: Orders) -> None:
        """Tell when names of peers are slow to find here. INDEX 0 looks up some of the others, these look it up."""
        nodes = (orders.environment.get("NODE_LIST") or "").split(",")
        first, *others = (entry.rpartition(":")[0].strip("[]") for entry in nodes)
        me = self._identity
        peers = others[:PEERS_LOOKED_UP] if orders.environment.get("INDEX") == "0" else [first]
        found = await look_up(sorted({*peers} - {me.ip, ""}), LOOKUP_S)
        slowest = max(found, key=lambda lookup: lookup.seconds, default=None)
        if slowest is not None and slowest.seconds > SLOW_LOOKUP_S:
            self._tell(
                f"{me.node_name} needs {slowest.seconds:.1f} s to find the name of {slowest.ip}, and so does every program "
                "that looks up its peers; mend its DNS, or name the nodes in /etc/hosts"
            )

    async def _equip(self, orders: Orders) -> None:
        """Put the plan's files in place and settle the environment of every run; once."""
        if self._equipped is None:
            self._equipped = self._start(self._write_equipment(orders))
        await asyncio.shield(self._equipped)

    async def _write_equipment(self, orders: Orders) -> None:
        self._job_environment = self._environment(orders)
        if orders.secret is not None:
            secret = await self._secret_made_by(orders.secret.maker, orders.limit_s)
            await asyncio.to_thread(self._write_files, {orders.secret.path: secret})
        if not orders.files:
            return
        environment = "".join(f"{name}={value}\0" for name, value in self._job_environment.items())
        await asyncio.to_thread(self._write_files, {**orders.files, ENVIRONMENT_FILE: environment})
        mark = self._identity.attempt_id
        self._proofs = SshProofs(self._named, self._folder, self._job_environment, mark)
        me = self._identity.instance
        if me in orders.meeting:
            launcher = LinkToLauncher(self._links, orders.meeting[0])
            self._gatekeeper = Gatekeeper(self._folder, me, orders.meeting, launcher, self._world_ended)
            await self._gatekeeper.open()

    async def _secret_made_by(self, maker: str, limit_s: float) -> str:
        if maker == self._identity.instance:
            return self._secret
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return await self._links.secret_of(maker)
            except Exception as error:  # any call may fail for a while
                if time.monotonic() > deadline:
                    raise UnreachableError(f"{self._named} cannot ask {maker} for the job's token") from error
            await asyncio.sleep(RETRY_S)

    def _write_files(self, files: Mapping[str, str]) -> None:
        for path, text in files.items():
            program = path.startswith(BIN)
            data = text.encode("utf-8", "surrogateescape")
            write_private(self._folder / path, data, 0o700 if program else 0o600)

    async def _start_run(self, run: PlannedRun, orders: Orders) -> None:
        """Start a run. A stop does not break a launch off half-way: it waits for it, and ends what was launched."""
        if run.name in self._processes or run.name in self._services or self._stopping:
            return
        launch = self._start(self._launch(run, orders))
        self._launches.append(launch)
        await asyncio.shield(launch)

    async def _launch(self, run: PlannedRun, orders: Orders) -> None:
        started = await process.start(
            process.Run(
                name=run.name,
                argv=shell_argv(run.command, run.pipefail),
                env=self._job_environment,
                cwd=self._cwd(run.cwd),
                folder=str(self._folder / run.name),
                mark=self._identity.attempt_id,
            )
        )
        if run.service:
            self._services[run.name] = started
            self._exits.append(self._start(self._await_service(run.name, started)))
        else:
            self._processes[run.name] = started
            self._shipper = self._shipper or self._ship(self._log(run.name))
            self._exits.append(self._start(self._await_exit(run.name, started)))
        if self._stopping:  # a stop that came while the run was being started has not seen it
            self._start(started.stop(self._grace_s, "stopped while starting"))
        self._sample(started)

    def _sample(self, running: process.Process) -> None:
        if self._sampler is not None:
            self._sampler.watch(running.pid)

    def _cwd(self, cwd: str | None) -> str:
        assert self._facts is not None, "stages follow preparation"
        return str(Path(self._facts.code_dir) / Path(cwd or ".").expanduser())

    def _environment(self, orders: Orders) -> dict[str, str]:
        """Return the node's environment with the job's on top, then its secrets; stand-ins come first on PATH, whoever set it."""
        base = nodeenv.raylet_environment(self._identity.raylet_pid)
        base["PATH"] = nodeenv.search_path(base, str(Path(sys.executable).parent))
        changed = {name for name, value in orders.environment.items() if value is None}
        added = {name: value for name, value in orders.environment.items() if value is not None}
        kept = {name: value for name, value in base.items() if name not in changed}
        environment = {**kept, **added, **orders.secret_env}
        if any(path.startswith(BIN) for path in orders.files):
            environment["PATH"] = os.pathsep.join(
                filter(None, [str(self._folder / BIN.rstrip("/")), environment.get("PATH")])
            )
        return environment

    async def _fulfil(self, condition: Until, deadline: float) -> None:
        match condition:
            case TcpReachable():
                await reach(self._named, condition, deadline)
            case ServesSsh():
                self._serve_ssh()
            case SshAnswers(target=target):
                assert self._proofs is not None, "ssh comes with the files of the first stage"
                await self._proofs.answers(target, deadline)
            case RayNodesJoined():
                await self._ray_proofs().joined(condition, deadline)
            case Alive():
                pass  # a run that could not be started has already reported its exit

    def _ray_proofs(self) -> RayProofs:
        assert self._facts is not None, "stages follow preparation"
        return RayProofs(
            self._named,
            self._folder,
            self._job_environment,
            self._identity.attempt_id,
            self._facts.package_dir,
        )

    # Ssh.

    def _serve_ssh(self) -> None:
        assert self._endpoint is not None, "an endpoint is opened in preparation"
        keys = (self._ssh / "authorized_keys").read_text().splitlines()
        self._endpoint.serve(keys, self._cwd(None))

    async def _start_session(
        self, command: str, environment: Mapping[str, str], stdio: tuple[int, int, int]
    ) -> process.Process:
        """Run a command that came in through ssh, as this instance's own."""
        number = next(self._sessions)
        folder = self._folder / "sessions" / str(number)
        session = await process.start(
            process.Run(
                name=f"ssh-{number}",
                argv=("bash", "-c", command),
                env={**self._job_environment, **environment},
                cwd=self._cwd(None),
                folder=str(folder),
                mark=self._identity.attempt_id,
                stdio=stdio,
            )
        )
        self._start(_forget(session, folder))
        self._sample(session)
        return session

    def _world_broken(self, world: str, message: str, at: float | None = None) -> None:
        me = self._identity
        number = int(world) if world.isdecimal() else None
        when = time.time() if at is None else at
        self._report(WorldBroken(when, me.attempt_id, me.instance, _storable(message), number))

    def _world_ended(self, call: int, status: int) -> None:
        me = self._identity
        if status != 0:
            self._report(WorldFailed(time.time(), me.attempt_id, me.instance, call))

    async def _tell_lost_connections(self) -> None:
        """Report what the agent of an MPI launcher has put down: a launcher's exit code does not tell of it."""
        if self._stopping:
            return
        for at, world, text in await asyncio.to_thread(_put_down, self._folder / BROKEN):
            self._world_broken(world, text, at)

    # Runs.

    async def _await_exit(self, name: str, running: process.Process) -> None:
        exit_ = await running.wait()
        await self._tell_lost_connections()
        lines = await self._last_lines(name)
        try:
            cause = backends.explain(self._identity.mode, lines) if exit_.code != 0 else None
        except Exception:  # the exit itself must be told, explained or not
            log.exception("explaining the end of %s", name)
            cause = None
        followed = self._gatekeeper is not None and self._gatekeeper.has_led_to(exit_.code)
        ended = replace(_ended(exit_, cause, lines), followed=followed)
        self._report(RunExited(exit_.at, self._identity.attempt_id, self._identity.instance, ended))
        # In a job that is stopped nobody waits for advice.
        if self._gatekeeper is not None and not self._stopping:
            self._start(self._gatekeeper.start_command_ended())

    async def _last_lines(self, name: str) -> list[str]:
        """Return the end of a run's log; nothing, if it cannot be read: the exit itself must be told."""
        try:
            return list(await asyncio.to_thread(tail, self._log(name), EXPLAIN_LINES, 1 << 20))
        except OSError:
            log.exception("reading the log of %s", name)
            return []

    async def _await_service(self, name: str, running: process.Process) -> None:
        exit_ = await running.wait()
        lines = await self._last_lines(name)
        me = self._identity
        asked = (self._folder / name / ASKED).exists()
        ended = _ended(exit_, None, lines)
        self._report(ServiceEnded(exit_.at, me.attempt_id, me.instance, name, ended, asked))

    async def _stop_services(self, grace_s: float, why: str) -> None:
        """Kill services when the start commands have ended, which may need them to save their work; killing does not wait."""
        if grace_s > 0:
            await asyncio.gather(*(running.gone() for running in self._processes.values()))
        for service in self._services.values():
            self._start(service.kill(why))

    def _ship(self, path: Path) -> Shipper:
        shipper = Shipper(
            path,
            self._links.append,
            on_data=self._read_log,
            on_trouble=lambda message: self._tell(f"its log waits on the node: {message}"),
            on_recovered=lambda: self._tell("its log is kept again"),
        )
        shipper.start()
        return shipper

    def _read_log(self, data: bytes) -> None:
        me = self._identity
        for transport in self._transports.feed(data):
            self._report(TransportSeen(time.time(), me.attempt_id, me.instance, transport))

    async def _close(self) -> None:
        """Wait until nothing runs, ship the rest, report closed."""
        starting = [task for name, task in self._tasks.items() if name.startswith(("prepare", "stage"))]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, *self._launches, return_exceptions=True)
        if self._probe is not None:
            self._probe.close()
        await asyncio.gather(*(running.gone() for running in self._processes.values()))
        await asyncio.gather(*(service.gone() for service in self._services.values()))
        if self._endpoint is not None:
            await self._endpoint.drain(self._grace_s, "the job has ended")
            await self._endpoint.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        if self._sampler is not None:
            self._sampler.close()
        await asyncio.gather(*self._exits, return_exceptions=True)  # closed is the last word
        me = self._identity
        self._report(RunsGone(time.time(), me.attempt_id, me.instance))
        unsaved = await self._shipper.finish(SHIP_LIMIT_S) if self._shipper is not None else 0
        self._collecting = self._start(self._collect_outputs())
        done, _ = await asyncio.wait({self._collecting}, timeout=OUTPUTS_LIMIT_S)
        if not done or self._collecting.cancelled():
            self._collecting.cancel()
            self._tell("not all of its outputs were collected: there was no time")
        self._closed = InstanceClosed(time.time(), me.attempt_id, me.instance, unsaved)
        self._report(self._closed)

    async def _collect_outputs(self) -> None:
        report = await ship_outputs(self._outputs, self._links.append_output)
        for path, why in report.skipped[:MAX_TOLD]:
            self._tell(f"output {path} was not collected: {why}")
        if len(report.skipped) > MAX_TOLD:
            self._tell(f"{len(report.skipped) - MAX_TOLD} more outputs were not collected")

    # Reports.

    def _tell(self, message: str) -> None:
        me = self._identity
        self._report(InstanceNoted(time.time(), me.attempt_id, me.instance, _storable(message)))

    def _fail(self, reason: Reason, message: str) -> None:
        me = self._identity
        self._report(InstanceFailed(time.time(), me.attempt_id, me.instance, reason, _storable(message)))

    def _stage_passed(self, stage: int) -> StagePassed:
        return StagePassed(time.time(), self._identity.attempt_id, self._identity.instance, stage)

    def _report(self, report: Report) -> None:
        """Queue a report; it is kept until the controller has stored it."""
        self._unsent.append(report)
        self._news.set()
        self._once("reports", self._send_reports)

    async def _send_reports(self) -> None:
        pause_s = RETRY_S
        while True:
            await self._news.wait()
            batch = tuple(self._unsent)
            try:
                await self._links.report(time.time(), batch)
            except Exception:  # the controller restarts; what it has not stored is sent again
                log.warning("reporting failed, trying again in %.1f s", pause_s, exc_info=True)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, REPORT_RETRY_MAX_S)
                continue
            pause_s = RETRY_S
            del self._unsent[: len(batch)]
            if not self._unsent:
                self._news.clear()

    # Folders and tasks.

    @property
    def _named(self) -> str:
        me = self._identity
        return f"{me.instance} on {me.node_name} ({me.ip})"

    @property
    def _folder(self) -> Path:
        me = self._identity
        return Path(me.scratch) / "jobs" / me.job_id / "runs" / me.attempt_id / me.instance

    @property
    def _ssh(self) -> Path:
        return self._folder / "ssh"

    @property
    def _outputs(self) -> Path:
        me = self._identity
        return Path(me.scratch) / "jobs" / me.job_id / "outputs" / me.instance

    def _log(self, run: str) -> Path:
        return self._folder / run / "output.log"

    def _once(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the work unless it is running or has been done."""
        if name not in self._tasks:
            self._tasks[name] = asyncio.ensure_future(work())
            self._tasks[name].add_done_callback(_log_failure)

    def _start(self, work: Awaitable[T]) -> asyncio.Future[T]:
        """Let something run beside the rest, and keep it alive."""
        task = asyncio.ensure_future(work)
        self._loose.add(task)
        task.add_done_callback(self._loose.discard)
        task.add_done_callback(_log_failure)
        return task


class NotReadyError(RaycontrolError):
    """An instance was asked for something before it was equipped for it."""


@dataclass(frozen=True)
class LinkToLauncher:
    """``gatekeeper.Launcher`` over an instance's links."""

    links: Links
    launcher: str

    async def join(self, instance: str, call: int, timeout_s: float) -> Outcome | None:
        return await self.links.join(self.launcher, instance, call, timeout_s)

    async def leave(self, instance: str) -> None:
        await self.links.leave(self.launcher, instance)


async def _forget(running: process.Process, folder: Path) -> None:
    """Remove the folder of a run of which nobody will ask any more once it is gone."""
    await running.gone()
    await asyncio.to_thread(remove_tree, folder)


async def _all_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of it at once; when one part fails, or we are cancelled, nothing of the others goes on."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _put_down(folder: Path) -> list[tuple[float, str, str]]:
    """Return what an agent has put down (``standin``): when, of which world, in words. What cannot be read is passed over."""
    found = []
    for path in matching(folder, "*"):
        try:
            text = path.read_text(errors="replace").strip()
            found.append((path.stat().st_mtime, path.name.partition(".")[0], text))
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error)
    return sorted(found)


def _ended(exit_: process.Exit, cause: Cause | None, lines: Sequence[str]) -> Ended:
    return Ended(
        at=exit_.at,
        code=exit_.code,
        signal=exit_.signal,
        sender=exit_.sender,
        oom=exit_.oom,
        error=_storable(exit_.error) if exit_.error else None,
        cause=cause,
        last_lines=last_words(lines) if exit_.code != 0 else (),
    )


def _words(error: Exception) -> str:
    """Return an error's own words, or its kind where it has none of ours."""
    return str(error) if isinstance(error, RaycontrolError) else f"{type(error).__name__}: {error}"


def _storable(text: str) -> str:
    """Return the text with what is not Unicode (parts of file names) written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _log_failure(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("a task of this instance failed", exc_info=task.exception())


async def _hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()
