"""What is read of a job's logs for those who follow them: where many stand at one place, once for all of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

from raycontrol.api.calls import Calls
from raycontrol.api.sse import LineCutter, log_events

KEPT = 8
"""Pieces, each of some 64 KiB of a log: those who are a little behind the first still find theirs."""


@dataclass(frozen=True)
class Piece:
    """``events`` tell of the lines that are whole by it, and may be none; ``cutter`` stands behind them and belongs to all."""

    events: bytes
    cutter: LineCutter


@dataclass(frozen=True)
class _Reading:
    """``since`` is what its follower knew before he looked."""

    since: object
    piece: asyncio.Future[Piece | None]

    def answers(self, since: object) -> bool:
        """Whether it is good for one who knows ``since``: bytes are for anybody, that there were none only for his like."""
        if not self.piece.done():
            return self.since == since
        failed = self.piece.cancelled() or self.piece.exception() is not None
        return not failed and (self.piece.result() is not None or self.since == since)


class Readings:
    """The readings of one job's logs. Followers who stand elsewhere, as one who takes little, make their own."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._kept: OrderedDict[object, _Reading] = OrderedDict()

    async def next(
        self, attempt: int, instance: str, cutter: LineCutter, since: object, read: Callable[[int], bytes]
    ) -> Piece | None:
        """Return what comes after ``cutter`` in a log; None when that is nothing yet.

        ``since`` is what the follower knew before he looked: who has been told of the end must not take it from one who
        looked before that there was nothing more.
        """
        place = (attempt, instance, cutter.end, cutter.read_to)
        reading = self._kept.get(place)
        if reading is None or not reading.answers(since):
            work = self._calls.read(lambda: _piece(attempt, cutter, read(cutter.read_to)))
            reading = self._kept[place] = _Reading(since, asyncio.ensure_future(work))
            self._kept.move_to_end(place)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        if reading.piece.done():
            return reading.piece.result()
        return await asyncio.shield(reading.piece)  # one who leaves does not end it for the others


def _piece(attempt: int, cutter: LineCutter, data: bytes) -> Piece | None:
    """Takes its time: not for the event loop."""
    after = copy(cutter)
    return Piece(log_events(attempt, after.feed(data)), after) if data else None
