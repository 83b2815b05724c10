"""Instances that serve the others, those that may finish afterwards, and services: parameter servers, evaluators, Ray nodes."""

from __future__ import annotations

from typing import Any

import pytest

from raycontrol import backends
from raycontrol.demands import STOP_SLACK_S, deadline, duties
from raycontrol.events import (
    InstanceClosed,
    InstanceLost,
    InstancePrepared,
    NodesChosen,
    NodesReleased,
    NodesReserved,
    RunExited,
    RunsGone,
    ServiceEnded,
    StagePassed,
    StopInstance,
    StopRequested,
    TimePassed,
)
from raycontrol.job import Ended, Job, plan_of
from raycontrol.lifecycle import Step, advance
from raycontrol.parts import LEFT_EARLY_S
from raycontrol.placement import Assignment
from raycontrol.plan import Facts
from raycontrol.spec import Group, JobSpec, Mode, RayOptions, Success, Timeouts, members
from raycontrol.status import InstanceState, JobState, Reason
from tests.unit.lifecycle_jobs import after

ATTEMPT = "digits-1.0"
GROUPS = {"chief": Group(), "worker": Group(count=2), "ps": Group(count=2), "evaluator": Group()}
GRACE_S = 10.0


def running(**fields: Any) -> Job:
    """A running job whose start commands began at 1014 s."""
    spec = JobSpec(**{"name": "digits", "command": "train", "timeouts": Timeouts(grace_s=GRACE_S), **fields})
    job = Job("digits-1", "east", spec, "ada", submitted_at=1000.0, since=1000.0)
    gang = members(spec)
    rooms = tuple(Assignment(item.name, f"id-{item.name}", f"host-{item.name}", "10.0.0.1") for item in gang)
    job = after(job, NodesChosen(1010.0, rooms), NodesReserved(1011.0, ATTEMPT))
    for item in gang:
        ports = {purpose: "4000" for purpose in ("probe", *backends.leases(spec.mode, item))}
        job = after(
            job, InstancePrepared(1012.0, ATTEMPT, item.name, Facts(item.name, "10.0.0.1", "h", ports))
        )
    for stage in range(len(plan_of(job).stages)):
        for item in gang:
            job = after(job, StagePassed(1014.0, ATTEMPT, item.name, stage))
    assert job.state is JobState.RUNNING
    return job


def ps_job(**fields: Any) -> Job:
    return running(mode=Mode.PS, groups=GROUPS, **fields)


def ray_job(**fields: Any) -> Job:
    return running(mode=Mode.RAY, nodes=3, **fields)


def exited(name: str, code: int = 0, at: float = 1020.0) -> RunExited:
    return RunExited(at, ATTEMPT, name, Ended(at=at, code=code))


def node_ended(name: str, at: float = 1020.0, asked: bool = False) -> ServiceEnded:
    return ServiceEnded(
        at, ATTEMPT, name, "ray-node", Ended(at=at, code=1, last_lines=("raylet died",)), asked
    )


def being_stopped(job: Job) -> set[str]:
    return {command.instance for command in duties(job) if isinstance(command, StopInstance)}


def where(job: Job) -> tuple[JobState, JobState | None]:
    return job.state, job.after


# Who decides.


def test_the_chief_decides_and_then_only_the_evaluator_goes_on() -> None:
    job = after(ps_job(), exited("worker-0"), exited("chief-0", at=1030.0))
    assert where(job) == (JobState.STOPPING, JobState.SUCCEEDED)
    assert deadline(job) == 1030.0 + 300
    assert being_stopped(job) == {"chief-0", "worker-0", "worker-1"}
    job = after(job, exited("worker-1", code=143, at=1031.0))
    assert being_stopped(job) == {"chief-0", "worker-0", "worker-1", "ps-0", "ps-1"}
    job = after(job, exited("evaluator-0", at=1090.0))
    assert "evaluator-0" in being_stopped(job)
    assert deadline(job) == 1090.0 + 2 * GRACE_S + STOP_SLACK_S


def test_without_a_chief_all_workers_decide() -> None:
    job = running(mode=Mode.PS, groups={"ps": Group(), "worker": Group(count=2)})
    job = after(job, exited("worker-0"))
    assert job.state is JobState.RUNNING
    assert where(after(job, exited("worker-1"))) == (JobState.STOPPING, JobState.SUCCEEDED)


