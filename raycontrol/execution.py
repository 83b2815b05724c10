"""A command across nodes: what is to be run and where, and the news of it, as client, server, controller and nodes say it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raycontrol.errors import RaycontrolError, UsageError

GRACE_S = 5.0
"""Between TERM and KILL, when a command is ended before its own end."""
PIECE_BYTES = 96 * 1024
"""So small that Ray hands it on within its answer: nothing of it lies in the object store, which jobs may have filled."""
LARGEST_SCRIPT_BYTES = 4 << 20
TIMED_OUT = 124
NO_ANSWER = 125
STOPPED = 130


class PlaceFailed(RaycontrolError):
    """A command cannot be run, or followed any further, at a place; ``str(error)`` says why."""


@dataclass(frozen=True)
class Target:
    """Where: ``nodes`` of these names, IPs or beginnings of ids, ``all`` of them, those of ``group``, or the instances of ``job``.

    Of a job, those named in ``instances`` or of its ``group``, else all that run. ``absent_too``: a node that is not in the cluster
    (any more) is a place that cannot be reached, and no error.
    """

    nodes: tuple[str, ...] = ()
    all: bool = False
    job: str | None = None
    instances: tuple[str, ...] = ()
    group: str | None = None
    absent_too: bool = False

    def __post_init__(self) -> None:
        of_nodes = self.job is None and self.group is not None
        if sum((bool(self.nodes), self.all, of_nodes, self.job is not None)) != 1:
            raise UsageError(
                "name where to run it: either nodes, or all of them, or a group of them, or a job"
            )
        if self.job is None and self.instances:
            raise UsageError("instances are a job's: name the job, too")
        if self.instances and self.group is not None:
            raise UsageError("give instances or a group, not both")


@dataclass(frozen=True)
class Place:
    """A node, or an instance of a job on it. ``name`` is what output and results go by.

    ``cluster`` is raycontrol's name of the cluster, ``attempt_id`` and ``instance`` are None for a node. ``node_id`` is empty for
    one that is not in the cluster.
    """

    name: str
    node_id: str
    cluster: str
    attempt_id: str | None = None
    instance: str | None = None


@dataclass(frozen=True)
class Command:
    """A line for bash, a program with its arguments, or a ``script`` whose arguments the words are.

    ``timeout_s`` is from its start at each place on. ``plain`` leaves out what the node's shell would set; ``root`` goes
    through ``sudo -n``. Both are of nodes: in a job everything is as for its start command.
    """

    words: str | tuple[str, ...] = ()
    script: bytes | None = field(default=None, repr=False)
    timeout_s: float | None = None
    plain: bool = False
    root: bool = False

    def __post_init__(self) -> None:
        if self.script is None and not self.words:
            raise UsageError("name a command or a script")
        if self.script is not None and isinstance(self.words, str):
            raise UsageError("a script has its own lines; what goes with it are its arguments, as a list")
        if self.script is not None and len(self.script) > LARGEST_SCRIPT_BYTES:
            raise UsageError(f"the script must have at most {LARGEST_SCRIPT_BYTES} bytes")
        try:
            os.fsencode("".join(self.words))
        except UnicodeEncodeError:
            raise UsageError("command: must be text that UTF-8 can hold") from None
        if self.timeout_s is not None and not 0 < self.timeout_s < 1e9:
            raise UsageError(f"timeout_s: must be above 0, got {self.timeout_s:g}")


@dataclass(frozen=True)
class Began:
    """The command is about to be run at a place, as ``user``; ``remark`` says what is not as it should be."""

    place: str
    user: str
    remark: str | None = None


@dataclass(frozen=True)
class Wrote:
    """What it has written next, to stdout and stderr, in the order in which it came."""

    place: str
    data: bytes


@dataclass(frozen=True)
class Over:
    """How it ended at a place: with an exit code, by a signal, or for a reason of ours (``why``).

    ``status`` is what a shell would say: the code, 128 and the signal, 124 after its time, 125 where there was no answer, 130
    where it was stopped.
    """

    place: str
    status: int
    code: int | None = None
    signal: int | None = None
    why: str | None = None


News = Began | Wrote | Over


@dataclass(frozen=True)
class Chunk:
    """A part of the output, from where it was asked for, as a node hands it out; ``over`` comes with the last one."""

    data: bytes
    over: Over | None = None


def command_of(words: tuple[str, ...], script: bytes | None = None, **rest: Any) -> Command:
    """Return the command of a command line: one word is a line for bash, several are a program with its arguments."""
    one_line = script is None and len(words) == 1
    return Command(words[0] if one_line else words, script, **rest)


def overall_status(statuses: Mapping[str, int]) -> int:
    """Return the exit status of the whole: 0 only if all are; else the highest, as pdsh and clush have it."""
    return max(statuses.values(), default=NO_ANSWER)
