"""The plans of ray jobs: nodes that have what their instances have, variables, the stand-in, who decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycontrol.backends import explain, leases, make_plan, plan_of
from raycontrol.errors import SpecError
from raycontrol.plan import (
    Brief,
    Facts,
    Plan,
    PlannedRun,
    RayNodesJoined,
    SharedSecret,
    orders,
    render,
    to_json,
)
from raycontrol.spec import JobSpec, Mode, members

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
BRIEF = Brief("digits-1", "digits", attempt=0, attempt_id="digits-1.0")


def plan(**fields: Any) -> Plan:
    """The plan of a job on nodes of their own."""
    job = JobSpec.from_dict(
        {"mode": "ray", "name": "digits", "command": "python train.py", "nodes": 3, **fields}
    )
    facts = []
    for member in members(job):
        gpu = member.resources.gpu
        ports = {
            "probe": "5000",
            **{purpose: f"4{place}00" for place, purpose in enumerate(leases(job.mode, member))},
        }
        facts.append(
            Facts(
                instance=member.name,
                ip=f"10.0.0.{member.index + 1}",
                node_name=f"host-{member.index}",
                ports=ports,
                gpus=tuple(str(number) for number in range(int(gpu) or (1 if gpu else 0))),
                private_dir=f"/scratch/{member.name}",
                python="/venv/bin/python",
                package_dir="/venv/raycontrol",
                temp_dir=f"/tmp/rc-{member.index}",
                memory=str(member.resources.memory or 4 << 30),
                object_store=str(1 << 30),
            )
        )
    return make_plan(job, BRIEF, tuple(facts))


def options(made: Plan, instance: str) -> dict[str, str]:
    """The options of an instance's `ray start`."""
    (node,) = made.stages[-2].runs[instance]
    words = node.command
    assert words[:2] == ("ray", "start")
    return {name: value for name, _, value in (str(word).partition("=") for word in words[2:])}


def test_the_plan_of_the_config() -> None:
    expected = json.loads((HERE / "plans" / "ray-job.json").read_text())
    made = plan_of(JobSpec.from_yaml(CONFIGS / "ray" / "job.yaml"))
    assert json.loads(json.dumps(to_json(made))) == expected


def test_every_instance_runs_a_node_and_the_head_the_start_command_when_all_have_joined() -> None:
    made = plan()
    join, start = made.stages
    assert set(join.runs) == {"head-0", "worker-0", "worker-1"}
    assert all(run.service for (run,) in join.runs.values())
    assert join.until == (RayNodesJoined("head-0", ("head-0", "worker-0", "worker-1")),)
    assert start.runs == {"head-0": (PlannedRun("start", "python train.py"),)}
    assert (made.deciders, made.servers, made.dispensable) == (
        {"head-0"},
        {"worker-0", "worker-1"},
        frozenset(),
    )


def test_a_node_says_that_it_has_what_its_instance_has() -> None:
    groups = {
        "head": {"resources": {"cpu": 2, "memory": "1GiB"}},
        "gpu": {"count": 1, "resources": {"cpu": 4, "gpu": 2}},
        "part": {"count": 1, "resources": {"gpu": 0.5}},
    }
    made = plan(nodes=None, groups=groups)
    wanted = ("--num-cpus", "--num-gpus", "--memory", "--object-store-memory", "--resources", "--labels")
    found = {name: [options(made, name)[option] for option in wanted] for name in made.environment}
    assert found == {
        "head-0": ["2", "0", "1073741824", "1073741824", '{"Rank:0": 1}', "group=head"],
        "gpu-0": ["4", "2", "4294967296", "1073741824", '{"Rank:1": 1}', "group=gpu"],
        "part-0": ["1", "1", "4294967296", "1073741824", '{"Rank:2": 1}', "group=part"],
    }


