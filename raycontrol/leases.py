"""Who may act for a cluster: one controller for each cluster name, by a lock and a row in the store.

The lock dies with its process, so a successor on the same host need not wait. A row of another host, whose lock
cannot be seen from here, counts until its lease has run out.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace

from sqlalchemy import bindparam, delete, insert, select, update
from sqlalchemy.engine import Connection

from raycontrol import flocks
from raycontrol.database import Database, leases
from raycontrol.errors import StoreOwned

# Somebody who only looks holds the lock for an instant.
_LOOKERS_S = 0.2


@dataclass(frozen=True)
class LeaseRow:
    """A controller as the store knows it. Times are seconds since the epoch."""

    cluster: str
    host: str
    pid: int
    token: str
    acquired_at: float
    heartbeat_at: float
    lease_s: float

    def expired(self, now: float) -> bool:
        """A heartbeat that lies ahead is no sign of life either: the clock was set, there or here."""
        return abs(now - self.heartbeat_at) > self.lease_s

    def described(self, now: float) -> str:
        return f"pid {self.pid} on {self.host}, last heard from {max(0.0, now - self.heartbeat_at):.0f} s ago"


@dataclass(frozen=True)
class Lease:
    """The right to act for a cluster, held by this process; ``handle`` is the descriptor of its lock.

    ``predecessor_at``: the last heartbeat of who held it before, by that one's clock.
    """

    cluster: str
    host: str
    pid: int
    token: str
    handle: int
    predecessor_at: float | None = None


def acquire(database: Database, cluster: str, host: str, pid: int, now: float, lease_s: float) -> Lease:
    """Become the controller of ``cluster``; see ``Store.acquire``."""
    path = database.lock_path(cluster)
    with database.explained():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        lock = flocks.take(path, _LOOKERS_S)
    if lock is None:
        with database.reading() as connection:
            row = find(connection, cluster)
        raise StoreOwned(cluster, row.described(now) if row else f"a process that holds {path}")
    lease = Lease(cluster, host, pid, uuid.uuid4().hex, lock)
    try:
        with database.writing() as connection:
            row = find(connection, cluster)
            if row is not None and row.host != host and not row.expired(now):
                raise StoreOwned(cluster, row.described(now))
            connection.execute(delete(leases).where(leases.c.cluster == cluster))
            connection.execute(
                insert(leases).values(
                    cluster=cluster,
                    host=host,
                    pid=pid,
                    token=lease.token,
                    acquired_at=now,
                    heartbeat_at=now,
                    lease_s=lease_s,
                )
            )
    except BaseException:
        flocks.drop(lock)
        raise
    return lease if row is None else replace(lease, predecessor_at=row.heartbeat_at)


def heartbeat(database: Database, lease: Lease, now: float) -> None:
    with database.writing() as connection:
        check(connection, lease)
        connection.execute(update(leases).where(leases.c.token == lease.token).values(heartbeat_at=now))


def release(database: Database, lease: Lease) -> None:
    ours = False
    try:
        with database.writing() as connection:
            ours = connection.execute(delete(leases).where(leases.c.token == lease.token)).rowcount == 1
    finally:
        flocks.drop(lease.handle, database.lock_path(lease.cluster) if ours else None)


# Built once: it is asked with every write.
_LEASE = select(leases).where(leases.c.cluster == bindparam("of"))


def check(connection: Connection, lease: Lease) -> None:
    """Raise StoreOwned when ``lease`` is no longer the cluster's."""
    row = find(connection, lease.cluster)
    if row is None:
        raise StoreOwned(lease.cluster, "nobody now, but this process's lease was ended")
    if row.token != lease.token:
        raise StoreOwned(lease.cluster, f"pid {row.pid} on {row.host}, which took over")


def find(connection: Connection, cluster: str) -> LeaseRow | None:
    row = connection.execute(_LEASE, {"of": cluster}).one_or_none()
    return LeaseRow(**row._mapping) if row is not None else None
