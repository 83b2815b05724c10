"""What became of a command across nodes: how it ended at each place, and what it wrote there, kept in files."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from raycontrol.execution import NO_ANSWER, Began, News, Over, Wrote, overall_status
from raycontrol.nodesets import in_order

PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """One place. ``user`` is None where it never began; ``why`` is told where there is more to say than the status."""

    place: str
    status: int
    user: str | None
    code: int | None
    signal: int | None
    why: str | None
    file: Path = field(repr=False)

    @property
    def output(self) -> bytes:
        """All that it wrote, to stdout and stderr."""
        return b"".join(self.pieces())

    @property
    def text(self) -> str:
        """Its output; bytes that are not UTF-8 are replaced."""
        return self.output.decode(errors="replace")

    def pieces(self) -> Iterator[bytes]:
        if self.file.exists():
            with self.file.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    yield piece


class Outcomes(Mapping[str, Outcome]):
    """By the names of places; complete once all of the news was taken. A context manager: its files go at the end."""

    def __init__(self, places: Iterable[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="raycontrol-exec-")
        self._names = in_order(places)
        self._users: dict[str, str] = {}
        self._overs: dict[str, Over] = {}
        self._digests = {name: hashlib.blake2b() for name in self._names}

    def __enter__(self) -> Outcomes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Outcome:
        if name not in self._digests:
            raise KeyError(name)
        over = self._overs.get(name) or Over(name, NO_ANSWER, why="nothing was heard of its end")
        return Outcome(
            name, over.status, self._users.get(name), over.code, over.signal, over.why, self._file(name)
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def status(self) -> int:
        """0 if it exited 0 everywhere, else the highest status."""
        return overall_status({name: self[name].status for name in self})

    def failed(self) -> list[str]:
        return [name for name in self if self[name].status != 0]

    def take(self, news: News) -> None:
        match news:
            case Began(place, user):
                self._users[place] = user
            case Wrote(place, data):
                self._digests[place].update(data)
                with self._file(place).open("ab") as file:
                    file.write(data)
            case Over(place):
                self._overs[place] = news

    def alike(self) -> list[list[str]]:
        """Return the places in groups that wrote the same, those that wrote nothing left out; the largest group first."""
        groups: dict[bytes, list[str]] = {}
        for name in self:
            if self._file(name).exists():
                groups.setdefault(self._digests[name].digest(), []).append(name)
        return sorted(groups.values(), key=len, reverse=True)

    def close(self) -> None:
        self._folder.cleanup()

    def _file(self, name: str) -> Path:
        return Path(self._folder.name) / str(self._names.index(name))
