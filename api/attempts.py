"""Which attempt of a job a request is about."""

from __future__ import annotations

from raycontrol.api.hubs import Hub
from raycontrol.api.problems import NotThere
from raycontrol.status import JobInfo


async def attempt_of(hub: Hub, job: JobInfo, wanted: int | None) -> int:
    """Return the attempt that is wanted, by default the current one; raises NotThere for one that never began.

    A guard hands on what the job was a moment ago: before an attempt is refused, it is looked at anew.
    """
    if wanted is None or wanted <= job.attempt:
        return job.attempt if wanted is None else wanted
    job_id = job.id
    last = (await hub.calls.ask(lambda door: door.glance(job_id))).attempt
    if wanted > last:
        raise NotThere(
            f"job {job_id!r} has no attempt {wanted}; they are counted from 0, and the last is {last}"
        )
    return wanted
