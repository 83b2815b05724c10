"""Bodies and answers that are of the HTTP interface alone; all else is of ``status``, ``hardware`` and ``access``."""

from __future__ import annotations

import base64
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from raycontrol.access import TOKEN_TTL_S, AuditEntry, Role, TokenInfo
from raycontrol.status import JobInfo, Model

Offset = Annotated[int, Field(ge=0, le=2**62)]
Seconds = Annotated[float, Field(ge=0, le=20, allow_inf_nan=False)]
ScriptBytes = Annotated[bytes, BeforeValidator(lambda text: base64.b64decode(text, validate=True), str)]
"""In base64, to the letter: what is left of a text that is none would run, too."""
JobName = Annotated[str, Field(min_length=1, max_length=80)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class NewJob(Model):
    """A job to be submitted: its spec, the id it shall have, the digest of its working directory's package."""

    spec: dict[str, Any]
    job_id: JobName | None = None
    package: Digest | None = None


class JobPage(Model):
    """A page of a list, newest job first. ``next`` is the ``after`` of the next page, null at the end."""

    jobs: list[JobInfo]
    next: str | None = None


class Stop(Model):
    """``force`` kills at once; ``why`` is told in the job's events."""

    force: bool = False
    why: Annotated[str, Field(max_length=500)] | None = None


class LogRead(Model):
    """Which bytes of logs are wanted: those past ``offsets`` (0 where none is given), of ``instances`` or of all."""

    attempt: Annotated[int, Field(ge=0, le=1_000_000)]
    offsets: dict[str, Offset] = Field(default_factory=dict)
    wait_s: Seconds = 0.0
    max_bytes: Annotated[int, Field(ge=1)] = 1 << 20
    instances: list[str] | None = None


class Why(Model):
    """``why`` is told in the job's events."""

    why: Annotated[str, Field(max_length=500)] | None = None


class NewPriority(Model):
    """``priority``: 0 (highest) to 9."""

    priority: Annotated[int, Field(ge=0, le=9)]
    why: Annotated[str, Field(max_length=500)] | None = None


class JobExec(Model):
    """A command to be run inside a job's instances: those named, those of the group, or all that run.

    ``command`` is a line for bash or a list of words, ``script`` the bytes of a script (base64), to which a list is its arguments.
    ``parallel``: on so many at a time.
    """

    command: str | list[str] = ""
    script: ScriptBytes | None = Field(default=None, repr=False)
    timeout_s: Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)] | None = None
    parallel: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    instances: tuple[str, ...] = ()
    group: str | None = None


class NodesExec(Model):
    """A command to be run on ``nodes`` of these names, IPs or beginnings of ids, on those of a ``group``, or on ``all``.

    ``plain`` leaves out what the node's shell would set, ``root`` goes through sudo; with ``absent_too`` a node that is not in the
    cluster is a place without an answer, and no error; the rest is as for a job.
    """

    command: str | list[str] = ""
    script: ScriptBytes | None = Field(default=None, repr=False)
    timeout_s: Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)] | None = None
    parallel: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    nodes: tuple[str, ...] = ()
    group: str | None = None
    all: bool = False
    absent_too: bool = False
    plain: bool = False
    root: bool = False


class JobPlan(Model):
    """What a job does: the plan of its attempt, or, before all its instances have reported, of its spec (``attempt`` null).

    In the latter addresses and ports are written as ``<ip of worker-0>``. Values whose names speak of secrets are masked.
    """

    attempt: int | None
    plan: dict[str, Any]


class Place(Model):
    """An offset in a log."""

    offset: int


class Held(Model):
    """How many bytes of a package are there."""

    held: int


class SpecOnly(Model):
    spec: dict[str, Any]


class Doubts(Model):
    """Why the cluster as it is could never run a job; null when it could."""

    doubts: str | None


NodeNames = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=255)]], Field(min_length=1, max_length=5000)
]


class NamedNodes(Model):
    """Nodes, by name, IP or the beginning of an id."""

    nodes: NodeNames


class NodesToRemove(Model):
    """Nodes to be taken out of a group; null: all of them."""

    nodes: NodeNames | None


class NodesToDrain(Model):
    """Nodes that are to take no new job, and why, for those who will ask."""

    nodes: NodeNames
    reason: Annotated[str, Field(min_length=1, max_length=500)]


class NewToken(Model):
    """A token to be made. It lives for ``ttl_s`` seconds, 90 days where nothing is said, with null until it is revoked."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    role: Role
    user: Annotated[str, Field(min_length=1, max_length=256)]
    ttl_s: Annotated[float, Field(gt=0, le=3.2e9, allow_inf_nan=False)] | None = TOKEN_TTL_S


class MadeToken(Model):
    """``token`` is its text; it is told this once and kept nowhere."""

    token: str
    info: TokenInfo


class AuditPage(Model):
    """Entries in order. ``next`` is the ``after`` of the next page, null at the end."""

    entries: list[AuditEntry]
    next: int | None = None


class Fault(Model):
    """One thing wrong with a request: the field, what must hold, what was given, and where."""

    field: str
    rule: str
    got: str | None = None
    line: int | None = None
    column: int | None = None


class Problem(Model):
    """Why a request failed (RFC 9457). ``instance`` is the request's id, ``faults`` all that is wrong with what was sent."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    faults: list[Fault] | None = None


class Alive(Model):
    """The server runs; whether it can work is another question."""

    alive: bool


class Ready(Model):
    """``ready`` is false with the status 503."""

    ready: bool
