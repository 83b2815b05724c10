"""Every kind of fault in every state of a job, with and without retries, on a simulated cluster with a virtual clock.

Whatever happens: the job ends, in the state and for the reason that the table says; nothing of it runs twice at once,
a terminal state stays, nothing is left over, and what does not concern a job's instances does not end its attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import pytest

from raycontrol.events import StopRequested
from raycontrol.job import FENCE_S
from raycontrol.spec import Retry
from raycontrol.status import JobState, Reason
from tests.unit.fake_gangs import NOTICED_S, Program, nodes
from tests.unit.lifecycle_jobs import queued
from tests.unit.test_lifecycle_properties import check
from tests.unit.world import RESTART_S, Killed, World

HOUR_S = 3600.0
HOSTS = ("host-a", "host-b", "host-c", "host-d")
VICTIM = "worker-0"
NODE = "id-of-host-b"

Upset = Callable[[World], None]


def kill_controller(for_s: float) -> Upset:
    def upset(_: World) -> None:
        raise Killed(for_s)

    return upset


def archive_away(world: World) -> None:
    world.archive_back_at = world.now() + 60


def node_actor_away(world: World) -> None:
    world.servants_back_at[NODE] = world.now() + 20


def lose_host_without_controller(world: World) -> None:
    world.cut(NODE)
    raise Killed(30)


def set_clock_and_kill(step_s: float) -> Upset:
    def upset(world: World) -> None:
        world.set_clock(step_s)
        raise Killed

    return upset


def set_clock_and_kill_within_the_fence(step_s: float) -> Upset:
    """A head that starts again with a wrong clock, while a host that is cut off may run on."""

    def upset(world: World) -> None:
        world.cut(NODE)
        world.later(NOTICED_S + 10, lambda: set_clock_and_kill(step_s)(world))

    return upset


@dataclass(frozen=True)
class Kind:
    """A fault, and what it makes of the attempt in each state: the reason why that ends (none: it does not notice).

    The fault can come in the states ``only``.
    """

    upset: Upset
    ends: Mapping[str, Reason] = field(default_factory=dict)
    only: Collection[str] = ()


LOST = dict.fromkeys(("placing", "preparing", "starting", "running"), Reason.INSTANCE_LOST)
KINDS = {
    "the controller is killed": Kind(kill_controller(2)),
    "the controller is away for two minutes": Kind(kill_controller(120)),
    "the store is locked for 30 s": Kind(lambda world: world.lock_store(30)),
    "the clock is set back an hour": Kind(lambda world: world.set_clock(-HOUR_S)),
    "the clock is set back an hour and the controller is killed": Kind(set_clock_and_kill(-HOUR_S)),
    "the clock is set forward an hour and the controller is killed": Kind(set_clock_and_kill(HOUR_S)),
    "the archive is away for a minute": Kind(archive_away),
    "a node's actor is away for 20 s": Kind(node_actor_away),
    "a cable is out for 10 s": Kind(lambda world: world.cut(NODE, 10)),
    "an instance's actor is killed": Kind(lambda world: world.kill_actor(VICTIM), LOST),
    "a host crashes and refuses connections": Kind(lambda world: world.lose_node(NODE), LOST),
    "a host is cut off and says nothing": Kind(lambda world: world.cut(NODE), LOST),
    "a host is cut off while the controller is away": Kind(lose_host_without_controller, LOST),
    "a host is cut off, and the clock is set back and the controller killed within its fence": Kind(
        set_clock_and_kill_within_the_fence(-HOUR_S), LOST
    ),
    "a host is cut off, and the clock is set forward and the controller killed within its fence": Kind(
        set_clock_and_kill_within_the_fence(HOUR_S), LOST
    ),
    "a start command fails": Kind(
        lambda world: world.fail(VICTIM, 3),
        dict.fromkeys(("starting", "running"), Reason.INSTANCE_FAILED),
        only=("starting", "running"),
    ),
    # Before the reservation has come about it is simply made anew, on the nodes of the new Ray.
    "the head is lost, and a new one has its name and store": Kind(
        lambda world: world.lose_head(45), {**LOST, "placing": Reason.PLACEMENT_LOST}
    ),
}


def ask_to_stop(world: World) -> None:
    world.ask(StopRequested(world.now(), "asked by ada"))


def fail(world: World) -> None:
    world.fail("master-0", 7)


# The state in which the fault comes, and what has led there.
STATES: Mapping[str, tuple[JobState, Mapping[JobState, Upset]]] = {
    "queued": (JobState.QUEUED, {}),
    "placing": (JobState.PLACING, {}),
    "preparing": (JobState.PREPARING, {}),
    "starting": (JobState.STARTING, {}),
    "running": (JobState.RUNNING, {}),
    "stopping on demand": (JobState.STOPPING, {JobState.RUNNING: ask_to_stop}),
    "stopping after a failure": (JobState.STOPPING, {JobState.RUNNING: fail}),
    "stopping after success": (JobState.STOPPING, {}),
}


def world_of(kind: str, state: str, retries: int) -> World:
    at, before = STATES[state]
    job = queued(queue_s=None, run_s=None, retry=Retry(max=retries, infra_max=retries))
    return World(job, nodes(*HOSTS), upsets={**before, at: KINDS[kind].upset}, pace_s=1.0)


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize(
    ("kind", "state"),
    [(kind, state) for kind in KINDS for state in STATES if state in (KINDS[kind].only or STATES)],
)
def test_a_fault_in_a_state(kind: str, state: str, retries: int) -> None:
    world = world_of(kind, state, retries)
    job = world.run()
    world.run_out()
    check(world)
    assert world.job == job
    assert world.lasted_s() < 5 * 60
    cause = cause_of(kind, state)
    ended = [attempt.reason for attempt in job.past]
    match state, cause:
        case ("stopping on demand", _):
            assert (job.state, job.reason, job.attempt) == (JobState.STOPPED, Reason.STOP_REQUESTED, 0)
        case (_, None | Reason.PLACEMENT_LOST):
            assert (job.state, job.reason, job.attempt) == (JobState.SUCCEEDED, Reason.COMPLETED, 0)
            assert ended == [Reason.COMPLETED]
            assert set(world.starts.values()) == {1} and len(world.starts) == 2
        case (_, reason) if retries == 0:
            assert (job.state, job.reason) == (JobState.FAILED, reason)
            assert job.verdict is not None and job.verdict.instance in blamed(kind, state)
        case (_, reason):
            assert (job.state, job.reason) == (JobState.SUCCEEDED, Reason.COMPLETED)
            assert ended == [reason, Reason.COMPLETED]
            assert job.retries + job.infra_retries == 1


def cause_of(kind: str, state: str) -> Reason | None:
    """Why the first attempt fails."""
    return Reason.INSTANCE_FAILED if state == "stopping after a failure" else KINDS[kind].ends.get(state)


def blamed(kind: str, state: str) -> set[str]:
    if state == "stopping after a failure":
        return {"master-0"}
    return {VICTIM, "master-0"} if "head" in kind else {VICTIM}


def test_the_next_attempt_waits_for_the_fence_of_a_host_that_says_nothing() -> None:
    world = world_of("a host is cut off and says nothing", "running", 2)
    world.run()
    cut = next(note.at for note in world.notes if note.state is JobState.RUNNING) + 0.1
    again = next(note.at for note in world.notes if note.attempt == 1 and note.kind == "NodesChosen")
    assert again - cut == pytest.approx(NOTICED_S + FENCE_S, abs=1)


def test_the_time_to_wait_for_nodes_begins_when_the_fence_of_a_silent_host_is_over() -> None:
    world = World(
        queued(queue_s=30, run_s=None, retry=Retry(infra_max=2)),
        nodes(*HOSTS),
        {VICTIM: Program(seconds=100)},
        upsets={JobState.RUNNING: lambda world: world.cut(NODE)},
    )
    ended = world.run()
    assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1)


@pytest.mark.parametrize("step_s", [-HOUR_S, HOUR_S])
def test_the_fence_holds_though_the_clock_is_set_and_the_controller_starts_again(step_s: float) -> None:
    job = queued(queue_s=None, run_s=None, retry=Retry(infra_max=2))
    world = World(
        job,
        nodes(*HOSTS),
        {VICTIM: Program(seconds=100)},
        upsets={JobState.RUNNING: set_clock_and_kill_within_the_fence(step_s)},
    )
    world.run()
    check(world)
    assert world.job.attempt == 1
    assert world.lasted_s() == pytest.approx(NOTICED_S + 10 + RESTART_S + FENCE_S + 100, abs=5)


def test_a_clock_that_is_set_back_gives_no_time_to_a_job_though_the_controller_starts_again() -> None:
    world = World(
        queued(run_s=200),
        nodes(*HOSTS),
        {VICTIM: Program(seconds=None)},
        upsets={JobState.RUNNING: set_clock_and_kill(-HOUR_S)},
    )
    assert world.run().reason is Reason.RUN_TIMEOUT
    assert world.lasted_s() == pytest.approx(200, abs=20)


def test_a_pause_before_the_next_attempt_is_no_longer_though_the_clock_is_set_back() -> None:
    world = World(
        queued(queue_s=None, run_s=None, retry=Retry(max=1, backoff_s=60)),
        nodes(*HOSTS),
        {VICTIM: Program(seconds=5, code=3, heals=1)},
        upsets={JobState.STOPPING: lambda world: world.later(5, lambda: set_clock_and_kill(-HOUR_S)(world))},
    )
    assert world.run().state is JobState.SUCCEEDED
    assert world.lasted_s() == pytest.approx(5 + 60 + 10, abs=15)


class Hasty(World):
    """Its controller takes Ray's word for it that a node is dead."""

    def may_run_on(self, node_id: str) -> bool:
        return False


def test_two_attempts_at_once_would_be_seen_here() -> None:
    job = queued(queue_s=None, run_s=None, retry=Retry(infra_max=2))
    world = Hasty(
        job,
        nodes(*HOSTS),
        {VICTIM: Program(seconds=100)},
        upsets={JobState.RUNNING: lambda world: world.cut(NODE)},
    )
    world.run()
    assert world.faults[0] == "digits-1.1 runs beside {'digits-1.0'}"
