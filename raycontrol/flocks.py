"""Locks between processes of one machine: ``flock`` on a file, gone with the process that holds it.

The descriptor is closed on ``exec``, so no command that is started inherits a lock. A lock file may be removed
by its holder, and only while held: whoever then gets the lock of a removed file notices and takes the new one.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_RETRY_S = 0.01


def take(path: Path, wait_s: float) -> int | None:
    """Lock ``path`` (made if need be) and return the descriptor that holds it; None when others hold it for ``wait_s``."""
    deadline = time.monotonic() + wait_s
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        locked = _try(handle, fcntl.LOCK_EX)
        if locked and _is_at(handle, path):
            return handle
        os.close(handle)
        if not locked:
            if time.monotonic() >= deadline:
                return None
            time.sleep(_RETRY_S)


def drop(handle: int, path: Path | None = None) -> None:
    """Unlock; with ``path``, also remove the lock file."""
    try:
        if path is not None and _is_at(handle, path):
            path.unlink(missing_ok=True)
        fcntl.flock(handle, fcntl.LOCK_UN)  # at once, even where a forked child shares the descriptor
    finally:
        os.close(handle)


def held(path: Path) -> bool:
    """Whether a living process holds ``path``. Looking takes a shared lock for an instant, hence ``wait_s`` above."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def _try(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
