"""The indices of an array, as Slurm writes them, and the ids of its members."""

from __future__ import annotations

import re
from functools import lru_cache

MARK = "~"
"""Stands between the array's id and a member's index; no id that is given has it, so that no other job is in its way."""
MOST_MEMBERS = 10_000
LARGEST_INDEX = 9_999_999
_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?", re.ASCII)
RULE = f"must be indices such as 0-99, 1,3,5 or 0-15:4,20, the lower of two first; at most {MOST_MEMBERS} of them, {LARGEST_INDEX} at most"


@lru_cache(maxsize=1024)
def indices_of(text: str) -> tuple[int, ...]:
    """Return the indices that ``0-15:4,20`` means, each once, in rising order; raises ValueError for any other text."""
    found: set[int] = set()
    for part in text.split(","):
        found.update(_range(part.strip()))
        if len(found) > MOST_MEMBERS:
            raise ValueError(RULE)
    return tuple(sorted(found))


def _range(text: str) -> range:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(RULE)
    first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
    indices = range(first, last + 1, step) if step else range(0)
    if not 0 < len(indices) <= MOST_MEMBERS:
        raise ValueError(RULE)
    return indices


def ranges(indices: list[int]) -> str:
    """Return rising indices in few words: ``0-41,43``."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and index == parts[-1][-1] + 1:
            parts[-1][1:] = [index]
        else:
            parts.append([index])
    return ",".join("-".join(map(str, part)) for part in parts)


def member_id(array_id: str, index: int) -> str:
    return f"{array_id}{MARK}{index}"


def array_of(job_id: str) -> str | None:
    """Return the id of the array that the job is a member of; None when it is none."""
    array_id, mark, _ = job_id.rpartition(MARK)
    return array_id if mark else None


def index_of(job_id: str) -> int:
    """Return the index of a member."""
    return int(job_id.rpartition(MARK)[2])
