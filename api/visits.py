"""What is known of one request while it is answered: its id, where it comes from, who asks, what it changes."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from raycontrol.access import Identity
from raycontrol.tokens import Parsed

KEY = "raycontrol.visit"
GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


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


def begin(scope: Any, given_id: str | None) -> Visit:
    """Return the visit of a request that has just come; an id of its own is taken if it is short and plain."""
    client = scope.get("client")
    kept = given_id is not None and GIVEN_ID.fullmatch(given_id) is not None
    visit = Visit(
        request_id=given_id if given_id is not None and kept else new_id(),
        origin=str(client[0]) if client else "unknown",
    )
    scope[KEY] = visit
    return visit


def new_id() -> str:
    return secrets.token_hex(8)


def visit_of(request: Request) -> Visit:
    visit: Visit = request.scope[KEY]
    return visit
