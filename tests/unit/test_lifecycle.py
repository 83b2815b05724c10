"""The lifecycle as a table, and the rules that a table cannot hold: verdicts, deadlines, exit status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raycontrol.demands import SHIPPING_S, STOP_SLACK_S, deadline, duties
from raycontrol.events import (
    CarryOutStage,
    Command,
    Held,
    InstanceFailed,
    InstanceLost,
    InstanceNoted,
    InstancePrepared,
    JobEvent,
    LetGo,
    NodesChosen,
    NodesRefused,
    NodesReleased,
    NodesReserved,
    PlacementDeferred,
    Preempted,
    PrepareInstance,
    PriorityChanged,
    ReleaseNodes,
    ReserveNodes,
    RunExited,
    RunsGone,
    ServiceEnded,
    StopInstance,
    StopRequested,
    Suspended,
    TimePassed,
    TransportSeen,
    WatchInstance,
    WorldBroken,
    WorldFailed,
)
from raycontrol.hardware import Essentials, Hca
from raycontrol.job import Ended, Job, info, plan_of
from raycontrol.lifecycle import Step, advance
from raycontrol.plan import Cause
from raycontrol.spec import JobSpec, Mode, Rdma, Resources
from raycontrol.status import InstanceState, JobInfo, JobState, Reason, Variable, Verdict
from raycontrol.verdicts import describe_end
from tests.unit import lifecycle_jobs as jobs
from tests.unit.lifecycle_jobs import ASSIGNMENTS, ATTEMPT, after, closed, exited, passed, prepared

JOBS = {
    "queued": jobs.queued(),
    "placing": jobs.placing(),
    "giving_back": jobs.giving_back(),
    "queued_again": jobs.queued_again(),
    "preparing": jobs.preparing(),
    "starting": jobs.starting(),
    "last_stage": jobs.last_stage(),
    "running": jobs.running(),
    "failing": jobs.failing(),
    "finishing": jobs.finishing(),
    "killing": jobs.killing(),
    "releasing": jobs.releasing(),
    "held": jobs.held(),
    "suspending": jobs.suspending(),
    "making_room": jobs.making_room(),
    "failing_once": jobs.failing_once(),
    "trying_again": jobs.trying_again(),
    "succeeded": jobs.succeeded(),
    "failed": jobs.failed(),
    "stopped": jobs.stopped(),
}

EVENTS: dict[str, JobEvent] = {
    "nodes chosen": NodesChosen(1020.0, ASSIGNMENTS),
    "deferred": PlacementDeferred(1020.0, "no room"),
    "reserved": NodesReserved(1020.0, ATTEMPT),
    "refused": NodesRefused(1020.0, ATTEMPT, "host-b is full"),
    "prepared": prepared("worker-0", 1020.0),
    "not prepared": InstanceFailed(1020.0, ATTEMPT, "worker-0", Reason.PREPARE_FAILED, "no space"),
    "stage failed": InstanceFailed(1020.0, ATTEMPT, "worker-0", Reason.STAGE_FAILED, "no route"),
    "stage 0 passed": passed("worker-0", 0, 1020.0),
    "stage 1 passed": passed("worker-0", 1, 1020.0),
    "exited 0": exited("worker-0", 1020.0, code=0),
    "exited 3": exited("worker-0", 1020.0, code=3),
    "noted": InstanceNoted(1020.0, ATTEMPT, "worker-0", "its log waits on the node"),
    "world broken": WorldBroken(1020.0, ATTEMPT, "worker-0", "prted was ended by signal 9"),
    "world failed": WorldFailed(1020.0, ATTEMPT, "worker-0", 1),
    "service ended": ServiceEnded(1020.0, ATTEMPT, "worker-0", "ray-node", Ended(at=1020.0, code=1)),
    "runs gone": RunsGone(1020.0, ATTEMPT, "worker-0"),
    "closed": closed("worker-0", 1020.0),
    "lost": InstanceLost(1020.0, ATTEMPT, "worker-0", "its node left the cluster"),
    "released": NodesReleased(1020.0, ATTEMPT),
    "stop": StopRequested(1020.0, "asked by ada"),
    "forced stop": StopRequested(1020.0, "asked by ada", force=True),
    "held": Held(1020.0, "held by ada"),
    "let go": LetGo(1020.0, "let go by ada"),
    "suspended": Suspended(1020.0, "suspended by ada"),
    "preempted": Preempted(1020.0, "urgent-1"),
    "priority": PriorityChanged(1020.0, 1, "priority 1, by ada"),
    "released, kept": NodesReleased(1020.0, ATTEMPT, kept=True),
    "time": TimePassed(1020.0),
    "too late": TimePassed(9999.0),
}

# Every pair of state and event that is not here changes nothing, tells nothing and commands nothing.
# event | state | next state, where STOPPING leads to | reason | commands
TABLE = """
nodes chosen   | queued       | PLACING            | PLACED          | reserve
nodes chosen   | queued_again | PLACING            | PLACED          | reserve
deferred       | queued       | QUEUED             | WAITING         |
deferred       | queued_again | QUEUED             | WAITING         |
reserved       | placing      | PREPARING          | PLACED          | watch master-0, watch worker-0, prepare master-0, prepare worker-0
refused        | placing      | STOPPING>QUEUED    | PLACEMENT_LOST  | release
prepared       | preparing    | PREPARING          | PLACED          |
not prepared   | preparing    | STOPPING>FAILED    | PREPARE_FAILED  | stop master-0 10 s, stop worker-0 10 s
not prepared   | starting     | STOPPING>FAILED    | PREPARE_FAILED  | stop master-0 10 s, stop worker-0 10 s
not prepared   | last_stage   | STOPPING>FAILED    | PREPARE_FAILED  | stop master-0 10 s, stop worker-0 10 s
stage failed   | preparing    | STOPPING>FAILED    | STAGE_FAILED    | stop master-0 10 s, stop worker-0 10 s
stage failed   | starting     | STOPPING>FAILED    | STAGE_FAILED    | stop master-0 10 s, stop worker-0 10 s
stage failed   | last_stage   | STOPPING>FAILED    | STAGE_FAILED    | stop master-0 10 s, stop worker-0 10 s
stage 0 passed | starting     | STARTING           | PLACED          |
stage 1 passed | starting     | STARTING           | PLACED          |
stage 1 passed | last_stage   | STARTING           | PLACED          |
exited 0       | placing      | PLACING            | PLACED          |
exited 0       | giving_back  | STOPPING>QUEUED    | PLACEMENT_LOST  |
exited 0       | preparing    | PREPARING          | PLACED          |
exited 0       | starting     | STARTING           | PLACED          |
exited 0       | last_stage   | STARTING           | PLACED          |
exited 0       | running      | RUNNING            | STARTED         |
exited 0       | killing      | STOPPING>STOPPED   | STOP_REQUESTED  |
exited 0       | suspending   | STOPPING>QUEUED    | SUSPENDED       |
exited 0       | making_room  | STOPPING>QUEUED    | PREEMPTED       |
exited 3       | placing      | STOPPING>FAILED    | INSTANCE_FAILED | watch worker-0, stop worker-0 10 s
exited 3       | giving_back  | STOPPING>QUEUED    | PLACEMENT_LOST  |
exited 3       | preparing    | STOPPING>FAILED    | INSTANCE_FAILED | stop master-0 10 s, stop worker-0 10 s
exited 3       | starting     | STOPPING>FAILED    | INSTANCE_FAILED | stop master-0 10 s, stop worker-0 10 s
exited 3       | last_stage   | STOPPING>FAILED    | INSTANCE_FAILED | stop master-0 10 s, stop worker-0 10 s
exited 3       | running      | STOPPING>FAILED    | INSTANCE_FAILED | stop master-0 10 s, stop worker-0 10 s
exited 3       | killing      | STOPPING>STOPPED   | STOP_REQUESTED  |
exited 3       | suspending   | STOPPING>QUEUED    | SUSPENDED       |
exited 3       | making_room  | STOPPING>QUEUED    | PREEMPTED       |
noted          | placing      | PLACING            | PLACED          |
noted          | giving_back  | STOPPING>QUEUED    | PLACEMENT_LOST  |
noted          | preparing    | PREPARING          | PLACED          |
noted          | starting     | STARTING           | PLACED          |
noted          | last_stage   | STARTING           | PLACED          |
noted          | running      | RUNNING            | STARTED         |
noted          | failing      | STOPPING>FAILED    | INSTANCE_FAILED |
noted          | finishing    | STOPPING>SUCCEEDED | COMPLETED       |
noted          | killing      | STOPPING>STOPPED   | STOP_REQUESTED  |
noted          | releasing    | STOPPING>FAILED    | INSTANCE_FAILED |
noted          | suspending   | STOPPING>QUEUED    | SUSPENDED       |
noted          | making_room  | STOPPING>QUEUED    | PREEMPTED       |
noted          | failing_once | STOPPING>FAILED    | INSTANCE_FAILED |
noted          | trying_again | STOPPING>PLACING   | INSTANCE_FAILED |
world broken   | starting     | STARTING           | PLACED          |
world broken   | last_stage   | STARTING           | PLACED          |
world broken   | running      | RUNNING            | STARTED         |
world broken   | finishing    | STOPPING>FAILED    | WORLD_BROKEN    |
world failed   | starting     | STARTING           | PLACED          |
world failed   | last_stage   | STARTING           | PLACED          |
world failed   | running      | RUNNING            | STARTED         |
service ended  | placing      | PLACING            | PLACED          |
service ended  | giving_back  | STOPPING>QUEUED    | PLACEMENT_LOST  |
service ended  | preparing    | PREPARING          | PLACED          |
service ended  | starting     | STOPPING>FAILED    | INSTANCE_FAILED | stop master-0 10 s, stop worker-0 10 s
service ended  | last_stage   | STOPPING>FAILED    | INSTANCE_FAILED | stop master-0 10 s, stop worker-0 10 s
service ended  | running      | STOPPING>FAILED    | INSTANCE_FAILED | stop master-0 10 s, stop worker-0 10 s
service ended  | failing      | STOPPING>FAILED    | INSTANCE_FAILED |
service ended  | finishing    | STOPPING>SUCCEEDED | COMPLETED       |
service ended  | killing      | STOPPING>STOPPED   | STOP_REQUESTED  |
service ended  | releasing    | STOPPING>FAILED    | INSTANCE_FAILED |
service ended  | suspending   | STOPPING>QUEUED    | SUSPENDED       |
service ended  | making_room  | STOPPING>QUEUED    | PREEMPTED       |
service ended  | failing_once | STOPPING>FAILED    | INSTANCE_FAILED |
service ended  | trying_again | STOPPING>PLACING   | INSTANCE_FAILED |
runs gone      | giving_back  | STOPPING>QUEUED    | PLACEMENT_LOST  |
runs gone      | failing      | STOPPING>FAILED    | INSTANCE_FAILED |
runs gone      | finishing    | STOPPING>SUCCEEDED | COMPLETED       |
runs gone      | killing      | STOPPING>STOPPED   | STOP_REQUESTED  |
runs gone      | releasing    | STOPPING>FAILED    | INSTANCE_FAILED |
runs gone      | suspending   | STOPPING>QUEUED    | SUSPENDED       |
runs gone      | making_room  | STOPPING>QUEUED    | PREEMPTED       |
runs gone      | failing_once | STOPPING>FAILED    | INSTANCE_FAILED |
runs gone      | trying_again | STOPPING>PLACING   | INSTANCE_FAILED |
closed         | failing      | STOPPING>FAILED    | INSTANCE_FAILED |
closed         | finishing    | STOPPING>SUCCEEDED | COMPLETED       |
closed         | killing      | STOPPING>STOPPED   | STOP_REQUESTED  |
closed         | suspending   | STOPPING>QUEUED    | SUSPENDED       |
closed         | making_room  | STOPPING>QUEUED    | PREEMPTED       |
closed         | failing_once | STOPPING>FAILED    | INSTANCE_FAILED |
lost           | placing      | STOPPING>FAILED    | INSTANCE_LOST   | release for good
lost           | preparing    | STOPPING>FAILED    | INSTANCE_LOST   | stop master-0 10 s
lost           | starting     | STOPPING>FAILED    | INSTANCE_LOST   | stop master-0 10 s
lost           | last_stage   | STOPPING>FAILED    | INSTANCE_LOST   | stop master-0 10 s
lost           | running      | STOPPING>FAILED    | INSTANCE_LOST   | stop master-0 10 s
lost           | failing      | STOPPING>FAILED    | INSTANCE_FAILED |
lost           | finishing    | STOPPING>SUCCEEDED | COMPLETED       |
lost           | killing      | STOPPING>STOPPED   | STOP_REQUESTED  |
lost           | suspending   | STOPPING>QUEUED    | SUSPENDED       |
lost           | making_room  | STOPPING>QUEUED    | PREEMPTED       |
lost           | failing_once | STOPPING>FAILED    | INSTANCE_FAILED |
released       | giving_back  | QUEUED             | WAITING         |
released       | releasing    | FAILED             | INSTANCE_FAILED |
released       | trying_again | QUEUED             | WAITING         |
stop           | queued       | STOPPING>STOPPED   | STOP_REQUESTED  | release for good
stop           | placing      | STOPPING>STOPPED   | STOP_REQUESTED  | release for good
stop           | giving_back  | STOPPING>STOPPED   | STOP_REQUESTED  | release for good
stop           | queued_again | STOPPING>STOPPED   | STOP_REQUESTED  | release for good
stop           | preparing    | STOPPING>STOPPED   | STOP_REQUESTED  | stop master-0 10 s, stop worker-0 10 s
stop           | starting     | STOPPING>STOPPED   | STOP_REQUESTED  | stop master-0 10 s, stop worker-0 10 s
stop           | last_stage   | STOPPING>STOPPED   | STOP_REQUESTED  | stop master-0 10 s, stop worker-0 10 s
stop           | running      | STOPPING>STOPPED   | STOP_REQUESTED  | stop master-0 10 s, stop worker-0 10 s
stop           | held         | STOPPING>STOPPED   | STOP_REQUESTED  | release for good
stop           | suspending   | STOPPING>STOPPED   | STOP_REQUESTED  |
stop           | making_room  | STOPPING>STOPPED   | STOP_REQUESTED  |
stop           | failing_once | STOPPING>FAILED    | INSTANCE_FAILED |
stop           | trying_again | STOPPING>FAILED    | INSTANCE_FAILED | release for good
forced stop    | queued       | STOPPING>STOPPED   | STOP_REQUESTED  | release for good
forced stop    | placing      | STOPPING>STOPPED   | STOP_REQUESTED  | release for good
forced stop    | giving_back  | STOPPING>STOPPED   | STOP_REQUESTED  | release for good
forced stop    | queued_again | STOPPING>STOPPED   | STOP_REQUESTED  | release for good
forced stop    | preparing    | STOPPING>STOPPED   | STOP_REQUESTED  | stop master-0 0 s, stop worker-0 0 s
forced stop    | starting     | STOPPING>STOPPED   | STOP_REQUESTED  | stop master-0 0 s, stop worker-0 0 s
forced stop    | last_stage   | STOPPING>STOPPED   | STOP_REQUESTED  | stop master-0 0 s, stop worker-0 0 s
forced stop    | running      | STOPPING>STOPPED   | STOP_REQUESTED  | stop master-0 0 s, stop worker-0 0 s
forced stop    | failing      | STOPPING>FAILED    | INSTANCE_FAILED | stop master-0 0 s, stop worker-0 0 s
forced stop    | finishing    | STOPPING>SUCCEEDED | COMPLETED       | stop master-0 0 s, stop worker-0 0 s
forced stop    | releasing    | STOPPING>FAILED    | INSTANCE_FAILED |
forced stop    | held         | STOPPING>STOPPED   | STOP_REQUESTED  | release for good
forced stop    | suspending   | STOPPING>STOPPED   | STOP_REQUESTED  | stop master-0 0 s, stop worker-0 0 s
forced stop    | making_room  | STOPPING>STOPPED   | STOP_REQUESTED  | stop master-0 0 s, stop worker-0 0 s
forced stop    | failing_once | STOPPING>FAILED    | INSTANCE_FAILED | stop master-0 0 s, stop worker-0 0 s
forced stop    | trying_again | STOPPING>FAILED    | INSTANCE_FAILED | release for good
held           | queued       | QUEUED             | HELD            |
held           | queued_again | QUEUED             | HELD            |
let go         | held         | QUEUED             | WAITING         |
let go         | suspending   | STOPPING>QUEUED    | SUSPENDED       |
suspended      | queued       | QUEUED             | HELD            |
suspended      | placing      | STOPPING>QUEUED    | SUSPENDED       | release
suspended      | giving_back  | STOPPING>QUEUED    | PLACEMENT_LOST  |
suspended      | queued_again | QUEUED             | HELD            |
suspended      | preparing    | STOPPING>QUEUED    | SUSPENDED       | stop master-0 10 s, stop worker-0 10 s
suspended      | starting     | STOPPING>QUEUED    | SUSPENDED       | stop master-0 10 s, stop worker-0 10 s
suspended      | last_stage   | STOPPING>QUEUED    | SUSPENDED       | stop master-0 10 s, stop worker-0 10 s
suspended      | running      | STOPPING>QUEUED    | SUSPENDED       | stop master-0 10 s, stop worker-0 10 s
suspended      | making_room  | STOPPING>QUEUED    | PREEMPTED       |
suspended      | failing_once | STOPPING>FAILED    | INSTANCE_FAILED |
suspended      | trying_again | STOPPING>QUEUED    | INSTANCE_FAILED | release
preempted      | placing      | STOPPING>QUEUED    | PREEMPTED       | release
preempted      | preparing    | STOPPING>QUEUED    | PREEMPTED       | stop master-0 10 s, stop worker-0 10 s
preempted      | starting     | STOPPING>QUEUED    | PREEMPTED       | stop master-0 10 s, stop worker-0 10 s
preempted      | last_stage   | STOPPING>QUEUED    | PREEMPTED       | stop master-0 10 s, stop worker-0 10 s
preempted      | running      | STOPPING>QUEUED    | PREEMPTED       | stop master-0 10 s, stop worker-0 10 s
priority       | queued       | QUEUED             | SUBMITTED       |
priority       | queued_again | QUEUED             | WAITING         |
priority       | held         | QUEUED             | HELD            |
released, kept | trying_again | PLACING            | PLACED          | reserve
too late       | queued       | STOPPING>FAILED    | QUEUE_TIMEOUT   | release for good
too late       | placing      | STOPPING>QUEUED    | PLACEMENT_LOST  | release
too late       | queued_again | STOPPING>FAILED    | QUEUE_TIMEOUT   | release for good
too late       | preparing    | STOPPING>FAILED    | START_TIMEOUT   | stop master-0 10 s, stop worker-0 10 s
too late       | starting     | STOPPING>FAILED    | START_TIMEOUT   | stop master-0 10 s, stop worker-0 10 s
too late       | last_stage   | STOPPING>FAILED    | START_TIMEOUT   | stop master-0 10 s, stop worker-0 10 s
too late       | running      | STOPPING>FAILED    | RUN_TIMEOUT     | stop master-0 10 s, stop worker-0 10 s
too late       | failing      | STOPPING>FAILED    | INSTANCE_FAILED | stop master-0 0 s, stop worker-0 0 s
too late       | finishing    | STOPPING>SUCCEEDED | COMPLETED       | stop master-0 0 s, stop worker-0 0 s
too late       | killing      | STOPPING>STOPPED   | STOP_REQUESTED  | release for good
too late       | suspending   | STOPPING>QUEUED    | SUSPENDED       | stop master-0 0 s, stop worker-0 0 s
too late       | making_room  | STOPPING>QUEUED    | PREEMPTED       | stop master-0 0 s, stop worker-0 0 s
too late       | failing_once | STOPPING>FAILED    | INSTANCE_FAILED | stop master-0 0 s, stop worker-0 0 s
"""


def _cells() -> dict[tuple[str, str], tuple[str, str, str]]:
    rows = [[word.strip() for word in line.split("|")] for line in TABLE.strip().splitlines()]
    return {
        (event, state): (next_state, reason, commands) for event, state, next_state, reason, commands in rows
    }


CELLS = _cells()


def words(command: Command) -> str:
    match command:
        case ReserveNodes():
            return "reserve"
        case WatchInstance():
            return f"watch {command.instance}"
        case PrepareInstance():
            return f"prepare {command.instance}"
        case CarryOutStage():
            return f"stage {command.stage} {command.instance}"
        case StopInstance():
            return f"stop {command.instance} {command.grace_s:g} s"
        case ReleaseNodes():
            return "keep nodes" if command.keep else "release for good" if command.last else "release"


def told(commands: tuple[Command, ...]) -> str:
    return ", ".join(words(command) for command in commands)


def where(job: Job) -> str:
    return f"{job.state}>{job.after}" if job.after else job.state


def test_the_table_names_only_states_and_events_that_are_tried() -> None:
    assert {event for event, _ in CELLS} <= set(EVENTS)
    assert {state for _, state in CELLS} <= set(JOBS)
    assert {job.state for job in JOBS.values()} == set(JobState)


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_in_every_state(event: str) -> None:
    for state, job in JOBS.items():
        step = advance(job, EVENTS[event])
        if (event, state) in CELLS:
            assert (where(step.job), step.job.reason, told(step.commands)) == CELLS[event, state], state
            assert step != Step(job), state
        else:
            assert step == Step(job), state


def test_news_of_another_reservation_or_of_nobody_is_dropped_in_every_state() -> None:
    for event in EVENTS.values():
        for job in JOBS.values():
            if hasattr(event, "attempt_id"):
                assert advance(job, jobs.foreign(event)) == Step(job)
            if hasattr(event, "instance"):
                assert advance(job, replace(event, instance="worker-7")) == Step(job)  # type: ignore[call-arg]


def test_every_change_of_state_is_told_with_where_it_led_to_and_when() -> None:
    for event in EVENTS.values():
        for job in JOBS.values():
            step = advance(job, event)
            if step.job.state is not job.state:
                assert (step.notes[-1].state, step.notes[-1].reason) == (step.job.state, step.job.reason)
            assert {note.at for note in step.notes} <= {event.at}


# The way of a job that succeeds.


def test_a_job_that_succeeds_commands_each_step_once() -> None:
    job = jobs.queued()
    commands = []
    for event in (
        NodesChosen(1010.0, ASSIGNMENTS),
        NodesReserved(1011.0, ATTEMPT),
        prepared("worker-0"),
        prepared("master-0"),
        passed("master-0", 0),
        passed("worker-0", 0),
        passed("worker-0", 1),
        passed("master-0", 1),
        exited("worker-0", code=0),
        exited("master-0", code=0),
        closed("master-0"),
        closed("worker-0"),
        NodesReleased(1030.0, ATTEMPT),
    ):
        job, more, _ = advance(job, event)
        commands.append(told(more))
    assert commands == [
        "reserve",
        "watch master-0, watch worker-0, prepare master-0, prepare worker-0",
        "",
        "stage 0 master-0, stage 0 worker-0",
        "",
        "stage 1 master-0, stage 1 worker-0",
        "",
        "",
        "",
        "stop master-0 10 s, stop worker-0 10 s",
        "",
        "release for good",
        "",
    ]
    assert (job.state, job.reason, job.verdict) == (JobState.SUCCEEDED, Reason.COMPLETED, None)
    assert (job.started_at, job.ended_at) == (1014.0, 1030.0)
    assert [item.state for item in job.instances] == [InstanceState.EXITED, InstanceState.EXITED]


def test_the_story_of_a_job_is_in_its_notes() -> None:
    job, stories = jobs.preparing(), []
    for event in (
        prepared("master-0"),
        prepared("worker-0"),
        passed("master-0", 0),
        passed("worker-0", 0),
        passed("master-0", 1),
        passed("worker-0", 1),
        exited("worker-0", code=0),
        exited("master-0", code=0),
    ):
        job, _, notes = advance(job, event)
        stories += [(note.kind, note.instance, note.message) for note in notes]
    assert stories == [
        ("InstancePrepared", None, "prepared; stage: prove the network"),
        ("StagePassed", None, "every instance reaches the master; stage: start"),
        ("StagePassed", None, "start command running on 2 instances"),
        ("RunExited", "worker-0", "worker-0 exited 0"),
        ("RunExited", "master-0", "master-0 exited 0"),
        ("RunExited", None, "every start command that decides exited 0"),
    ]


def test_a_job_of_one_instance_has_no_network_to_prove() -> None:
    spec = JobSpec(name="digits", command="python train.py", nodes=1)
    job = Job("digits-1", "east", spec, "ada", submitted_at=1000.0)
    job = after(job, NodesChosen(1010.0, ASSIGNMENTS[:1]), NodesReserved(1011.0, ATTEMPT))
    step = advance(job, prepared("master-0"))
    assert told(step.commands) == "stage 0 master-0"
    assert after(step.job, passed("master-0", 0)).state is JobState.RUNNING


def test_start_commands_that_end_before_the_others_are_started_count() -> None:
    job = after(jobs.last_stage(), passed("worker-0", 1), exited("worker-0", code=0))
    assert job.state is JobState.STARTING
    job = after(job, exited("master-0", code=0), passed("master-0", 1))
    assert (where(job), job.reason) == ("STOPPING>SUCCEEDED", Reason.COMPLETED)
    assert job.started_at == 1014.0


def test_one_instance_that_exits_0_does_not_end_the_others() -> None:
    job = after(jobs.running(), exited("worker-0", code=0))
    assert job.state is JobState.RUNNING
    assert [item.state for item in job.instances] == [InstanceState.RUNNING, InstanceState.EXITED]


def test_a_waiting_job_says_why_and_is_silent_while_the_reason_stays() -> None:
    step = advance(jobs.queued(), PlacementDeferred(1001.0, "no room"))
    assert (step.job.pending, step.job.reason) == ("no room", Reason.WAITING)
    assert [note.message for note in step.notes] == ["waiting: no room"]
    assert advance(step.job, PlacementDeferred(1002.0, "no room")) == Step(step.job)
    assert after(step.job, NodesChosen(1003.0, ASSIGNMENTS)).pending is None


def test_names_of_a_reservation_are_never_used_twice() -> None:
    again = after(jobs.queued_again(), NodesChosen(1014.0, ASSIGNMENTS))
    assert (jobs.placing().attempt_id, again.attempt_id) == ("digits-1.0", "digits-1.1")
    assert (again.attempt, again.stage) == (0, 0)
    assert advance(again, NodesReserved(1015.0, ATTEMPT)) == Step(again)


def test_a_stop_while_nodes_are_given_back_cancels_the_return_to_the_queue() -> None:
    job = after(jobs.giving_back(), StopRequested(1020.0, "asked by ada"), NodesReleased(1021.0, ATTEMPT))
    assert (job.state, job.reason, job.ended_at) == (JobState.STOPPED, Reason.STOP_REQUESTED, 1021.0)


def test_stopping_an_unplaced_job_runs_through_stopping_to_stopped() -> None:
    job = after(jobs.queued(), StopRequested(1005.0, "asked by ada"), NodesReleased(1006.0, "digits-1.-1"))
    assert (job.state, job.reason, job.instances) == (JobState.STOPPED, Reason.STOP_REQUESTED, ())
    assert job.verdict == Verdict(reason=Reason.STOP_REQUESTED, summary="asked by ada")


def test_a_second_stop_changes_nothing_and_force_only_once() -> None:
    stopping = after(jobs.running(), StopRequested(1020.0, "asked by ada"))
    assert advance(stopping, StopRequested(1021.0, "asked by bob")) == Step(stopping)
    forced = after(stopping, StopRequested(1022.0, "asked by bob", force=True))
    assert (forced.forced, forced.since, forced.verdict) == (True, 1022.0, stopping.verdict)
    assert advance(forced, StopRequested(1023.0, "asked by bob", force=True)) == Step(forced)


def test_a_stop_after_the_verdict_does_not_change_it() -> None:
    failing, finishing = jobs.failing(), jobs.finishing()
    stop = StopRequested(1020.0, "asked by ada")
    assert after(failing, stop).verdict == failing.verdict
    assert after(
        finishing, stop, closed("master-0"), closed("worker-0"), NodesReleased(1021.0, ATTEMPT)
    ).state is (JobState.SUCCEEDED)


# Resuming.


@pytest.mark.parametrize(
    ("state", "commands"),
    [
        ("queued", ""),
        ("placing", "reserve"),
        ("preparing", "watch master-0, watch worker-0, prepare master-0, prepare worker-0"),
        ("starting", "watch master-0, watch worker-0, stage 0 master-0, stage 0 worker-0"),
        ("last_stage", "watch master-0, watch worker-0, stage 1 master-0, stage 1 worker-0"),
        ("running", "watch master-0, watch worker-0"),
        ("failing", "watch master-0, watch worker-0, stop master-0 10 s, stop worker-0 10 s"),
        ("killing", "watch master-0, watch worker-0, stop master-0 0 s, stop worker-0 0 s"),
        ("giving_back", "release"),
        ("releasing", "release for good"),
        ("succeeded", ""),
        ("failed", ""),
        ("stopped", ""),
    ],
)
def test_resume_commands_what_the_stored_state_demands(state: str, commands: str) -> None:
    assert told(duties(JOBS[state])) == commands


def test_resume_leaves_out_what_is_done() -> None:
    assert told(duties(after(jobs.preparing(), prepared("worker-0")))) == (
        "watch master-0, watch worker-0, prepare master-0"
    )
    assert told(duties(after(jobs.starting(), passed("master-0", 0)))) == (
        "watch master-0, watch worker-0, stage 0 worker-0"
    )
    assert told(duties(after(jobs.last_stage(), exited("worker-0", code=0)))) == (
        "watch master-0, watch worker-0, stage 1 master-0"
    )
    assert told(duties(after(jobs.failing(), closed("worker-0")))) == "watch master-0, stop master-0 10 s"


# Verdicts.


def test_the_verdict_names_the_first_instance_that_failed_and_its_last_words() -> None:
    lines = ("step 80", "no labels found")
    failed = exited("worker-0", code=3, last_lines=lines, cause=Cause(rank=1, exit_code=3))
    job = after(jobs.running(), failed)
    assert job.verdict == Verdict(
        reason=Reason.INSTANCE_FAILED,
        summary="worker-0 on host-b exited 3; its launcher names rank 1, exit code 3",
        instance="worker-0",
        exit_code=3,
        rank=1,
        rank_exit_code=3,
        last_lines=lines,
    )


def test_peers_are_marked_as_stopped_because_of_it() -> None:
    job = jobs.failing()
    assert [(item.name, item.state, item.note) for item in job.instances] == [
        ("master-0", InstanceState.STOPPING, "stopped: worker-0 failed"),
        ("worker-0", InstanceState.EXITED, None),
    ]
    job = after(job, exited("master-0", signal=15, sender="raycontrol: worker-0 on host-b exited 3"))
    assert [(item.name, item.state, item.note) for item in info(job).instances] == [
        ("master-0", InstanceState.EXITED, "stopped: worker-0 failed"),
        ("worker-0", InstanceState.EXITED, None),
    ]
    assert [item.signal for item in info(job).instances] == [15, None]
    assert job.verdict == jobs.failing().verdict


def test_an_instance_that_failed_earlier_but_was_heard_of_later_takes_the_blame() -> None:
    first_heard = exited("worker-0", 1020.0, code=1)
    really_first = exited("master-0", 1021.0, ended_at=1019.5, signal=9, oom=True)
    step = advance(after(jobs.running(), first_heard), really_first)
    assert step.job.verdict is not None
    assert (step.job.verdict.instance, step.job.verdict.reason) == ("master-0", Reason.OUT_OF_MEMORY)
    assert step.job.reason is Reason.OUT_OF_MEMORY
    assert where(step.job) == "STOPPING>FAILED"
    assert step.job.instance("master-0").note is None
    assert step.commands == ()


def test_peers_of_the_instance_that_takes_the_blame_are_marked_anew() -> None:
    spec = JobSpec(name="digits", command="torchrun train.py", nodes=3)
    rooms = (*ASSIGNMENTS, replace(ASSIGNMENTS[1], instance="worker-1"))
    job = after(
        Job("digits-1", "east", spec, "ada", submitted_at=1000.0),
        NodesChosen(1010.0, rooms),
        NodesReserved(1011.0, ATTEMPT),
        exited("worker-0", 1020.0, code=1),
        exited("worker-1", 1021.0, ended_at=1019.0, code=7),
    )
    assert [(item.name, item.note) for item in job.instances] == [
        ("master-0", "stopped: worker-1 failed"),
        ("worker-0", None),
        ("worker-1", None),
    ]


@pytest.mark.parametrize(
    "ended",
    [
        {"ended_at": 1018.5, "code": 1},  # later than the first
        {"ended_at": 1017.0, "code": 0},  # no failure
        {"ended_at": 1017.0, "signal": 15, "sender": "raycontrol: asked by ada"},  # we did it
    ],
)
def test_others_do_not_take_the_blame(ended: dict[str, Any]) -> None:
    failing = jobs.failing()
    assert after(failing, exited("master-0", 1021.0, **ended)).verdict == failing.verdict


def test_failures_before_a_stop_was_asked_for_do_not_change_that_it_was_stopped() -> None:
    job = after(
        jobs.running(),
        StopRequested(1020.0, "asked by ada"),
        exited("worker-0", 1021.0, ended_at=1019.0, code=1),
    )
    assert (where(job), job.verdict) == (
        "STOPPING>STOPPED",
        Verdict(reason=Reason.STOP_REQUESTED, summary="asked by ada"),
    )


def test_a_second_report_of_the_same_end_changes_nothing() -> None:
    failing = jobs.failing()
    assert advance(failing, exited("worker-0", 1018.0, code=3, last_lines=("no labels found",))) == Step(
        failing
    )


def test_an_instance_that_could_not_start_says_why_and_its_peers_that_it_failed() -> None:
    job = after(jobs.starting(), EVENTS["stage failed"])
    assert job.verdict == Verdict(
        reason=Reason.STAGE_FAILED, summary="worker-0: no route", instance="worker-0"
    )
    assert [item.note for item in job.instances] == ["stopped: worker-0 failed", "no route"]


def test_a_lost_instance_fails_the_job_and_is_not_waited_for() -> None:
    job = after(jobs.running(), InstanceLost(1020.0, ATTEMPT, "worker-0", "its node left the cluster"))
    assert job.verdict == Verdict(
        reason=Reason.INSTANCE_LOST,
        summary="worker-0 on host-b was lost: its node left the cluster",
        instance="worker-0",
    )
    assert job.instance("master-0").note == "stopped: worker-0 was lost"
    assert advance(job, exited("worker-0", code=0)) == Step(job)
    step = advance(job, closed("master-0"))
    assert told(step.commands) == "release for good"


def test_a_job_whose_instances_are_all_lost_gives_its_nodes_back() -> None:
    first = InstanceLost(1020.0, ATTEMPT, "worker-0", "its node left the cluster")
    step = advance(after(jobs.running(), first), replace(first, instance="master-0"))
    assert told(step.commands) == "release for good"
    assert step.job.verdict is not None and step.job.verdict.instance == "worker-0"


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        ({"code": 0}, "exited 0"),
        ({"code": 3}, "exited 3"),
        ({"signal": 9}, "was ended by signal 9 (not sent by raycontrol)"),
        (
            {"signal": 15, "sender": "raycontrol: asked by ada"},
            "was ended by signal 15 (raycontrol: asked by ada)",
        ),
        ({"code": 127, "error": "nosuch: not found"}, "could not run its start command: nosuch: not found"),
        ({"code": 1, "cause": Cause(2, -9)}, "exited 1; its launcher names rank 2, signal 9"),
        ({"code": 1, "cause": Cause(2, 42)}, "exited 1; its launcher names rank 2, exit code 42"),
        ({"code": 1, "cause": Cause(2)}, "exited 1; its launcher names rank 2"),
        ({"code": 1, "cause": Cause()}, "exited 1"),
        (
            {"signal": 9, "oom": True},
            "was ended by signal 9 (not sent by raycontrol); the kernel killed a process for want of memory",
        ),
    ],
)
def test_how_a_start_command_ended_in_words(ended: dict[str, Any], text: str) -> None:
    assert describe_end(Ended(at=1020.0, **ended)) == text


@pytest.mark.parametrize(
    ("ended", "hint"),
    [
        ({"code": 3}, None),
        (
            {"code": 1, "oom": True},
            "let it use less memory (a smaller batch, fewer data workers), or run it on a node that has more",
        ),
        (
            {"code": 127},
            "the command was not found: is it installed in this environment, or in `working_dir`?",
        ),
        ({"code": 126}, "the command is not executable: `chmod +x` it, or call its interpreter"),
        (
            {"signal": 9},
            "SIGKILL from outside: often the kernel's or the container's memory limit; see `dmesg` on the node",
        ),
        (
            {"code": 137},
            "SIGKILL from outside: often the kernel's or the container's memory limit; see `dmesg` on the node",
        ),
    ],
)
def test_a_verdict_gives_advice_where_it_can(ended: dict[str, Any], hint: str | None) -> None:
    job = after(jobs.running(), exited("worker-0", **ended))
    assert job.verdict is not None and job.verdict.hint == hint


def test_a_signal_of_ours_gets_no_advice_to_look_for_the_sender() -> None:
    job = after(jobs.running(), exited("worker-0", signal=9, sender="raycontrol: its instance ended"))
    assert job.verdict is not None
    assert (job.verdict.signal_sender, job.verdict.hint) == ("raycontrol: its instance ended", None)


def test_a_process_killed_for_memory_is_told_as_that() -> None:
    job = after(jobs.running(), exited("worker-0", code=1, oom=True))
    assert (job.reason, job.verdict and job.verdict.reason) == (Reason.OUT_OF_MEMORY, Reason.OUT_OF_MEMORY)


def test_bytes_that_were_not_saved_are_told() -> None:
    step = advance(jobs.failing(), replace(closed("worker-0"), unsaved=70))
    assert [note.message for note in step.notes] == ["worker-0: the last 70 bytes of its log were not saved"]


def test_a_job_for_which_no_plan_can_be_made_fails_before_anything_starts() -> None:
    """As when another version of raycontrol has prepared the instances."""
    job = jobs.preparing()
    job = replace(job, spec=job.spec.model_copy(update={"mode": Mode.RAY}))
    step = advance(after(job, prepared("worker-0")), prepared("master-0"))
    assert (where(step.job), step.job.reason) == ("STOPPING>FAILED", Reason.PLAN_FAILED)
    assert told(step.commands) == "stop master-0 10 s, stop worker-0 10 s"
    assert step.job.verdict is not None
    assert (
        step.job.verdict.summary
        == "mode ray needs a port for 'ray-monitor', which an instance has not reported"
    )


# Deadlines.


@pytest.mark.parametrize(
    ("state", "at"),
    [
        ("queued", 1100.0),  # submitted at 1000, queue_s 100
        ("queued_again", 1100.0),
        ("placing", 1025.0),  # since 1010, 15 s
        ("preparing", 1911.0),  # since 1011, 900 s
        ("starting", 1058.0),  # since 1013; the stage's 30 s, 15 s slack
        ("last_stage", 1090.0),  # since 1015; the stage's 60 s, 15 s slack
        ("running", 1217.0),  # since 1017, run_s 200
        ("failing", 1058.0),  # since 1018, grace_s 10, 30 s slack
        ("finishing", 1058.0),
        ("killing", 1048.0),  # forced: no grace
        ("giving_back", None),  # the cluster's work, tried until it is done
        ("releasing", None),
        ("succeeded", None),
        ("failed", None),
        ("stopped", None),
    ],
)
def test_the_deadline_of_every_state(state: str, at: float | None) -> None:
    job = JOBS[state]
    assert deadline(job) == at
    if at is not None:
        assert advance(job, TimePassed(at - 0.001)) == Step(job)
        assert advance(job, TimePassed(at)).job != job


@pytest.mark.parametrize("make", [jobs.queued, jobs.running])
def test_without_limits_a_job_waits_and_runs_for_ever(make: Any) -> None:
    job = make(queue_s=None, run_s=None)
    assert deadline(job) is None
    assert advance(job, TimePassed(1e12)) == Step(job)


def test_the_time_before_an_attempt_may_begin_is_none_that_a_job_waits_for_its_nodes() -> None:
    job = replace(jobs.queued(queue_s=30), not_before=1050.0)
    assert deadline(job) == 1080.0
    assert deadline(replace(job, not_before=990.0)) == 1030.0


def test_a_job_that_waited_too_long_says_what_for() -> None:
    job = after(jobs.queued(), PlacementDeferred(1001.0, "no room"), TimePassed(1100.0))
    assert job.verdict is not None
    assert job.verdict.summary == "not started within queue_s = 100 s (no room)"


def test_a_job_that_did_not_start_in_time_names_who_was_silent() -> None:
    half_prepared = after(jobs.preparing(), prepared("master-0"), TimePassed(9999.0))
    half_started = after(jobs.starting(), passed("worker-0", 0), TimePassed(9999.0))
    assert [job.verdict and job.verdict.summary for job in (half_prepared, half_started)] == [
        "PREPARING took too long; no word from worker-0",
        "STARTING took too long; no word from master-0",
    ]


def test_instances_that_do_not_answer_are_killed_and_then_given_up() -> None:
    job = after(jobs.failing(), closed("worker-0", 1019.0))
    step = advance(job, TimePassed(1058.0))
    assert (told(step.commands), step.job.since) == ("stop master-0 0 s", 1058.0)
    step = advance(step.job, TimePassed(1088.0))
    assert told(step.commands) == "release for good"
    assert [(item.name, item.state, item.note) for item in step.job.instances] == [
        ("master-0", InstanceState.LOST, "did not answer when it was stopped"),
        ("worker-0", InstanceState.EXITED, None),
    ]


def test_news_of_an_instance_does_not_move_the_deadline() -> None:
    job = after(jobs.running(), InstanceNoted(1100.0, ATTEMPT, "worker-0", "its log waits"))
    assert deadline(job) == 1217.0


# What the facts and NCCL tell.


def with_rdma(when: str, gpus: float = 1) -> Job:
    """The job prepared, with one GPU an instance on nodes that have RDMA."""
    spec = jobs.queued().spec.model_copy(
        update={"rdma": Rdma(when=when, min_gpus=1), "resources": Resources(gpu=gpus)}
    )
    hca = Hca("mlx5_0", 1, up=True, link_layer="InfiniBand", provider=True)
    hardware = Essentials(gpus=1, verbs=True, hcas=(hca,))
    job = replace(jobs.preparing(), spec=spec)
    for name, facts in jobs.FACTS.items():
        job = after(job, InstancePrepared(1012.0, ATTEMPT, name, replace(facts, hardware=hardware)))
    return job


def seen(name: str, transport: str) -> TransportSeen:
    return TransportSeen(1030.0, ATTEMPT, name, transport)


def test_what_the_facts_tell_is_among_the_events() -> None:
    job = jobs.preparing()
    job = replace(job, spec=job.spec.model_copy(update={"resources": Resources(gpu=1)}))
    bare = {name: replace(facts, hardware=Essentials(gpus=1)) for name, facts in jobs.FACTS.items()}
    job = after(job, InstancePrepared(1012.0, ATTEMPT, "master-0", bare["master-0"]))
    step = advance(job, InstancePrepared(1012.0, ATTEMPT, "worker-0", bare["worker-0"]))
    assert step.notes[-1].message.startswith(
        "prepared; RDMA stays off: master-0, worker-0 ask for fewer GPUs than "
    )


@pytest.mark.parametrize(
    ("when", "transports", "text"),
    [
        ("on", (), "not known yet"),
        ("on", ("IB/GDRDMA",), "in use (GDRDMA)"),
        ("on", ("Socket",), "not in use: NET/Socket"),
        ("off", (), None),
        ("off", ("Socket",), "not in use: NET/Socket"),
    ],
)
def test_info_says_whether_rdma_is_really_used(
    when: str, transports: tuple[str, ...], text: str | None
) -> None:
    job = after(with_rdma(when), *(seen("worker-0", transport) for transport in transports))
    assert info(job, whole=True).rdma == text


def test_a_transport_is_told_once_and_sockets_are_warned_of_when_rdma_is_on() -> None:
    step = advance(with_rdma("on"), seen("worker-0", "Socket"))
    assert [note.message for note in step.notes] == [
        "worker-0: NCCL reaches other nodes via NET/Socket although RDMA is on: look for `NET/IB` in its log, "
        "which says why"
    ]
    assert advance(step.job, seen("worker-0", "Socket")).notes == ()
    (note,) = advance(with_rdma("off"), seen("worker-0", "Socket")).notes
    assert note.message == "worker-0: NCCL reaches other nodes via NET/Socket"


def test_info_shows_what_was_set_about_the_network_and_where_it_comes_from() -> None:
    job = with_rdma("on")
    assert info(job, whole=True).instances[0].variables["NCCL_IB_HCA"] == Variable(
        value="=mlx5_0:1", origin="the active InfiniBand ports"
    )
    assert info(job).instances[0].variables == {}
    assert info(jobs.preparing(), whole=True).instances[0].variables == {}


# What a stop tells an instance.


def test_a_stop_tells_the_instances_why() -> None:
    job = after(jobs.running(), StopRequested(1020.0, "asked by ada"))
    assert [command.why for command in duties(job) if isinstance(command, StopInstance)] == [
        "asked by ada"
    ] * 2
    assert [command.why for command in duties(jobs.finishing()) if isinstance(command, StopInstance)] == [
        "the job's work is done"
    ] * 2


# Exit codes and exit status.


@pytest.mark.parametrize(
    ("job", "exit_code"),
    [
        (jobs.queued(), None),
        (jobs.running(), None),
        (jobs.succeeded(), 0),
        (jobs.failed(), 3),
        (jobs.stopped(), None),
        (after(jobs.running(), exited("worker-0", signal=9)), None),
        (after(jobs.running(), TimePassed(9999.0)), None),
    ],
)
def test_the_exit_code_of_a_job_is_that_of_the_start_command(job: Job, exit_code: int | None) -> None:
    assert info(job).exit_code == exit_code


def test_info_shows_the_whole_job() -> None:
    assert info(jobs.failed(), outputs="/home/jobs/digits-1/outputs").model_dump(mode="json") == {
        "id": "digits-1",
        "name": "digits",
        "user": "ada",
        "mode": "ddp",
        "state": "FAILED",
        "reason": "INSTANCE_FAILED",
        "attempt": 0,
        "exit_code": 3,
        "verdict": {
            "reason": "INSTANCE_FAILED",
            "summary": "worker-0 on host-b exited 3",
            "instance": "worker-0",
            "exit_code": 3,
            "signal": None,
            "signal_sender": None,
            "rank": None,
            "rank_exit_code": None,
            "last_lines": ["no labels found"],
            "hint": None,
        },
        "priority": 5,
        "submitted_at": 1000.0,
        "started_at": 1017.0,
        "ended_at": 1019.5,
        "instances": [
            {
                "name": "master-0",
                "group": "master",
                "role": "master",
                "index": 0,
                "node": "host-a",
                "ip": "10.0.0.1",
                "state": "EXITED",
                "exit_code": None,
                "signal": None,
                "note": "stopped: worker-0 failed",
                "gpus": [],
                "variables": {},
            },
            {
                "name": "worker-0",
                "group": "worker",
                "role": "worker",
                "index": 1,
                "node": "host-b",
                "ip": "10.0.0.2",
                "state": "EXITED",
                "exit_code": 3,
                "signal": None,
                "note": None,
                "gpus": [],
                "variables": {},
            },
        ],
        "pending": None,
        "labels": {},
        "cluster": "east",
        "outputs": "/home/jobs/digits-1/outputs",
        "rdma": None,
        "abandoned": False,
        "index": None,
        "array": None,
        "spec": None,
        "kept_until": None,
        "attempts": [
            {
                "number": 0,
                "outcome": "FAILED",
                "reason": "INSTANCE_FAILED",
                "summary": "worker-0 on host-b exited 3",
                "exit_code": 3,
                "nodes": ["host-a", "host-b"],
                "ended_at": 1019.5,
            }
        ],
    }


@pytest.mark.parametrize(
    ("state", "reason", "exit_code", "signal", "status"),
    [
        (JobState.SUCCEEDED, Reason.COMPLETED, 0, None, 0),
        (JobState.FAILED, Reason.INSTANCE_FAILED, 3, None, 3),
        (JobState.FAILED, Reason.INSTANCE_FAILED, 0, None, 1),
        (JobState.FAILED, Reason.INSTANCE_FAILED, None, None, 125),
        (JobState.FAILED, Reason.INSTANCE_FAILED, None, 9, 137),
        (JobState.FAILED, Reason.INSTANCE_FAILED, 127, None, 127),
        (JobState.FAILED, Reason.OUT_OF_MEMORY, 1, None, 1),
        (JobState.FAILED, Reason.OUT_OF_MEMORY, None, 9, 137),
        (JobState.FAILED, Reason.RUN_TIMEOUT, None, None, 124),
        (JobState.FAILED, Reason.QUEUE_TIMEOUT, None, None, 124),
        (JobState.FAILED, Reason.START_TIMEOUT, None, None, 125),
        (JobState.FAILED, Reason.PREPARE_FAILED, None, None, 125),
        (JobState.FAILED, Reason.STAGE_FAILED, None, None, 125),
        (JobState.FAILED, Reason.PLAN_FAILED, None, None, 125),
        (JobState.FAILED, Reason.INSTANCE_LOST, None, None, 125),
        (JobState.STOPPED, Reason.STOP_REQUESTED, None, None, 130),
    ],
)
def test_the_exit_status_of_run_and_wait(
    state: JobState, reason: Reason, exit_code: int | None, signal: int | None, status: int
) -> None:
    verdict = Verdict(reason=reason, summary="…", exit_code=exit_code, signal=signal)
    job = JobInfo(
        id="digits-1",
        name="digits",
        user="ada",
        mode="ddp",
        state=state,
        reason=reason,
        attempt=0,
        exit_code=exit_code,
        verdict=None if state is JobState.SUCCEEDED else verdict,
        priority=5,
        submitted_at=1000.0,
    )
    assert job.exit_status == status


# Shipping: what an instance wrote takes longer to bring home than its processes take to end.


def gone(name: str) -> RunsGone:
    return RunsGone(1020.0, ATTEMPT, name)


def test_instances_that_only_ship_are_given_time() -> None:
    job = jobs.failing()
    ending = job.since + 10.0 + STOP_SLACK_S
    assert deadline(job) == ending
    job = after(job, gone("master-0"))
    assert deadline(job) == ending  # the other may be stuck
    job = after(job, gone("worker-0"))
    assert deadline(job) == job.since + 10.0 + SHIPPING_S
    assert deadline(after(job, StopRequested(1021.0, "now", force=True))) == 1021.0 + STOP_SLACK_S
    assert after(jobs.running(), gone("master-0")) == jobs.running()


def test_a_plan_is_made_once_for_an_attempt() -> None:
    job = jobs.running()
    assert plan_of(job) is plan_of(after(job, exited("worker-0", code=0)))


def test_last_lines_are_kept_in_the_verdict_alone() -> None:
    ended = Ended(1020.0, code=3, last_lines=("no such file",))
    job = after(jobs.running(), RunExited(1020.0, ATTEMPT, "worker-0", ended))
    assert job.verdict is not None and job.verdict.last_lines == ("no such file",)
    assert [item.ended.last_lines for item in job.instances if item.ended] == [()]


def test_a_member_of_an_array_takes_its_priority_wherever_it_is() -> None:
    """It comes back to the queue with it when it is preempted or tried again."""
    change = PriorityChanged(1020.0, 1, "priority 1, by ada")
    assert after(replace(jobs.running(), index=2), change).spec.priority == 1
    assert after(jobs.running(), change).spec.priority == 5
