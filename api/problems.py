"""Refusals of the HTTP interface, and every error as a problem document (RFC 9457), from one table."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from raycontrol import errors
from raycontrol.api.visits import visit_of
from raycontrol.errors import Fault, RaycontrolError, SpecError
from raycontrol.specfaults import known_rule

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
NAMESPACE = "urn:raycontrol:"


class Refusal(RaycontrolError):
    """What the server refuses by itself; ``headers`` go with the answer."""

    def __init__(self, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail, headers)
        self.detail = detail
        self.headers = headers or {}

    def __str__(self) -> str:
        return self.detail


class BadRequest(Refusal):
    """What was sent cannot be read."""


class Unauthorized(Refusal):
    """The token is missing, wrong, expired or revoked."""


class Forbidden(Refusal):
    """The role does not allow it, or the request comes from a page of another origin."""


class NotThere(Refusal):
    """There is no such thing, or it is not to be seen by whoever asks."""


class Conflict(Refusal):
    """It cannot be done as things stand."""


class BodyCut(BadRequest):
    """The client has left before its body was whole; nobody will read this answer."""


class BodyTooSlow(Refusal):
    """The body did not arrive in time."""


class TooLarge(Refusal):
    """The body, or what it would make, is larger than what is taken."""


class UnknownMedia(Refusal):
    """The body's content type is none that is read."""


class NoSuchRange(Refusal):
    """The range lies past the end."""


class WrongHost(Refusal):
    """The name in the Host header is none of this server's."""


class Unfit(Refusal):
    """A field of the request breaks a rule."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("; ".join(map(str, faults)))
        self.faults = faults


class TooMany(Refusal):
    """More requests than the token, or the address, may make."""


class Busy(Refusal):
    """The server has its hands full."""


class NotReady(Refusal):
    """The controller does not answer, or its store takes nothing."""


STATUSES: dict[type[Exception], int] = {
    BadRequest: 400,
    Unauthorized: 401,
    Forbidden: 403,
    NotThere: 404,
    BodyTooSlow: 408,
    Conflict: 409,
    TooLarge: 413,
    UnknownMedia: 415,
    NoSuchRange: 416,
    WrongHost: 421,
    Unfit: 422,
    TooMany: 429,
    Busy: 503,
    NotReady: 503,
    errors.UsageError: 400,
    errors.SpecError: 422,
    errors.IdTaken: 409,
    errors.KeyReused: 409,
    errors.JobNotFound: 404,
    errors.PackageError: 422,
    errors.PlanError: 422,
    errors.ClusterUnreachable: 503,
    errors.ControllerUnavailable: 503,
    errors.HeadFault: 500,
    errors.VersionMismatch: 503,
    errors.StoreError: 503,
    errors.StoreRefused: 409,
}
"""The HTTP status of each error; one that is not here has that of the class it derives from, a stranger 500."""

OF_THE_HEAD = (errors.ControllerUnavailable, errors.ClusterUnreachable)
UNAVAILABLE = (
    "the cluster's controller does not answer now; the server's log tells more under the request's id"
)
RETRY_AFTER_S = 2
NOWHERE = (
    "there is nothing at this path; /docs shows what can be asked, /openapi.json describes it for programs"
)
INTERNAL = "this should not happen; the server's log tells more under the request's id"


def status_of(error: Exception) -> int:
    return next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), 500)


def problem(error: Exception, request_id: str) -> Response:
    """Return the answer that tells of an error; of one that nobody foresaw only that there was one."""
    status = status_of(error)
    known = status != 500
    document: dict[str, Any] = {
        "type": NAMESPACE + (_kebab(type(error).__name__) if known else "internal-error"),
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": _detail(error) if known else INTERNAL,
        "instance": request_id,
    }
    if isinstance(error, SpecError | Unfit):
        document["faults"] = [asdict(fault) for fault in error.faults]
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    if isinstance(error, Refusal):
        headers |= error.headers
    return Response(_encoded(document), status, headers, MEDIA_TYPE)


def _detail(error: Exception) -> str:
    """What went wrong on the head may hold paths, addresses and tracebacks: it is in the log, not in the answer."""
    return UNAVAILABLE if isinstance(error, OF_THE_HEAD) else str(error)


async def answer_error(request: Request, error: Exception) -> Response:
    request_id = visit_of(request).request_id
    if isinstance(error, OF_THE_HEAD):
        log.error("request %s: %s", request_id, error)
    if isinstance(error, RaycontrolError) and status_of(error) == 500:
        # All other errors that nobody foresaw get as far as the edge, which logs them.
        log.error("request %s failed: %s", request_id, error)
    return problem(error, request_id)


async def answer_refusal_of_the_router(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, as the router tells of them."""
    assert isinstance(error, HTTPException)
    nowhere = error.status_code == 404 and error.detail == HTTPStatus.NOT_FOUND.phrase
    document = {
        "type": "about:blank",
        "title": HTTPStatus(error.status_code).phrase,
        "status": error.status_code,
        "detail": NOWHERE if nowhere else error.detail,
        "instance": visit_of(request).request_id,
    }
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_methods_of_path(request))
    return Response(_encoded(document), error.status_code, headers, MEDIA_TYPE)


def _methods_of_path(request: Request) -> list[str]:
    """The router knows those of one route only; a path may have several."""
    routes = [
        route for route in request.app.router.routes if route.matches(request.scope)[0] is not Match.NONE
    ]
    return sorted({method for route in routes for method in route.methods})


async def answer_invalid(request: Request, error: Exception) -> Response:
    """Parameters that break their rules, every one of them."""
    assert isinstance(error, RequestValidationError)
    return problem(Unfit(*faults_of(error.errors())), visit_of(request).request_id)


def faults_of(details: Any) -> list[Fault]:
    """Return pydantic's errors as faults; what was given is not repeated, for it may be a secret."""
    return [Fault(_field(item["loc"]), _rule(item)) for item in details]


def _rule(item: Any) -> str:
    known = known_rule(item["type"], item.get("ctx", {}))
    return known or item["msg"][:1].lower() + item["msg"][1:]


def _field(location: tuple[int | str, ...]) -> str:
    where = location[1:] if location and location[0] in ("query", "path", "header", "body") else location
    return ".".join(map(str, where))


def _kebab(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def _encoded(document: dict[str, Any]) -> bytes:
    """As JSON. Half a surrogate pair, which a JSON text can hold and UTF-8 cannot, stays an escape."""
    return json.dumps(document, ensure_ascii=True).encode()
