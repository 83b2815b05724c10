"""Collective calls of MPI launchers, as one instance takes part in them.

A stand-in (``standin``) that was called in the start command connects to a socket in the instance's private folder and
waits. The launcher's instance decides (``gate``): its own call may go when every other instance has made its call of
that number, or has ended; the others are told how it ended. Instances ask the launcher's; it asks nobody.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from raycontrol.gate import Abandoned, Finished, Gate, Outcome

log = logging.getLogger(__name__)

SOCKET = "gate.sock"
POLL_S = 15.0
RETRY_S = 0.5
PATIENCE_S = 10.0
"""How long a launcher waits for the others before it says for whom."""
KILLED = -9

T = TypeVar("T")
Message: TypeAlias = "asyncio.Task[dict[str, Any] | None]"


class Launcher(Protocol):
    """The launcher's instance, as the others see it. Both calls may fail while it cannot be reached."""

    async def join(self, instance: str, call: int, timeout_s: float) -> Outcome | None:
        """Say that ``instance`` has made its call of that number; return how the world of it ended, None while it has not."""

    async def leave(self, instance: str) -> None:
        """Say that the start command of ``instance`` has ended."""


class Gatekeeper:
    """One instance's end of collective calls. ``meeting`` names the instances that take part, the launcher first.

    ``on_world_ended(call, status)`` is told on the launcher how the world of a call ended: its launcher's exit code, or a
    signal's negative number.
    """

    def __init__(
        self,
        folder: Path,
        instance: str,
        meeting: Sequence[str],
        launcher: Launcher,
        on_world_ended: Callable[[int, int], None] = lambda call, status: None,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._folder = folder
        self._me = instance
        self._launcher = launcher
        self._on_world_ended = on_world_ended
        self._patience_s = patience_s
        self._gate = Gate(meeting[0], meeting) if instance == meeting[0] else None
        self._moved = asyncio.Condition()
        self._calls = 0
        self._led: set[int] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Future[Any]] = set()

    async def open(self) -> None:
        """Listen for stand-ins."""
        self._server = await asyncio.start_unix_server(self._connected, sock=_bound(self._folder / SOCKET))

    def close(self) -> None:
        """Take no more calls; stand-ins that wait see the end of their connection."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()

    async def join(self, instance: str, call: int, timeout_s: float) -> Outcome | None:
        """On the launcher: take another instance's call, wait for its end."""
        gate = self._held()
        if gate.arrive(instance, call):  # most say again what is known, which must not wake the others
            await self._announce()
        await self._until(lambda: gate.outcome(call) is not None, timeout_s)
        return gate.outcome(call)

    async def leave(self, instance: str) -> None:
        """On the launcher: an instance's start command has ended; it counts as arrived at every call."""
        self._held().end(instance)
        await self._announce()

    def has_led_to(self, code: int | None) -> bool:
        """Whether a call of this instance was given this exit code, other than 0, because a world on the launcher had it."""
        return code in self._led

    async def start_command_ended(self) -> None:
        """This instance's start command has ended; returns when the launcher knows."""
        if self._gate is not None:
            await self.leave(self._me)
        else:
            await self._insist(lambda: self._launcher.leave(self._me))

    async def _insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the launcher's instance until it answers; if it is dead this instance is being stopped, and we with it."""
        failures = 0
        while True:
            try:
                return await ask()
            except Exception:
                if failures == 0:
                    log.warning("the launcher's instance cannot be reached; trying again", exc_info=True)
                failures += 1
                await asyncio.sleep(RETRY_S)

    def _held(self) -> Gate:
        assert self._gate is not None, f"{self._me} is not the launcher"
        return self._gate

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait for news that fulfil the condition, for so long at most."""
        async with self._moved:
            try:
                await asyncio.wait_for(self._moved.wait_for(condition), timeout_s)
            except asyncio.TimeoutError:
                pass

    async def _announce(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # One stand-in's connection.

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._start(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await _heard(reader) is not None:
                await self._take(reader, writer)
        except ConnectionError:
            log.info("a stand-in is gone")
        finally:
            writer.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a call, the next of this instance. ``last`` is the stand-in's last word, or the end of its connection."""
        call = self._calls
        self._calls += 1
        last = self._start(_heard(reader))
        try:
            if self._gate is not None:
                await self._lead(call, last, writer)
            else:
                await self._follow(call, last, writer)
        finally:
            last.cancel()

    async def _lead(self, call: int, last: Message, writer: asyncio.StreamWriter) -> None:
        """Let the launcher's call go when everybody is there; without a word of its end it was killed."""
        gate = self._held()
        gate.arrive(self._me, call)
        status = KILLED
        try:
            if await self._everybody(call, last, writer):
                await _tell(writer, {"go": call})
                said = await last
                status = KILLED if said is None else int(said["status"])
        finally:
            self._on_world_ended(call, status)
            gate.finish(call, status)
            await self._announce()
        await _tell(writer, {"ok": True})

    async def _everybody(self, call: int, last: Message, writer: asyncio.StreamWriter) -> bool:
        """Wait until nobody is missing; say for whom when that takes long, or changes. False: our stand-in is gone."""
        gate = self._held()
        told: tuple[str, ...] = ()
        last.add_done_callback(lambda _: self._start(self._announce()))
        while gate.missing(call) and not last.done():
            await self._until(lambda: not gate.missing(call) or last.done(), self._patience_s)
            missing = gate.missing(call)
            if missing and missing != told and not last.done():
                told = missing
                await _tell(writer, {"waiting": list(missing)})
        return not last.done()

    async def _follow(self, call: int, last: Message, writer: asyncio.StreamWriter) -> None:
        outcome: Outcome | None = None
        while outcome is None:
            joining = self._start(self._insist(lambda: self._launcher.join(self._me, call, POLL_S)))
            await asyncio.wait({joining, last}, return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                joining.cancel()
                return
            outcome = joining.result()
        match outcome:
            case Finished(status):
                self._led |= {status if status >= 0 else 128 - status} - {0}
                await _tell(writer, {"status": status})
            case Abandoned(advice):
                await _tell(writer, {"error": advice})


def _bound(path: Path) -> socket.socket:
    """A listening socket at a path that may be longer than a socket's address can hold."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    return listener


async def _heard(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message; None at the end of the connection."""
    line = await reader.readline()
    found: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return found


async def _tell(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()
