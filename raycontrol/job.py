"""A job as the controller knows it: its attempt, its instances, and how it is shown."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from raycontrol import backends, rdma, transports
from raycontrol.arrayspec import MARK, array_of, indices_of
from raycontrol.errors import PlanError, UsageError
from raycontrol.plan import Brief, Cause, Facts, Plan, RdmaUse
from raycontrol.spec import JobSpec
from raycontrol.status import (
    ArrayInfo,
    AttemptInfo,
    InstanceInfo,
    InstanceState,
    JobInfo,
    JobState,
    Reason,
    Variable,
    Verdict,
)

FENCE_S = 50.0
"""The ``fence_s`` of jobs that were stored without one, and of a site that has set none."""
EMBEDDED = "embedded-"
"""How the names of clusters begin that live inside one `raycontrol run`."""


@dataclass(frozen=True)
class Submission:
    """A job as it comes from a client. ``package`` is the digest of the packed working directory, already in the archive.

    The spec has the values of ``secret_env``, none is left open. The same ``key`` of the same user again submits nothing:
    it returns the job, or with another ``fingerprint`` (of what was asked for) it is refused. ``request_id`` is told in
    the job's first event, ``origin`` (where the request came from) in the controller's log.
    """

    job_id: str
    spec: JobSpec
    user: str
    package: str | None
    version: str
    key: str | None = None
    fingerprint: str | None = None
    request_id: str | None = None
    origin: str | None = None


@dataclass(frozen=True)
class Ended:
    """How a start command ended. ``at`` is epoch seconds of the controller's clock; ``error`` says why it could not be started.

    ``lost``: what watched over it went away, or could not begin (``process.Exit``).
    ``followed``: with the code that a world's end on another instance had, as calls of MPI launchers that meet do.
    """

    at: float
    code: int | None = None
    signal: int | None = None
    sender: str | None = None
    oom: bool = False
    error: str | None = None
    lost: bool = False
    cause: Cause | None = None
    last_lines: tuple[str, ...] = ()
    followed: bool = False


@dataclass(frozen=True)
class Broken:
    """The first part of an MPI world (of that number, if it is known) that ended abnormally, and on which instance."""

    at: float
    instance: str
    message: str
    world: int | None = None


@dataclass(frozen=True)
class Instance:
    """One instance of the current attempt, as the controller knows it.

    ``passed`` is the number of the last stage it reported as passed; ``ended`` is how its start command ended,
    ``service_ended`` how what it runs for the others did (its Ray node); ``quiet`` says that no process of it is left,
    ``closed`` that what it wrote is with the archive too (or that it is lost). ``transports`` are those by which NCCL
    has reached other nodes.
    """

    name: str
    group: str
    role: str
    index: int
    node_id: str
    node_name: str
    ip: str
    state: InstanceState = InstanceState.PLACED
    facts: Facts | None = None
    passed: int = -1
    ended: Ended | None = None
    service_ended: Ended | None = None
    quiet: bool = False
    closed: bool = False
    note: str | None = None
    transports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Progress:
    """How many members of an array have begun, in the order of their indices, and how many have ended how."""

    begun: int = 0
    succeeded: int = 0
    failed: int = 0
    stopped: int = 0

    @property
    def living(self) -> int:
        """How many have begun and not ended."""
        return self.begun - self.succeeded - self.failed - self.stopped


@dataclass(frozen=True)
class Job:
    """A job and its current attempt.

    ``attempt`` counts tries as a user sees them; ``reservation`` counts placements, so that the names made from it
    (actors, placement groups, marks of processes) are never used twice; ``placed_at`` is when the last one was decided on, and ``fence_s`` for how long what it runs on a host that
    cannot reach the head's host may run on (``fence``). ``after`` is where STOPPING leads to,
    ``failed_at`` when the verdict's first cause happened; with ``broken`` the attempt cannot
    succeed any more, unless its world is among ``failed_worlds``, whose launchers have said themselves that they failed.
    ``succeeded_with`` is the first exit code of those that decided that is not 0, once they have (``valid_exit_codes``).
    ``relieved``: the start command has ended itself what served it, as `ray stop` does.
    ``finish_by``: until then a job that has succeeded leaves those alone that may finish (``Plan.finishers``).

    ``held`` says who wants the job to wait. ``queued_at`` is when it came into the queue, or was let go, for the last time,
    ``not_before`` when its pause before the next attempt is over, and ``fenced_until`` until when a lost instance may run on. ``retries`` and ``infra_retries`` were used (``retries.again``);
    with ``unwanted`` no further one follows. The next attempt avoids the nodes with the ids ``avoided``. ``group`` is
    the attempt id that the placement group is named after: an earlier one's where the attempt has taken the group over.
    ``past`` are the attempts that have ended, the last ones; ``visited`` are the ids of the nodes of earlier reservations, where
    the job's folders are until it ends. ``found_ends`` are the ends of other jobs that it waits for (``dependencies``).
    ``index``: which member of an array it is; ``progress``: how far an array has come. ``drained`` are the names of the attempt's nodes that are to take nothing new.
    ``nodes_range`` is the range of nodes that the user has asked for: while an attempt has nodes, ``spec.nodes`` is how many.
    A job that has failed keeps its nodes until ``kept_until``, once (``was_kept``).
    """

    id: str
    cluster: str
    spec: JobSpec
    user: str
    submitted_at: float
    package: str | None = None
    state: JobState = JobState.QUEUED
    reason: Reason = Reason.SUBMITTED
    since: float = 0.0
    attempt: int = 0
    reservation: int = -1
    placed_at: float | None = None
    fence_s: float = FENCE_S
    instances: tuple[Instance, ...] = ()
    stage: int = 0
    after: JobState | None = None
    forced: bool = False
    verdict: Verdict | None = None
    failed_at: float | None = None
    broken: Broken | None = None
    failed_worlds: tuple[int, ...] = ()
    finish_by: float | None = None
    relieved: bool = False
    succeeded_with: int = 0
    pending: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    held: str | None = None
    queued_at: float | None = None
    not_before: float | None = None
    fenced_until: float | None = None
    retries: int = 0
    infra_retries: int = 0
    unwanted: bool = False
    avoided: tuple[str, ...] = ()
    group: str | None = None
    past: tuple[AttemptInfo, ...] = ()
    visited: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    nodes_range: str | None = None
    found_ends: dict[str, JobState | None] = field(default_factory=dict)
    index: int | None = None
    progress: Progress = Progress()
    kept_until: float | None = None
    was_kept: bool = False

    @property
    def is_array(self) -> bool:
        """Whether it is an array, which has members instead of instances."""
        return self.spec.array is not None and self.index is None

    @property
    def array_id(self) -> str | None:
        """The id of the array that it is a member of."""
        return array_of(self.id)

    @property
    def group_id(self) -> str:
        """What the placement group is named after."""
        return self.group or self.attempt_id

    @property
    def attempt_id(self) -> str:
        return f"{self.id}.{self.reservation}"

    @property
    def fault(self) -> Broken | None:
        """What has broken although no launcher has said so: with it, an exit 0 is no success."""
        return None if self.broken is None or self.broken.world in self.failed_worlds else self.broken

    @property
    def waits_until(self) -> float | None:
        """Before when no attempt begins, because of a pause or of a fence."""
        return max((at for at in (self.not_before, self.fenced_until) if at is not None), default=None)

    @property
    def brief(self) -> Brief:
        index = None if self.index is None else str(self.index)
        return Brief(self.id, self.spec.name or self.id, self.attempt, self.attempt_id, index)

    def ok(self, ended: Ended) -> bool:
        """Whether a start command that ended so has succeeded."""
        return self.spec.is_valid(ended.code)

    def instance(self, name: str) -> Instance:
        return next(item for item in self.instances if item.name == name)

    def with_instance(self, name: str, **changes: object) -> Job:
        """Return the job with this instance of it changed."""
        instances = tuple(
            replace(item, **changes) if item.name == name else item  # type: ignore[arg-type]
            for item in self.instances
        )
        return replace(self, instances=instances)

    def entered(self, state: JobState, reason: Reason, at: float) -> Job:
        """Return the job as it enters a state."""
        return replace(self, state=state, reason=reason, since=at)


def job_of(attempt_id: str) -> str:
    """Return the id of the attempt's job."""
    return attempt_id.rpartition(".")[0]


