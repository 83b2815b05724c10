"""What ``exec`` shows: lines with the names of their places in front, as they come or folded, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from raycontrol.cli.output import Output
from raycontrol.execution import Began, News, Over, Wrote
from raycontrol.nodesets import folded
from raycontrol.outcomes import Outcomes
from raycontrol.wording import counted

LONGEST_LINE_BYTES = 1 << 20
"""A longer line comes in pieces, each as a line of its own."""


class Lines:
    """Cuts what one place writes into lines, each with its ``prefix``; with an empty one every byte is passed on as it is."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        if not self._prefix:
            return data
        *ended, rest = (self._rest + data).split(b"\n")
        while len(rest) > LONGEST_LINE_BYTES:
            ended.append(rest[:LONGEST_LINE_BYTES])
            rest = rest[LONGEST_LINE_BYTES:]
        self._rest = rest
        return b"".join(b"%b%b\n" % (self._prefix, line) for line in ended)

    def close(self) -> bytes:
        """Return the last line, if the output stopped within one."""
        rest, self._rest = self._rest, b""
        return b"%b%b\n" % (self._prefix, rest) if rest else b""


class LiveView:
    """Shows lines as they come, and on stderr who runs them."""

    def __init__(self, out: Output, names: Iterable[str], *, prefix: bool) -> None:
        self._out = out
        self._lines = {name: Lines(f"{name}: " if prefix else "") for name in names}

    def take(self, news: News) -> None:
        match news:
            case Wrote(place, data):
                self._show(self._lines[place].feed(data))
            case Over(place):
                self._show(self._lines[place].close())

    def _show(self, text: bytes) -> None:
        if text:
            self._out.data(text)


class Header:
    """Tells where it runs as which user, once it is known of every place whether it began; and at once what is amiss there."""

    def __init__(self, out: Output, names: Iterable[str]) -> None:
        self._out = out
        self._not_yet = set(names)
        self._places: dict[str, list[str]] = {}

    def take(self, news: News) -> None:
        if isinstance(news, Began):
            self._places.setdefault(news.user, []).append(news.place)
            if news.remark is not None:
                self._out.note(f"exec: {news.place}: {news.remark}")
        if news.place in self._not_yet:
            self._not_yet.remove(news.place)
            if not self._not_yet:
                self._tell()

    def _tell(self) -> None:
        for user, places in self._places.items():
            self._out.note(f"exec: as {user}@{folded(places)}")


def show_folded(out: Output, outcomes: Outcomes, *, prefix: bool) -> None:
    """Show what places wrote, once for all that wrote the same."""
    for names in outcomes.alike():
        lines = Lines(f"{folded(names)}: " if prefix else "")
        for piece in outcomes[names[0]].pieces():
            out.data(lines.feed(piece))
        out.data(lines.close())


def tallied(outcomes: Outcomes) -> Iterator[str]:
    """Yield the table of how it ended: places with the same end are one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in outcomes:
        end = outcomes[name]
        by_signal = "" if end.signal is None else f"ended by signal {end.signal}"
        rows.setdefault((str(end.status), end.why or by_signal), []).append(name)
    cells = [
        ("STATUS", "WHERE", "WHY"),
        *((status, folded(names), why) for (status, why), names in rows.items()),
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(2)]
    for status, where, why in cells:
        yield f"{status:<{widths[0]}}  {where:<{widths[1]}}  {why}".rstrip()
    good = len(outcomes) - len(outcomes.failed())
    yield f"exec: {good} of {counted(len(outcomes), 'place')} exited 0"
