"""A cluster that nobody has spoken to, used first, and only, through Ray's own jobs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import Cluster
from tests.hosts.jobs import accuracy
from tests.hosts.network import BIN, REPOSITORY, Hosts
from tests.support import wait_until

CONFIG = REPOSITORY / "configs/ddp"
HEAD, OTHER = 0, 1
TRAINING_S = 250


@pytest.fixture(scope="module")
def fresh(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts. Ray is started by absolute path, and nothing of raycontrol's is set anywhere."""
    with Hosts(2, keep=[tmp_path_factory.getbasetemp()]) as hosts:
        hosts.start_cluster()
        cluster = Cluster(hosts, Path("~/.raycontrol"))
        yield cluster
        cluster.close()


def test_the_first_call_is_a_ray_job_and_leaves_nothing_of_it_behind(fresh: Cluster) -> None:
    entrypoint: list[str | Path] = [BIN / "raycontrol", "run", "job.yaml"]
    submitted = ray_job(
        fresh, "submit", "--no-wait", "--submission-id=first", f"--working-dir={CONFIG}", "--", *entrypoint
    )
    assert submitted.returncode == 0, submitted.stdout
    # The job trains for many seconds; its actors are there to be looked at.
    instances = wait_until(lambda: actors(fresh, "rc:", 2), TRAINING_S, "the job's instances")
    assert [actor["runtime_env"] for actor in instances] == [{}, {}]
    (rays,) = actors(fresh, "_ray_internal_job_actor")
    assert "working_dir" in rays["runtime_env"]  # as ours would have had, by default
    followed = ray_job(fresh, "logs", "--follow", "first", timeout_s=TRAINING_S).stdout
    assert "SUCCEEDED" in followed and accuracy(followed) >= 0.95, followed[-6000:]
    assert "Job 'first' succeeded" in ray_job(fresh, "status", "first").stdout
    lasting = actors(fresh, "rc-", 4)
    assert "rc-controller" in [actor["name"] for actor in lasting]
    assert [actor["runtime_env"] for actor in lasting] == [{}] * 4  # controller, archive, two nodes

    assert ray_job(fresh, "delete", "first").returncode == 0
    before = controller(fresh)
    fresh.hosts.run(HEAD, ["kill", "-9", str(before["pid"])], check=True)
    second = fresh.raycontrol(OTHER, "run", "--nodes", "2", "--", "echo the second", timeout_s=120)
    assert second.returncode == 0, second.stderr
    assert sorted(second.stdout.splitlines()) == ["master-0 | the second", "worker-0 | the second"]
    assert controller(fresh)["pid"] != before["pid"]
    listed = fresh.json(OTHER, "list", "--all")
    assert [(info["name"], info["state"]) for info in listed] == [
        ("echo", "SUCCEEDED"),
        ("digits", "SUCCEEDED"),
    ]


@pytest.mark.long
def test_ray_job_stop_stops_the_job(fresh: Cluster) -> None:
    entrypoint: list[str | Path] = [BIN / "raycontrol", "run", "--name", "endless", "--", "sleep 600"]
    submitted = ray_job(fresh, "submit", "--no-wait", "--submission-id=endless", "--", *entrypoint)
    assert submitted.returncode == 0, submitted.stdout
    running = wait_until(lambda: jobs(fresh, "endless", "RUNNING"), 120, "the job runs")
    assert ray_job(fresh, "stop", "--no-wait", "endless").returncode == 0
    waited = fresh.raycontrol(OTHER, "wait", running[0]["id"], "--json", timeout_s=120)
    info = json.loads(waited.stdout)
    assert waited.returncode == 130
    assert (info["state"], info["reason"]) == ("STOPPED", "STOP_REQUESTED")
    assert info["verdict"]["summary"] == "SIGTERM sent to `raycontrol run`"
    wait_until(lambda: not actors(fresh, "rc:"), 30, "its actors are gone")


def ray_job(
    cluster: Cluster, *arguments: str | Path, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """`ray job …` on the host that is not the head; its stdout has stderr too."""
    address = {"RAY_ADDRESS": f"http://{cluster.hosts.ip(HEAD)}:8265", "RAY_AUTH_MODE": "disabled"}
    line = [BIN / "ray", "job", *arguments]
    process = cluster.hosts.popen(OTHER, line, env=address, stderr=subprocess.STDOUT)
    try:
        stdout, _ = process.communicate(timeout=timeout_s)
    except BaseException:
        process.end()
        raise
    return subprocess.CompletedProcess(list(map(str, line)), process.returncode, stdout)


def actors(cluster: Cluster, prefix: str, count: int = 1) -> list[dict[str, Any]]:
    """The living actors whose names begin so, or none while they are fewer than ``count``."""
    found = [actor for actor in cluster.ask()["actors"] if actor["name"].startswith(prefix)]
    return found if len(found) >= count else []


def controller(cluster: Cluster) -> dict[str, Any]:
    status: dict[str, Any] = cluster.json(OTHER, "controller", "status")
    return status


def jobs(cluster: Cluster, name: str, state: str) -> list[dict[str, Any]]:
    ran = cluster.raycontrol(OTHER, "list", "--json")
    listed: list[dict[str, Any]] = json.loads(ran.stdout) if ran.returncode == 0 else []
    return [info for info in listed if (info["name"], info["state"]) == (name, state)]
