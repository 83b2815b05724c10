"""The jobs, their events and who controls them, on disk: ``<home>/store.db``.

The store knows nothing of what a state means but this: a terminal one never changes. When a method returns,
what it wrote is on disk; when it raises, nothing was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from sqlalchemy import ColumnElement, bindparam, case, delete, func, insert, or_, select, tuple_, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from raycontrol import accessrows, flocks, memberrows, metricrows
from raycontrol import leases as _leases
from raycontrol.accessrows import AccessRows, Belongings
from raycontrol.arrayspec import MARK, array_of
from raycontrol.database import FILE_NAME, MIGRATIONS, Database, Migration, events, jobs, removed
from raycontrol.errors import IdTaken, JobIsThere, StoreError, StoreRefused
from raycontrol.leases import Lease, LeaseRow
from raycontrol.noderows import NodeRows
from raycontrol.status import Event, JobState, MemberInfo, Metrics, Note

__all__ = ["Change", "JobRow", "Lease", "LeaseRow", "New", "Store"]

# Built once: to build a statement takes longer than to carry it out.
_INSERT_JOB = insert(jobs)
_INSERT_EVENT = insert(events)
_UPDATE_JOB = update(jobs).where(jobs.c.id == bindparam("job_id"))
_JOB = select(jobs).where(jobs.c.id == bindparam("job_id"))

_ACTIVE = tuple(str(state) for state in JobState if not state.terminal)


@dataclass(frozen=True)
class JobRow:
    """A job as it is stored: what is searched for in columns, the rest in ``doc`` (JSON). ``labels`` is JSON too.

    ``id``, ``cluster`` and ``submitted_at`` never change.
    """

    id: str
    cluster: str
    name: str
    user: str
    mode: str
    state: JobState
    priority: int
    submitted_at: float
    ended_at: float | None
    doc: str
    labels: str = "{}"


@dataclass(frozen=True)
class New:
    """A job that is to be stored, its first event, and what belongs to it."""

    row: JobRow
    note: Note
    belongings: Belongings = field(default_factory=Belongings)


@dataclass(frozen=True)
class Change:
    """A job as it is now, and what is to be told about how it came there; ``new``: it was not in the store yet."""

    row: JobRow
    notes: tuple[Note, ...] = ()
    new: bool = False


class Store:
    """The store in a home folder. It may be used by several threads, and by several processes at once.

    Not across a fork: a child that uses it opens its own.
    """

    def __init__(
        self,
        home: Path,
        *,
        create: bool = True,
        busy_s: float = 30,
        migrations: Sequence[Migration] = MIGRATIONS,
    ) -> None:
        """Open the store, made if ``create``, and migrate it if it is of an older version.

        Raises StoreError when it cannot be opened, is damaged, is of a newer version, is on a network file
        system, or would be migrated under a living controller of an older version.
        """
        self.home = Path(home)
        self._database = Database(self.home, create=create, migrations=migrations, busy_s=busy_s)
        self.access = AccessRows(self._database)
        self.nodes = NodeRows(self._database)

    @classmethod
    def open_existing(cls, home: Path) -> Store | None:
        """The store in ``home``, or None when there is none yet; nothing is created."""
        try:
            there = (Path(home) / FILE_NAME).exists()
        except OSError as error:
            raise StoreError(
                f"{home}: {error.strerror}; set RAYCONTROL_HOME to a folder that you may read"
            ) from None
        return cls(home, create=False) if there else None

    def close(self) -> None:
        """Close the file. Leases stay: release them first."""
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def add(
        self,
        row: JobRow,
        note: Note,
        *,
        lease: Lease | None = None,
        belongings: Belongings | None = None,
    ) -> Event:
        """Store a new job; raises as ``add_all``."""
        return self.add_all([New(row, note, belongings or Belongings())], lease=lease)[0]

    def add_all(self, new: Sequence[New], *, lease: Lease | None = None) -> list[Event]:
        """Store new jobs, each with its first event and what belongs to it, or nothing; returns the events.

        Raises JobIsThere when there is a job of an id or key, IdTaken when there was one: an id is never used twice.
        With a ``lease``, here and in ``save``: only if it is still this process's (StoreOwned otherwise).
        """
        with self._database.writing() as connection:
            if lease is not None:
                _leases.check(connection, lease)
            was = removed.c.id.in_([one.row.id for one in new])
            if (gone := connection.execute(select(removed.c.id).where(was)).scalar()) is not None:
                raise IdTaken(gone, removed=True)
            _insert(connection, new)
            return [_tell(connection, one.row.id, one.note) for one in new]

    def save(self, changes: Sequence[Change], *, lease: Lease | None = None) -> list[Event]:
        """Store all of these changes, or none of them; returns their events in order.

        Raises StoreError when a job is not there, is another cluster's, or has ended: nothing of an ended job
        changes any more, and no event is added to it.
        """
        with self._database.writing() as connection:
            if lease is not None:
                _leases.check(connection, lease)
            told = []
            ended = [change.row.id for change in changes if change.row.state.terminal]
            had_secrets = accessrows.have_secrets(connection, ended)
            for change in changes:
                _put(connection, change)
                told += [_tell(connection, change.row.id, note) for note in change.notes]
        if had_secrets:
            self._database.empty_log()
        return told

    def job(self, job_id: str) -> JobRow | None:
        with self._database.reading() as connection:
            found = connection.execute(_JOB, {"job_id": job_id}).one_or_none()
        return _row(found._mapping) if found is not None else None

    def states(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        """The states of those of these jobs that are there, of whatever cluster."""
        with self._database.reading() as connection:
            found = [
                connection.execute(select(jobs.c.id, jobs.c.state).where(jobs.c.id == job_id)).one_or_none()
                for job_id in job_ids
            ]
        return {row.id: JobState(row.state) for row in found if row is not None}

    def find(self, prefix: str) -> list[str]:
        """The ids that begin with ``prefix``, at most 100; only that id where one is the whole of it.

        Members of arrays are found by their array's whole id alone.
        """
        begins = select(jobs.c.id).where(
            jobs.c.id >= prefix, func.substr(jobs.c.id, 1, len(prefix)) == prefix
        )
        if MARK not in prefix:
            begins = begins.where(_is_no_member())
        with self._database.reading() as connection:
            ids = list(connection.execute(begins.order_by(jobs.c.id).limit(100)).scalars())
        return [prefix] if prefix in ids else ids

    def jobs(
        self,
        *,
        cluster: str | None = None,
        states: Iterable[str] | None = None,
        user: str | None = None,
        limit: int | None = None,
        before: tuple[float, str] | None = None,
        labels: Mapping[str, str] | None = None,
        text: str | None = None,
    ) -> list[JobRow]:
        """Jobs, newest first, without members of arrays. For the next page, ``before`` is the last row's ``(submitted_at, id)``.

        ``labels`` are those that a job must have, with these values; ``text`` is a part of its id or name, in small or
        capital letters. Both are looked for in SQL.
        """
        newest = select(jobs).order_by(jobs.c.submitted_at.desc(), jobs.c.id.desc())
        query = newest.where(_is_no_member()).limit(limit)
        if cluster is not None:
            query = query.where(jobs.c.cluster == cluster)
        if states is not None:
            query = query.where(jobs.c.state.in_([str(state) for state in states]))
        if user is not None:
            query = query.where(jobs.c.user == user)
        if before is not None:
            query = query.where(tuple_(jobs.c.submitted_at, jobs.c.id) < tuple_(*before))
        for name, value in (labels or {}).items():
            query = query.where(_has_label(name, value))
        if text is not None:
            query = query.where(or_(_contains(jobs.c.id, text), _contains(jobs.c.name, text)))
        with self._database.reading() as connection:
            return [_row(found._mapping) for found in connection.execute(query)]

    def members(self, array_id: str) -> list[MemberInfo]:
        """The members of an array that have begun, in the order of their indices."""
        return memberrows.read(self._database, array_id)

    def with_members(self, job_ids: Iterable[str]) -> list[str]:
        """These jobs, without members of arrays, which go with their array and not before; and all of theirs."""
        wanted = [
            job_id
            for job_id in job_ids
            if array_of(job_id) is None or self.job(str(array_of(job_id))) is None
        ]
        return [*wanted, *(str(one.id) for job_id in wanted for one in self.members(job_id))]

    def packages(self) -> set[str]:
        """The packages of all jobs, also of those that this version cannot read whole."""
        package = case((func.json_valid(jobs.c.doc), func.json_extract(jobs.c.doc, "$.package")))
        query = select(package).distinct().where(package.is_not(None))
        with self._database.reading() as connection:
            return set(connection.execute(query).scalars())

    def active(self, cluster: str) -> list[JobRow]:
        """The jobs of ``cluster`` that have not ended, oldest first."""
        query = select(jobs).where(jobs.c.cluster == cluster, jobs.c.state.in_(_ACTIVE))
        with self._database.reading() as connection:
            found = connection.execute(query.order_by(jobs.c.submitted_at, jobs.c.id))
            return [_row(row._mapping) for row in found]

    def events(self, job_id: str, after: int = 0, limit: int = 1000) -> list[Event]:
        """A job's events with a ``seq`` above ``after``, in order, at most ``limit``."""
        query = select(events).where(events.c.job_id == job_id, events.c.seq > after)
        with self._database.reading() as connection:
            found = connection.execute(query.order_by(events.c.seq).limit(limit))
            return [Event(**row._mapping) for row in found]

    def metrics(self, cluster: str) -> Metrics:
        """Figures about the jobs of a cluster."""
        with self._database.reading() as connection:
            return metricrows.read(connection, cluster)

    def remove(self, job_ids: Iterable[str]) -> None:
        """Forget these jobs and their events, but not their ids (a trigger of the schema sees to that).

        Ids that are not there are passed over.

        Raises StoreError, and removes none, when one has not ended and its cluster has a living controller.
        """
        doomed = [*job_ids]
        with self._database.writing() as connection:
            had_secrets = accessrows.have_secrets(connection, doomed)
            for job_id in doomed:
                where = select(jobs.c.state, jobs.c.cluster).where(jobs.c.id == job_id)
                found = connection.execute(where).one_or_none()
                if found is not None and found.state in _ACTIVE and self.controlled(found.cluster):
                    raise StoreError(f"job {job_id!r} is {found.state}; stop it before it is removed")
                connection.execute(delete(jobs).where(jobs.c.id == job_id))
        if had_secrets:
            self._database.empty_log()

    def removed(self, job_ids: Iterable[str]) -> list[str]:
        """Those of these ids whose jobs have been removed."""
        with self._database.reading() as connection:
            return [
                job_id
                for job_id in job_ids
                if connection.execute(select(removed).where(removed.c.id == job_id)).first() is not None
            ]

    def acquire(self, cluster: str, host: str, pid: int, now: float, lease_s: float = 30) -> Lease:
        """Become the controller of ``cluster``, until ``release`` or the end of this process.

        The lock is tried first: while another process holds it, or a row of another host has a heartbeat within
        its ``lease_s``, raises StoreOwned, naming the holder. A dead holder on this host is succeeded at once.
        """
        return _leases.acquire(self._database, cluster, host, pid, now, lease_s)

    def heartbeat(self, lease: Lease, now: float) -> None:
        """Say that the holder lives. Raises StoreOwned when the lease is no longer its own: it must stop acting."""
        _leases.heartbeat(self._database, lease, now)

    def release(self, lease: Lease) -> None:
        """Give the lease up; without effect on the successor of one that was lost."""
        _leases.release(self._database, lease)

    def lease(self, cluster: str) -> LeaseRow | None:
        """The last known controller of ``cluster``; it may be dead (see ``controlled``)."""
        with self._database.reading() as connection:
            return _leases.find(connection, cluster)

    def controlled(self, cluster: str) -> bool:
        """Whether a living process on this machine is the controller of ``cluster``."""
        with self._database.explained():
            return flocks.held(self._database.lock_path(cluster))


