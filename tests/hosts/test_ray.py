"""Ray jobs over three hosts, inside a Ray cluster that has all the default ports: what works in them, and how they end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hosts import jobs
from tests.hosts.conftest import Cluster
from tests.hosts.jobs import PROGRAMS, accuracy, succeeded
from tests.hosts.network import BIN, REPOSITORY, HostProcess
from tests.support import wait_until

ALONE = ("--mode", "ray", "--working-dir", str(PROGRAMS), "--set", "timeouts.grace_s=10")
TWO = (*ALONE, "--nodes", "2")
THREE = (*ALONE, "--nodes", "3")
UP_S = 120
long = pytest.mark.long


def spec_file(cluster: Cluster, name: str, **fields: Any) -> Path:
    """The file of a ray job with these fields."""
    path = cluster.hosts.shared / f"{name}.json"
    common = {"mode": "ray", "working_dir": str(PROGRAMS), "timeouts": {"grace_s": 10}}
    path.write_text(json.dumps({**common, **fields}))
    return path


# What works in a job.


def test_the_first_script_of_every_introduction_and_what_ray_says(cluster: Cluster) -> None:
    """`ray stop` ends the node of the job's own cluster that it is called on, also in an activated environment."""
    # What `ray status` shows is some seconds old: it may be of a time when the nodes were still coming.
    status = "for n in {1..30}; do ray status | grep '/3.0 CPU' && break; sleep 0.5; done"
    line = f"python ray_counter.py && {status}; stat -c 'mode %a' $RAY_TMPDIR && . {BIN}/activate && ray stop --force"
    ran = succeeded(cluster, 1, *THREE, "--", line)
    said = ran.lines("head-0")
    assert "mode 700" in said
    assert "[1, 1, 1, 1]" in said
    assert any(re.fullmatch(r"[0-3]\.0/3\.0 CPU", line.strip()) for line in said), said
    assert said[-1].endswith("no other Ray on this machine was touched")
    assert len([node for node in cluster.ask()["nodes"]]) == 3


@long
def test_five_groups_of_workers_with_resources_of_their_own(cluster: Cluster) -> None:
    groups: dict[str, dict[str, Any]] = {
        "head": {},
        "small": {"count": 2},
        "large": {"resources": {"cpu": 2}},
        "gpu": {"resources": {"gpu": 2}},
        "half-gpu": {"resources": {"gpu": 0.5}},
        "fat": {"resources": {"memory": "512MiB"}},
    }
    workers = list(groups)[1:]
    spec = spec_file(
        cluster,
        "groups",
        placement="pack",
        groups=groups,
        command=["python", "ray_groups.py", *workers],
    )
    ran = succeeded(cluster, 0, spec)
    found = json.loads(next(line for line in ran.lines("head-0") if line.startswith("{")))
    names = ["head-0", "small-0", "small-1", "large-0", "gpu-0", "half-gpu-0", "fat-0"]
    assert found["by_rank"] == {f"Rank:{rank}": name for rank, name in enumerate(names)}
    assert {group: name.rpartition("-")[0] for group, name in found["by_group"].items()} == {
        group: group for group in workers
    }
    assert [name for name, _ in found["with_gpu"]] == ["gpu-0", "half-gpu-0"]
    assert all(len(devices.split(",")) == 1 for _, devices in found["with_gpu"])
    assert (found["cpus"], found["gpus"]) == (8, 3)
    assert len({item["ip"] for item in ran.info["instances"]}) > 1


@long
def test_the_example_of_the_documentation(cluster: Cluster) -> None:
    ran = succeeded(cluster, 2, REPOSITORY / "configs" / "ray" / "job.yaml", "--set", "placement=strict")
    assert accuracy(ran.told.rpartition("step 300/300")[2]) >= 0.95


@long
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("ray_data.py", "rows 334 sum 333666"),
        ("ray_tune.py", "trials 3 best 3"),
        ("ray_train.py", "world 2, "),
    ],
)
def test_rays_own_libraries(cluster: Cluster, program: str, words: str) -> None:
    folder = cluster.hosts.shared / program
    spec = spec_file(
        cluster,
        program,
        nodes=3,
        command=f"python {program} {folder}",
        resources={"cpu": 2, "memory": "1GiB"},
    )
    ran = succeeded(cluster, 0, spec)
    assert any(line.startswith(words) for line in ran.lines("head-0")), ran.told[-4000:]
    if program == "ray_train.py":
        assert accuracy(ran.told) >= 0.9


