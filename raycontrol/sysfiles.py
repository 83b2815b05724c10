"""Reading /sys, /proc and the like, below a root: what cannot be read is None or empty, and said in the log at debug."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)


def text_of(path: Path) -> str | None:
    """Return a file's text without the space around it. It costs little, for a node has thousands of such files."""
    try:
        with path.open("rb", buffering=0) as file:
            return file.readall().decode(errors="replace").strip()
    except OSError as error:
        log.debug("%s", error)
        return None


def number_of(path: Path) -> int | None:
    try:
        return int(text_of(path) or "")
    except ValueError:
        return None


def exists(path: Path) -> bool:
    """Whether something is there that we can see; ``Path.exists`` raises where a folder is closed to us."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def link_name(path: Path) -> str | None:
    """Return the last part of where a link leads, even if nothing is there."""
    try:
        return path.readlink().name
    except OSError:
        return None


def names_in(folder: Path) -> list[str]:
    try:
        return in_order(path.name for path in folder.iterdir())
    except OSError as error:
        log.debug("%s", error)
        return []


def in_order(names: Iterable[str]) -> list[str]:
    """Return the names sorted, numbers in them by their value: ``mlx5_10`` comes after ``mlx5_9``."""
    return sorted(
        names, key=lambda name: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
    )


def matching(folder: Path, pattern: str) -> list[str]:
    return [name for name in names_in(folder) if re.fullmatch(pattern, name)]


def on_the_node(root: Path, path: Path) -> str:
    """Return a path as it is on the node."""
    return f"/{path.relative_to(root)}"
