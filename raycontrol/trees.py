"""What the process trees of an instance use.

An instance's processes are the descendants of its supervisors, each of which is the subreaper of its tree
(``supervisor``): daemons are among them, processes of another instance are not, and no environment has to be read.
Whose child a process is stands in a line of ``/proc``, which is read at every look for those that are the instance's,
and once for all others.

What a process has used counts for its parent once the parent has waited for it. So the sum over those that live, what
they have waited for included, misses only what ended within a tree whose parent ignores SIGCHLD, and what a tree used
between the last look and its end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from raycontrol.supervisor import SUPERVISOR_MARK

PROC = Path("/proc")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
STAT_BYTES = 1024
IO_BYTES = 512


@dataclass(frozen=True)
class Used:
    """What the trees use: as in ``InstanceUsage``, without time and GPUs."""

    cpu_percent: float
    memory_bytes: int
    read_bytes: int
    written_bytes: int
    processes: int


@dataclass
class Root:
    """A supervisor, told from a later process of its pid by its start, and the CPU time that its tree had at the last look."""

    pid: int
    start_time: int
    ticks: int = 0


class Row:
    """A process by its line in ``/proc/<pid>/stat`` (proc(5) counts the same fields from 1, and two more before these)."""

    __slots__ = ("_fields", "parent", "pid")

    def __init__(self, pid: int, line: bytes) -> None:
        self.pid = pid
        self._fields = line[line.rfind(b")") + 2 :].split()  # the name before it may hold anything
        self.parent = int(self._fields[1])

    @property
    def alive(self) -> bool:
        return self._fields[0] not in (b"Z", b"X")

    @property
    def start_time(self) -> int:
        return int(self._fields[19])

    @property
    def ticks(self) -> int:
        """CPU time of the process and of the children that it has waited for."""
        return sum(map(int, self._fields[11:15]))

    @property
    def memory_bytes(self) -> int:
        return int(self._fields[21]) * PAGE_BYTES


class Trees:
    """The trees of an instance's runs. ``look`` blocks for some milliseconds and may run in another thread than ``add``.

    A machine has thousands of processes that are none of ours, and none of them becomes ours: they are remembered
    as ``_strangers`` and not read again. That holds for the runs that were there when they were read, so what was found
    with fewer of them (``_added``) is forgotten.
    """

    def __init__(self) -> None:
        self._roots: dict[int, Root] = {}
        self._added = 0
        self._strangers: tuple[int, set[int]] = (0, set())
        self._looked_at = time.monotonic()

    def add(self, main_pid: int) -> None:
        """Count the tree of which ``main_pid`` is the main process; nothing happens when that has ended already."""
        main = row_of(main_pid)
        supervisor = row_of(main.parent) if main is not None and is_supervisor(main.parent) else None
        if supervisor is None:
            return
        if not self._roots:
            self._looked_at = time.monotonic()
        self._roots[supervisor.pid] = Root(supervisor.pid, supervisor.start_time)
        self._added += 1

    def look(self) -> Used:
        """Return what the trees use now; CPU is the mean since the last look."""
        now = time.monotonic()
        # Before the pids: a run that is added later has none among them.
        added, roots = self._added, tuple(self._roots.values())
        pids = all_pids()
        strangers = pids & self._strangers[1] if self._strangers[0] == added else set()
        rows = {row.pid: row for pid in pids - strangers if (row := row_of(pid)) is not None}
        children = children_of(rows)
        ticks, members, supervisors = 0, [], []
        for root in roots:
            supervisor = rows.get(root.pid)
            if supervisor is None or not supervisor.alive or supervisor.start_time != root.start_time:
                if self._roots.get(root.pid) is root:  # its tree is gone
                    del self._roots[root.pid]
                continue
            tree = descendants(children, root.pid)
            ticks += fresh_ticks(root, supervisor, tree)
            members += tree
            supervisors.append(root.pid)
        ours = {*supervisors, *(row.pid for row in members)}
        self._strangers = (added, strangers | strangers_among(rows, children, strangers, ours))
        elapsed_s, self._looked_at = now - self._looked_at, now
        living = [row for row in members if row.alive]
        transfers = [transfer_of(pid) for pid in ours]
        return Used(
            cpu_percent=percent(ticks * TICK_S, elapsed_s),
            memory_bytes=sum(row.memory_bytes for row in living),
            read_bytes=sum(read for read, _ in transfers),
            written_bytes=sum(written for _, written in transfers),
            processes=len(living),
        )


def fresh_ticks(root: Root, supervisor: Row, tree: Sequence[Row]) -> int:
    """Return the CPU time that a tree has used since the last look.

    The supervisor counts for what it has waited for. A process that was waited for while the table was read can be
    missing from the sum, or in it twice; the next look puts it right, and no look goes below 0.
    """
    ticks = supervisor.ticks + sum(row.ticks for row in tree)
    fresh, root.ticks = max(0, ticks - root.ticks), ticks
    return fresh


def percent(used_s: float, elapsed_s: float) -> float:
    """Return CPU time as a share of the time, 100 for one core."""
    return 100 * used_s / elapsed_s if elapsed_s > 0 else 0.0


def all_pids() -> set[int]:
    return {int(name) for name in os.listdir(PROC) if name.isdecimal()}  # noqa: PTH208 (there are thousands)


def row_of(pid: int) -> Row | None:
    line = read_start(f"{PROC}/{pid}/stat", STAT_BYTES)
    return Row(pid, line) if line else None


def children_of(rows: Mapping[int, Row]) -> dict[int, list[Row]]:
    children: dict[int, list[Row]] = {}
    for row in rows.values():
        children.setdefault(row.parent, []).append(row)
    return children


def descendants(children: Mapping[int, Sequence[Row]], pid: int) -> list[Row]:
    """Return the processes below ``pid``, those that have ended and were not waited for among them."""
    found = list(children.get(pid, ()))
    for row in found:  # it grows meanwhile
        found += (child for child in children.get(row.pid, ()) if child.pid != pid)
    return found


def strangers_among(
    rows: Mapping[int, Row], children: Mapping[int, Sequence[Row]], known: set[int], ours: set[int]
) -> set[int]:
    """Return the processes that are certainly not ours: those that a chain of parents joins to a stranger or to none.

    Where the chain is broken, a parent has ended while the table was read, and its children may be ours.
    """
    found = [row for row in rows.values() if row.parent == 0 or row.parent in known]
    for row in found:  # it grows meanwhile
        found += (child for child in children.get(row.pid, ()) if child.pid not in ours)
    return {row.pid for row in found} - ours


def is_supervisor(pid: int) -> bool:
    """Return whether a process is a supervisor: a main process whose own has died is somebody else's child."""
    with suppress(OSError):
        return f"{SUPERVISOR_MARK}=".encode() in (PROC / str(pid) / "environ").read_bytes()
    return False


def transfer_of(pid: int) -> tuple[int, int]:
    """Return the bytes that a process, and those it has waited for, had from disks and gave to them.

    (0, 0) for one that has ended, and for one that is not ours to look at.
    """
    text = read_start(f"{PROC}/{pid}/io", IO_BYTES)
    fields = dict(line.split(b": ") for line in text.splitlines())
    return int(fields.get(b"read_bytes", 0)), int(fields.get(b"write_bytes", 0))


def read_start(path: str, size: int) -> bytes:
    """Return the first bytes of a file, nothing where it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, size)
    except OSError:  # the process has ended since
        return b""
    finally:
        os.close(descriptor)
