"""The session's own Ray answers, and the watch over it sees what a job could leave behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cluster_state import nothing_left as watch
from tests.ray.conftest import LocalRay


def test_one_node_with_the_resources_it_was_given(cluster: LocalRay) -> None:
    (node,) = cluster.ask()["nodes"]
    assert (node["total"]["CPU"], node["total"]["GPU"]) == (4, 4)
    assert cluster.address.startswith(f"{node['ip']}:")


def test_the_watch_sees_a_process_of_a_job_and_the_port_it_holds(cluster: LocalRay) -> None:
    program = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True);"
        " time.sleep(600)"
    )
    with pytest.raises(AssertionError) as failed, watch(cluster, within_s=0.2):
        left = cluster.popen([sys.executable, "-c", program], env={"RAYCONTROL_ATTEMPT_ID": "j.0"})
        assert left.stdout is not None
        port = left.stdout.readline().strip()
    left.kill()
    left.communicate()
    assert f"process {left.pid} " in str(failed.value) and "of attempt j.0" in str(failed.value)
    assert f"port {port} is held by process {left.pid} " in str(failed.value)


def test_what_a_driver_does_and_undoes_is_not_left_behind(cluster: LocalRay) -> None:
    program = (
        f"import ray; ray.init(address={cluster.address!r}, log_to_driver=False);"
        " print(ray.get(ray.remote(num_gpus=1)(lambda: 7).remote()))"
    )
    driver = cluster.popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    assert driver.communicate(timeout=60)[0].split() == ["7"]
