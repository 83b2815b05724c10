"""Specs and clusters that lead nowhere: the command says so at once, and nothing is started."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from raycontrol import Client
from tests.ray.conftest import LocalRay, free_ports
from tests.ray.jobs import ended, spec


def test_forty_faults_are_named_in_one_answer(cluster: LocalRay, client: Client, tmp_path: Path) -> None:
    before = client.list(all=True)
    numbers = "\n".join(f"  NUMBER_{number}: {number}" for number in range(29))
    top = ["mode: mpp", "nodes: 0", "slots: none", "priority: 10", "placement: loose", "pipefail: maybe"]
    path = tmp_path / "job.yaml"
    path.write_text(
        "\n".join([*top, "comand: train.py", "resources: {cpu: 0, gpu: 1.5}", "timeouts: {grace_s: -1}"])
        + f"\nenv:\n{numbers}\n"
    )
    answer = cluster.raycontrol("submit", path)
    assert answer.returncode == 2
    assert "40 faults in the job's spec" in answer.stderr
    faults = [line.strip() for line in answer.stderr.splitlines() if line.startswith("  line ")]
    names = {name for name in FAULTY_FIELDS if any(f": {name}: " in fault for fault in faults)}
    assert names == FAULTY_FIELDS
    assert client.list(all=True) == before


FAULTY_FIELDS = {
    *("mode", "nodes", "slots", "priority", "placement", "pipefail", "comand", "command"),
    *("resources.cpu", "resources.gpu", "timeouts.grace_s"),
    *(f"env.NUMBER_{number}" for number in range(29)),
}


def test_an_address_where_nothing_listens(cluster: LocalRay) -> None:
    (port,) = free_ports(1)
    answer = cluster.raycontrol("submit", "--address", f"127.0.0.1:{port}", "--", "true")
    assert answer.returncode == 125
    assert answer.stderr.startswith(f"raycontrol: no Ray cluster answers at 127.0.0.1:{port} (")
    assert "start one with `ray start --head`" in answer.stderr


def test_an_address_of_something_else(cluster: LocalRay) -> None:
    """As when the dashboard's port is given for the cluster's. Ray itself would try for minutes."""
    dashboard = cluster.dashboard.removeprefix("http://")
    answer = cluster.raycontrol("run", "--address", dashboard, "--", "true")
    assert answer.returncode == 125
    assert "what listens there is not Ray's GCS, whose port is 6379" in answer.stderr


def test_an_address_that_never_answers(cluster: LocalRay) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        began = time.monotonic()
        answer = cluster.raycontrol("submit", "--address", f"127.0.0.1:{deaf.getsockname()[1]}", "--", "true")
        assert time.monotonic() - began < 40
    assert answer.returncode == 125
    assert "something listens there but does not answer" in answer.stderr


@pytest.mark.parametrize("address", ["127.0.0.1", "ray://127.0.0.1:10001"])
def test_an_address_that_is_none(cluster: LocalRay, address: str) -> None:
    answer = cluster.raycontrol("submit", "--address", address, "--", "true")
    assert answer.returncode in (2, 125)
    assert address in answer.stderr


def test_reading_goes_on_without_the_cluster(cluster: LocalRay, client: Client) -> None:
    job = client.submit(spec("echo kept"))
    info = ended(job)
    (port,) = free_ports(1)
    nowhere = {"RAY_ADDRESS": f"127.0.0.1:{port}"}
    listed = cluster.raycontrol("list", "--json", env=nowhere)
    assert (job.id, info.state) in [(item["id"], item["state"]) for item in json.loads(listed.stdout)]
    assert f"reading the store in {cluster.home}" in listed.stderr
    assert cluster.json("get", job.id, env=nowhere) == info.model_dump(mode="json")
    assert cluster.raycontrol("logs", "-f", job.id, env=nowhere).stdout == "master-0 | kept\n"
    assert cluster.raycontrol("wait", job.id, env=nowhere).returncode == 0
