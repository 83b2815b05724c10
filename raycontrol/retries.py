"""What the end of an attempt means: its outcome, and whether another attempt follows. Pure.

Two budgets: ``retry.max`` is for the user's program, ``retry.infra_max`` for what it runs on. Preemption and suspension
count in neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from raycontrol.job import Job
from raycontrol.spec import Retry
from raycontrol.specparts import codes_of
from raycontrol.status import InstanceState, JobState, Outcome, Reason, Verdict, Word

LONGEST_PAUSE_S = 600.0
AVOIDED = 8
"""So many nodes at most are avoided because of an earlier attempt, the last ones."""


class Budget(Word):
    """Of what another attempt is counted."""

    NONE = "NONE"
    PROGRAM = "PROGRAM"
    INFRASTRUCTURE = "INFRASTRUCTURE"


class Ending(NamedTuple):
    """What comes of an attempt: its outcome, the budget that lets another one follow, and where the job goes without one."""

    outcome: Outcome
    budget: Budget = Budget.NONE
    after: JobState = JobState.FAILED


ENDS: Mapping[Reason, Ending] = {
    Reason.COMPLETED: Ending(Outcome.SUCCEEDED, after=JobState.SUCCEEDED),
    Reason.INSTANCE_FAILED: Ending(Outcome.FAILED, Budget.PROGRAM),
    Reason.OUT_OF_MEMORY: Ending(Outcome.FAILED),
    Reason.INSTANCE_LOST: Ending(Outcome.LOST, Budget.INFRASTRUCTURE),
    Reason.WORLD_BROKEN: Ending(Outcome.FAILED, Budget.INFRASTRUCTURE),
    Reason.PREPARE_FAILED: Ending(Outcome.FAILED, Budget.INFRASTRUCTURE),
    Reason.STAGE_FAILED: Ending(Outcome.FAILED, Budget.INFRASTRUCTURE),
    Reason.START_TIMEOUT: Ending(Outcome.FAILED, Budget.INFRASTRUCTURE),
    Reason.PLAN_FAILED: Ending(Outcome.FAILED),
    Reason.QUEUE_TIMEOUT: Ending(Outcome.FAILED),
    Reason.DEPENDENCY_FAILED: Ending(Outcome.FAILED),
    Reason.RUN_TIMEOUT: Ending(Outcome.FAILED),
    Reason.STOP_REQUESTED: Ending(Outcome.STOPPED, after=JobState.STOPPED),
    Reason.SUSPENDED: Ending(Outcome.STOPPED, after=JobState.QUEUED),
    Reason.PREEMPTED: Ending(Outcome.PREEMPTED, after=JobState.QUEUED),
}
"""By the reason for which an attempt ended."""


@dataclass(frozen=True)
class Again:
    """Another attempt: the ``number``-th of ``most`` that ``budget`` allows, after ``pause_s`` seconds.

    ``keeps_nodes``: on the same nodes, which are not given back meanwhile.
    """

    budget: Budget
    number: int
    most: int
    pause_s: float
    keeps_nodes: bool

    def __str__(self) -> str:
        nodes = " on the same nodes" if self.keeps_nodes else ""
        pause = f" in {self.pause_s:g} s at the earliest" if self.pause_s else ""
        return f"trying again{nodes}{pause} (retry {self.number} of {self.most})"


def again(job: Job) -> Again | None:
    """Return the attempt that follows the one that has failed, if one does."""
    assert job.verdict is not None, "only failures are tried again"
    budget = budget_of(job.verdict, job.spec.retry)
    used, most = {
        Budget.NONE: (0, 0),
        Budget.PROGRAM: (job.retries, job.spec.retry.max),
        Budget.INFRASTRUCTURE: (job.infra_retries, job.spec.retry.infra_max),
    }[budget]
    if used >= most:
        return None
    backoff_s = job.spec.retry.backoff_s
    pause_s = min(backoff_s * 2**used, LONGEST_PAUSE_S) if backoff_s else 0.0
    sound = all(item.state is not InstanceState.LOST for item in job.instances)
    keeps_nodes = budget is Budget.PROGRAM and sound and not job.drained and not pause_s and job.held is None
    return Again(budget, used + 1, most, pause_s, keeps_nodes)


def will_be_tried_again(job: Job) -> bool:
    """Whether the job is failing, as far as is known, and another attempt follows."""
    failing = job.state is JobState.STOPPING and job.after is JobState.FAILED
    return failing and not job.unwanted and again(job) is not None


def budget_of(verdict: Verdict, retry: Retry) -> Budget:
    """Return which budget an end is counted in; of a program, its exit code may decide (a signal's is 128 and its number)."""
    budget = ENDS[verdict.reason].budget
    if verdict.reason not in (Reason.INSTANCE_FAILED, Reason.OUT_OF_MEMORY):
        return budget
    code = verdict.exit_code if verdict.signal is None else 128 + verdict.signal
    if code in codes_of(retry.exit_codes.fail):
        return Budget.NONE
    if retry.exit_codes.retry:
        return Budget.PROGRAM if code in codes_of(retry.exit_codes.retry) else Budget.NONE
    return budget


def suspects(job: Job) -> tuple[str, ...]:
    """Return the ids of the nodes that the next attempt avoids, if the cluster can do without them: those where an
    instance was lost, or could not be made ready."""
    lost = [item.node_id for item in job.instances if item.state is InstanceState.LOST]
    verdict = job.verdict
    if verdict is not None and ENDS[verdict.reason].budget is Budget.INFRASTRUCTURE and not lost:
        lost = [item.node_id for item in job.instances if item.name == verdict.instance]
    return tuple(dict.fromkeys([*job.avoided, *lost]))[-AVOIDED:]
