"""The members of an array as their rows say: thousands are shown at once, and none is read whole."""

from __future__ import annotations

from sqlalchemy import func, select

from raycontrol.arrayspec import MARK, index_of
from raycontrol.database import Database, jobs
from raycontrol.status import JobState, MemberInfo, Reason

_FIELDS = {
    "reason": "$.reason",
    "attempt": "$.attempt",
    "code": "$.verdict.exit_code",
    "signal": "$.verdict.signal",
    "summary": "$.verdict.summary",
    "succeeded_with": "$.succeeded_with",
    "node": "$.instances[0].node_name",
}


def read(database: Database, array_id: str) -> list[MemberInfo]:
    """The members that have begun, in the order of their indices."""
    first, behind = f"{array_id}{MARK}", f"{array_id}{chr(ord(MARK) + 1)}"
    parts = [func.json_extract(jobs.c.doc, path).label(name) for name, path in _FIELDS.items()]
    query = select(jobs.c.id, jobs.c.state, *parts).where(jobs.c.id > first, jobs.c.id < behind)
    with database.reading() as connection:
        found = [
            MemberInfo(
                index=index_of(row.id),
                id=row.id,
                state=JobState(row.state),
                reason=Reason(row.reason),
                attempt=row.attempt,
                exit_code=row.succeeded_with if row.state == JobState.SUCCEEDED else row.code,
                signal=row.signal,
                node=row.node,
                summary=row.summary,
            )
            for row in connection.execute(query)
        ]
    return sorted(found, key=lambda member: member.index)