def test_success_of_all_means_every_instance() -> None:
    job = ps_job(success=Success.ALL)
    for name in ("chief-0", "worker-0", "worker-1", "evaluator-0", "ps-0"):
        job = after(job, exited(name))
        assert job.state is JobState.RUNNING
        assert deadline(job) is None
    assert where(after(job, exited("ps-1"))) == (JobState.STOPPING, JobState.SUCCEEDED)


@pytest.mark.parametrize("name", ["chief-0", "worker-1", "ps-0", "evaluator-0"])
def test_any_exit_but_0_fails_the_attempt_before_the_decision(name: str) -> None:
    job = after(ps_job(), exited(name, code=3))
    assert (*where(job), job.reason) == (JobState.STOPPING, JobState.FAILED, Reason.INSTANCE_FAILED)
    assert job.verdict is not None and (job.verdict.instance, job.verdict.exit_code) == (name, 3)


@pytest.mark.parametrize("name", ["worker-1", "ps-0", "evaluator-0"])
def test_and_none_after_it(name: str) -> None:
    job = after(ps_job(), exited("chief-0"), exited(name, code=3), TimePassed(1400.0))
    assert job.after is JobState.SUCCEEDED


def test_a_node_that_a_worker_has_ended_itself_leaves_the_others_needed() -> None:
    job = after(ray_job(), node_ended("worker-0", asked=True), node_ended("worker-1"))
    assert job.after is JobState.FAILED


# Evaluators.


def test_an_evaluator_that_takes_too_long_is_ended() -> None:
    job = after(ps_job(), exited("chief-0", at=1030.0))
    assert after(job, TimePassed(1329.0)) == job
    step = advance(job, TimePassed(1330.0))
    assert [note.message for note in step.notes] == ["evaluator-0 did not finish in time: ending it"]
    assert "evaluator-0" in being_stopped(step.job)
    assert deadline(step.job) == 1330.0 + 2 * GRACE_S + STOP_SLACK_S


def test_a_limit_of_the_run_holds_for_the_evaluator_too() -> None:
    job = ps_job(timeouts=Timeouts(run_s=100))
    job = after(job, exited("chief-0", at=1030.0))
    assert deadline(job) == job.finish_by == 1114.0
    assert after(job, TimePassed(1114.0)).after is JobState.SUCCEEDED


@pytest.mark.parametrize("force", [False, True])
def test_a_stop_does_not_wait_for_the_evaluator_and_leaves_the_success(force: bool) -> None:
    job = after(ps_job(), exited("chief-0"), StopRequested(1040.0, "asked by ada", force=force))
    assert job.after is JobState.SUCCEEDED
    assert "evaluator-0" in being_stopped(job)


def test_an_evaluator_that_is_lost_is_not_waited_for() -> None:
    job = after(ps_job(), exited("chief-0"), InstanceLost(1040.0, ATTEMPT, "evaluator-0", "its node left"))
    assert (job.after, job.finish_by) == (JobState.SUCCEEDED, None)


# Servers.


def test_a_server_that_exits_0_early_fails_the_attempt_unless_the_deciders_follow() -> None:
    job = after(ps_job(), exited("ps-1", at=1020.0))
    assert (job.state, deadline(job)) == (JobState.RUNNING, 1020.0 + LEFT_EARLY_S)
    assert after(job, exited("chief-0", at=1021.0)).after is JobState.SUCCEEDED
    job = after(job, TimePassed(1020.0 + LEFT_EARLY_S))
    assert (*where(job), job.reason) == (JobState.STOPPING, JobState.FAILED, Reason.INSTANCE_FAILED)
    assert job.verdict is not None
    assert job.verdict.summary == "ps-1 on host-ps-1 exited 0 before the job's work was done"


def test_news_of_deciders_that_waits_for_the_controller_is_not_too_late() -> None:
    """It was away for longer than the deciders have; its clock is the first that it hears."""
    failed = after(ps_job(), exited("ps-1", at=1020.0), TimePassed(1060.0))
    assert failed.after is JobState.FAILED
    job = after(failed, exited("chief-0", at=1021.0))
    assert (job.after, job.reason, job.verdict) == (JobState.SUCCEEDED, Reason.COMPLETED, None)
    for too_late in (
        exited("chief-0", at=1031.0),
        exited("chief-0", code=3, at=1021.0),
        exited("worker-0", at=1021.0),
    ):
        assert after(failed, too_late).after is JobState.FAILED


