"""Opens what lies beneath a folder. On the way there no link is followed: a job could lay one to what is not its own.

Every part of a path is opened relative to the folder that was opened before it, so that nothing that is put in the place of
one meanwhile leads elsewhere. The folder ``top`` itself is trusted, and may be reached by links.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
PLAIN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
NOT_THERE = frozenset({errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EACCES})


@contextmanager
def folder_beneath(top: Path, path: Path) -> Iterator[int | None]:
    """Give a descriptor of a folder; None where there is none, or a link on the way."""
    descriptor = _descended(top, path.relative_to(top).parts)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def file_beneath(top: Path, path: Path) -> FileIO | None:
    """Return a plain file, opened to be read; None where there is none, or a link on the way, or instead of it.

    Not its bare descriptor, which nobody would close if the answer that it was opened for has been given up meanwhile.
    """
    with folder_beneath(top, path.parent) as folder:
        return None if folder is None else file_in(folder, path.name)


def file_in(folder: int, name: str) -> FileIO | None:
    """As ``file_beneath``, of an open folder. A pipe does not make us wait."""
    descriptor = _opened(name, PLAIN, folder)
    if descriptor is None:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return FileIO(descriptor)
    os.close(descriptor)
    return None


def sizes_in(folder: int, suffix: str) -> dict[str, int]:
    """Return the bytes of each plain file of an open folder whose name ends so, by the rest of its name, sorted."""
    with os.scandir(folder) as entries:
        found = {
            entry.name.removesuffix(suffix): entry.stat(follow_symlinks=False).st_size
            for entry in entries
            if entry.name.endswith(suffix) and entry.is_file(follow_symlinks=False)
        }
    return dict(sorted(found.items()))


def files_beneath(top: Path, folder: Path) -> Iterator[Path]:
    """Yield the plain files in a folder, sorted, then those in each folder in it. One may be gone when it is opened."""
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        with folder_beneath(top, here) as descriptor:
            folders, files = ([], []) if descriptor is None else _listed(descriptor)
        yield from (here / name for name in files)
        waiting += [here / name for name in reversed(folders)]


def _listed(folder: int) -> tuple[list[str], list[str]]:
    """Return the names of the folders, and of the plain files."""
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=lambda entry: entry.name)
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    return folders, files


def _descended(top: Path, parts: tuple[str, ...]) -> int | None:
    descriptor = _opened(top, FOLDER)
    for part in parts:
        if descriptor is None:
            return None
        try:
            below = _opened(part, FOLDER | os.O_NOFOLLOW, descriptor)
        finally:
            os.close(descriptor)
        descriptor = below
    return descriptor


def _opened(path: str | Path, flags: int, folder: int | None = None) -> int | None:
    try:
        return os.open(path, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in NOT_THERE:
            return None
        raise
