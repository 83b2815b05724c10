r"""Server-sent events, and how a log becomes them: one event a line, whose id is the attempt and where the next line begins.

Whoever comes back with the last id he has seen goes on there, without a gap or a repeat. Ids count bytes, whatever the
text shows: bytes that are not UTF-8 become U+FFFD, and of a line with lone returns (a progress bar) the last state is
shown, for a return would end the event's line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

LINE_BYTES = 64 * 1024
"""A longer line comes in pieces, events called ``part``; the last one, with its end, is an ordinary one."""
BEAT_S = 15.0
BEAT = b": \n\n"
"""A comment, by which a proxy sees that the connection lives and we that the client does."""
RETRY_MS = 2000


class Line(NamedTuple):
    """A line, or a part of a long one; ``end`` is the offset of the byte after it."""

    text: str
    end: int
    whole: bool = True


class LineCutter:
    """Cuts a log into lines, from ``offset`` on. ``end`` is where the last line given out ended, ``read_to`` how far it was fed."""

    def __init__(self, offset: int) -> None:
        self.end = offset
        self._rest = b""

    @property
    def read_to(self) -> int:
        return self.end + len(self._rest)

    def feed(self, data: bytes) -> list[Line]:
        *ended, self._rest = (self._rest + data).split(b"\n")
        lines = [line for piece in ended for line in [*self._parts(piece), self._line(piece, whole=True)]]
        lines += self._parts_of_rest()
        return lines

    def close(self) -> list[Line]:
        """Return the last line, if the log stopped within one."""
        rest, self._rest = self._rest, b""
        return [self._told(rest, len(rest), whole=True)] if rest else []

    def _parts(self, piece: bytes) -> list[Line]:
        """Return the parts of a line that has ended, but the last."""
        return [self._told(part, len(part), whole=False) for part in _cut(piece)[:-1]]

    def _line(self, piece: bytes, whole: bool) -> Line:
        last = _cut(piece)[-1]
        return self._told(last, len(last) + 1, whole)

    def _parts_of_rest(self) -> list[Line]:
        *parts, self._rest = _cut(self._rest)
        return [self._told(part, len(part), whole=False) for part in parts]

    def _told(self, piece: bytes, length: int, whole: bool) -> Line:
        self.end += length
        return Line(shown(piece), self.end, whole)


def _cut(line: bytes) -> list[bytes]:
    """Return a line in parts that are not too long, cut between characters where it is UTF-8; the last may be empty."""
    parts = []
    while len(line) > LINE_BYTES:
        at = _boundary(line, LINE_BYTES)
        parts.append(line[:at])
        line = line[at:]
    return [*parts, line]


def _boundary(line: bytes, at: int) -> int:
    """Return ``at``, or the place up to three bytes before it where the character begins that would be cut."""
    for back in range(4):
        if line[at - back] & 0xC0 != 0x80:
            return at - back
    return at


def shown(piece: bytes) -> str:
    """Return a line as a view shows it: decoded, and after a lone return written anew."""
    text = piece.decode("utf-8", errors="replace").rstrip("\r")
    return text.rpartition("\r")[2]


def begin(place: str | int) -> bytes:
    """Return what a stream begins with: the id of where that is, for who is cut off before the first event."""
    return f"retry: {RETRY_MS}\nid: {place}\n\n".encode()


def event(data: str, event_id: str | int | None = None, kind: str | None = None) -> bytes:
    """Return an event; ``data`` has no returns and no line ends."""
    head = f"event: {kind}\n" if kind else ""
    place = f"id: {event_id}\n" if event_id is not None else ""
    return f"{head}{place}data: {data}\n\n".encode()


def log_events(attempt: int, lines: Sequence[Line]) -> bytes:
    """Return the lines of one log as events; an offset alone would be another attempt's too."""
    return b"".join(
        event(line.text, f"{attempt}:{line.end}", None if line.whole else "part") for line in lines
    )


def end_event(document: dict[str, object]) -> bytes:
    """Return the event after which nothing comes any more; it has no id, so that the last one stays the last."""
    return event(json.dumps(document), kind="end")
