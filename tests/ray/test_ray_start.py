"""How the session's Ray was started, as its controller finds it out, and the priority that the head's actors have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from raycontrol import Client
from tests.ray.conftest import KEEPALIVE, LocalRay

RISE = "import os; os.nice(3); os.setpriority(os.PRIO_PROCESS, 0, 0)"
REFUSED = """
import os
from raycontrol.actors import regain_priority
os.nice(3)
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
regain_priority()
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


def test_the_doctor_says_what_rays_start_lacked(cluster: LocalRay, client: Client) -> None:
    (node,) = client.nodes(check=True)
    assert node.facts is not None and node.facts.ray is not None
    assert node.facts.ray.model_dump() == {"raylet": KEEPALIVE, "gcs": KEEPALIVE, "storage": "memory"}
    (found,) = [item for item in cluster.json("doctor") if item["name"] == "Ray's settings"]
    assert (found["verdict"], found["found"]) == (
        "warn",
        "not set: RAY_health_check_period_ms, RAY_health_check_timeout_ms, RAY_health_check_failure_threshold, "
        "RAY_preload_python_modules, RAY_worker_niceness; Ray's tables are in memory only",
    )


def test_the_heads_actors_regain_the_priority_that_ray_took(cluster: LocalRay, client: Client) -> None:
    if subprocess.run([sys.executable, "-c", RISE], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this user may not raise a priority")
    client.list()
    assert priorities(cluster, "ray::ControllerActor") == {0}
    assert priorities(cluster, "ray::ArchiveActor") == {0}
    assert 15 in priorities(cluster, "ray::NodeActor")


def test_where_it_may_not_be_raised_a_priority_stays_as_it_is() -> None:
    ran = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.returncode) == ("3\n", 0), ran.stderr


def priorities(cluster: LocalRay, title: str) -> set[int]:
    """The nice values of all threads of the actor with this title."""
    (pid,) = [pid for pid in cluster.pids() if psutil.Process(pid).cmdline()[:1] == [title]]
    return {nice_of(task) for task in Path(f"/proc/{pid}/task").iterdir()}


def nice_of(task: Path) -> int:
    return int((task / "stat").read_text().rpartition(")")[2].split()[16])
