"""Who has which part in a job's attempt, as its plan names them, and how far they have come. Pure."""

from __future__ import annotations

from typing import NamedTuple

from raycontrol.errors import PlanError
from raycontrol.job import Ended, Instance, Job, plan_of
from raycontrol.plan import Plan
from raycontrol.status import InstanceState

LEFT_EARLY_S = 10.0
"""How long the deciders have to end, too, once an instance that serves them has exited 0: its end may be told first."""

NO_PLAN = Plan("", {}, {}, (), frozenset())


def known_plan(job: Job) -> Plan:
    """Return the plan; as long as there is none nothing of a job runs, and nobody has a part in it."""
    try:
        return plan_of(job)
    except PlanError:
        return NO_PLAN


def decided(job: Job) -> bool:
    """Whether every start command that decides has exited 0, or with another code that is valid."""
    deciders = plan_of(job).deciders
    ends = [item.ended for item in job.instances if item.name in deciders]
    return all(ended is not None and job.ok(ended) for ended in ends)


def code_of_deciders(job: Job) -> int:
    """Return the first exit code, in the order of INDEX, that is not 0; 0 where all are."""
    deciders = plan_of(job).deciders
    codes = [item.ended.code for item in job.instances if item.name in deciders and item.ended is not None]
    return next((code for code in codes if code), 0)


def still_finishing(job: Job) -> list[Instance]:
    """Return those that may go on when the deciders have ended, and do."""
    finishers = known_plan(job).finishers
    return [item for item in job.instances if item.name in finishers and works(item)]


def works(item: Instance) -> bool:
    return item.ended is None and not item.quiet and not item.closed and item.state is not InstanceState.LOST


class Left(NamedTuple):
    """An instance that serves the others and has exited 0."""

    instance: Instance
    ended: Ended

    @property
    def until(self) -> float:
        """The deciders have until then."""
        return self.ended.at + LEFT_EARLY_S


def left_early(job: Job) -> Left | None:
    """Return the first server whose start command has ended; before the deciders have, that is too early."""
    if all(item.ended is None for item in job.instances):
        return None  # the clock asks this of all jobs, and a plan takes its time
    plan = known_plan(job)
    servers = plan.servers - plan.deciders
    left = [
        Left(item, item.ended) for item in job.instances if item.name in servers and item.ended is not None
    ]
    return min(left, key=lambda found: found.ended.at, default=None)
