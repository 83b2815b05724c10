"""One job of two instances in every state that it can be in, reached by the events that lead there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raycontrol.events import (
    Held,
    InstanceClosed,
    InstancePrepared,
    JobEvent,
    NodesChosen,
    NodesRefused,
    NodesReleased,
    NodesReserved,
    Preempted,
    RunExited,
    StagePassed,
    StopRequested,
    Suspended,
)
from raycontrol.job import Ended, Job
from raycontrol.lifecycle import advance
from raycontrol.placement import Assignment
from raycontrol.plan import Facts
from raycontrol.spec import JobSpec, Retry, Timeouts

ASSIGNMENTS = (
    Assignment("master-0", "node-a", "host-a", "10.0.0.1"),
    Assignment("worker-0", "node-b", "host-b", "10.0.0.2"),
)
FACTS = {
    "master-0": Facts(
        "master-0", "10.0.0.1", "host-a", {"probe": "40001", "master": "40002"}, code_dir="/code"
    ),
    "worker-0": Facts("worker-0", "10.0.0.2", "host-b", {"probe": "40003"}, code_dir="/code"),
}
ATTEMPT = "digits-1.0"


def queued(**timeouts: Any) -> Job:
    """A job submitted at 1000 s, with the limits queue_s 100, run_s 200, grace_s 10 unless the test gives others.

    It is tried once, unless ``retry`` says otherwise.
    """
    retry = timeouts.pop("retry", Retry(infra_max=0))
    limits = Timeouts(**{"queue_s": 100, "run_s": 200, "grace_s": 10, **timeouts})
    spec = JobSpec(name="digits", command="torchrun train.py", nodes=2, timeouts=limits, retry=retry)
    return Job("digits-1", "east", spec, "ada", submitted_at=1000.0, since=1000.0)


def after(job: Job, *events: JobEvent) -> Job:
    """The job after these events."""
    for event in events:
        job = advance(job, event).job
    return job


def prepared(name: str, at: float = 1012.0, attempt: str = ATTEMPT) -> InstancePrepared:
    return InstancePrepared(at, attempt, name, FACTS[name])


def passed(name: str, stage: int, at: float = 1014.0, attempt: str = ATTEMPT) -> StagePassed:
    return StagePassed(at, attempt, name, stage)


def exited(name: str, at: float = 1020.0, attempt: str = ATTEMPT, **ended: Any) -> RunExited:
    """The start command's end; ``ended_at`` is when it happened, if earlier than it was told."""
    ended_at = ended.pop("ended_at", at)
    return RunExited(at, attempt, name, Ended(at=ended_at, **ended))


def closed(name: str, at: float = 1025.0, attempt: str = ATTEMPT) -> InstanceClosed:
    return InstanceClosed(at, attempt, name)


def placing(**timeouts: Any) -> Job:
    return after(queued(**timeouts), NodesChosen(1010.0, ASSIGNMENTS))


def preparing(**timeouts: Any) -> Job:
    return after(placing(**timeouts), NodesReserved(1011.0, ATTEMPT))


def starting(**timeouts: Any) -> Job:
    return after(preparing(**timeouts), prepared("master-0"), prepared("worker-0", 1013.0))


def last_stage(**timeouts: Any) -> Job:
    return after(starting(**timeouts), passed("master-0", 0), passed("worker-0", 0, 1015.0))


def running(**timeouts: Any) -> Job:
    return after(last_stage(**timeouts), passed("master-0", 1, 1016.0), passed("worker-0", 1, 1017.0))


def failing(**timeouts: Any) -> Job:
    """STOPPING towards FAILED: worker-0 exited 3, master-0 is being stopped."""
    return after(running(**timeouts), exited("worker-0", 1018.0, code=3, last_lines=("no labels found",)))


def giving_back() -> Job:
    """STOPPING towards QUEUED: the reservation did not come about."""
    return after(placing(), NodesRefused(1012.0, ATTEMPT, "host-b is full"))


def queued_again() -> Job:
    return after(giving_back(), NodesReleased(1013.0, ATTEMPT))


def finishing() -> Job:
    """STOPPING towards SUCCEEDED: both start commands exited 0, what they wrote is still being kept."""
    return after(running(), exited("master-0", 1018.0, code=0), exited("worker-0", 1018.0, code=0))


def killing() -> Job:
    """STOPPING towards STOPPED, forced."""
    return after(running(), StopRequested(1018.0, "asked by ada", force=True))


def releasing() -> Job:
    """STOPPING towards FAILED with nothing left but the nodes to give back."""
    return after(failing(), closed("master-0", 1019.0), closed("worker-0", 1019.0))


def held() -> Job:
    """QUEUED, and not to be started."""
    return after(queued(), Held(1005.0, "held by ada"))


def suspending() -> Job:
    """STOPPING towards QUEUED, where it will be held."""
    return after(running(), Suspended(1018.0, "suspended by ada"))


def making_room(**timeouts: Any) -> Job:
    """STOPPING towards QUEUED for a job of a higher priority."""
    return after(running(**timeouts), Preempted(1018.0, "urgent-1"))


def failing_once(**retry: Any) -> Job:
    """STOPPING towards FAILED, as long as it is not known for sure why; another attempt is allowed."""
    return failing(retry=Retry(**{"max": 1, "infra_max": 0, **retry}))


def trying_again(**retry: Any) -> Job:
    """STOPPING towards PLACING, on the same nodes."""
    return after(failing_once(**retry), closed("master-0", 1019.0), closed("worker-0", 1019.0))


def succeeded() -> Job:
    return after(
        finishing(), closed("master-0", 1019.0), closed("worker-0", 1019.0), NodesReleased(1019.5, ATTEMPT)
    )


def failed() -> Job:
    return after(releasing(), NodesReleased(1019.5, ATTEMPT))


def stopped() -> Job:
    return after(
        killing(), closed("master-0", 1019.0), closed("worker-0", 1019.0), NodesReleased(1019.5, ATTEMPT)
    )


def foreign(event: JobEvent) -> JobEvent:
    """The same news of an earlier reservation."""
    return replace(event, attempt_id="digits-1.99")  # type: ignore[call-arg]
