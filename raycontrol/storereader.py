"""Reads the store and the files of this machine: where no cluster answers, and for a server on the head."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raycontrol.access import Identity
from raycontrol.archive import Archive
from raycontrol.errors import ControllerUnavailable, JobNotFound
from raycontrol.hardware import InstanceUsage
from raycontrol.jobrows import members_of, read_info, read_infos
from raycontrol.outputs import PIECE_BYTES, Piece, Tops, pieces
from raycontrol.readers import ClusterDoor, completed
from raycontrol.status import Event, JobInfo, JobState, MemberInfo
from raycontrol.store import JobRow, Store

POLL_S = 0.2


class StoreReader:
    """Reads what is on this machine's disk; nothing can be changed here but removed."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._opened: Store | None = None
        self._archive = Archive(home, clean_up=False)  # it may be another user's, and he may only read it

    def has_store(self) -> bool:
        """Whether anything was ever stored here."""
        return self._store is not None

    def find(self, prefix: str) -> list[str]:
        return [] if self._store is None else self._store.find(prefix)

    def info(self, job_id: str) -> JobInfo:
        row = self._row(job_id)
        assert self._store is not None
        return read_info(row, self._store)

    def jobs(
        self,
        states: Sequence[JobState] | None,
        user: str | None,
        limit: int | None,
        *,
        labels: Mapping[str, str] | None = None,
        text: str | None = None,
        before: tuple[float, str] | None = None,
    ) -> list[JobInfo]:
        if self._store is None:
            return []
        found = self._store.jobs(
            states=states, user=user, limit=limit, labels=labels, text=text, before=before
        )
        return read_infos(found, self._store)

    def members(self, job_id: str) -> list[MemberInfo]:
        if self._store is None:
            raise JobNotFound(job_id)
        return members_of(self._store, job_id)

    def events(self, job_id: str, after: int, timeout_s: float) -> list[Event]:
        row = self._row(job_id)
        assert self._store is not None
        deadline = time.monotonic() + timeout_s
        while True:
            found = self._store.events(job_id, after)
            if found or time.monotonic() > deadline or JobState(row.state).terminal:
                return found
            time.sleep(POLL_S)  # another process writes the store and cannot tell us
            row = self._row(job_id)

    def tail_offset(self, job_id: str, attempt: int, instance: str, lines: int) -> int:
        return completed(self._archive.tail_offset(job_id, attempt, instance, lines))

    def log_sizes(self, job_id: str, attempt: int) -> dict[str, int]:
        return completed(self._archive.sizes(job_id, attempt))

    def log_news(
        self,
        job_id: str,
        attempt: int,
        offsets: dict[str, int],
        timeout_s: float,
        max_bytes: int,
        instances: Collection[str] | None,
    ) -> dict[str, bytes]:
        deadline = time.monotonic() + timeout_s
        while True:
            news = completed(
                self._archive.follow(job_id, attempt, offsets, 0, max_bytes, instances=instances)
            )
            if news or time.monotonic() > deadline:
                return news
            time.sleep(POLL_S)

    def usage(self, job_id: str, attempt: int, last: int) -> dict[str, tuple[InstanceUsage, ...]]:
        return completed(self._archive.usage_of(job_id, attempt, last))

    def outputs(self, job_id: str) -> Iterator[Piece]:
        self._row(job_id)
        tops = Tops.of(self._home, job_id)
        return pieces(tops.files(), lambda path, offset: tops.read(path, offset, PIECE_BYTES))

    def stop(self, job_id: str, why: str, force: bool) -> JobInfo:
        info = self.info(job_id)
        if info.state.terminal:
            return info
        raise ControllerUnavailable(
            f"job {job_id} belongs to cluster {info.cluster!r}, whose controller is not to be found from here; "
            "name the cluster with --address or RAY_ADDRESS (an embedded run is stopped where it was started)"
        )

    def sizes_of_jobs(self) -> dict[str, int]:
        return completed(self._archive.usage())["jobs"]  # type: ignore[no-any-return]

    def prune(self, job_ids: Sequence[str]) -> None:
        if self._store is None:
            return
        doomed = self._store.with_members(job_ids)
        for job_id in doomed:
            completed(self._archive.remove_job(job_id))
        self._store.remove(doomed)
        completed(self._archive.remove_packages(self._store.packages()))

    @property
    def _store(self) -> Store | None:
        """The store; None until the first job has made one."""
        if self._opened is None:
            self._opened = Store.open_existing(self._home)
        return self._opened

    def _row(self, job_id: str) -> JobRow:
        row = None if self._store is None else self._store.job(job_id)
        if row is None:
            raise JobNotFound(job_id)
        return row


class HeadDoor(ClusterDoor):
    """The way in for a server on the head. What is asked with every request is read where the controller has it from: the store.

    To ask the controller takes several times as long, and the controller from its work; Ray gives it what others leave
    of the processor.
    """

    def __init__(self, session: Any, controller: Any, store: Store) -> None:
        super().__init__(session, controller)
        self._store = store

    def authenticate(self, token_id: str, digest: str) -> Identity | None:
        return self._store.access.identity(token_id, digest, time.time())

    def jobs(
        self,
        states: Sequence[JobState] | None,
        user: str | None,
        limit: int | None,
        *,
        labels: Mapping[str, str] | None = None,
        text: str | None = None,
        before: tuple[float, str] | None = None,
    ) -> list[JobInfo]:
        found = self._store.jobs(
            states=states, user=user, limit=limit, labels=labels, text=text, before=before
        )
        return read_infos(found, self._store)

    def glance(self, job_id: str) -> JobInfo:
        row = self._store.job(job_id)
        if row is None:
            raise JobNotFound(job_id)
        return read_info(row, self._store, whole=False)
