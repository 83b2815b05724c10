"""What is between a connection and its requests: how long a client may take its time, and what is told of what is no HTTP.

uvicorn has no options for this, so it builds on attributes of its protocol that are no promise: ``check_uvicorn`` looks for them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from raycontrol.api.problems import BadRequest, problem
from raycontrol.api.visits import new_id
from raycontrol.errors import UsageError

log = logging.getLogger(__name__)

AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER: what the kernel still holds for the client is dropped, else it would be kept for as long as he wishes."""
ACKNOWLEDGED_AT = 120
"""Where tcpi_bytes_acked, of 8 bytes, lies in the tcp_info of linux/tcp.h (since Linux 4.1)."""
BUSY = object()
"""Stands for a request that was under way."""


class PatientProtocol(H11Protocol):
    """Closes connections that have begun no request for ``request_s``, and ends those that take nothing for ``write_s``.

    The time of a body is limited by who reads it (``bodies``).
    """

    def __init__(self, *given: Any, request_s: float, write_s: float, **named: Any) -> None:
        super().__init__(*given, **named)
        self.request_s = request_s
        self.write_s = write_s

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._seen: Any = BUSY
        self._stalled: asyncio.TimerHandle | None = None
        self._looking = self.loop.call_later(self.request_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._looking.cancel()
        self._flows()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_flow()

    def resume_writing(self) -> None:
        self._flows()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP as every other fault, and end the connection: nobody knows where its next request begins."""
        request_id = new_id()
        log.info("%s sent what is no HTTP id=%s", self.client[0] if self.client else "unknown", request_id)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer is under way, and stays cut
            answer = problem(
                BadRequest("this is no HTTP/1.1 request, or its head is larger than 64 KiB"), request_id
            )
            head = [*answer.raw_headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
            for event in (
                h11.Response(status_code=answer.status_code, headers=head, reason=b"Bad Request"),
                h11.Data(bytes(answer.body)),
            ):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def _look(self) -> None:
        """A connection that was idle at the last look, and has begun no request since, sends its head too slowly."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is self._seen:
            self.transport.close()
            return
        self._seen = self.cycle if idle else BUSY
        self._looking = self.loop.call_later(self.request_s, self._look)

    def _await_flow(self) -> None:
        taken = taken_bytes(self.transport.get_extra_info("socket"))
        self._stalled = self.loop.call_later(self.write_s, self._look_at_flow, taken)

    def _look_at_flow(self, taken: int) -> None:
        """A client that takes little is slow; only of one that takes nothing is the end not in sight."""
        if taken_bytes(self.transport.get_extra_info("socket")) > taken:
            self._await_flow()
        else:
            self._give_up()

    def _give_up(self) -> None:
        """End it without the rest: who does not read would not read the rest either."""
        log.info("a client took nothing for %g s; its connection is ended", self.write_s)
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self.transport.abort()

    def _flows(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def taken_bytes(connection: socket.socket) -> int:
    """Return how much the other side has acknowledged.

    What waits in our buffer tells nothing: the kernel has one of megabytes, and takes more only when a third of it is free.
    """
    facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKNOWLEDGED_AT + 8)
    return int.from_bytes(facts[ACKNOWLEDGED_AT:], sys.byteorder)


def check_uvicorn() -> None:
    """Raise UsageError when the uvicorn that is installed lacks what the protocol builds on."""
    held = set(H11Protocol.__init__.__code__.co_names)
    lacking = {"loop", "cycle", "transport", "conn", "client"} - held
    lacking |= {"send_400_response"} - vars(H11Protocol).keys()
    lacking |= {"response_complete"} - set(RequestResponseCycle.__init__.__code__.co_names)
    if lacking:
        raise UsageError(
            f"uvicorn {uvicorn.__version__} is not one that `raycontrol serve` runs with (it lacks "
            f"{', '.join(sorted(lacking))}); install what raycontrol asks for: `pip install 'raycontrol[cluster]'`"
        )
