"""The history of an instance's usage: a file of JSON lines, one for each sample, that never grows past a size.

A file that has become too long is *thinned*: the newest quarter of its samples stays as it is, and of the older ones those
are dropped that stand closest, so that half of them are left, evenly spread. So the file always covers the whole
course of the job, the last hours to 5 seconds, what was before the more coarsely the longer the job runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

from raycontrol.beneath import file_in, folder_beneath, sizes_in
from raycontrol.hardware import InstanceUsage
from raycontrol.logs import KIB, MIB

SUFFIX = ".jsonl"
LONGEST_HISTORY_BYTES = MIB
LONGEST_PAUSE = 1000
"""A gap of more than so many usual ones is none: somebody has set the node's clock."""
LONGEST_SAMPLE_BYTES = 16 * KIB
"""Room for 60 GPUs."""


def appended(held: bytes, line: str) -> bytes:
    """Return what to write behind ``held``, the end of a history, so that ``line`` is its last sample.

    That is nothing when it is the last already (a call that is repeated). A line that was torn, because the writer was
    killed, is ended first.
    """
    fresh = line.encode() + b"\n"
    if held.endswith(fresh):
        return b""
    return fresh if held.endswith(b"\n") or not held else b"\n" + fresh


def thinned(history: bytes) -> bytes:
    """Return a history without the half of its older samples, and without lines that are no samples."""
    read = [(sample.at, line) for line in history.splitlines() if (sample := parsed(line)) is not None]
    newest = len(read) - len(read) // 4
    kept = [*spread(read[:newest]), *(line for _, line in read[newest:])]
    return b"".join(line + b"\n" for line in kept)


def spread(timed: Sequence[tuple[float, bytes]]) -> list[bytes]:
    """Return half of the lines, at most: the first in each of as many equal spans of the time that went by."""
    if not timed:
        return []
    times = passed_s([at for at, _ in timed])
    spans = max(1, len(timed) // 2)
    length_s = times[-1] / spans or 1.0
    kept: dict[int, bytes] = {}
    for at, (_, line) in zip(times, timed, strict=True):
        kept.setdefault(min(spans - 1, int(at / length_s)), line)
    return list(kept.values())


def passed_s(stamps: Sequence[float]) -> list[float]:
    """Return the seconds that had gone by at each stamp since the first; a clock that was set counts as a usual pause."""
    steps = [after - before for before, after in pairwise(stamps)]
    usual_s = median(steps) if steps else 0.0
    counted = (step if 0 <= step <= LONGEST_PAUSE * usual_s else usual_s for step in steps)
    return list(accumulate(counted, initial=0.0))


def parsed(line: bytes) -> InstanceUsage | None:
    """Return a line's sample; None for one that was torn, or written by a version that knows other fields."""
    try:
        return InstanceUsage.model_validate_json(line)
    except ValueError:  # what pydantic raises is one
        return None


def last_of_each(
    top: Path, folder: Path, count: int, most: int | None = None
) -> dict[str, tuple[InstanceUsage, ...]]:
    """Return the last ``count`` samples of each history in a folder beneath ``top``, oldest first; who has none is not in it.

    Of many instances fewer, so that there are ``most`` in all, but at least one of each.
    """
    with folder_beneath(top, folder) as opened:
        if opened is None:
            return {}
        names = [name for name in sizes_in(opened, SUFFIX) if not name.startswith(".")]
        each = count if most is None else min(count, max(1, most // max(1, len(names))))
        found = {name: last_of(opened, f"{name}{SUFFIX}", each) for name in names}
    return {name: samples for name, samples in found.items() if samples}


def last_of(folder: int, name: str, count: int) -> tuple[InstanceUsage, ...]:
    """Return the last samples of a history in an open folder, oldest first; () where there is none."""
    history = file_in(folder, name)
    if history is None:
        return ()
    window = window_bytes(count)
    with history:
        size = os.fstat(history.fileno()).st_size
        return last_in(os.pread(history.fileno(), window, max(0, size - window)), count)


def window_bytes(count: int) -> int:
    """Return how much of a history's end holds its last ``count`` samples."""
    return min(LONGEST_HISTORY_BYTES, (count + 1) * LONGEST_SAMPLE_BYTES)


def last_in(history: bytes, count: int) -> tuple[InstanceUsage, ...]:
    """Return the last samples of the end of a history, oldest first."""
    found: list[InstanceUsage] = []
    for line in reversed(history.splitlines()):
        if len(found) >= count:
            break
        if (sample := parsed(line)) is not None:
            found.append(sample)
    return tuple(reversed(found))


def rates(before: InstanceUsage, after: InstanceUsage) -> tuple[float, float]:
    """Return the bytes read and written a second between two samples.

    A tree that ended between them took its count along: that looks like less than nothing, and counts as 0.
    """
    elapsed_s = after.at - before.at
    if elapsed_s <= 0:
        return 0.0, 0.0
    read = after.read_bytes - before.read_bytes
    written = after.written_bytes - before.written_bytes
    return max(0, read) / elapsed_s, max(0, written) / elapsed_s
