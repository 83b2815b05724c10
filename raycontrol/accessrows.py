"""The store's tables of the HTTP interface: tokens, audit, idempotency keys; and the secrets of jobs.

Keys and secrets are stored with their job, in one transaction, and go with it; secrets go already when it has ended
(a trigger of the schema sees to that), and from the write-ahead log as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import delete, insert, or_, select, update
from sqlalchemy.engine import Connection

from raycontrol.access import AuditEntry, Identity, Role, TokenInfo
from raycontrol.database import Database, audit, keys, secrets, tokens
from raycontrol.errors import UsageError
from raycontrol.tokens import same


@dataclass(frozen=True)
class Key:
    """An idempotency key of a user, and what tells the request apart that it was used for."""

    user: str
    key: str
    fingerprint: str = ""


@dataclass(frozen=True)
class UsedKey:
    """A key that is taken: the fingerprint of its request, and the job that came of it."""

    fingerprint: str
    job_id: str


@dataclass(frozen=True)
class Belongings:
    """What is stored with a new job: its idempotency key, and the values of its ``secret_env`` by name."""

    key: Key | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class KeptToken:
    """A token as it is kept: ``digest`` is the SHA-256 of its secret."""

    info: TokenInfo
    digest: str = field(repr=False)

    def identity(self, now: float) -> Identity | None:
        """Return who comes with it; None when it is revoked or has expired."""
        if not _lives(self.info, now):
            return None
        return Identity(token=self.info.name, user=self.info.user, role=self.info.role)


class AccessRows:
    """Reads and writes these tables. When a method returns, what it wrote is on disk; all raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # Tokens.

    def add_token(self, token_id: str, digest: str, info: TokenInfo, by: str) -> None:
        """Keep a token. Raises UsageError when a living one has its name (``info.created_at`` is now)."""
        with self._database.writing() as connection:
            newest = _newest(connection, info.name)
            if newest is not None and _lives(newest.info, info.created_at):
                raise UsageError(
                    f"there is a token {info.name!r}; choose another name, or revoke it "
                    f"(`raycontrol token revoke {info.name}`)"
                )
            values = {**info.model_dump(), "role": str(info.role)}
            connection.execute(insert(tokens).values(id=token_id, digest=digest, created_by=by, **values))

    def token(self, token_id: str) -> KeptToken | None:
        with self._database.reading() as connection:
            found = connection.execute(select(tokens).where(tokens.c.id == token_id)).one_or_none()
        return None if found is None else _kept(found._mapping)

    def identity(self, token_id: str, digest: str, now: float) -> Identity | None:
        """Return who comes with a token, as ``tokens.parsed`` gives it; None when it is wrong, expired or revoked.

        Takes as long for an id that is unknown.
        """
        kept = self.token(token_id)
        right = same(digest, None if kept is None else kept.digest)
        return kept.identity(now) if kept is not None and right else None

    def tokens(self) -> list[TokenInfo]:
        """All tokens, the expired and revoked ones too, oldest first."""
        with self._database.reading() as connection:
            found = connection.execute(select(tokens).order_by(tokens.c.seq))
            return [_kept(row._mapping).info for row in found]

    def revoke_token(self, name: str, now: float) -> TokenInfo:
        """End the newest token of that name; one that is revoked stays as it is. Raises UsageError for an unknown name."""
        with self._database.writing() as connection:
            newest = _newest(connection, name)
            if newest is None:
                raise UsageError(f"there is no token {name!r}; `raycontrol token list` shows the names")
            if newest.info.revoked_at is not None:
                return newest.info
            connection.execute(update(tokens).where(tokens.c.digest == newest.digest).values(revoked_at=now))
            return newest.info.model_copy(update={"revoked_at": now})

    def forget_tokens(self, before: float) -> None:
        """Remove tokens that ended before ``before`` (epoch seconds)."""
        with self._database.writing() as connection:
            connection.execute(
                delete(tokens).where(or_(tokens.c.revoked_at < before, tokens.c.expires_at < before))
            )

    # Audit.

    def add_audit(self, entry: AuditEntry) -> int:
        """Keep an entry; returns its number."""
        values = {**entry.model_dump(exclude={"seq"}), "role": str(entry.role)}
        with self._database.writing() as connection:
            key = connection.execute(insert(audit).values(**values)).inserted_primary_key
        assert key is not None
        return int(key[0])

    def audit_log(self, after: int, limit: int) -> list[AuditEntry]:
        """Entries with ``seq`` above ``after``, oldest first."""
        query = select(audit).where(audit.c.seq > after).order_by(audit.c.seq).limit(limit)
        with self._database.reading() as connection:
            return [AuditEntry(**row._mapping) for row in connection.execute(query)]

    def forget_audit(self, before: float) -> None:
        """Remove entries older than ``before`` (epoch seconds)."""
        with self._database.writing() as connection:
            connection.execute(delete(audit).where(audit.c.at < before))

    # What belongs to jobs.

    def used_key(self, cluster: str, user: str, key: str) -> UsedKey | None:
        """What a user's idempotency key was used for on a cluster."""
        query = select(keys.c.fingerprint, keys.c.job_id).where(
            keys.c.cluster == cluster, keys.c.user == user, keys.c.key == key
        )
        with self._database.reading() as connection:
            found = connection.execute(query).one_or_none()
        return None if found is None else UsedKey(**found._mapping)

    def secrets_of(self, job_ids: Iterable[str]) -> dict[str, dict[str, str]]:
        """The values of ``secret_env`` by job and name, of those of these jobs that have any."""
        wanted = set(job_ids)
        found: dict[str, dict[str, str]] = {}
        with self._database.reading() as connection:
            for row in connection.execute(select(secrets)):
                if row.job_id in wanted:
                    found.setdefault(row.job_id, {})[row.name] = row.value
        return found


def put(connection: Connection, cluster: str, job_id: str, belongings: Belongings) -> None:
    """Store what belongs to a job that is being stored."""
    if belongings.key is not None:
        key = belongings.key
        connection.execute(
            insert(keys).values(
                cluster=cluster, user=key.user, key=key.key, fingerprint=key.fingerprint, job_id=job_id
            )
        )
    for name, value in belongings.secrets.items():
        connection.execute(insert(secrets).values(job_id=job_id, name=name, value=value))


def have_secrets(connection: Connection, job_ids: Iterable[str]) -> bool:
    """Whether one of these jobs has secrets: when they go, they have to go from the write-ahead log too."""
    query = select(secrets.c.name).limit(1)
    return any(connection.execute(query.where(secrets.c.job_id == job_id)).first() for job_id in job_ids)


def _newest(connection: Connection, name: str) -> KeptToken | None:
    query = select(tokens).where(tokens.c.name == name).order_by(tokens.c.seq.desc()).limit(1)
    found = connection.execute(query).one_or_none()
    return None if found is None else _kept(found._mapping)


def _kept(row: Mapping[Any, Any]) -> KeptToken:
    values = {name: row[name] for name in TokenInfo.model_fields}
    return KeptToken(TokenInfo(**{**values, "role": Role(row["role"])}), row["digest"])


def _lives(info: TokenInfo, now: float) -> bool:
    return info.revoked_at is None and (info.expires_at is None or now < info.expires_at)
