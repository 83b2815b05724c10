"""What a job, an instance and an attempt can be, and the models in which SDK, ``--json`` and HTTP show them."""

from __future__ import annotations

from enum import Enum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Word(str, Enum):
    """An enum whose members are their text, in JSON, f-strings and comparisons alike."""

    __str__ = str.__str__


class JobState(Word):
    """Where a job is. The last three are terminal: a job never leaves them."""

    QUEUED = "QUEUED"
    PLACING = "PLACING"
    PREPARING = "PREPARING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"

    @property
    def terminal(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)


class InstanceState(Word):
    """Where an instance is. ``EXITED`` and ``LOST`` are its ends."""

    PLACED = "PLACED"
    PREPARED = "PREPARED"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    EXITED = "EXITED"
    LOST = "LOST"

    @property
    def ended(self) -> bool:
        return self in (InstanceState.EXITED, InstanceState.LOST)


class Outcome(Word):
    """How an attempt ended."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    PREEMPTED = "PREEMPTED"
    LOST = "LOST"


class Reason(Word):
    """Why a job is where it is, or ended as it did."""

    SUBMITTED = "SUBMITTED"
    WAITING = "WAITING"
    PLACED = "PLACED"
    STARTED = "STARTED"
    COMPLETED = "COMPLETED"
    INSTANCE_FAILED = "INSTANCE_FAILED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    INSTANCE_LOST = "INSTANCE_LOST"
    WORLD_BROKEN = "WORLD_BROKEN"
    PREPARE_FAILED = "PREPARE_FAILED"
    STAGE_FAILED = "STAGE_FAILED"
    PLAN_FAILED = "PLAN_FAILED"
    PLACEMENT_LOST = "PLACEMENT_LOST"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    RUN_TIMEOUT = "RUN_TIMEOUT"
    START_TIMEOUT = "START_TIMEOUT"
    STOP_REQUESTED = "STOP_REQUESTED"
    HELD = "HELD"
    SUSPENDED = "SUSPENDED"
    PREEMPTED = "PREEMPTED"
    DEPENDENCY_FAILED = "DEPENDENCY_FAILED"


class Model(BaseModel):
    """Frozen, and strict about names: a typing error in a field is an error, not a loss."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Verdict(Model):
    """Why an attempt ended, for a person: the first cause and what the program last said.

    ``exit_code`` is the start command's own, ``signal`` the number that ended it (then ``exit_code`` is None);
    ``signal_sender`` says who sent it when it was raycontrol. ``rank`` and ``rank_exit_code`` are what the
    launcher (torchrun, …) named in its last lines; a negative rank code is a signal, as in Python's
    ``subprocess``. ``hint`` is advice.
    """

    reason: Reason
    summary: str
    instance: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    signal_sender: str | None = None
    rank: int | None = None
    rank_exit_code: int | None = None
    last_lines: tuple[str, ...] = ()
    hint: str | None = None


class Variable(Model):
    """A variable of an instance's environment. ``origin``: a preset, the node's interface, the job's env, …"""

    value: str
    origin: str


class AttemptInfo(Model):
    """An attempt that has ended. ``number`` counts from 0, ``nodes`` are by INDEX, times are seconds since the epoch."""

    number: int
    outcome: Outcome
    reason: Reason
    summary: str
    exit_code: int | None = None
    nodes: tuple[str, ...] = ()
    ended_at: float


class InstanceInfo(Model):
    """One instance of a job's current (or last) attempt. ``note`` says, for example, that it was stopped because a peer failed.

    ``gpus`` are the ids of the GPUs that it has; ``variables`` what was set about network and GPUs (not in lists of jobs).
    """

    name: str
    group: str
    role: str
    index: int
    node: str
    ip: str
    state: InstanceState
    exit_code: int | None = None
    signal: int | None = None
    note: str | None = None
    gpus: tuple[str, ...] = ()
    variables: dict[str, Variable] = Field(default_factory=dict)


class ArrayInfo(Model):
    """How far an array is: so many of its members have begun, live (begun and not ended), and have ended how."""

    indices: str
    parallel: int | None = None
    fail_fast: bool = False
    members: int
    begun: int = 0
    living: int = 0
    succeeded: int = 0
    failed: int = 0
    stopped: int = 0


class MemberInfo(Model):
    """One member of an array. ``id`` is that of its job, None as long as it has not begun (then ``state`` is QUEUED; STOPPED
    when its array has ended). The rest is as in a job; ``node`` is its current or last one.
    """

    index: int
    id: str | None = None
    state: JobState
    reason: Reason
    attempt: int = 0
    exit_code: int | None = None
    signal: int | None = None
    node: str | None = None
    summary: str | None = None


