"""One node's share of a job, as an actor's class: prepares itself, carries out its part of each stage, stops, and reports.

What it runs is in ``runs``, what it finds out before there is a plan in ``preparing``. ``actors`` makes an actor of it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raycontrol import nvml
from raycontrol.background import Background
from raycontrol.disk import private_folder
from raycontrol.equipment import lay_down
from raycontrol.errors import RaycontrolError
from raycontrol.events import InstanceClosed, InstancePrepared, RunsGone, StagePassed
from raycontrol.execs import Execs
from raycontrol.gate import Outcome
from raycontrol.gatekeeper import Gatekeeper
from raycontrol.hardware import SLOW_LOOKUP_S
from raycontrol.links import Identity, Links, LinkToLauncher
from raycontrol.lookups import LOOKUP_S, PEERS_LOOKED_UP, look_up
from raycontrol.plan import Alive, Facts, Orders, RayNodesJoined, ServesSsh, SshAnswers, TcpReachable, Until
from raycontrol.preparing import Preparation, collect, with_outputs
from raycontrol.proofs import RayProofs, SshProofs, mountable, reach
from raycontrol.reporter import Reporter
from raycontrol.runs import Runs
from raycontrol.shipping import ship_outputs
from raycontrol.status import Reason
from raycontrol.terminals import Terminals
from raycontrol.usage import PERIOD_S, Meter, Sampler

if TYPE_CHECKING:
    from raycontrol.sshd import Endpoint

log = logging.getLogger(__name__)

SHIP_LIMIT_S = 20.0
OUTPUTS_LIMIT_S = 840.0
"""Less than demands.SHIPPING_S, so that the instance itself says what was left behind."""
MAX_TOLD = 5


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
        self._background = Background()
        self._reporter = Reporter(identity, links, self._background)
        self._runs = Runs(identity, links, self._reporter, self._background)
        self.terminals = Terminals(self._runs.start_shell, self._background)
        self.execs = Execs(identity.folder / "execs", identity.attempt_id, self._runs.surroundings)
        self._sampler: Sampler | None = None
        self._facts: Facts | None = None
        self._probe: asyncio.Server | None = None
        self._secret = secrets.token_hex(32)
        self._passed = -1
        self._collecting: asyncio.Future[None] | None = None
        self._closed: InstanceClosed | None = None
        self._endpoint: Endpoint | None = None
        self._gatekeeper: Gatekeeper | None = None
        self._equipped: asyncio.Future[None] | None = None
        self._proofs: SshProofs | None = None
        self._steps: dict[str, asyncio.Future[None]] = {}

    async def watch(self, timeout_s: float) -> None:
        """Return after ``timeout_s``; a caller learns from the error of this call that the instance is gone."""
        await asyncio.sleep(timeout_s)

    async def prepare(self, order: Preparation) -> None:
        """Fetch code, lease ports, listen, with ssh make keys too; then report facts (again, when they are known already)."""
        if self._facts is not None:
            self._report_prepared(self._facts)
            return
        self._once("prepare", lambda: self._prepare(order))

    async def carry_out(self, orders: Orders) -> None:
        """Do this instance's part of a stage; report when it has passed (again, when it has already)."""
        if orders.stage <= self._passed:
            self._report_passed(orders.stage)
            return
        self._once(f"stage {orders.stage}", lambda: self._carry_out(orders))

    async def stop(self, grace_s: float, why: str) -> None:
        """End everything: TERM, ``grace_s``, KILL; ship the rest; report closed. A shorter grace replaces a longer one."""
        if self._closed is not None:
            self._reporter.report(self._closed)
            return
        self._runs.stop(grace_s, why)
        self._background.start(self.terminals.close_all())
        self._background.start(self.execs.close(grace_s, why))
        if self._endpoint is not None:
            # Ranks that a launcher elsewhere started end with it; what outlives its grace is killed.
            self._background.start(self._endpoint.drain(grace_s, why))
        if grace_s == 0 and self._collecting is not None:
            self._collecting.cancel()  # what is left of the outputs is given up for a forced stop
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
            tell=self._reporter.tell,
            idle_gpu_warn_s=order.idle_gpu_warn_s,
            period_s=self._sample_s,
        )
        try:
            self._facts = await self._collect(order)
        except Exception as error:  # whatever it is, the job must hear of it
            log.exception("preparing")
            self._reporter.fail(Reason.PREPARE_FAILED, f"could not prepare: {_words(error)}")
        else:
            self._report_prepared(self._facts)

    async def _collect(self, order: Preparation) -> Facts:
        me = self._identity
        private_folder(me.folder)
        order = await asyncio.to_thread(with_outputs, me, order)
        if order.not_shared is not None:
            self._reporter.tell(f"its outputs are collected at its end, because {order.not_shared}")
        self._probe = self._probe or await asyncio.start_server(_hang_up, me.ip, 0)
        facts = await collect(me, self._links, order, self._probe.sockets[0].getsockname()[1])
        return await self._open_ssh(facts) if order.ssh else facts

    async def _open_ssh(self, facts: Facts) -> Facts:
        """Listen for ssh, with fresh keys; nobody is let in before the keys of the others are known."""
        from raycontrol.sshd import Endpoint, make_keys  # a tenth of a second, which other jobs do without

        folder = self._identity.ssh_folder
        keys = await asyncio.to_thread(make_keys, folder)
        self._endpoint = Endpoint(folder, self._runs.start_session, self._reporter.world_broken)
        port = await self._endpoint.open(self._identity.ip)
        ports = {**facts.ports, "ssh": str(port)}
        return replace(facts, ports=ports, login_key=keys.login, host_key=keys.host)

    # Stages.

    async def _carry_out(self, orders: Orders) -> None:
        deadline = time.monotonic() + orders.limit_s
        try:
            await self._equip(orders)
            if orders.stage == 0:
                self._background.start(self._time_look_ups(orders))
            for run in orders.runs:
                await self._runs.start(run)
            await _all_of(self._fulfil(condition, deadline) for condition in orders.until)
        except Exception as error:  # whatever it is, the job must hear of it
            log.exception("stage %d", orders.stage)
            self._reporter.fail(Reason.STAGE_FAILED, _words(error))
        else:
            self._passed = orders.stage
            self._report_passed(orders.stage)

    async def _time_look_ups(self, orders: Orders) -> None:
        """Tell when names of peers are slow to find here. INDEX 0 looks up some of the others, these look it up."""
        nodes = (orders.environment.get("NODE_LIST") or "").split(",")
        first, *others = (entry.rpartition(":")[0].strip("[]") for entry in nodes)
        me = self._identity
        peers = others[:PEERS_LOOKED_UP] if orders.environment.get("INDEX") == "0" else [first]
        found = await look_up(sorted({*peers} - {me.ip, ""}), LOOKUP_S)
        slowest = max(found, key=lambda lookup: lookup.seconds, default=None)
        if slowest is not None and slowest.seconds > SLOW_LOOKUP_S:
            self._reporter.tell(
                f"{me.node_name} needs {slowest.seconds:.1f} s to find the name of {slowest.ip}, and so does every program "
                "that looks up its peers; mend its DNS, or name the nodes in /etc/hosts"
            )

    async def _equip(self, orders: Orders) -> None:
        """Make everything ready for runs; once."""
        if self._equipped is None:
            self._equipped = self._background.start(self._lay_down(orders))
        await asyncio.shield(self._equipped)

    async def _lay_down(self, orders: Orders) -> None:
        me = self._identity
        environment = await lay_down(orders, me, self._links, self._secret)
        mounts = await mountable(me.named, orders.mounts, me.folder, me.attempt_id)
        if orders.files:
            self._proofs = SshProofs(me.named, me.folder, environment, me.attempt_id)
            if me.instance in orders.meeting:
                launcher = LinkToLauncher(self._links, orders.meeting[0])
                on_ended = self._reporter.world_ended
                self._gatekeeper = Gatekeeper(me.folder, me.instance, orders.meeting, launcher, on_ended)
                await self._gatekeeper.open()
        assert self._facts is not None, "stages follow preparation"
        self._runs.equip(environment, self._facts.code_dir, self._sampler, self._gatekeeper, mounts)

    async def _fulfil(self, condition: Until, deadline: float) -> None:
        match condition:
            case TcpReachable():
                await reach(self._identity.named, condition, deadline)
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
        me = self._identity
        runs, package_dir = self._runs, self._facts.package_dir
        return RayProofs(me.named, me.folder, runs.environment, me.attempt_id, package_dir, runs.mounts)

    def _serve_ssh(self) -> None:
        assert self._endpoint is not None, "an endpoint is opened in preparation"
        keys = (self._identity.ssh_folder / "authorized_keys").read_text().splitlines()
        self._endpoint.serve(keys, self._runs.cwd(None))

    # Closing.

    async def _close(self) -> None:
        """Wait until nothing runs, ship the rest, report closed."""
        starting = [task for name, task in self._steps.items() if name.startswith(("prepare", "stage"))]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, self._runs.launched(), return_exceptions=True)
        if self._probe is not None:
            self._probe.close()
        await self._runs.gone()
        await self.terminals.close_all()
        await self.execs.close(self._runs.grace_s, "the job has ended")
        if self._endpoint is not None:
            await self._endpoint.drain(self._runs.grace_s, "the job has ended")
            await self._endpoint.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        if self._sampler is not None:
            self._sampler.close()
        await self._runs.told()  # closed is the last word
        me = self._identity
        self._reporter.report(RunsGone(time.time(), me.attempt_id, me.instance))
        unsaved = await self._runs.shipped(SHIP_LIMIT_S)
        self._collecting = self._background.start(self._collect_outputs())
        done, _ = await asyncio.wait({self._collecting}, timeout=OUTPUTS_LIMIT_S)
        if not done or self._collecting.cancelled():
            self._collecting.cancel()
            self._reporter.tell("not all of its outputs were collected: there was no time")
        self._runs.over = True
        self._closed = InstanceClosed(time.time(), me.attempt_id, me.instance, unsaved)
        self._reporter.report(self._closed)

    async def _collect_outputs(self) -> None:
        if self._facts is not None and self._facts.shared_outputs:
            return
        report = await ship_outputs(self._identity.outputs, self._links.append_output)
        for path, why in report.skipped[:MAX_TOLD]:
            self._reporter.tell(f"output {path} was not collected: {why}")
        if len(report.skipped) > MAX_TOLD:
            self._reporter.tell(f"{len(report.skipped) - MAX_TOLD} more outputs were not collected")

    # Reports and tasks.

    def _report_prepared(self, facts: Facts) -> None:
        me = self._identity
        self._reporter.report(InstancePrepared(time.time(), me.attempt_id, me.instance, facts))

    def _report_passed(self, stage: int) -> None:
        me = self._identity
        self._reporter.report(StagePassed(time.time(), me.attempt_id, me.instance, stage))

    def _once(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the work unless it is running or has been done."""
        if name not in self._steps:
            self._steps[name] = self._background.start(work())


class NotReadyError(RaycontrolError):
    """An instance was asked for something before it was equipped for it."""


async def _all_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of it at once; when one part fails, or we are cancelled, nothing of the others goes on."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _words(error: Exception) -> str:
    """Return an error's own words, or its kind where it has none of ours."""
    return str(error) if isinstance(error, RaycontrolError) else f"{type(error).__name__}: {error}"


async def _hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()
