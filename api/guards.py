"""Who is let in to a route. Every route declares its action; nothing is read of a request before its guard has agreed."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Annotated

from fastapi import Depends, Path, Request
from fastapi.security import HTTPBearer
from fastapi.security.http import HTTPAuthorizationCredentials

from raycontrol import tokens
from raycontrol.access import OWN, RULES, Action, Identity, Role, allowed
from raycontrol.api.answers import Answers
from raycontrol.api.calls import Calls
from raycontrol.api.hubs import Hub, hub_of
from raycontrol.api.limits import Buckets, Limits
from raycontrol.api.problems import Forbidden, NotThere, TooMany, Unauthorized
from raycontrol.api.queries import refuse_unknown
from raycontrol.api.visits import for_nobody, visit_of
from raycontrol.errors import JobNotFound, UsageError
from raycontrol.job import known_id
from raycontrol.readers import ServerDoor
from raycontrol.status import JobInfo
from raycontrol.tokens import Parsed

log = logging.getLogger(__name__)

REMEMBERED_S = 2.0
"""How long a revoked token may still be let in, in exchange for one question to the controller in that time."""
KEPT = 10_000
JOBS_KEPT = 1000
MALFORMED = Parsed("", tokens.NOBODYS)
"""Stands for a text that is no token, so that it is asked for like any other."""

_BEARER = HTTPBearer(auto_error=False, bearerFormat="rct_<id>_<secret>")


class Authenticator:
    """Knows who comes with a token, and counts: requests of a token, failures of an address."""

    def __init__(self, calls: Calls, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = Buckets(limits.rate_per_s, limits.burst, clock)
        self._failures = Buckets(limits.failures_per_s, limits.failures_burst, clock)
        self._strangers = Buckets(limits.strangers_per_s, limits.strangers_burst, clock)
        self._answers: Answers[Parsed, Identity | None] = Answers(
            calls, lambda credentials: calls.ask(partial(_who, credentials)), REMEMBERED_S, KEPT, clock
        )
        self._known: OrderedDict[Parsed, bool] = OrderedDict()
        self._guesses: dict[tuple[str, Parsed], asyncio.Task[Identity | None]] = {}

    async def identity(self, credentials: Parsed, origin: str) -> Identity:
        """Return who comes; raises Unauthorized, and TooMany for a token, or an address, that has asked too often."""
        was_good = self._was_good(credentials)
        found = await (self._who(credentials) if was_good else self._guessed(credentials, origin))
        if found is None:
            if was_good:
                self._failures.take(origin)
            raise unauthorized()
        wait_s = self._requests.take(found.token)
        if wait_s is not None:
            raise _too_many(f"token {found.token!r} has made too many requests", wait_s)
        return found

    async def still_lets_in(self, credentials: Parsed) -> bool:
        """Whether a token that was let in has neither expired nor been revoked since. Counts as no request."""
        return await self._who(credentials) is not None

    def forget(self) -> None:
        """Ask anew about every token: one has just been revoked. Which ones were good stays known."""
        self._answers.forget()

    def _was_good(self, credentials: Parsed) -> bool:
        """A token that was good a moment ago is no guess, whoever else fails from the same address."""
        return self._known.get(credentials, False)

    async def _guessed(self, credentials: Parsed, origin: str) -> Identity | None:
        """Look at a token that may be a guess. All who bring it from the same address meanwhile make one guess together."""
        guess = origin, credentials
        looking = self._guesses.get(guess)
        if looking is None:
            paid = self._pay_for_guessing(credentials, origin)
            looking = self._guesses[guess] = for_nobody(self._look(credentials, origin, paid))
            looking.add_done_callback(lambda _: self._guesses.pop(guess))
        return await asyncio.shield(looking)  # one who leaves does not end it for the others

    async def _look(self, credentials: Parsed, origin: str, paid: bool) -> Identity | None:
        wrong = False
        try:
            found = await self._who(credentials)
            wrong = found is None
        finally:  # where nobody could tell, it was no failure
            if paid and not wrong:
                self._failures.give_back(origin)
        return found

    def _pay_for_guessing(self, credentials: Parsed, origin: str) -> bool:
        """Return whether a failure was taken: before it is one, else many guesses at a time would pass as the first.

        An address that has none left may belong to many, so a few tokens never seen are looked at all the same. Raises TooMany.
        """
        wait_s = self._failures.take(origin)
        if wait_s is None:
            return True
        if credentials in self._known or self._strangers.take(origin) is not None:
            raise _too_many("too many wrong tokens have come from this address", wait_s)
        return False

    async def _who(self, credentials: Parsed) -> Identity | None:
        found = await self._answers.get(credentials)
        self._known[credentials] = found is not None
        self._known.move_to_end(credentials)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return found


def _who(credentials: Parsed, door: ServerDoor) -> Identity | None:
    return door.authenticate(credentials.id, credentials.digest)


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
        visit.credentials = tokens.parsed(bearer.credentials) or MALFORMED
        visit.identity = await hub_of(request).authenticator.identity(visit.credentials, visit.origin)
        if visit.identity.role not in RULES[self.action]:
            raise forbidden("this", self.action, visit.identity)
        refuse_unknown(request)
        return visit.identity


class JobGuard(Guard):
    """Lets in who may do the action with the job of the path, and hands the job on; another's is not there at all.

    Where it is to be changed, or shown ``whole``, it is asked for anew; else it is what it was a moment ago, and without
    what takes making its plan.
    """

    def __init__(self, action: Action, change: str | None = None, *, whole: bool = False) -> None:
        super().__init__(action, change)
        self.whole = whole

    async def __call__(  # type: ignore[override]
        self,
        request: Request,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)],
        job_id: Annotated[str, Path(description="The whole id of a job.")],
    ) -> JobInfo:
        identity = await super().__call__(request, bearer)
        try:
            job = await self._job(hub_of(request), known_id(job_id))
        except (UsageError, JobNotFound):
            raise not_there(job_id) from None
        if not allowed(identity, self.action, job.user):
            raise not_there(job_id)
        return job

    async def _job(self, hub: Hub, job_id: str) -> JobInfo:
        if self.whole:
            return await hub.calls.ask(lambda door: door.info(job_id))
        if self.change is not None:
            return await hub.calls.ask(lambda door: door.glance(job_id))
        return await hub.glances.get(job_id)


async def still_let_in(request: Request) -> None:
    """Raise Unauthorized when what this request came with lets nobody in any more."""
    credentials = visit_of(request).credentials
    assert credentials is not None
    if not await hub_of(request).authenticator.still_lets_in(credentials):
        raise unauthorized()


async def shut_out(request: Request) -> None:
    """Return as soon as nobody would be let in any more with what this request came with.

    Where the controller does not answer, as while it starts again, nothing is known to have changed.
    """
    hub, credentials = hub_of(request), visit_of(request).credentials
    assert credentials is not None
    let_in = True
    while let_in:
        # Followers that began together, as after a start of the server, are not to ask together.
        await asyncio.sleep(hub.limits.recheck_s * random.uniform(0.8, 1))
        try:
            let_in = await hub.authenticator.still_lets_in(credentials)
        except Exception as error:  # whatever it is, the next look may tell
            log.warning("a follower's token cannot be looked at: %s; trying again", error)


def own_only(identity: Identity) -> str | None:
    """Return whose jobs are to be shown; None: everybody's."""
    return identity.user if identity.role in OWN else None


def require(identity: Identity, action: Action, what: str) -> None:
    """Refuse what a part of a request asks for beyond its route's action; ``what`` is that part."""
    if not allowed(identity, action):
        raise forbidden(what, action, identity)


def forbidden(what: str, action: Action, identity: Identity) -> Forbidden:
    *others, last = [role.value for role in Role if role in RULES[action]]
    roles = f"{', '.join(others)} or {last}" if others else last
    return Forbidden(f"{what} needs the role {roles}; that of this token is {identity.role}")


def unauthorized() -> Unauthorized:
    return Unauthorized(
        "give a token that is neither expired nor revoked, as `Authorization: Bearer rct_…`",
        {"WWW-Authenticate": 'Bearer realm="raycontrol"'},
    )


def not_there(job_id: str) -> NotThere:
    return NotThere(f"no job {job_id!r}")


def _too_many(what: str, wait_s: float) -> TooMany:
    return TooMany(f"{what}; wait a little", {"Retry-After": str(max(1, math.ceil(wait_s)))})