class JobInfo(Model):
    """One job as every surface shows it. Times are seconds since the epoch; ``attempt`` counts from 0.

    ``exit_code`` is the code of the job's start command, also where another than 0 is a success; it is None while the job runs, when a signal ended it,
    and when there was none. ``pending`` says, while the job waits, why and what would help; ``abandoned`` that it has
    not ended and nobody is left to end it; ``kept_until`` that it has failed and keeps its nodes for a look inside. ``outputs`` is a folder on the head, None while nothing was collected.
    ``index`` is that of a member of an array, ``array`` how far one is. ``spec`` (not in lists of jobs) is what was submitted, without
    what is at its default, and with what may be secret masked.
    ``attempts`` are those that have ended, the last 20. ``rdma``, of a job for which it matters: ``in use (GDRDMA)``, ``not in use: NET/Socket``, ``not known yet``, ``off: why``.
    """

    id: str
    name: str
    user: str
    mode: str
    state: JobState
    reason: Reason
    attempt: int
    exit_code: int | None = None
    verdict: Verdict | None = None
    priority: int
    submitted_at: float
    started_at: float | None = None
    ended_at: float | None = None
    instances: tuple[InstanceInfo, ...] = ()
    pending: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    cluster: str = ""
    outputs: str | None = None
    rdma: str | None = None
    abandoned: bool = False
    kept_until: float | None = None
    attempts: tuple[AttemptInfo, ...] = ()
    index: int | None = None
    array: ArrayInfo | None = None
    spec: dict[str, Any] | None = None

    @property
    def over(self) -> bool:
        """Whether nothing of it will change any more, but that its nodes may be let go."""
        return self.state.terminal or self.abandoned or self.kept_until is not None

    @property
    def exit_status(self) -> int:
        """What ``raycontrol run`` and ``wait`` exit with: the job's code, or the kind of its end (README, "Exit status")."""
        if self.state is JobState.SUCCEEDED:
            return 0
        if self.state is JobState.STOPPED:
            return 130
        if self.reason in (Reason.RUN_TIMEOUT, Reason.QUEUE_TIMEOUT):
            return 124
        if self.reason not in (Reason.INSTANCE_FAILED, Reason.OUT_OF_MEMORY):
            return 125
        if self.verdict is not None and self.verdict.signal is not None:
            return 128 + self.verdict.signal
        return 125 if self.exit_code is None else self.exit_code or 1  # a 0 that is not valid


class Wish(Word):
    """What a user may want of a job besides its end.

    ``hold``: do not start it; ``suspend``: also stop it if it runs, and keep it in the queue; ``release`` and ``resume``
    let such a job go on.
    """

    HOLD = "hold"
    RELEASE = "release"
    SUSPEND = "suspend"
    RESUME = "resume"

    @property
    def done(self) -> str:
        """What has been done with the job then: held, suspended, …"""
        return {"hold": "held", "release": "released", "suspend": "suspended", "resume": "resumed"}[self]


class QueueEntry(Model):
    """A job in the queue. ``position`` counts from 1 over the jobs of everybody, and is None for one that stands aside;
    ``why`` says what it waits for."""

    position: int | None
    id: str
    name: str
    user: str
    priority: int
    submitted_at: float
    why: str | None = None
    held: bool = False


class Policy(Word):
    """What a job that does not fit yet means for those behind it.

    ``fifo``: nothing overtakes it. ``traverse``: jobs of its own priority that fit may start, none of a lower one.
    ``backfill``: whatever fits may start if it is over (``timeouts.run_s``) before it could delay anybody ahead.
    """

    FIFO = "fifo"
    TRAVERSE = "traverse"
    BACKFILL = "backfill"


class Note(Model):
    """One change of a job on its way to the store: ``at`` is seconds since the epoch, ``attempt`` counts from 0."""

    at: float
    kind: str
    state: JobState
    reason: Reason
    attempt: int
    instance: str | None = None
    message: str


class Event(Note):
    """A note as it was stored: ``seq`` rises over the whole store."""

    seq: int
    job_id: str


class Histogram(Model):
    """How long something took: pairs of seconds and how many took at most so long; ``count`` and ``sum_s`` are of all."""

    buckets: tuple[tuple[float, int], ...]
    count: int
    sum_s: float


class Metrics(Model):
    """Figures about the jobs that a cluster's store keeps; they fall when old jobs are removed.

    ``jobs`` has every state. ``queue_wait_s``: from the submission until nodes were first chosen; ``launch_s``: from the
    (last) choice of an attempt's nodes until its start commands ran. ``attempts`` counts those that got nodes,
    ``endings`` ended jobs by reason.
    """

    jobs: dict[JobState, int]
    queue_wait_s: Histogram
    launch_s: Histogram
    attempts: int
    endings: dict[Reason, int]