def test_servers_are_stopped_when_those_that_use_them_have_saved_their_work() -> None:
    job = after(ps_job(), StopRequested(1040.0, "asked by ada"))
    users = ("chief-0", "worker-0", "worker-1", "evaluator-0")
    assert being_stopped(job) == set(users)
    assert deadline(job) == 1040.0 + 2 * GRACE_S + STOP_SLACK_S
    for name in users:
        assert "ps-0" not in being_stopped(job)
        job = after(job, RunsGone(1041.0, ATTEMPT, name))
    assert {"ps-0", "ps-1"} <= being_stopped(job)


def test_so_are_those_that_have_to_exit_0_themselves() -> None:
    job = after(ps_job(success=Success.ALL), exited("worker-0", code=3))
    assert being_stopped(job) == {"chief-0", "worker-0", "worker-1", "evaluator-0"}


def test_by_force_all_are_stopped_at_once() -> None:
    job = after(ps_job(), StopRequested(1040.0, "asked by ada", force=True))
    assert being_stopped(job) == {item.name for item in job.instances}


# Ray nodes.


@pytest.mark.parametrize("name", ["head-0", "worker-1"])
def test_a_ray_node_that_ends_fails_the_job(name: str) -> None:
    job = after(ray_job(), node_ended(name))
    assert (*where(job), job.reason) == (JobState.STOPPING, JobState.FAILED, Reason.INSTANCE_FAILED)
    assert job.verdict is not None
    assert job.verdict.summary == f"{name} on host-{name}: its ray-node exited 1"
    assert job.verdict.last_lines == ("raylet died",)
    assert job.instance(name).note == f"{name}: its ray-node exited 1"


def test_a_start_command_that_fails_after_a_node_has_ended_is_not_the_first_cause() -> None:
    job = after(ray_job(), exited("head-0", code=1, at=1021.0), node_ended("worker-1", at=1020.0))
    assert job.verdict is not None and job.verdict.instance == "worker-1"
    job = after(ray_job(), exited("head-0", code=1, at=1021.0), node_ended("worker-1", at=1022.0))
    assert job.verdict is not None and job.verdict.instance == "head-0"


def test_a_node_that_the_start_command_has_ended_itself_is_no_failure() -> None:
    job = after(ray_job(), node_ended("head-0", asked=True), node_ended("worker-0", at=1080.0))
    assert job.state is JobState.RUNNING
    assert after(job, exited("head-0")).after is JobState.SUCCEEDED


def test_the_loss_of_a_worker_can_be_tolerated() -> None:
    tolerant = ray_job(ray=RayOptions(tolerate_worker_loss=True))
    job = after(tolerant, node_ended("worker-0"), InstanceLost(1021.0, ATTEMPT, "worker-1", "its node left"))
    assert job.state is JobState.RUNNING
    assert [item.state for item in job.instances] == [
        InstanceState.RUNNING,
        InstanceState.EXITED,
        InstanceState.LOST,
    ]
    assert advance(job, node_ended("worker-0", at=1022.0)).job == job  # told again
    assert advance(job, node_ended("worker-1", at=1022.0)).job == job  # told late
    assert after(job, exited("head-0")).after is JobState.SUCCEEDED
    for event in (node_ended("head-0"), InstanceLost(1021.0, ATTEMPT, "head-0", "its node left")):
        assert after(tolerant, event).after is JobState.FAILED


def test_worker_nodes_are_stopped_when_the_head_has_nothing_left() -> None:
    job = after(ray_job(), StopRequested(1040.0, "asked by ada"))
    assert being_stopped(job) == {"head-0"}
    assert being_stopped(after(job, RunsGone(1041.0, ATTEMPT, "head-0"))) == {
        "head-0",
        "worker-0",
        "worker-1",
    }
    # The start command has ended: there is nothing to save, and nobody waits for anybody.
    assert being_stopped(after(ray_job(), exited("head-0"))) == {"head-0", "worker-0", "worker-1"}


def test_a_job_that_is_over_stays_as_it_is() -> None:
    closed = [InstanceClosed(1050.0, ATTEMPT, name) for name in ("head-0", "worker-0", "worker-1")]
    job = after(ray_job(), exited("head-0"), *closed, NodesReleased(1051.0, ATTEMPT))
    assert job.state is JobState.SUCCEEDED
    assert advance(job, node_ended("worker-0", at=1010.0)) == Step(job)
