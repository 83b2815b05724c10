"""The shared folder as one node has it: a file is left there and found by others, so that it is proved that they share it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROBES = ".raycontrol-probes"
LARGEST_BYTES = 4096


@dataclass(frozen=True)
class Probed:
    """What a node says: as which user, and either the ``text`` that it has left or found, or what is wrong there."""

    uid: int
    text: str = ""
    fault: str | None = None


def probe(act: str, folder: str, name: str, text: str = "") -> Probed:
    """``leave`` a file with the text (written beside and renamed), ``find`` it, ``drop`` it."""
    uid = os.geteuid()
    try:
        return Probed(uid, _ACTS[act](Path(folder) / PROBES / name, text))
    except OSError as error:
        return Probed(uid, fault=error.strerror or str(error))


def _leave(path: Path, text: str) -> str:
    path.parent.parent.stat()  # the folder itself is never made: a mount that is missing must show
    path.parent.mkdir(exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    return text


def _find(path: Path, _: str) -> str:
    with path.open("rb") as file:
        return file.read(LARGEST_BYTES).decode(errors="replace")


def _drop(path: Path, _: str) -> str:
    path.unlink(missing_ok=True)
    return ""


_ACTS: Mapping[str, Callable[[Path, str], str]] = {"leave": _leave, "find": _find, "drop": _drop}
