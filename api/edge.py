"""Around every request: its id, whom it is addressed to, what every answer carries, the audit, the log, the measures."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raycontrol.access import AuditEntry
from raycontrol.api.hosts import Hosts, in_origin_form, is_own_origin
from raycontrol.api.hubs import Hub
from raycontrol.api.problems import BadRequest, Busy, Forbidden, Refusal, WrongHost, problem
from raycontrol.api.visits import Visit, begin
from raycontrol.version import __version__

log = logging.getLogger(__name__)

ON_EVERY_ANSWER: Mapping[str, str] = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


class Edge:
    """The outermost application. An error that nobody foresaw ends here, as a 500 that tells nothing of the inside."""

    def __init__(self, app: ASGIApp, hub: Hub, hosts: Hosts) -> None:
        self._app = app
        self._hub = hub
        self._hosts = hosts
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = in_origin_form(scope)
        headers = Headers(scope=scope)
        visit = begin(scope, headers.get("x-request-id"))
        answer = _Answer(send, visit, self._hub, last=_is_unsure_what_follows(headers))
        started = time.perf_counter()
        refused = self._refusal(headers)
        self._under_way += 1
        try:
            if refused is not None:
                await problem(refused, visit.request_id)(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        except Exception as error:  # whatever it is, the client gets an answer and the log the reason
            log.exception("request %s failed", visit.request_id)
            if not answer.begun:
                await problem(error, visit.request_id)(scope, receive, answer)
            elif not answer.ended:
                raise  # uvicorn cuts the connection: the client must not take half an answer for a whole one
        finally:
            self._under_way -= 1
            self._tell(scope, visit, answer.status, time.perf_counter() - started)

    def _refusal(self, headers: Headers) -> Refusal | None:
        """Return why a request is not even looked at."""
        if self._under_way >= self._hub.limits.requests:
            return Busy("this server answers as many requests as it can; try again")
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return BadRequest("a request needs one Host header")
        if not self._hosts.know(hosts[0]):
            return WrongHost("this server is not the host that was asked for; name it with --allowed-host")
        if _has_two_lengths(headers):
            return BadRequest(
                "a request's length is told by Content-Length or by Transfer-Encoding, not by both"
            )
        origins = headers.getlist("origin")
        if any(not is_own_origin(origin, hosts[0]) for origin in origins):
            return Forbidden("requests from pages of other origins are refused")
        return None

    def _tell(self, scope: Scope, visit: Visit, status: int, took_s: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._hub.measures.answered(scope["method"], route, status, took_s)
        log.info(
            "%s %s %s %d %.0f ms id=%s token=%s",
            visit.origin,
            scope["method"],
            _plain_path(scope),
            status,
            took_s * 1000,
            visit.request_id,
            visit.identity.token if visit.identity else "-",
        )


class _Answer:
    """Sends an answer on. What was changed, or refused, is in the audit before its answer begins.

    After the ``last`` of a connection no request on it is read any more.
    """

    def __init__(self, send: Send, visit: Visit, hub: Hub, *, last: bool) -> None:
        self._send = send
        self._visit = visit
        self._hub = hub
        self._last = last
        self.status = 0
        self.begun = False
        self.ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._complete(MutableHeaders(scope=message))
            await self._audit()
            self.begun = True
        await self._send(message)
        self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)

    def _complete(self, headers: MutableHeaders) -> None:
        for name, value in ON_EVERY_ANSWER.items():
            headers[name] = value
        headers["X-Request-ID"] = self._visit.request_id
        if self._last:
            headers["Connection"] = "close"
        if self._visit.identity is not None:
            headers["X-Raycontrol-Version"] = __version__

    async def _audit(self) -> None:
        """Nobody who came without a token is in it: he could fill it. He is in the log."""
        visit = self._visit
        if visit.change is None or visit.identity is None or self._is_too_much(visit.identity.token):
            return
        await self._hub.audits.add(_entry(visit, visit.change, self.status))

    def _is_too_much(self, token: str) -> bool:
        """Whether this is one refusal, or failure, more than the audit takes of a token, which must not fill it."""
        return self.status == 429 or (self.status >= 400 and self._hub.refusals.take(token) is not None)


def _has_two_lengths(headers: Headers) -> bool:
    """A proxy may believe the other one, and then send somebody else's request as the rest of this one."""
    return "content-length" in headers and "transfer-encoding" in headers


def _is_unsure_what_follows(headers: Headers) -> bool:
    """Whether what comes next on the connection may be this request's body or another request: nobody who reads it the
    other way must be answered. Who expects a 100, and gets another answer, may leave the body away."""
    return _has_two_lengths(headers) or "expect" in headers


def _entry(visit: Visit, change: str, status: int) -> AuditEntry:
    assert visit.identity is not None
    return AuditEntry(
        at=time.time(),
        token=visit.identity.token,
        user=visit.identity.user,
        role=visit.identity.role,
        origin=visit.origin,
        action=change,
        target=visit.target[:200],
        status=status,
        request_id=visit.request_id,
    )


def _plain_path(scope: Any) -> str:
    """Return the path as it was sent: decoded, it could hold line ends and forge lines of the log."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return ascii(raw.partition(b"?")[0].decode("latin-1"))[1:-1][:300]
