"""The runs of an instance (start command, services, commands that came through ssh): started, watched, told of, ended."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from raycontrol import backends, process
from raycontrol.backends.world import BROKEN
from raycontrol.background import Background
from raycontrol.disk import matching, remove_tree
from raycontrol.events import RunExited, ServiceEnded, TransportSeen
from raycontrol.execs import Surroundings
from raycontrol.execution import Command, PlaceFailed
from raycontrol.gatekeeper import Gatekeeper
from raycontrol.job import Ended
from raycontrol.links import Identity, Links
from raycontrol.logs import tail
from raycontrol.plan import ASKED, Cause, Mount, PlannedRun, shell_argv
from raycontrol.reporter import Reporter, storable
from raycontrol.shipping import Shipper
from raycontrol.standin import INSIDE
from raycontrol.terminals import NoShell
from raycontrol.transports import TransportReader
from raycontrol.usage import Sampler
from raycontrol.verdicts import last_words

log = logging.getLogger(__name__)

EXPLAIN_LINES = 400


class Runs:
    """``equip`` comes first. The log of the start command goes to the archive, a service has none there.

    ``grace_s`` is what the last stop has given. ``over``: all has ended and is told; from then on somebody may look inside.
    """

    def __init__(self, identity: Identity, links: Links, reporter: Reporter, background: Background) -> None:
        self._identity = identity
        self._links = links
        self._reporter = reporter
        self._background = background
        self.environment: Mapping[str, str] = {}
        self.mounts: tuple[Mount, ...] = ()
        self.grace_s = 0.0
        self.over = False
        self._code_dir: Path | None = None
        self._sampler: Sampler | None = None
        self._gatekeeper: Gatekeeper | None = None
        self._processes: dict[str, process.Process] = {}
        self._services: dict[str, process.Process] = {}
        self._sessions = itertools.count()
        self._launches: list[asyncio.Future[None]] = []
        self._exits: list[asyncio.Future[None]] = []
        self._shipper: Shipper | None = None
        self._transports = TransportReader()
        self._stopping = False
        self._start_cwd: str | None = None

    def equip(
        self,
        environment: Mapping[str, str],
        code_dir: str,
        sampler: Sampler | None,
        gatekeeper: Gatekeeper | None,
        mounts: tuple[Mount, ...] = (),
    ) -> None:
        """Say in what all runs start, who measures what they use, and who has to know that the start command has ended."""
        self.environment = environment
        self.mounts = mounts
        self._code_dir = Path(code_dir)
        self._sampler = sampler
        self._gatekeeper = gatekeeper

    # Starting.

    async def start(self, run: PlannedRun) -> None:
        """Start a run. A stop does not break a launch off half-way: it waits for it, and ends what was launched."""
        if run.name in self._processes or run.name in self._services or self._stopping:
            return
        launch = self._background.start(self._launch(run))
        self._launches.append(launch)
        await asyncio.shield(launch)

    async def _launch(self, run: PlannedRun) -> None:
        started = await process.start(
            process.Run(
                name=run.name,
                argv=shell_argv(run.command, run.pipefail),
                env=self.environment,
                cwd=self.cwd(run.cwd),
                folder=str(self._identity.folder / run.name),
                mark=self._identity.attempt_id,
                mounts=self.mounts,
            )
        )
        if run.service:
            self._services[run.name] = started
            self._exits.append(self._background.start(self._await_service(run.name, started)))
        else:
            self._processes[run.name] = started
            self._start_cwd = self.cwd(run.cwd)
            self._shipper = self._shipper or self._ship(self._log(run.name))
            self._exits.append(self._background.start(self._await_exit(run.name, started)))
        if self._stopping:  # a stop that came while the run was being started has not seen it
            self._background.start(started.stop(self.grace_s, "stopped while starting"))
        self._sample(started)

    async def start_session(
        self, command: str, environment: Mapping[str, str], stdio: tuple[int, int, int]
    ) -> process.Process:
        """Run a command that came in through ssh, as this instance's own."""
        number = next(self._sessions)
        folder = self._identity.folder / "sessions" / str(number)
        session = await process.start(
            process.Run(
                name=f"ssh-{number}",
                argv=("bash", "-c", command),
                env={**self.environment, **environment},
                cwd=self.cwd(None),
                folder=str(folder),
                mark=self._identity.attempt_id,
                stdio=stdio,
                mounts=self.mounts,
            )
        )
        self._background.start(_forget(session, folder))
        self._sample(session)
        return session

    async def start_shell(self, terminal: int, term: str) -> process.Process:
        """Run an interactive shell on that terminal; raises NoShell where none may begin."""
        if (objection := self._no_entry()) is not None:
            raise NoShell(objection)
        number = next(self._sessions)
        folder = self._identity.folder / "sessions" / str(number)
        shell = await process.start(
            process.Run(
                name=f"shell-{number}",
                argv=("bash", "-i"),
                env={**self.environment, INSIDE: "shell", "TERM": term},
                cwd=self._start_cwd or self.cwd(None),
                folder=str(folder),
                mark=self._identity.attempt_id,
                stdio=(terminal, terminal, terminal),
                mounts=self.mounts,
                terminal=True,
            )
        )
        self._background.start(_forget(shell, folder))
        return shell

    async def surroundings(self, _: Command) -> Surroundings:
        """Return in what the start command of this instance runs; raises PlaceFailed before there is one, and at its end."""
        if (objection := self._no_entry()) is not None:
            raise PlaceFailed(objection)
        environment = {**self.environment, INSIDE: "exec"}
        return Surroundings(environment, self._start_cwd or self.cwd(None), mounts=self.mounts)

    def _no_entry(self) -> str | None:
        """Return why nobody can begin anything beside the start command now."""
        if self._code_dir is None:
            return "the job has not got so far here"
        return "the job is ending here" if self._stopping and not self.over else None

    def cwd(self, cwd: str | None) -> str:
        """Return where a run starts whose plan says ``cwd``."""
        assert self._code_dir is not None, "equip() comes first"
        return str(self._code_dir / Path(cwd or ".").expanduser())

    def _sample(self, running: process.Process) -> None:
        if self._sampler is not None:
            self._sampler.watch(running.pid)

    def _log(self, run: str) -> Path:
        return self._identity.folder / run / "output.log"

    def _ship(self, path: Path) -> Shipper:
        shipper = Shipper(
            path,
            self._links.append,
            on_data=self._read_log,
            on_trouble=lambda message: self._reporter.tell(f"its log waits on the node: {message}"),
            on_recovered=lambda: self._reporter.tell("its log is kept again"),
        )
        shipper.start()
        return shipper

    def _read_log(self, data: bytes) -> None:
        me = self._identity
        for transport in self._transports.feed(data):
            self._reporter.report(TransportSeen(time.time(), me.attempt_id, me.instance, transport))

    # How they end.

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
        me = self._identity
        self._reporter.report(RunExited(exit_.at, me.attempt_id, me.instance, ended))
        # In a job that is stopped nobody waits for advice.
        if self._gatekeeper is not None and not self._stopping:
            self._background.start(self._gatekeeper.start_command_ended())

    async def _tell_lost_connections(self) -> None:
        """Report what the agent of an MPI launcher has put down: a launcher's exit code does not tell of it."""
        if self._stopping:
            return
        for at, world, text in await asyncio.to_thread(_put_down, self._identity.folder / BROKEN):
            self._reporter.world_broken(world, text, at)

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
        asked = (me.folder / name / ASKED).exists()
        ended = _ended(exit_, None, lines)
        self._reporter.report(ServiceEnded(exit_.at, me.attempt_id, me.instance, name, ended, asked))

    # Stopping.

    def stop(self, grace_s: float, why: str) -> None:
        """Begin to end all but sessions, which end with the endpoint; start none any more."""
        self._stopping = True
        self.grace_s = grace_s
        for running in self._processes.values():
            self._background.start(running.stop(grace_s, why))
        self._background.start(self._stop_services(grace_s, why))

    async def _stop_services(self, grace_s: float, why: str) -> None:
        """Kill services when the start commands have ended, which may need them to save their work; killing does not wait."""
        if grace_s > 0:
            await asyncio.gather(*(running.gone() for running in self._processes.values()))
        for service in self._services.values():
            self._background.start(service.kill(why))

    async def launched(self) -> None:
        """Return when nothing is about to start; after a stop nothing will."""
        await asyncio.gather(*self._launches, return_exceptions=True)

    async def gone(self) -> None:
        """Return when nothing of them is left."""
        await asyncio.gather(*(running.gone() for running in self._processes.values()))
        await asyncio.gather(*(service.gone() for service in self._services.values()))

    async def told(self) -> None:
        """Return when the end of every run is reported."""
        await asyncio.gather(*self._exits, return_exceptions=True)

    async def shipped(self, limit_s: float) -> int:
        """Ship the rest of the log, for so long at most; return how many bytes of it are not with the archive."""
        return await self._shipper.finish(limit_s) if self._shipper is not None else 0


async def _forget(running: process.Process, folder: Path) -> None:
    """Remove the folder of a run of which nobody will ask any more once it is gone."""
    await running.gone()
    await asyncio.to_thread(remove_tree, folder)


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
        error=storable(exit_.error) if exit_.error else None,
        lost=exit_.lost,
        cause=cause,
        last_lines=last_words(lines) if exit_.code != 0 else (),
    )
