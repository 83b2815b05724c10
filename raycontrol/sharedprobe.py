"""The shared folder as one node has it: a file is left there and found by others, so that it is proved that they share it.

Such files lie in a folder of probes. Only the head makes that, where it begins; elsewhere it says that the shared folder is there
and not merely the empty one that it is to be mounted on. Nothing is made where it is missing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROBES = ".raycontrol-probes"
LARGEST_BYTES = 4096
STALE_S = 3600.0


@dataclass(frozen=True)
class Probed:
    """What a node says: as which user, and either the ``text`` that it has left or found, or what is wrong there."""

    uid: int
    text: str = ""
    fault: str | None = None


def probe(act: str, folder: str, name: str, text: str = "") -> Probed:
    """``leave`` a file with the text (written beside and renamed), ``find`` it, ``drop`` it; ``begin`` leaves the first one."""
    uid = os.geteuid()
    try:
        return Probed(uid, _ACTS[act](Path(folder) / PROBES / name, text))
    except OSError as error:
        return Probed(uid, fault=error.strerror or str(error))


def make_folder(shared: str, folder: Path) -> None:
    """Make a folder below the shared one; raises OSError where that is not there.

    Each part is made in what was found to be the shared folder: when that is unmounted meanwhile, nothing comes in its place.
    """
    top = os.open(shared, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.stat(PROBES, dir_fd=top)
        below = folder.relative_to(shared)
        for part in (*reversed(below.parents[:-1]), below):
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=top)
    finally:
        os.close(top)


def _begin(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    for left in path.parent.iterdir():  # by who has died, or lost the server, before he could drop it
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_S:
                left.unlink()
    return _leave(path, text)


def _leave(path: Path, text: str) -> str:
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except OSError:
        with suppress(OSError):  # the first error counts
            new.unlink(missing_ok=True)
        raise
    return text


def _find(path: Path, _: str) -> str:
    with path.open("rb") as file:
        return file.read(LARGEST_BYTES).decode(errors="replace")


def _drop(path: Path, _: str) -> str:
    path.unlink(missing_ok=True)
    return ""


_ACTS: Mapping[str, Callable[[Path, str], str]] = {
    "begin": _begin,
    "leave": _leave,
    "find": _find,
    "drop": _drop,
}
