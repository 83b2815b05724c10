"""What can happen to a job (events, in the past tense) and what can follow from it (commands, in the imperative)."""

from __future__ import annotations

from dataclasses import dataclass, field

from raycontrol.job import FENCE_S, Ended
from raycontrol.placement import Assignment
from raycontrol.plan import Facts
from raycontrol.status import JobState, Reason, Verdict

# Events: what happened. Those with ``attempt_id`` are dropped when they speak of another reservation than the current.


@dataclass(frozen=True)
class NodesChosen:
    """The queue has found room: one node for every instance, in the order of INDEX. ``fence_s`` is the site's at that time."""

    at: float
    assignments: tuple[Assignment, ...]
    fence_s: float = FENCE_S


@dataclass(frozen=True)
class PlacementDeferred:
    """The queue cannot place the job now; ``why`` is for a person."""

    at: float
    why: str


@dataclass(frozen=True)
class NodesReserved:
    at: float
    attempt_id: str


@dataclass(frozen=True)
class NodesRefused:
    """The reservation did not come about; the queue decides anew."""

    at: float
    attempt_id: str
    why: str


@dataclass(frozen=True)
class InstancePrepared:
    at: float
    attempt_id: str
    instance: str
    facts: Facts


@dataclass(frozen=True)
class InstanceFailed:
    """An instance could not prepare itself or get through a stage."""

    at: float
    attempt_id: str
    instance: str
    reason: Reason
    message: str


@dataclass(frozen=True)
class StagePassed:
    at: float
    attempt_id: str
    instance: str
    stage: int


@dataclass(frozen=True)
class RunExited:
    """The start command of an instance ended."""

    at: float
    attempt_id: str
    instance: str
    ended: Ended


@dataclass(frozen=True)
class ServiceEnded:
    """The service ``run`` of an instance (its node of the job's own Ray cluster) ended; ``asked``: by the job itself."""

    at: float
    attempt_id: str
    instance: str
    run: str
    ended: Ended
    asked: bool = False


@dataclass(frozen=True)
class InstanceNoted:
    """Something about an instance that a person should know and that changes nothing (log shipping paused, …)."""

    at: float
    attempt_id: str
    instance: str
    message: str


@dataclass(frozen=True)
class TransportSeen:
    """NCCL has said in the instance's log by which transport it reaches other nodes (``transports``)."""

    at: float
    attempt_id: str
    instance: str
    transport: str


@dataclass(frozen=True)
class WorldBroken:
    """A part of an MPI world (a daemon, its ssh connection) ended abnormally on the instance.

    mpirun may exit 0 all the same, so that such an attempt has failed, unless the launcher of that ``world`` (None: not
    known) failed itself and the start command went on.
    """

    at: float
    attempt_id: str
    instance: str
    message: str
    world: int | None = None


@dataclass(frozen=True)
class WorldFailed:
    """The MPI launcher of a world has said itself that it failed; what follows from that is for the start command to say."""

    at: float
    attempt_id: str
    instance: str
    world: int


@dataclass(frozen=True)
class RunsGone:
    """No process of the instance is left; what it wrote is on its way to the archive."""

    at: float
    attempt_id: str
    instance: str


@dataclass(frozen=True)
class InstanceClosed:
    """Nothing of the instance runs any more and what it wrote is with the archive (``unsaved`` bytes are not)."""

    at: float
    attempt_id: str
    instance: str
    unsaved: int = 0


@dataclass(frozen=True)
class InstanceLost:
    """The instance's actor or node is gone. ``until``: what it ran may run on until then, on a host that does not answer."""

    at: float
    attempt_id: str
    instance: str
    why: str
    until: float | None = None


@dataclass(frozen=True)
class NodesReleased:
    """Nothing of the attempt is left on its nodes; ``kept``: but the placement group, for the next one."""

    at: float
    attempt_id: str
    kept: bool = False


@dataclass(frozen=True)
class NodeDrained:
    """Somebody wants nothing new on the node of this name."""

    at: float
    node: str
    why: str


@dataclass(frozen=True)
class StopRequested:
    at: float
    why: str
    force: bool = False


@dataclass(frozen=True)
class Held:
    """Somebody wants the waiting job to wait until it is let go."""

    at: float
    why: str


@dataclass(frozen=True)
class LetGo:
    """A job that was held, or suspended, may start again."""

    at: float
    why: str


@dataclass(frozen=True)
class Suspended:
    """Somebody wants the job to give its nodes back and to wait until it is let go."""

    at: float
    why: str


@dataclass(frozen=True)
class Preempted:
    """The queue wants the job's nodes for another job; it comes back to the queue."""

    at: float
    for_job: str


@dataclass(frozen=True)
class PriorityChanged:
    at: float
    priority: int
    why: str


@dataclass(frozen=True)
class MemberChosen:
    """The queue has found room for the next member of an array; ``fence_s`` as in ``NodesChosen``."""

    at: float
    index: int
    assignments: tuple[Assignment, ...]
    fence_s: float = FENCE_S


@dataclass(frozen=True)
class MemberEnded:
    """A member of an array has ended, its further attempts included."""

    at: float
    index: int
    state: JobState
    verdict: Verdict | None


@dataclass(frozen=True)
class AwaitedEnded:
    """Another job, which this one waits for, has ended so; ``state`` None: it was removed, nobody knows how it ended."""

    at: float
    job_id: str
    state: JobState | None


@dataclass(frozen=True)
class TimePassed:
    """The clock reached ``deadline(job)``."""

    at: float


Report = (
    InstancePrepared
    | InstanceFailed
    | StagePassed
    | RunExited
    | ServiceEnded
    | InstanceNoted
    | TransportSeen
    | WorldBroken
    | WorldFailed
    | RunsGone
    | InstanceClosed
)
"""What instances report."""
JobEvent = (
    NodesChosen
    | PlacementDeferred
    | NodesReserved
    | NodesRefused
    | Report
    | InstanceLost
    | NodesReleased
    | NodeDrained
    | StopRequested
    | Held
    | LetGo
    | Suspended
    | Preempted
    | PriorityChanged
    | AwaitedEnded
    | MemberChosen
    | MemberEnded
    | TimePassed
)


# Commands: what the controller has to do. Each is idempotent by attempt and instance.


@dataclass(frozen=True)
class ReserveNodes:
    attempt_id: str


@dataclass(frozen=True)
class WatchInstance:
    """Tell when the instance's actor or node is gone."""

    attempt_id: str
    instance: str


@dataclass(frozen=True)
class PrepareInstance:
    attempt_id: str
    instance: str


@dataclass(frozen=True)
class CarryOutStage:
    attempt_id: str
    instance: str
    stage: int


@dataclass(frozen=True)
class StopInstance:
    """TERM, ``grace_s`` seconds, KILL; then ship what is left and report closed. Not commanded again for a better ``why``."""

    attempt_id: str
    instance: str
    grace_s: float
    why: str = field(compare=False)


@dataclass(frozen=True)
class ReleaseNodes:
    """Remove actors, placement group (unless ``keep``) and, if ``last``, what the job keeps on its nodes between attempts."""

    attempt_id: str
    last: bool
    keep: bool = False


Command = ReserveNodes | WatchInstance | PrepareInstance | CarryOutStage | StopInstance | ReleaseNodes