@long
def test_with_the_dashboard_jobs_can_be_submitted_to_the_jobs_own_cluster(cluster: Cluster) -> None:
    line = "ray job submit --working-dir . -- python ray_counter.py"
    ran = succeeded(cluster, 0, *THREE, "--set", "ray.dashboard=true", "--", line)
    assert "[1, 1, 1, 1]" in ran.told
    assert "succeeded" in ran.told


# How it ends.


@long
def test_a_driver_that_raises_fails_the_job_with_its_words(cluster: Cluster) -> None:
    ran = jobs.run(cluster, 0, *ALONE, "--", "python ray_ends.py raise")
    assert (ran.status, ran.info["verdict"]["instance"]) == (1, "head-0")
    assert "ValueError: no labels found" in ran.info["verdict"]["last_lines"]


@long
def test_a_task_that_takes_too_much_memory_is_killed_and_the_verdict_says_so(cluster: Cluster) -> None:
    memory = psutil.virtual_memory()
    threshold = (memory.total - memory.available + (3 << 30)) / memory.total
    spec = spec_file(
        cluster,
        "hungry",
        command="python ray_ends.py hungry",
        env={"RAY_memory_usage_threshold": f"{threshold:.3f}", "RAY_task_oom_retries": "0"},
    )
    ran = jobs.run(cluster, 0, spec)
    assert (ran.status, ran.info["verdict"]["instance"]) == (1, "head-0")
    assert "the machine's memory ran low" in ran.info["verdict"]["hint"], ran.told[-4000:]


@pytest.mark.parametrize(
    ("instance", "victim"), [("head-0", "gcs_server"), pytest.param("worker-0", "raylet", marks=long)]
)
def test_a_node_of_the_jobs_cluster_that_is_killed_fails_the_job(
    cluster: Cluster, instance: str, victim: str
) -> None:
    process, job_id = under_way(cluster, *TWO)
    kill_inside(cluster, job_id, instance, victim)
    ran = jobs.ended(process)
    verdict = ran.info["verdict"]
    assert (ran.status, ran.info["reason"], verdict["instance"]) == (125, "INSTANCE_FAILED", instance)
    assert "its ray-node exited 1" in verdict["summary"]
    assert any(victim in line for line in verdict["last_lines"]), verdict


@long
def test_the_loss_of_a_worker_can_be_tolerated(cluster: Cluster) -> None:
    process, job_id = under_way(cluster, *THREE, "--set", "ray.tolerate_worker_loss=true")
    kill_inside(cluster, job_id, "worker-1", "raylet")
    wait_until(lambda: state_of(cluster, job_id, "worker-1") == "EXITED", UP_S, "the loss is known")
    info = cluster.json(0, "get", job_id)
    assert info["state"] == "RUNNING"
    assert "its ray-node exited 1" in info["instances"][2]["note"]
    cluster.raycontrol(0, "stop", job_id, check=True)
    assert jobs.ended(process).info["state"] == "STOPPED"


def test_a_node_that_cannot_start_says_why(cluster: Cluster) -> None:
    spec = spec_file(
        cluster,
        "no-ray",
        groups={"head": {}, "worker": {"env": {"RAY_NUM_REDIS_GET_RETRIES": "not a number"}}},
        command="python ray_counter.py",
    )
    ran = jobs.run(cluster, 0, spec)
    verdict = ran.info["verdict"]
    assert (ran.status, verdict["instance"]) == (125, "worker-0")
    assert any("not a number" in line for line in verdict["last_lines"]), verdict


# -- a job under way, and its insides


def under_way(cluster: Cluster, *options: str) -> tuple[HostProcess, str]:
    """A job whose driver is up and waits, and its id."""
    up = cluster.hosts.shared / "driver-is-up"
    up.unlink(missing_ok=True)
    process = jobs.start(cluster, 0, *options, "--", f"python ray_ends.py stay {up}")
    wait_until(lambda: up.exists() and up.read_text(), UP_S, "the driver is up")
    return process, up.read_text()


def kill_inside(cluster: Cluster, job_id: str, instance: str, name: str) -> None:
    """Kill -9 a process of that name that belongs to the instance."""
    marks = {f"RAYCONTROL_JOB_ID={job_id}", f"RAYCONTROL_INSTANCE={instance}"}
    found = [
        psutil.Process(pid)
        for pid in cluster.pids()
        if marks <= set(Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"))
    ]
    (victim,) = [process for process in found if process.name() == name]
    victim.kill()


def state_of(cluster: Cluster, job_id: str, instance: str) -> str:
    items = cluster.json(0, "get", job_id)["instances"]
    return next(str(item["state"]) for item in items if item["name"] == instance)
