"""All logs of an attempt as one stream of events: the id of each says where every log was read to when it was given out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from raycontrol.api.sse import Line, LineCutter, event

MOST_LOGS = 128
"""Each line's id has the offsets of all logs: of more they would be larger than the lines, and too long for a header."""
PORTION_BYTES = 64 * 1024


class LogsCutter:
    """Cuts the logs of one attempt into lines, each from its offset on; those without one from their beginning."""

    def __init__(self, attempt: int, offsets: Mapping[str, int]) -> None:
        self._attempt = attempt
        self._cutters = {name: LineCutter(offset) for name, offset in offsets.items()}

    def __len__(self) -> int:
        return len(self._cutters)

    def places(self) -> dict[str, int]:
        """Return how far each log was fed."""
        return {name: cutter.read_to for name, cutter in self._cutters.items()}

    def place(self) -> str:
        """Return the id of where all logs are."""
        ends = {name: cutter.end for name, cutter in self._cutters.items()}
        return json.dumps({"attempt": self._attempt, "offsets": ends}, separators=(",", ":"))

    def feed(self, news: Mapping[str, bytes]) -> Iterator[bytes]:
        """Yield the events of what has come to each log, in portions; until the last one is taken the rest is not fed."""
        for name, data in news.items():
            cutter = self._cutters.setdefault(name, LineCutter(0))
            yield from portions(self._events(name, cutter.feed(data)))

    def close(self) -> Iterator[bytes]:
        """Yield the last lines of logs that stopped within one."""
        for name, cutter in self._cutters.items():
            yield from portions(self._events(name, cutter.close()))

    def _events(self, instance: str, lines: Iterable[Line]) -> Iterator[bytes]:
        head = f'{{"attempt":{self._attempt},"offsets":{{{self._others(instance)}{json.dumps(instance)}:'
        for line in lines:
            data = json.dumps({"instance": instance, "line": line.text}, ensure_ascii=False)
            yield event(data, f"{head}{line.end}}}}}", None if line.whole else "part")

    def _others(self, instance: str) -> str:
        """Return where the other logs are; they do not move while lines of this one are given out."""
        ends = ((name, cutter.end) for name, cutter in self._cutters.items() if name != instance)
        return "".join(f"{json.dumps(name)}:{end}," for name, end in ends if end)


def portions(events: Iterable[bytes]) -> Iterator[bytes]:
    """Put events together to pieces that are about as long as is sent at once."""
    held = bytearray()
    for item in events:
        held += item
        if len(held) >= PORTION_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)
