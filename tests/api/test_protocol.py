"""How long a connection may take its time: its clock and its transport are the test's."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from raycontrol.api.protocol import PatientProtocol, check_uvicorn

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Timer:
    def __init__(self, callback: Callable[..., None], given: tuple[Any, ...]) -> None:
        self._callback = callback
        self._given = given
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def run(self) -> None:
        if not self.cancelled:
            self._callback(*self._given)


class ByHand:
    """An event loop whose time passes when the test says so; what a task would do is never done."""

    def __init__(self) -> None:
        self._timers: list[tuple[float, Timer]] = []
        self._now = 0.0

    def call_later(self, delay_s: float, callback: Callable[..., None], *given: Any) -> Timer:
        timer = Timer(callback, given)
        self._timers.append((self._now + delay_s, timer))
        return timer

    def create_task(self, work: Any, **_: Any) -> asyncio.Future[None]:
        work.close()
        return asyncio.Future(loop=self._silent())

    def pass_s(self, seconds: float) -> None:
        until = self._now + seconds
        while due := sorted((at, number) for number, (at, _) in enumerate(self._timers) if at <= until):
            self._now, number = due[0]
            self._timers.pop(number)[1].run()
        self._now = until

    def _silent(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.close()
        return loop


class Wire:
    """A transport, and its socket, of whose bytes the client has taken ``taken``."""

    def __init__(self) -> None:
        self.taken = 0
        self.closed = False
        self.aborted = False
        self.options: list[tuple[Any, ...]] = []

    def getsockopt(self, level: int, option: int, length: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return bytes(length - 8) + self.taken.to_bytes(8, sys.byteorder)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def setsockopt(self, *option: Any) -> None:
        self.options.append(option)

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 8642

    getpeername = getsockname
    family = 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Connection:
    """A connection to a server whose clients have 20 s for a head, and have to take something every 30 s."""

    def __init__(self) -> None:
        config = uvicorn.Config(_app, log_config=None, timeout_keep_alive=1000)
        config.load()
        self.loop, self.wire = ByHand(), Wire()
        self.protocol = PatientProtocol(
            config=config,
            server_state=ServerState(),
            app_state={},
            _loop=self.loop,
            request_s=20,
            write_s=30,
        )
        self.protocol.connection_made(self.wire)


async def _app(scope: Any, receive: Any, send: Any) -> None: ...


@pytest.fixture
def connection() -> Connection:
    return Connection()


def test_a_head_that_does_not_come_is_not_waited_for(connection: Connection) -> None:
    connection.protocol.data_received(HEAD[:20])
    connection.loop.pass_s(39)
    assert not connection.wire.closed
    connection.loop.pass_s(1)
    assert connection.wire.closed


def test_a_second_head_that_does_not_come_is_not_waited_for_either(connection: Connection) -> None:
    connection.protocol.data_received(HEAD)
    connection.protocol.cycle.response_complete = True
    connection.protocol.data_received(HEAD[:20])
    connection.loop.pass_s(40)
    assert connection.wire.closed


def test_after_a_long_answer_the_client_has_its_whole_time_for_the_next_head(connection: Connection) -> None:
    connection.protocol.data_received(HEAD)
    connection.loop.pass_s(119)
    connection.protocol.cycle.response_complete = True
    connection.loop.pass_s(20)
    assert not connection.wire.closed
    connection.loop.pass_s(1)
    assert connection.wire.closed


def test_who_takes_nothing_of_an_answer_is_cut_off(connection: Connection) -> None:
    connection.protocol.pause_writing()
    connection.loop.pass_s(29)
    assert not connection.wire.aborted
    connection.loop.pass_s(1)
    assert connection.wire.aborted
    assert len(connection.wire.options) == 1


def test_who_takes_little_of_an_answer_is_waited_for(connection: Connection) -> None:
    connection.protocol.pause_writing()
    for _ in range(10):
        connection.wire.taken += 1
        connection.loop.pass_s(30)
    assert not connection.wire.aborted
    connection.loop.pass_s(30)
    assert connection.wire.aborted


def test_who_has_taken_all_of_an_answer_is_left_alone(connection: Connection) -> None:
    connection.protocol.pause_writing()
    connection.protocol.resume_writing()
    connection.loop.pass_s(1000)
    assert not connection.wire.aborted


def test_the_uvicorn_that_is_installed_has_what_this_builds_on() -> None:
    check_uvicorn()
