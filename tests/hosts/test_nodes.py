"""What the nodes say of themselves, and what a job uses while it runs, over three hosts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.hosts.conftest import Cluster
from tests.support import wait_until

BUSY = """python -c '
import time
held = bytearray(100 << 20)
while True:
    sum(range(10000))
    time.sleep(0.002)
'"""


def test_the_doctor_checks_every_node_and_says_what_to_do(cluster: Cluster) -> None:
    ran = cluster.raycontrol(1, "doctor", "--json")
    found = {(check["node"], check["name"]): check for check in json.loads(ran.stdout)}
    names = [cluster.hosts.name(i) for i in range(3)]
    assert ran.returncode == 0 and {node for node, _ in found} == set(names)
    for name in names:
        assert found[name, "GPUs in Ray"]["verdict"] == "warn"
        assert "this node has none: logical GPUs" in found[name, "GPUs in Ray"]["found"]
        assert found[name, "PyTorch"]["verdict"] == found[name, "network interface"]["verdict"] == "ok"
        assert found[name, "name look-ups"]["found"].startswith("2 peers, the slowest in ")
        assert found[name, "clock"]["verdict"] == "ok"
        lacks = "not set: RAY_preload_python_modules, RAY_worker_niceness"
        tables = "; Ray's tables are in memory only" if name == names[0] else ""
        assert found[name, "Ray's settings"]["found"] == lacks + tables


def test_a_node_shows_its_interfaces_and_which_one_is_rays(cluster: Cluster) -> None:
    name = cluster.hosts.name(2)
    node = cluster.json(0, "node", "show", name)
    (owner,) = [item for item in node["facts"]["interfaces"] if item["owns_ray_ip"]]
    assert (owner["name"], owner["addresses"][0]) == ("eth0", f"{cluster.hosts.ip(2)}/24")
    assert (node["total"]["CPU"], node["total"]["GPU"], node["head"]) == (4, 8, False)
    assert {look["ip"] for look in node["facts"]["lookups"]} == {cluster.hosts.ip(0), cluster.hosts.ip(1)}
    assert abs(node["facts"]["clock_offset_s"]) < 1
    shown = cluster.raycontrol(0, "node", "show", name, check=True).stdout
    assert f"{cluster.hosts.ip(2)}/24" in shown and "Ray's" in shown


def is_busy(sample: dict[str, Any]) -> bool:
    works = sample["processes"] == 1 and 1 < sample["cpu_percent"] < 110 and sample["gpus"] == []
    return works and 100 << 20 < sample["memory_bytes"] < 400 << 20


@pytest.mark.long
def test_top_shows_what_a_running_job_uses(cluster: Cluster) -> None:
    job_id = cluster.raycontrol(
        0, "submit", "--nodes", "2", "--cpu", "3", "--", BUSY, check=True
    ).stdout.strip()

    def both_are_busy() -> bool:
        usage = cluster.json(0, "get", job_id).get("usage", {}).values()
        return len(usage) == 2 and all(map(is_busy, usage))

    wait_until(both_are_busy, 60, "both instances have been sampled at work")
    (job,) = cluster.json(1, "top", "--once")["jobs"]
    assert (job["id"], [item["name"] for item in job["instances"]]) == (job_id, ["master-0", "worker-0"])
    assert job["instances"][0]["usage"]["processes"] == 1
    table = cluster.raycontrol(1, "top", job_id, "--once", check=True).stdout.splitlines()
    assert table[0].split()[:3] == ["JOB", "INSTANCE", "NODE"] and len(table) == 3
    assert [node["jobs"] for node in cluster.json(0, "nodes")].count([job_id]) == 2
    cluster.raycontrol(0, "stop", "--force", job_id, check=True)
    assert cluster.raycontrol(0, "wait", job_id).returncode == 130
