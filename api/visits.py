"""What is known of one request while it is answered: its id, where it comes from, who asks, what it changes."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Coroutine
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from raycontrol.access import Identity
from raycontrol.tokens import Parsed

KEY = "raycontrol.visit"
GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")

T = TypeVar("T")


@dataclass
class Visit:
    """``origin`` is the address it comes from; ``credentials`` are those by which ``identity`` was let in; ``change`` names
    what goes into the audit, None for what only reads."""

    request_id: str
    origin: str
    identity: Identity | None = None
    credentials: Parsed | None = field(default=None, repr=False)
    change: str | None = None
    target: str = ""


_ANSWERED: ContextVar[Visit | None] = ContextVar("raycontrol.visit", default=None)
"""The request that this task is there to answer; tasks that it begins inherit it."""


def begin(scope: Any, given_id: str | None) -> Visit:
    """Return the visit of a request that has just come; an id of its own is taken if it is short and plain."""
    client = scope.get("client")
    kept = given_id is not None and GIVEN_ID.fullmatch(given_id) is not None
    visit = Visit(
        request_id=given_id if given_id is not None and kept else new_id(),
        origin=str(client[0]) if client else "unknown",
    )
    scope[KEY] = visit
    _ANSWERED.set(visit)
    return visit


def new_id() -> str:
    return secrets.token_hex(8)


def visit_of(request: Request) -> Visit:
    visit: Visit = request.scope[KEY]
    return visit


def caller() -> str | None:
    """Return the token of the request that this task answers; None before it was let in, and where it answers none."""
    visit = _ANSWERED.get()
    return None if visit is None or visit.identity is None else visit.identity.token


def for_nobody(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Begin what a request only happens to be the first to need: it is on no token's account."""
    return Context().run(asyncio.ensure_future, work)
