"""The pipes of a command, carried to and from a channel by callbacks of the event loop.

A channel is what asyncssh calls one; of it, ``pause_reading``, ``resume_reading`` and a function that writes are used.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
from collections.abc import Callable
from typing import Any

STEP_BYTES = 256 * 1024
PIPE_BYTES = 64 * 1024  # what the kernel gives every pipe
HELD_CHECK_S = 1.0


def open_pipes(count: int) -> list[tuple[int, int]]:
    """As many pipes, or none and an ``OSError``."""
    pipes: list[tuple[int, int]] = []
    try:
        while len(pipes) < count:
            pipes.append(os.pipe())
    except OSError:
        for descriptor in itertools.chain(*pipes):
            os.close(descriptor)
        raise
    return pipes


class Inlet:
    """What the client sends, on its way into the command's stdin. Owns the descriptor.

    ``closed`` tells whether the client has closed the channel, which asyncssh keeps behind the data that we hold back
    (a lost connection it does not): it is asked now and then while we do.
    """

    def __init__(self, descriptor: int, channel: Any, closed: Callable[[], bool]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._channel = channel
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._waiting = bytearray()
        self._eof = False
        self._holding: asyncio.TimerHandle | None = None

    def write(self, data: bytes) -> None:
        if self._descriptor < 0:
            return
        if self._waiting:
            self._waiting += data
            return
        count = self._push(data)
        if count < len(data):
            self._waiting += data[count:]
            self._loop.add_writer(self._descriptor, self._on_writable)
            _grow(self._descriptor)
            self._hold()

    def write_eof(self) -> None:
        self._eof = True
        if not self._waiting:
            self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_writer(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
            self._waiting.clear()
        self._release()

    def _on_writable(self) -> None:
        del self._waiting[: self._push(self._waiting)]
        if self._waiting or self._descriptor < 0:
            return
        self._loop.remove_writer(self._descriptor)
        if self._eof:
            self.close()
        self._release()

    def _push(self, data: bytes | bytearray) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:
            return 0
        except OSError:  # the command has closed its stdin
            self.close()
            self._hold()  # or the client would send on, for nothing
            return len(data)

    def _hold(self) -> None:
        if self._holding is None:
            self._channel.pause_reading()
        self._holding = self._loop.call_later(HELD_CHECK_S, self._on_held)

    def _on_held(self) -> None:
        if self._closed():
            self.close()
        else:
            self._hold()

    def _release(self) -> None:
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
            self._channel.resume_reading()


class Outlet:
    """What the command writes to one of its outputs, on its way into the channel. Owns the descriptor.

    ``ended``: the output was at its end, or was closed, or the channel takes no more; all that came before is in the
    channel.
    """

    def __init__(self, descriptor: int, write: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self.ended = asyncio.Event()
        self._descriptor = descriptor
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._paused = False
        self._last = False
        self._loop.add_reader(descriptor, self._pull)

    def pause(self) -> None:
        if self._descriptor >= 0 and not self._paused:
            self._paused = True
            self._loop.remove_reader(self._descriptor)

    def resume(self) -> None:
        if self._descriptor >= 0 and self._paused:
            self._paused = False
            self._loop.add_reader(self._descriptor, self._pull)
            if self._last:
                self._loop.call_soon(self._pull)

    def nothing_more(self) -> None:
        """Take what is in the pipe, and do not wait for its end."""
        self._last = True
        self._pull()

    def close(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
        self.ended.set()

    def _pull(self) -> None:
        if self._descriptor < 0 or self._paused:
            return
        try:
            data = os.read(self._descriptor, STEP_BYTES)
        except BlockingIOError:
            if self._last:
                self.close()
            return
        if len(data) == PIPE_BYTES:
            _grow(self._descriptor)
        try:
            self._write(data)
        except OSError:
            data = b""  # the client has closed the channel; the session hears of it next
        if not data:
            self.close()
        elif self._last:
            self._loop.call_soon(self._pull)


def _grow(descriptor: int) -> None:
    """Much goes through this pipe. Not done to every one: what one user's pipes may hold together is limited."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, STEP_BYTES)
    except OSError:
        pass