def test_ports_and_folders_are_the_jobs_own() -> None:
    made = plan()
    head, worker = options(made, "head-0"), options(made, "worker-1")
    assert (head["--port"], head["--ray-client-server-port"]) == ("4100", "4200")
    assert (head["--temp-dir"], worker["--temp-dir"]) == ("/tmp/rc-0/ray", "/tmp/rc-2/ray")
    assert made.environment["worker-1"]["RAY_TMPDIR"] == "/tmp/rc-2"
    assert worker["--address"] == "10.0.0.1:4100"
    assert (head["--include-dashboard"], head["--dashboard-port"]) == ("false", "0")
    for found in (head, worker):
        assert found["--min-worker-port"] == found["--max-worker-port"] == "0"
        assert found["--dashboard-agent-listen-port"] == "0"


def test_a_plain_ray_init_finds_the_jobs_own_cluster() -> None:
    made = plan()
    variables = made.environment["worker-1"]
    wanted = ("HEAD_ADDR", "HEAD_PORT", "RANK", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
    assert [variables[name] for name in wanted] == [
        "10.0.0.1",
        "4100",
        "2",
        "10.0.0.1:4100",
        "token",
        "/scratch/worker-1/ray/token",
    ]


def test_the_token_is_named_and_not_in_the_plan() -> None:
    made = plan()
    assert made.secret == SharedSecret("head-0", "ray/token")
    assert "head-0 makes a secret, which every instance has in ray/token" in render(made)
    assert orders(made, 0, "worker-1").secret == SharedSecret("head-0", "ray/token")


def test_a_dashboard_is_an_option() -> None:
    made = plan(ray={"dashboard": True})
    head = options(made, "head-0")
    assert (head["--include-dashboard"], head["--dashboard-host"]) == ("true", "10.0.0.1")


def test_workers_may_be_dispensable() -> None:
    made = plan(ray={"tolerate_worker_loss": True})
    assert made.dispensable == {"worker-0", "worker-1"}
    assert "to end earlier is no failure" in render(made)


def test_a_task_that_was_killed_for_memory_is_worth_advice() -> None:
    lines = ["Traceback (most recent call last):", "ray.exceptions.OutOfMemoryError: Task was killed due to"]
    cause = explain(Mode.RAY, lines)
    assert cause is not None and cause.advice is not None and "memory ran low" in cause.advice
    assert explain(Mode.RAY, ["Traceback (most recent call last):", "KeyError: 'memory'"]) is None


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (
            {"resources": {"cpu": 0.7}},
            "resources.cpu: must be a whole number in mode ray: Ray nodes have whole CPUs, 0.7 would become 0, got 0.7",
        ),
        (
            {"nodes": None, "groups": {"worker": {"count": 2, "resources": {"cpu": 1.5}}}},
            "groups.worker.resources.cpu: must be a whole number in mode ray: Ray nodes have whole CPUs, 1.5 would "
            "become 1, got 1.5",
        ),
        (
            {"resources": {"memory": "64MiB"}},
            "resources.memory: must be at least 256MiB in mode ray, for the node's object store takes up to 30 % of it, "
            "got 67108864",
        ),
        (
            {"nodes": None, "groups": {"head": {}, "worker": {"command": "python x.py"}}},
            "groups.worker.command: would never run: only the head's does in mode ray",
        ),
        (
            {"nodes": None, "groups": {"head": {}, **{f"w{number}": {} for number in range(6)}}},
            "groups: must have at most 5 groups of workers, got 6",
        ),
        (
            {"env": {"RAY_AUTH_MODE": "disabled"}},
            "env.RAY_AUTH_MODE: is set by raycontrol itself in mode ray and must not be given",
        ),
        ({"mode": "ddp", "ray": {"dashboard": True}}, "ray: is for mode ray only, not ddp"),
        ({"ray": {"dashbord": True}}, "ray.dashbord: unknown field, did you mean dashboard?"),
    ],
)
def test_one_fault(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(SpecError) as raised:
        JobSpec.from_dict({"command": "train", "mode": "ray", "nodes": 2, **fields})
    assert [str(found) for found in raised.value.faults] == [fault]


def test_null_means_not_given_in_ray_too() -> None:
    job = JobSpec.from_dict({"command": "x", "mode": "ray", "ray": {"dashboard": None}})
    assert not job.ray.dashboard


def test_five_groups_of_workers_are_enough_for_anybody() -> None:
    groups = {"head": {}, **{f"w{number}": {} for number in range(5)}}
    assert len(plan(nodes=None, groups=groups).environment) == 6