def _insert(connection: Connection, new: Sequence[New]) -> None:
    try:
        connection.execute(_INSERT_JOB, [_columns(one.row) for one in new])
        for one in new:
            accessrows.put(connection, one.row.cluster, one.row.id, one.belongings)
    except IntegrityError as error:
        if "UNIQUE" not in str(error.orig):
            raise
        ids = ", ".join(repr(one.row.id) for one in new)
        raise JobIsThere(f"job {ids} is already in the store; choose another id") from None


def _put(connection: Connection, change: Change) -> None:
    if change.new:
        connection.execute(_INSERT_JOB, _columns(change.row))
        return
    _check(connection, change.row)
    connection.execute(_UPDATE_JOB, {"job_id": change.row.id, **_columns(change.row)})


def _check(connection: Connection, row: JobRow) -> None:
    """What a change must find. The schema's trigger holds the last rule against every other writer too."""
    stored = connection.execute(_JOB, {"job_id": row.id}).one_or_none()
    if stored is None:
        raise StoreRefused(f"job {row.id!r} is not in the store")
    if stored.cluster != row.cluster:
        raise StoreRefused(f"job {row.id!r} belongs to cluster {stored.cluster!r}, not to {row.cluster!r}")
    if JobState(stored.state).terminal:
        raise StoreRefused(f"job {row.id!r} has ended as {stored.state}; a terminal state never changes")


