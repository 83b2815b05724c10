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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from raycontrol.gate import Abandoned, Finished, Gate, Outcome

log = logging.getLogger(__name__)

SOCKET = "gate.sock"
POLL_S = 15.0
RETRY_S = 0.5
PATIENCE_S = 10.0
"""How long a launcher waits for the others before it says for whom."""
KILLED = -9


class Launcher(Protocol):
    """The launcher's instance, as the others see it. Both calls may fail while it cannot be reached."""

    async def join(self, instance: str, call: int, timeout_s: float) -> Outcome | None:
        """Say that ``instance`` has made its call of that number; return how the world of it ended, None while it has not."""

    async def leave(self, instance: str) -> None:
        """Say that the start command of ``instance`` has ended."""


class Gatekeeper:
    """One instance's end of collective calls. ``meeting`` names the instances that take part, the launcher first."""

    def __init__(
        self,
        folder: Path,
        instance: str,
        meeting: Sequence[str],
        launcher: Launcher,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._folder = folder
        self._me = instance
        self._launcher = launcher
        self._patience_s = patience_s
        self._gate = Gate(meeting[0], meeting) if instance == meeting[0] else None
        self._moved = asyncio.Condition()
        self._calls = 0
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen for stand-ins."""
        self._server = await asyncio.start_unix_server(self._serve, sock=_bound(self._folder / SOCKET))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def join(self, instance: str, call: int, timeout_s: float) -> Outcome | None:
        """On the launcher: take another instance's call, wait for its end."""
        gate = self._held()
        gate.arrive(instance, call)
        await self._announce()
        await self._until(lambda: gate.outcome(call) is not None, timeout_s)
        return gate.outcome(call)

    async def leave(self, instance: str) -> None:
        """On the launcher: an instance's start command has ended; it counts as arrived at every call."""
        self._held().end(instance)
        await self._announce()

    async def start_command_ended(self) -> None:
        """This instance's start command has ended; returns when the launcher knows."""
        if self._gate is not None:
            await self.leave(self._me)
            return
        while True:
            try:
                await self._launcher.leave(self._me)
                return
            except Exception:  # it cannot be reached; if it is dead this instance is being stopped
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

    # One stand-in's connection.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await _heard(reader) is not None:
                await self._take(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            log.info("a stand-in is gone")
        finally:
            writer.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a call, the next of this instance."""
        call = self._calls
        self._calls += 1
        if self._gate is not None:
            await self._lead(call, reader, writer)
        else:
            await self._follow(call, writer)

    async def _lead(self, call: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let the launcher's call go when everybody is there; without a word of its end it was killed."""
        gate = self._held()
        gate.arrive(self._me, call)
        status = KILLED
        try:
            await self._everybody(call, writer)
            await _tell(writer, {"go": call})
            said = await _heard(reader)
            if said is not None:
                status = int(said["status"])
        finally:
            gate.finish(call, status)
            await self._announce()
        await _tell(writer, {"ok": True})

    async def _everybody(self, call: int, writer: asyncio.StreamWriter) -> None:
        """Return when nobody is missing; say for whom it waits when that takes long, or changes."""
        gate = self._held()
        told: tuple[str, ...] = ()
        while gate.missing(call):
            await self._until(lambda: not gate.missing(call), self._patience_s)
            missing = gate.missing(call)
            if missing and missing != told:
                told = missing
                await _tell(writer, {"waiting": list(missing)})

    async def _follow(self, call: int, writer: asyncio.StreamWriter) -> None:
        outcome: Outcome | None = None
        while outcome is None:
            try:
                outcome = await self._launcher.join(self._me, call, POLL_S)
            except Exception:  # as in ``start_command_ended``
                await asyncio.sleep(RETRY_S)
        match outcome:
            case Finished(status):
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
