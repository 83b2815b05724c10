"""Fresh workers wait on a node for its next instances: with a real raylet."""

from __future__ import annotations

import psutil

from raycontrol import Client
from raycontrol.spareworkers import waiting_workers
from tests.ray.conftest import LocalRay
from tests.ray.jobs import WAIT_S, ended, spec
from tests.support import wait_until


def test_an_instance_takes_a_worker_that_waited_and_another_takes_its_place(
    cluster: LocalRay, client: Client
) -> None:
    ended(client.submit(spec("true")))
    raylet = next(pid for pid in cluster.pids() if psutil.Process(pid).name() == "raylet")
    waited = wait_until(lambda: waiting_workers(raylet), WAIT_S, "a worker waits")
    job = client.submit(spec("sleep 600"))
    wait_until(lambda: job.info().state == "RUNNING", WAIT_S, "RUNNING")
    (pid,) = [
        actor["pid"] for actor in cluster.ask()["actors"] if actor["name"].endswith(f"{job.id}.0:master-0")
    ]
    assert pid in waited
    wait_until(lambda: waiting_workers(raylet) - waited, WAIT_S, "another one waits")
    job.stop(force=True)
    ended(job)
