"""Who is let in to a route. Every route declares its action; nothing is read of a request before its guard has agreed."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Path, Request
from fastapi.security import HTTPBearer
from fastapi.security.http import HTTPAuthorizationCredentials

from raycontrol import tokens
from raycontrol.access import OWN, RULES, Action, Identity, allowed
from raycontrol.api.calls import Calls
from raycontrol.api.hubs import hub_of
from raycontrol.api.limits import Buckets, Limits
from raycontrol.api.problems import Forbidden, NotThere, TooMany, Unauthorized
from raycontrol.api.visits import visit_of
from raycontrol.errors import JobNotFound, UsageError
from raycontrol.job import checked_id
from raycontrol.status import JobInfo
from raycontrol.tokens import Parsed

log = logging.getLogger(__name__)

REMEMBERED_S = 2.0
"""How long a revoked token may still be let in, in exchange for one question to the controller in that time."""
KEPT = 10_000
MALFORMED = Parsed("", tokens.NOBODYS)
"""Stands for a text that is no token, so that it is asked for like any other."""

_BEARER = HTTPBearer(auto_error=False, bearerFormat="rct_<id>_<secret>")


class Authenticator:
    """Knows who comes with a token, and counts: requests of a token, failures of an address."""

    def __init__(self, calls: Calls, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._calls = calls
        self._clock = clock
        self._requests = Buckets(limits.rate_per_s, limits.burst, clock)
        self._failures = Buckets(limits.failures_per_s, limits.failures_burst, clock)
        self._known: OrderedDict[Parsed, tuple[Identity | None, float]] = OrderedDict()

    async def identity(self, text: str, origin: str) -> Identity:
        """Return who comes; raises Unauthorized, and TooMany for a token, or an address, that has asked too often."""
        credentials = tokens.parsed(text) or MALFORMED
        self._refuse_guessing(credentials, origin)
        found = await self._who(credentials)
        if found is None:
            self._failures.take(origin)
            raise unauthorized()
        wait_s = self._requests.take(found.token)
        if wait_s is not None:
            raise _too_many(f"token {found.token!r} has made too many requests", wait_s)
        return found

    def forget(self) -> None:
        """Ask anew about every token: one has just been revoked."""
        self._known.clear()

    def _refuse_guessing(self, credentials: Parsed, origin: str) -> None:
        """A token that was good a moment ago is no guess, whoever else fails from the same address."""
        identity, _ = self._known.get(credentials, (None, 0.0))
        wait_s = self._failures.wait_s(origin)
        if identity is None and wait_s is not None:
            raise _too_many("too many wrong tokens have come from this address", wait_s)

    async def _who(self, credentials: Parsed) -> Identity | None:
        identity, until = self._known.get(credentials, (None, -math.inf))
        if self._clock() < until:
            return identity
        found = await self._calls.ask(lambda door: door.authenticate(credentials.id, credentials.digest))
        self._known[credentials] = (found, self._clock() + REMEMBERED_S)
        self._known.move_to_end(credentials)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return found


class Guard:
    """Lets in whose role allows the action. ``change`` is what the audit calls the request; None: it changes nothing.

    Where the action is about jobs and the route about no single one, the route itself shows nobody another's job.
    """

    def __init__(self, action: Action, change: str | None = None) -> None:
        self.action = action
        self.change = change

    async def __call__(
        self,
        request: Request,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)],
    ) -> Identity:
        visit = visit_of(request)
        visit.change = self.change
        visit.target = next(iter(map(str, request.path_params.values())), "")
        if bearer is None:
            raise unauthorized()
        visit.identity = await hub_of(request).authenticator.identity(bearer.credentials, visit.origin)
        if visit.identity.role not in RULES[self.action]:
            raise Forbidden(f"the role {visit.identity.role} does not allow this")
        return visit.identity


class JobGuard(Guard):
    """Lets in who may do the action with the job of the path, and hands the job on; another's is not there at all."""

    async def __call__(  # type: ignore[override]
        self,
        request: Request,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)],
        job_id: Annotated[str, Path(description="The whole id of a job.")],
    ) -> JobInfo:
        identity = await super().__call__(request, bearer)
        try:
            job = await hub_of(request).calls.ask(lambda door: door.info(checked_id(job_id)))
        except UsageError:
            raise not_there(job_id) from None
        except JobNotFound:
            raise not_there(job_id) from None
        if not allowed(identity, self.action, job.user):
            raise not_there(job_id)
        return job


def own_only(identity: Identity) -> str | None:
    """Return whose jobs are to be shown; None: everybody's."""
    return identity.user if identity.role in OWN else None


def require(identity: Identity, action: Action, why: str) -> None:
    """Refuse what a part of a request asks for beyond its route's action."""
    if not allowed(identity, action):
        raise Forbidden(why)


def unauthorized() -> Unauthorized:
    return Unauthorized(
        "give a token that is neither expired nor revoked, as `Authorization: Bearer rct_…`",
        {"WWW-Authenticate": 'Bearer realm="raycontrol"'},
    )


def not_there(job_id: str) -> NotThere:
    return NotThere(f"no job {job_id!r}")


def _too_many(what: str, wait_s: float) -> TooMany:
    return TooMany(f"{what}; wait a little", {"Retry-After": str(max(1, math.ceil(wait_s)))})
