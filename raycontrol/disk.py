"""Careful work with files: locks, what must be on the disk, removal in one step, free space.

Every function blocks and belongs in a thread where an event loop runs. Faults are ``OSError``.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

HASH_STEP_BYTES = 1024 * 1024
HIDDEN = ".removed-"
TEMP_LINK = "temp"
"""The link to an instance's short folder, in its private one."""
SHORT_PARENT = Path("/tmp")


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


def private_folder(folder: Path) -> None:
    """Make a folder, and see to it that only its owner can look inside."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def write_private(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Put a file in place whole, readable by its owner alone from the first byte on; its folder is made if need be."""
    private_folder(path.parent)
    replace_file(path, data, mode)


def replace_file(path: Path, data: bytes, mode: int = 0o666, *, sync: bool = False) -> None:
    """Put other contents in a file's place, so that there are always the old or the new ones whole.

    ``mode`` is before the umask; with ``sync`` the new ones are on the disk before they take the place.
    """
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(descriptor)
    fresh.replace(path)


def short_folder(link: Path) -> Path:
    """Make a private folder with a short path, because paths of sockets end at 107 bytes.

    ``link`` points to it before it is there, so that somebody can remove it whatever happens.
    """
    while True:
        folder = SHORT_PARENT / f"rc-{secrets.token_hex(4)}"
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return folder


def remove_short_folder(link: Path) -> None:
    """Remove what ``short_folder`` has made, and the link when it is gone."""
    folder = link.readlink()
    with suppress(FileNotFoundError):
        if folder.parent == SHORT_PARENT and folder.lstat().st_uid == link.lstat().st_uid:
            erase(folder)
    link.unlink(missing_ok=True)


def remove_tree(root: Path) -> None:
    """Remove a folder: first out of sight in one step, so that nobody finds half of it."""
    hidden = hide(root)
    if hidden is not None:
        erase(hidden)


def hide(root: Path) -> Path | None:
    """Give a folder a name under which nobody looks for it; None when it is not there."""
    hidden = root.with_name(f"{HIDDEN}{uuid4().hex}")
    try:
        root.rename(hidden)
    except FileNotFoundError:
        return None
    return hidden


def erase_hidden(folder: Path) -> None:
    """Remove what was hidden in ``folder`` and is still there, because its removal was broken off.

    What cannot be removed keeps nothing else from it; its ``OSError`` is raised at the end.
    """
    failure: OSError | None = None
    for hidden in matching(folder, f"{HIDDEN}*"):
        try:
            erase(hidden)
        except OSError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def matching(folder: Path, pattern: str) -> list[Path]:
    """What ``folder.glob`` finds, less what may not be looked at or goes meanwhile."""
    return [folder / name for name in glob.glob(pattern, root_dir=folder)]  # noqa: PTH207 (that one raises)


def erase(root: Path) -> None:
    """Remove a tree, folders in it that may not be written included; another may be removing it as well."""
    if root.is_symlink():
        root.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(root, onerror=_pass_over_missing)
    except PermissionError:
        unlock_folders(root)
        shutil.rmtree(root, onerror=_pass_over_missing)


def unlock_folders(root: Path) -> None:
    """Let the owner read, write and enter every folder of a tree; what is not his to change is left alone."""
    for folder in _folders(root):
        with suppress(OSError):
            folder.chmod(stat.S_IMODE(folder.lstat().st_mode) | 0o700)


def _folders(root: Path) -> Iterator[Path]:
    """A tree's folders, each before those in it, which are looked for when it has been dealt with."""
    yield root
    for folder, names, _ in os.walk(root):
        yield from (path for name in names if not (path := Path(folder, name)).is_symlink())


def _pass_over_missing(_: Callable[..., Any], path: str, info: tuple[Any, BaseException, Any]) -> None:
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]


def tree_bytes(root: Path) -> int:
    return sum(_bytes_of(Path(folder) / name) for folder, _, names in os.walk(root) for name in names)


def _bytes_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:  # removed meanwhile
        return 0
