"""What a spec's ``mounts`` may be: paths that exist for the job only, and what is found under them."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from raycontrol.specparts import FolderText, rule

KERNELS = ("/proc", "/sys", "/dev")
"""What is below them is the kernel's."""
NEEDED = ("/", "/bin", "/etc", "/home", "/lib", "/lib64", "/root", "/run", "/sbin", "/tmp", "/usr", "/var")
"""Folders without whose entries nothing runs; one below them may be a target."""
MODES = {":ro": True, ":rw": False}
MOST_MOUNTS = 64


@dataclass(frozen=True)
class Wanted:
    """One entry of ``mounts``: a relative ``source`` is one of the job's code folder."""

    target: str
    source: str
    read_only: bool


def _is_plain(path: str) -> bool:
    return path.startswith("/") and not path.startswith("//") and ".." not in path.split("/")


def _is_free(path: str) -> bool:
    plain = posixpath.normpath(path)
    return plain not in NEEDED and not any(_is_at_or_below(plain, kernels) for kernels in KERNELS)


def _source_of(text: str) -> str:
    return text[:-3] if text[-3:] in MODES else text


def _stays(text: str) -> bool:
    source = _source_of(text)
    return source.startswith("/") or ".." not in source.split("/")


MountTarget = Annotated[
    FolderText,
    rule(_is_plain, "targets must be absolute paths without `..`"),
    rule(_is_free, f"targets must not be {', '.join(NEEDED)}, nor anything of {', '.join(KERNELS)}"),
]
MountSource = Annotated[
    FolderText,
    rule(lambda text: _source_of(text).strip(), "must name a folder or a file"),
    rule(
        lambda text: not text.startswith("~"),
        "must not begin with `~`: write out the path that the nodes have",
    ),
    rule(_stays, "must not leave the code's folder with `..`; a path of the nodes is written from `/` on"),
]
Mounts = Annotated[
    dict[MountTarget, MountSource],
    rule(lambda mounts: len(mounts) <= MOST_MOUNTS, f"must be at most {MOST_MOUNTS}"),
    AfterValidator(lambda mounts: _all_apart(mounts)),
]


def wanted(mounts: Mapping[str, str]) -> tuple[Wanted, ...]:
    """Return what a spec's ``mounts`` say, in the order of the targets."""
    found = [
        Wanted(posixpath.normpath(target), _source_of(text), MODES.get(text[-3:], False))
        for target, text in mounts.items()
    ]
    return tuple(sorted(found, key=lambda mount: mount.target))


def _all_apart(mounts: dict[str, str]) -> dict[str, str]:
    targets = [posixpath.normpath(target) for target in mounts]
    for number, one in enumerate(targets):
        for other in [*targets[:number], *targets[number + 1 :]]:
            if _is_at_or_below(one, other):
                told = f"must have targets none of which is another or lies below it, as {one} does below {other}"
                raise PydanticCustomError("rule", "{rule}", {"rule": told})
    return mounts


def _is_at_or_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")