def _is_no_member() -> ColumnElement[bool]:
    return func.instr(jobs.c.id, MARK) == 0


def _has_label(name: str, value: str) -> ColumnElement[bool]:
    """As SQL. Names and values are parameters: a path of ``json_extract`` would take a name apart at its dots."""
    label = func.json_each(jobs.c.labels).table_valued("key", "value")
    return select(label.c.key).where(label.c.key == name, label.c.value == value).exists()


def _contains(column: ColumnElement[str], text: str) -> ColumnElement[bool]:
    return func.instr(func.lower(column), func.lower(text)) > 0


def _tell(connection: Connection, job_id: str, note: Note) -> Event:
    values = note.model_dump(include=set(Note.model_fields))
    plain = {name: str(value) if isinstance(value, str) else value for name, value in values.items()}
    key = connection.execute(_INSERT_EVENT, {"job_id": job_id, **plain}).inserted_primary_key
    assert key is not None
    return Event(seq=key[0], job_id=job_id, **values)


def _columns(row: JobRow) -> dict[str, Any]:
    return {**vars(row), "state": str(row.state)}


def _row(found: Mapping[Any, Any]) -> JobRow:
    try:
        return JobRow(**{**found, "state": JobState(found["state"])})
    except ValueError:
        raise StoreError(
            f"job {found['id']!r} is in a state this version does not know: {found['state']!r}"
        ) from None
