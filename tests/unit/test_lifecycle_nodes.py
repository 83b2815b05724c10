"""How many nodes of a range an attempt has, and what becomes of one whose node is drained."""

from __future__ import annotations

from dataclasses import replace

from raycontrol import backends
from raycontrol.events import NodeDrained, NodesChosen, NodesRefused, NodesReleased
from raycontrol.job import Job
from raycontrol.jobrows import read_job, row_of
from raycontrol.lifecycle import advance
from raycontrol.spec import JobSpec, Retry
from raycontrol.status import JobState
from tests.unit.lifecycle_jobs import ASSIGNMENTS, ATTEMPT, after, closed, exited, queued, running


def ranged() -> Job:
    job = queued()
    return replace(job, spec=job.spec.sized("1-4"))


def test_the_chosen_number_is_the_attempts_and_is_stored_with_it() -> None:
    placed = after(ranged(), NodesChosen(1005.0, ASSIGNMENTS))
    assert [item.name for item in placed.instances] == ["master-0", "worker-0"]
    assert (placed.spec.nodes, placed.nodes_range) == (2, "1-4")
    assert read_job(row_of(placed)) == placed


def test_another_attempt_decides_anew() -> None:
    refused = after(ranged(), NodesChosen(1005.0, ASSIGNMENTS), NodesRefused(1006.0, ATTEMPT, "gone"))
    back = after(refused, NodesReleased(1007.0, ATTEMPT))
    assert (back.state, back.spec.nodes, back.nodes_range) == (JobState.QUEUED, "1-4", None)
    alone = after(back, NodesChosen(1008.0, ASSIGNMENTS[:1]))
    assert ([item.name for item in alone.instances], alone.spec.nodes) == (["master-0"], 1)


def test_the_plan_of_a_range_is_that_of_its_largest() -> None:
    spec = JobSpec(command="torchrun train.py", nodes="2-3")
    assert backends.plan_of(spec) == backends.plan_of(spec.sized(3))
    assert backends.plan_of(spec).environment["worker-1"]["WORLD_SIZE"] == "3"


def test_a_drained_node_is_told_once_and_the_attempt_goes_on() -> None:
    step = advance(running(), NodeDrained(1030.0, "host-b", "fan (ada)"))
    assert [note.message for note in step.notes] == [
        "host-b is offline: fan (ada); this attempt may end there"
    ]
    assert (step.job.state, step.commands) == (JobState.RUNNING, ())
    assert advance(step.job, NodeDrained(1031.0, "host-b", "fan (ada)")).notes == ()
    assert advance(step.job, NodeDrained(1031.0, "host-z", "fan (ada)")).notes == ()


def test_a_retry_leaves_a_drained_node() -> None:
    job = running()
    job = replace(job, spec=job.spec.model_copy(update={"retry": Retry(max=1)}))
    ends = (exited("worker-0", 1040.0, code=1), closed("worker-0", 1041.0), closed("master-0", 1041.0))
    assert after(job, *ends).after is JobState.PLACING
    assert after(job, NodeDrained(1030.0, "host-b", "fan"), *ends).after is JobState.QUEUED
