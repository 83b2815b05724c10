"""A job as a row of the store, and back."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import TypeAdapter

from raycontrol.arrayspec import indices_of
from raycontrol.errors import JobNotFound, SpecError, StoreError, UsageError
from raycontrol.job import EMBEDDED, Job, info
from raycontrol.logs import OutputFolders
from raycontrol.status import JobInfo, JobState, MemberInfo
from raycontrol.store import JobRow, Store

log = logging.getLogger(__name__)

ENDED_REMEMBERED = 2000
"""Jobs; a cluster's lists are asked for page by page, the newest first."""

_JOBS = TypeAdapter(Job)
_ended: dict[tuple[str, str, float], JobInfo] = {}
_remembering = threading.Lock()


def row_of(job: Job) -> JobRow:
    """Return the row to store: columns to search by, and the whole job as JSON."""
    return JobRow(
        id=job.id,
        cluster=job.cluster,
        name=job.spec.name or job.id,
        user=job.user,
        mode=job.spec.mode.value,
        state=job.state,
        priority=job.spec.priority,
        submitted_at=job.submitted_at,
        ended_at=job.ended_at,
        doc=_JOBS.dump_json(job).decode(),
        labels=json.dumps(job.spec.labels, sort_keys=True),
    )


def read_job(row: JobRow) -> Job:
    """Return the job of a row. Raises StoreError when another version wrote it in a way that this one cannot read."""
    try:
        return _JOBS.validate_json(row.doc)
    except (ValueError, SpecError) as error:
        raise StoreError(
            f"job {row.id} was stored by another version of raycontrol and cannot be read"
        ) from error


def readable(rows: Iterable[JobRow]) -> Iterator[tuple[JobRow, Job]]:
    """Yield the jobs that can be read, and log those that cannot: one of them must not hide the others."""
    for row in rows:
        try:
            yield row, read_job(row)
        except StoreError as error:
            log.error("%s", error)


def info_of(job: Job, home: Path, *, whole: bool = False) -> JobInfo:
    """Return the job as every surface shows it, with the folder of its outputs on the head if it has any.

    ``whole``: see ``job.info``; it takes making the job's plan.
    """
    outputs = OutputFolders(home, job.id).root
    kept = str(outputs) if outputs.is_dir() else _shared_outputs(job)
    return info(job, outputs=kept, whole=whole)


def _shared_outputs(job: Job) -> str | None:
    """Return the folder that all nodes see, if one of the job's instances has its outputs there. It is not looked at: its file
    server may be dead.
    """
    facts = (item.facts for item in job.instances)
    found = (
        str(OutputFolders.root_of(fact.output_dir))
        for fact in facts
        if fact is not None and fact.shared_outputs
    )
    return next(found, None)


def read_info(row: JobRow, store: Store, *, whole: bool = True) -> JobInfo:
    """Return a stored job as every surface shows it; ``whole`` as in ``info_of``.

    An embedded run that was killed leaves its job as it was; its cluster's name never comes again, so nobody will
    end it. Such a job is shown as ``abandoned``.
    """
    return _shown(row, read_job(row), store, whole)


def read_infos(rows: Iterable[JobRow], store: Store) -> list[JobInfo]:
    """Return those of the stored jobs that can be read.

    To read a job takes checking its spec, and lists are asked for again and again: jobs that have ended never change,
    and are remembered.
    """
    return [info for row in rows if (info := _listed(row, store)) is not None]


def members_of(store: Store, job_id: str) -> list[MemberInfo]:
    """Return all members of an array, those too that have not begun; raises JobNotFound, and UsageError for another job."""
    row = store.job(job_id)
    if row is None:
        raise JobNotFound(job_id)
    array = read_job(row)
    if not array.is_array or array.spec.array is None:
        raise UsageError(f"job {job_id} is no array")
    begun = {member.index: member for member in store.members(job_id)}
    state = JobState.STOPPED if array.state.terminal else JobState.QUEUED
    return [
        begun.get(index) or MemberInfo(index=index, state=state, reason=array.reason)
        for index in indices_of(array.spec.array.indices)
    ]


def _listed(row: JobRow, store: Store) -> JobInfo | None:
    key = (str(store.home), row.id, row.submitted_at)  # another store may have been put in the place of one
    if (known := _ended.get(key)) is not None:
        return known
    found = next(iter(readable([row])), None)
    if found is None:
        return None
    info = _shown(row, found[1], store)
    if row.state.terminal:
        with _remembering:  # several threads of a server read lists
            if len(_ended) >= ENDED_REMEMBERED:
                _ended.pop(next(iter(_ended)), None)
            _ended[key] = info
    return info


def _shown(row: JobRow, job: Job, store: Store, whole: bool = False) -> JobInfo:
    shown = info_of(job, store.home, whole=whole)
    orphaned = (
        row.cluster.startswith(EMBEDDED) and not shown.state.terminal and not store.controlled(row.cluster)
    )
    if not orphaned:
        return shown
    return shown.model_copy(
        update={"abandoned": True, "pending": "its embedded run was killed; nobody is left to end it"}
    )
