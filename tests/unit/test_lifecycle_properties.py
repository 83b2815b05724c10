"""What holds for every course of events: no job runs twice, none hangs, and a killed controller is not noticed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raycontrol.events import Held, LetGo, Preempted, PriorityChanged, StopInstance, StopRequested, Suspended
from raycontrol.job import Job
from raycontrol.lifecycle import advance
from raycontrol.spec import Group, JobSpec, Mode, Placement, Retry, Timeouts
from raycontrol.status import JobState, Reason
from tests.unit.fake_gangs import Program, nodes
from tests.unit.test_lifecycle import EVENTS, JOBS
from tests.unit.world import World, ending

quick = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
HOSTS = ("host-a", "host-b", "host-c", "host-d")


def new_job(instances: int = 2, **timeouts: Any) -> Job:
    limits = Timeouts(**{"grace_s": 10, **timeouts})
    retry = Retry(infra_max=0)
    spec = JobSpec(name="digits", command="torchrun train.py", nodes=instances, timeouts=limits, retry=retry)
    return Job("digits-1", "east", spec, "ada", submitted_at=1000.0, since=1000.0)


def check(world: World) -> None:
    """What must be true when a job has ended, whatever happened on the way."""
    assert world.job.state.terminal
    assert world.faults == []
    assert world.left_over() == []
    assert max(world.starts.values(), default=0) <= 1
    retry = world.job.spec.retry
    assert world.job.retries <= retry.max and world.job.infra_retries <= retry.infra_max
    assert [attempt.number for attempt in world.job.past] == list(range(len(world.job.past)))


# A controller killed anywhere.

FAILS = Program(seconds=5, code=3)
STAYS = Program(seconds=None)

SCENES: dict[str, tuple[Any, ...]] = {
    # name: (job, programs, what else happens, state, reason)
    "trains": (new_job(), {}, {}, JobState.SUCCEEDED, Reason.COMPLETED),
    "one fails": (new_job(), {"worker-0": FAILS}, {}, JobState.FAILED, Reason.INSTANCE_FAILED),
    "one fails, a peer is deaf": (
        new_job(),
        {"worker-0": FAILS, "master-0": Program(seconds=None, deaf=True)},
        {},
        JobState.FAILED,
        Reason.INSTANCE_FAILED,
    ),
    "one cannot prepare": (
        new_job(),
        {"worker-0": Program(unready=True)},
        {},
        JobState.FAILED,
        Reason.PREPARE_FAILED,
    ),
    "one never prepares": (
        new_job(),
        {"worker-0": Program(silent=True)},
        {},
        JobState.FAILED,
        Reason.START_TIMEOUT,
    ),
    "runs too long": (new_job(run_s=30), {"master-0": STAYS}, {}, JobState.FAILED, Reason.RUN_TIMEOUT),
    "does not fit": (new_job(5, queue_s=30), {}, {}, JobState.FAILED, Reason.QUEUE_TIMEOUT),
    "is stopped": (
        new_job(),
        {"master-0": STAYS, "worker-0": STAYS},
        {"wishes": (StopRequested(1050.0, "asked by ada"),)},
        JobState.STOPPED,
        Reason.STOP_REQUESTED,
    ),
    "is stopped by force": (
        new_job(),
        {"master-0": Program(seconds=None, deaf=True), "worker-0": STAYS},
        {
            "wishes": (
                StopRequested(1050.0, "asked by ada"),
                StopRequested(1051.0, "asked by ada", force=True),
            )
        },
        JobState.STOPPED,
        Reason.STOP_REQUESTED,
    ),
    "is stopped on a host that hangs": (
        new_job(),
        {"master-0": STAYS, "worker-0": Program(seconds=None, hung=True)},
        {"wishes": (StopRequested(1050.0, "asked by ada"),)},
        JobState.STOPPED,
        Reason.STOP_REQUESTED,
    ),
    "a node is lost": (
        new_job(),
        {"master-0": STAYS, "worker-0": STAYS},
        {"losses": {"id-of-host-b": 1050.0}},
        JobState.FAILED,
        Reason.INSTANCE_LOST,
    ),
}


PS_GROUPS = {"chief": Group(), "worker": Group(count=2), "ps": Group(), "evaluator": Group()}
SERVES = {"ps-0": STAYS, "worker-0": STAYS, "worker-1": STAYS}


def ps_job(**timeouts: Any) -> Job:
    limits = Timeouts(**{"grace_s": 10, **timeouts})
    spec = JobSpec(
        name="digits",
        mode=Mode.PS,
        command="train",
        groups=PS_GROUPS,
        timeouts=limits,
        placement=Placement.PACK,
    )
    return replace(new_job(), spec=spec)


SCENES |= {
    "a chief decides": (
        ps_job(),
        {**SERVES, "evaluator-0": Program(seconds=40)},
        {},
        JobState.SUCCEEDED,
        Reason.COMPLETED,
    ),
    "an evaluator goes on too long": (
        ps_job(evaluator_wait_s=20),
        {**SERVES, "evaluator-0": STAYS},
        {},
        JobState.SUCCEEDED,
        Reason.COMPLETED,
    ),
    "an evaluator is not waited for after a stop": (
        ps_job(),
        {**SERVES, "evaluator-0": STAYS},
        {"wishes": (StopRequested(1050.0, "asked by ada"),)},
        JobState.SUCCEEDED,
        Reason.COMPLETED,
    ),
    "a parameter server leaves": (
        ps_job(),
        {**SERVES, "chief-0": STAYS, "ps-0": Program(seconds=5)},
        {},
        JobState.FAILED,
        Reason.INSTANCE_FAILED,
    ),
    "a worker of a chief fails": (
        ps_job(),
        {**SERVES, "chief-0": STAYS, "worker-1": FAILS},
        {},
        JobState.FAILED,
        Reason.INSTANCE_FAILED,
    ),
    "a chief is deaf to a stop": (
        ps_job(),
        {**SERVES, "chief-0": Program(seconds=None, deaf=True)},
        {"wishes": (StopRequested(1050.0, "asked by ada"),)},
        JobState.STOPPED,
        Reason.STOP_REQUESTED,
    ),
}


def world_of(scene: str, **more: Any) -> World:
    job, programs, events, _, _ = SCENES[scene]
    return World(job, nodes(*HOSTS), programs, **events, **more)


@pytest.mark.parametrize("scene", SCENES)
def test_a_kill_at_any_point_is_not_seen_in_how_a_job_ends(scene: str) -> None:
    undisturbed = world_of(scene)
    undisturbed.run()
    check(undisturbed)
    assert (undisturbed.job.state, undisturbed.job.reason) == SCENES[scene][3:]
    for point in range(1, undisturbed.points + 1):
        world = world_of(scene, kill_at=(point,))
        world.run()
        assert world.kills == 1
        check(world)
        assert ending(world.job) == ending(undisturbed.job), f"killed at point {point}"


@pytest.mark.parametrize("scene", ["trains", "one fails"])
def test_a_controller_killed_at_every_second_step_still_gets_through(scene: str) -> None:
    undisturbed = world_of(scene)
    undisturbed.run()
    world = world_of(scene, kill_at=range(2, 400, 7))
    world.run()
    check(world)
    assert world.kills > 5
    assert ending(world.job) == ending(undisturbed.job)


def test_a_reservation_that_is_refused_is_made_anew_and_a_kill_does_not_matter() -> None:
    def run(kill_at: tuple[int, ...]) -> World:
        world = World(new_job(), nodes(*HOSTS), kill_at=kill_at)
        world.refusals = 2
        world.run()
        check(world)
        return world

    undisturbed = run(())
    assert undisturbed.job.attempt_id == "digits-1.2"
    for point in range(1, undisturbed.points + 1):
        assert ending(run((point,)).job) == ending(undisturbed.job), f"killed at point {point}"


# Any order of events.

programs = st.builds(
    Program,
    seconds=st.sampled_from([None, 0.0, 0.5, 5.0, 60.0]),
    code=st.sampled_from([0, 0, 0, 1, 42]),
    silent=st.sampled_from([False] * 9 + [True]),
    unready=st.sampled_from([False] * 9 + [True]),
    deaf=st.booleans(),
    hung=st.sampled_from([False] * 9 + [True]),
)
times = st.sampled_from([1000.1, 1000.6, 1001.0, 1003.0, 1010.0, 1050.0])
stop_requests = st.builds(StopRequested, at=times, why=st.just("asked by ada"), force=st.booleans())
wishes = st.one_of(
    stop_requests.map(lambda stop: [stop]),
    st.builds(lambda at: [Preempted(at, "urgent-1")], times),
    st.builds(lambda at: [Held(at, "held by ada"), LetGo(at + 40, "let go by ada")], times),
    st.builds(lambda at: [Suspended(at, "suspended by ada"), LetGo(at + 25, "resumed by ada")], times),
    st.builds(lambda at: [PriorityChanged(at, 1, "priority 1, by ada")], times),
)
courses = st.fixed_dictionaries(
    {
        "delays": st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0, 4.0, 20.0, 50.0]), max_size=40),
        "wishes": st.lists(wishes, max_size=3).map(
            lambda wished: sorted(chain.from_iterable(wished), key=lambda event: event.at)
        ),
        "losses": st.dictionaries(st.sampled_from([f"id-of-{host}" for host in HOSTS]), times, max_size=2),
    }
)
gangs = st.fixed_dictionaries({"master-0": programs, "worker-0": programs, "worker-1": programs})
retries = st.builds(
    Retry, max=st.integers(0, 2), infra_max=st.integers(0, 2), backoff_s=st.sampled_from([0, 5.0])
)


@quick
@given(gangs, courses, retries, st.integers(0, 3))
def test_every_course_of_events_ends_and_commands_nothing_twice(
    gang: dict[str, Program], course: dict[str, Any], retry: Retry, refusals: int
) -> None:
    world = World(tried(retry), nodes(*HOSTS), gang, **course)
    world.refusals = refusals
    world.run()
    check(world)
    again = [command for command, times in Counter(world.commands).items() if times > 1]
    assert again == []


@quick
@given(gangs, courses, retries, st.sets(st.integers(1, 80), min_size=1, max_size=6))
def test_every_course_of_events_ends_though_the_controller_is_killed(
    gang: dict[str, Program], course: dict[str, Any], retry: Retry, kill_at: set[int]
) -> None:
    world = World(tried(retry), nodes(*HOSTS), gang, kill_at=sorted(kill_at), **course)
    world.run()
    check(world)


def tried(retry: Retry) -> Job:
    """A job of three that is tried so often."""
    job = new_job(3, queue_s=300, run_s=100)
    return replace(job, spec=job.spec.model_copy(update={"retry": retry}))


# Events in an order that no gang would produce.

named_events = st.sampled_from(sorted(EVENTS))


@quick
@given(st.sampled_from(sorted(JOBS)), st.lists(st.tuples(named_events, st.integers(0, 500)), max_size=30))
def test_events_in_no_order_break_nothing(state: str, course: list[tuple[str, int]]) -> None:
    job, at = JOBS[state], 1020.0
    for name, pause_s in course:
        at += pause_s
        event = replace(EVENTS[name], at=at)
        if hasattr(event, "attempt_id"):
            event = replace(event, attempt_id=job.attempt_id)
        step = advance(job, event)
        assert step.job.reservation - job.reservation in (0, 1)
        assert step.job.reservation == job.reservation or step.job.state is JobState.PLACING
        assert (step.job.ended_at is not None) == step.job.state.terminal
        assert (step.job.after is not None) == (step.job.state is JobState.STOPPING)
        assert not (step.job.state.terminal and any(not item.closed for item in step.job.instances))
        assert all(
            isinstance(c, StopInstance) or c not in step.commands[:i] for i, c in enumerate(step.commands)
        )
        job = step.job


@pytest.mark.parametrize("state", ["succeeded", "failed", "stopped"])
def test_a_terminal_state_takes_up_whatever_comes(state: str) -> None:
    job = JOBS[state]
    for event in EVENTS.values():
        assert advance(job, event) == (job, (), ())