def plan_of(job: Job) -> Plan:
    """Return the plan of the current attempt; raises PlanError while facts are missing.

    It is asked for at every event; the plans of the last attempts are remembered by the very objects they were
    made of, which are kept, so that no other object can take their place. Only for the thread that advances jobs.
    """
    facts = tuple(_known(item) for item in job.instances)
    key = (id(job.spec), job.brief, tuple(map(id, facts)))
    if key not in _plans:
        if len(_plans) >= PLANS_KEPT:
            del _plans[next(iter(_plans))]
        _plans[key] = (job.spec, facts, backends.make_plan(job.spec, job.brief, facts))
    return _plans[key][2]


PLANS_KEPT = 64
_plans: dict[tuple[int, Brief, tuple[int, ...]], tuple[JobSpec, tuple[Facts, ...], Plan]] = {}


def checked_id(job_id: str) -> str:
    """Return the id if it can be part of paths and names; raises UsageError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", job_id):
        raise UsageError(
            f"job id: must be 1 to 80 letters, digits, '.', '_' or '-' and begin with a letter or digit, got {job_id!r}"
        )
    return job_id


def known_id(job_id: str) -> str:
    """Return the id if a job can have it, a member of an array among them; raises UsageError."""
    array_id = array_of(job_id)
    if array_id is None:
        return checked_id(job_id)
    if not re.fullmatch(r"\d{1,7}", job_id.removeprefix(f"{array_id}{MARK}"), re.ASCII):
        raise UsageError(f"job id: a member's must end with its index, got {job_id!r}")
    checked_id(array_id)
    return job_id


def info(job: Job, outputs: str | None = None, *, whole: bool = False) -> JobInfo:
    """Return the job as every surface shows it; ``whole``: with its spec, and what its plan says of network and RDMA."""
    plan = _plan_if_known(job) if whole else None
    return JobInfo(
        id=job.id,
        name=job.spec.name or job.id,
        user=job.user,
        mode=job.spec.mode,
        state=job.state,
        reason=job.reason,
        attempt=job.attempt,
        exit_code=_job_exit_code(job),
        verdict=job.verdict,
        priority=job.spec.priority,
        submitted_at=job.submitted_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        instances=tuple(_instance_info(item, plan) for item in job.instances),
        pending=job.pending,
        kept_until=job.kept_until,
        labels=job.spec.labels,
        cluster=job.cluster,
        outputs=outputs,
        rdma=_rdma_info(job, plan),
        attempts=job.past,
        index=job.index,
        array=_array_info(job),
        spec=job.spec.shown() if whole else None,
    )


def _array_info(job: Job) -> ArrayInfo | None:
    array, progress = job.spec.array, job.progress
    if array is None or not job.is_array:
        return None
    return ArrayInfo(
        indices=array.indices,
        parallel=array.parallel,
        fail_fast=array.fail_fast,
        members=len(indices_of(array.indices)),
        begun=progress.begun,
        living=progress.living,
        succeeded=progress.succeeded,
        failed=progress.failed,
        stopped=progress.stopped,
    )


def _plan_if_known(job: Job) -> Plan | None:
    """Return the plan; None while there are not all facts, and where there is none at all."""
    if not job.instances:
        return None
    try:
        return backends.make_plan(job.spec, job.brief, tuple(map(_known, job.instances)))
    except PlanError:
        return None


def _rdma_info(job: Job, plan: Plan | None) -> str | None:
    """What NCCL has said counts; before that, what was planned."""
    named = [name for item in job.instances for name in item.transports]
    seen = transports.usage(named)
    if plan is None or plan.rdma.use in (RdmaUse.OFF, RdmaUse.OPEN):
        return seen
    if plan.rdma.on:
        return seen or "not known yet"
    return seen if transports.over_rdma(named) else f"off: {rdma.told(plan.rdma.missing)}"


def _known(item: Instance) -> Facts:
    if item.facts is None:
        raise PlanError(f"{item.name} has not reported its facts yet")
    return item.facts


def _job_exit_code(job: Job) -> int | None:
    if job.is_array and not job.state.terminal:  # it has a verdict from its first failure on
        return None
    if job.verdict is not None:
        return job.verdict.exit_code
    return job.succeeded_with if job.reason is Reason.COMPLETED else None


def _instance_info(item: Instance, plan: Plan | None) -> InstanceInfo:
    return InstanceInfo(
        name=item.name,
        group=item.group,
        role=item.role,
        index=item.index,
        node=item.node_name,
        ip=item.ip,
        state=item.state,
        exit_code=item.ended.code if item.ended else None,
        signal=item.ended.signal if item.ended else None,
        note=item.note,
        gpus=item.facts.gpus if item.facts else (),
        variables=_variables(item, plan),
    )


def _variables(item: Instance, plan: Plan | None) -> dict[str, Variable]:
    """Return what was set about network and GPUs, with where it comes from."""
    if plan is None or item.facts is None:
        return {}
    if item.facts.hardware is None:  # an older version planned otherwise
        return {}
    environment = plan.environment[item.name]
    return {
        name: Variable(value=environment[name] or "", origin=origin)
        for name, origin in plan.origins.get(item.name, {}).items()
        if name not in plan.secret_env
    }
