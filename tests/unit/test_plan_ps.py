"""The plans of ps jobs: TF_CONFIG and the older variables, who reaches whom, who decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycontrol.backends import leases, make_plan, plan_of
from raycontrol.errors import SpecError
from raycontrol.plan import Brief, Facts, Plan, TcpReachable, render, to_json
from raycontrol.spec import Group, JobSpec, Mode, Success, members

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
BRIEF = Brief("digits-1", "digits", attempt=0, attempt_id="digits-1.0")
ADDRESSES = ("10.0.0.1", "10.0.0.2", "fd00::3")


def spec(**groups: dict[str, Any]) -> JobSpec:
    return JobSpec.from_dict({"mode": "ps", "name": "digits", "command": "train", "groups": groups})


def plan(job: JobSpec) -> Plan:
    """The plan on three nodes in turn; the port of an instance's task is 4000 and its INDEX."""
    facts = []
    for member in members(job):
        ports = {"probe": f"500{member.index}"}
        ports |= {purpose: f"400{member.index}" for purpose in leases(job.mode, member)}
        facts.append(Facts(member.name, ADDRESSES[member.index % 3], f"host-{member.index % 3}", ports))
    return make_plan(job, BRIEF, tuple(facts))


def config(made: Plan, instance: str) -> Any:
    return json.loads(made.environment[instance]["TF_CONFIG"] or "")


ALL = spec(ps={"count": 2}, chief={}, worker={"count": 2}, evaluator={})


def test_the_plan_of_the_config() -> None:
    expected = json.loads((HERE / "plans" / "ps-job.json").read_text())
    made = plan_of(JobSpec.from_yaml(CONFIGS / "ps" / "job.yaml"))
    assert json.loads(json.dumps(to_json(made))) == expected


def test_tf_config_names_the_tasks_of_the_cluster_by_address_and_each_its_own() -> None:
    made = plan(ALL)
    cluster = {
        "chief": ["10.0.0.1:4000"],
        "ps": ["10.0.0.2:4001", "[fd00::3]:4002"],
        "worker": ["10.0.0.1:4003", "10.0.0.2:4004"],
    }
    tasks = {
        "chief-0": ("chief", 0),
        "ps-0": ("ps", 0),
        "ps-1": ("ps", 1),
        "worker-0": ("worker", 0),
        "worker-1": ("worker", 1),
        "evaluator-0": ("evaluator", 0),
    }
    for name, (role, number) in tasks.items():
        assert config(made, name) == {
            "cluster": cluster,
            "task": {"type": role, "index": number},
            "environment": "cloud",
        }


def test_older_programs_find_lists_of_hosts() -> None:
    variables = plan(ALL).environment["worker-1"]
    wanted = ("PS_HOSTS", "WORKER_HOSTS", "JOB_NAME", "TASK_INDEX", "RANK", "WORLD_SIZE", "MASTER_ADDR")
    assert [variables[name] for name in wanted] == [
        "10.0.0.2:4001,[fd00::3]:4002",
        "10.0.0.1:4003,10.0.0.2:4004",
        "worker",
        "1",
        "4",
        "6",
        "10.0.0.1",
    ]


def test_groups_of_one_role_are_counted_together() -> None:
    made = plan(spec(ps={}, worker={"count": 2}, big={"count": 1, "command": "train --big"}))
    assert list(made.environment) == ["worker-0", "worker-1", "ps-0", "big-0"]
    assert config(made, "big-0")["task"] == {"type": "worker", "index": 2}
    assert config(made, "big-0")["cluster"]["worker"] == ["10.0.0.1:4000", "10.0.0.2:4001", "10.0.0.1:4003"]
    assert made.stages[-1].runs["big-0"][0].command == "train --big"


def test_without_parameter_servers_the_cluster_has_none() -> None:
    made = plan(spec(ps={"count": 0}, worker={"count": 2}))
    assert list(config(made, "worker-0")["cluster"]) == ["worker"]
    assert made.environment["worker-0"]["PS_HOSTS"] == ""


def test_who_decides_serves_and_may_finish() -> None:
    made = plan(ALL)
    assert made.deciders == {"chief-0"}
    assert made.servers == {"ps-0", "ps-1"}
    assert (made.finishers, made.finish_s) == ({"evaluator-0"}, 300)
    assert plan(spec(ps={}, worker={"count": 2})).deciders == {"worker-0", "worker-1"}
    everybody = plan(ALL.model_copy(update={"success": Success.ALL}))
    assert (len(everybody.deciders), everybody.servers, everybody.finishers) == (
        6,
        {"ps-0", "ps-1"},
        frozenset(),
    )
    assert "to end earlier is no failure" in render(everybody)


def test_everybody_but_the_evaluator_proves_its_way_to_those_it_talks_to() -> None:
    (prove, start) = plan(ALL).stages
    ways = {(way.source, way.target) for way in prove.until if isinstance(way, TcpReachable)}
    tasks = {"chief-0", "ps-0", "ps-1", "worker-0", "worker-1"}
    expected = {(name, "chief-0") for name in tasks} | {("chief-0", name) for name in tasks}
    expected |= {(name, server) for name in tasks for server in ("ps-0", "ps-1")}
    expected -= {(one, other) for one in ("ps-0", "ps-1") for other in ("ps-0", "ps-1")}
    order = ("chief-0", "ps-0", "ps-1", "worker-0", "worker-1")
    expected |= set(zip(order, (*order[1:], order[0]), strict=True))
    assert ways == {(source, target) for source, target in expected if source != target}
    assert set(start.runs) == tasks | {"evaluator-0"}
    assert [stage.name for stage in plan(spec(ps={"count": 0}, worker={})).stages] == ["start"]


def test_a_plan_is_said_in_words() -> None:
    text = render(plan(ALL))
    assert "mode ps, 6 instances; success when these exit 0: chief-0" in text
    assert "ps-0, ps-1: stopped when the others have ended; to end earlier is a failure" in text
    assert "evaluator-0: may go on for 300 s after that" in text


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"mode": "ddp", "success": "all"}, "success: is for mode ps only, not ddp"),
        ({"timeouts": {"evaluator_wait_s": 5}}, "timeouts.evaluator_wait_s: is for mode ps only, not ddp"),
        (
            {"mode": "ps"},
            "groups: must be given in mode ps, such as `groups: {ps: {count: 1}, worker: {count: 1}}`",
        ),
        (
            {"mode": "ps", "groups": {"ps": {}, "worker": {}, "chief": {"count": 2}}},
            "groups.chief.count: must be 1, a job has one chief, got 2",
        ),
        (
            {"mode": "ps", "groups": {"ps": {"count": 0}}},
            "groups: must have a group of workers in mode ps",
        ),
    ],
)
def test_one_fault(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(SpecError) as raised:
        JobSpec.from_dict({"command": "train", **fields})
    assert [str(found) for found in raised.value.faults] == [fault]


def test_a_spec_comes_back_from_the_store_as_it_was() -> None:
    job = JobSpec(mode=Mode.PS, command="train", groups={"ps": Group(count=0), "worker": Group()})
    assert JobSpec.from_dict(job.model_dump(mode="json")) == job
    assert JobSpec.from_dict(JobSpec(command="x").model_dump(mode="json")) == JobSpec(command="x")
