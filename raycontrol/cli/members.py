"""The members of an array in words."""

from __future__ import annotations

from collections.abc import Sequence

from raycontrol.arrayspec import ranges
from raycontrol.cli.render import one_line
from raycontrol.status import ArrayInfo, JobState, MemberInfo

COLUMNS = ("MEMBERS", "STATE", "ENDED WITH", "NOTE")
RANGES_WIDTH = 60
_ORDER = [
    JobState.FAILED,
    JobState.STOPPED,
    *(state for state in JobState if not state.terminal),
    JobState.SUCCEEDED,
]


def rows(members: Sequence[MemberInfo]) -> list[tuple[str, ...]]:
    """Return a row for all that fare alike, those that failed first: ``42 FAILED code 3``, ``0-41 SUCCEEDED``."""
    alike: dict[tuple[JobState, str], list[MemberInfo]] = {}
    for member in members:
        alike.setdefault((member.state, _ended_with(member)), []).append(member)
    found = sorted(alike.items(), key=lambda item: (_ORDER.index(item[0][0]), item[1][0].index))
    return [
        (_cut(ranges([one.index for one in group])), state, ended, _note(group))
        for (state, ended), group in found
    ]


def counts(array: ArrayInfo) -> str:
    """Return how far an array is: ``3 of 12 members ended: 2 succeeded, 1 failed; 4 live, 5 have not begun``."""
    ended = array.succeeded + array.failed + array.stopped
    by_state = {"succeeded": array.succeeded, "failed": array.failed, "stopped": array.stopped}
    how = ", ".join(f"{count} {word}" for word, count in by_state.items() if count)
    live = ", ".join(
        part
        for part in (
            f"{array.living} live" if array.living else "",
            f"{array.members - array.begun} not begun" if array.members > array.begun else "",
        )
        if part
    )
    told = f"{ended} of {array.members} members ended" + (f": {how}" if how else "")
    return f"{told}; {live}" if live else told


def _ended_with(member: MemberInfo) -> str:
    if member.signal is not None:
        return f"signal {member.signal}"
    if not member.state.terminal or member.exit_code is None:
        return ""
    return f"code {member.exit_code}"


def _note(group: Sequence[MemberInfo]) -> str:
    """Return why the first ended; of those that have not begun, that."""
    first = group[0]
    if first.id is None:
        return "not begun"
    if first.summary is None or first.state is JobState.SUCCEEDED:
        return ""
    more = f" (and {len(group) - 1} more)" if len(group) > 1 else ""
    return f"{first.index}: {one_line(first.summary)}{more}"


def _cut(text: str) -> str:
    return text if len(text) <= RANGES_WIDTH else text[: RANGES_WIDTH - 1] + "…"
