"""The environment contract, checked from outside, with two jobs at once on the same hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checker import Job, violations
from tests.hosts.conftest import Cluster
from tests.hosts.network import ENVIRONMENT, RAY_ENVIRONMENT
from tests.support import wait_until

PROBE = Path(__file__).parent / "probe"
HOSTS = range(3)

WORKER_ENVIRONMENT = """
import json, os, ray
ray.init(address={address!r}, log_to_driver=False)
print("ENV", json.dumps(ray.get(ray.remote(num_cpus=1)(lambda: dict(os.environ)).remote())))
"""


@pytest.fixture
def hold(cluster: Cluster) -> Iterator[None]:
    """Remove what ``--hold`` leaves in the hosts' /tmp."""
    yield
    for i in HOSTS:
        for path in held(cluster, i):
            path.unlink()
        (cluster.hosts.hosts[i].tmp / "hold").unlink(missing_ok=True)


def test_two_jobs_at_once_each_get_what_the_contract_promises(cluster: Cluster, hold: None) -> None:
    worker_env = environment_of_a_ray_worker(cluster)
    # From a host that is neither the head nor, as checked below, INDEX 0.
    runs = [cluster.popen(2, "run", PROBE / "job.yaml", stderr=subprocess.STDOUT) for _ in range(2)]
    wait_until(
        lambda: all(len(held(cluster, i)) == 4 for i in HOSTS), 120, "all processes of both jobs have met"
    )
    for i in HOSTS:
        (cluster.hosts.hosts[i].tmp / "hold").touch()
    printed = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(printed)[-4000:]
    jobs = [
        Job(
            documents(text),
            slots=(2, 2, 2),
            gpus=(2, 2, 2),
            name="probe",
            env={"GREETING": "hello from the spec"},
            files=("probe.py", "job.yaml"),
            node_env={**ENVIRONMENT, **RAY_ENVIRONMENT},
            worker_env=worker_env,
        )
        for text in printed
    ]
    assert violations(jobs) == []
    assert cluster.hosts.name(2) not in {
        one["hostname"] for job in jobs for one in job.documents if one["index"] == 0
    }


def held(cluster: Cluster, i: int) -> list[Path]:
    return list(cluster.hosts.hosts[i].tmp.glob("hold.*"))


def documents(text: str) -> list[dict[str, object]]:
    """The probe's documents among a job's printed lines, whatever prefix these have."""
    return [json.loads(line.split("PROBE ", 1)[1]) for line in text.splitlines() if "PROBE {" in line]


def environment_of_a_ray_worker(cluster: Cluster) -> dict[str, str]:
    program = WORKER_ENVIRONMENT.format(address=cluster.address)
    text = cluster.hosts.run(1, [sys.executable, "-c", program], env=cluster.env, check=True).stdout
    (line,) = [line for line in text.splitlines() if line.startswith("ENV ")]
    environment: dict[str, str] = json.loads(line.removeprefix("ENV "))
    return environment
