"""The plan of a stored job, as ``raycontrol plan`` would show it, with what may be secret masked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raycontrol import backends
from raycontrol.api.models import JobPlan
from raycontrol.errors import JobNotFound, PlanError
from raycontrol.job import Job
from raycontrol.jobrows import read_job
from raycontrol.plan import SECRET, Facts, Plan, to_json
from raycontrol.specfaults import MASKED, is_secret_name
from raycontrol.store import Store


def stored_plan(home: Path, job_id: str) -> JobPlan:
    """Return the plan of the job's current attempt, else of its spec; raises JobNotFound and StoreError."""
    job = _stored_job(home, job_id)
    try:
        facts = _facts(job)
        plan = None if facts is None else backends.make_plan(job.spec, job.brief, facts)
    except PlanError:  # another version planned otherwise
        plan = None
    if plan is not None:
        return JobPlan(attempt=job.attempt, plan=shown(plan))
    return JobPlan(attempt=None, plan=shown(backends.plan_of(job.spec)))


def _facts(job: Job) -> tuple[Facts, ...] | None:
    """Return what the instances have reported; None until all have."""
    facts = tuple(item.facts for item in job.instances if item.facts is not None)
    return facts if facts and len(facts) == len(job.instances) else None


def shown(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON; a variable whose name speaks of a secret keeps its name only."""
    document = to_json(plan)
    document["environment"] = {
        instance: {name: _masked(name, value) for name, value in variables.items()}
        for instance, variables in document["environment"].items()
    }
    return document


def _masked(name: str, value: str | None) -> str | None:
    return MASKED if value not in (None, SECRET) and is_secret_name(name) else value


def _stored_job(home: Path, job_id: str) -> Job:
    store = Store.open_existing(home)
    if store is None:
        raise JobNotFound(job_id)
    with store:
        row = store.job(job_id)
    if row is None:
        raise JobNotFound(job_id)
    return read_job(row)
