"""What jobs have left in ``$RAYCONTROL_OUTPUT_DIR``: listed and read on the head, laid down where it was asked for."""

from __future__ import annotations

import os
import secrets
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from raycontrol.beneath import file_beneath, files_beneath
from raycontrol.disk import remove_tree
from raycontrol.errors import RaycontrolError, UsageError
from raycontrol.logs import OutputFolders
from raycontrol.settings import Settings

PIECE_BYTES = 4 << 20


class OutputsError(RaycontrolError):
    """Outputs cannot be laid down here."""


@dataclass(frozen=True)
class OutputFile:
    """One file: ``path`` is ``<instance>/<path in its folder>``, ``mode`` its permissions."""

    path: str
    size: int
    mode: int
    mtime_ns: int


@dataclass(frozen=True)
class Piece:
    """A part of a file, from ``offset`` on. Pieces of a file come one after the other, and an empty one has one, too."""

    file: OutputFile
    offset: int
    data: bytes


@dataclass(frozen=True)
class Fetched:
    """What was laid down below ``folder``."""

    folder: str
    files: int
    size: int


@dataclass(frozen=True)
class Kept:
    """A file, and where it lies beneath ``top``."""

    top: Path
    path: Path
    file: OutputFile


class Tops:
    """Where the outputs of a job lie: below the archive's folder and, where nodes share one, in that, too.

    Of one attempt outputs may be in the one, of the next in the other: of two files of one name the newer counts.
    """

    def __init__(self, home: str | os.PathLike[str], shared_dir: str | None, job_id: str) -> None:
        self._archived = OutputFolders(home, job_id)
        self._shared = OutputFolders(shared_dir, job_id) if shared_dir else None

    @classmethod
    def of(cls, home: str | os.PathLike[str], job_id: str) -> Tops:
        """As the settings of this home have it; where they are wrong, without a shared folder."""
        try:
            shared_dir = Settings.of_home(str(home)).shared_dir
        except UsageError:
            shared_dir = None
        return cls(home, shared_dir, job_id)

    def files(self) -> list[OutputFile]:
        """Return all files, by instance and path. Links are left out: they could lead to what is not the job's."""
        return [kept.file for kept in self.kept()]

    def kept(self) -> list[Kept]:
        """As ``files``, with where each lies."""
        found: dict[str, Kept] = {}
        for kept in (kept for place in self._places for kept in _kept_in(place)):
            other = found.get(kept.file.path)
            if other is None or kept.file.mtime_ns > other.file.mtime_ns:
                found[kept.file.path] = kept
        return [found[name] for name in sorted(found)]

    def read(self, path: str, offset: int, max_bytes: int) -> bytes:
        """Return up to ``max_bytes`` of a file from ``offset``; nothing at its end, and where there is none."""
        parts = inside(path)
        with ExitStack() as until_read:
            found: list[IO[bytes]] = []
            for place in self._places:
                opened = file_beneath(place.top, place.root.joinpath(*parts))
                if opened is not None:
                    found.append(until_read.enter_context(opened))
            newest = max(found, key=lambda file: os.fstat(file.fileno()).st_mtime_ns, default=None)
            return b"" if newest is None else os.pread(newest.fileno(), max_bytes, offset)

    def remove_shared(self) -> None:
        """Remove what the job has left in the shared folder; what is in the archive goes with its folder there."""
        if self._shared is not None:
            remove_tree(self._shared.job)

    @property
    def _places(self) -> list[OutputFolders]:
        return [self._archived] if self._shared is None else [self._archived, self._shared]


def _kept_in(place: OutputFolders) -> Iterator[Kept]:
    for path in files_beneath(place.top, place.root):
        opened = file_beneath(place.top, path)
        if opened is not None:
            with opened:
                state = os.fstat(opened.fileno())
            name = str(path.relative_to(place.root))
            file = OutputFile(name, state.st_size, state.st_mode & 0o777, state.st_mtime_ns)
            yield Kept(place.top, path, file)


def inside(path: str) -> tuple[str, ...]:
    """Return the parts of a path that leads nowhere but down; raises UsageError for another."""
    parts = tuple(path.split("/"))
    if not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise UsageError(f"output: must be a path inside the folder, got {path!r}")
    return parts


def pieces(files: Iterable[OutputFile], read: Callable[[str, int], bytes]) -> Iterator[Piece]:
    """Yield all of the files; ``read(path, offset)`` gives what follows there. One that shrinks meanwhile is left out."""
    for file in files:
        offset = 0
        while offset < file.size or offset == 0:
            data = read(file.path, offset)[: file.size - offset]
            yield Piece(file, offset, data)
            if not data:
                break
            offset += len(data)


def from_tar(stream: IO[bytes]) -> Iterator[Piece]:
    """Yield what a tar archive holds, as it comes; raises OutputsError when it breaks off."""
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                data = archive.extractfile(member) if member.isfile() else None
                if data is not None:
                    file = OutputFile(member.name, member.size, member.mode & 0o777, int(member.mtime * 1e9))
                    yield from pieces([file], _reader(data))
    except tarfile.TarError as error:
        raise OutputsError(f"the archive of outputs broke off: {error}") from None


def _reader(data: IO[bytes]) -> Callable[[str, int], bytes]:
    return lambda path, offset: data.read(PIECE_BYTES)


def lay_down(pieces: Iterable[Piece], folder: Path) -> Fetched:
    """Write files below ``folder``, each whole or not at all; a file of the same name is replaced. Raises OutputsError."""
    files, size = 0, 0
    try:
        with ExitStack() as until_whole:
            for piece in pieces:
                if piece.offset == 0:
                    until_whole.close()  # of the one before nothing more comes
                    growing = Growing(piece.file, folder)
                    until_whole.callback(growing.drop)
                if growing.add(piece):
                    files, size = files + 1, size + piece.file.size
    except OSError as error:
        raise OutputsError(f"outputs cannot be written to {folder}: {error}") from error
    return Fetched(str(folder), files, size)


class Growing:
    """A file below ``folder`` that is not whole yet. ``drop`` leaves nothing of it, unless it has become whole."""

    def __init__(self, file: OutputFile, folder: Path) -> None:
        self._file = file
        self._path = folder.joinpath(*inside(file.path))
        self._partial = self._path.parent / f".raycontrol-{secrets.token_hex(8)}"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._opened = self._partial.open("xb")

    def add(self, piece: Piece) -> bool:
        """Write a piece; return whether the file is whole now, and in its place."""
        self._opened.write(piece.data)
        if piece.offset + len(piece.data) < self._file.size:
            return False
        self._opened.close()
        self._partial.chmod(self._file.mode | 0o600)
        os.utime(self._partial, ns=(self._file.mtime_ns, self._file.mtime_ns))
        self._partial.replace(self._path)
        return True

    def drop(self) -> None:
        with suppress(OSError):  # what went wrong before says more
            self._partial.unlink(missing_ok=True)
        with suppress(OSError):
            self._opened.close()
