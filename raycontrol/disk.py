"""Careful work with files: locks, what must be on the disk, removal in one step, free space.

Every function blocks and belongs in a thread where an event loop runs. Faults are ``OSError``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

HASH_STEP_BYTES = 1024 * 1024


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """A descriptor of the file, made if need be, that nobody else writes meanwhile (across processes too)."""
    while True:
        descriptor = open_or_make(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Whoever had the lock before may have moved or removed the file: then ours is not the file any more.
            if is_same_file(descriptor, path):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def open_or_make(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)


def is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def make_way(top: Path, final: Path) -> None:
    """Make the folders for ``final`` below ``top``; a later output may be a folder where an earlier was a file."""
    for folder in [top, *reversed([parent for parent in final.parents if top in parent.parents])]:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            folder.unlink()
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.is_dir() and not final.is_symlink():
        shutil.rmtree(final)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(HASH_STEP_BYTES):
            digest.update(data)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    if folder.is_dir():
        for path in folder.iterdir():
            sync_path(path)
        sync_path(folder)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Free space where ``path`` is, or will be."""
    while not path.exists():
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def remove_tree(root: Path) -> None:
    """Remove a folder: first out of sight in one step, so that nobody finds half of it."""
    hidden = root.with_name(f".removed-{uuid4().hex}")
    try:
        root.rename(hidden)
    except FileNotFoundError:
        return
    shutil.rmtree(hidden)


def tree_bytes(root: Path) -> int:
    return sum((Path(folder) / name).lstat().st_size for folder, _, names in os.walk(root) for name in names)
