"""The SQLite file under the store: its schema, how it is opened and migrated, and its errors in words.

Write-ahead logging, ``synchronous=FULL``: what was committed is on disk. Writers take the write lock when they
begin, so that they wait for each other instead of failing half-way; readers never wait.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import Column, Float, ForeignKey, Integer, MetaData, Table, Text, create_engine, event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from raycontrol import flocks
from raycontrol.errors import StoreError, StoreRefused

log = logging.getLogger(__name__)

FILE_NAME = "store.db"
LOCKS = "locks"
EMPTYING_S = 0.2
"""How long a write may be held up by others that read, while the log is to be emptied; the next write tries again."""

Migration = tuple[str, ...]
"""The SQL statements that lead from one schema version to the next; they run in one transaction."""

# A migration that has been released is never edited: a change of the schema is a new one at the end.
MIGRATIONS: tuple[Migration, ...] = (
    (
        "CREATE TABLE schema_version (version INTEGER NOT NULL)",
        "INSERT INTO schema_version (version) VALUES (0)",
        """CREATE TABLE jobs (
            id TEXT NOT NULL PRIMARY KEY, cluster TEXT NOT NULL, name TEXT NOT NULL, user TEXT NOT NULL,
            mode TEXT NOT NULL, state TEXT NOT NULL, priority INTEGER NOT NULL, submitted_at REAL NOT NULL,
            ended_at REAL, doc TEXT NOT NULL, labels TEXT NOT NULL)""",
        "CREATE INDEX jobs_by_time ON jobs (submitted_at, id)",
        "CREATE INDEX jobs_by_cluster ON jobs (cluster, state)",
        """CREATE TRIGGER jobs_end_for_ever BEFORE UPDATE ON jobs
            WHEN OLD.state IN ('SUCCEEDED', 'FAILED', 'STOPPED')
            BEGIN SELECT RAISE(ABORT, 'a terminal state never changes'); END""",
        """CREATE TABLE events (
            seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
            job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            at REAL NOT NULL, kind TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
            attempt INTEGER NOT NULL, instance TEXT, message TEXT NOT NULL)""",
        "CREATE INDEX events_by_job ON events (job_id, seq)",
        """CREATE TRIGGER events_stay BEFORE UPDATE ON events
            BEGIN SELECT RAISE(ABORT, 'an event never changes'); END""",
        """CREATE TABLE leases (
            cluster TEXT NOT NULL PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, token TEXT NOT NULL,
            acquired_at REAL NOT NULL, heartbeat_at REAL NOT NULL, lease_s REAL NOT NULL)""",
    ),
    (
        """CREATE TABLE tokens (
            seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, digest TEXT NOT NULL,
            name TEXT NOT NULL, role TEXT NOT NULL, user TEXT NOT NULL, created_at REAL NOT NULL,
            created_by TEXT NOT NULL, expires_at REAL, revoked_at REAL)""",
        "CREATE INDEX tokens_by_name ON tokens (name, seq)",
        """CREATE TABLE audit (
            seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, token TEXT NOT NULL, user TEXT NOT NULL,
            role TEXT NOT NULL, origin TEXT NOT NULL, action TEXT NOT NULL, target TEXT NOT NULL,
            status INTEGER NOT NULL, request_id TEXT NOT NULL)""",
        "CREATE INDEX audit_by_time ON audit (at)",
        """CREATE TRIGGER audit_stays BEFORE UPDATE ON audit
            BEGIN SELECT RAISE(ABORT, 'an entry of the audit never changes'); END""",
        """CREATE TABLE keys (
            cluster TEXT NOT NULL, user TEXT NOT NULL, key TEXT NOT NULL, fingerprint TEXT NOT NULL,
            job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, PRIMARY KEY (cluster, user, key))""",
        "CREATE INDEX keys_by_job ON keys (job_id)",
        """CREATE TABLE secrets (
            job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, name TEXT NOT NULL, value TEXT NOT NULL,
            PRIMARY KEY (job_id, name))""",
        """CREATE TRIGGER secrets_end_with_their_job AFTER UPDATE ON jobs
            WHEN NEW.state IN ('SUCCEEDED', 'FAILED', 'STOPPED')
            BEGIN DELETE FROM secrets WHERE job_id = NEW.id; END""",
        # For figures about all jobs, which must not read all jobs and events (metricrows).
        "CREATE INDEX jobs_by_id_and_time ON jobs (id, cluster, submitted_at)",
        "CREATE INDEX events_of_placing ON events (job_id, attempt, at, kind) WHERE kind = 'NodesChosen'",
        """CREATE INDEX events_of_running ON events (job_id, attempt, at, kind, state)
            WHERE kind = 'StagePassed' AND state = 'RUNNING'""",
        """CREATE INDEX events_of_ends ON events (job_id, reason, state)
            WHERE state IN ('SUCCEEDED', 'FAILED', 'STOPPED')""",
    ),
    (
        # An id names folders, actors and streams of events; whoever still holds one must not meet another job under it.
        "CREATE TABLE removed (id TEXT NOT NULL PRIMARY KEY) WITHOUT ROWID",
        """CREATE TRIGGER removed_jobs_are_remembered AFTER DELETE ON jobs
            BEGIN INSERT OR IGNORE INTO removed (id) VALUES (OLD.id); END""",
    ),
    (
        """CREATE TABLE offline_nodes (
            cluster TEXT NOT NULL, name TEXT NOT NULL, reason TEXT NOT NULL, by TEXT NOT NULL, at REAL NOT NULL,
            PRIMARY KEY (cluster, name)) WITHOUT ROWID""",
        """CREATE TABLE node_groups (
            cluster TEXT NOT NULL, name TEXT NOT NULL, node TEXT NOT NULL,
            PRIMARY KEY (cluster, name, node)) WITHOUT ROWID""",
    ),
)

metadata = MetaData()
jobs = Table(
    "jobs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("cluster", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("user", Text, nullable=False),
    Column("mode", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("submitted_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("doc", Text, nullable=False),
    Column("labels", Text, nullable=False),
)
events = Table(
    "events",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("job_id", Text, ForeignKey("jobs.id"), nullable=False),
    Column("at", Float, nullable=False),
    Column("kind", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("instance", Text),
    Column("message", Text, nullable=False),
    sqlite_autoincrement=True,
)
leases = Table(
    "leases",
    metadata,
    Column("cluster", Text, primary_key=True),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("token", Text, nullable=False),
    Column("acquired_at", Float, nullable=False),
    Column("heartbeat_at", Float, nullable=False),
    Column("lease_s", Float, nullable=False),
)
tokens = Table(
    "tokens",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("id", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("user", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    sqlite_autoincrement=True,
)
audit = Table(
    "audit",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("token", Text, nullable=False),
    Column("user", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("origin", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("status", Integer, nullable=False),
    Column("request_id", Text, nullable=False),
    sqlite_autoincrement=True,
)
keys = Table(
    "keys",
    metadata,
    Column("cluster", Text, primary_key=True),
    Column("user", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("fingerprint", Text, nullable=False),
    Column("job_id", Text, ForeignKey("jobs.id"), nullable=False),
)
secrets = Table(
    "secrets",
    metadata,
    Column("job_id", Text, ForeignKey("jobs.id"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)
removed = Table("removed", metadata, Column("id", Text, primary_key=True))
offline_nodes = Table(
    "offline_nodes",
    metadata,
    Column("cluster", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("reason", Text, nullable=False),
    Column("by", Text, nullable=False),
    Column("at", Float, nullable=False),
)
node_groups = Table(
    "node_groups",
    metadata,
    Column("cluster", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("node", Text, primary_key=True),
)

# Closing any descriptor of a file drops this process's locks on it, SQLite's included: no thread may make the
# file while another opens it.
_making = threading.Lock()


class Database:
    """An open store file. ``reading`` and ``writing`` are its transactions; every failure is a StoreError."""

    def __init__(self, home: Path, *, create: bool, migrations: Sequence[Migration], busy_s: float) -> None:
        self.home = home.absolute()
        self.path = self.home / FILE_NAME
        self._busy_s = busy_s
        self._migrations = migrations
        self._emptying = threading.Lock()
        self._log_is_due = True  # whoever had the store before may have been killed before he could
        with self.explained():
            mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape")
            refuse_network_file_system(self.home, mounts)
            with _making:
                _make_file(self.path, create)
            status = self.path.stat()
            self._file = (status.st_dev, status.st_ino)
        self._engine = create_engine(
            "sqlite://", creator=lambda: self._connect(busy_s), poolclass=QueuePool, max_overflow=-1
        )
        event.listen(self._engine, "begin", _begin)
        try:
            self._bring_up_to_date()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One consistent view of the store."""
        with self.explained(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that is on disk, whole, when the block has ended; an exception in it leaves no trace."""
        with self.explained(), self._engine.connect() as connection:
            connection.execution_options(raycontrol_write=True)
            with connection.begin():
                yield connection
                self._check_file()
        if self._log_is_due:
            self.empty_log()

    def empty_log(self) -> None:
        """Move what the write-ahead log holds into the file, so that nothing of what was deleted stays in it.

        Raises nothing, for what was committed is committed: where it cannot be done now, the next write does it.
        """
        with self._emptying:
            self._log_is_due = not self._has_emptied_log()

    def _has_emptied_log(self) -> bool:
        try:
            with closing(self._connect(EMPTYING_S)) as connection:
                blocked, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as error:
            log.warning("%s: the write-ahead log could not be emptied: %s", self.path, error)
            return False
        return not blocked

    def close(self) -> None:
        self._engine.dispose()

    def lock_path(self, cluster: str) -> Path:
        """The lock file of a cluster's controller; any text may be a cluster's name."""
        return self.home / LOCKS / f"{hashlib.sha256(cluster.encode()).hexdigest()[:24]}.lock"

    def _connect(self, busy_s: float) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.path.as_uri()}?mode=rw",  # a file that is gone is an error, not a new empty store
            uri=True,
            timeout=busy_s,
            isolation_level=None,  # transactions begin in `_begin`
            check_same_thread=False,
        )
        # What is deleted (secrets of jobs) is overwritten, not only given free; `empty_log` does so in the log.
        size = f"journal_size_limit={16 * 1024**2}"
        for pragma in ("synchronous=FULL", "foreign_keys=ON", "secure_delete=ON", size):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def _check_file(self) -> None:
        """A store that was deleted under us still takes commits, into nothing."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            status = None
        if status is None or (status.st_dev, status.st_ino) != self._file:
            raise StoreError(f"{self.path} was removed or replaced while in use; restart what uses it")

    def _bring_up_to_date(self) -> None:
        if self._state() == (len(self._migrations), "wal"):
            return
        with self.explained():
            _make_folder(self.home / LOCKS)
            path = self.home / LOCKS / "schema.lock"
            lock = flocks.take(path, self._busy_s)
            if lock is None:
                raise StoreError(
                    f"{self.path}: another process has been migrating it for {self._busy_s:g} s; try again"
                )
        try:
            self._migrate()
        finally:
            flocks.drop(lock)

    def _migrate(self) -> None:
        version, journal = self._state()
        if version not in (0, len(self._migrations)):
            self._refuse_under_a_controller(version)
        if journal != "wal":
            with self.explained(), self._engine.connect() as connection:
                connection.connection.driver_connection.execute("PRAGMA journal_mode=WAL")  # type: ignore[union-attr]
        for number in range(version, len(self._migrations)):
            with self.writing() as connection:
                for statement in self._migrations[number]:
                    connection.exec_driver_sql(statement)
                connection.exec_driver_sql("UPDATE schema_version SET version = ?", (number + 1,))

    def _state(self) -> tuple[int, str]:
        """Schema version and journal mode. Raises StoreError for a newer store and for a file of another program."""
        with self.reading() as connection:
            tables = set(connection.exec_driver_sql("SELECT name FROM sqlite_master").scalars())
            journal = str(connection.exec_driver_sql("PRAGMA journal_mode").scalar())
            if not tables:
                return 0, journal
            if "schema_version" not in tables:
                raise StoreError(f"{self.path} is another program's database; {_ELSEWHERE}")
            version = connection.exec_driver_sql("SELECT version FROM schema_version").scalar()
        if not isinstance(version, int) or version < 0:
            raise StoreError(f"{self.path} is damaged (schema version {version!r}); {_ASIDE}")
        if version > len(self._migrations):
            raise StoreError(
                f"{self.path} was written by a newer raycontrol (schema {version}, this one knows up to "
                f"{len(self._migrations)}); install the newer version here, or {_ELSEWHERE}"
            )
        return version, journal

    def _refuse_under_a_controller(self, version: int) -> None:
        """A living controller of the older version would go on with a schema it does not know."""
        with self.reading() as connection:
            rows = connection.exec_driver_sql("SELECT cluster, host, pid FROM leases").all()
        for cluster, host, pid in rows:
            with self.explained():
                alive = flocks.held(self.lock_path(cluster))
            if alive:
                raise StoreError(
                    f"{self.path} has schema {version} and an older raycontrol is using it (cluster {cluster!r}, "
                    f"pid {pid} on {host}); install this version on the head too, then `raycontrol controller restart`"
                )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns the errors of SQLite and of files into StoreErrors that say what to do."""
        try:
            yield
        except DBAPIError as error:
            raise StoreError(_advice(str(error.orig), self.path, self._busy_s)) from error
        except sqlite3.Error as error:
            raise StoreError(_advice(str(error), self.path, self._busy_s)) from error
        except SQLAlchemyError as error:
            raise StoreError(f"{self.path}: {error}") from error
        except UnicodeEncodeError as error:
            raise StoreRefused(
                f"{self.path}: text that is not valid Unicode cannot be stored: {error}"
            ) from error
        except OSError as error:
            raise StoreError(_os_advice(error, self.home)) from error


def _begin(connection: Connection) -> None:
    write = connection.get_execution_options().get("raycontrol_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _make_file(path: Path, create: bool) -> None:
    """See that the store's file is there, readable by its owner only; a new or empty home becomes private too."""
    if path.exists():
        status = path.stat()
        if status.st_mode & 0o077 and status.st_uid == os.geteuid():
            path.chmod(0o600)
        return
    if not create:
        raise StoreError(
            f"there is no store in {path.parent}; the first job makes it, or set RAYCONTROL_HOME"
        )
    _make_folder(path.parent)
    _make_folder(path.parent / LOCKS)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return  # another process was first
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _make_folder(path: Path) -> None:
    """A folder that exists and holds something is left as it is: it may be anything, and used by others."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_mode & 0o077 and status.st_uid == os.geteuid() and not any(path.iterdir()):
        path.chmod(0o700)


_ELSEWHERE = "set RAYCONTROL_HOME to another folder"
_ASIDE = (
    "move it and its -wal and -shm files away to start afresh (logs and outputs of jobs are kept beside it)"
)

# SQLite's own words -> what to do. (Its error codes reach Python from 3.11 on only.)
_ADVICE = (
    (
        "is locked",
        "another process has kept it locked for {busy_s:g} s; nothing was changed; look for a stopped process, try again",
    ),
    (
        "is full",
        "nothing was changed; free some space in {home} (`raycontrol prune` removes what ended jobs keep)",
    ),
    (
        "disk I/O error",
        "a read or write failed; see whether the disk is full, over quota or failing (`df {home}`)",
    ),
    ("malformed", f"the file is damaged; {_ASIDE}"),
    ("not a database", f"it is no raycontrol store; {_ELSEWHERE}, or {_ASIDE}"),
    ("unsupported file format", f"it is no raycontrol store; {_ELSEWHERE}"),
    (
        "readonly",
        f"user {{uid}} may not write there; become its owner, make {{home}} writable, or {_ELSEWHERE}",
    ),
    ("unable to open", f"see that {{home}} exists and is writable for user {{uid}}, or {_ELSEWHERE}"),
)


def _advice(words: str, path: Path, busy_s: float) -> str:
    for known, advice in _ADVICE:
        if known in words:
            text = advice.format(busy_s=busy_s, home=path.parent, uid=os.geteuid())
            return f"{path}: {words}: {text}"
    return f"{path}: {words}"


def _os_advice(error: OSError, home: Path) -> str:
    advice = {
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "free some space, or raise the quota",
        errno.EROFS: _ELSEWHERE,
        errno.EACCES: f"see that user {os.geteuid()} may write there, or {_ELSEWHERE}",
        errno.EPERM: f"see that user {os.geteuid()} may write there, or {_ELSEWHERE}",
    }.get(error.errno or 0, _ELSEWHERE)
    return f"{error.filename or home}: {error.strerror or error}; {advice}"


# SQLite's locks and shared memory do not work, or not between machines, on these.
_NETWORK = re.compile(
    r"afs|beegfs.*|ceph|cifs|coda|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|panfs|pvfs2|smb[23]|smbfs|wekafs"
    r"|fuse\.(beegfs|ceph.*|davfs|gcsfuse|glusterfs|goofys|juicefs|lustre|mfs|mountpoint-s3|rclone|s3fs|sshfs|vmhgfs-fuse)"
)


def refuse_network_file_system(home: Path, mounts: str) -> None:
    """Raise StoreError when ``home`` is, or would be made, on a network file system."""
    kind = file_system_type(home, mounts)
    if kind is not None and _NETWORK.fullmatch(kind):
        raise StoreError(
            f"{home} is on a network file system ({kind}), where SQLite loses data; set RAYCONTROL_HOME to a folder on "
            "a disk of this machine"
        )


def file_system_type(path: Path, mounts: str) -> str | None:
    """The type of the file system that holds ``path``, by the text of ``/proc/self/mounts``."""
    real = path.resolve()
    found: tuple[int, str] | None = None
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        folder = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point))
        depth = len(folder.parts)
        if real.is_relative_to(folder) and (found is None or depth >= found[0]):
            found = (depth, kind)
    return found[1] if found else None
