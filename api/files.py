"""Reads what jobs have left on the head. Links are not followed: a job could lay one to what is not its own."""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from raycontrol import logs
from raycontrol.errors import UsageError
from raycontrol.logs import JobFolder, jobs_folder

CHUNK_BYTES = 256 * 1024

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class LogFiles:
    """The logs of one attempt. Names are checked (UsageError); a log that is no plain file is none."""

    def __init__(self, home: Path, job_id: str, attempt: int) -> None:
        self._folder = JobFolder(home, job_id)
        self._attempt = attempt
        self._home = home

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each instance's log, by name; empty when nothing has arrived."""
        folder = self._folder.logs(self._attempt)
        if not is_own(self._home, self._folder.root, folder):
            return {}
        try:
            with os.scandir(folder) as entries:
                found = {
                    entry.name[:-4]: entry.stat(follow_symlinks=False).st_size
                    for entry in entries
                    if entry.name.endswith(".log") and entry.is_file(follow_symlinks=False)
                }
        except FileNotFoundError:
            return {}
        return dict(sorted(found.items()))

    def size(self, instance: str) -> int | None:
        """Return the bytes of a log; None when there is none."""
        path = self._folder.log(instance, self._attempt)
        if not is_own(self._home, self._folder.root, path.parent):
            return None
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read(self, instance: str, offset: int, max_bytes: int) -> bytes:
        """Return up to ``max_bytes`` from ``offset``; empty at the end, and when there is no log."""
        if self.size(instance) is None:
            return b""
        return read_at(self._folder.log(instance, self._attempt), offset, max_bytes)

    def tail_offset(self, instance: str, lines: int) -> int:
        if self.size(instance) is None:
            return 0
        return logs.tail_offset(self._folder.log(instance, self._attempt), lines)

    def news(self, offsets: dict[str, int], max_bytes: int, names: list[str] | None) -> dict[str, bytes]:
        """Return what logs hold past the offsets, ``max_bytes`` in all; with ``names`` of these instances only."""
        grown = [
            name
            for name, size in self.sizes().items()
            if size > offsets.get(name, 0) and (names is None or name in names)
        ]
        share = max(1, max_bytes // max(1, len(grown)))
        news = {name: self.read(name, offsets.get(name, 0), share) for name in grown}
        return {name: data for name, data in news.items() if data}


@dataclass(frozen=True)
class Packed:
    """A file that goes into an archive: where it lies, and its name there."""

    path: Path
    name: str


def log_members(home: Path, job_id: str) -> Iterator[Packed]:
    """Yield all logs of all attempts, as ``<attempt>/<instance>.log``."""
    return _members(home, job_id, JobFolder(home, job_id).root / "logs")


def output_members(home: Path, job_id: str) -> Iterator[Packed]:
    """Yield all outputs, as ``<instance>/<path>``."""
    return _members(home, job_id, JobFolder(home, job_id).root / "outputs")


async def tar(members: Iterator[Packed], in_thread: InThread) -> AsyncIterator[bytes]:
    """Yield a tar archive, piece by piece. A file that grows meanwhile is packed as long as it was when its turn came."""
    while (member := await in_thread(lambda: next(members, None))) is not None:
        opened = await in_thread(lambda: _opened(member.path))
        if opened is None:
            continue
        try:
            async for piece in _packed(member.name, opened, in_thread):
                yield piece
        finally:
            opened.close()
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def read_at(path: Path, offset: int, max_bytes: int) -> bytes:
    """Return up to ``max_bytes`` of a plain file; nothing of a link, and of what is not there."""
    opened = _opened(path)
    if opened is None:
        return b""
    with opened:
        return os.pread(opened.fileno(), max(0, max_bytes), max(0, offset))


def read_end(path: Path, max_bytes: int) -> bytes:
    """Return the last bytes of a plain file; nothing of a link, and of what is not there."""
    opened = _opened(path)
    if opened is None:
        return b""
    with opened:
        size = os.fstat(opened.fileno()).st_size
        return os.pread(opened.fileno(), max_bytes, max(0, size - max_bytes))


def is_own(home: Path, root: Path, folder: Path) -> bool:
    """Whether a folder really lies where its path says, with no link on the way from the folder of all jobs."""
    try:
        return folder.resolve() == jobs_folder(home).resolve() / root.name / folder.relative_to(root)
    except (OSError, RuntimeError):
        return False


def _members(home: Path, job_id: str, top: Path) -> Iterator[Packed]:
    if not is_own(home, JobFolder(home, job_id).root, top):
        return
    for folder, names, files in os.walk(top):  # links to folders are not followed
        names.sort()
        for name in sorted(files):
            path = Path(folder, name)
            yield Packed(path, str(path.relative_to(top)))


def _opened(path: Path) -> FileIO | None:
    """Return a plain file, None where there is none; a pipe must not make us wait.

    Not its bare descriptor, which nobody would close if the answer that it was opened for has been given up meanwhile.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EACCES):
            return None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return FileIO(descriptor)
    os.close(descriptor)
    return None


async def _packed(name: str, opened: FileIO, in_thread: InThread) -> AsyncIterator[bytes]:
    found = os.fstat(opened.fileno())
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
