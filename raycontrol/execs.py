"""Commands across nodes, at one place: started, their output handed out piece by piece, ended. A node has this, and an instance.

Nothing of the output lies anywhere: the command writes into a pipe, and waits while nobody takes what is in it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import pwd
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from raycontrol import process
from raycontrol.background import Background
from raycontrol.disk import private_folder, remove_tree, write_private
from raycontrol.execution import (
    GRACE_S,
    NO_ANSWER,
    PIECE_BYTES,
    STOPPED,
    TIMED_OUT,
    Began,
    Chunk,
    Command,
    Over,
    PlaceFailed,
)
from raycontrol.logs import tail
from raycontrol.plan import Mount, shell_argv

log = logging.getLogger(__name__)

UNASKED_S = 60.0
"""A command of which nobody has asked for so long is ended: whoever began it is gone."""
REMEMBERED_S = 20.0
"""How long after its end was told it may be asked for once more: an answer may get lost."""
MOST_AT_ONCE = 1000
SUDO_S = 10.0
SCRIPT_FILE = "script"
F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)


@dataclass(frozen=True)
class Surroundings:
    """In what a command runs; ``remark`` says what is not as it should be."""

    environment: Mapping[str, str]
    cwd: str
    remark: str | None = None
    mounts: tuple[Mount, ...] = ()


class Execs:
    """Commands by ids that their callers choose. ``folder`` is for what lies on the disk while they run.

    ``surroundings`` returns in what a command is to run, or raises PlaceFailed; ``sudo`` are the words by which a program
    becomes root's (default: `sudo -n`, and none for who is root).
    """

    def __init__(
        self,
        folder: Path,
        mark: str,
        surroundings: Callable[[Command], Awaitable[Surroundings]],
        *,
        unasked_s: float = UNASKED_S,
        sudo: Sequence[str] | None = None,
    ) -> None:
        self._sudo = _ways_to_root() if sudo is None else tuple(sudo)
        self._folder = folder
        self._mark = mark
        self._surroundings = surroundings
        self._unasked_s = unasked_s
        self._background = Background()
        self._starts: dict[str, asyncio.Future[Began]] = {}
        self._running: dict[str, _Running] = {}

    async def start(self, exec_id: str, place: str, command: Command) -> Began:
        """Start a command; the same id again starts nothing. Raises PlaceFailed."""
        if exec_id not in self._starts:
            if sum(not running.over for running in self._running.values()) >= MOST_AT_ONCE:
                raise PlaceFailed(f"{MOST_AT_ONCE} commands run here at once; wait for one to end")
            self._starts[exec_id] = asyncio.ensure_future(self._start(exec_id, place, command))
        try:
            return await asyncio.shield(self._starts[exec_id])
        except Exception:
            self._starts.pop(exec_id, None)
            raise

    async def read(self, exec_id: str, offset: int, wait_s: float) -> Chunk:
        """Return what was written from ``offset`` on: where the last answer ended, or where it began, to have it once more.

        Wait so long for the first of it. Raises PlaceFailed for a command that is not known (any more).
        """
        if exec_id not in self._running:
            raise PlaceFailed(
                "it is not known here any more: this node's actor was started again, or nobody had asked for long"
            )
        return await self._running[exec_id].read(offset, wait_s)

    async def keep(self, exec_id: str) -> None:
        """Say that somebody still wants the rest, although he does not ask for it now."""
        if exec_id in self._running:
            self._running[exec_id].asked()

    async def stop(self, exec_id: str, grace_s: float, why: str) -> None:
        """Begin to end a command, if it is here; its output, and how it ended, are to be read as before."""
        start = self._starts.get(exec_id)
        if start is not None:
            await asyncio.wait([start])
        if exec_id in self._running:
            self._running[exec_id].stop(grace_s, why)

    async def close(self, grace_s: float, why: str) -> None:
        """End all commands, and return when nothing is left of them. Whether another may begin, ``surroundings`` says."""
        for exec_id in list(self._starts):
            await self.stop(exec_id, grace_s, why)
        await asyncio.gather(*(running.process.gone() for running in self._running.values()))

    async def _start(self, exec_id: str, place: str, command: Command) -> Began:
        around = await self._surroundings(command)
        folder = self._folder / secrets.token_hex(8)
        if command.root:
            await self._refuse_without_sudo(folder, around)
        try:
            running = await self._begun(place, command, around, folder)
        except BaseException:
            with suppress(OSError):  # the first error counts
                (folder / SCRIPT_FILE).unlink(
                    missing_ok=True
                )  # which works without a descriptor to spare, too
                remove_tree(folder)
            raise
        self._running[exec_id] = running
        self._background.start(self._forget(exec_id, running, folder))
        if command.timeout_s is not None:
            running.end_after(command.timeout_s)
        user = "root" if command.root else await asyncio.to_thread(own_name)
        return Began(place, user, around.remark)

    async def _begun(self, place: str, command: Command, around: Surroundings, folder: Path) -> _Running:
        try:
            script = await asyncio.to_thread(_lay_down, folder, command)
        except OSError as error:
            raise PlaceFailed(f"{folder} cannot be written: {error.strerror}") from None
        run = process.Run(
            name="exec",
            argv=_argv(command, script),
            env=around.environment,
            cwd=around.cwd,
            folder=str(folder / "run"),
            mark=self._mark,
            mounts=around.mounts,
            through=self._sudo if command.root else (),
        )
        return await _begin(run, place, self._background, self._unasked_s)

    async def _refuse_without_sudo(self, folder: Path, around: Surroundings) -> None:
        """Raise PlaceFailed, with what sudo says, where it does not let this user become root without being asked."""
        if not self._sudo:
            return
        argv = (*self._sudo, "true")
        asked = await process.start(
            process.Run("sudo", argv, around.environment, "/", str(folder), self._mark)
        )
        try:
            ended = await asyncio.wait_for(asked.wait(), SUDO_S)
            said = (
                ended.error or (await asyncio.to_thread(tail, folder / process.LOG_FILE, 1, 4096) or [""])[-1]
            )
        except asyncio.TimeoutError:
            ended, said = None, f"no answer within {SUDO_S:g} s"
        await asked.kill("it has served")
        await asyncio.to_thread(remove_tree, folder)
        if ended is None or ended.code != 0:
            raise PlaceFailed(
                f"`sudo -n` cannot be run: {said}; install sudo there"
                if ended is not None and ended.error is not None
                else f"`sudo -n` is refused to {own_name()}: {said or 'it does not say why'}; allow it in sudoers (NOPASSWD)"
            )

    async def _forget(self, exec_id: str, running: _Running, folder: Path) -> None:
        """Remove what lies on the disk once the command is gone, and what is known of it once nobody will ask any more."""
        await running.process.gone()
        try:
            await asyncio.to_thread(remove_tree, folder)
        except OSError:  # no descriptor to spare, say: what lies there goes with the node's next actor
            log.exception("removing what an exec has left in %s", folder)
        await running.given_up.wait()
        running.close()
        del self._running[exec_id]
        self._starts.pop(exec_id, None)


class _Running:
    """One command. ``given_up`` is set when nobody has asked for it for too long."""

    def __init__(
        self,
        started: process.Process,
        place: str,
        output: asyncio.StreamReader,
        transport: asyncio.BaseTransport,
        background: Background,
        unasked_s: float,
    ) -> None:
        self.process = started
        self.given_up = asyncio.Event()
        self._place = place
        self._output = output
        self._transport = transport
        self._background = background
        self._unasked_s = unasked_s
        self._loop = asyncio.get_running_loop()
        self._exit = background.start(started.wait())
        self._unasked: asyncio.TimerHandle | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._limit_s: float | None = None
        self._stopped: str | None = None
        self._reading = asyncio.Lock()
        self._offset = 0
        self._held = b""
        self.asked()

    @property
    def over(self) -> bool:
        return self._exit.done()

    def asked(self) -> None:
        self._give_up_in(self._unasked_s)

    def end_after(self, limit_s: float) -> None:
        def end() -> None:
            if not self.over:
                self._limit_s = limit_s
                self.stop(GRACE_S, f"its time limit of {limit_s:g} s was over")

        self._limit = self._loop.call_later(limit_s, end)

    def stop(self, grace_s: float, why: str) -> None:
        if not self.over:
            self._stopped = self._stopped or why
        self._background.start(self.process.stop(grace_s, why))

    def close(self) -> None:
        for timer in (self._limit, self._unasked):
            if timer is not None:
                timer.cancel()
        self._transport.close()

    async def read(self, offset: int, wait_s: float) -> Chunk:
        async with self._reading:
            self.asked()
            deadline = self._loop.time() + wait_s
            if offset == self._offset + len(self._held):
                self._offset, self._held = offset, b""
            elif offset != self._offset:
                raise PlaceFailed(f"its output from byte {offset} on is gone")
            if not self._held:
                self._held = await self._next(deadline)
            if not self._output.at_eof() or not await self._has_ended(deadline):
                self.asked()
                return Chunk(self._held)
            self._give_up_in(min(self._unasked_s, REMEMBERED_S))
            return Chunk(self._held, self._over())

    async def _next(self, deadline: float) -> bytes:
        """Return the next piece, as much as there is, or nothing."""
        if self._output.at_eof():
            return b""
        try:
            return await asyncio.wait_for(
                self._output.read(PIECE_BYTES), max(0.0, deadline - self._loop.time())
            )
        except asyncio.TimeoutError:
            return b""

    async def _has_ended(self, deadline: float) -> bool:
        """A command may close its output long before it ends; a piece does not wait for that."""
        wait_s = 0.0 if self._held else max(0.0, deadline - self._loop.time())
        if not self.over:
            await asyncio.wait({self._exit}, timeout=wait_s)
        return self.over

    def _over(self) -> Over:
        ended = self._exit.result()
        status = ended.code if ended.signal is None else 128 + ended.signal
        if self._limit_s is not None:
            status = TIMED_OUT
        elif self._stopped is not None:
            status = STOPPED
        why = ended.error or self._stopped or ("it ran out of memory" if ended.oom and status else None)
        return Over(self._place, NO_ANSWER if status is None else status, ended.code, ended.signal, why)

    def _give_up_in(self, seconds: float) -> None:
        if self._unasked is not None:
            self._unasked.cancel()
        self._unasked = self._loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        self.given_up.set()
        if not self.over:
            self.stop(GRACE_S, f"nobody had asked for it for {self._unasked_s:g} s")


async def _begin(run: process.Run, place: str, background: Background, unasked_s: float) -> _Running:
    """Start it, with a pipe for all that it writes."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        reading, writing = os.pipe()
    except OSError:
        os.close(nothing)
        raise
    try:
        with suppress(OSError):  # the user has too many such pipes: a small one does it, too
            fcntl.fcntl(writing, F_SETPIPE_SZ, PIECE_BYTES)
        output = asyncio.StreamReader(limit=PIECE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(reading, "rb", 0)
        )
        try:
            started = await process.start(replace(run, stdio=(nothing, writing, writing)))
        except BaseException:
            transport.close()
            raise
    finally:
        os.close(writing)
        os.close(nothing)
    return _Running(started, place, output, transport, background, unasked_s)


def _lay_down(folder: Path, command: Command) -> Path | None:
    """Make the folder of a command; return the file of its script."""
    private_folder(folder / "run")
    private_folder(folder)
    if command.script is None:
        return None
    script = folder / SCRIPT_FILE
    write_private(script, command.script, 0o700)
    return script


def _argv(command: Command, script: Path | None) -> tuple[str, ...]:
    """Return what is executed; a script without a first line that names its interpreter is bash's."""
    if script is None or command.script is None:
        return shell_argv(command.words, pipefail=False)
    interpreter = () if command.script.startswith(b"#!") else ("bash",)
    return (*interpreter, str(script), *command.words)


def _ways_to_root() -> tuple[str, ...]:
    return () if os.geteuid() == 0 else ("sudo", "-n", "--")


@cache
def own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a number without a name, as in containers
        return str(os.geteuid())
