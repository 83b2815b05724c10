"""The logs of an array as lines: those of its members, each with its member's index in front."""

from __future__ import annotations

import time
from collections.abc import Iterator

from raycontrol.logview import LogView
from raycontrol.readers import Reader

POLL_S = 0.5
PER_MEMBER_S = 0.05
"""The more members run, the less often each is asked for."""


class ArrayLogs:
    """The lines of all members: of those that run as they come, of one after the other where there is nothing to follow."""

    def __init__(self, reader: Reader, array_id: str, *, prefix: bool) -> None:
        self._reader = reader
        self._array_id = array_id
        self._prefix = prefix
        self._views: dict[int, LogView] = {}
        self._done: set[int] = set()

    def lines(self, follow: bool, tail: int | None) -> Iterator[str]:
        while True:
            over = self._reader.info(
                self._array_id
            ).over  # before the members are looked at: none begins after that
            for member in self._reader.members(self._array_id):
                if member.id is not None and member.index not in self._done:
                    yield from self._turn(member.index, member.id, follow, tail)
            if not follow or over:
                return
            time.sleep(max(POLL_S, PER_MEMBER_S * len(self._views)))

    def _turn(self, index: int, job_id: str, follow: bool, tail: int | None) -> Iterator[str]:
        """Yield what there is of a member, and all of it once it has ended."""
        if index not in self._views:
            prefix = f"{index} | " if self._prefix else ""
            self._views[index] = LogView(
                self._reader, job_id, instance=None, group=None, prefix=self._prefix, prefixed=prefix
            )
            if tail is not None:
                yield from self._views[index].tail(tail)
        view = self._views[index]
        if not follow:
            yield from view.rest()
            del self._views[index]
            return
        while True:
            yield from view.turn(0.0)
            if not view.behind:
                break
        if view.ended:
            del self._views[index]
            self._done.add(index)
