"""Reads what jobs have left on the head. Links are not followed: a job could lay one to what is not its own."""

from __future__ import annotations

import os
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from raycontrol.beneath import file_beneath, files_beneath
from raycontrol.errors import UsageError
from raycontrol.logs import JobFolder, jobs_folder
from raycontrol.outputs import Tops

CHUNK_BYTES = 256 * 1024

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class LogFiles:
    """The logs of one attempt. Names are checked (UsageError); a log that is no plain file is none."""

    def __init__(self, home: Path, job_id: str, attempt: int) -> None:
        self._folder = JobFolder(home, job_id)
        self._attempt = attempt

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each instance's log, by name; empty when nothing has arrived."""
        return self._folder.sizes(self._attempt)

    def size(self, instance: str) -> int | None:
        """Return the bytes of a log; None when there is none."""
        return self._folder.size(instance, self._attempt)

    def read(self, instance: str, offset: int, max_bytes: int) -> bytes:
        """Return up to ``max_bytes`` from ``offset``; empty at the end, and when there is no log."""
        return self._folder.read(instance, self._attempt, offset, max_bytes)

    def tail_offset(self, instance: str, lines: int) -> int:
        return self._folder.tail_offset(instance, self._attempt, lines)

    def news(self, offsets: dict[str, int], max_bytes: int, names: list[str] | None) -> dict[str, bytes]:
        """Return what logs hold past the offsets, ``max_bytes`` in all; with ``names`` of these instances only."""
        return self._folder.news(self._attempt, offsets, max_bytes, names)


@dataclass(frozen=True)
class Packed:
    """A file that goes into an archive: where it lies beneath ``top``, and its name there."""

    top: Path
    path: Path
    name: str


def log_members(home: Path, job_id: str) -> Iterator[Packed]:
    """Yield all logs of all attempts, as ``<attempt>/<instance>.log``."""
    return _members(home, JobFolder(home, job_id).root / "logs")


def output_members(home: Path, job_id: str) -> Iterator[Packed]:
    """Yield all outputs, as ``<instance>/<path>``, those in a folder that the nodes share included."""
    for kept in Tops.of(home, job_id).kept():
        yield Packed(kept.top, kept.path, kept.file.path)


async def tar(members: Iterator[Packed], in_thread: InThread) -> AsyncIterator[bytes]:
    """Yield a tar archive, piece by piece. A file that grows meanwhile is packed as long as it was when its turn came."""
    while (member := await in_thread(lambda: next(members, None))) is not None:
        opened = await in_thread(lambda: file_beneath(member.top, member.path))
        if opened is None:
            continue
        try:
            async for piece in _packed(member.name, opened, in_thread):
                yield piece
        finally:
            await in_thread(opened.close)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def _members(home: Path, top: Path) -> Iterator[Packed]:
    jobs = jobs_folder(home)
    for path in files_beneath(jobs, top):
        yield Packed(jobs, path, str(path.relative_to(top)))


async def _packed(name: str, opened: FileIO, in_thread: InThread) -> AsyncIterator[bytes]:
    found = await in_thread(lambda: os.fstat(opened.fileno()))
    yield _header(name, found)
    place = 0
    while place < found.st_size:
        want = min(CHUNK_BYTES, found.st_size - place)
        data = await in_thread(lambda: os.pread(opened.fileno(), want, place))  # noqa: B023
        data = data or b"\0" * want  # it was cut meanwhile; its place in the archive has a fixed size
        yield data
        place += len(data)
    yield b"\0" * (-found.st_size % tarfile.BLOCKSIZE)


def _header(name: str, found: os.stat_result) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = found.st_size, int(found.st_mtime), found.st_mode & 0o777
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def checked_instance(home: Path, job_id: str, attempt: int, instance: str) -> None:
    """Raise UsageError for what can be no instance's name."""
    if "\\" in instance or not instance.isprintable():
        raise UsageError(f"instance: must be a name, got {instance!r}")
    JobFolder(home, job_id).log(instance, attempt)
