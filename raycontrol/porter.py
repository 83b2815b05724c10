"""What the HTTP server asks of the head: which tokens there are, what was done, how the cluster fares."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from raycontrol import tokens
from raycontrol.access import AuditEntry, Role, TokenInfo
from raycontrol.errors import StoreError
from raycontrol.heldstore import HeldStore
from raycontrol.status import Metrics

log = logging.getLogger(__name__)

WRITABLE_S = 5.0
"""How long a write may take before the store counts as one that takes none."""


class Porter:
    """Keeps tokens and the audit, and reads figures. ``started`` returns when the controller has started, or raises why not."""

    def __init__(
        self, name: str, held: HeldStore, clock: Callable[[], float], started: Callable[[], Awaitable[None]]
    ) -> None:
        self._name = name
        self._held = held
        self._clock = clock
        self._started = started
        self._probe: asyncio.Future[bool] | None = None

    async def create_token(
        self, name: str, role: Role, user: str, ttl_s: float | None, by: str
    ) -> tuple[TokenInfo, str]:
        """Make a token that lives for ``ttl_s`` seconds (None: until it is revoked); return it with its text, this once.

        ``by`` is who asked for it. Raises UsageError when a living token has the name, or a value cannot be one.
        """
        await self._started()
        now = self._clock()
        info = TokenInfo(
            name=tokens.checked_name(name),
            role=Role(role),
            user=tokens.checked_user(user),
            created_at=now,
            expires_at=None if ttl_s is None else now + tokens.checked_ttl(ttl_s),
        )
        text = tokens.new_token()
        kept = tokens.parsed(text)
        assert kept is not None, "it has just been made so"
        await self._held.ask(lambda store: store.access.add_token(kept.id, kept.digest, info, by))
        return info, text

    async def tokens(self) -> list[TokenInfo]:
        """Return all tokens, the expired and revoked ones too, oldest first."""
        await self._started()
        return await self._held.ask(lambda store: store.access.tokens())

    async def revoke_token(self, name: str) -> TokenInfo:
        """End the token of that name, if it has not been ended before; raises UsageError when there was none."""
        await self._started()
        now = self._clock()
        return await self._held.ask(lambda store: store.access.revoke_token(name, now))

    async def audit(self, entry: AuditEntry) -> int:
        """Store an entry and return its number."""
        await self._started()
        return await self._held.ask(lambda store: store.access.add_audit(entry))

    async def audit_log(self, after: int, limit: int) -> list[AuditEntry]:
        """Return entries with ``seq`` above ``after``, oldest first."""
        await self._started()
        return await self._held.ask(lambda store: store.access.audit_log(after, limit))

    async def metrics(self) -> Metrics:
        """Return figures about the jobs of this cluster."""
        await self._started()
        return await self._held.ask(lambda store: store.metrics(self._name))

    async def writable(self) -> bool:
        """Whether the store has taken a write now, within ``WRITABLE_S`` seconds."""
        if self._probe is None or self._probe.done():  # one at a time: a stuck store must not gather them
            self._probe = asyncio.ensure_future(self._has_written())
        done, _ = await asyncio.wait({self._probe}, timeout=WRITABLE_S)
        return bool(done) and self._probe.result()

    async def _has_written(self) -> bool:
        try:
            await self._started()
            await self._held.renew()
        except StoreError as error:
            log.warning("the store takes no write: %s", error)
            return False
        return True
