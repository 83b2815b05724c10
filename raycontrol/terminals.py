"""Shells in a running instance, each on a pseudo-terminal: opened, read, written, resized and ended from afar.

A shell lives as long as somebody reads it: a client that is gone asks for no more output, and then the terminal hangs up, as a
modem's would, which ends a shell and what runs in it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import termios
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from raycontrol.background import Background
from raycontrol.errors import RaycontrolError
from raycontrol.process import Process

MOST_BYTES = 256 * 1024
"""So much output waits to be read before the program has to; and so much input."""
ABANDONED_S = 15.0
"""Nobody has read for so long: nobody is there."""
HANG_UP_S = 5.0
"""How long after the hang-up what is left is killed."""
LOOK_S = 0.5

StartShell = Callable[[int, str], Awaitable[Process]]
"""``start(terminal, term)``: a shell on that terminal (its descriptor), which is of that kind (TERM)."""


class NoShell(RaycontrolError):
    """There is no such shell, or there can be none now."""


@dataclass(frozen=True)
class Output:
    """What a shell has written next. ``status``, once it has ended and all was read, is what a shell would call its exit status."""

    data: bytes
    status: int | None = None


class Terminals:
    """The shells of one instance, by number. One that nobody has read for ``abandoned_s`` seconds ends."""

    def __init__(
        self, start: StartShell, background: Background, *, abandoned_s: float = ABANDONED_S
    ) -> None:
        self._start = start
        self._background = background
        self._abandoned_s = abandoned_s
        self._shells: dict[int, Shell] = {}
        self._opened = 0

    async def open(self, rows: int, columns: int, term: str) -> int:
        """Start a shell; return its number. Raises NoShell."""
        ours, theirs = os.openpty()
        try:
            _set_size(ours, rows, columns)
            running = await self._start(theirs, term)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._opened += 1
        shell = self._shells[self._opened] = Shell(ours, running)
        self._background.start(self._attend(self._opened, shell))
        return self._opened

    async def read(self, number: int, wait_s: float) -> Output:
        return await self._shell(number).read(wait_s)

    async def write(self, number: int, data: bytes) -> None:
        await self._shell(number).write(data)

    async def resize(self, number: int, rows: int, columns: int) -> None:
        self._shell(number).resize(rows, columns)

    async def close(self, number: int) -> None:
        """Hang up; return when nothing of it is left."""
        if number in self._shells:
            await self._shells[number].hang_up()

    async def close_all(self) -> None:
        await asyncio.gather(*(shell.hang_up() for shell in [*self._shells.values()]))

    def _shell(self, number: int) -> Shell:
        if number not in self._shells:
            raise NoShell("the shell has ended")
        return self._shells[number]

    async def _attend(self, number: int, shell: Shell) -> None:
        """Hang up when nobody reads any more; forget it when it is gone and its end was read, or nobody asks for it."""
        while shell.unread_s < self._abandoned_s:
            await asyncio.sleep(LOOK_S)
        await shell.hang_up()
        del self._shells[number]


class Shell:
    """A process on a terminal, of which ``ours`` is our side."""

    def __init__(self, ours: int, running: Process) -> None:
        self._ours = ours
        self._running = running
        self._loop = asyncio.get_running_loop()
        self._output = bytearray()
        self._input = bytearray()
        self._changed = asyncio.Condition()
        self._closed = False
        self._readers = 0
        self._asked_at = self._loop.time()
        self._ending = asyncio.ensure_future(running.gone())
        self._ending.add_done_callback(lambda _: self._on_gone())
        os.set_blocking(ours, False)
        self._loop.add_reader(ours, self._on_output)

    @property
    def unread_s(self) -> float:
        """For how long nobody has asked for output."""
        return 0.0 if self._readers else self._loop.time() - self._asked_at

    async def read(self, wait_s: float) -> Output:
        """Return what was written since, once there is something; nothing after ``wait_s``."""
        self._readers += 1
        try:
            async with self._changed:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait_for(self._has_news), wait_s)
            data = bytes(self._output)
            self._output.clear()
            if not self._closed:
                self._loop.add_reader(self._ours, self._on_output)
            return Output(data, self._status() if self._closed and self._ending.done() else None)
        finally:
            self._readers -= 1
            self._asked_at = self._loop.time()

    async def write(self, data: bytes) -> None:
        """Type; return when it is on its way."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._input) < MOST_BYTES or self._closed)
        if not self._closed:
            self._input += data
            self._on_room()

    def resize(self, rows: int, columns: int) -> None:
        """The kernel tells the program (SIGWINCH)."""
        if not self._closed:
            _set_size(self._ours, rows, columns)

    async def hang_up(self) -> None:
        """Close our side: the kernel sends SIGHUP to the shell and to what it runs in front. Then kill what is left."""
        self._close()
        await asyncio.wait({self._ending}, timeout=HANG_UP_S)
        await self._running.kill("its terminal was closed")

    def _has_news(self) -> bool:
        return bool(self._output) or (self._closed and self._ending.done())

    def _status(self) -> int:
        ended = self._ending.result()
        return (
            128 + ended.signal if ended.signal is not None else ended.code if ended.code is not None else 127
        )

    def _on_output(self) -> None:
        try:
            data = os.read(self._ours, 65536)
        except BlockingIOError:
            return
        except OSError:  # EIO: nobody has the other side any more
            data = b""
        if not data:
            self._close()
        self._output += data
        if len(self._output) >= MOST_BYTES:
            self._loop.remove_reader(self._ours)
        self._tell()

    def _on_room(self) -> None:
        """Pass on what was typed, as far as the program's side has room."""
        try:
            del self._input[: os.write(self._ours, self._input)]
        except BlockingIOError:
            pass
        except OSError:
            self._input.clear()
        if self._input:
            self._loop.add_writer(self._ours, self._on_room)
        else:
            self._loop.remove_writer(self._ours)
        self._tell()

    def _on_gone(self) -> None:
        """Take what is left in the terminal; somebody outside the tree may hold it open for ever."""
        while not self._closed and len(self._output) < MOST_BYTES:
            before = len(self._output)
            self._on_output()
            if len(self._output) == before:
                self._close()
        self._close()
        self._tell()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._ours)
            self._loop.remove_writer(self._ours)
            os.close(self._ours)
            self._tell()

    def _tell(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._told = asyncio.ensure_future(notify())


def _set_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
